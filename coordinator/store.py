"""The Store protocol: the few things Serai asks of etcd, and an in-memory store that keeps the same promises.

A store is a map from keys to bytes with one revision that grows by one with each writing transaction. Everything
that the coordinator and the node agents share goes through it. What a caller may rely on:

1. `txn` is atomic: either all compares hold and all writes land at one revision, or nothing is written.
2. A transaction is sent once. `StoreUncertain` says that the answer was lost, so it may or may not have been
   applied; the caller reads back and decides. `StoreUnavailable` says that it was certainly not applied.
3. `watch` delivers every change after a revision once, in order, and never in the middle of one revision; where the
   history it needs was compacted away it raises `Compacted`, and the caller lists again.
4. A key put with a lease goes away with the lease.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from attrs import field, frozen
from msgspec import Struct
from msgspec.structs import replace


class StoreError(Exception):
    """Base of everything that a store raises on purpose."""


class StoreUnavailable(StoreError):
    """The store could not be reached or has no quorum; nothing was written."""


class StoreUncertain(StoreUnavailable):
    """The answer to a write was lost: it may have been applied. Read back before doing anything else."""


class StoreFull(StoreUnavailable):
    """The store refuses writes because its space quota is used up; reads go on."""


class RequestTooLarge(StoreError):
    """A transaction holds more operations or bytes than the store takes; nothing was written."""


class Compacted(StoreError):
    """The history a watch asked for is gone. `revision` is the oldest that is still there."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"history before revision {revision} was compacted")
        self.revision = revision


class LeaseLost(StoreError):
    """The lease has expired or was revoked, and its keys are gone."""


class KeyValue(Struct, frozen=True, gc=False):
    """One key as it stood at some revision."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


class CompareTarget(enum.Enum):
    CREATED = "create_revision"
    MODIFIED = "mod_revision"


class Compare(Struct, frozen=True, gc=False):
    """One condition of a transaction: the key's revision equals `revision` (0 = the key does not exist)."""

    key: str
    target: CompareTarget
    revision: int

    def holds(self, item: KeyValue | None) -> bool:
        """For the key as it is now, None where it is absent."""
        if item is None:
            return self.revision == 0
        found = item.create_revision if self.target is CompareTarget.CREATED else item.mod_revision
        return found == self.revision


def absent(key: str) -> Compare:
    return Compare(key, CompareTarget.CREATED, 0)


def created_at(key: str, revision: int) -> Compare:
    return Compare(key, CompareTarget.CREATED, revision)


def unchanged(key: str, revision: int) -> Compare:
    return Compare(key, CompareTarget.MODIFIED, revision)


class Put(Struct, frozen=True, gc=False):
    key: str
    value: bytes
    lease: int = 0


class Delete(Struct, frozen=True, gc=False):
    key: str


Write = Put | Delete


@frozen
class TxnResult:
    """`revision` is the store's revision after the transaction. When it was refused, `seen` holds what each
    compared key looks like now (None = absent; values are left out), so that the caller learns which one changed."""

    succeeded: bool
    revision: int
    seen: dict[str, KeyValue | None] = field(factory=dict)


@frozen
class Listing:
    """All keys under a prefix at one revision, in key order."""

    revision: int
    items: tuple[KeyValue, ...]


def without_values(listing: Listing, folders: Sequence[str]) -> Listing:
    """The same, less the values of what lies under `folders`."""
    leave_out = tuple(folders)
    items = (replace(item, value=b"") if item.key.startswith(leave_out) else item for item in listing.items)
    return Listing(listing.revision, tuple(items))


class Change(Struct, frozen=True, gc=False):
    """A key was put, or deleted (`value` is then empty and `mod_revision` that of the deletion)."""

    item: KeyValue
    deleted: bool = False


@frozen
class WatchBatch:
    """Changes in order, whole revisions only. `revision` is what the watch has seen up to; `changes` may be empty
    (progress). `connected` is False when the watch has lost the store and is trying again, and True when it is back;
    nothing is lost in between."""

    revision: int
    changes: tuple[Change, ...]
    connected: bool = True


