"""A term over a store: what a turn writes, what it does when the store knows better, and who may write at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from attrs import evolve

from coordinator.cluster import Cluster
from coordinator.commit import Committer, LeadershipLost
from coordinator.config import Settings
from coordinator.cycle_metrics import CycleMetrics
from coordinator.engines.agent import AgentEngine
from coordinator.fairness import policy_from
from coordinator.index import Index
from coordinator.lifecycle import cancelled
from coordinator.model import Job, JobState, Tenant
from coordinator.records import (
    JOBS,
    LEADER,
    Endpoint,
    Leadership,
    decode,
    done_key,
    encode,
    inventory_key,
    queue_key,
    report_key,
    tenant_key,
)
from coordinator.replica import Replica
from coordinator.scheduler import Scheduler
from coordinator.store import Compare, Delete, MemoryStore, Put, RequestTooLarge, Store, TxnResult, Write
from tests.builders import START_MS, job, node, report
from tests.invariants import check_snapshot
from vgpu.reasons import ReasonCode

SETTINGS = Settings()


async def _nowhere(node: str) -> Endpoint | None:
    return None


class Term:
    """A scheduler with a replica of its own, following the store until `freeze`."""

    def __init__(self, store: Store, name: str, revision: int, **changes: int) -> None:
        settings = evolve(SETTINGS, **changes)
        self.replica = Replica(store, lambda: Cluster(SETTINGS), lambda: START_MS)
        self._following = asyncio.create_task(self.replica.run())
        committer = Committer(store, settings, Leadership(name, "", 0), 0, revision)
        engine, policy = AgentEngine(_nowhere), policy_from(SETTINGS)
        self.scheduler = Scheduler(
            self.replica, engine, committer, settings, policy, lambda: START_MS, CycleMetrics(), Index()
        )

    async def freeze(self) -> None:
        """From here on it sees nothing new: a replica that lags."""
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)


class IntrudedStore(MemoryStore):
    """`intrusion` lands just before the first transaction that places a job; `tried` are the jobs of all of them."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop().time)
        self.most_writes = 128
        self.intrusion: Sequence[Write] = ()
        self.tried: list[str] = []

    async def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        placed = [w.key.removeprefix(JOBS) for w in writes if isinstance(w, Put) and w.key.startswith(JOBS)]
        self.tried += placed
        if len(writes) > self.most_writes:
            raise RequestTooLarge(f"{len(writes)} writes")
        if placed and self.intrusion:
            intrusion, self.intrusion = self.intrusion, ()
            await super().txn([], intrusion)
        return await super().txn(compares, writes)


async def _elect(store: MemoryStore, name: str, **changes: int) -> Term:
    if await store.get(LEADER) is not None:
        await store.txn([], [Delete(LEADER)])
    elected = await store.txn([], [Put(LEADER, encode(Leadership(name, "", 0)))])
    term = Term(store, name, elected.revision, **changes)
    await term.replica.wait_for(elected.revision)
    return term


@asynccontextmanager
async def _cluster(*jobs: Job, nodes: int = 1, cpu: int = 128_000) -> AsyncIterator[IntrudedStore]:
    """Nodes with one GPU each, and jobs that wait. It takes what etcd takes, or less."""
    store = IntrudedStore()
    names = [f"n{number}" for number in range(1, nodes + 1)]
    puts = [Put(inventory_key(name), encode(node(name, gpus=1, cpu=cpu))) for name in names]
    puts += [Put(report_key(name), encode(report(name))) for name in names]
    puts += [Put(tenant_key("a"), encode(Tenant("a", 1 << 20)))]
    puts += [Put(queue_key(j.tenant, j.id), encode(j)) for j in jobs]
    await store.txn([], puts)
    yield store
    cluster = Cluster(SETTINGS)
    replica = Replica(store, lambda: cluster, lambda: START_MS)
    following = asyncio.create_task(replica.run())
    await replica.ready()
    check_snapshot(replica.cluster.snapshot(START_MS))
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def _live(store: Store) -> list[str]:
    return [item.key.removeprefix(JOBS) for item in (await store.list(JOBS)).items]


