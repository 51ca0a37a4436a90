"""Who leads: one coordinator at a time holds the key `records.LEADER`, under a lease that it keeps alive.

    1. Read the key. While another holds it, watch it from that revision until it is gone, then read again.
    2. Take a new lease, and create the key under it only if it is absent. The value carries an id that no other term
       has, so that one's own key can be told from any other.
    3. Renew the lease and read the key back. Only a renewed lease, and then one's own id under the key, is
       leadership: the answer to step 2 may be lost, or the lease may have ended since.
    4. Renew each `keep_alive_seconds`. The term ends when no renewal that was *sent* less than the lease time ago
       has succeeded, by the local monotonic clock and whatever reads say; or when the lease or the key is gone.
    5. Resign: delete the key if it is still this term's, then end the lease. A standby sees it at once.

The term's own opinion of the time only makes it stop early. What makes a late write harmless is the fence: every
transaction of a leader compares the leader key's revision, so etcd refuses the writes of a term that is over, also
those of a process that slept through its end.

Deviations from etcd's own election recipe:
- No lease is held while waiting, so none can be lost unnoticed before winning. It costs one round trip more at the
  moment of taking over, beside the seconds that a dead leader's lease takes.
- One key for all and no queue of candidates: all of them are woken at once, and one create-if-absent wins. Coordinators
  are few, and which of them leads does not matter.
- The fence is the key's revision and not a version inside its value: nobody can forget to raise it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress

from attrs import frozen

from coordinator.config import Settings
from coordinator.records import LEADER, Leadership, encode
from coordinator.store import (
    Compacted,
    Compare,
    Delete,
    KeyValue,
    LeaseLost,
    Listing,
    Put,
    Store,
    StoreError,
    StoreUncertain,
    absent,
    created_at,
)

log = logging.getLogger("serai.leader")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0
GOODBYE_SECONDS = 1.0


@frozen
class LeaderToken:
    """Proof of one term. `create_revision` is the leader key's and never changes in a term; the key's modification
    revision grows when the holder writes it again. `leadership` is the record as it was created."""

    key: str
    create_revision: int
    lease: int
    leadership: Leadership


def fence(token: LeaderToken) -> Compare:
    """The condition under which a write of this term may land."""
    return created_at(token.key, token.create_revision)


async def campaign(
    store: Store, settings: Settings, identity: str, clock_ms: Callable[[], int], *, address: str = ""
) -> Term:
    """Waits until this coordinator leads. `identity` names the coordinator, `address` is where its API is reached.
    Store trouble is waited out. The caller ends the term with `resign`. Cancelling gives up what was won."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            await _until_free(store)
            term = await _stand(store, settings, identity, clock_ms, address)
            if term is not None:
                return term
            pause = FIRST_PAUSE_SECONDS
        except (Compacted, LeaseLost):
            pause = FIRST_PAUSE_SECONDS
        except StoreError as error:
            log.warning("candidate=%s store=%s", identity, error)
        await asyncio.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE_SECONDS)


async def _until_free(store: Store) -> None:
    """Returns when nobody holds the leader key."""
    listing = await store.list(LEADER)
    if not any(item.key == LEADER for item in listing.items):
        return
    async with aclosing(store.watch(LEADER, listing.revision)) as batches:
        async for batch in batches:
            if any(change.deleted and change.item.key == LEADER for change in batch.changes):
                return


async def _stand(
    store: Store, settings: Settings, identity: str, clock_ms: Callable[[], int], address: str
) -> Term | None:
    """One attempt to win. None where another was faster, or the key is not there when it is read back."""
    lease = await store.grant_lease(settings.lease_seconds)
    leadership = Leadership(f"{identity}.{lease:x}", address, clock_ms())  # a lease id is never used again
    term = None
    try:
        term = await _create(store, settings, leadership, lease)
    finally:
        if term is None:
            # Also shuts out a create whose answer was lost and which is still under way: its lease is gone.
            await _revoke(store, lease)
    return term


