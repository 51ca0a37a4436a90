"""One watch of etcd for as long as its reader wants it: resumed after every break, complete, in order.

What etcd does that a reader must not notice:

1. One revision may come in several fragments, and one answer may hold many revisions: a batch ends only where an
   answer is whole, and after a break the watch resumes behind the last whole one.
2. A watch whose history was compacted away ends with a message, not with an error: it becomes `Compacted`.
3. A compaction at revision R drops a deletion made at R itself (etcd before 3.4.34 and 3.5.15), and a watch from R on
   would silently miss it. So the watch asks from one revision earlier and drops what its reader has seen: etcd
   then answers with a cancellation wherever that could have happened.
4. A peer that froze, or was cut off, says nothing: a silent stream is asked for its progress, and left if no answer
   comes. Answers to such questions prove life and nothing else, since etcd before 3.4.25 and 3.5.8 names revisions
   in them that the stream has yet to deliver. Progress that etcd reports by itself is in order, and counts.
5. After a restore from a backup the revision is smaller than what was seen; a watch would wait for years. It
   becomes `Compacted` as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import grpc.aio
from attrs import frozen

from coordinator.etcd_connection import RANGE, WATCH, EtcdConnection, is_login_stale, translated
from coordinator.etcdpb import etcd_pb2 as pb
from coordinator.store import Change, Compacted, KeyValue, StoreError, StoreUnavailable, WatchBatch

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0


@frozen
class Patience:
    """A stream that was silent for `idle_seconds` is asked, and must answer within `answer_seconds`."""

    idle_seconds: float = 5.0
    answer_seconds: float = 2.0


def prefix_end(prefix: bytes) -> bytes:
    """The first key behind all keys with this prefix, as etcd's range_end wants it ("\\0" = to the end)."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


def key_bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def key_value(kv: pb.KeyValue) -> KeyValue:
    key = kv.key.decode("utf-8", "surrogateescape")
    return KeyValue(key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)


async def watch(
    connection: EtcdConnection, prefix: str, after_revision: int | None, patience: Patience
) -> AsyncGenerator[WatchBatch, None]:
    """`Store.watch`. A batch with `connected=False` says that the stream broke, one with True that it is back."""
    position = after_revision
    pause, broken = FIRST_PAUSE_SECONDS, False
    while True:
        try:
            async with aclosing(_batches(connection, prefix, position, patience)) as batches:
                async for batch in batches:
                    pause = FIRST_PAUSE_SECONDS
                    if position is None or batch.changes or batch.revision > position or broken:
                        position, broken = batch.revision, False
                        yield batch
        except StoreUnavailable:
            if connection.closed or position is None:
                raise
        if position is not None and not broken:
            broken = True
            yield WatchBatch(position, (), connected=False)
        await asyncio.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE_SECONDS)


async def _batches(
    connection: EtcdConnection, prefix: str, position: int | None, patience: Patience
) -> AsyncGenerator[WatchBatch, None]:
    """One stream. The first batch is empty and says that the watch stands. Raises `Compacted`, `StoreUnavailable`."""
    key = key_bytes(prefix)
    create = pb.WatchCreateRequest(
        key=key or b"\0",
        range_end=prefix_end(key),
        start_revision=0 if position is None else max(1, position),
        progress_notify=True,
        fragment=True,
    )
    stream = await _Stream.open(connection, patience)
    try:
        opened = await stream.create(create)
        if position is None:
            # Nothing has to be looked through. etcd does that for all watches together, ten times a second.
            position = opened.header.revision
        elif opened.header.revision < position:
            await _check_not_restored(connection, position)
        yield WatchBatch(position, ())
        pending: list[Change] = []
        while True:
            answer = await stream.read()
            pending += (
                Change(key_value(event.kv), event.type == pb.Event.DELETE)
                for event in answer.events
                if event.kv.mod_revision > position
            )
            if answer.fragment:
                continue
            if pending:
                position = pending[-1].item.mod_revision
                yield WatchBatch(position, tuple(pending))
                pending = []
            elif not answer.events and answer.watch_id >= 0 and answer.header.revision > position:
                position = answer.header.revision
                yield WatchBatch(position, ())
    finally:
        stream.close()