async def test_two_leaders_with_one_free_gpu_reserve_it_once() -> None:
    """DA-4: the old leader's replica lags behind the new one's commit, and it still thinks that the GPU is free."""
    async with _cluster(job("j1"), job("j2")) as store:
        old = await _elect(store, "c1.1")
        await old.freeze()
        new = await _elect(store, "c2.1")
        await new.scheduler.turn()
        holders = await _live(store)
        assert len(holders) == 1
        with pytest.raises(LeadershipLost):
            await old.scheduler.turn()
        assert await _live(store) == holders
        await new.freeze()


async def test_a_refused_commit_is_planned_anew_and_not_repeated() -> None:
    """DA-8: the store says that the first job is cancelled; its slices go to the next one in the next turn."""
    async with _cluster(job("j1"), job("j2")) as store:
        term = await _elect(store, "c1.1")
        item = await store.get(queue_key("a", "j1"))
        assert item is not None
        gone = cancelled(decode(Job, item.value), START_MS)
        store.intrusion = [Delete(queue_key("a", "j1")), Put(done_key("j1"), encode(gone))]
        for _ in range(10):
            if not await term.scheduler.turn() and await _live(store):
                break
            await asyncio.sleep(0)
        assert await _live(store) == ["j2"]
        assert store.tried == ["j1", "j2"]
        await term.freeze()


async def test_a_turn_in_which_nothing_is_new_writes_nothing() -> None:
    async with _cluster(job("j1")) as store:
        term = await _elect(store, "c1.1")
        while await term.scheduler.turn():
            pass
        revision = store.revision
        assert not await term.scheduler.turn()
        assert store.revision == revision
        await term.freeze()


async def test_what_has_ended_goes_and_its_place_is_given_in_the_following_turn() -> None:
    async with _cluster(job("j1"), job("j2")) as store:
        term = await _elect(store, "c1.1")
        while await term.scheduler.turn():
            pass
        assert await _live(store) == ["j1"]
        item = await store.get(JOBS + "j1")
        assert item is not None
        stopping = evolve(decode(Job, item.value), state=JobState.CANCELLING)
        written = await store.txn([], [Put(JOBS + "j1", encode(stopping))])
        await term.replica.wait_for(written.revision)
        while await term.scheduler.turn():
            pass
        # The stop was asked for; until its end is confirmed the slices stay with it.
        assert await _live(store) == ["j1"]
        await term.freeze()


async def test_a_gang_that_no_transaction_holds_is_ended_with_the_reason() -> None:
    """It is not planned for ever, keeping others from the slices that it can never be given."""
    many = job("big", gpus=0, count=3)
    async with _cluster(many, job("j2"), nodes=3, cpu=1000) as store:
        store.most_writes = 4
        term = await _elect(store, "c1.1", max_writes_per_transaction=4)
        while await term.scheduler.turn():
            await asyncio.sleep(0)
        assert await _live(store) == ["j2"]
        item = await store.get(done_key("big"))
        assert item is not None
        ended = decode(Job, item.value)
        assert (ended.state, ended.exit_code) == (JobState.FAILED, 125)
        assert ended.reason is not None
        assert "at most 4 records" in ended.reason.detail
        await term.freeze()


async def test_the_job_with_the_reservation_is_told_at_once_and_its_withdrawal_is_remembered() -> None:
    """b holds the only GPU; a's job is owed it and waits for it."""
    async with _cluster(job("j1", tenant="b")) as store:
        term = await _elect(store, "c1.1")
        await term.scheduler.turn()
        assert await _live(store) == ["j1"]
        put = await store.txn([], [Put(queue_key("a", "j2"), encode(job("j2")))])
        await term.replica.wait_for(put.revision)
        while await term.scheduler.turn():
            pass
        item = await store.get(queue_key("a", "j2"))
        assert item is not None
        waiting = decode(Job, item.value)
        assert waiting.reason is not None
        assert waiting.reason.code is ReasonCode.RESERVED
        gone = cancelled(waiting, START_MS)
        ended = await store.txn([], [Delete(queue_key("a", "j2")), Put(done_key("j2"), encode(gone))])
        await term.replica.wait_for(ended.revision)
        assert term.replica.cluster.snapshot(START_MS).withdrawn == {"a": START_MS}
        fresh = await _elect(store, "c2.1")
        assert fresh.replica.cluster.snapshot(START_MS).withdrawn == {"a": START_MS}, "the next leader knows"
        await term.freeze()
        await fresh.freeze()
