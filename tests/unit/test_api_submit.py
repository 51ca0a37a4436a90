"""The group commit: batches, refusals, lost answers, bounds. Each test ends with what stands in the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from random import Random

import pytest
from msgspec.structs import replace

from coordinator import records
from coordinator.api.submit import (
    IdempotencyConflict,
    IdTaken,
    QueueFull,
    Submission,
    SubmitPump,
    TenantUnknown,
)
from coordinator.model import Job, JobState, Tenant
from coordinator.store import (
    Delete,
    MemoryStore,
    Put,
    RequestTooLarge,
    StoreFull,
    StoreUnavailable,
    StoreUncertain,
)
from jobspecs.spec import JobSpec, TaskSpec
from tests.fakes import FakeClock, FlakyStore

MakePump = Callable[..., SubmitPump]
NOW_MS = FakeClock().now_ms


def job(id: str, tenant: str = "a", env: str = "") -> Job:
    spec = JobSpec("n", tenant, (TaskSpec(image="i", env={"K": env} if env else {}),))
    return Job(id, spec, JobState.PENDING, NOW_MS, NOW_MS)


@pytest.fixture
async def store() -> FlakyStore:
    memory = MemoryStore(asyncio.get_running_loop().time)
    for tenant in ("a", "b"):
        await memory.txn((), (Put(records.tenant_key(tenant), records.encode(Tenant(tenant))),))
    return FlakyStore(memory)


@pytest.fixture
async def make_pump(store: FlakyStore) -> AsyncIterator[MakePump]:
    pumps: list[SubmitPump] = []

    def make(**changes: object) -> SubmitPump:
        settings: dict[str, object] = {
            "max_operations": 128,
            "queue_jobs": 1000,
            "idempotency_seconds": 24 * 3600,
            "clock_ms": FakeClock(),
            "random": Random(len(pumps)),
        }
        pump = SubmitPump(store, **{**settings, **changes})  # type: ignore[arg-type]
        pump.start()
        pumps.append(pump)
        return pump

    yield make
    store.gate.set()
    for pump in pumps:
        await pump.close()
        assert pump.waiting_jobs == 0


async def stored(store: FlakyStore) -> list[str]:
    listing = await store.store.list(records.QUEUE)
    return [item.key.removeprefix(records.QUEUE) for item in listing.items]


async def test_what_arrives_while_all_slots_are_busy_shares_a_transaction(
    store: FlakyStore, make_pump: MakePump
) -> None:
    batches: list[int] = []
    pump = make_pump(observe_batch=batches.append)
    store.gate.clear()
    waiting = [asyncio.create_task(pump.submit(Submission([job(f"j{n:03d}")]))) for n in range(300)]
    await asyncio.sleep(0)
    store.gate.set()
    receipts = await asyncio.gather(*waiting)
    assert len(await stored(store)) == 300
    assert sum(batches) == 300
    assert len(batches) <= 6, "three single ones that found a free slot, then full transactions"
    assert all(len(compares) <= 128 and len(writes) <= 128 for compares, writes in store.transactions)
    for number, receipt in enumerate(receipts):
        item = await store.get(records.queue_key("a", f"j{number:03d}"))
        assert item is not None
        assert item.mod_revision == receipt.revision


async def test_an_unknown_tenant_is_refused_and_the_others_of_its_batch_go_on(
    store: FlakyStore, make_pump: MakePump
) -> None:
    pump = make_pump()
    await pump.submit(Submission([job("first")]))
    store.gate.clear()
    submissions = [
        Submission([job(f"j{n}", tenant)]) for n, tenant in enumerate(["a", "gone", "b", "gone", "a", "b"])
    ]
    waiting = [asyncio.create_task(pump.submit(submission)) for submission in submissions]
    await asyncio.sleep(0)
    store.gate.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result).__name__ for result in results] == [
        "Receipt", "TenantUnknown", "Receipt", "TenantUnknown", "Receipt", "Receipt",
    ]  # fmt: skip
    assert await stored(store) == ["a/first", "a/j0", "a/j4", "b/j2", "b/j5"]


async def test_a_tenant_that_went_or_closes_after_it_was_read_takes_no_job(
    store: FlakyStore, make_pump: MakePump
) -> None:
    """QT-5: the submit's transaction itself holds the tenant still."""
    pump = make_pump()
    await pump.submit(Submission([job("j1", "a"), job("j2", "b")]))
    await store.txn((), (Delete(records.tenant_key("a")),))
    await store.txn((), (Put(records.tenant_key("b"), records.encode(Tenant("b", closing=True))),))
    with pytest.raises(TenantUnknown) as gone:
        await pump.submit(Submission([job("j3", "a")]))
    assert not gone.value.closing
    with pytest.raises(TenantUnknown) as closing:
        await pump.submit(Submission([job("j4", "b")]))
    assert closing.value.closing
    await store.txn((), (Put(records.tenant_key("b"), records.encode(Tenant("b"))),))
    await pump.submit(Submission([job("j5", "b")]))
    assert await stored(store) == ["a/j1", "b/j2", "b/j5"]


