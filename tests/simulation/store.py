"""One store server, and a client of it for each process, with a network between them that fails as told.

A call is a request that arrives after a while, an effect, and an answer that comes after a while. What can happen to it:

    dropped       the request never arrives: StoreUnavailable
    lost          it has its effect and the answer is lost: StoreUncertain for a write, after the client's time limit
    late          the client's time limit is over, StoreUncertain is raised, and then the request arrives
    crash_before, crash_after   the process that sends it dies before or after the effect

A watch delivers what the store promises, in its own time: batches come late and hold several revisions, a cut watch
says so and goes on, and one that was behind a compaction ends with `Compacted`.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from random import Random
from typing import Any, Protocol, TypeVar

from attrs import define, frozen

from coordinator.store import (
    Change,
    Compacted,
    Compare,
    KeyValue,
    Listing,
    MemoryStore,
    Put,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUncertain,
    TxnResult,
    WatchBatch,
    Write,
    without_values,
)
from tests.simulation.loop import Life, Process, VirtualLoop

T = TypeVar("T")
TIMEOUT_SECONDS = 2.0
QUICK_SECONDS = 0.002


@frozen
class Applied:
    """A transaction that wrote something: who sent it, when, and what it was."""

    sender: Process | None
    sent_holder: bytes
    compares: tuple[Compare, ...]
    writes: tuple[Write, ...]
    changes: tuple[Change, ...]
    revision: int


class Fates(Protocol):
    """What happens to the next request of a process; "" for nothing."""

    def of_write(self, process: Process, writes: Sequence[Write]) -> str: ...
    def of_read(self, process: Process) -> str: ...


class Server(MemoryStore):
    """`watcher` hears of each revision while nobody else runs."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        super().__init__(loop.time)
        self.loop = loop
        self.random = random
        self.is_full = False
        self.slow_seconds = 0.0
        self.is_down = False
        self.log: list[Change] = []
        self.watches: list[Watch] = []
        self.compacted = 0
        self.on_applied: Callable[[Applied], None] = lambda applied: None
        self._revisions: list[int] = []
        self._sending: tuple[Process | None, bytes, tuple[Compare, ...]] = (None, b"", ())
        self._expiry_at: float | None = None

    def execute(
        self,
        sender: Process | None,
        sent_holder: bytes,
        compares: Sequence[Compare],
        writes: Sequence[Write],
    ) -> TxnResult:
        self._sending = (None, b"", ())
        self.expire_leases()
        if self.is_full and sender is not None and any(isinstance(write, Put) for write in writes):
            raise StoreFull("the space quota is used up")
        self._sending = (sender, sent_holder, tuple(compares))
        try:
            return at_once(super().txn(compares, writes))
        finally:
            self._sending = (None, b"", ())

    def holder(self) -> bytes:
        item = self._items.get("/serai/leader/holder")
        return item.value if item is not None else b""

    def items(self, prefix: str) -> list[KeyValue]:
        return [self._items[key] for key in sorted(self._items) if key.startswith(prefix)]

    def between(self, prefix: str, after: int, until: int) -> tuple[Change, ...]:
        start, end = bisect_right(self._revisions, after), bisect_right(self._revisions, until)
        return tuple(change for change in self.log[start:end] if change.item.key.startswith(prefix))

    def set_expiry(self) -> None:
        """A lease that ends while nobody calls is seen to end all the same. One timer at a time: it looks again."""
        ends = min((expires for _, expires in self._leases.values()), default=None)
        if ends is None:
            return
        at = max(ends, self.loop.time()) + 0.001
        if self._expiry_at is None or at < self._expiry_at:
            self._expiry_at = at
            self.loop.later(at - self.loop.time(), self._expire, at)

    def _expire(self, at: float) -> None:
        if at == self._expiry_at:
            self._expiry_at = None
            self.expire_leases()
            self.set_expiry()

    def drop_lease(self, lease: int) -> None:
        at_once(super().revoke_lease(lease))

    def compact_to(self, revision: int) -> None:
        self.compacted = max(self.compacted, min(revision, self._revision))
        at_once(super().compact(revision))
        for watch in self.watches:
            watch.forget_before(self.compacted)

    def _apply(self, writes: Sequence[Write]) -> None:
        before, kept = self._revision, len(self._history)
        super()._apply(writes)
        if self._revision == before:
            return
        changes = tuple(self._history[kept:])
        self.log.extend(changes)
        self._revisions.extend([self._revision] * len(changes))
        sender, holder, compares = self._sending
        for watch in self.watches:
            watch.hear(self._revision, changes)
        self.on_applied(Applied(sender, holder, compares, tuple(writes), changes, self._revision))


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("it waits")


