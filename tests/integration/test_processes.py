"""Plain processes: what only they have to care about. What every runner does is in tests/contract/test_runner.py."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nodeagent.process_cleanup import stop_all
from nodeagent.process_output import drop_beginning
from nodeagent.process_table import marked_key, process_of
from nodeagent.processes import ProcessRunner
from nodeagent.runner import OUTPUT_DROPPED, Observed
from tests.contract.test_runner import KEY, container, end_of, grant, observe, output, until


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "tasks"
    stop_all(tmp_path / "tasks", grace_seconds=0.1)


def runner_of(folder: Path, **options: int) -> ProcessRunner:
    return ProcessRunner("n1", "test", folder, **options)


async def start(runner: ProcessRunner, script: str) -> None:
    settings = container("sh", "-c", script)
    await runner.start(grant(settings), settings)


def shell_pid(folder: Path) -> int:
    return int((folder / str(KEY) / "shell").read_text().split()[0])


async def test_a_pid_that_was_used_again_is_not_taken_for_the_task(folder: Path) -> None:
    runner = runner_of(folder)
    await start(runner, "sleep 100")
    record = folder / str(KEY) / "shell"
    text = record.read_text()
    stop_all_but_files(folder)
    mine = process_of(os.getpid())
    assert mine is not None
    fields = text.rpartition(")")[2].split()
    record.write_text(
        f"{os.getpid()} (sh) {' '.join(fields)}"
    )  # our pid, with the start time of the dead shell
    task = await observe(runner_of(folder))
    assert task is not None
    assert (task.state, task.exit_code) == (Observed.EXITED, 137)
    await runner_of(folder).stop(KEY, 0)  # and nobody is killed for it
    assert process_of(os.getpid()) == mine


async def test_a_killed_shell_is_an_end_that_says_what_is_known(folder: Path) -> None:
    runner = runner_of(folder)
    await start(runner, "sleep 100")
    stop_all_but_files(folder)
    task = await end_of(runner)
    assert task.exit_code == 137
    assert "shell was killed" in task.detail
    assert task.ended_at_ms is not None


async def test_a_reboot_of_the_machine_ends_every_task(folder: Path) -> None:
    runner = runner_of(folder)
    await start(runner, "sleep 100")
    record = folder / str(KEY) / "task.json"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    record.write_text(record.read_text().replace(boot, "an-earlier-boot"))
    task = await observe(runner)
    assert task is not None
    assert (task.state, task.detail) == (Observed.EXITED, "the machine was started anew")


async def test_what_a_command_leaves_behind_ends_with_it(folder: Path) -> None:
    runner = runner_of(folder)
    await start(runner, "setsid sleep 1234.5 & exit 0")
    assert (await end_of(runner)).exit_code == 0

    async def is_gone() -> bool:
        await runner.list()
        return not marked(folder)

    await until(is_gone)


async def test_stopping_reaches_children_that_left_the_session(folder: Path) -> None:
    runner = runner_of(folder)
    await start(runner, "setsid sleep 1234.5 & wait")
    await until(lambda: _more_than(folder, 2))
    await runner.stop(KEY, 1)
    assert marked(folder) == []


async def test_two_trials_on_one_machine_do_not_touch_each_other(folder: Path, tmp_path: Path) -> None:
    first, second = runner_of(folder), runner_of(tmp_path / "other")
    await start(first, "sleep 100")
    assert await second.list() == ()
    await second.stop(KEY, 0)
    stop_all(tmp_path / "other")
    task = await observe(first)
    assert task is not None
    assert task.state is Observed.RUNNING


async def test_stop_all_ends_everything_and_leaves_no_folder(folder: Path) -> None:
    runner = runner_of(folder)
    await start(runner, "trap '' TERM; while :; do sleep 0.1; done")
    await asyncio.to_thread(stop_all, folder, 0.2)
    assert marked(folder) == []
    assert not folder.exists()
    stop_all(folder)


async def test_an_odd_folder_among_the_tasks_is_left_alone_up_2(folder: Path) -> None:
    runner = runner_of(folder)
    (folder / "notes").mkdir()
    (folder / "job.1.0").mkdir()
    (folder / "job.1.0" / "task.json").write_text("{")
    (folder / "file.1.0").write_text("")
    assert await runner.list() == ()


async def test_output_beyond_its_limit_keeps_the_end_and_says_so_ob_2(folder: Path) -> None:
    runner = runner_of(folder, output_kept_bytes=100_000)

    async def watch() -> None:
        async for _ in runner.events():
            pass

    watching = asyncio.create_task(watch())
    await start(
        runner,
        "i=0; while [ $i -lt 30 ]; do head -c 50000 /dev/zero | tr '\\0' x; sleep 0.1; i=$((i+1)); done; echo END",
    )
    await end_of(runner)
    said = await output(runner)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert said.startswith(OUTPUT_DROPPED)
    assert said.endswith(b"xEND\n")
    assert 100_000 <= len(said) < 1_000_000
    assert await output(runner, tail_bytes=4) == b"END\n"


def test_only_what_is_too_long_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "stdout"
    path.write_bytes(b"a" * 20_000)
    drop_beginning(path, 10_000)
    assert path.read_bytes() == b"a" * 20_000
    path.write_bytes(b"a" * 30_000)
    drop_beginning(path, 10_000)
    data = path.read_bytes()
    assert len(data) == 30_000
    assert 10_000 <= len(data.lstrip(b"\0")) < 10_000 + 4096
    drop_beginning(tmp_path / "missing", 1)


def marked(folder: Path) -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if marked_key(folder, pid) is not None]


async def _more_than(folder: Path, count: int) -> bool:
    return len(marked(folder)) > count


def stop_all_but_files(folder: Path) -> None:
    """As an operator's kill -9 of everything would; also of what was being started meanwhile."""
    while left := marked(folder):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.sched_yield()
