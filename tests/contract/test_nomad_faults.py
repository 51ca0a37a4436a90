"""The Nomad engine when Nomad, the network or a node misbehaves: against the fake, which is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from attrs import evolve
from msgspec.structs import replace

from coordinator.engines import EngineRefused, EngineUnavailable, LogsExpired
from coordinator.engines.nomad import NomadEngine
from coordinator.model import Job, JobState, TaskState
from tests.contract.nomad_world import World, fake_world, sh

LONG = sh("sleep 3600")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with fake_world() as world:
        yield world


# --- launch ---------------------------------------------------------------------------------------------------------------


async def test_lost_answer_of_a_register_is_read_back(world: World) -> None:
    engine, job = world.engine(), world.job(LONG)
    world.web.lose_replies["POST"] = 1
    await world.launch(engine, job)
    assert len(world.containers(job)) == 1
    assert sum(method == "POST" for method, _ in world.web.requests) == 1


async def test_register_whose_outcome_is_unknown_is_safe_to_repeat(world: World) -> None:
    engine, job = world.engine(), world.job(LONG)
    world.web.lose_replies |= {"POST": 1, "GET": 2}
    with pytest.raises(EngineUnavailable):
        await world.launch(engine, job)
    world.web.lose_replies.clear()
    await world.launch(engine, job)
    assert len(world.containers(job)) == 1


async def test_two_creates_that_both_pass_nomads_check_make_one_container(world: World) -> None:
    """The check is not atomic on a real server; equal jobs are harmless, so launches of two leaders must be equal."""
    first, second, job = world.engine(), world.engine(), world.job(LONG)
    world.web.race = asyncio.Barrier(2)
    await asyncio.gather(world.launch(first, job), world.launch(second, job))
    assert (world.nomad_job(job)["Version"], len(world.containers(job))) == (0, 1)
    assert world.fake.clients.overlaps == []


async def test_job_of_somebody_else_under_our_id_is_left_alone(world: World) -> None:
    engine, job = world.engine(), world.job(LONG)
    await world.launch(engine, job)
    world.nomad_job(job)["Meta"] = {"owner": "another team"}
    with pytest.raises(EngineRefused, match="did not make"):
        await world.launch(world.engine(), job)
    await world.stop(engine, job)
    assert not world.nomad_job(job)["Stop"]
    assert world.containers(job)[0].running


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (403, "Permission denied", EngineUnavailable),
        (500, "Permission denied", EngineUnavailable),
        (500, "No cluster leader", EngineUnavailable),
        (500, 'job "b" is in nonexistent namespace "nope"', EngineUnavailable),
        (500, "1 error occurred:\n\t* Task group task-0 validation failed\n\n", EngineRefused),
        (400, "Job must be specified", EngineRefused),
    ],
)
async def test_refusals_of_a_register(world: World, status: int, text: str, error: type[Exception]) -> None:
    """Only a fault of the job ends the attempt: a fault of the setup must not fail the jobs of all tenants."""
    engine, job = world.engine(), world.job(LONG)
    world.web.answers.append(("POST", "/v1/jobs", status, text))
    with pytest.raises(error) as raised:
        await world.launch(engine, job)
    assert ("token needs" if "Permission" in text else text.strip()[:20]) in str(raised.value)
    await world.launch(engine, job)


async def test_server_that_is_not_there(world: World) -> None:
    engine, job = world.engine(), world.job(LONG)
    await world.web.stop()
    for call in (world.launch(engine, job), engine.list()):
        with pytest.raises(EngineUnavailable, match=r"cannot be reached: [^(]*Connection refused$"):
            await call


async def test_version_comes_from_the_nodes_where_the_token_may_not_ask_the_agent(world: World) -> None:
    """Disconnect is dropped silently before 1.8, MaxClientDisconnect is refused beside it from then on."""
    world.fake.acl = {"t": {"list-jobs", "read-job", "submit-job", "read-logs", "node:read"}}
    for version, field in (("1.6.3", "MaxClientDisconnect"), ("1.10.2", "Disconnect")):
        world.fake.version = version
        job = world.job(LONG)
        await world.launch(world.engine(token="t"), job)
        assert world.nomad_job(job)["TaskGroups"][0][field]


async def test_every_request_is_for_the_namespace_and_region_that_were_set(world: World) -> None:
    world.fake.namespaces.add("serai-gpu")
    engine, job = world.engine(namespace="serai-gpu", region="eu"), world.job(LONG)
    world.observe(engine)
    await world.launch(engine, job)
    running = await world.until_state(job, TaskState.RUNNING)
    await world.stop(engine, job)
    assert (await world.until_released(job)).exit_code == 137
    [chunk async for chunk in engine.logs(running, stream="stdout", follow=False, tail_bytes=None)]
    assert {key[0] for key in world.fake.jobs} == {"serai-gpu"}
    asked = [path for method, path in world.web.requests if "/v1/agent" not in path]
    assert len({path.split("?")[0].split("/")[2] for path in asked}) >= 5
    assert [path for path in asked if "region=eu" not in path or "namespace=serai-gpu" not in path] == []


async def test_weak_or_wrong_token_is_named(world: World) -> None:
    world.fake.acl = {"weak": set()}
    for token in ("weak", "unknown", ""):
        with pytest.raises(EngineUnavailable, match="submit-job"):
            await world.launch(world.engine(token=token), world.job(LONG))


async def test_next_attempt_ends_the_one_before_first(world: World) -> None:
    """RR-11: attempt 1 was lost with its node; it must not come back beside attempt 2."""
    engine, job = world.engine(), world.job(LONG)
    await world.launch(engine, job)
    world.fake.clients.down(world.nodes["n1"])
    second = world.next_attempt(job)
    await engine.launch(second, [evolve(grant, node="n2") for grant in world.grants(second)])
    assert world.nomad_job(job)["Stop"]
    world.fake.clients.up(world.nodes["n1"])
    assert [container.running for container in world.containers(job)] == [False]
    assert [container.running for container in world.containers(second)] == [True]


# --- stop -----------------------------------------------------------------------------------------------------------------


async def test_cancel_while_nomads_scheduler_is_busy(world: World) -> None:
    """Not released before Nomad's scheduler agrees: until then it may still place the job."""
    world.fake.hold_scheduler = True
    engine, job = world.engine(), world.job(LONG)
    world.observe(engine)
    await world.launch(engine, job)
    await world.stop(engine, job)
    looks = world.looks(job)
    await world.until(lambda: world.looks(job) >= looks + 3)  # two whole looks with the job stopped
    assert world.nomad_job(job)["Stop"]
    assert world.task(job) is None
    world.fake.hold_scheduler = False
    world.fake.schedule()
    task = await world.until_released(job)
    assert (task.exit_code, task.fault, world.containers(job)) == (None, "", [])


