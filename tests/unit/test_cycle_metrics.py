"""What a leader tells of its cycles, and where it is heard."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from coordinator.cluster import Cluster
from coordinator.config import Settings
from coordinator.cycle_metrics import CycleMetrics, listener
from coordinator.gauges import WatchLag
from coordinator.records import encode, queue_key
from coordinator.replica import Replica
from coordinator.store import MemoryStore, Put
from tests.builders import START_MS, World, job, node


def replica_of(store: MemoryStore) -> Replica:
    return Replica(store, lambda: Cluster(Settings()), lambda: START_MS)


async def test_waiting_jobs_are_counted_by_reason_without_those_just_placed() -> None:
    world = World(node("n1", gpus=2))
    world.submit(*(job(f"whole{n}") for n in range(5)), *(job(f"never{n}", gpus=9) for n in range(3)))
    snapshot = world.snapshot()
    plan = world.plan()
    assert len(plan.placements) == 2
    metrics = CycleMetrics()
    metrics.observe_plan(snapshot, plan)
    body, _ = await metrics.render(replica_of(MemoryStore(lambda: 0.0)), "")
    found = {
        line.split('reason="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in body.decode().splitlines()
        if line.startswith("serai_jobs_waiting{")
    }
    reasons: dict[str, float] = {}
    for id in plan.waiting:
        code = plan.waiting[id].code.value
        reasons[code] = reasons.get(code, 0) + 1
    assert found == reasons
    assert sum(found.values()) == 6
    assert len(found) == 2


async def test_the_listener_serves_phases_transactions_and_how_the_store_is_followed() -> None:
    store = MemoryStore(asyncio.get_running_loop().time)
    replica = replica_of(store)
    following = asyncio.create_task(replica.run())
    written = await store.txn([], [Put(queue_key("a", "j1"), encode(job("j1")))])
    await replica.wait_for(written.revision)
    metrics = CycleMetrics()
    with metrics.phase("plan"):
        pass
    metrics.observe_batch(40)
    metrics.observe_commit(written.revision + 3, 2)
    metrics.is_leading = True
    async with listener("127.0.0.1:0", metrics, replica) as address, aiohttp.ClientSession() as session:
        async with session.get(f"{address}/metrics") as answer:
            text = await answer.text()
            assert answer.status == 200
            assert answer.headers["Content-Type"].startswith("text/plain")
        async with session.get(f"{address}/v1/jobs") as answer:
            assert answer.status == 404, "it serves nothing else"
    for line in (
        'serai_cycle_seconds_count{phase="plan"} 1.0',
        'serai_commit_transaction_jobs_bucket{le="64.0"} 1.0',
        "serai_commit_refused_jobs_total 2.0",
        "serai_store_revision_behind 3.0",
        "serai_replica_listings 1.0",
        "serai_leading 1.0",
    ):
        assert line in text.splitlines(), line
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_no_listener_unless_it_is_asked_for() -> None:
    async with listener("", CycleMetrics(), replica_of(MemoryStore(lambda: 0.0))) as address:
        assert address == ""


@pytest.mark.looptime
async def test_watch_lag_is_from_the_answer_to_the_sight() -> None:
    store = MemoryStore(asyncio.get_running_loop().time)
    replica = replica_of(store)
    lags: list[float] = []
    lag = WatchLag(replica, lags.append)
    written = await store.txn([], [Put(queue_key("a", "j1"), encode(job("j1")))])
    lag.written(written.revision)
    lag.written(written.revision)  # one at a time is followed
    await asyncio.sleep(3)
    following = asyncio.create_task(replica.run())
    await replica.wait_for(written.revision)
    await asyncio.sleep(0.01)
    assert [round(seconds) for seconds in lags] == [3]
    await lag.close()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
