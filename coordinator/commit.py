"""Commit: the fenced etcd write of what a cycle decided, and what has to be written for each kind of decision.

A job's writes are one `Intent` and always land together; some 40 intents share a transaction, because messages cost
and records do not. Every transaction carries the fence.

The fence is the modification revision of the leader key, not only its creation: when the answer to a transaction is
lost it may still be on its way, and could land after the leader has planned the same slices for another job. So after
an uncertain answer the leader writes its own key again (`renew`). What was under way then either landed before that
write, and the replica will show it, or its compare fails for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from attrs import evolve, frozen

from coordinator.config import Settings
from coordinator.records import LEADER, Leadership, encode
from coordinator.store import (
    Compare,
    Put,
    RequestTooLarge,
    Store,
    StoreUnavailable,
    StoreUncertain,
    TxnResult,
    Write,
    unchanged,
)

# etcd refuses requests above 1.5 MiB (--max-request-bytes); half of it leaves room for keys, compares and framing.
MAX_TRANSACTION_BYTES = 768 * 1024
TRANSACTIONS_IN_FLIGHT = 4


class LeadershipLost(Exception):
    """The leader key is not ours any more: this term has ended, and nothing more of it may be written."""


@frozen
class Intent:
    """All that one job needs written, and the condition under which it is still right."""

    job: str
    compares: tuple[Compare, ...]
    writes: tuple[Write, ...]

    @property
    def size_bytes(self) -> int:
        return sum(len(w.key) + (len(w.value) if isinstance(w, Put) else 0) for w in self.writes)


@frozen
class Outcome:
    """`revision`: wait until the replica has passed it. `refused`: jobs whose record had changed meanwhile, so that
    nothing was written for them. `too_large`: jobs that no transaction can hold. `unavailable`: the store took some
    of it not at all; the next cycle will decide again."""

    revision: int = 0
    written: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    too_large: tuple[str, ...] = ()
    unavailable: bool = False


def merged(outcomes: Iterable[Outcome]) -> Outcome:
    total = Outcome()
    for outcome in outcomes:
        total = Outcome(
            max(total.revision, outcome.revision),
            total.written + outcome.written,
            total.refused + outcome.refused,
            total.too_large + outcome.too_large,
            total.unavailable or outcome.unavailable,
        )
    return total


class Committer:
    """Writes for one term of leadership. `fence_revision` is the leader key's revision as this term knows it.
    `observe_batch` is told the number of intents in each durable transaction of a commit."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        leadership: Leadership,
        lease: int,
        fence_revision: int,
        observe_batch: Callable[[int], None] = lambda jobs: None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._leadership = leadership
        self._lease = lease
        self._fence_revision = fence_revision
        self._observe_batch = observe_batch
        self._renewing = asyncio.Lock()
        self._in_doubt = False
        self._unseen_revision = 0

    @property
    def fence(self) -> Compare:
        return unchanged(LEADER, self._fence_revision)

    async def commit(self, intents: Sequence[Intent]) -> Outcome:
        """Raises `LeadershipLost`. After any other end the caller may plan again once the replica has passed
        `Outcome.revision`."""
        if self._in_doubt:
            await self.renew()
        if self._unseen_revision:
            # What was planned may not know what had landed: it could give the same slices away a second time.
            return Outcome(self._seen_from_now(), unavailable=True)
        gate = asyncio.Semaphore(TRANSACTIONS_IN_FLIGHT)

        async def send(batch: Sequence[Intent]) -> Outcome:
            async with gate:
                return await self._send(batch)

        results = await asyncio.gather(
            *(send(batch) for batch in self._batches(intents)), return_exceptions=True
        )
        if any(isinstance(result, StoreUncertain) for result in results):
            self._in_doubt = True
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, StoreUnavailable):
                raise result
        outcome = merged(result for result in results if isinstance(result, Outcome))
        if any(isinstance(result, StoreUnavailable) for result in results):
            outcome = evolve(outcome, unavailable=True)
        if self._in_doubt:
            await self.renew()
            outcome = evolve(outcome, revision=max(outcome.revision, self._seen_from_now()))
        return outcome

    def _seen_from_now(self) -> int:
        """The revision of the last renewal, which the caller waits for before it plans again."""
        revision, self._unseen_revision = self._unseen_revision, 0
        return revision

    async def write(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        """One fenced transaction for what is no job's: usage, clean-up, observed tasks. Raises `LeadershipLost`,
        `StoreUnavailable`. After a lost answer the next write of this term shuts it out first, so that it cannot undo
        what is written meanwhile."""
        if self._in_doubt:
            await self.renew()
        try:
            result = await self._store.txn([self.fence, *compares], writes)
        except StoreUncertain:
            self._in_doubt = True
            raise
        if not result.succeeded:
            self._check(result)
        return result

    async def renew(self) -> int:
        """Writes the leader key again, so that whatever this term still had under way can no longer land. Answers the
        revision from which on that is so. Raises `LeadershipLost`, `StoreUnavailable`."""
        async with self._renewing:
            wanted = evolve(self._leadership, renewals=self._leadership.renewals + 1)
            put = Put(LEADER, encode(wanted), self._lease)
            try:
                result = await self._store.txn([self.fence], [put])
                revision = result.revision if result.succeeded else 0
            except StoreUncertain:
                revision = 0
            if not revision:
                item = await self._store.get(LEADER)
                if item is None or item.value != put.value:
                    if item is not None and item.mod_revision == self._fence_revision:
                        raise StoreUnavailable("the leader key could not be renewed")
                    raise LeadershipLost("another coordinator holds the leader key")
                revision = item.mod_revision
            self._leadership = wanted
            self._fence_revision = revision
            self._in_doubt = False
            self._unseen_revision = revision
            return revision

    def _batches(self, intents: Sequence[Intent]) -> list[list[Intent]]:
        """In order, each within the store's limits; the fence takes one compare."""
        batches: list[list[Intent]] = []
        writes = compares = size = 0
        limit = self._settings.max_writes_per_transaction
        for intent in intents:
            writes += len(intent.writes)
            compares += len(intent.compares)
            size += intent.size_bytes
            full = bool(batches) and len(batches[-1]) >= self._settings.jobs_per_transaction
            if not batches or full or writes > limit or compares > limit - 1 or size > MAX_TRANSACTION_BYTES:
                batches.append([])
                writes, compares, size = len(intent.writes), len(intent.compares), intent.size_bytes
            batches[-1].append(intent)
        return batches

    async def _send(self, batch: Sequence[Intent]) -> Outcome:
        """One batch; jobs whose record changed are dropped and the others go again."""
        refused: list[str] = []
        remaining = list(batch)
        while remaining:
            compares = [self.fence] + [compare for intent in remaining for compare in intent.compares]
            try:
                result = await self._store.txn(
                    compares, [write for intent in remaining for write in intent.writes]
                )
            except RequestTooLarge:
                if len(remaining) == 1:
                    return Outcome(refused=tuple(refused), too_large=(remaining[0].job,))
                parts = [await self._send([intent]) for intent in remaining]
                return merged([Outcome(refused=tuple(refused)), *parts])
            if result.succeeded:
                self._observe_batch(len(remaining))
                return Outcome(result.revision, tuple(intent.job for intent in remaining), tuple(refused))
            self._check(result)
            changed = {
                intent.job for intent in remaining if not all(holds(c, result) for c in intent.compares)
            }
            if not changed:
                raise StoreUnavailable("a transaction was refused, and none of its conditions had changed")
            refused.extend(sorted(changed))
            remaining = [intent for intent in remaining if intent.job not in changed]
        return Outcome(refused=tuple(refused))

    def _check(self, result: TxnResult) -> None:
        if not holds(self.fence, result):
            raise LeadershipLost("another coordinator holds the leader key")


def holds(compare: Compare, result: TxnResult) -> bool:
    """Whether the condition held where the transaction was refused, as far as the answer tells."""
    if compare.key not in result.seen:
        return True
    return compare.holds(result.seen[compare.key])