async def test_cancel_while_starting(world: World) -> None:
    world.fake.clients.hold_starts = True
    engine, job = world.engine(), world.job(LONG)
    world.observe(engine)
    await world.launch(engine, job)
    starting = await world.until_state(job, TaskState.STARTING)
    assert not starting.released
    assert starting.detail == "Task received by client"
    await world.stop(engine, job)
    task = await world.until_released(job)
    world.fake.clients.start_held()
    assert (task.exit_code, task.fault, world.containers(job)) == (None, "", [])


async def test_slices_are_not_free_before_the_container_is_dead(world: World) -> None:
    world.fake.clients.hold_kills = True
    engine, job = world.engine(relist_seconds=0.05), world.job(LONG)
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    await world.stop(engine, job)
    await world.listed(3)
    task = world.task(job)
    assert task is not None
    assert (task.state, task.released) == (TaskState.RUNNING, False)
    world.fake.clients.kill_held()
    assert (await world.until_released(job)).exit_code == 137


async def test_stop_that_nomad_did_not_hear_is_repeated(world: World) -> None:
    engine, job = world.engine(), world.job(LONG)
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    await world.web.stop()
    with pytest.raises(EngineUnavailable):
        await world.stop(engine, job)
    await world.web.start()
    assert (await world.until_released(job)).exit_code == 137


async def test_stop_is_repeated_by_the_next_leader_from_the_record_alone(world: World) -> None:
    first, job = world.engine(), world.job(LONG)
    await world.launch(first, job)
    world.ask_stop(job)
    world.observe(world.engine())
    assert (await world.until_released(job)).exit_code == 137


# --- the event stream -----------------------------------------------------------------------------------------------------


