"""Leadership on the in-memory store with a virtual clock (looptime): leases run out without anybody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest

from coordinator.config import Settings
from coordinator.leader import Term, campaign, fence
from coordinator.records import LEADER, Leadership, decode
from coordinator.store import (
    Compare,
    Delete,
    KeyValue,
    LeaseLost,
    Listing,
    MemoryStore,
    Put,
    StoreUnavailable,
    StoreUncertain,
    TxnResult,
    WatchBatch,
    Write,
    without_values,
)

pytestmark = pytest.mark.looptime

SETTINGS = Settings(lease_seconds=3, keep_alive_seconds=1)


async def nothing() -> None:
    pass


class Link:
    """One coordinator's way to the shared store. Each fault is set by a test; the hooks run once."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.is_cut = False
        self.renewals_fail = False
        self.renewals_hang = False
        self.reads_are_frozen = False
        self.leases: list[int] = []
        self.before_txn: Callable[[], Awaitable[None]] = nothing
        self.before_renewal: Callable[[], Awaitable[None]] = nothing
        self.instead_of_txn: Callable[[Sequence[Compare], Sequence[Write]], Awaitable[TxnResult]] | None = (
            None
        )
        self._frozen: dict[str, KeyValue | None] = {}

    def _reach(self) -> None:
        if self.is_cut:
            raise StoreUnavailable("cut")

    async def get(self, key: str) -> KeyValue | None:
        self._reach()
        if not self.reads_are_frozen or key not in self._frozen:
            self._frozen[key] = await self.store.get(key)
        return self._frozen[key]

    async def list(self, prefix: str, *, start_after: str = "", limit: int = 0) -> Listing:
        self._reach()
        return await self.store.list(prefix, start_after=start_after, limit=limit)

    async def pages(self, prefix: str, *, keys_only: Sequence[str] = ()) -> AsyncGenerator[Listing, None]:
        yield without_values(await self.list(prefix), keys_only)

    async def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        self._reach()
        hook, self.before_txn = self.before_txn, nothing
        await hook()
        if self.instead_of_txn is not None:
            instead, self.instead_of_txn = self.instead_of_txn, None
            return await instead(compares, writes)
        return await self.store.txn(compares, writes)

    async def watch(self, prefix: str, after_revision: int | None) -> AsyncGenerator[WatchBatch, None]:
        async with aclosing(self.store.watch(prefix, after_revision)) as batches:
            async for batch in batches:
                if self.reads_are_frozen:
                    await asyncio.Event().wait()
                yield batch

    async def grant_lease(self, ttl_seconds: int) -> int:
        self._reach()
        self.leases.append(await self.store.grant_lease(ttl_seconds))
        return self.leases[-1]

    async def keep_alive(self, lease: int) -> int:
        self._reach()
        hook, self.before_renewal = self.before_renewal, nothing
        await hook()
        if self.renewals_hang:
            await asyncio.Event().wait()
        if self.renewals_fail:
            raise StoreUnavailable("no quorum")
        return await self.store.keep_alive(lease)

    async def revoke_lease(self, lease: int) -> None:
        self._reach()
        await self.store.revoke_lease(lease)

    async def compact(self, revision: int) -> None:
        await self.store.compact(revision)

    async def close(self) -> None:
        pass


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
async def store() -> MemoryStore:
    return MemoryStore(asyncio.get_running_loop().time)


async def stand(link: Link, name: str) -> Term:
    return await campaign(link, SETTINGS, name, lambda: 1_000, address=f"http://{name}")


@asynccontextmanager
async def leading(link: Link, name: str = "a") -> AsyncIterator[Term]:
    term = await stand(link, name)
    try:
        yield term
    finally:
        await term.resign()


@asynccontextmanager
async def standing_by(link: Link, name: str = "b") -> AsyncIterator[asyncio.Task[Term]]:
    task = asyncio.create_task(stand(link, name))
    await asyncio.sleep(1)  # virtual: it has read the key and waits
    try:
        yield task
    finally:
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Term):
            await result.resign()


async def holder(store: MemoryStore) -> str | None:
    item = await store.get(LEADER)
    return decode(Leadership, item.value).id if item else None


async def test_the_first_one_leads_and_its_token_is_its_key(store: MemoryStore) -> None:
    async with leading(Link(store)) as term:
        item = await store.get(LEADER)
        assert item is not None
        assert term.token.create_revision == item.create_revision
        assert term.token.lease == item.lease
        assert decode(Leadership, item.value) == term.token.leadership
        assert term.token.leadership.address == "http://a"
        assert term.is_held
        assert (await store.txn([fence(term.token)], [Put("/k", b"")])).succeeded
    assert not term.is_held
    assert term.reason == "resigned"
    assert await holder(store) is None


