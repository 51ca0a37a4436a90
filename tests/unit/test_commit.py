"""The fenced commit: what lands together, what is refused alone, and what a late transaction can no longer do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from coordinator.commit import Committer, Intent, LeadershipLost
from coordinator.config import Settings
from coordinator.records import LEADER, Leadership, encode
from coordinator.store import (
    Compare,
    Delete,
    MemoryStore,
    Put,
    StoreUnavailable,
    StoreUncertain,
    TxnResult,
    Write,
    absent,
    unchanged,
)

LEADERSHIP = Leadership("c1.1", "", 0)


class LosesAnswers(MemoryStore):
    """The next `keep_back` transactions are not applied yet; their sender is told that the answer was lost. `land`
    applies them, as a network does that delivers late."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.keep_back = 0
        self.lose_after = 0
        self.is_cut = self.is_cut_after = False  # nothing gets through; from the next lost answer on
        self.late: list[tuple[Sequence[Compare], Sequence[Write]]] = []

    async def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        if self.is_cut:
            raise StoreUnavailable("no connection")
        if self.keep_back:
            self.keep_back -= 1
            self.late.append((compares, writes))
            raise StoreUncertain("no answer")
        result = await super().txn(compares, writes)
        if self.lose_after:
            self.lose_after -= 1
            self.is_cut = self.is_cut_after
            raise StoreUncertain("no answer")
        return result

    async def land(self) -> list[bool]:
        late, self.late = self.late, []
        return [(await super(LosesAnswers, self).txn(*txn)).succeeded for txn in late]


async def elected(store: MemoryStore) -> Committer:
    result = await store.txn([absent(LEADER)], [Put(LEADER, encode(LEADERSHIP))])
    return Committer(store, Settings(), LEADERSHIP, 0, result.revision)


async def waiting(store: MemoryStore, *jobs: str) -> dict[str, int]:
    return {job: (await store.txn([], [Put(f"/q/{job}", b"")])).revision for job in jobs}


def placing(job: str, revision: int, value: bytes = b"x") -> Intent:
    return Intent(job, (unchanged(f"/q/{job}", revision),), (Delete(f"/q/{job}"), Put(f"/j/{job}", value)))


async def test_jobs_share_transactions_within_the_limits() -> None:
    store = MemoryStore(lambda: 0.0)
    committer = await elected(store)
    seen = await waiting(store, *(f"j{n:03d}" for n in range(100)))
    before = store.revision
    outcome = await committer.commit([placing(job, revision) for job, revision in seen.items()])
    assert sorted(outcome.written) == sorted(seen)
    assert store.revision - before == 3  # 40 jobs a transaction
    assert outcome.revision == store.revision


async def test_a_changed_job_is_refused_alone() -> None:
    store = MemoryStore(lambda: 0.0)
    committer = await elected(store)
    seen = await waiting(store, "a", "b", "c")
    await store.txn([], [Put("/q/b", b"cancelled")])
    outcome = await committer.commit([placing(job, revision) for job, revision in seen.items()])
    assert set(outcome.written) == {"a", "c"}
    assert outcome.refused == ("b",)
    assert await store.get("/j/b") is None


async def test_a_stolen_leader_key_ends_the_term() -> None:
    """LE-4: nothing of a deposed leader lands."""
    store = MemoryStore(lambda: 0.0)
    committer = await elected(store)
    seen = await waiting(store, "a")
    await store.txn([], [Delete(LEADER)])
    await store.txn([], [Put(LEADER, encode(Leadership("c2.1", "", 0)))])
    with pytest.raises(LeadershipLost):
        await committer.commit([placing("a", seen["a"])])
    assert await store.get("/j/a") is None