async def test_lost_events_are_made_up_for_by_the_lists(world: World) -> None:
    engine, job = world.engine(relist_seconds=0.1), world.job(LONG)
    world.observe(engine)
    await world.until(lambda: world.web.streams == 1)
    world.web.mute_events = True
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    world.fake.clients.finish(world.nomad_id(job), exit_code=3)
    assert (await world.until_released(job)).exit_code == 3


async def test_end_that_fell_into_a_gap_of_the_stream_is_seen_on_reconnect(world: World) -> None:
    engine, job = world.engine(), world.job(LONG)
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    await world.web.stop()
    world.fake.clients.finish(world.nomad_id(job), exit_code=4)
    world.fake.lose_events()
    await world.web.start()
    assert (await world.until_released(job)).exit_code == 4


async def test_old_events_after_a_restart_of_the_server_change_nothing(world: World) -> None:
    engine, job = world.engine(), world.job(LONG)
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    world.fake.clients.finish(world.nomad_id(job))
    await world.until_released(job)
    before = list(world.records.history)
    lists = world.lists()
    await world.web.restart()
    await world.until(lambda: world.web.streams == 1 and world.lists() > lists)
    assert len(world.fake.events) > 5  # the old ones have come again
    assert world.records.history == before
    assert world.records.story(f"{job.id}.1.0")[-2:] == ["RUNNING", "EXITED"]


@pytest.mark.parametrize("status", [403, 500])
async def test_without_the_right_to_the_stream_the_lists_are_polled(world: World, status: int) -> None:
    """The stream denies with 500."""
    world.web.answers += [("GET", "/v1/event/stream", status, "Permission denied")] * 10_000
    engine, job = world.engine(), world.job(LONG)
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    world.fake.clients.finish(world.nomad_id(job), exit_code=6)
    assert (await world.until_released(job)).exit_code == 6
    assert world.web.streams == 0


async def test_what_the_sink_raises_ends_the_observer(world: World) -> None:
    """A deposed leader's write is refused; its observer must not go on."""

    class LeadershipLost(Exception):
        pass

    world.records.refuse = LeadershipLost("deposed")
    engine, job = world.engine(), world.job(sh("exit 0"))
    observing = world.observe(engine)
    await world.launch(engine, job)
    with pytest.raises(LeadershipLost):
        await asyncio.wait_for(asyncio.shield(observing), 10)
    assert not world.nomad_job(job)["Stop"]  # what was not recorded stays readable


# --- placement and evaluations --------------------------------------------------------------------------------------------


async def test_evaluation_that_nomad_never_finishes_leaves_the_job_to_the_launch_deadline(
    world: World,
) -> None:
    world.fake.hold_scheduler = True
    engine, job = world.engine(), world.job(LONG)
    world.observe(engine)
    await world.launch(engine, job)
    await world.until(lambda: sum("/v1/evaluation/" in path for _, path in world.web.requests) > 3)
    assert world.task(job) is None
    assert not world.nomad_job(job)["Stop"]


async def test_job_placed_on_a_node_that_is_down_does_not_start_when_it_returns(world: World) -> None:
    """Seen on the real one: the blocked evaluation starts it then."""
    world.fake.clients.down(world.nodes["n1"])
    engine, job = world.engine(), world.job(LONG)
    world.observe(engine)
    await world.launch(engine, job)
    task = await world.until_released(job)
    assert (task.fault, world.nodes["n1"] in task.detail) == ("launch_failed", True)
    world.fake.clients.up(world.nodes["n1"])
    assert world.containers(job) == []


# --- nodes ----------------------------------------------------------------------------------------------------------------


async def test_node_out_of_touch_and_back_keeps_the_attempt(world: World) -> None:
    """EX-7: no second copy, the slices stay held, and it runs on as the same attempt."""
    engine, job = world.engine(), world.job(LONG)
    world.observe(engine)
    await world.launch(engine, job)
    before = await world.until_state(job, TaskState.RUNNING)
    world.fake.clients.down(world.nodes["n1"])
    await world.until(lambda: (task := world.task(job)) and "out of touch" in task.detail)
    away = world.task(job)
    assert away is not None
    assert (away.state, away.released) == (TaskState.RUNNING, False)
    world.fake.clients.up(world.nodes["n1"])
    await world.until(lambda: world.task(job) == before)
    assert (len(world.containers(job)), world.fake.clients.overlaps) == (1, [])
    assert world.records.story(f"{job.id}.1.0")[-1:] == ["RUNNING"]


