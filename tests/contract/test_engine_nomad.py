"""The contract of the Nomad engine, held against the fake and, where a `nomad` binary is on the PATH, a real server.

Commands mean the same to both: the fake runs a very small shell (tests/fakenomad/containers.py).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.engines import EngineRefused, LogsExpired
from coordinator.model import TaskState
from tests.contract.nomad_world import World, fake_world, sh
from tests.contract.real_nomad import real_nomad
from tests.docker_engine import DockerEngine
from vgpu.reasons import ReasonCode


@pytest.fixture(scope="session")
def real(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server and two clients on loopback, started once."""
    if shutil.which("nomad") is None:
        pytest.skip("no nomad binary on the PATH: its tests ran against the fake alone")
    docker: DockerEngine = request.getfixturevalue("docker_engine")
    yield from real_nomad(docker.url)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.nomad)])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "real":
        settings, nodes = request.getfixturevalue("real")
        world = World(settings, dict(nodes))
        yield world
        await world.close()
        return
    async with fake_world() as world:
        yield world


async def test_exit_0_is_seen_from_start_to_end(world: World) -> None:
    """STARTING may be too short to be seen; RUNNING, too, for a task that ends at once."""
    engine = world.engine()
    world.observe(engine)
    job = world.job(sh("echo hello; exit 0"))
    await world.launch(engine, job)
    task = await world.until_released(job)
    assert (task.exit_code, task.signal, task.oom_killed, task.fault, task.node) == (0, None, False, "", "n1")
    assert task.started_at_ms is not None
    assert task.ended_at_ms is not None
    assert task.ended_at_ms >= task.started_at_ms
    assert task.container


@pytest.mark.parametrize(
    ("script", "code", "signal"), [("exit 3", 3, None), ("exit 137", 137, 9), ("exit 143", 143, 15)]
)
async def test_exit_code_and_signal(world: World, script: str, code: int, signal: int | None) -> None:
    engine = world.engine()
    world.observe(engine)
    job = world.job(sh(script))
    await world.launch(engine, job)
    task = await world.until_released(job)
    assert (task.exit_code, task.signal, task.oom_killed, task.fault) == (code, signal, False, "")


async def test_memory_limit_is_told_apart_from_any_other_kill(world: World) -> None:
    """EX-1: exit 137 with the OOM flag, whatever Nomad calls the allocation."""
    engine = world.engine()
    world.observe(engine)
    job = world.job(sh("tail /dev/zero"))
    await world.launch(engine, job)
    task = await world.until_released(job)
    assert (task.exit_code, task.oom_killed, task.fault) == (137, True, "out_of_memory")


async def test_image_that_cannot_be_had_is_told_in_dockers_words(world: World) -> None:
    engine = world.engine()
    world.observe(engine)
    job = world.job(sh("exit 0"), image="registry.invalid/no-such:1")
    await world.launch(engine, job)
    task = await world.until_released(job)
    assert task.exit_code is None
    assert task.fault in ("launch_failed", "image_unavailable")
    assert "no-such:1" in task.detail


async def test_program_and_device_that_are_not_there_fail_the_launch(world: World) -> None:
    engine = world.engine()
    world.observe(engine)
    program, device = world.job(("/nope",)), world.job(sh("exit 0"))
    await world.launch(engine, program)
    await world.launch(engine, device, device="/dev/nvidia9")
    tasks = [await world.until_released(job) for job in (program, device)]
    assert [(task.exit_code, task.fault) for task in tasks] == [(None, "launch_failed")] * 2
    assert "/nope" in tasks[0].detail
    assert "/dev/nvidia9" in tasks[1].detail


async def test_gang_is_one_job_with_a_task_on_each_node(world: World) -> None:
    engine = world.engine()
    world.observe(engine)
    job = world.job(sh("exit 0"), sh("exit 5"), nodes=("n1", "n2"))
    await world.launch(engine, job)
    first, second = await world.until_released(job, 0), await world.until_released(job, 1)
    assert [(task.node, task.exit_code) for task in (first, second)] == [("n1", 0), ("n2", 5)]


