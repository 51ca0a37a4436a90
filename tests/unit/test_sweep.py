"""Housekeeping of a term: bounded in what it keeps, careful in what it deletes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from attrs import define, evolve
from msgspec.structs import replace

from coordinator.cluster import Cluster
from coordinator.commit import Committer
from coordinator.config import Settings
from coordinator.engines.agent import AgentEngine
from coordinator.model import Job, JobState, Mix
from coordinator.records import (
    DONE,
    GRANTS,
    LEADER,
    MIX,
    Endpoint,
    Leadership,
    decode,
    done_key,
    encode,
    grant_key,
    job_key,
    queue_key,
)
from coordinator.replica import Replica
from coordinator.store import MemoryStore, Put
from coordinator.sweep import ROUND_SECONDS, SLOW_ROUND_SECONDS, Sweep
from jobspecs.container import Grant
from tests.builders import job, piece, running
from tests.fakes import FakeClock

pytestmark = pytest.mark.looptime


class CompactedStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop().time, max_writes=256)
        self.compactions: list[tuple[float, int]] = []

    async def compact(self, revision: int) -> None:
        self.compactions.append((asyncio.get_running_loop().time(), revision))
        await super().compact(revision)


async def _nowhere(node: str) -> Endpoint | None:
    return None


@define
class World:
    store: CompactedStore
    replica: Replica
    clock: FakeClock

    async def put(self, *puts: Put) -> None:
        result = await self.store.txn([], puts)
        await self.replica.wait_for(result.revision)

    async def keys(self, folder: str) -> list[str]:
        return [item.key.removeprefix(folder) for item in (await self.store.list(folder)).items]

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(round(1000 * seconds))
        await asyncio.sleep(seconds)


@asynccontextmanager
async def sweeping(*before: Put, **changes: object) -> AsyncIterator[World]:
    settings = evolve(Settings(), **changes)
    store, clock = CompactedStore(), FakeClock()
    leadership = Leadership("c1.1", "", 0)
    elected = await store.txn([], [Put(LEADER, encode(leadership)), *before])
    replica = Replica(store, lambda: Cluster(settings), clock)
    following = asyncio.create_task(replica.run())
    await replica.wait_for(elected.revision)
    committer = Committer(store, settings, leadership, 0, elected.revision)
    sweep = Sweep(store, replica, AgentEngine(_nowhere), committer, settings, clock)
    running = asyncio.create_task(sweep.run())
    try:
        yield World(store, replica, clock)
        assert not running.done(), running
    finally:
        for part in (running, following):
            part.cancel()
        await asyncio.gather(running, following, return_exceptions=True)


def ended(ids: Sequence[str], at_ms: int | None = None) -> list[Put]:
    at_ms = FakeClock().now_ms if at_ms is None else at_ms
    return [Put(done_key(id), encode(_ended(id, at_ms))) for id in ids]


def _ended(id: str, at_ms: int) -> Job:
    return replace(job(id), state=JobState.SUCCEEDED, ended_at_ms=at_ms)


async def test_ended_jobs_beyond_the_number_that_is_kept_go_oldest_first() -> None:
    ids = [f"j{number:03d}" for number in range(250)]
    async with sweeping(*ended(ids), done_retention_jobs=100) as world:
        await world.pass_time(ROUND_SECONDS)
        assert await world.keys(DONE) == ids[150:], "those that were there when the term began"
        await world.put(*ended(["k1", "k2"]))
        await world.put(*ended(["k1"]))  # written again: it is still one
        await world.pass_time(ROUND_SECONDS)
        assert await world.keys(DONE) == [*ids[152:], "k1", "k2"], "and those that came since"


async def test_ended_jobs_go_after_their_time() -> None:
    old_ms = FakeClock().now_ms - 8 * 24 * 3_600_000
    async with sweeping(*ended(["old"], old_ms), *ended(["new"])) as world:
        await world.pass_time(SLOW_ROUND_SECONDS)
        assert await world.keys(DONE) == ["new"]


async def test_what_tenants_submit_is_written_once_enough_is_new_and_over_garbage() -> None:
    """DA-7 too: a record that cannot be read is known as such until it is written anew."""

    async def tasks(world: World) -> list[int]:
        items = (await world.store.list(MIX)).items
        return [sum(line.tasks for line in decode(Mix, item.value).lines) for item in items]

    async with sweeping(Put(MIX, b"garbage")) as world:
        assert list(world.replica.unreadable) == [MIX]
        await world.pass_time(2 * SLOW_ROUND_SECONDS)
        assert [item.value for item in (await world.store.list(MIX)).items] == [b"garbage"], "nothing is new"
        await world.put(*(Put(queue_key("a", f"j{n}"), encode(job(f"j{n}"))) for n in range(15)))
        await world.pass_time(SLOW_ROUND_SECONDS)
        assert await tasks(world) == [15]
        assert not world.replica.unreadable
        await world.put(Put(queue_key("a", "k1"), encode(job("k1"))))
        await world.pass_time(SLOW_ROUND_SECONDS)
        assert await tasks(world) == [15], "little is new"
        await world.put(Put(queue_key("a", "k2"), encode(job("k2"))))
        await world.pass_time(SLOW_ROUND_SECONDS)
        assert await tasks(world) == [17]


async def test_compaction_keeps_its_distance_and_its_period() -> None:
    keep = {"compact_every_seconds": 5, "compact_keep_revisions": 20, "compact_keep_seconds": 30}
    async with sweeping(**keep) as world:
        for number in range(100):
            await world.put(Put(queue_key("a", f"j{number}"), encode(job(f"j{number}"))))
            await world.pass_time(1)
            for _, revision in world.store.compactions[-1:]:
                assert revision <= world.store.revision - 20, (
                    "never nearer to the head than a slow watcher may be"
                )
                assert revision <= world.store.revision - 30, "one write a second: nor nearer than 30 s"
        times = [at for at, _ in world.store.compactions]
        assert len(times) >= 12
        assert {round(later - before) for before, later in itertools.pairwise(times)} == {5}
        assert world.replica.numbers.listings == 1, "and the replica's watch was not cut off"


async def test_a_grant_without_a_live_attempt_goes_after_two_sightings() -> None:
    live = running("j1", "n1", [piece("GPU-n1-0")])
    grants = [Put(grant_key("n1", id, 1), encode(Grant("n1", id, 1, "a", (), 0))) for id in ("j1", "gone")]
    async with sweeping(Put(job_key("j1"), encode(live)), *grants) as world:
        await world.pass_time(ROUND_SECONDS - 1)
        assert await world.keys(GRANTS) == ["n1/gone.1", "n1/j1.1"], "seen once"
        await world.pass_time(ROUND_SECONDS)
        assert await world.keys(GRANTS) == ["n1/j1.1"]