async def _check_not_restored(connection: EtcdConnection, position: int) -> None:
    """A member may lag behind what another one showed; so all are asked."""
    answer = await connection.call(RANGE, pb.RangeRequest(key=b"\0", count_only=True))
    if answer.header.revision < position:
        raise Compacted(answer.header.revision)


class _Stream:
    """A watch stream that does not stay silent for ever."""

    def __init__(
        self,
        connection: EtcdConnection,
        call: grpc.aio.StreamStreamCall[pb.WatchRequest, pb.WatchResponse],
        token: str,
        patience: Patience,
    ) -> None:
        self._connection = connection
        self._call = call
        self._token = token
        self._patience = patience
        self._reading_since: float | None = None  # None while the reader is busy with what it got
        self._silent = False
        self._guard: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, connection: EtcdConnection, patience: Patience) -> _Stream:
        call, token = await connection.stream(WATCH)
        return cls(connection, call, token, patience)

    async def create(self, request: pb.WatchCreateRequest) -> pb.WatchResponse:
        try:
            async with asyncio.timeout(self._connection.settings.timeout_seconds):
                await self._write(pb.WatchRequest(create_request=request))
                answer = await self.read()
        except TimeoutError:
            raise StoreUnavailable("etcd: a watch was not answered in time") from None
        self._guard = asyncio.create_task(self._listen_for_silence())
        return answer

    async def read(self) -> pb.WatchResponse:
        loop = asyncio.get_running_loop()
        self._reading_since = loop.time()
        try:
            answer = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise await self._broken(error) from None
        except asyncio.CancelledError:
            # gRPC cancels the reader when its call is cancelled; only a cancelled task is really to end.
            task = asyncio.current_task()
            if (task is not None and task.cancelling()) or not (self._silent or self._connection.closed):
                raise
            raise StoreUnavailable("etcd: a watch fell silent") from None
        finally:
            self._reading_since = None
        if not isinstance(answer, pb.WatchResponse):
            raise StoreUnavailable("etcd: a watch was ended by the server")
        if answer.compact_revision:
            raise Compacted(answer.compact_revision)
        if answer.canceled:
            if is_login_stale(answer.cancel_reason) or "permission denied" in answer.cancel_reason:
                await self._renew_login()
            raise StoreUnavailable(f"etcd: a watch was refused: {answer.cancel_reason}")
        return answer

    def close(self) -> None:
        if self._guard is not None:
            self._guard.cancel()
        self._call.cancel()

    async def _write(self, request: pb.WatchRequest) -> None:
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise await self._broken(error) from None
        except asyncio.InvalidStateError:
            raise StoreUnavailable("etcd: a watch could not be sent") from None

    async def _broken(self, error: grpc.aio.AioRpcError) -> Exception:
        if is_login_stale(error.details() or ""):
            await self._renew_login()
        await self._connection.lost()
        return translated(error, writes=False)

    async def _renew_login(self) -> None:
        # If the login fails, so will the next attempt to watch, and its pause applies.
        with suppress(StoreError):
            await self._connection.renew_login(self._token)

    async def _listen_for_silence(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._patience.idle_seconds)
            if self._reading_since is None or loop.time() - self._reading_since < self._patience.idle_seconds:
                continue
            asked_at = loop.time()
            try:
                async with asyncio.timeout(self._patience.answer_seconds):
                    await self._call.write(pb.WatchRequest(progress_request=pb.WatchProgressRequest()))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader sees the same error
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(self._patience.answer_seconds)
            if self._reading_since is not None and self._reading_since < asked_at:
                self._silent = True
                self._call.cancel()
                return
