"""When the leader runs a cycle: for what a cycle decides about, and for nothing else; and what one commit holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from attrs import evolve, frozen
from msgspec.structs import replace

from coordinator.cluster import Cluster
from coordinator.commit import Committer
from coordinator.config import Settings
from coordinator.cycle_metrics import CycleMetrics
from coordinator.engines.agent import AgentEngine
from coordinator.fairness import policy_from
from coordinator.index import Index
from coordinator.model import Job, TaskState, Tenant
from coordinator.records import (
    DONE,
    JOBS,
    LEADER,
    QUEUE,
    Endpoint,
    Leadership,
    decode,
    encode,
    inventory_key,
    job_key,
    queue_key,
    report_key,
    task_key,
    tenant_key,
)
from coordinator.replica import Replica
from coordinator.scheduler import Scheduler
from coordinator.store import MemoryStore, Put
from tests.builders import job, node, report, task
from tests.fakes import FakeClock, FlakyStore

pytestmark = pytest.mark.looptime


async def _nowhere(node: str) -> Endpoint | None:
    return None


@frozen
class Led:
    """A store under a leader whose loop runs."""

    store: FlakyStore
    replica: Replica
    metrics: CycleMetrics
    clock: FakeClock

    @property
    def plans(self) -> int:
        return int(
            self.metrics.registry.get_sample_value("serai_cycle_seconds_count", {"phase": "plan"}) or 0
        )

    async def put(self, key: str, record: object) -> None:
        result = await self.store.txn([], [Put(key, encode(record))])
        await self.replica.wait_for(result.revision)

    async def count(self, folder: str) -> int:
        return len((await self.store.list(folder)).items)

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(120):
            while not await holds():
                await asyncio.sleep(0.01)

    async def is_quiet(self) -> int:
        """The number of plans once nothing is under way."""
        await asyncio.sleep(1)
        return self.plans

    async def run_jobs(self) -> None:
        """Every live job comes to run."""
        for item in (await self.store.list(JOBS)).items:
            live = decode(Job, item.value)
            assert live.allocation is not None
            where = live.allocation.tasks[0].node
            await self.put(task_key(where, live.id, live.attempt, 0), task(live))


@asynccontextmanager
async def led(gpus: int, **changes: object) -> AsyncIterator[Led]:
    settings = evolve(Settings(), **changes)
    clock, loop = FakeClock(), asyncio.get_running_loop()
    store = FlakyStore(MemoryStore(loop.time))
    records = {inventory_key("n1"): node("n1", gpus=gpus), report_key("n1"): report("n1", clock.now_ms)}
    puts = [Put(key, encode(record)) for key, record in records.items()]
    await store.txn([], [*puts, Put(tenant_key("a"), encode(Tenant("a", 1 << 24)))])
    leadership = Leadership("c1.1", "", 0)
    elected = await store.txn([], [Put(LEADER, encode(leadership))])
    replica = Replica(store, lambda: Cluster(settings), clock)
    following = asyncio.create_task(replica.run())
    await replica.wait_for(elected.revision)
    committer = Committer(store, settings, leadership, 0, elected.revision)
    metrics = CycleMetrics()
    engine, policy = AgentEngine(_nowhere), policy_from(settings)
    scheduler = Scheduler(replica, engine, committer, settings, policy, clock, metrics, Index())
    leading = asyncio.create_task(scheduler.run())
    try:
        yield Led(store, replica, metrics, clock)
    finally:
        for part in (leading, following):
            part.cancel()
        await asyncio.gather(leading, following, return_exceptions=True)


async def test_neither_a_report_nor_a_task_that_came_to_run_costs_a_plan() -> None:
    async with led(8) as world:
        await world.put(queue_key("a", "j1"), job("j1"))
        await world.until(lambda: _is(world.count(JOBS), 1))
        plans = await world.is_quiet()
        assert plans > 0
        await world.run_jobs()
        for second in range(1, 20):
            newer = replace(report("n1", world.clock.now_ms + 1000 * second), sequence=second)
            await world.put(report_key("n1"), newer)
        assert await world.is_quiet() == plans
        await world.put(queue_key("a", "j2"), job("j2"))
        await world.until(lambda: _is(world.count(JOBS), 2))
        assert await world.is_quiet() > plans


async def test_a_report_that_frees_a_gpu_lets_a_waiting_job_start() -> None:
    async with led(1) as world:
        uuid = node("n1", gpus=1).gpus[0].uuid
        await world.put(report_key("n1"), report("n1", world.clock.now_ms, faults={uuid: "xid 79"}))
        await world.put(queue_key("a", "j1"), job("j1"))
        await world.is_quiet()
        assert await world.count(JOBS) == 0
        await world.put(report_key("n1"), report("n1", world.clock.now_ms + 1))
        await world.until(lambda: _is(world.count(JOBS), 1))


async def test_more_waiting_jobs_than_a_cycle_may_place_are_all_placed() -> None:
    """Nothing new comes after the first cycle: that it was full is reason enough for the next."""
    async with led(8, placements_per_cycle=5) as world:
        puts = [Put(queue_key("a", f"j{n:02d}"), encode(job(f"j{n:02d}", memory=4096))) for n in range(32)]
        await world.store.txn([], puts)
        await world.until(lambda: _is(world.count(JOBS), 32))
        assert world.plans >= 7


async def test_a_stream_of_ends_does_not_keep_placements_waiting() -> None:
    """In each turn something has ended; a job that fits beside them is placed all the same."""
    async with led(8) as world:
        puts = [Put(queue_key("a", f"j{n}"), encode(job(f"j{n}"))) for n in range(6)]
        await world.store.txn([], puts)
        await world.until(lambda: _is(world.count(JOBS), 6))
        lives = [decode(Job, item.value) for item in (await world.store.list(JOBS)).items]
        ends = [replace(task(one, state=TaskState.EXITED), exit_code=0) for one in lives]
        placed_at: list[int] = []

        async def end_them() -> None:
            for end in ends:
                await world.put(task_key("n1", end.job, end.attempt, 0), end)
                if await world.store.get(job_key("new")) is not None:
                    placed_at.append(await world.count(DONE))
                await asyncio.sleep(0.02)

        await world.put(queue_key("a", "new"), job("new"))
        await end_them()
        await world.until(lambda: _is(world.count(DONE), 6))
        assert placed_at, "it was placed before the last of them had ended"


async def test_what_the_store_did_not_take_is_decided_again() -> None:
    async with led(8) as world:
        world.store.only, world.store.dropped_requests = JOBS, 1
        await world.put(queue_key("a", "j1"), job("j1"))
        await world.until(lambda: _is(world.count(JOBS), 1))
        assert await world.count(QUEUE) == 0
        assert world.store.dropped_requests == 0


async def _is(found: Awaitable[int], expected: int) -> bool:
    return await found == expected