@define(eq=False)
class Watch:
    """`position` was handed out; `available` may be; `pending_from` is the oldest change that was not."""

    server: Server
    process: Process
    prefix: str
    position: int
    available: int
    pending_from: int = 0
    is_cut: bool = False
    is_compacted: bool = False
    waiter: asyncio.Future[None] | None = None
    due: int = 0

    def hear(self, revision: int, changes: Sequence[Change]) -> None:
        prefix = self.prefix
        for change in changes:
            if change.item.key.startswith(prefix):
                break
        else:
            return
        self.pending_from = self.pending_from or revision
        if not self.is_cut:
            self.send(revision)

    def send(self, revision: int) -> None:
        server = self.server
        seconds = server.random.uniform(0.0005, 0.003) + server.slow_seconds * server.random.random()
        if server.random.random() < 0.01:
            seconds += server.random.uniform(0.0, 1.0)
        server.loop.later(seconds, self.arrive, revision)

    def arrive(self, revision: int) -> None:
        if not self.is_cut and not self.process.is_cut:
            self.available = max(self.available, revision)
            self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def cut(self) -> None:
        if not self.is_cut:
            self.is_cut = True
            self.wake()

    def mend(self) -> None:
        if self.is_cut:
            self.is_cut = False
            self.available = self.server.revision
            self.wake()

    def forget_before(self, revision: int) -> None:
        if self.pending_from and self.pending_from < revision:
            self.is_compacted = True
            if not self.is_cut:
                self.wake()