class Store(Protocol):
    async def get(self, key: str) -> KeyValue | None:
        """Linearizable read of one key."""

    async def list(self, prefix: str, *, start_after: str = "", limit: int = 0) -> Listing:
        """All keys that begin with `prefix`, at one revision (paged inside). `start_after` and `limit` (0 = all)
        narrow it to the keys after one, for cursors."""

    def pages(self, prefix: str, *, keys_only: Sequence[str] = ()) -> AsyncGenerator[Listing, None]:
        """What `list` tells, piece by piece in key order and all at the revision of the first; at least one piece. The
        next is fetched while the reader is busy with one, if it lets the loop turn. Values of what lies under one of
        `keys_only` (folders inside of `prefix`) are left out. Raises `Compacted` where the revision goes away
        meanwhile. Who leaves it early closes it."""

    async def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        """Applies all writes if all compares hold. Never retried inside. No key may be written twice."""

    def watch(self, prefix: str, after_revision: int | None) -> AsyncGenerator[WatchBatch, None]:
        """Every change under `prefix` with a revision greater than `after_revision`, for ever; resumes by itself
        after a broken connection. Raises `Compacted`. Who leaves it early closes it (`contextlib.aclosing`).

        None: from now on. A first batch without changes tells since when; if it cannot be had, `StoreUnavailable` is
        raised. Who takes that batch and then lists misses nothing, and need not wait until the past was looked through.
        """

    async def grant_lease(self, ttl_seconds: int) -> int:
        """A new lease id."""

    async def keep_alive(self, lease: int) -> int:
        """Renews once; answers the remaining seconds. Raises `LeaseLost`."""

    async def revoke_lease(self, lease: int) -> None:
        """Ends the lease and deletes its keys; no error when it is gone already."""

    async def compact(self, revision: int) -> None:
        """Forgets history before `revision`; no error when it is gone already."""

    async def close(self) -> None: ...


