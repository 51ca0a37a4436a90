"""What an engine is told of the attempts that must run: once, in time, again where it did not hear it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from attrs import define, field
from msgspec.structs import replace

from coordinator.cluster import Cluster
from coordinator.commit import Committer
from coordinator.config import Settings
from coordinator.engines import EngineRefused, EngineUnavailable, RunningAttempt, TaskSink
from coordinator.launches import Launches
from coordinator.model import Job, JobState, Task, TaskState
from coordinator.records import (
    LEADER,
    TASKS,
    Leadership,
    decode,
    encode,
    grant_key,
    job_key,
    task_key,
)
from coordinator.replica import Replica
from coordinator.store import Delete, MemoryStore, Put
from jobspecs.render import grants_for
from tests.builders import START_MS, node, piece, running, task
from vgpu.reasons import Reason, ReasonCode

pytestmark = pytest.mark.looptime

SETTINGS = Settings()


@define
class Ears:
    """An engine that notes what it is told. `fails` are raised before it hears anything."""

    name: str = "nomad"
    by_grants: bool = False
    is_term_held: bool = True
    told: list[tuple[str, str, int]] = field(factory=list)
    fails: list[Exception] = field(factory=list)

    async def launch(self, job: Job, grants: Sequence[object], is_held: Callable[[], bool]) -> None:
        if not is_held():
            raise EngineUnavailable("the term is over")
        self._hear("launch", job.id, job.attempt)
        assert len(grants) == 1

    async def stop(self, job: str, attempt: int, tenant: str) -> None:
        self._hear("stop", job, attempt)

    def _hear(self, what: str, job: str, attempt: int) -> None:
        if self.fails:
            raise self.fails.pop(0)
        self.told.append((what, job, attempt))

    async def list(self) -> Sequence[RunningAttempt]:
        return ()

    async def observe(self, sink: TaskSink) -> None:
        return None

    async def close(self) -> None:
        return None


@define
class World:
    store: MemoryStore
    replica: Replica
    engine: Ears

    async def start(self, live: Job) -> None:
        """The record of a live job with its grant, as a commit writes them."""
        assert live.allocation is not None
        grants = grants_for(
            live.id, live.spec, live.allocation, {"n1": node("n1")}, engine="nomad", cluster="serai"
        )
        puts = [Put(grant_key("n1", live.id, live.attempt), encode(grant)) for grant in grants]
        await self.write(Put(job_key(live.id), encode(live)), *puts)

    async def write(self, *writes: Put | Delete) -> None:
        result = await self.store.txn([], writes)
        await self.replica.wait_for(result.revision)
        await asyncio.sleep(0.1)


@asynccontextmanager
async def world(*fails: Exception, by_grants: bool = False) -> AsyncIterator[World]:
    store = MemoryStore(asyncio.get_running_loop().time)
    leadership = Leadership("c1.1", "", 0)
    elected = await store.txn([], [Put(LEADER, encode(leadership))])
    replica = Replica(store, lambda: Cluster(SETTINGS), lambda: START_MS)
    following = asyncio.create_task(replica.run())
    await replica.wait_for(elected.revision)
    engine = Ears(fails=list(fails), by_grants=by_grants)
    committer = Committer(store, SETTINGS, leadership, 0, elected.revision)
    launches = Launches(replica, engine, committer, SETTINGS, lambda: START_MS, lambda: engine.is_term_held)  # type: ignore[arg-type]
    telling = asyncio.create_task(launches.run())
    try:
        yield World(store, replica, engine)
    finally:
        for part in (telling, following):
            part.cancel()
        await asyncio.gather(telling, following, return_exceptions=True)


def live(id: str = "j1", isolation: str = "exclusive", **changes: object) -> Job:
    whole = isolation == "exclusive"
    held = piece("GPU-n1-0") if whole else piece("GPU-n1-0", 8192, 500, isolation)
    return running(id, "n1", [held], **changes)


async def test_an_attempt_is_launched_once_and_stopped_once() -> None:
    async with world() as w:
        job = live()
        await w.start(job)
        assert w.engine.told == [("launch", "j1", 1)]
        await w.write(Put(task_key("n1", "j1", 1, 0), encode(task(job))))
        stopping = replace(job, stop=Reason(ReasonCode.CANCELLED_BY_USER))
        await w.write(Put(job_key("j1"), encode(stopping)))
        await w.write(Put(job_key("j1"), encode(replace(stopping, failures=1))))
        assert w.engine.told == [("launch", "j1", 1), ("stop", "j1", 1)]


async def test_the_next_attempt_of_a_job_is_launched_too() -> None:
    async with world() as w:
        await w.start(live())
        await w.write(Delete(job_key("j1")), Delete(grant_key("n1", "j1", 1)))
        again = live(attempt=2)
        assert again.allocation is not None
        await w.start(replace(again, allocation=replace(again.allocation, attempt=2)))
        assert w.engine.told == [("launch", "j1", 1), ("launch", "j1", 2)]


async def test_an_attempt_with_isolation_steps_is_launched_when_its_node_is_ready() -> None:
    async with world() as w:
        job = live(isolation="mps")
        await w.start(job)
        assert w.engine.told == []
        await w.write(Put(task_key("n1", "j1", 1, 0), encode(task(job, state=TaskState.PREPARED))))
        assert w.engine.told == [("launch", "j1", 1)]


async def test_lk4_a_stop_that_came_before_the_launch_replaces_it() -> None:
    async with world() as w:
        job = live(isolation="mps")
        await w.start(job)
        stopping = replace(job, stop=Reason(ReasonCode.CANCELLED_BY_USER))
        await w.write(Put(job_key("j1"), encode(stopping)))
        await w.write(Put(task_key("n1", "j1", 1, 0), encode(task(job, state=TaskState.PREPARED))))
        assert w.engine.told == [("stop", "j1", 1)]


async def test_an_engine_that_cannot_be_reached_is_asked_again_for_launch_and_stop() -> None:
    away = [EngineUnavailable("away"), EngineUnavailable("away")]
    async with world(*away) as w:
        job = live()
        await w.start(job)
        assert w.engine.told == []
        await asyncio.sleep(2 * SETTINGS.back_off_seconds + 1)
        assert w.engine.told == [("launch", "j1", 1)]
        w.engine.fails = [EngineUnavailable("away")]
        await w.write(Put(job_key("j1"), encode(replace(job, stop=Reason(ReasonCode.EVICTED)))))
        await asyncio.sleep(SETTINGS.back_off_seconds + 1)
        assert w.engine.told == [("launch", "j1", 1), ("stop", "j1", 1)]


async def test_an_attempt_says_what_it_waits_for_until_the_engine_has_it() -> None:
    """Of a job that was placed and does not start nobody but the operator's log knew why."""
    away = EngineUnavailable("Nomad at http://n:4646 cannot be reached: Connection refused")
    async with world(away, away, EngineUnavailable("Nomad answered 500: No cluster leader")) as w:
        placed = Reason(ReasonCode.PLACED, subjects=("n1",))
        job = live(reason=placed)
        assert job.allocation is not None
        await w.start(replace(job, allocation=replace(job.allocation, placed=placed)))
        told, revisions = [], set()
        for _ in range(4):
            item = await w.store.get(job_key("j1"))
            assert item is not None
            told.append(decode(Job, item.value).reason)
            revisions.add(item.mod_revision)
            await asyncio.sleep(SETTINGS.back_off_seconds)
        waits = [
            Reason(
                ReasonCode.ENGINE_UNAVAILABLE,
                detail="Nomad at http://n:4646 cannot be reached: Connection refused",
            ),
            Reason(ReasonCode.ENGINE_UNAVAILABLE, detail="Nomad answered 500: No cluster leader"),
        ]
        assert told == [waits[0], waits[0], waits[1], placed]
        assert len(revisions) == 3, "the same is not written twice"
        assert w.engine.told == [("launch", "j1", 1)]