async def test_end_while_the_node_was_out_of_touch_is_judged_by_what_happened(world: World) -> None:
    engine, job = world.engine(), world.job(sh("sleep 60; exit 7"))
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    world.fake.clients.down(world.nodes["n1"])
    world.fake.clients.advance(61)
    world.fake.clients.up(world.nodes["n1"])
    assert (await world.until_released(job)).exit_code == 7


async def test_lost_node_gets_no_second_copy_and_frees_nothing_before_it_is_back(world: World) -> None:
    """RR-11: withdrawn as soon as Nomad gives the node up; released only when its client has ended the container."""
    engine, job = world.engine(), world.job(LONG)
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    world.fake.clients.down(world.nodes["n1"])
    world.fake.clients.expire_disconnect(world.nodes["n1"])
    lost = await world.until_state(job, TaskState.EXITED)
    assert (lost.fault, lost.exit_code, lost.released) == ("node_lost", None, False)
    await world.until(lambda: world.nomad_job(job)["Stop"])
    assert world.containers(job)[0].running
    world.fake.clients.up(world.nodes["n1"])
    assert (await world.until_released(job)).fault == "node_lost"
    assert (len(world.containers(job)), world.fake.clients.overlaps) == (1, [])
    assert world.records.story(f"{job.id}.1.0")[-2:] == ["RUNNING", "EXITED"]


async def test_second_copy_that_came_while_nobody_looked_is_withdrawn(world: World) -> None:
    """The negative control of the test above: without the observer, both copies run. Then it starts, and both must be
    dead before the slices are free."""
    engine, job = world.engine(), world.job(LONG)
    await world.launch(engine, job)
    world.fake.clients.down(world.nodes["n1"])
    world.fake.clients.expire_disconnect(world.nodes["n1"])
    world.fake.clients.up(world.nodes["n1"], sync=False)
    assert [container.running for container in world.containers(job)] == [True, True]
    assert world.fake.clients.overlaps
    world.observe(engine)
    lost = await world.until_state(job, TaskState.EXITED)
    assert (lost.fault, lost.released) == ("node_lost", False)
    await world.until(lambda: not world.containers(job)[1].running)
    assert not lost.released
    world.fake.clients.sync(world.nodes["n1"])
    released = await world.until_released(job)
    assert released.container == lost.container
    assert [container.running for container in world.containers(job)] == [False, False]


async def _given_up(world: World, engine: NomadEngine, job: Job) -> None:
    """As by the leader, with the node of the job: over for the store, and withdrawn."""
    del world.records.live_jobs[job.id]
    world.records.tasks.clear()
    await engine.stop(job.id, job.attempt, job.tenant)


async def _cannot_launch(world: World, engine: NomadEngine, job: Job) -> None:
    with pytest.raises(EngineUnavailable, match="may still use a GPU"):
        await world.launch(engine, job)
    assert world.containers(job) == []


@pytest.mark.parametrize("same_leader", [True, False])
async def test_a_gpu_is_not_used_beside_what_was_given_up_on_it(world: World, same_leader: bool) -> None:
    """RR-11: a node that is back gets nothing where Nomad has not ended what was lost with it, whoever leads by then."""
    engine, job = world.engine(), world.job(LONG, gpu="GPU-1")
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    world.fake.clients.down(world.nodes["n1"])
    assert engine.occupied() == {}, "it is live"
    await _given_up(world, engine, job)
    if not same_leader:
        engine = world.engine()
        world.observe(engine)
        await world.until(engine.occupied)
    assert engine.occupied() == {"n1": {"GPU-1": (f"{job.id}.1.0",)}}
    beside, next_one = world.job(LONG, gpu="GPU-2"), world.job(LONG, gpu="GPU-1")
    await world.launch(engine, beside)
    await _cannot_launch(world, engine, next_one)
    world.fake.clients.up(world.nodes["n1"])
    await world.until(lambda: not engine.occupied())
    assert not world.containers(job)[0].running
    await world.launch(engine, next_one)
    await world.until_state(next_one, TaskState.RUNNING)