class Client:
    """A `Store` as one process sees it."""

    def __init__(self, server: Server, process: Process, fates: Fates) -> None:
        self._server = server
        self._process = process
        self._fates = fates
        self._loop = server.loop

    async def get(self, key: str) -> KeyValue | None:
        return await self._call(lambda: at_once(self._server.get(key)), self._fates.of_read(self._process))

    async def list(self, prefix: str, *, start_after: str = "", limit: int = 0) -> Listing:
        return await self._call(
            lambda: at_once(self._server.list(prefix, start_after=start_after, limit=limit)),
            self._fates.of_read(self._process),
        )

    async def pages(self, prefix: str, *, keys_only: Sequence[str] = ()) -> AsyncGenerator[Listing, None]:
        yield without_values(await self.list(prefix), keys_only)

    async def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        compares, writes = tuple(compares), tuple(writes)
        holder = self._server.holder()
        fate = self._fates.of_write(self._process, writes) if writes else self._fates.of_read(self._process)
        return await self._call(
            lambda: self._server.execute(self._process, holder, compares, writes), fate, bool(writes)
        )

    async def watch(self, prefix: str, after_revision: int | None) -> AsyncGenerator[WatchBatch, None]:
        server, is_from_now = self._server, after_revision is None
        if after_revision is None:
            after_revision = await self._call(lambda: server.revision, self._fates.of_read(self._process))
        watch = Watch(server, self._process, prefix, after_revision, server.revision)
        server.watches.append(watch)
        first = server.between(prefix, after_revision, server.revision)
        watch.is_compacted = after_revision < server.compacted - 1
        watch.pending_from = first[0].item.mod_revision if first else 0
        was_cut = False
        try:
            if is_from_now:
                yield WatchBatch(after_revision, ())
            while True:
                if watch.is_cut and not was_cut:
                    was_cut = True
                    yield WatchBatch(watch.position, (), connected=False)
                elif not watch.is_cut and watch.is_compacted:
                    raise Compacted(server.compacted)
                elif was_cut and not watch.is_cut:
                    was_cut = False
                    yield WatchBatch(watch.position, (), connected=True)
                elif not watch.is_cut and watch.available > watch.position:
                    changes = server.between(prefix, watch.position, watch.available)
                    watch.position = watch.available
                    later = server.between(prefix, watch.position, server.revision)
                    watch.pending_from = later[0].item.mod_revision if later else 0
                    if changes:
                        yield WatchBatch(watch.position, changes)
                else:
                    watch.waiter = self._loop.create_future()
                    await watch.waiter
        finally:
            if watch in server.watches:
                server.watches.remove(watch)

    async def grant_lease(self, ttl_seconds: int) -> int:
        def grant() -> int:
            if self._server.is_full:
                raise StoreFull("the space quota is used up")
            lease = at_once(MemoryStore.grant_lease(self._server, ttl_seconds))
            self._server.set_expiry()
            return lease

        return await self._call(grant, self._fates.of_read(self._process))

    async def keep_alive(self, lease: int) -> int:
        def renew() -> int:
            ttl = at_once(MemoryStore.keep_alive(self._server, lease))
            self._server.set_expiry()
            return ttl

        return await self._call(renew, self._fates.of_read(self._process))

    async def revoke_lease(self, lease: int) -> None:
        await self._call(
            lambda: at_once(MemoryStore.revoke_lease(self._server, lease)), self._fates.of_read(self._process)
        )

    async def compact(self, revision: int) -> None:
        await self._call(lambda: self._server.compact_to(revision), self._fates.of_read(self._process))

    async def close(self) -> None:
        """Nothing is open."""

    async def _call(self, effect: Callable[[], T], fate: str, is_write: bool = False) -> T:
        random, loop = self._server.random, self._loop
        answer: asyncio.Future[T] = loop.create_future()
        if self._process.is_cut or self._server.is_down:
            fate = random.choice(("dropped", "dropped_slowly"))
        if fate == "crash_before":
            self._process.kill()
        elif fate.startswith("dropped"):
            seconds = TIMEOUT_SECONDS if fate == "dropped_slowly" else QUICK_SECONDS
            # A client that had no answer in time does not know that the request never arrived.
            error = StoreUncertain if is_write and fate == "dropped_slowly" else StoreUnavailable
            loop.later(seconds, _fail, answer, error(f"{fate} by the simulation"))
        elif fate in ("lost", "late"):
            error = StoreUncertain if is_write else StoreUnavailable
            loop.later(TIMEOUT_SECONDS, _fail, answer, error(f"the answer was {fate}"))
            seconds = self._delay() if fate == "lost" else TIMEOUT_SECONDS + random.uniform(0, 1) ** 3 * 20
            loop.later(seconds, self._arrive, effect, None, fate)
        else:
            seconds = self._delay()
            loop.later(seconds, self._arrive, effect, answer, fate)
            if seconds > TIMEOUT_SECONDS:
                error = StoreUncertain if is_write else StoreUnavailable
                loop.later(TIMEOUT_SECONDS, _fail, answer, error("no answer in time"))
        return await answer

    def _arrive(self, effect: Callable[[], T], answer: asyncio.Future[T] | None, fate: str) -> None:
        result: T | None = None
        failure: StoreError | None = None
        try:
            if self._server.is_down:
                failure = StoreUnavailable("the store has no quorum")
            else:
                result = effect()
        except StoreError as error:
            failure = error
        if fate == "crash_after":
            self._process.kill()
        if answer is None or self._process.is_cut:
            if answer is not None:
                text = "the answer was lost with the connection"
                self._loop.later(TIMEOUT_SECONDS, _fail, answer, StoreUncertain(text))
            return
        if failure is not None:
            self._loop.later(self._delay(), _fail, answer, failure)
        else:
            self._loop.later(self._delay(), _succeed, answer, result)

    def _delay(self) -> float:
        random = self._server.random
        return random.uniform(0.0003, 0.002) + self._server.slow_seconds * random.random()


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _succeed(answer: asyncio.Future[Any], result: object) -> None:
    if not answer.done():
        answer.set_result(result)


def cut_watches(server: Server, process: Process | None, seconds: float) -> None:
    """Those of one process, or all; they go on by themselves."""
    for watch in list(server.watches):
        if process is None or watch.process is process:
            watch.cut()
            server.loop.later(seconds, watch.mend)


def forget_dead(server: Server) -> None:
    server.watches = [watch for watch in server.watches if watch.process.life is not Life.DEAD]