async def test_a_transaction_too_large_is_split_down_to_the_job() -> None:
    store = MemoryStore(lambda: 0.0, max_bytes=1000)
    committer = await elected(store)
    seen = await waiting(store, "a", "b")
    outcome = await committer.commit(
        [placing("a", seen["a"], b"x" * 600), placing("b", seen["b"], b"x" * 2000)]
    )
    assert outcome.written == ("a",)
    assert outcome.too_large == ("b",)


@pytest.mark.parametrize("renews", [True, False])
async def test_a_late_transaction_cannot_double_book(renews: bool) -> None:
    """The answer to placing `a` on the GPU is lost while the transaction is still under way; the next cycle sees the
    GPU free and gives it to `b`. The late transaction must not land as well. Without the renewed fence (negative
    control) it does, and both hold the GPU."""
    store = LosesAnswers()
    committer = await elected(store)
    seen = await waiting(store, "a", "b")
    store.keep_back = 1
    if renews:
        outcome = await committer.commit([placing("a", seen["a"], b"gpu-0")])
        assert outcome.unavailable
        assert outcome.revision  # once the replica has passed it, what it shows is final
    else:
        with pytest.raises(StoreUncertain):
            await store.txn([committer.fence], [placing("a", seen["a"], b"gpu-0").writes[1]])
    await committer.commit([placing("b", seen["b"], b"gpu-0")])
    landed = await store.land()
    holders = [key for key in ("/j/a", "/j/b") if await store.get(key) is not None]
    assert (landed, holders) == (([False], ["/j/b"]) if renews else ([True], ["/j/a", "/j/b"]))


async def test_a_lost_answer_of_the_renewal_itself_is_read_back() -> None:
    store = LosesAnswers()
    committer = await elected(store)
    seen = await waiting(store, "a", "b")
    store.lose_after = 2  # the commit's answer, then the renewal's
    outcome = await committer.commit([placing("a", seen["a"])])
    assert outcome.unavailable
    assert await store.get("/j/a") is not None  # it had landed
    assert (await committer.commit([placing("b", seen["b"])])).written == ("b",)


async def test_a_plan_that_may_not_know_what_had_landed_is_not_sent() -> None:
    """The answer to placing `a` is lost and the renewal after it fails, so nobody knows yet that `a` has the GPU. The
    plan of the next cycle, made meanwhile, gives it to `b`: it must not be sent before the replica has caught up."""
    store = LosesAnswers()
    committer = await elected(store)
    seen = await waiting(store, "a", "b")
    store.lose_after, store.is_cut_after = 1, True
    with pytest.raises(StoreUnavailable):
        await committer.commit([placing("a", seen["a"], b"gpu-0")])
    store.is_cut_after = store.is_cut = False
    outcome = await committer.commit([placing("b", seen["b"], b"gpu-0")])
    assert outcome.unavailable
    assert outcome.revision == store.revision
    assert await store.get("/j/b") is None
    assert (await committer.commit([placing("b", seen["b"], b"gpu-1")])).written == ("b",)


async def test_a_late_write_beside_the_plan_is_shut_out_by_the_next_one() -> None:
    """What was seen of a task is written late: it must not undo what was seen of it since."""
    store = LosesAnswers()
    committer = await elected(store)
    store.keep_back = 1
    with pytest.raises(StoreUncertain):
        await committer.write([], [Put("/t/a", b"running")])
    await committer.write([], [Put("/t/a", b"ended")])
    assert await store.land() == [False]
    item = await store.get("/t/a")
    assert item is not None
    assert item.value == b"ended"


async def test_transactions_in_flight_share_one_fence() -> None:
    store = MemoryStore(lambda: 0.0)
    committer = await elected(store)
    seen = await waiting(store, *(f"j{n:03d}" for n in range(90)))
    first, second = list(seen.items())[:45], list(seen.items())[45:]
    outcomes = await asyncio.gather(
        committer.commit([placing(*pair) for pair in first]),
        committer.commit([placing(*pair) for pair in second]),
    )
    assert sum(len(outcome.written) for outcome in outcomes) == 90
