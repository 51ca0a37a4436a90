"""The replica over the in-memory store, behind a link that tests can cut, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from coordinator import records
from coordinator.cluster import Cluster
from coordinator.model import Event, JobGone, JobSeen, UsageHour
from coordinator.records import encode
from coordinator.replica import Replica
from coordinator.store import (
    Change,
    Compacted,
    Delete,
    Listing,
    MemoryStore,
    Put,
    StoreUnavailable,
    WatchBatch,
)
from jobspecs.container import Grant
from tests.builders import START_MS, job, node, piece, report, running, settings

pytestmark = pytest.mark.looptime


class Link(MemoryStore):
    """A store behind a link. While it is cut nothing comes through; a watch resumes where it was, as etcd's does."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop().time)
        self._whole = asyncio.Event()
        self._whole.set()
        self.listings = 0

    def cut(self) -> None:
        self._whole.clear()

    def restore(self) -> None:
        self._whole.set()

    def go_back_to(self, other: MemoryStore) -> None:
        """The store is restored from a backup."""
        self.__dict__.update(
            {n: v for n, v in other.__dict__.items() if n not in ("_whole", "listings", "_wakeups")}
        )
        self._wake()

    async def list(self, prefix: str, *, start_after: str = "", limit: int = 0) -> Listing:
        if not self._whole.is_set():
            raise StoreUnavailable("cut")
        self.listings += 1
        return await super().list(prefix, start_after=start_after, limit=limit)

    async def watch(self, prefix: str, after_revision: int | None) -> AsyncGenerator[WatchBatch, None]:
        if after_revision is None and not self._whole.is_set():
            raise StoreUnavailable("cut")
        position = after_revision
        while True:
            if position is not None and self.revision < position:
                raise Compacted(self.revision)
            async with aclosing(super().watch(prefix, position)) as batches:
                async for batch in batches:
                    if not self._whole.is_set():
                        yield WatchBatch(position, (), connected=False)
                        await self._whole.wait()
                        break
                    position = batch.revision
                    yield batch


@pytest.fixture
async def link() -> Link:
    return Link()


def clock_ms() -> int:
    return START_MS + int(asyncio.get_running_loop().time() * 1000)


@pytest.fixture
async def replica(link: Link) -> AsyncIterator[Replica]:
    made = Replica(link, lambda: Cluster(settings(lost_seconds=600)), clock_ms)
    yield made
    for task in FOLLOWING.pop(made, ()):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


FOLLOWING: dict[Replica, list[asyncio.Task[None]]] = {}


def start(replica: Replica) -> None:
    FOLLOWING.setdefault(replica, []).append(asyncio.create_task(replica.run()))


async def ready(replica: Replica) -> None:
    """Starts it, and waits for what is in the store already."""
    start(replica)
    await replica.ready()


async def put(link: Link, *pairs: tuple[str, object], gone: tuple[str, ...] = ()) -> int:
    """Writes records at one revision."""
    writes = [Put(key, value if isinstance(value, bytes) else encode(value)) for key, value in pairs]
    return (await link.txn([], [*writes, *(Delete(key) for key in gone)])).revision


WAITING = job("j1")
PLACED = running("j1", "n1", [piece("GPU-n1-0")])
QUEUED_AT = records.queue_key("a", "j1")
PLACED_AT = records.job_key("j1")


async def test_it_folds_what_is_there_and_what_comes(link: Link, replica: Replica) -> None:
    first = await put(link, (QUEUED_AT, WAITING), (records.inventory_key("n1"), node("n1")))
    await ready(replica)
    assert replica.connected
    assert replica.revision == replica.cluster.revision == first
    assert set(replica.cluster.waiting_jobs) == {"j1"}
    last = await put(link, (PLACED_AT, PLACED), gone=(QUEUED_AT,))
    await replica.wait_for(last)
    assert set(replica.cluster.live_jobs) == {"j1"}
    assert not replica.cluster.waiting_jobs
    item = replica.key_values[PLACED_AT]
    assert (item.create_revision, item.mod_revision, item.value) == (last, last, b"")
    assert QUEUED_AT not in replica.key_values
    assert link.listings == 1


async def test_only_the_values_of_grants_are_kept(link: Link, replica: Replica) -> None:
    await put(link, (records.report_key("n1"), report("n1")))
    await ready(replica)
    grant = Grant("n1", "j1", 1, "a", (), START_MS)
    grant_key = records.grant_key("n1", "j1", 1)
    last = await put(link, (records.report_key("n1"), report("n1", START_MS + 1)), (grant_key, grant))
    await replica.wait_for(last)
    item = replica.key_values[records.report_key("n1")]
    assert (item.value, item.mod_revision) == (b"", last)
    assert replica.key_values[grant_key].value == encode(grant)


