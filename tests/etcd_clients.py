"""What tests of the etcd store share: stores with little patience, and a watch that is read in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from coordinator.etcd_store import EtcdSettings, EtcdStore
from coordinator.etcd_watch import Patience
from coordinator.store import (
    Change,
    Put,
    StoreUnavailable,
    WatchBatch,
)

IMPATIENT = Patience(idle_seconds=0.3, answer_seconds=0.3)


@asynccontextmanager
async def store_at(url: str, **options: Any) -> AsyncIterator[EtcdStore]:
    store = EtcdStore(EtcdSettings.from_url(url, **options), patience=IMPATIENT)
    try:
        yield store
    finally:
        await store.close()


async def put(store: EtcdStore, key: str, value: bytes = b"v") -> int:
    return (await store.txn([], [Put(key, value)])).revision


async def put_when_possible(store: EtcdStore, key: str, value: bytes = b"v") -> int:
    """The revision of the attempt that was answered. One whose answer was lost may be applied as well, even later."""
    async with asyncio.timeout(15):
        while True:
            try:
                return await put(store, key, value)
            except StoreUnavailable:
                await asyncio.sleep(0.05)


class Watcher:
    """Reads one watch in the background and keeps what it saw."""

    def __init__(self, store: EtcdStore, prefix: str, after: int) -> None:
        self.changes: list[Change] = []
        self.connected: list[bool] = []
        self._turn = asyncio.Event()
        self.task = asyncio.create_task(self._read(store, prefix, after))

    @property
    def keys(self) -> list[str]:
        """Of the changes, in their order."""
        return [change.item.key for change in self.changes]

    @property
    def revisions(self) -> list[int]:
        return [change.item.mod_revision for change in self.changes]

    async def _read(self, store: EtcdStore, prefix: str, after: int) -> None:
        async with aclosing(store.watch(prefix, after)) as batches:
            async for batch in batches:
                self._take(batch)

    def _take(self, batch: WatchBatch) -> None:
        self.changes += batch.changes
        if not self.connected or self.connected[-1] is not batch.connected:
            self.connected.append(batch.connected)
        self._turn.set()
        self._turn = asyncio.Event()

    async def until(self, condition: Any, seconds: float = 15) -> None:
        async with asyncio.timeout(seconds):
            while not condition(self):
                turn = asyncio.create_task(self._turn.wait())
                await asyncio.wait({turn, self.task}, return_when=asyncio.FIRST_COMPLETED)
                turn.cancel()
                if self.task.done():
                    self.task.result()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def watching(store: EtcdStore, prefix: str, after: int) -> AsyncIterator[Watcher]:
    watcher = Watcher(store, prefix, after)
    try:
        yield watcher
    finally:
        await watcher.close()
