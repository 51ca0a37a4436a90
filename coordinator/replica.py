"""A copy of everything under a prefix of the store, folded into a `Cluster` and kept up by one watch.

    1. Watch from now on.
    2. List all keys at one revision and fold them. Take a snapshot once: to the `Cluster` that ends the listing.
    3. Fold what the watch brings beyond that revision, each batch as a whole: readers never see half a transaction.
    4. Where the history that the watch needs was compacted away, list again and fold the difference to what is known,
       deletions included. So nothing that went away in the gap stays, and the `Cluster` keeps what no record holds:
       since when it misses a node, and the exact ledger of use.
    5. A store that has gone back in time (restored from a backup) is folded into a new `Cluster`.

Reads only. What cannot be reached is tried again for ever; meanwhile `connected` is False and readers see the past.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import TYPE_CHECKING

from attrs import define, field, frozen
from msgspec.structs import replace

from coordinator import records
from coordinator.model import Event, RecordUnreadable
from coordinator.store import Change, Compacted, KeyValue, Listing, Store, StoreError, WatchBatch

if TYPE_CHECKING:
    from coordinator.cluster import Cluster

log = logging.getLogger("serai.replica")

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
DECODED_AT_ONCE = 250  # some 2 ms of a busy event loop

Decoded = tuple[Change, Event | None]
OnChange = Callable[[Change, Event | None], None]
OnResync = Callable[[int], None]


@frozen
class ReplicaNumbers:
    """For metrics. Counts since the start. `quiet_seconds`: since something came from the store (a healthy store
    without writes is quiet too)."""

    connected: bool
    revision: int
    listings: int
    batches: int
    changes: int
    unreadable: int
    fold_seconds: float
    quiet_seconds: float


@define
class _Listener:
    on_change: OnChange
    on_resync: OnResync


@define
class _Copy:
    """What stood under the prefix at `cluster.revision`."""

    cluster: Cluster
    keys: dict[str, KeyValue] = field(factory=dict)
    unreadable: dict[str, str] = field(factory=dict)

    def fold(self, change: Change, event: Event | None, now_ms: int) -> None:
        item = change.item
        self.unreadable.pop(item.key, None)
        if change.deleted:
            self.keys.pop(item.key, None)
        else:
            self.keys[item.key] = item if item.key.startswith(records.GRANTS) else replace(item, value=b"")
        if isinstance(event, RecordUnreadable):
            self.unreadable[item.key] = event.detail
            log.warning("record=%s unreadable=%s", item.key, event.detail)
        if event is not None:
            self.cluster.apply(event, now_ms)


class Replica:
    """`run` keeps it up; all else reads. `make_cluster` gives an empty state to fold into.

    `unread` are folders whose records mean nothing here: their keys are known, and no time is spent on what they hold.

    `changes` grows with everything that happens to the copy. `connected_since_ms` is when `connected` last changed.
    """

    def __init__(
        self,
        store: Store,
        make_cluster: Callable[[], Cluster],
        clock_ms: Callable[[], int],
        prefix: str = records.ROOT,
        unread: tuple[str, ...] = (),
    ) -> None:
        self.changes = 0
        self.connected = False
        self.connected_since_ms = clock_ms()
        self._store = store
        self._make_cluster = make_cluster
        self._clock_ms = clock_ms
        self._prefix = prefix
        self._unread = unread
        self._copy = _Copy(make_cluster())
        self._listeners: list[_Listener] = []
        self._turn = asyncio.Event()
        self._listings = self._batches = self._changed_keys = 0
        self._fold_seconds = 0.0
        self._heard_at: float | None = None

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def cluster(self) -> Cluster:
        """The state now; another one where the copy was made anew."""
        return self._copy.cluster

    @property
    def revision(self) -> int:
        """The copy holds every change up to here; 0 before the first listing."""
        return self.cluster.revision

    @property
    def key_values(self) -> Mapping[str, KeyValue]:
        """Every key as it is stored, for compares. Values only stand with grants: of everything else the `Cluster` has
        what is needed, and the bytes beside it would take more memory than all of that."""
        return MappingProxyType(self._copy.keys)

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Keys whose record could not be read, and why."""
        return MappingProxyType(self._copy.unreadable)

    @property
    def numbers(self) -> ReplicaNumbers:
        now = asyncio.get_running_loop().time()
        return ReplicaNumbers(
            connected=self.connected,
            revision=self.revision,
            listings=self._listings,
            batches=self._batches,
            changes=self._changed_keys,
            unreadable=len(self._copy.unreadable),
            fold_seconds=self._fold_seconds,
            quiet_seconds=0.0 if self._heard_at is None else now - self._heard_at,
        )

    async def ready(self) -> None:
        """Until the first listing is folded."""
        await self.wait_for(1)

    async def wait_for(self, revision: int) -> None:
        """Until the copy holds what was written under the prefix at `revision`. There is no time limit; and a revision
        at which only other keys changed may be passed late."""
        while self.revision < revision:
            await self._turn.wait()

    async def wait_for_change(self, seen: int) -> None:
        """Until `changes` differs from `seen`."""
        while self.changes == seen:
            await self._turn.wait()

    def listen(self, on_change: OnChange, on_resync: OnResync) -> Callable[[], None]:
        """Calls `on_change` for each change of a key, after the batch that holds it was folded, with what it means to
        the state (None: nothing); and `on_resync` where the copy was made anew. Answers how to stop."""
        listener = _Listener(on_change, on_resync)
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # --- keeping up ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Never returns; cancel it."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            before = self._batches
            try:
                async with aclosing(self._store.watch(self._prefix, None)) as batches:
                    await anext(batches)  # from here on it misses nothing
                    await self._list()
                    await self._follow(batches)
            except Compacted as error:
                log.info("replica revision=%d listing again: %s", self.revision, error)
            except StoreError as error:
                log.warning("replica revision=%d store=%s", self.revision, error)
                self._set_connected(False)
            if self._batches > before:
                pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _list(self) -> None:
        async with aclosing(self._store.pages(self._prefix, keys_only=self._unread)) as pages:
            first = await anext(pages)
            if self.revision and first.revision >= self.revision:
                await self._catch_up(first, pages)
            else:
                await self._start_anew(first, pages)
        self._listings += 1
        self._heard()

    async def _start_anew(self, first: Listing, rest: AsyncIterator[Listing]) -> None:
        """Into a copy of its own, piece by piece as they come; readers have the old one until the new one is whole."""
        copy = _Copy(self._make_cluster())
        now_ms = self._clock_ms()
        await self._read_into(copy, first, now_ms)
        async for piece in rest:
            await self._read_into(copy, piece, now_ms)
        copy.cluster.revision = first.revision
        copy.cluster.snapshot(self._clock_ms())
        self._copy = copy
        self._notify()
        for listener in tuple(self._listeners):
            _call(listener.on_resync, first.revision)

    async def _read_into(self, copy: _Copy, piece: Listing, now_ms: int) -> None:
        decoded = await self._decoded([Change(item) for item in piece.items])
        self._fold(copy, decoded, now_ms)

    async def _catch_up(self, first: Listing, rest: AsyncIterator[Listing]) -> None:
        """Deletions first, so that a record that moved is not gone from where it is now. The rest in the order in which
        it was written, as a watch brings it."""
        items = [*first.items, *[item async for piece in rest for item in piece.items]]
        known = self._copy.keys
        here = {item.key for item in items}
        changes = [
            Change(KeyValue(key, b"", 0, first.revision), deleted=True) for key in known if key not in here
        ]
        for item in sorted(items, key=lambda item: item.mod_revision):
            before = known.get(item.key)
            if before is None or before.mod_revision != item.mod_revision:
                changes.append(Change(item))
        decoded = await self._decoded(changes)
        self._take_in(decoded, first.revision)

    async def _follow(self, batches: AsyncIterator[WatchBatch]) -> None:
        """Some of the first of them may be in the listing already."""
        async for batch in batches:
            self._set_connected(batch.connected)
            if not batch.connected:
                continue
            self._heard()
            self._batches += 1
            if batch.revision > self.revision:
                news = [change for change in batch.changes if change.item.mod_revision > self.revision]
                self._take_in([(change, self._event(change)) for change in news], batch.revision)

    async def _decoded(self, changes: Sequence[Change]) -> list[Decoded]:
        """Reading the records is most of the work; the loop gets its turns in between, and asks for the next piece."""
        decoded: list[Decoded] = []
        for start in range(0, len(changes), DECODED_AT_ONCE):
            await asyncio.sleep(0)
            decoded += [(change, self._event(change)) for change in changes[start : start + DECODED_AT_ONCE]]
        return decoded

    def _event(self, change: Change) -> Event | None:
        return None if change.item.key.startswith(self._unread) else records.event(change)

    def _take_in(self, decoded: Sequence[Decoded], revision: int) -> None:
        """All of it in one go, with one time: no reader runs in between."""
        self._fold(self._copy, decoded, self._clock_ms())
        self.cluster.revision = revision
        self._notify(decoded)

    def _fold(self, copy: _Copy, decoded: Sequence[Decoded], now_ms: int) -> None:
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        for change, event in decoded:
            copy.fold(change, event, now_ms)
        self._changed_keys += len(decoded)
        self._fold_seconds += loop.time() - started_at

    def _notify(self, decoded: Iterable[Decoded] = ()) -> None:
        for listener in tuple(self._listeners):
            for change, event in decoded:
                _call(listener.on_change, change, event)
        self.changes += 1
        self._turn.set()
        self._turn = asyncio.Event()

    def _heard(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        self._set_connected(True)

    def _set_connected(self, connected: bool) -> None:
        if connected != self.connected:
            self.connected = connected
            self.connected_since_ms = self._clock_ms()
            log.info("replica revision=%d connected=%s", self.revision, connected)
            self._notify()


def _call(listener: Callable[..., None], *arguments: object) -> None:
    """A listener's fault is its own: the copy must go on."""
    try:
        listener(*arguments)
    except Exception:
        log.exception("a listener of the replica failed")
