"""What every Store promises (see its module docstring), kept by the in-memory one and by real etcd alike."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from coordinator.etcd_store import EtcdSettings, EtcdStore
from coordinator.store import (
    Change,
    Compacted,
    Delete,
    LeaseLost,
    Listing,
    MemoryStore,
    Put,
    RequestTooLarge,
    Store,
    absent,
    created_at,
    unchanged,
)
from tests.etcd_server import EtcdServer

_numbers = itertools.count()


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.etcd)])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    made: Store
    if request.param == "memory":
        made = MemoryStore(asyncio.get_running_loop().time)
    else:
        server: EtcdServer = request.getfixturevalue("etcd_server")
        made = EtcdStore(EtcdSettings.from_url(server.url))
    yield made
    await made.close()


@pytest.fixture
def at() -> str:
    """A prefix that no other test uses."""
    return f"/contract/{next(_numbers)}/"


async def put(store: Store, key: str, value: bytes = b"v", lease: int = 0) -> int:
    result = await store.txn([], [Put(key, value, lease)])
    assert result.succeeded
    return result.revision


async def changes(store: Store, prefix: str, after: int, count: int) -> list[Change]:
    """The first `count` changes; never cut inside a batch."""
    found: list[Change] = []
    async with asyncio.timeout(10), aclosing(store.watch(prefix, after)) as batches:
        async for batch in batches:
            found += batch.changes
            assert not batch.changes or batch.revision >= batch.changes[-1].item.mod_revision
            if len(found) >= count:
                break
    return found


# --- transactions ----------------------------------------------------------------------------------------------------


async def test_a_transaction_writes_everything_at_one_revision(store: Store, at: str) -> None:
    before = await put(store, at + "old")
    result = await store.txn(
        [absent(at + "a")], [Put(at + "a", b"1"), Put(at + "b", b"2"), Delete(at + "old")]
    )
    assert result.succeeded
    assert result.revision == before + 1
    items = (await store.list(at)).items
    assert [(i.key, i.value, i.mod_revision) for i in items] == [
        (at + "a", b"1", result.revision),
        (at + "b", b"2", result.revision),
    ]


async def test_a_refused_transaction_writes_nothing_and_tells_what_it_saw(store: Store, at: str) -> None:
    revision = await put(store, at + "there")
    result = await store.txn(
        [absent(at + "there"), absent(at + "gone"), unchanged(at + "there", revision)], [Put(at + "new", b"")]
    )
    assert not result.succeeded
    assert result.seen[at + "gone"] is None
    seen = result.seen[at + "there"]
    assert seen is not None
    assert (seen.create_revision, seen.mod_revision) == (revision, revision)
    assert await store.get(at + "new") is None


async def test_compares_tell_creation_from_change(store: Store, at: str) -> None:
    created = await put(store, at + "k")
    changed = await put(store, at + "k", b"2")
    assert (await store.txn([created_at(at + "k", created)], [])).succeeded
    assert not (await store.txn([unchanged(at + "k", created)], [])).succeeded
    assert (await store.txn([unchanged(at + "k", changed)], [Delete(at + "k")])).succeeded
    await put(store, at + "k")
    assert not (await store.txn([created_at(at + "k", created)], [])).succeeded, "it is another key by now"
    assert (await store.txn([unchanged(at + "none", 0), created_at(at + "none", 0)], [])).succeeded


async def test_of_many_that_create_one_key_one_succeeds(store: Store, at: str) -> None:
    results = await asyncio.gather(
        *(store.txn([absent(at + "k")], [Put(at + "k", str(n).encode())]) for n in range(20))
    )
    winners = [n for n, result in enumerate(results) if result.succeeded]
    assert len(winners) == 1
    item = await store.get(at + "k")
    assert item is not None
    assert item.value == str(winners[0]).encode()


async def test_deleting_what_is_not_there_is_no_change(store: Store, at: str) -> None:
    before = await put(store, at + "k")
    result = await store.txn([], [Delete(at + "none")])
    assert result.succeeded
    assert result.revision == before


@pytest.mark.parametrize(
    ("count", "size"), [(129, 1), (2, 800_000), (1, 3_000_000)], ids=["operations", "bytes", "message"]
)
async def test_too_large_a_transaction_is_refused_whole(store: Store, at: str, count: int, size: int) -> None:
    """ET-5."""
    with pytest.raises(RequestTooLarge):
        await store.txn([], [Put(f"{at}{n}", b"x" * size) for n in range(count)])
    assert (await store.list(at)).items == ()


async def test_too_many_compares_are_refused(store: Store, at: str) -> None:
    """ET-5."""
    with pytest.raises(RequestTooLarge):
        await store.txn([absent(f"{at}{n}") for n in range(129)], [Put(at + "k", b"")])


async def test_a_key_may_be_written_once_in_a_transaction(store: Store, at: str) -> None:
    for second in (Put(at + "k", b"2"), Delete(at + "k")):
        with pytest.raises(ValueError, match="twice"):
            await store.txn([], [Put(at + "k", b"1"), second])
    assert await store.get(at + "k") is None


# --- reading ---------------------------------------------------------------------------------------------------------


async def test_a_prefix_is_exact(store: Store, at: str) -> None:
    for key in ("a", "a/", "a/1", "a/ü", "a/\U0001f600", "a0", "ab/1", "b"):
        await put(store, at + key)
    keys = [item.key.removeprefix(at) for item in (await store.list(at + "a/")).items]
    assert keys == ["a/", "a/1", "a/ü", "a/\U0001f600"]


async def test_a_list_goes_on_behind_a_key(store: Store, at: str) -> None:
    for n in range(5):
        await put(store, f"{at}{n}")
    first = await store.list(at, limit=2)
    second = await store.list(at, start_after=first.items[-1].key, limit=2)
    third = await store.list(at, start_after=second.items[-1].key, limit=2)
    assert [i.key[-1] for i in (*first.items, *second.items, *third.items)] == list("01234")
    assert (await store.list(at, start_after=f"{at}4")).items == ()
    assert [i.key[-1] for i in (await store.list(at, start_after="/")).items] == list("01234")


async def test_a_long_list_is_complete_and_of_one_revision(store: Store, at: str) -> None:
    """ET-6: 3,000 keys of 10 MiB in all, in folders of very different sizes, while others write."""
    keys = [f"{at}{'abc'[n % 3] * (n % 7 + 1)}/{n:06d}" for n in range(3_000)]
    for start in range(0, len(keys), 100):
        await store.txn([], [Put(key, key.encode() * 60) for key in keys[start : start + 100]])
    stop = asyncio.Event()

    async def disturb() -> None:
        for n in itertools.count():
            if stop.is_set():
                return
            await put(store, keys[(n * 37) % len(keys)], b"changed")
            await asyncio.sleep(0)

    writer = asyncio.create_task(disturb())
    try:
        listing = await store.list(at)
        pieces = [piece async for piece in store.pages(at, keys_only=[f"{at}b/", f"{at}ccc/"])]
    finally:
        stop.set()
        await writer
    assert [item.key for item in listing.items] == sorted(keys)
    assert all(item.mod_revision <= listing.revision for item in listing.items)
    (revision,) = {piece.revision for piece in pieces}
    items = [item for piece in pieces for item in piece.items]
    assert [item.key for item in items] == sorted(keys)
    assert all(item.mod_revision <= revision for item in items)
    without = {item.key.removeprefix(at).partition("/")[0] for item in items if not item.value}
    assert without == {"b", "ccc"}


async def test_pages_of_nothing_tell_the_revision(store: Store, at: str) -> None:
    revision = await put(store, "/contract/elsewhere")
    assert [piece async for piece in store.pages(at)] == [Listing(revision, ())]


# --- watches ---------------------------------------------------------------------------------------------------------


async def test_a_watch_from_now_on_and_a_list_after_it_miss_nothing(store: Store, at: str) -> None:
    await put(store, at + "before")
    async with asyncio.timeout(10), aclosing(store.watch(at, None)) as batches:
        first = await anext(batches)
        listed_early = await put(store, at + "between")
        listing = await store.list(at)
        late = await put(store, at + "after")
        seen: list[Change] = []
        while not seen or seen[-1].item.mod_revision < late:
            seen += (await anext(batches)).changes
    assert first.changes == ()
    assert first.revision < listed_early == listing.revision
    assert [change.item.key.removeprefix(at) for change in seen] == ["between", "after"]


async def test_a_watch_delivers_whole_revisions_in_order(store: Store, at: str) -> None:
    """Four revisions of 1 MB each: etcd cuts an answer of that size into fragments, inside of revisions too."""
    start = await put(store, at + "before")
    for value in (b"0", b"1", b"2", b"3"):
        await store.txn([], [Put(f"{at}n{n:03d}", value * 10_000) for n in range(100)])
    await put(store, at[:-1] + "0", b"another prefix")
    last = (await store.txn([], [Delete(at + "before"), Put(at + "n000", b"2")])).revision
    found: list[Change] = []
    whole = {0, 100, 200, 300, 400, 402}
    async with asyncio.timeout(10), aclosing(store.watch(at, start)) as batches:
        async for batch in batches:
            found += batch.changes
            assert len(found) in whole, "never inside a revision"
            if batch.revision >= last:
                break
    assert len(found) == 402
    revisions = [change.item.mod_revision for change in found]
    assert revisions == sorted(revisions)
    gone = next(change.item for change in found if change.deleted)
    assert (gone.key, gone.value, gone.mod_revision) == (at + "before", b"", last)


async def test_a_watch_waits_for_what_comes(store: Store, at: str) -> None:
    start = await put(store, at + "k")
    waiting = asyncio.create_task(changes(store, at, start, 1))
    await asyncio.sleep(0)
    revision = await put(store, at + "k", b"2")
    (change,) = await waiting
    assert (change.item.value, change.item.mod_revision, change.deleted) == (b"2", revision, False)


async def test_a_watch_of_forgotten_history_says_so(store: Store, at: str) -> None:
    start = await put(store, at + "k")
    for n in range(5):
        last = await put(store, at + "k", str(n).encode())
    await store.compact(last)
    await store.compact(last - 1)
    with pytest.raises(Compacted) as error:
        await changes(store, at, start, 1)
    assert error.value.revision == last
    await put(store, at + "k", b"next")
    assert [change.item.value for change in await changes(store, at, last, 1)] == [b"next"]


# --- leases ----------------------------------------------------------------------------------------------------------


async def test_keys_go_with_their_lease(store: Store, at: str) -> None:
    lease = await store.grant_lease(60)
    await put(store, at + "a", lease=lease)
    start = await put(store, at + "b", lease=lease)
    item = await store.get(at + "a")
    assert item is not None
    assert item.lease == lease
    await store.revoke_lease(lease)
    assert (await store.list(at)).items == ()
    gone = await changes(store, at, start, 2)
    assert [(change.item.key, change.deleted) for change in gone] == [(at + "a", True), (at + "b", True)]
    await store.revoke_lease(lease)  # no error when it is gone already


async def test_a_lease_ends_unless_it_is_renewed(store: Store, at: str) -> None:
    kept, lost = await store.grant_lease(2), await store.grant_lease(2)
    await put(store, at + "kept", lease=kept)
    start = await put(store, at + "lost", lease=lost)
    watching = asyncio.create_task(changes(store, at, start, 1))
    while not watching.done():
        assert await store.keep_alive(kept) > 0
        await asyncio.wait({watching}, timeout=0.3)
    assert [(c.item.key, c.deleted) for c in watching.result()] == [(at + "lost", True)]
    assert await store.get(at + "kept") is not None
    with pytest.raises(LeaseLost):
        await store.keep_alive(lost)


async def test_a_put_under_a_lost_lease_writes_nothing(store: Store, at: str) -> None:
    lease = await store.grant_lease(60)
    await store.revoke_lease(lease)
    with pytest.raises(LeaseLost):
        await store.txn([], [Put(at + "a", b""), Put(at + "b", b"", lease)])
    assert (await store.list(at)).items == ()


async def test_writing_a_key_again_without_its_lease_frees_it(store: Store, at: str) -> None:
    lease = await store.grant_lease(60)
    await put(store, at + "k", lease=lease)
    await put(store, at + "k")
    await store.revoke_lease(lease)
    assert await store.get(at + "k") is not None
