"""UP-2: state files of an agent that are cut, empty, of another version, or garbage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.endpoint import ExpiredOutput
from nodeagent.process_cleanup import stop_all
from nodeagent.processes import ProcessRunner
from nodeagent.runner import Observed, TaskKey
from tests.contract.test_runner import KEY, container, end_of, grant, observe

GARBAGE = (b"", b"\xff\xfe\x00", b"{", b"[]", b"1 (sh", b'{"labels":7}', b"9" * 5000)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "tasks"
    stop_all(tmp_path / "tasks", grace_seconds=0.1)


def _runner(folder: Path) -> ProcessRunner:
    return ProcessRunner("n1", "test", folder)


@pytest.mark.parametrize("name", ["task.json", "shell"])
@pytest.mark.parametrize("value", GARBAGE)
async def test_a_running_task_runs_on_and_can_be_stopped(folder: Path, name: str, value: bytes) -> None:
    """It is known by its processes, is not started a second time, and ends when it is told to."""
    settings = container("sh", "-c", "sleep 100")
    await _runner(folder).start(grant(settings), settings)
    (folder / str(KEY) / name).write_bytes(value)
    runner = _runner(folder)
    if name == "task.json":
        task = await observe(runner)
        assert task is not None
        assert task.state is Observed.RUNNING
        await runner.start(grant(settings), settings)
        assert (folder / str(KEY) / name).read_bytes() == value, "it was started again"
    await runner.stop(KEY, 1)
    assert not [task for task in await runner.list() if task.state is Observed.RUNNING]
    await runner.close()


@pytest.mark.parametrize("value", GARBAGE)
async def test_an_end_that_cannot_be_read_is_an_end_without_a_code(folder: Path, value: bytes) -> None:
    settings = container("sh", "-c", "exit 3")
    runner = _runner(folder)
    await runner.start(grant(settings), settings)
    assert (await end_of(runner)).exit_code == 3
    (folder / str(KEY) / "exit").write_bytes(value)
    task = await observe(_runner(folder))
    assert task is not None
    assert (task.state, task.exit_code) == (Observed.EXITED, None)
    assert "cannot be read" in task.detail
    await runner.close()


async def test_what_is_no_task_is_left_alone(folder: Path) -> None:
    """Files, folders of other names, a task without its output files: the rest is seen, and events go on."""
    settings = container("sh", "-c", "sleep 0.3; exit 4")
    runner = _runner(folder)
    await runner.start(grant(settings), settings)
    (folder / "file").write_bytes(b"x")
    (folder / "j.1.0").write_bytes(b"a file where a folder should be")
    (folder / "..odd.name").mkdir()
    (folder / "empty.1.0").mkdir()
    for stream in ("stdout", "stderr"):
        (folder / str(KEY) / stream).unlink()
    again = _runner(folder)
    events = asyncio.create_task(anext(again.events()))  # type: ignore[arg-type]
    await asyncio.wait_for(events, 10)
    task = await end_of(again)
    assert task.exit_code == 4
    assert [task.key for task in await again.list()] == [KEY]
    await runner.close()
    await again.close()


def test_the_list_of_expired_output_may_be_garbage(tmp_path: Path) -> None:
    (tmp_path / "expired").write_bytes(b"\xff\xfe\x00 a.1.0\n\n..\n")
    assert TaskKey("a", 1, 0) in ExpiredOutput(tmp_path / "expired")