async def test_ids_differ_from_term_to_term(store: MemoryStore) -> None:
    async with leading(Link(store)) as one:
        pass
    async with leading(Link(store)) as two:
        assert one.token.leadership.id != two.token.leadership.id
        assert not (await store.txn([fence(one.token)], [Put("/k", b"")])).succeeded


async def test_a_standby_takes_over_at_once_after_a_resignation(store: MemoryStore) -> None:
    term = await stand(Link(store), "a")
    async with standing_by(Link(store)) as standby:
        await asyncio.sleep(60)
        assert not standby.done()
        resigned_at = now()
        await term.resign()
        other = await standby
        assert now() - resigned_at < 0.05
        assert await holder(store) == other.token.leadership.id


async def test_a_standby_takes_over_when_the_lease_of_a_dead_leader_ends(store: MemoryStore) -> None:
    link = Link(store)
    async with leading(link), standing_by(Link(store)) as standby:
        link.is_cut = True
        cut_at = now()
        await standby
        assert 2 <= now() - cut_at <= 3.1


async def test_only_one_of_many_leads_at_a_time(store: MemoryStore) -> None:
    held: list[str] = []
    most = 0

    async def serve(name: str) -> None:
        nonlocal most
        async with leading(Link(store), name) as term:
            held.append(name)
            most = max(most, len(held))
            assert await holder(store) == term.token.leadership.id
            await asyncio.sleep(10)
            held.remove(name)

    await asyncio.gather(*(serve(f"c{n}") for n in range(8)))
    assert most == 1


@pytest.mark.parametrize("is_fenced", [True, False], ids=["fenced", "control: not fenced"])
async def test_le4_a_paused_leader_writes_nothing_after_its_term(store: MemoryStore, is_fenced: bool) -> None:
    """LE-4. The control shows that it is the fence which stops the write."""
    link = Link(store)
    term = await stand(link, "a")
    paused = asyncio.Event()

    async def place() -> TxnResult:
        compares = [fence(term.token)] if is_fenced else []
        await paused.wait()  # stopped in the middle of a placement
        return await store.txn(compares, [Put("/serai/jobs/1", b"by a")])

    placing = asyncio.create_task(place())
    link.is_cut = True
    async with standing_by(Link(store)) as standby:
        await asyncio.sleep(2 * SETTINGS.lease_seconds)
        other = await standby
        assert other.is_held
        paused.set()
        result = await placing
        assert not term.is_held, "nor does it launch anything outside the store"
        assert result.succeeded is not is_fenced
        assert (await store.get("/serai/jobs/1") is None) is is_fenced
        assert (await store.txn([fence(other.token)], [Put("/serai/jobs/2", b"by b")])).succeeded
    await term.resign()


async def test_le4_the_token_outlives_a_rewrite_of_the_key_by_its_holder(store: MemoryStore) -> None:
    async with leading(Link(store)) as term:
        await store.txn([fence(term.token)], [Put(LEADER, b"{}", term.token.lease)])
        await asyncio.sleep(10)
        assert term.is_held
        assert (await store.txn([fence(term.token)], [])).succeeded


async def test_le5_no_lease_is_held_while_another_leads(store: MemoryStore) -> None:
    link = Link(store)
    async with leading(Link(store)) as term, standing_by(link) as standby:
        await asyncio.sleep(100)
        assert link.leases == []
        await term.resign()
        assert (await standby).token.lease == link.leases[0]


async def test_le5_a_lease_lost_before_the_key_is_made_is_replaced(store: MemoryStore) -> None:
    link = Link(store)

    async def revoke() -> None:
        await store.revoke_lease(link.leases[-1])

    link.before_txn = revoke
    async with leading(link) as term:
        assert len(link.leases) == 2
        assert term.token.lease == link.leases[1]
        await asyncio.sleep(10)
        assert term.is_held


async def test_le5_a_lease_lost_after_the_key_is_made_is_no_leadership(store: MemoryStore) -> None:
    link = Link(store)

    async def revoke() -> None:
        assert await holder(store) is not None
        await store.revoke_lease(link.leases[-1])

    link.before_renewal = revoke
    async with leading(link) as term:
        assert len(link.leases) == 2
        assert await holder(store) == term.token.leadership.id


async def test_le7_leadership_is_kept_while_idle(store: MemoryStore) -> None:
    """LE-7: five minutes without any other call; and when renewals stop, loss is reported."""
    link = Link(store)
    async with leading(link) as term, standing_by(Link(store)) as standby:
        await asyncio.sleep(300)
        assert term.is_held
        assert not standby.done()
        assert await holder(store) == term.token.leadership.id
        link.renewals_fail = True
        async with asyncio.timeout(SETTINGS.lease_seconds):
            await term.lost.wait()