async def test_a_changed_quota_does_not_refuse_a_submit(store: FlakyStore, make_pump: MakePump) -> None:
    pump = make_pump()
    await pump.submit(Submission([job("j1")]))
    await store.txn((), (Put(records.tenant_key("a"), records.encode(Tenant("a", quota_memory_mib=5))),))
    await pump.submit(Submission([job("j2")]))
    assert await stored(store) == ["a/j1", "a/j2"]


async def test_an_id_that_is_taken_refuses_that_submission_alone(
    store: FlakyStore, make_pump: MakePump
) -> None:
    pump = make_pump()
    await pump.submit(Submission([job("j1", env="first")]))
    store.gate.clear()
    waiting = [
        asyncio.create_task(pump.submit(Submission([job(id)]))) for id in ("j0", "j1", "j2", "j3", "j4")
    ]
    await asyncio.sleep(0)
    store.gate.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [isinstance(result, IdTaken) for result in results] == [False, True, False, False, False]
    item = await store.get(records.queue_key("a", "j1"))
    assert item is not None
    assert records.decode(Job, item.value).spec.tasks[0].env == {"K": "first"}


async def test_a_lost_answer_is_read_back_and_not_sent_again(store: FlakyStore, make_pump: MakePump) -> None:
    pump = make_pump()
    store.only, store.lost_replies = records.QUEUE, 1
    receipt = await pump.submit(Submission([job("j1"), job("j2")]))
    assert await stored(store) == ["a/j1", "a/j2"]
    assert len(store.transactions) == 1
    assert receipt.revision >= 3


async def test_a_lost_answer_of_a_job_that_has_moved_on_meanwhile_is_still_a_success(
    store: FlakyStore, make_pump: MakePump
) -> None:
    """The leader may have taken it out of the queue before it was read back."""
    pump = make_pump()
    store.only, store.lost_replies = records.QUEUE, 1
    reading = FlakyStore.txn

    async def moved(self: FlakyStore, compares: object, writes: object) -> object:
        if not writes:
            done = replace(job("j1"), state=JobState.CANCELLED)
            await self.store.txn(
                (), (Delete(records.queue_key("a", "j1")), Put(records.done_key("j1"), records.encode(done)))
            )
        return await reading(self, compares, writes)  # type: ignore[arg-type]

    store.txn = moved.__get__(store)  # type: ignore[method-assign]
    await pump.submit(Submission([job("j1")]))
    assert await stored(store) == []
    assert len(store.transactions) == 1


async def test_a_transaction_that_comes_late_cannot_submit_a_job_twice(
    store: FlakyStore, make_pump: MakePump
) -> None:
    """The request was under way while its job was looked for, sent again, and has run already when it arrives."""
    pump = make_pump()
    store.only, store.late_requests = records.QUEUE, 1
    await pump.submit(Submission([job("j1")]))
    assert await stored(store) == ["a/j1"]
    await store.txn((), (Delete(records.queue_key("a", "j1")),))  # it was placed
    late = await store.deliver()
    assert [result.succeeded for result in late] == [False]
    assert await stored(store) == []