async def test_the_next_leader_withdraws_what_a_newer_attempt_stands_for(world: World) -> None:
    """It need not be seen twice by the sweep: the store says that the attempt is over."""
    before, job = world.engine(), world.job(LONG, gpu="GPU-1")
    await world.launch(before, job)
    del world.records.live_jobs[job.id]
    world.records.waiting_jobs[job.id] = replace(job, attempt=2, allocation=None, state=JobState.PENDING)
    world.observe(world.engine())
    await world.until(lambda: world.nomad_job(job)["Stop"])
    assert not world.containers(job)[0].running


async def test_launches_wait_until_it_is_known_what_is_left_of_earlier_attempts(world: World) -> None:
    before, job = world.engine(), world.job(LONG, gpu="GPU-1")
    await world.launch(before, job)
    del world.records.live_jobs[job.id]
    engine, next_one = world.engine(request_seconds=0.2), world.job(LONG, gpu="GPU-1")
    world.web.answers += [("GET", "/v1/jobs", 500, "no leader")] * 20
    world.observe(engine)
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable, match="has not told yet"):
        await world.launch(engine, next_one)
    world.web.answers.clear()
    await world.until(engine.occupied)
    await _cannot_launch(world, engine, next_one)


async def test_what_was_sent_and_is_not_there_is_waited_for_before_its_gpu_is_used(world: World) -> None:
    """The register may still be on its way when the job is given up."""
    engine, job = world.engine(relist_seconds=0.1), world.job(LONG, gpu="GPU-1")
    await world.launch(engine, world.job(LONG))
    world.observe(engine)
    await world.listed()
    del world.records.live_jobs[job.id]
    next_one = world.job(LONG, gpu="GPU-1")
    await _cannot_launch(world, engine, next_one)
    await world.until(lambda: world.looks(job) >= 2)
    assert engine.occupied()
    world.now_ms += 10_000
    await world.until(lambda: not engine.occupied())
    await world.launch(engine, next_one)


async def test_a_node_that_is_another_client_now_is_not_kept_for_what_the_old_one_had(world: World) -> None:
    engine, job = world.engine(relist_seconds=0.1), world.job(LONG, gpu="GPU-1")
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    world.fake.clients.down(world.nodes["n1"])
    await _given_up(world, engine, job)
    await world.listed(2)
    assert engine.occupied()
    world.nodes["n1"] = world.fake.add_node("gpu-node-1").id
    await world.until(lambda: not engine.occupied())


async def test_what_is_lost_for_the_server_and_unknown_to_its_client_is_not_waited_for(world: World) -> None:
    engine, job = world.engine(relist_seconds=0.1), world.job(LONG, gpu="GPU-1")
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    world.fake.clients.down(world.nodes["n1"])
    world.fake.clients.expire_disconnect(world.nodes["n1"])
    await _given_up(world, engine, job)
    world.now_ms += 60_000
    await world.listed(2)
    assert engine.occupied(), "its node is away"
    world.fake.clients.up(world.nodes["n1"], sync=False)
    await world.listed(2)
    assert engine.occupied(), "it is only just back"
    world.now_ms += 10_000
    await world.until(lambda: not engine.occupied())


async def test_gang_that_lost_a_node_is_ended_whole(world: World) -> None:
    engine, job = world.engine(), world.job(LONG, LONG, nodes=("n1", "n2"))
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING, 0)
    await world.until_state(job, TaskState.RUNNING, 1)
    world.fake.clients.down(world.nodes["n1"])
    world.fake.clients.expire_disconnect(world.nodes["n1"])
    sibling = await world.until_released(job, 1)
    lost = await world.until_state(job, TaskState.EXITED, 0)
    assert (sibling.fault, lost.fault, lost.released) == ("sibling_failed", "node_lost", False)


# --- what Nomad forgets ---------------------------------------------------------------------------------------------------


async def test_job_purged_behind_our_back_while_running_is_lost_and_never_launched_again(
    world: World,
) -> None:
    """EX-8: judged by our own record; confirmed after the time of grace with the node in touch."""
    engine, job = world.engine(relist_seconds=0.1), world.job(LONG)
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    world.fake.clients.hold_kills = True
    world.web.mute_events = True
    world.fake.deregister("default", world.nomad_id(job), purge=True)
    for id in [alloc["ID"] for alloc in world.fake.allocations_of("default", world.nomad_id(job))]:
        del world.fake.allocs[id]
    lost = await world.until_state(job, TaskState.EXITED)
    assert (lost.fault, lost.exit_code, lost.released) == ("node_lost", None, False)
    world.now_ms += 10_000
    assert (await world.until_released(job)).fault == "node_lost"
    await world.launch(engine, job)
    await world.launch(world.engine(), job)
    assert len(world.containers(job)) == 1