async def test_no_reader_sees_half_a_transaction(link: Link, replica: Replica) -> None:
    await put(link, (QUEUED_AT, WAITING))
    await ready(replica)
    seen: list[tuple[int, bool, bool]] = []

    def look(change: Change, event: Event | None) -> None:
        cluster = replica.cluster
        seen.append((replica.revision, "j1" in cluster.waiting_jobs, "j1" in cluster.live_jobs))

    replica.listen(look, lambda revision: None)
    last = await put(link, (PLACED_AT, PLACED), gone=(QUEUED_AT,))
    await replica.wait_for(last)
    assert seen == [(last, False, True)] * 2


async def test_et1_et2_a_compacted_gap_is_made_up_for(link: Link, replica: Replica) -> None:
    """ET-1, ET-2: a job is deleted in the gap, another moves, and history is compacted. Nothing stays that is gone,
    and the state keeps what no record holds: since when a node is missing."""
    lease = await link.grant_lease(30)
    await put(link, (records.inventory_key("n1"), node("n1")), (PLACED_AT, PLACED))
    await put(link, (records.queue_key("a", "j2"), job("j2")))
    await link.txn([], [Put(records.report_key("n1"), encode(report("n1")), lease)])
    await ready(replica)
    await asyncio.sleep(100)  # the report's lease ends after 30 s: the node is missing from then on
    cluster = replica.cluster
    missing_since_ms = cluster.snapshot(clock_ms()).nodes["n1"].facts.missing_since_ms
    assert missing_since_ms == START_MS + 30_000
    heard: list[tuple[str, bool]] = []
    resyncs: list[int] = []
    replica.listen(lambda change, event: heard.append((change.item.key, change.deleted)), resyncs.append)

    link.cut()
    await put(link, gone=(PLACED_AT,))
    for n in range(1_000):
        await put(link, (records.queue_key("a", "j3"), job("j3", priority=n)))
    moved = running("j2", "n1", [piece("GPU-n1-1")])
    last = await put(link, (records.job_key("j2"), moved), gone=(records.queue_key("a", "j2"),))
    await asyncio.sleep(5)
    assert not replica.connected
    assert replica.connected_since_ms <= clock_ms() - 4_000
    assert set(replica.cluster.live_jobs) == {"j1"}, "readers see the past"
    await link.compact(last)
    link.restore()

    async with asyncio.timeout(5):
        await replica.wait_for(last)
    assert replica.connected
    assert set(replica.cluster.live_jobs) == {"j2"}
    assert [j.spec.priority for j in replica.cluster.waiting_jobs.values()] == [999]
    assert set(replica.key_values) == {item.key for item in (await link.list(records.ROOT)).items}
    snapshot = replica.cluster.snapshot(clock_ms())
    free = {view.gpu.uuid: view.memory_free_mib for view in snapshot.nodes["n1"].gpus}
    assert (free["GPU-n1-0"] > 0, free["GPU-n1-1"]) == (True, 0), "the deleted job's slices are free"
    assert replica.cluster is cluster
    assert snapshot.nodes["n1"].facts.missing_since_ms == missing_since_ms, "no new grace period"
    assert resyncs == []
    assert sorted(heard) == sorted(
        [
            (PLACED_AT, True),
            (records.queue_key("a", "j2"), True),
            (records.queue_key("a", "j3"), False),
            (records.job_key("j2"), False),
        ]
    )


async def test_a_restored_backup_is_folded_into_a_new_state(link: Link, replica: Replica) -> None:
    for n in range(10):
        await put(link, (records.queue_key("a", f"j{n}"), job(f"j{n}")))
    await ready(replica)
    cluster = replica.cluster
    resyncs: list[int] = []
    replica.listen(lambda change, event: None, resyncs.append)
    backup = MemoryStore(asyncio.get_running_loop().time)
    await backup.txn([], [Put(records.queue_key("a", "old"), encode(job("old")))])
    link.cut()
    await put(link, (QUEUED_AT, WAITING))
    await asyncio.sleep(1)
    link.go_back_to(backup)
    link.restore()
    async with asyncio.timeout(5):
        while not resyncs:
            await replica.wait_for_change(replica.changes)
    assert set(replica.cluster.waiting_jobs) == {"old"}
    assert set(replica.key_values) == {records.queue_key("a", "old")}
    assert replica.cluster is not cluster
    assert replica.revision == resyncs[0] == backup.revision


