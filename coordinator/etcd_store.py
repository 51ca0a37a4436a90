"""The Store over etcd v3 (3.4 and later), with a short gRPC client of our own.

Owns the meaning of the store's calls in etcd's terms. The connection, its errors and its login are in
`etcd_connection`, watches in `etcd_watch`. Nothing here knows a key of Serai.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import grpc.aio
from attrs import frozen

from coordinator.etcd_connection import (
    ALARM,
    COMPACT,
    KEEP_ALIVE,
    LEASE_GRANT,
    LEASE_REVOKE,
    MEMBERS,
    RANGE,
    STATUS,
    TXN,
    EtcdConnection,
    EtcdSettings,
    is_login_stale,
    translated,
)
from coordinator.etcd_watch import Patience, key_bytes, key_value, prefix_end, watch
from coordinator.etcdpb import etcd_pb2 as pb
from coordinator.store import (
    Compacted,
    Compare,
    CompareTarget,
    KeyValue,
    LeaseLost,
    Listing,
    Put,
    StoreUnavailable,
    TxnResult,
    WatchBatch,
    Write,
)

__all__ = ["EtcdMember", "EtcdSettings", "EtcdStatus", "EtcdStore"]

FIRST_PAGE_KEYS = 256
LARGEST_PAGE_KEYS = 2_000  # some 10 ms of a busy event loop
SMALLEST_PAGE_KEYS = 16
# The first empty page makes the guess this many bits wider, each further one twice as many more.
EMPTY_PAGE_BITS = 8
PAGE_BYTES = 2 << 20
LIST_ATTEMPTS = 3


@frozen
class EtcdStatus:
    """What the member that answered says of itself. `errors` names raised alarms and a missing leader."""

    version: str
    member: int
    leader: int
    revision: int
    file_bytes: int
    used_bytes: int
    errors: tuple[str, ...]


@frozen
class EtcdMember:
    id: int
    name: str
    client_urls: tuple[str, ...]
    is_learner: bool


class EtcdStore:
    """See `coordinator.store.Store` for the contract. To be used in one event loop, and closed there."""

    def __init__(self, settings: EtcdSettings, *, patience: Patience | None = None) -> None:
        self._connection = EtcdConnection(settings)
        self._settings = settings
        self._patience = patience or Patience()

    async def get(self, key: str) -> KeyValue | None:
        answer = await self._connection.call(RANGE, pb.RangeRequest(key=key_bytes(key)))
        return key_value(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str, *, start_after: str = "", limit: int = 0) -> Listing:
        begin = key_bytes(prefix)
        start = max(begin or b"\0", key_bytes(start_after) + b"\0" if start_after else b"")
        for _ in range(LIST_ATTEMPTS):
            try:
                pieces = [
                    piece async for piece in self._pieces(_Pages([Span(start, prefix_end(begin))]), limit)
                ]
            except Compacted:
                continue  # the revision that the pages are pinned to is gone: begin again at a newer one
            return Listing(pieces[0].revision, tuple(item for piece in pieces for item in piece.items))
        raise StoreUnavailable("etcd: history is compacted faster than keys can be listed")

    def pages(self, prefix: str, *, keys_only: Sequence[str] = ()) -> AsyncGenerator[Listing, None]:
        begin = key_bytes(prefix)
        spans = _spans(begin or b"\0", prefix_end(begin), [key_bytes(folder) for folder in keys_only])
        return self._pieces(_Pages(spans), 0)

    async def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        keys = list(dict.fromkeys(compare.key for compare in compares))
        request = pb.TxnRequest(
            compare=[_compare(compare) for compare in compares],
            success=[_write(write) for write in writes],
            failure=[
                pb.RequestOp(request_range=pb.RangeRequest(key=key_bytes(key), keys_only=True))
                for key in keys
            ],
        )
        answer = await self._connection.call(TXN, request)
        if answer.succeeded:
            return TxnResult(True, answer.header.revision)
        seen: dict[str, KeyValue | None] = {}
        for key, part in zip(keys, answer.responses, strict=True):
            kvs = part.response_range.kvs
            seen[key] = key_value(kvs[0]) if kvs else None
        return TxnResult(False, answer.header.revision, seen)

    def watch(self, prefix: str, after_revision: int | None) -> AsyncGenerator[WatchBatch, None]:
        return watch(self._connection, prefix, after_revision, self._patience)

    async def grant_lease(self, ttl_seconds: int) -> int:
        """etcd may grant a longer time than asked, at least one and a half of its election time (2 s)."""
        answer = await self._connection.call(LEASE_GRANT, pb.LeaseGrantRequest(TTL=ttl_seconds))
        return answer.ID

    async def keep_alive(self, lease: int) -> int:
        for last in (False, True):
            call, token = await self._connection.stream(KEEP_ALIVE)
            try:
                async with asyncio.timeout(self._settings.timeout_seconds):
                    await call.write(pb.LeaseKeepAliveRequest(ID=lease))
                    answer = await call.read()
            except grpc.aio.AioRpcError as error:
                if last or not is_login_stale(error.details() or ""):
                    await self._connection.lost()
                    raise translated(error, writes=False) from None
                await self._connection.renew_login(token)
                continue
            except (TimeoutError, asyncio.InvalidStateError):
                raise StoreUnavailable("etcd: a lease could not be renewed in time") from None
            finally:
                call.cancel()
            break
        if not isinstance(answer, pb.LeaseKeepAliveResponse):
            raise StoreUnavailable("etcd: a keep-alive was ended by the server")
        if answer.TTL <= 0:
            raise LeaseLost(f"lease {lease:x} is gone")
        return answer.TTL

    async def revoke_lease(self, lease: int) -> None:
        try:
            await self._connection.call(LEASE_REVOKE, pb.LeaseRevokeRequest(ID=lease))
        except LeaseLost:
            return

    async def compact(self, revision: int) -> None:
        try:
            await self._connection.call(COMPACT, pb.CompactionRequest(revision=revision))
        except Compacted:
            return

    async def close(self) -> None:
        await self._connection.close()

    # --- what an operator wants to know -------------------------------------------------------------------------------

    async def status(self) -> EtcdStatus:
        """Of any one member; also when there is no leader."""
        answer = await self._connection.call(STATUS, pb.StatusRequest())
        return EtcdStatus(
            answer.version,
            answer.header.member_id,
            answer.leader,
            answer.header.revision,
            answer.dbSize,
            answer.dbSizeInUse,
            tuple(answer.errors),
        )

    async def members(self) -> tuple[EtcdMember, ...]:
        answer = await self._connection.call(MEMBERS, pb.MemberListRequest())
        return tuple(EtcdMember(m.ID, m.name, tuple(m.clientURLs), m.isLearner) for m in answer.members)

    async def alarms(self) -> tuple[str, ...]:
        """Names of raised alarms, such as NOSPACE."""
        answer = await self._connection.call(ALARM, pb.AlarmRequest(action=pb.AlarmRequest.GET))
        return tuple(sorted({pb.AlarmType.Name(alarm.alarm) for alarm in answer.alarms}))

    # --- pages --------------------------------------------------------------------------------------------------------

    async def _pieces(self, pages: _Pages, limit: int) -> AsyncGenerator[Listing, None]:
        """Pages at the revision of the first. While the reader is busy with one the next is under way."""
        revision = found = 0
        asked = asyncio.create_task(self._page(pages.request(limit, 0)))
        try:
            while True:
                answer = await asked
                revision = revision or answer.header.revision
                items = tuple(map(key_value, answer.kvs))
                found += len(items)
                pages.advance(
                    [kv.key for kv in answer.kvs], answer.count, sum(len(item.value) for item in items)
                )
                is_last = pages.done or (limit and found >= limit)
                if not is_last:
                    wanted = limit - found if limit else 0
                    asked = asyncio.create_task(self._page(pages.request(wanted, revision)))
                yield Listing(revision, items)
                if is_last:
                    return
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def _page(self, request: pb.RangeRequest) -> pb.RangeResponse:
        return await self._connection.call(RANGE, request)


@frozen
class Span:
    """Keys from `start` to before `end`, and whether their values are wanted."""

    start: bytes
    end: bytes
    keys_only: bool = False


def _spans(start: bytes, end: bytes, keys_only: Sequence[bytes]) -> list[Span]:
    """The whole range in order, cut at the folders inside of which only the keys are wanted."""
    spans = []
    for folder in sorted(keys_only):
        if start < folder and (end == b"\0" or folder < end):
            spans += [Span(start, folder), Span(folder, prefix_end(folder), keys_only=True)]
            start = prefix_end(folder)
    return [*spans, Span(start, end)]


class _Pages:
    """Bounds for reading ranges of keys page by page. etcd walks a whole range to count it, whatever the limit, so that
    pages of the rest of a range would cost the square of its keys; each page after the first has an end of its own,
    guessed from how densely the keys of the last page lie when they are read as numbers. A wrong guess costs a short
    or an empty page, never a wrong answer."""

    def __init__(self, spans: Sequence[Span]) -> None:
        """`spans` is not empty."""
        self.start = spans[0].start
        self.bound = spans[0].end
        self.size = FIRST_PAGE_KEYS
        self.done = False
        self._spans = list(spans)
        # What lies deeper than that cannot be told apart, and need not be.
        self._width = len(spans[0].start) + 48
        self._gap = 1  # mean distance of two keys
        self._leap = EMPTY_PAGE_BITS

    def request(self, limit: int, revision: int) -> pb.RangeRequest:
        return pb.RangeRequest(
            key=self.start,
            range_end=self.bound,
            limit=min(self.size, limit) if limit else self.size,
            revision=revision,
            keys_only=self._spans[0].keys_only,
        )

    def advance(self, keys: Sequence[bytes], in_range: int, page_bytes: int) -> None:
        """After a page of `keys`, from a range that holds `in_range`."""
        left = in_range - len(keys)
        if not left and self.bound == self._spans[0].end:
            self._next_span()
            return
        if left:
            self._gap = max(1, (self._number(keys[-1]) - self._number(keys[0])) // len(keys))
            self.start = keys[-1] + b"\0"
        else:
            self.start = self.bound
            if not keys:  # a folder has ended, and the next one may be far away
                self._gap <<= self._leap
                self._leap *= 2
            elif len(keys) < self.size // 2:
                self._gap *= 4
        if keys:
            self._leap = EMPTY_PAGE_BITS
            fitting = PAGE_BYTES * len(keys) // max(1, page_bytes)
            self.size = min(LARGEST_PAGE_KEYS, max(SMALLEST_PAGE_KEYS, fitting))
        if not left or left > self.size:
            self.bound = self._guess()

    def _next_span(self) -> None:
        del self._spans[0]
        self.done = not self._spans
        if self._spans:
            self.start, self.bound = self._spans[0].start, self._spans[0].end
            self.size = FIRST_PAGE_KEYS  # its values may be larger

    def _guess(self) -> bytes:
        end = self._spans[0].end
        number = self._number(self.start) + self._gap * self.size
        if end != b"\0" and number >= self._number(end):
            return end
        if number >= 1 << (8 * self._width):
            return end
        guess = number.to_bytes(self._width, "big")
        return guess if guess > self.start else end

    def _number(self, key: bytes) -> int:
        return int.from_bytes(key[: self._width].ljust(self._width, b"\0"), "big")


def _compare(compare: Compare) -> pb.Compare:
    if compare.target is CompareTarget.CREATED:
        return pb.Compare(
            key=key_bytes(compare.key), target=pb.Compare.CREATE, create_revision=compare.revision
        )
    return pb.Compare(key=key_bytes(compare.key), target=pb.Compare.MOD, mod_revision=compare.revision)


def _write(write: Write) -> pb.RequestOp:
    if isinstance(write, Put):
        put = pb.PutRequest(key=key_bytes(write.key), value=write.value, lease=write.lease)
        return pb.RequestOp(request_put=put)
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key_bytes(write.key)))