async def test_purge_that_leaves_the_allocation_is_judged_by_it(world: World) -> None:
    engine, job = world.engine(), world.job(LONG)
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_state(job, TaskState.RUNNING)
    world.fake.deregister("default", world.nomad_id(job), purge=True)
    task = await world.until_released(job)
    assert (task.exit_code, task.signal) == (137, 9)


async def test_success_that_nomad_has_forgotten_stays_a_success(world: World) -> None:
    """EX-8."""
    engine, job = world.engine(relist_seconds=0.1), world.job(sh("exit 0"))
    world.observe(engine)
    await world.launch(engine, job)
    ended = await world.until_released(job)
    world.fake.deregister("default", world.nomad_id(job), purge=True)
    world.fake.gc()
    await world.listed(3)
    await world.launch(world.engine(), job)
    assert (world.task(job), len(world.containers(job))) == (ended, 1)


async def test_ended_job_is_deregistered_at_once_and_purged_with_its_logs(world: World) -> None:
    """A batch job that has completed but was not stopped has been run again by Nomad. OB-1: logs for their time."""
    engine, job = world.engine(relist_seconds=0.05), world.job(sh("echo kept; exit 0"))
    world.observe(engine)
    await world.launch(engine, job)
    task = await world.until_released(job)
    await world.until(lambda: world.nomad_job(job)["Stop"])
    world.web.empty_logs = 1
    assert [chunk async for chunk in engine.logs(task, stream="stdout", follow=False, tail_bytes=None)] == [
        b"kept\n"
    ]
    await world.listed(2)
    assert ("default", world.nomad_id(job)) in world.fake.jobs
    world.now_ms += 3_600_000 + 60_000
    await world.until(lambda: ("default", world.nomad_id(job)) not in world.fake.jobs)
    world.fake.gc()
    with pytest.raises(LogsExpired):
        [chunk async for chunk in engine.logs(task, stream="stdout", follow=False, tail_bytes=None)]


async def test_a_node_whose_clock_is_behind_brings_no_early_purge(world: World) -> None:
    """A register that is still on its way would make the purged job anew and run it a second time (seed 101867)."""
    world.now_ms += 10**12  # long after what the nodes take for now
    engine, job = world.engine(relist_seconds=0.05), world.job(sh("exit 0"))
    world.observe(engine)
    await world.launch(engine, job)
    await world.until_released(job)
    await world.until(lambda: world.nomad_job(job)["Stop"])
    await world.listed(2)
    assert ("default", world.nomad_id(job)) in world.fake.jobs
    world.now_ms += 3_600_000
    await world.until(lambda: ("default", world.nomad_id(job)) not in world.fake.jobs)


async def test_logs_after_early_collection_are_expired_and_denied_ones_say_so(world: World) -> None:
    """OB-1: never a bare 500."""
    engine, job = world.engine(), world.job(sh("echo x; exit 0"))
    world.observe(engine)
    await world.launch(engine, job)
    task = await world.until_released(job)
    world.web.answers.append(("GET", "/v1/client/fs/logs", 500, "Permission denied"))
    with pytest.raises(EngineUnavailable, match="read-logs"):
        [chunk async for chunk in engine.logs(task, stream="stdout", follow=False, tail_bytes=None)]
    world.web.answers.append(("GET", "/v1/client/fs/logs", 404, 'Unknown allocation "x"'))
    with pytest.raises(LogsExpired):
        [chunk async for chunk in engine.logs(task, stream="stdout", follow=False, tail_bytes=None)]