async def test_a_store_that_cannot_be_reached_is_tried_until_it_can(link: Link, replica: Replica) -> None:
    link.cut()
    await put(link, (QUEUED_AT, WAITING))
    start(replica)
    await asyncio.sleep(100)
    assert not replica.connected
    assert replica.revision == 0
    link.restore()
    async with asyncio.timeout(2):
        await replica.ready()
    assert replica.connected
    assert replica.connected_since_ms >= START_MS + 100_000


async def test_trouble_of_the_connection_wakes_who_waits(link: Link, replica: Replica) -> None:
    await put(link, (QUEUED_AT, WAITING))
    await ready(replica)
    seen = replica.changes
    link.cut()
    waiting = asyncio.create_task(replica.wait_for_change(seen))
    await put(link, (QUEUED_AT, WAITING))
    await waiting
    assert not replica.connected


async def test_a_wakeup_between_looking_and_waiting_is_not_lost(link: Link, replica: Replica) -> None:
    await ready(replica)
    seen = replica.changes
    await replica.wait_for(await put(link, (QUEUED_AT, WAITING)))
    await replica.wait_for_change(seen)  # returns at once


async def test_unreadable_records_are_named_until_they_are_mended(link: Link, replica: Replica) -> None:
    await put(link, (QUEUED_AT, b"{"), (records.tenant_key("b"), b'{"name": "other"}'))
    await ready(replica)
    assert set(replica.unreadable) == {QUEUED_AT, records.tenant_key("b")}
    assert replica.numbers.unreadable == 2
    await replica.wait_for(await put(link, (QUEUED_AT, WAITING), gone=(records.tenant_key("b"),)))
    assert not replica.unreadable
    assert set(replica.cluster.waiting_jobs) == {"j1"}


async def test_a_failing_listener_is_alone_with_its_fault(link: Link, replica: Replica) -> None:
    await ready(replica)
    heard: list[Event | None] = []

    def fail(change: Change, event: Event | None) -> None:
        raise RuntimeError("a listener's own fault")

    replica.listen(fail, lambda revision: None)
    stop = replica.listen(lambda change, event: heard.append(event), lambda revision: None)
    revision = await put(link, (QUEUED_AT, WAITING))
    await replica.wait_for(revision)
    await replica.wait_for(await put(link, gone=(QUEUED_AT,)))
    stop()
    await replica.wait_for(await put(link, (QUEUED_AT, WAITING)))
    assert heard == [JobSeen(WAITING, revision), JobGone("j1", "queue")]


async def test_usage_counts_only_from_the_listing(link: Link, replica: Replica) -> None:
    """A standby that took in each record its leader writes would count the same hour many times."""

    def hour(use: int) -> UsageHour:
        return UsageHour("a", START_MS - 3_600_000, START_MS, (use,) * 12, (use,) * 12)

    await put(link, (records.usage_key("a", START_MS - 3_600_000), hour(1_000)))
    await ready(replica)
    for n in range(3):
        await replica.wait_for(
            await put(link, (records.usage_key("a", START_MS - 3_600_000), hour(2_000 + n)))
        )
    used = replica.cluster.snapshot(clock_ms()).usage["a"]
    assert (used.compute, used.memory) == (12_000, 12_000)


async def test_numbers_tell_what_was_done(link: Link, replica: Replica) -> None:
    await put(link, (QUEUED_AT, WAITING))
    await ready(replica)
    await replica.wait_for(await put(link, (QUEUED_AT, WAITING)))
    await asyncio.sleep(7)
    numbers = replica.numbers
    assert (numbers.connected, numbers.revision, numbers.listings) == (True, link.revision, 1)
    assert (numbers.batches, numbers.changes, numbers.unreadable) == (1, 2, 0)
    assert 6.9 < numbers.quiet_seconds < 7.1


async def test_what_a_leader_does_not_read_is_known_by_key_and_ends_a_job_all_the_same() -> None:
    """The job leaves jobs/ in the transaction that writes its end, so that the end itself need not be read."""
    store = MemoryStore(asyncio.get_running_loop().time)
    live = running("j1", "n1", [piece("GPU-n1-0")])
    await store.txn([], [Put(records.job_key("j1"), encode(live))])
    replica = Replica(store, lambda: Cluster(settings()), lambda: START_MS, unread=(records.DONE,))
    following = asyncio.create_task(replica.run())
    await replica.ready()
    assert list(replica.cluster.live_jobs) == ["j1"]
    ended = [Put(records.done_key("j1"), b"not even JSON"), Delete(records.job_key("j1"))]
    result = await store.txn([], ended)
    await replica.wait_for(result.revision)
    assert not replica.cluster.live_jobs
    assert list(replica.key_values) == [records.done_key("j1")]
    assert not replica.unreadable
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