async def test_what_a_former_leader_said_it_waits_for_ends_with_the_launch_of_the_next() -> None:
    async with world() as w:
        placed = Reason(ReasonCode.PLACED, subjects=("n1",))
        job = live(reason=Reason(ReasonCode.ENGINE_UNAVAILABLE, detail="away"))
        assert job.allocation is not None
        await w.start(replace(job, allocation=replace(job.allocation, placed=placed)))
        item = await w.store.get(job_key("j1"))
        assert item is not None
        assert decode(Job, item.value).reason == placed


async def test_what_an_attempt_waits_for_is_not_said_of_one_that_is_stopped() -> None:
    async with world(EngineUnavailable("away"), EngineUnavailable("away")) as w:
        stopping = replace(live(), state=JobState.CANCELLING, stop=Reason(ReasonCode.CANCELLED_BY_USER))
        await w.start(stopping)
        await asyncio.sleep(3 * SETTINGS.back_off_seconds)
        item = await w.store.get(job_key("j1"))
        assert item is not None
        assert decode(Job, item.value) == stopping
        assert w.engine.told == [("stop", "j1", 1)]


async def test_a_refusal_ends_the_attempt() -> None:
    async with world(EngineRefused(Reason(ReasonCode.LAUNCH_FAILED, detail="no such driver"))) as w:
        await w.start(live())
        (item,) = (await w.store.list(TASKS)).items
        ended = decode(Task, item.value)
        assert (ended.state, ended.released) == (TaskState.EXITED, True)
        assert (ended.fault, ended.detail) == ("launch_failed", "no such driver")
        assert w.engine.told == []


async def test_le4_the_engine_is_told_how_to_ask_whether_the_term_goes_on() -> None:
    async with world() as w:
        w.engine.is_term_held = False
        await w.start(live())
        await asyncio.sleep(3 * SETTINGS.back_off_seconds)
        assert w.engine.told == []


async def test_an_engine_whose_launch_is_the_grant_is_told_nothing() -> None:
    async with world(by_grants=True) as w:
        await w.start(live())
        assert w.engine.told == []