class MemoryStore:
    """The Store in one process, for tests and simulation. Time comes from `now` (seconds, monotonic).

    `max_writes` mirrors etcd's --max-txn-ops, `max_bytes` its --max-request-bytes.
    """

    def __init__(
        self, now: Callable[[], float], *, max_writes: int = 128, max_bytes: int = 1_500_000
    ) -> None:
        self._now = now
        self._max_writes = max_writes
        self._max_bytes = max_bytes
        self._items: dict[str, KeyValue] = {}
        self._revision = 1
        self._compacted = 0
        self._history: list[Change] = []
        self._leases: dict[int, tuple[int, float]] = {}  # id -> ttl seconds, expires at
        self._next_lease = 1
        self._wakeups: set[asyncio.Event] = set()

    @property
    def revision(self) -> int:
        return self._revision

    async def get(self, key: str) -> KeyValue | None:
        self.expire_leases()
        return self._items.get(key)

    async def list(self, prefix: str, *, start_after: str = "", limit: int = 0) -> Listing:
        self.expire_leases()
        keys = sorted(key for key in self._items if key.startswith(prefix) and key > start_after)
        return Listing(self._revision, tuple(self._items[key] for key in (keys[:limit] if limit else keys)))

    async def pages(self, prefix: str, *, keys_only: Sequence[str] = ()) -> AsyncGenerator[Listing, None]:
        yield without_values(await self.list(prefix), keys_only)

    async def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        self.expire_leases()
        if len({write.key for write in writes}) < len(writes):
            raise ValueError("a transaction writes the same key twice")
        size = sum(len(w.key) + (len(w.value) if isinstance(w, Put) else 0) for w in writes)
        if len(compares) > self._max_writes or len(writes) > self._max_writes or size > self._max_bytes:
            raise RequestTooLarge(
                f"{len(compares)} compares and {len(writes)} writes of {size} bytes exceed the store's limits"
            )
        if not all(compare.holds(self._items.get(compare.key)) for compare in compares):
            seen = {compare.key: self._items.get(compare.key) for compare in compares}
            return TxnResult(False, self._revision, seen)
        for write in writes:
            if isinstance(write, Put) and write.lease and write.lease not in self._leases:
                raise LeaseLost(f"lease {write.lease} is gone")
        self._apply(writes)
        return TxnResult(True, self._revision)

    async def watch(self, prefix: str, after_revision: int | None) -> AsyncGenerator[WatchBatch, None]:
        wakeup = asyncio.Event()
        self._wakeups.add(wakeup)
        position = self._revision if after_revision is None else after_revision
        try:
            if after_revision is None:
                yield WatchBatch(position, ())
            while True:
                wakeup.clear()
                self.expire_leases()
                if position < self._compacted - 1:
                    raise Compacted(self._compacted)
                changes = tuple(
                    change
                    for change in self._history
                    if change.item.mod_revision > position and change.item.key.startswith(prefix)
                )
                position = max(position, self._revision)
                if changes:
                    yield WatchBatch(position, changes)
                    continue
                await self._sleep_until_change(wakeup)
        finally:
            self._wakeups.discard(wakeup)

    async def grant_lease(self, ttl_seconds: int) -> int:
        lease = self._next_lease
        self._next_lease += 1
        self._leases[lease] = (ttl_seconds, self._now() + ttl_seconds)
        self._wake()  # watchers sleep until the next expiry, which may now be sooner
        return lease

    async def keep_alive(self, lease: int) -> int:
        self.expire_leases()
        if lease not in self._leases:
            raise LeaseLost(f"lease {lease} is gone")
        ttl, _ = self._leases[lease]
        self._leases[lease] = (ttl, self._now() + ttl)
        return ttl

    async def revoke_lease(self, lease: int) -> None:
        if self._leases.pop(lease, None) is not None:
            self._delete_leased({lease})

    async def compact(self, revision: int) -> None:
        self._compacted = max(self._compacted, min(revision, self._revision))
        self._history = [change for change in self._history if change.item.mod_revision >= self._compacted]
        self._wake()

    async def close(self) -> None:
        self._wake()

    def expire_leases(self) -> None:
        """Drops what is past its time. Runs before each operation, so that no timer is needed."""
        now = self._now()
        gone = {lease for lease, (_, expires) in self._leases.items() if expires <= now}
        for lease in gone:
            del self._leases[lease]
        self._delete_leased(gone)

    def _apply(self, writes: Sequence[Write]) -> None:
        if not writes:
            return
        revision = self._revision + 1
        changes: list[Change] = []
        for write in writes:
            old = self._items.get(write.key)
            if isinstance(write, Put):
                created = old.create_revision if old else revision
                item = KeyValue(write.key, write.value, created, revision, write.lease)
                self._items[write.key] = item
                changes.append(Change(item))
            elif old is not None:
                del self._items[write.key]
                changes.append(Change(KeyValue(write.key, b"", 0, revision), deleted=True))
        if changes:
            self._revision = revision
            self._history.extend(changes)
            self._wake()

    def _delete_leased(self, leases: set[int]) -> None:
        if leases:
            self._apply([Delete(key) for key, item in sorted(self._items.items()) if item.lease in leases])

    def _wake(self) -> None:
        for wakeup in self._wakeups:
            wakeup.set()

    async def _sleep_until_change(self, wakeup: asyncio.Event) -> None:
        expiries = [expires for _, expires in self._leases.values()]
        timeout = max(0.0, min(expiries) - self._now()) if expiries else None
        try:
            # Not asyncio.wait_for: that of Python 3.11 loses a cancellation which comes together with the wakeup.
            async with asyncio.timeout(timeout):
                await wakeup.wait()
        except TimeoutError:
            return  # a lease is due: the caller's next look drops its keys