async def test_jobs_of_others_are_neither_listed_nor_touched(world: World) -> None:
    engine, job = world.engine(relist_seconds=0.05), world.job(LONG)
    await world.launch(engine, job)
    foreign = {**world.nomad_job(job), "ID": "web.shop-1.a1", "Name": "web", "Meta": {"owner": "shop"}}
    world.fake.register(world.fake.check_register({"Job": foreign}))
    world.observe(engine)
    await world.until_state(job, TaskState.RUNNING)
    await world.listed(2)
    assert [one.job for one in await engine.list()] == [job.id]
    assert [task.job for task in world.records.history if task.job != job.id] == []
    assert not world.fake.jobs["default", "web.shop-1.a1"]["Stop"]


async def _launch_without_an_answer(world: World, engine: NomadEngine, job: Job) -> None:
    await world.launch(engine, world.job(LONG))  # it knows Nomad before
    await world.web.stop()
    with pytest.raises(EngineUnavailable):
        await world.launch(engine, job)
    await world.web.start()


async def test_stop_after_a_register_without_an_answer_waits_for_the_time_of_grace(world: World) -> None:
    """Nomad may still carry it out, so that it is not there says nothing yet."""
    engine, job = world.engine(), world.job(LONG)
    await _launch_without_an_answer(world, engine, job)
    world.observe(engine)
    await world.stop(engine, job)
    await world.until(lambda: world.looks(job) >= 3)
    assert world.task(job) is None
    world.now_ms += 10_000
    assert (await world.until_released(job)).fault == ""


async def test_stop_of_what_the_leader_before_may_have_sent_waits_for_the_time_of_grace(world: World) -> None:
    """Its register may still be on its way: released at once, it ran beside the next attempt (seeds 201524, 201538)."""
    before, job = world.engine(), world.job(LONG)
    await _launch_without_an_answer(world, before, job)
    next_leaders = world.engine()
    world.observe(next_leaders)
    await world.stop(next_leaders, job)
    await world.until(lambda: world.looks(job) >= 3)
    assert world.task(job) is None
    world.records.live_jobs[job.id] = replace(job, stop=None, state=JobState.ALLOCATED)
    await world.launch(before, job)  # it arrives
    world.ask_stop(job)
    task = await world.until_released(job)
    assert task.container, "ended as what it was, and not as something that Nomad never had"
    assert [one.running for one in world.containers(job)] == [False]


async def test_what_the_leader_before_may_have_sent_is_not_refused(world: World) -> None:
    """A refusal ends the attempt at once, and its register may still be on its way."""
    engine, job = world.engine(), world.job(LONG, nodes=("n9",))
    world.observe(engine)
    await world.listed()
    with pytest.raises(EngineUnavailable):
        await world.launch(engine, job)
    new = world.job(LONG, nodes=("n9",))
    with pytest.raises(EngineRefused):
        await world.launch(engine, new)


async def test_a_term_that_is_over_by_then_registers_nothing(world: World) -> None:
    """LE-4: stopped in the middle of a launch for longer than its lease, and going on where the next leader has ended
    the attempt since. Nomad would take it."""
    engine, job = world.engine(), world.job(LONG)
    held = [True]
    world.web.answers.append(("GET", "/v1/agent/self", 500, "busy"))
    with pytest.raises(EngineUnavailable):
        await engine.launch(job, world.grants(job), lambda: held[0])
    held[0] = False
    with pytest.raises(EngineUnavailable, match="the term is over"):
        await engine.launch(job, world.grants(job), lambda: held[0])
    assert await world.engine().list() == []


async def test_launch_between_two_reads_is_not_taken_for_a_purge(world: World) -> None:
    world.nodes["n3"] = "00000000-0000-4000-8000-000000000000"
    engine, job = world.engine(), world.job(LONG, LONG, nodes=("n1", "n3"))
    await world.launch(engine, job)
    world.web.answers.append(("GET", f"/v1/job/{world.nomad_id(job)}", 404, "job not found"))
    world.observe(engine)
    assert (await world.until_released(job, 1)).fault == "launch_failed"
    assert (await world.until_released(job, 0)).fault == "sibling_failed"
    assert world.web.answers == []


async def test_the_environment_does_not_lead_the_client_elsewhere(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "NOMAD_ADDR"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NOMAD_TOKEN", "somebody-else's")
    monkeypatch.setenv("NOMAD_NAMESPACE", "elsewhere")
    world.fake.acl = {"": {"list-jobs", "read-job", "submit-job", "agent:read"}}
    job = world.job(LONG)
    await world.launch(world.engine(), job)
    assert world.nomad_job(job)["Namespace"] == "default"