async def test_cancel_while_running_ends_the_task_and_keeps_its_end_readable(world: World) -> None:
    """EX-2: 143 or 137 without the OOM flag after a stop is judged by the leader, which knows that it asked."""
    engine = world.engine()
    world.observe(engine)
    job = world.job(sh("sleep 3600"))
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    assert [one.job for one in await engine.list() if one.job == job.id] == [job.id]
    await world.stop(engine, job)
    task = await world.until_released(job)
    assert task.exit_code in (137, 143)
    assert (task.oom_killed, task.fault) == (False, "")
    assert [one.job for one in await engine.list() if one.job == job.id] == []


async def test_exit_0_before_the_stop_stays_exit_0(world: World) -> None:
    """EX-2: (0, no OOM, stop asked)."""
    engine = world.engine()
    job = world.job(sh("exit 0"))
    await world.launch(engine, job)
    other = world.engine()
    world.observe(other)
    await world.until_released(job)
    await world.stop(engine, job)
    await world.stop(engine, job)
    assert world.records.story(f"{job.id}.1.0")[-1] == "EXITED"
    assert (await world.until_released(job)).exit_code == 0


async def test_launch_again_and_by_the_next_leader_adopts_the_attempt(world: World) -> None:
    """RR-1: the attempt has one identity, so whoever launches it finds it there."""
    job = world.job(sh("sleep 3600"))
    first = world.engine()
    await world.launch(first, job)
    await world.launch(first, job)
    second = world.engine()
    await world.launch(second, job)
    world.observe(second)
    task = await world.until_state(job, TaskState.RUNNING)
    assert task.attempt == 1
    attempts = [one for one in await second.list() if one.job == job.id]
    assert [(one.job, one.attempt) for one in attempts] == [(job.id, 1)]
    assert attempts[0].since_ms > 0
    await world.stop(second, job)
    await world.until_released(job)


async def test_an_attempt_that_was_stopped_is_never_started_again(world: World) -> None:
    job = world.job(sh("sleep 3600"))
    engine = world.engine()
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    await world.stop(engine, job)
    await world.until_released(job)
    # A leader that knows nothing of it: neither its memory nor the records tell that it ran.
    records, world.records.tasks = world.records.tasks, {}
    next_leaders = world.engine()
    world.observe(next_leaders)
    await world.launch(next_leaders, job)
    assert (await world.until_released(job)).container == records[f"{job.id}.1.0"].container
    assert [one for one in await engine.list() if one.job == job.id] == []


async def test_stop_of_what_was_never_launched_confirms_that_nothing_runs(world: World) -> None:
    engine = world.engine()
    world.observe(engine)
    await asyncio.sleep(0)  # the term has begun, so that nobody else can have launched what comes
    job = world.job(sh("sleep 3600"), sh("sleep 3600"))
    await world.stop(engine, job)
    tasks = [await world.until_released(job, number) for number in (0, 1)]
    assert [(task.exit_code, task.fault) for task in tasks] == [(None, "")] * 2
    await world.launch(engine, job)
    assert [one for one in await engine.list() if one.job == job.id] == []
    world.records.tasks.clear()
    late = replace(job, attempt=2)
    await engine.stop(late.id, 2, late.tenant)
    with pytest.raises(EngineRefused):
        await world.launch(engine, late)


async def test_node_that_nomad_does_not_know_sends_the_job_back_with_the_reason(world: World) -> None:
    """A failed placement leaves a blocked evaluation, which would start the job at any time later: withdrawn."""
    world.nodes["n3"] = "00000000-0000-4000-8000-000000000000"
    engine = world.engine()
    world.observe(engine)
    job = world.job(sh("exit 0"), nodes=("n3",))
    await world.launch(engine, job)
    task = await world.until_released(job)
    assert (task.exit_code, task.fault) == (None, "launch_failed")
    assert "00000000-0000-4000-8000-000000000000" in task.detail
    del world.nodes["n3"]
    await world.until(lambda: True)
    assert [one for one in await engine.list() if one.job == job.id] == []


