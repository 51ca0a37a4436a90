"""Sweep: what the leader tidies from time to time, beside its cycles.

    orphans      attempts that the engine still has without a live allocation: stopped after two sightings that are
                 older than the grace period (RR-6); task records and grants whose job is not live any more
    usage        the hour records of each tenant, so that a new leader knows the past
    mix          what tenants submit, once a tenth of it is new
    retention    done/ and idempotency/ records past their time
    excess       done/ records beyond the number that is kept
    compaction   of etcd's history, never nearer to the head than a slow watcher may be behind

Each round is small and bounded, so that it never holds up a cycle.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from coordinator.commit import Committer
from coordinator.config import Settings
from coordinator.engines import Engine, EngineUnavailable
from coordinator.model import Event, Job
from coordinator.records import (
    DONE,
    GRANTS,
    IDEMPOTENCY,
    MIX,
    TASKS,
    Idempotency,
    Unreadable,
    decode,
    encode,
    usage_key,
)
from coordinator.replica import Replica
from coordinator.store import Change, Delete, KeyValue, Put, Store, StoreUnavailable, unchanged

log = logging.getLogger("serai.sweep")

FIRST_ROUND_SECONDS = 1  # the first cycles of a term go first
ROUND_SECONDS = 10
SLOW_ROUND_SECONDS = 60
PAGE = 500
KEYS_AT_ONCE = 1_000
DELETIONS_PER_TRANSACTION = 100


class Sweep:
    """One term's housekeeping; `run` ends when cancelled, or with `LeadershipLost`."""

    def __init__(
        self,
        store: Store,
        replica: Replica,
        engine: Engine,
        committer: Committer,
        settings: Settings,
        clock_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._replica = replica
        self._engine = engine
        self._committer = committer
        self._settings = settings
        self._clock_ms = clock_ms
        self._first_seen_ms: dict[tuple[str, int], int] = {}
        self._stale_seen: set[str] = set()
        self._cursors: dict[str, str] = {}
        self._heads: list[tuple[int, int]] = []  # (at_ms, revision), oldest first
        self._done: deque[str] = deque()  # keys of ended jobs, some of which may have gone by other ways

    @property
    def chores(self) -> Sequence[tuple[int, Callable[[], Awaitable[None]]]]:
        """Each with its period in seconds."""
        return (
            (ROUND_SECONDS, self.orphans),
            (ROUND_SECONDS, self.stale_records),
            (ROUND_SECONDS, self.excess),
            (SLOW_ROUND_SECONDS, self.usage),
            (SLOW_ROUND_SECONDS, self.mix),
            (SLOW_ROUND_SECONDS, self.retention),
            (self._settings.compact_every_seconds, self.compaction),
        )

    async def run(self) -> None:
        chores = self.chores
        loop = asyncio.get_running_loop()
        due_at = [loop.time() + FIRST_ROUND_SECONDS] * len(chores)
        with self.counting_done():
            while True:
                number = due_at.index(min(due_at))
                await asyncio.sleep(max(0.0, due_at[number] - loop.time()))
                period_seconds, chore = chores[number]
                try:
                    await chore()
                except (StoreUnavailable, EngineUnavailable) as error:
                    log.warning("sweep put off: %s", error)
                due_at[number] = loop.time() + period_seconds

    @contextmanager
    def counting_done(self) -> Iterator[None]:
        """Meanwhile `excess` knows what has ended."""
        stop_listening = self._replica.listen(self._on_change, lambda revision: self._find_done())
        try:
            self._find_done()
            yield
        finally:
            stop_listening()

    async def orphans(self) -> None:
        """Stops attempts of the engine that no live job stands for."""
        now_ms = self._clock_ms()
        listed = await self._engine.list()
        live = {(job.id, job.attempt) for job in self._replica.cluster.live_jobs.values()}
        orphans = {(a.job, a.attempt) for a in listed} - live
        self._first_seen_ms = {key: self._first_seen_ms.get(key, now_ms) for key in orphans}
        for job, attempt in sorted(orphans):
            if now_ms - self._first_seen_ms[job, attempt] >= self._settings.orphan_grace_seconds * 1000:
                log.warning("job=%s attempt=%d runs without a live allocation, stopping it", job, attempt)
                await self._engine.stop(job, attempt, "")

    async def stale_records(self) -> None:
        """Deletes task records and grants of attempts that are not live, seen so in two rounds: in one round the
        replica may be between the two."""
        live = {(job.id, job.attempt) for job in self._replica.cluster.live_jobs.values()}
        keys = self._replica.key_values
        stale = set()
        for number, key in enumerate([key for key in keys if key.startswith((GRANTS, TASKS))]):
            if number % KEYS_AT_ONCE == 0:
                await asyncio.sleep(0)  # a cycle may be due
            if attempt_of(key) not in live:
                stale.add(key)
        twice = sorted(stale & self._stale_seen)
        self._stale_seen = stale
        await self._delete([keys[key] for key in twice if key in keys])

    async def usage(self) -> None:
        hours = self._replica.cluster.usage_hours(self._clock_ms())
        puts = [Put(usage_key(hour.tenant, hour.hour_ms), encode(hour)) for hour in hours]
        for start in range(0, len(puts), DELETIONS_PER_TRANSACTION):
            await self._committer.write([], puts[start : start + DELETIONS_PER_TRANSACTION])

    async def mix(self) -> None:
        mix = self._replica.cluster.mix
        if mix.is_due:
            seen = mix.seen
            await self._committer.write([], [Put(MIX, encode(mix.record(self._clock_ms())))])
            mix.written = seen

    async def retention(self) -> None:
        now_ms = self._clock_ms()
        done_before = now_ms - self._settings.done_retention_seconds * 1000
        keys_before = now_ms - self._settings.idempotency_seconds * 1000
        await self._expire(DONE, lambda value: (decode(Job, value).ended_at_ms or 0) < done_before)
        await self._expire(IDEMPOTENCY, lambda value: decode(Idempotency, value).at_ms < keys_before)

    async def excess(self) -> None:
        """Ended jobs beyond the number that is kept go, the oldest first: under a steady load their time would come
        much too late for the store."""
        keys = self._replica.key_values
        while len(self._done) > self._settings.done_retention_jobs:
            over = len(self._done) - self._settings.done_retention_jobs
            taken = [self._done.popleft() for _ in range(min(over, DELETIONS_PER_TRANSACTION))]
            await self._delete([keys[key] for key in taken if key in keys])

    def _find_done(self) -> None:
        # Ids sort by the time of submission, which is near enough to the order of ends.
        self._done = deque(sorted(key for key in self._replica.key_values if key.startswith(DONE)))

    def _on_change(self, change: Change, event: Event | None) -> None:
        item = change.item
        if item.key.startswith(DONE) and not change.deleted and item.create_revision == item.mod_revision:
            self._done.append(item.key)

    async def compaction(self) -> None:
        """Compacts to the newest revision that is both old enough and far enough behind: a watcher that is cut off
        by a compaction has to list everything again."""
        now_ms, head = self._clock_ms(), self._replica.cluster.revision
        self._heads.append((now_ms, head))
        old = [r for at, r in self._heads if at <= now_ms - self._settings.compact_keep_seconds * 1000]
        target = min(old[-1] if old else 0, head - self._settings.compact_keep_revisions)
        if target > 0:
            await self._store.compact(target)
        self._heads = [(at, r) for at, r in self._heads if not old or r >= old[-1]]

    async def _expire(self, prefix: str, is_old: Callable[[bytes], bool]) -> None:
        """One page of a folder, going round: a page that holds nothing old must not hide the next one."""
        listing = await self._store.list(prefix, start_after=self._cursors.get(prefix, ""), limit=PAGE)
        self._cursors[prefix] = listing.items[-1].key if len(listing.items) == PAGE else ""
        await self._delete([item for item in listing.items if _is_old(item, is_old)])

    async def _delete(self, items: list[KeyValue]) -> None:
        for start in range(0, len(items), DELETIONS_PER_TRANSACTION):
            batch = items[start : start + DELETIONS_PER_TRANSACTION]
            await self._committer.write(
                [unchanged(item.key, item.mod_revision) for item in batch],
                [Delete(item.key) for item in batch],
            )


def attempt_of(key: str) -> tuple[str, int] | None:
    """Job and attempt that a grant or task key is about; None for a key that is neither."""
    parts = key.rsplit("/", 1)[1].split(".")
    if len(parts) not in (2, 3) or not parts[1].isdigit():
        return None
    return parts[0], int(parts[1])


def _is_old(item: KeyValue, is_old: Callable[[bytes], bool]) -> bool:
    try:
        return is_old(item.value)
    except Unreadable:
        return False  # kept and reported: what cannot be read is not ours to delete