async def _create(store: Store, settings: Settings, leadership: Leadership, lease: int) -> Term | None:
    value = encode(leadership)
    with suppress(StoreUncertain):  # reading back tells
        result = await store.txn([absent(LEADER)], [Put(LEADER, value, lease)])
        if not result.succeeded:
            return None
    loop = asyncio.get_running_loop()
    sent_at = loop.time()
    ttl_seconds = await store.keep_alive(lease)
    item = await store.get(LEADER)
    deadline = sent_at + min(ttl_seconds, settings.lease_seconds)
    if item is None or item.value != value or item.lease != lease or loop.time() >= deadline:
        return None
    token = LeaderToken(LEADER, item.create_revision, lease, leadership)
    return Term(store, settings, token, deadline)


async def _revoke(store: Store, lease: int) -> None:
    """Frees the place at once rather than when the lease ends; where that fails, the lease ends all the same."""
    with suppress(StoreError, TimeoutError):
        async with asyncio.timeout(GOODBYE_SECONDS):
            await store.revoke_lease(lease)


class Term:
    """One term of leadership, kept alive in the background from the moment it is made.

    `lost` is set once it is over, `reason` then says why. It never comes back: campaign again. Whoever acts outside
    the store (launches a container, say) asks `is_held` first, since only writes to the store are fenced.
    """

    def __init__(self, store: Store, settings: Settings, token: LeaderToken, deadline: float) -> None:
        self.token = token
        self.lost = asyncio.Event()
        self.reason = ""
        self._store = store
        self._settings = settings
        self._deadline = deadline
        self._tasks = (asyncio.create_task(self._keep_alive()), asyncio.create_task(self._follow_key()))
        for task in self._tasks:
            task.add_done_callback(self._ended)

    @property
    def is_held(self) -> bool:
        """False from the instant at which the lease may have ended, also before `lost` could be set."""
        return not self.lost.is_set() and asyncio.get_running_loop().time() < self._deadline

    def lose(self, reason: str) -> None:
        """The term is over: a fenced write was refused, or one of the term's own tasks found out."""
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
            log.info("leader=%s lost=%s", self.token.leadership.id, reason)

    async def resign(self) -> None:
        """Ends the term, by choice or after it was lost; the next leader need not wait for the lease to end."""
        self.lose("resigned")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._store.txn([fence(self.token)], [Delete(self.token.key)])
        await _revoke(self._store, self.token.lease)

    async def _keep_alive(self) -> None:
        """Step 4. Counts from when a renewal was sent: etcd counts from when it came, which is never earlier."""
        loop = asyncio.get_running_loop()
        pause = self._settings.keep_alive_seconds
        next_at, trouble = loop.time() + pause, ""
        while self.is_held:
            await asyncio.sleep(min(next_at, self._deadline) - loop.time())
            sent_at = loop.time()
            next_at = sent_at + pause / 4
            try:
                async with asyncio.timeout_at(self._deadline):
                    ttl_seconds = await self._store.keep_alive(self.token.lease)
            except LeaseLost:
                self.lose("the lease is gone")
            except TimeoutError:
                trouble = "no answer"
            except StoreError as error:
                trouble = str(error)
            else:
                next_at = sent_at + pause
                self._deadline = max(self._deadline, sent_at + min(ttl_seconds, self._settings.lease_seconds))
        self.lose(f"the lease was not renewed within {self._settings.lease_seconds} s: {trouble}")

    async def _follow_key(self) -> None:
        """Ends the term when the key is deleted, as an operator may do, or another's. Never prolongs it."""
        revision = self.token.create_revision
        while True:
            with suppress(Compacted):
                async with aclosing(self._store.watch(LEADER, revision)) as batches:
                    async for batch in batches:
                        for change in batch.changes:
                            self._check(change.item, change.deleted)
            listing = await self._list()
            found = [item for item in listing.items if item.key == LEADER]
            self._check(found[0] if found else KeyValue(LEADER, b"", 0, 0), not found)
            revision = listing.revision

    async def _list(self) -> Listing:
        while True:
            try:
                return await self._store.list(LEADER)
            except StoreError:
                await asyncio.sleep(self._settings.keep_alive_seconds)

    def _check(self, item: KeyValue, deleted: bool) -> None:
        if item.key != LEADER:
            return
        if deleted:
            self.lose("the leader key was deleted")
        elif item.create_revision != self.token.create_revision:
            self.lose("another coordinator leads")

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.lose(f"the term could not be kept: {task.exception()!r}")