async def test_without_the_fence_the_late_transaction_would_have_submitted_it_again(
    store: FlakyStore, make_pump: MakePump
) -> None:
    """The negative control of the test above."""
    pump = make_pump()
    store.only, store.late_requests = records.QUEUE, 1
    await pump.submit(Submission([job("j1")]))
    await store.txn((), (Delete(records.queue_key("a", "j1")),))
    compares, writes = store.transactions[0]
    unfenced = [compare for compare in compares if not compare.key.startswith(records.FENCES)]
    assert len(unfenced) == len(compares) - 1
    assert (await store.store.txn(unfenced, writes)).succeeded


async def test_after_a_lost_answer_the_other_transactions_under_way_go_again(
    store: FlakyStore, make_pump: MakePump
) -> None:
    pump = make_pump()
    store.only, store.late_requests = records.QUEUE, 1
    await asyncio.gather(*(pump.submit(Submission([job(f"j{n}")])) for n in range(20)))
    await store.deliver()
    assert len(await stored(store)) == 20


async def test_nothing_is_written_where_the_store_is_not_there_or_full(
    store: FlakyStore, make_pump: MakePump
) -> None:
    pump = make_pump()
    store.only, store.dropped_requests = records.QUEUE, 1
    with pytest.raises(StoreUnavailable):
        await pump.submit(Submission([job("j1")]))
    store.is_full = True
    with pytest.raises(StoreFull):
        await pump.submit(Submission([job("j2")]))
    store.is_full = False
    await pump.submit(Submission([job("j3")]))
    assert await stored(store) == ["a/j3"]


async def test_an_answer_that_stays_lost_is_said_to_be_uncertain(
    store: FlakyStore, make_pump: MakePump
) -> None:
    pump = make_pump()
    store.only, store.late_requests = records.QUEUE, 1
    reading = store.grant_lease

    async def down(ttl_seconds: int) -> int:
        store.is_down = True
        return await reading(ttl_seconds)

    store.grant_lease = down  # type: ignore[method-assign]
    with pytest.raises(StoreUncertain):
        await pump.submit(Submission([job("j1")]))


class TestIdempotency:
    KEY = records.idempotency_key("a", "k")

    async def test_twenty_of_one_key_on_two_instances_make_one_job(
        self, store: FlakyStore, make_pump: MakePump
    ) -> None:
        """AP-8: the check is in the transaction, so it holds over instances and over lost answers."""
        pumps = [make_pump(), make_pump()]
        store.only, store.lost_replies = records.QUEUE, 2
        receipts = await asyncio.gather(
            *(pumps[n % 2].submit(Submission([job(f"j{n}")], self.KEY, "body")) for n in range(20))
        )
        assert len(await stored(store)) == 1
        replayed = {receipt.replayed.jobs for receipt in receipts if receipt.replayed is not None}
        assert len(replayed) == 1
        assert sum(receipt.replayed is None for receipt in receipts) == 1

    async def test_another_body_is_a_conflict_and_writes_nothing(
        self, store: FlakyStore, make_pump: MakePump
    ) -> None:
        pump = make_pump()
        await pump.submit(Submission([job("j1")], self.KEY, "body"))
        with pytest.raises(IdempotencyConflict):
            await pump.submit(Submission([job("j2")], self.KEY, "other"))
        assert await stored(store) == ["a/j1"]

    async def test_the_answer_is_kept_for_its_time_and_then_the_key_is_free(
        self, store: FlakyStore, make_pump: MakePump
    ) -> None:
        clock = FakeClock(0)
        pump = make_pump(clock_ms=clock)

        def at_now(id: str) -> Submission:
            return Submission([replace(job(id), submitted_at_ms=clock())], self.KEY, "body")

        await pump.submit(at_now("j1"))
        clock.advance(24 * 3600 * 1000 - 1)
        assert (await pump.submit(at_now("j2"))).replayed is not None
        clock.advance(1)
        assert (await pump.submit(at_now("j3"))).replayed is None
        assert (await pump.submit(at_now("j4"))).replayed is not None
        assert await stored(store) == ["a/j1", "a/j3"]

    async def test_the_store_forgets_the_record_by_itself(
        self, make_pump: MakePump, store: FlakyStore
    ) -> None:
        now = [0.0]
        memory = store.store = MemoryStore(lambda: now[0])
        await memory.txn((), (Put(records.tenant_key("a"), records.encode(Tenant("a"))),))
        await make_pump().submit(Submission([job("j1")], self.KEY, "body"))
        now[0] = 24 * 3600.0
        assert await memory.get(self.KEY) is not None
        now[0] = 27 * 3600.0
        assert await memory.get(self.KEY) is None

    async def test_a_lease_that_was_lost_is_made_again(self, make_pump: MakePump, store: FlakyStore) -> None:
        pump = make_pump()
        await pump.submit(Submission([job("j1")], self.KEY, "body"))
        item = await store.get(self.KEY)
        assert item is not None
        await store.revoke_lease(item.lease)
        await pump.submit(Submission([job("j2")], self.KEY, "body"))
        assert await stored(store) == ["a/j1", "a/j2"]