@pytest.mark.parametrize("fault", ["renewals_fail", "renewals_hang"])
async def test_le8_reads_do_not_keep_a_leader(store: MemoryStore, fault: str) -> None:
    """LE-8: the member that it talks to is cut off, and shows it its own key for ever."""
    link, other = Link(store), Link(store)
    async with leading(link) as term, standing_by(other) as standby:
        both_held: list[bool] = []

        async def look() -> None:
            both_held.append(term.is_held)

        other.before_txn = look
        await asyncio.sleep(10.5)  # after several renewals, and between two
        await link.get(LEADER)
        link.reads_are_frozen = True
        setattr(link, fault, True)
        failing_from = now()
        await term.lost.wait()
        lost_after = now() - failing_from
        assert await link.get(LEADER) is not None, "reads go on"
        assert lost_after <= SETTINGS.lease_seconds
        assert "not renewed" in term.reason
        assert (await standby).is_held
        assert both_held == [False], "it stops before anybody else may start"


async def test_a_short_trouble_does_not_end_a_term(store: MemoryStore) -> None:
    link = Link(store)
    async with leading(link) as term:
        for _ in range(5):
            link.is_cut = True
            await asyncio.sleep(1.5)
            link.is_cut = False
            await asyncio.sleep(3)
        assert term.is_held


async def test_a_lost_answer_of_the_winning_create_is_found_by_reading_back(store: MemoryStore) -> None:
    link = Link(store)

    async def applied(compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        assert (await store.txn(compares, writes)).succeeded
        raise StoreUncertain("answer lost")

    link.instead_of_txn = applied
    async with leading(link) as term:
        assert len(link.leases) == 1
        assert await holder(store) == term.token.leadership.id


async def test_another_ones_key_is_not_taken_for_ones_own(store: MemoryStore) -> None:
    """The answer is lost, and it would have been a refusal: the key that is read back is another's."""
    link = Link(store)
    winner = await stand(Link(store), "winner")
    held = await store.get(LEADER)
    assert held is not None
    await store.txn([], [Delete(LEADER)])

    async def too_late(compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        await store.txn([], [Put(LEADER, held.value, held.lease)])
        raise StoreUncertain("answer lost")

    link.instead_of_txn = too_late
    async with standing_by(link) as standby:
        assert not standby.done()
        assert await holder(store) == winner.token.leadership.id
        await winner.resign()
        await store.revoke_lease(held.lease)
        assert (await standby).is_held


async def test_a_create_that_was_given_up_cannot_land_later(store: MemoryStore) -> None:
    link = Link(store)
    late: list[tuple[Sequence[Compare], Sequence[Write]]] = []

    async def under_way(compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        late.append((compares, writes))
        raise StoreUncertain("answer lost")

    link.instead_of_txn = under_way
    async with leading(link) as term:
        assert len(link.leases) == 2
        await store.txn([], [Delete(LEADER)])
        with pytest.raises(LeaseLost):
            await store.txn(*late[0])
        await term.lost.wait()
        assert term.reason == "the leader key was deleted"


async def test_another_key_of_the_same_beginning_is_not_the_leader_key(store: MemoryStore) -> None:
    await store.txn([], [Put(LEADER + "x", b"")])
    async with leading(Link(store)) as term:
        await store.txn([], [Delete(LEADER + "x")])
        await asyncio.sleep(1)
        assert term.is_held


async def test_an_operator_may_end_a_term_by_deleting_the_key(store: MemoryStore) -> None:
    async with leading(Link(store)) as term:
        await store.compact(store.revision)
        await store.txn([], [Delete(LEADER)])
        await asyncio.wait_for(term.lost.wait(), 1)


async def test_a_campaign_waits_out_an_unreachable_store(store: MemoryStore) -> None:
    link = Link(store)
    link.is_cut = True
    async with standing_by(link) as standby:
        await asyncio.sleep(100)
        assert not standby.done()
        link.is_cut = False
        await asyncio.wait_for(asyncio.shield(standby), 2)


async def test_a_cancelled_campaign_leaves_no_key(store: MemoryStore) -> None:
    link = Link(store)
    won = asyncio.Event()

    async def stall() -> None:
        won.set()
        await asyncio.Event().wait()

    link.before_renewal = stall
    async with standing_by(link):
        await won.wait()
        assert await holder(store) is not None
    assert await holder(store) is None


async def test_resigning_does_not_wait_for_an_unreachable_store(store: MemoryStore) -> None:
    link = Link(store)
    term = await stand(link, "a")
    link.is_cut = True
    started_at = now()
    await term.resign()
    assert now() - started_at < 3
    assert term.lost.is_set()
