"""A term over a store: what a turn writes, what it does when the store knows better, and who may write at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest
from attrs import evolve
from msgspec.structs import replace

from coordinator.cluster import Cluster
from coordinator.commit import Committer, Intent, LeadershipLost, Outcome
from coordinator.config import Settings
from coordinator.cycle import Plan, plan_cycle
from coordinator.cycle_metrics import CycleMetrics
from coordinator.engines import Engine, Occupied
from coordinator.engines.agent import AgentEngine
from coordinator.fairness import Policy, policy_from
from coordinator.guard import ASIDE_MS
from coordinator.index import Index
from coordinator.lifecycle import Transition, cancelled, settle_job
from coordinator.model import Allocation, Job, JobState, TaskPlacement, Tenant
from coordinator.records import (
    GRANTS,
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
from coordinator.scheduler import FAULT_SECONDS, MOST_FAILED_CYCLES, Scheduler
from coordinator.snapshot import Snapshot
from coordinator.store import Compare, Delete, MemoryStore, Put, RequestTooLarge, Store, TxnResult, Write
from tests.builders import START_MS, job, node, piece, report, running
from tests.invariants import check_snapshot
from vgpu.reasons import ReasonCode

SETTINGS = Settings()


async def _nowhere(node: str) -> Endpoint | None:
    return None


class Term:
    """A scheduler with a replica of its own, following the store until `freeze`."""

    def __init__(
        self, store: Store, name: str, revision: int, parts: Mapping[str, object], **changes: int
    ) -> None:
        settings = evolve(SETTINGS, **changes)
        self.now_ms, self.metrics = START_MS, CycleMetrics()
        self.replica = Replica(store, lambda: Cluster(SETTINGS), lambda: self.now_ms)
        self._following = asyncio.create_task(self.replica.run())
        make_committer = cast(type[Committer], parts.get("committer", Committer))
        committer = make_committer(store, settings, Leadership(name, "", 0), 0, revision)
        engine = cast(Engine, parts.get("engine", AgentEngine(_nowhere)))
        policy = policy_from(SETTINGS)
        self.scheduler = Scheduler(
            self.replica,
            engine,
            committer,
            settings,
            policy,
            lambda: self.now_ms,
            self.metrics,
            Index(),
            **{name: part for name, part in parts.items() if name not in ("committer", "engine")},  # type: ignore[arg-type]
        )

    async def turn_until_quiet(self) -> None:
        while await self.scheduler.turn():
            await asyncio.sleep(0)

    async def metric(self, name: str) -> float:
        body, _ = await self.metrics.render(self.replica, "")
        lines = [line for line in body.decode().splitlines() if line.startswith(name)]
        return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0

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


async def _elect(
    store: MemoryStore, name: str, parts: Mapping[str, object] | None = None, **changes: int
) -> Term:
    """`parts` of the scheduler are put in place of the real ones."""
    if await store.get(LEADER) is not None:
        await store.txn([], [Delete(LEADER)])
    elected = await store.txn([], [Put(LEADER, encode(Leadership(name, "", 0)))])
    term = Term(store, name, elected.revision, parts or {}, **changes)
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
        stopping = replace(decode(Job, item.value), state=JobState.CANCELLING)
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


# --- faults of our own -----------------------------------------------------------------------------------------------


async def _waiting(store: Store, id: str) -> Job:
    item = await store.get(queue_key("a", id))
    assert item is not None
    return decode(Job, item.value)


def _task(slices: Sequence[str], number: int = 0, node: str = "n1") -> TaskPlacement:
    return TaskPlacement(number, node, tuple(piece(gpu) for gpu in slices), 1000, 1024)


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ((), "has 1 tasks, placed are []"),
        ((_task([]),), "asks for 1 GPUs, was given []"),
        ((_task([""]),), "has no GPU ['']"),
        ((_task(["GPU-of-nobody"]),), "has no GPU ['GPU-of-nobody']"),
        ((_task(["GPU-n1-0", "GPU-n1-0"]),), "asks for 1 GPUs"),
        ((_task(["GPU-n1-0"], number=1),), "placed are [1]"),
        ((_task(["GPU-n1-0"], node=""),), "the node is not known"),
        ((replace(_task([]), slices=(piece("GPU-n1-0", memory=0),)),), "a slice of it is empty"),
    ],
)
async def test_an_allocation_that_is_not_whole_is_not_committed(
    tasks: tuple[TaskPlacement, ...], says: str
) -> None:
    """TP-5: the plan gives a job no device, too few, or what no node has. Its job goes on waiting and is told; no grant of
    it exists, that could start it on GPUs which it does not hold; the others start."""

    def planner(snapshot: Snapshot, policy: Policy, memo: Index) -> Plan:
        plan = plan_cycle(snapshot, policy, memo)
        maimed = Allocation(1, tasks, START_MS)
        return evolve(
            plan,
            placements=tuple(
                replace(p, allocation=maimed) if p.job.id == "j1" else p for p in plan.placements
            ),
        )

    async with _cluster(job("j1"), job("j2"), nodes=2) as store:
        term = await _elect(store, "c1.1", {"planner": planner})
        await term.turn_until_quiet()
        assert await _live(store) == ["j2"]
        assert [item.key.rpartition("/")[2] for item in (await store.list(GRANTS)).items] == ["j2.1"]
        reason = (await _waiting(store, "j1")).reason
        assert reason is not None
        assert reason.code is ReasonCode.INTERNAL_ERROR
        assert says in reason.detail
        assert await term.metric('serai_cycle_failures_total{part="placement"}') == 1
        assert await term.metric("serai_jobs_set_aside") == 1
        await term.freeze()


def _fails_on(*ids: str) -> Callable[[Snapshot, Policy, Index], Plan]:
    def planner(snapshot: Snapshot, policy: Policy, memo: Index) -> Plan:
        if snapshot.waiting_jobs.keys() & set(ids):
            raise ZeroDivisionError(f"on one of {ids}")
        return plan_cycle(snapshot, policy, memo)

    return planner


async def test_a_job_on_which_planning_fails_is_set_aside_and_the_others_start() -> None:
    jobs = [job(f"j{number}", number) for number in range(5)]
    async with _cluster(*jobs, nodes=5) as store:
        term = await _elect(store, "c1.1", {"planner": _fails_on("j3")})
        await term.turn_until_quiet()
        assert await _live(store) == ["j0", "j1", "j2", "j4"]
        bad = await _waiting(store, "j3")
        assert bad.state is JobState.PENDING
        assert bad.reason is not None
        assert bad.reason.code is ReasonCode.INTERNAL_ERROR
        assert bad.reason.detail == "ZeroDivisionError", "what a deep error quotes is for the log"
        assert await term.metric('serai_cycle_failures_total{part="plan"}') == 2
        assert await term.metric('serai_jobs_waiting{reason="internal_error"}') == 1
        await term.freeze()


async def test_a_job_that_was_set_aside_is_tried_again_and_its_reason_goes() -> None:
    """As after an update of the coordinator, or when what it failed on has gone."""
    failing = ["j1"]

    def planner(snapshot: Snapshot, policy: Policy, memo: Index) -> Plan:
        return _fails_on(*failing)(snapshot, policy, memo)

    async with _cluster(job("j1")) as store:
        term = await _elect(store, "c1.1", {"planner": planner})
        await term.turn_until_quiet()
        assert await _live(store) == []
        failing.clear()
        term.now_ms += ASIDE_MS - 1
        term.scheduler.look_again()
        await term.turn_until_quiet()
        assert await _live(store) == []
        term.now_ms += 1
        term.scheduler.look_again()
        await term.turn_until_quiet()
        assert await _live(store) == ["j1"]
        await term.freeze()


async def test_what_was_kept_from_earlier_cycles_may_be_at_fault() -> None:
    """Then the plan succeeds from cold, and nobody is set aside."""
    calls = 0

    def planner(snapshot: Snapshot, policy: Policy, memo: Index) -> Plan:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise IndexError("a memo that is out of step")
        return plan_cycle(snapshot, policy, memo)

    async with _cluster(job("j1")) as store:
        term = await _elect(store, "c1.1", {"planner": planner})
        await term.turn_until_quiet()
        assert await _live(store) == ["j1"]
        assert await term.metric("serai_jobs_set_aside") == 0
        await term.freeze()


async def test_where_planning_fails_with_nobody_waiting_what_ends_is_settled_all_the_same() -> None:
    """Nobody is set aside for it, and it is tried again a few seconds later and not at once."""
    calls = 0
    stopping = replace(running("j1", "n1", [piece("GPU-n1-0")]), state=JobState.CANCELLING)

    def planner(snapshot: Snapshot, policy: Policy, memo: Index) -> Plan:
        nonlocal calls
        calls += 1
        raise ZeroDivisionError("whoever waits")

    async with _cluster(job("j2")) as store:
        await store.txn([], [Put(JOBS + "j1", encode(stopping))])
        term = await _elect(store, "c1.1", {"planner": planner})
        await term.turn_until_quiet()
        item = await store.get(JOBS + "j1")
        assert item is not None
        assert decode(Job, item.value).stop is not None, "its nodes were asked to end it"
        assert (await _waiting(store, "j2")).reason is None
        assert calls == 3, "warm, from cold, with nobody"
        term.now_ms += 1000 * FAULT_SECONDS
        term.scheduler.look_again()
        await term.turn_until_quiet()
        assert calls == 6
        await term.freeze()


async def test_a_live_job_that_cannot_be_settled_keeps_nobody_else_from_its_end() -> None:
    def settle_one(one: Job, snapshot: Snapshot) -> Transition | None:
        if one.id == "j1":
            raise KeyError("a record that nobody foresaw")
        return settle_job(one, snapshot)

    held = [running(f"j{n}", f"n{n}", [piece(f"GPU-n{n}-0")]) for n in (1, 2)]
    stopping = [replace(one, state=JobState.CANCELLING) for one in held]
    async with _cluster(nodes=2) as store:
        await store.txn([], [Put(JOBS + one.id, encode(one)) for one in stopping])
        term = await _elect(store, "c1.1", {"settle_one": settle_one})
        await term.turn_until_quiet()
        items = [await store.get(JOBS + id) for id in ("j1", "j2")]
        assert [decode(Job, item.value).stop is not None for item in items if item] == [False, True]
        assert await term.metric('serai_cycle_failures_total{part="settle"}') >= 1
        await term.freeze()


class _Stumbling(Committer):
    """Fails as no commit should, so often."""

    times = 0

    async def commit(self, intents: Sequence[Intent]) -> Outcome:
        if self.times > 0:
            self.times -= 1
            raise OverflowError("nobody foresaw this")
        return await super().commit(intents)


@pytest.mark.looptime
async def test_a_cycle_that_fails_for_no_jobs_sake_is_run_again() -> None:
    class Once(_Stumbling):
        times = 1

    async with _cluster(job("j1")) as store:
        term = await _elect(store, "c1.1", {"committer": Once})
        running_term = asyncio.create_task(term.scheduler.run())
        async with asyncio.timeout(3 * FAULT_SECONDS):
            while not await _live(store):
                await asyncio.sleep(1)
        assert await term.metric('serai_cycle_failures_total{part="cycle"}') == 1
        running_term.cancel()
        await asyncio.gather(running_term, return_exceptions=True)
        await term.freeze()


@pytest.mark.looptime
async def test_a_cycle_that_fails_for_ever_ends_the_term() -> None:
    """A process that starts anew may do better."""

    class Always(_Stumbling):
        times = 1_000

    async with _cluster(job("j1")) as store:
        term = await _elect(store, "c1.1", {"committer": Always})
        with pytest.raises(OverflowError):
            await term.scheduler.run()
        assert await term.metric('serai_cycle_failures_total{part="cycle"}') == MOST_FAILED_CYCLES
        await term.freeze()


async def test_the_log_says_once_whose_clock_is_off(caplog: pytest.LogCaptureFixture) -> None:
    """LE-1: five minutes ahead, in two reports; and nothing is made of it."""
    async with _cluster(job("j1"), nodes=2) as store:
        term = await _elect(store, "c1.1")
        for _ in range(3):
            ahead = Put(report_key("n2"), encode(report("n2", START_MS + 300_000)))
            written = await store.txn([], [ahead])
            await term.replica.wait_for(written.revision)
            await term.turn_until_quiet()
        assert [r.getMessage() for r in caplog.records if "clock" in r.getMessage()] == [
            "node=n2 clock is off by +300 s"
        ]
        assert await _live(store) == ["j1"]
        await term.freeze()


class Reluctant(AgentEngine):
    """An engine that may still run something on the GPU of a node."""

    def __init__(self) -> None:
        super().__init__(_nowhere)
        self.left: Occupied = {"n1": {"GPU-n1-0": ("old.1.0",)}, "n9": {"GPU-n9-0": ("older.1.0",)}}

    def occupied(self) -> Occupied:
        return self.left


@pytest.mark.looptime
async def test_what_the_engine_may_still_run_is_not_given_away_before_it_is_gone() -> None:
    """RR-11: nothing is written when it is gone, so the leader looks again by itself."""
    engine = Reluctant()
    async with _cluster(job("j1"), nodes=1) as store:
        term = await _elect(store, "c1", {"engine": engine})
        leading = asyncio.create_task(term.scheduler.run())
        await asyncio.sleep(30)
        waiting = term.replica.cluster.waiting_jobs["j1"]
        assert waiting.reason is not None
        assert waiting.reason.code is ReasonCode.NOT_ENOUGH_IDLE_GPUS
        engine.left = {}
        await asyncio.sleep(1.1)
        assert "j1" in term.replica.cluster.live_jobs
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
