"""What every Runner must do, held against real processes and a real Docker Engine: one suite for both."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from attrs import evolve

from jobspecs.container import ContainerSettings, Grant
from nodeagent.containers import DockerRunner
from nodeagent.process_cleanup import stop_all
from nodeagent.processes import ProcessRunner
from nodeagent.runner import (
    LaunchFailed,
    LogsUnknown,
    Observed,
    ObservedTask,
    Runner,
    TaskKey,
)
from tests.docker_engine import IMAGE, DockerEngine
from vgpu.isolation.settings import GpuSettings
from vgpu.slices import Slice

KEY = TaskKey("0000000000000001", 1, 0)
SLICE = Slice("GPU-a", 1024, 500, "timeslice")
MakeRunner = Callable[[], Runner]


def container(*command: str, task: int = 0, **changes: object) -> ContainerSettings:
    settings = ContainerSettings(
        task=task,
        image=IMAGE,
        command=command,
        env={"GREETING": "hello"},
        gpu=GpuSettings(),
        cpu_milli=500,
        memory_mib=64,
        shm_mib=16,
        stop_grace_seconds=1,
        labels={
            "serai.job": KEY.job,
            "serai.attempt": "1",
            "serai.task": str(task),
            "serai.tenant": "a",
            "serai.cluster": "test",
        },
        slices=(SLICE,),
    )
    return evolve(settings, **changes)


def grant(*containers: ContainerSettings) -> Grant:
    return Grant("n1", KEY.job, KEY.attempt, "a", containers, granted_at_ms=0)


@pytest.fixture(params=["process", pytest.param("docker", marks=pytest.mark.docker)])
def make_runner(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    """Each call gives a new runner for the same node: what an agent has after it was restarted."""
    if request.param == "process":
        yield lambda: ProcessRunner("n1", "test", tmp_path / "tasks")
        stop_all(tmp_path / "tasks")
        return
    engine: DockerEngine = request.getfixturevalue("docker_engine")
    yield lambda: DockerRunner("n1", "test", engine.socket)
    client = engine.client()
    for left in client.containers.list(all=True, filters={"label": "serai.cluster=test"}):
        left.remove(force=True)
    client.close()


@pytest.fixture
async def runner(make_runner: MakeRunner) -> AsyncIterator[Runner]:
    made = make_runner()
    yield made
    await made.close()


async def observe(runner: Runner, key: TaskKey = KEY) -> ObservedTask | None:
    return next((task for task in await runner.list() if task.key == key), None)


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # type: ignore[misc]
            await asyncio.sleep(0.05)


async def end_of(runner: Runner, key: TaskKey = KEY) -> ObservedTask:
    async def has_ended() -> bool:
        task = await observe(runner, key)
        return task is not None and task.state is Observed.EXITED

    await until(has_ended)
    task = await observe(runner, key)
    assert task is not None
    return task


async def output(runner: Runner, stream: str = "stdout", **options: object) -> bytes:
    arguments = {"follow": False, "tail_bytes": None, **options}
    return b"".join([part async for part in runner.logs(KEY, stream=stream, **arguments)])


async def start(runner: Runner, *command: str, **changes: object) -> None:
    settings = container(*command, **changes)
    await runner.start(grant(settings), settings)


async def test_a_started_task_is_listed_with_what_it_holds_and_how_it_ended(runner: Runner) -> None:
    assert await runner.list() == ()
    await start(runner, "sh", "-c", "sleep 0.5; exit 3")
    running = await observe(runner)
    assert running is not None
    assert running.state is Observed.RUNNING
    assert running.slices == (SLICE,)
    assert running.started_at_ms is not None
    ended = await end_of(runner)
    assert (ended.exit_code, ended.oom_killed, ended.slices) == (3, False, (SLICE,))
    assert ended.ended_at_ms is not None
    assert 300 < ended.ended_at_ms - ended.started_at_ms < 10_000


async def test_death_by_a_signal_is_128_and_its_number(runner: Runner) -> None:
    await start(runner, "sh", "-c", "sleep 100 & kill -SEGV $!; wait $!; exit $?")
    assert (await end_of(runner)).exit_code == 139


async def test_environment_and_both_streams_reach_the_task(runner: Runner) -> None:
    await start(
        runner,
        *("sh", "-c", 'echo "$GREETING $VISIBLE"; echo oops >&2'),
        env={"GREETING": "hello", "VISIBLE": "GPU-a"},
    )
    await end_of(runner)
    assert await output(runner) == b"hello GPU-a\n"
    assert await output(runner, "stderr") == b"oops\n"
    assert await output(runner, tail_bytes=6) == b"GPU-a\n"


async def test_a_stop_lets_the_task_end_by_itself(runner: Runner) -> None:
    await start(runner, "sh", "-c", "trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.1; done")
    await until(lambda: _says(runner, b"up"))
    await runner.stop(KEY, 10)
    assert (await end_of(runner)).exit_code == 7
    assert await output(runner) == b"up\nbye\n"


async def test_a_task_that_ignores_the_stop_is_killed_after_the_grace(runner: Runner) -> None:
    await start(runner, "sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done")
    await until(lambda: _says(runner, b"up"))
    await runner.stop(KEY, 1)
    ended = await end_of(runner)
    assert ended.exit_code == 137
    assert not ended.oom_killed  # EX-2: 137 alone is no out-of-memory


async def test_stop_and_remove_of_what_is_not_there_do_nothing(runner: Runner) -> None:
    await runner.stop(KEY, 1)
    await runner.remove(KEY)
    assert await runner.list() == ()


async def test_starting_twice_is_one_task_ex_5(runner: Runner) -> None:
    await start(runner, "sh", "-c", "echo once; sleep 100")
    first = await observe(runner)
    await start(runner, "sh", "-c", "echo once; sleep 100")
    assert await observe(runner) == first
    await until(lambda: _says(runner, b"once"))
    assert await output(runner) == b"once\n"


async def test_an_attempt_that_has_ended_is_not_started_again(runner: Runner) -> None:
    await start(runner, "sh", "-c", "echo once; exit 4")
    ended = await end_of(runner)
    await start(runner, "sh", "-c", "echo once; exit 4")
    assert await observe(runner) == ended
    assert await output(runner) == b"once\n"


async def test_a_new_agent_adopts_what_runs_and_learns_how_it_ends_rr_2(
    make_runner: MakeRunner, runner: Runner
) -> None:
    await start(runner, "sh", "-c", "sleep 1; exit 5")
    before = await observe(runner)
    await runner.close()
    second = make_runner()
    try:
        assert await observe(second) == before
        assert (await end_of(second)).exit_code == 5
    finally:
        await second.close()


async def test_an_end_wakes_the_agent(runner: Runner) -> None:
    await start(runner, "sh", "-c", "sleep 1")
    async with asyncio.timeout(20):
        async for _ in runner.events():
            task = await observe(runner)
            if task is not None and task.state is Observed.EXITED:
                return


async def test_following_the_output_ends_with_the_task(runner: Runner) -> None:
    await start(runner, "sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.2; done")
    async with asyncio.timeout(20):
        assert await output(runner, follow=True) == b"1\n2\n3\n"


async def test_following_can_begin_with_the_last_bytes(runner: Runner) -> None:
    await start(runner, "sh", "-c", "echo first; echo second; sleep 1; echo third")
    await until(lambda: _says(runner, b"second"))
    async with asyncio.timeout(20):
        assert await output(runner, follow=True, tail_bytes=7) == b"second\nthird\n"


async def test_the_output_of_an_unknown_task_is_unknown(runner: Runner) -> None:
    with pytest.raises(LogsUnknown):
        await output(runner)


async def test_output_is_gone_after_remove(runner: Runner) -> None:
    await start(runner, "sh", "-c", "echo x")
    await end_of(runner)
    await runner.remove(KEY)
    assert await runner.list() == ()
    with pytest.raises(LogsUnknown):
        await output(runner)


async def test_a_command_that_is_not_there_ends_the_job_with_127(runner: Runner) -> None:
    with pytest.raises(LaunchFailed) as failed:
        await start(runner, "no-such-command")
    assert (failed.value.exit_code, failed.value.fault) == (127, "")
    assert "no-such-command" in failed.value.detail
    assert await runner.list() == ()


async def test_a_process_is_traced_to_its_task_gh_9(runner: Runner) -> None:
    await start(runner, "sh", "-c", "sleep 77.5 & wait")
    pids: list[int] = []

    async def found() -> bool:
        pids[:] = _pids_of(b"sleep\x0077.5")
        return bool(pids)

    await until(found)
    await runner.list()
    assert [runner.attempt_of(pid) for pid in pids] == [str(KEY)]
    assert runner.attempt_of(os.getpid()) == ""


async def test_tasks_of_one_attempt_do_not_mix(runner: Runner) -> None:
    await start(runner, "sh", "-c", "exit 1")
    await start(runner, "sh", "-c", "sleep 100", task=1)
    assert (await end_of(runner)).exit_code == 1
    assert [str(task.key) for task in await runner.list()] == [f"{KEY.job}.1.0", f"{KEY.job}.1.1"]
    other = await observe(runner, TaskKey(KEY.job, 1, 1))
    assert other is not None
    assert other.state is Observed.RUNNING


async def _says(runner: Runner, text: bytes) -> bool:
    return text in await output(runner)


def _pids_of(command: bytes) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and Path(f"/proc/{name}/cmdline").read_bytes().startswith(command):
                found.append(int(name))
        except OSError:
            continue
    return found
