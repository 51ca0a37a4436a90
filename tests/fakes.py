"""Fakes that several tests share: a clock that a test sets, and a store whose network fails as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from random import Random

from coordinator.store import (
    Compare,
    KeyValue,
    Listing,
    Store,
    StoreFull,
    StoreUnavailable,
    StoreUncertain,
    TxnResult,
    WatchBatch,
    Write,
    without_values,
)


class FakeClock:
    """Calling it gives whole milliseconds; a test moves it."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, milliseconds: int) -> None:
        self.now_ms += milliseconds


class FlakyStore:
    """A store behind a network that fails as told, for writing transactions under `only` (empty: all).

    `lost_replies` transactions are applied and their answer is lost; `late_requests` lose their answer first and are
    applied when the test calls `deliver`; `dropped_requests` never arrive. `is_full` and `is_down` hold until reset.
    While `gate` is not set, everything waits. `jitter` lets others go first for a few turns of the loop, at random.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.only = ""
        self.lost_replies = 0
        self.late_requests = 0
        self.dropped_requests = 0
        self.is_full = False
        self.is_down = False
        self.jitter: Random | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.transactions: list[tuple[Sequence[Compare], Sequence[Write]]] = []
        self._late: list[tuple[Sequence[Compare], Sequence[Write]]] = []

    async def deliver(self) -> list[TxnResult]:
        """The transactions that were under way arrive now."""
        late, self._late = self._late, []
        return [await self.store.txn(compares, writes) for compares, writes in late]

    async def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        await self._reach()
        if not writes or not any(write.key.startswith(self.only) for write in writes):
            return await self.store.txn(compares, writes)
        self.transactions.append((compares, writes))
        if self.is_full:
            raise StoreFull("the space quota is used up")
        if self.dropped_requests:
            self.dropped_requests -= 1
            raise StoreUnavailable("refused before it was sent")
        if self.late_requests:
            self.late_requests -= 1
            self._late.append((compares, writes))
            raise StoreUncertain("no answer yet")
        result = await self.store.txn(compares, writes)
        if self.lost_replies:
            self.lost_replies -= 1
            raise StoreUncertain("the answer was lost")
        return result

    async def get(self, key: str) -> KeyValue | None:
        await self._reach()
        return await self.store.get(key)

    async def list(self, prefix: str, *, start_after: str = "", limit: int = 0) -> Listing:
        await self._reach()
        return await self.store.list(prefix, start_after=start_after, limit=limit)

    async def pages(self, prefix: str, *, keys_only: Sequence[str] = ()) -> AsyncGenerator[Listing, None]:
        yield without_values(await self.list(prefix), keys_only)

    def watch(self, prefix: str, after_revision: int | None) -> AsyncIterator[WatchBatch]:
        return self.store.watch(prefix, after_revision)

    async def grant_lease(self, ttl_seconds: int) -> int:
        await self._reach()
        return await self.store.grant_lease(ttl_seconds)

    async def keep_alive(self, lease: int) -> int:
        await self._reach()
        return await self.store.keep_alive(lease)

    async def revoke_lease(self, lease: int) -> None:
        await self.store.revoke_lease(lease)

    async def compact(self, revision: int) -> None:
        await self.store.compact(revision)

    async def close(self) -> None:
        await self.store.close()

    async def _reach(self) -> None:
        await self.gate.wait()
        if self.jitter is not None:
            for _ in range(self.jitter.randrange(8)):
                await asyncio.sleep(0)
        if self.is_down:
            raise StoreUnavailable("no connection")
