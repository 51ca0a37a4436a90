"""The sink of observed tasks: what an engine says once is written, whatever the store does meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from msgspec.structs import replace

from coordinator.cluster import Cluster
from coordinator.commit import Committer
from coordinator.config import Settings
from coordinator.engines import Engine, EngineUnavailable
from coordinator.engines.agent import AgentEngine
from coordinator.launches import Launches
from coordinator.model import Allocation, Happening, Job, JobState, Task, TaskPlacement, TaskState
from coordinator.records import (
    LEADER,
    Endpoint,
    Leadership,
    decode,
    encode,
    folder_key,
    grant_key,
    job_key,
    task_key,
)
from coordinator.replica import Replica
from coordinator.store import Delete, MemoryStore, Put, Write, absent
from jobspecs.container import Grant
from tests.builders import spec
from tests.fakes import FlakyStore
from tests.simulation.loop import VirtualLoop
from vgpu.reasons import Reason, ReasonCode

SETTINGS = Settings()
LEADERSHIP = Leadership("c1.1", "", 0)
ALLOCATION = Allocation(1, (TaskPlacement(0, "n1", (), 1000, 1024),), 0)
JOB = Job("j1", spec(gpus=0), JobState.ALLOCATED, 0, 0, allocation=ALLOCATION)
ENDED = Task("j1", 1, 0, "n1", TaskState.EXITED, exit_code=0, released=True)


async def _nowhere(node: str) -> Endpoint | None:
    return None


class StopsOnly(AgentEngine):
    """An engine that cannot be reached for some calls, and tells which stops it heard."""

    by_grants = False

    def __init__(self, unreachable: int) -> None:
        super().__init__(_nowhere)
        self.unreachable = unreachable
        self.heard: list[tuple[str, int, str]] = []

    async def stop(self, job: str, attempt: int, tenant: str) -> None:
        self.unreachable -= 1
        if self.unreachable >= 0:
            raise EngineUnavailable("down")
        self.heard.append((job, attempt, tenant))

    async def launch(
        self, job: Job, grants: Sequence[Grant], is_held: Callable[[], bool] = lambda: True
    ) -> None:
        """Nobody waits for it here."""


def on_virtual_time(
    test: Callable[[FlakyStore, Launches], Awaitable[None]], engine: Engine | None = None
) -> None:
    """Runs `test` with a live job of one task, led by one whose store fails as told."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        store = FlakyStore(MemoryStore(loop.time))
        elected = await store.txn([absent(LEADER)], [Put(LEADER, encode(LEADERSHIP))])
        grant = Grant("n1", "j1", 1, "a", (), 0, engine="nomad")
        await store.txn([], [Put(job_key("j1"), encode(JOB)), Put(grant_key("n1", "j1", 1), encode(grant))])
        replica = Replica(store, lambda: Cluster(SETTINGS), lambda: 0)
        following = asyncio.create_task(replica.run())
        await replica.ready()
        committer = Committer(store, SETTINGS, LEADERSHIP, 0, elected.revision)
        launches = Launches(
            replica, engine or AgentEngine(_nowhere), committer, SETTINGS, lambda: 0, lambda: True
        )
        await test(store, launches)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    loop = VirtualLoop(0)
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


async def _stored(store: FlakyStore) -> Task | None:
    item = await store.get(task_key("n1", "j1", 1, 0))
    return decode(Task, item.value) if item is not None else None


def test_an_end_is_written_though_the_store_was_away() -> None:
    """Seeds 1 and 4 of the simulation: the first lost answer ended the coordinator's process."""

    async def test(store: FlakyStore, launches: Launches) -> None:
        store.dropped_requests, store.lost_replies = 2, 1
        await launches.observed(ENDED)
        assert await _stored(store) == ENDED

    on_virtual_time(test)


def test_what_was_seen_earlier_cannot_land_on_what_was_seen_later() -> None:
    async def test(store: FlakyStore, launches: Launches) -> None:
        store.only, store.late_requests = "/serai/tasks/", 1
        running = replace(ENDED, state=TaskState.RUNNING, exit_code=None, released=False)
        telling = asyncio.create_task(launches.observed(running))
        await asyncio.sleep(0.5)  # the request is under way, and its answer was given up
        await launches.observed(ENDED)
        assert [result.succeeded for result in await store.deliver()] == [False]
        await telling
        assert await _stored(store) == ENDED

    on_virtual_time(test)


def test_nobody_waits_for_a_task_that_is_not_granted_any_more() -> None:
    async def test(store: FlakyStore, launches: Launches) -> None:
        await launches.observed(replace(ENDED, attempt=2))
        assert await _stored(store) is None

    on_virtual_time(test)


def _ended(after: Job) -> list[Write]:
    return [Delete(job_key("j1")), Delete(grant_key("n1", "j1", 1)), Put(folder_key(after), encode(after))]


LOST = Happening(JobState.LOST, 0, 1, Reason(ReasonCode.NODE_LOST, subjects=("n1",)))


@pytest.mark.parametrize(
    ("after", "heard"),
    [
        (replace(JOB, state=JobState.FAILED, history=(LOST,)), [("j1", 1, "a")]),
        (replace(JOB, state=JobState.PENDING, attempt=2, allocation=None, history=(LOST,)), [("j1", 1, "a")]),
        (replace(JOB, state=JobState.SUCCEEDED), []),
    ],
)
def test_what_was_given_up_with_its_node_is_withdrawn_from_the_engine(
    after: Job, heard: list[tuple[str, int, str]]
) -> None:
    """RR-11, seed 100179 of the simulation: an allocation that a lost node had never heard of started on slices that
    others held by then. The engine cannot be reached at first."""
    engine = StopsOnly(unreachable=2)

    async def test(store: FlakyStore, launches: Launches) -> None:
        running = asyncio.create_task(launches.run())
        await asyncio.sleep(1)
        await store.txn([], _ended(after))
        await asyncio.sleep(300)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert engine.heard == heard

    on_virtual_time(test, engine)


def test_a_stop_that_the_engine_has_not_heard_is_repeated_after_the_end() -> None:
    """A job that was cancelled and whose node was given up: its end says nothing of the node."""
    engine = StopsOnly(unreachable=3)

    async def test(store: FlakyStore, launches: Launches) -> None:
        running = asyncio.create_task(launches.run())
        await store.txn(
            [], [Put(job_key("j1"), encode(replace(JOB, stop=Reason(ReasonCode.CANCELLED_BY_USER))))]
        )
        await asyncio.sleep(0.5)
        await store.txn([], _ended(replace(JOB, state=JobState.CANCELLED)))
        await asyncio.sleep(300)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert engine.heard == [("j1", 1, "a")]

    on_virtual_time(test, engine)