class TestBounds:
    async def test_more_than_the_queue_holds_is_refused_and_what_was_taken_is_written(
        self, store: FlakyStore, make_pump: MakePump
    ) -> None:
        pump = make_pump(queue_jobs=10)
        store.gate.clear()
        waiting = [asyncio.create_task(pump.submit(Submission([job(f"j{n}")]))) for n in range(10)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as full:
            await pump.submit(Submission([job("j10")]))
        assert (full.value.unit, full.value.limit, full.value.value) == ("jobs", 10, 11)
        store.gate.set()
        await asyncio.gather(*waiting)
        await pump.submit(Submission([job("j11")]))
        assert len(await stored(store)) == 11

    async def test_bytes_are_bounded_too(self, store: FlakyStore, make_pump: MakePump) -> None:
        pump = make_pump()
        store.gate.clear()
        waiting = [
            asyncio.create_task(pump.submit(Submission([job(f"j{n}", env="x" * 900_000)]))) for n in range(37)
        ]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as full:
            await pump.submit(Submission([job("j99", env="x" * 900_000)]))
        assert full.value.unit == "bytes"
        store.gate.set()
        await asyncio.gather(*waiting)

    async def test_a_submission_that_no_transaction_holds_is_refused_at_once(
        self, make_pump: MakePump
    ) -> None:
        pump = make_pump()
        with pytest.raises(RequestTooLarge):
            await pump.submit(Submission([job(f"j{n}") for n in range(128)]))
        with pytest.raises(RequestTooLarge):
            await pump.submit(Submission([job("j", env="x" * 1_000_001)]))
        await pump.submit(
            Submission([job(f"j{n}") for n in range(125)], records.idempotency_key("a", "k"), "b")
        )

    async def test_a_caller_that_goes_away_does_not_take_its_job_along(
        self, store: FlakyStore, make_pump: MakePump
    ) -> None:
        pump = make_pump()
        store.gate.clear()
        waiting = asyncio.create_task(pump.submit(Submission([job("j1")])))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        store.gate.set()
        await pump.close()
        assert await stored(store) == ["a/j1"]

    async def test_closing_writes_what_was_taken_in_and_takes_no_more(
        self, store: FlakyStore, make_pump: MakePump
    ) -> None:
        pump = make_pump()
        waiting = [asyncio.create_task(pump.submit(Submission([job(f"j{n}")]))) for n in range(50)]
        await asyncio.sleep(0)
        await pump.close()
        await asyncio.gather(*waiting)
        assert len(await stored(store)) == 50
        with pytest.raises(QueueFull):
            await pump.submit(Submission([job("late")]))


async def test_a_fence_whose_own_answer_was_lost_stops_no_later_submit(
    store: FlakyStore, make_pump: MakePump
) -> None:
    """Simulation seed 401882: the fence stood, the API did not know it, and refused every submit for an hour."""
    pump = make_pump()
    store.lost_replies = 1_000_000
    with pytest.raises(StoreUncertain):
        await pump.submit(Submission([job("j1")]))
    store.lost_replies = 0
    await pump.submit(Submission([job("j2")]))
    assert await stored(store) == ["a/j1", "a/j2"]