async def test_memory_that_nomad_does_not_see_sends_the_job_back_with_the_reason(world: World) -> None:
    engine = world.engine()
    world.observe(engine)
    job = world.job(sh("exit 0"))
    await world.launch(engine, job, memory_mib=999_999)
    task = await world.until_released(job)
    assert (task.fault, task.detail) == (
        "launch_failed",
        "Nomad found no place: by its own count the node has not enough memory left",
    )


async def test_gang_that_finds_no_whole_place_is_taken_back_whole(world: World) -> None:
    world.nodes["n3"] = "00000000-0000-4000-8000-000000000000"
    engine = world.engine()
    world.observe(engine)
    job = world.job(sh("sleep 3600"), sh("sleep 3600"), nodes=("n1", "n3"))
    await world.launch(engine, job)
    placed, unplaced = await world.until_released(job, 0), await world.until_released(job, 1)
    assert (placed.fault, unplaced.fault) == ("sibling_failed", "launch_failed")
    del world.nodes["n3"]


async def test_node_without_a_nomad_client_is_refused(world: World) -> None:
    job = replace(world.job(sh("exit 0"), nodes=("n9",)))
    with pytest.raises(EngineRefused) as refused:
        await world.launch(world.engine(), job)
    assert (refused.value.reason.code, refused.value.reason.subjects) == (ReasonCode.ENGINE_REFUSED, ("n9",))


async def test_text_of_users_arrives_as_it_was_written(world: World) -> None:
    """Nomad reads a driver's configuration as a template, and some names in the environment."""
    engine = world.engine()
    world.observe(engine)
    job = world.job(sh("echo '${HOME} %{x} 100% ${1+1}'; exit 0"))
    await world.launch(engine, job)
    task = await world.until_released(job)
    assert task.exit_code == 0
    chunks = [chunk async for chunk in engine.logs(task, stream="stdout", follow=False, tail_bytes=None)]
    assert b"".join(chunks) == b"${HOME} %{x} 100% ${1+1}\n"
    refused = world.job(sh("exit 0"))
    spec = replace(refused.spec.tasks[0], env={"WHERE": "${node.unique.id}"})
    refused = replace(refused, spec=replace(refused.spec, tasks=(spec,)))
    with pytest.raises(EngineRefused):
        await world.launch(engine, refused)


async def test_logs_of_a_running_and_of_an_ended_task(world: World) -> None:
    engine = world.engine()
    world.observe(engine)
    job = world.job(sh("echo out; echo err >&2; sleep 2; echo last; exit 0"))
    await world.launch(engine, job)
    running = await world.until_state(job, TaskState.RUNNING)
    followed: list[bytes] = []

    async def follow() -> None:
        async for chunk in engine.logs(running, stream="stdout", follow=True, tail_bytes=None):
            followed.append(chunk)

    async with asyncio.timeout(30):
        following = asyncio.create_task(follow())
        await world.until(lambda: b"out\n" in b"".join(followed))
        if world.nomad is not None:
            world.nomad.clients.advance(2)
        ended = await world.until_released(job)
        await following
    assert b"".join(followed) == b"out\nlast\n"

    async def read(stream: str, tail_bytes: int | None = None) -> bytes:
        chunks = engine.logs(ended, stream=stream, follow=False, tail_bytes=tail_bytes)
        return b"".join([chunk async for chunk in chunks])

    assert (await read("stdout"), await read("stderr"), await read("stdout", 5)) == (
        b"out\nlast\n",
        b"err\n",
        b"last\n",
    )


async def test_logs_of_what_nomad_never_had_are_expired(world: World) -> None:
    """OB-1: never a 500."""
    engine = world.engine()
    world.observe(engine)
    job = world.job(sh("exit 0"))
    await world.launch(engine, job)
    task = await world.until_released(job)
    for never in (
        replace(task, job="01jd3x8k99999999", attempt=7, container=""),
        replace(task, container="00000000-0000-4000-8000-000000000000"),
    ):
        with pytest.raises(LogsExpired):
            [chunk async for chunk in engine.logs(never, stream="stdout", follow=False, tail_bytes=None)]
    by_job = engine.logs(replace(task, container=""), stream="stdout", follow=False, tail_bytes=None)
    assert [chunk async for chunk in by_job] == []
