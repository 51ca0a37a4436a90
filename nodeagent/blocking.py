"""Calls a blocking library from the event loop: one call, or a stream of items, each in a thread of its own.

Daemon threads, and not the loop's executor: a call that never comes back must keep neither others nor the end of the
process waiting.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

QUEUED_ITEMS = 64


class StreamBroken(Exception):
    """A stream ended with an error of its library."""


async def in_thread(work: Callable[[], T]) -> T:
    """What `work` gives or raises. When the caller is cancelled the thread goes on, and its answer is dropped."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value: T | None = None
        raised: BaseException | None = None
        try:
            value = work()
        except BaseException as error:  # goes to the waiting caller, whatever it is
            raised = error
        try:
            loop.call_soon_threadsafe(settle, value, raised)
        except RuntimeError:
            return  # the loop was closed meanwhile: nobody waits any more

    threading.Thread(target=run, name="blocking-call", daemon=True).start()
    return await answer


async def to_end(work: Awaitable[T]) -> T:
    """Does not leave before `work` has ended, even when the caller is cancelled."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # seen; the caller does not wait for it any more
        raise


async def stream_items(open_stream: Callable[[], tuple[Any, Any]]) -> AsyncIterator[Any]:
    """The items of a blocking stream until it ends. `open_stream` gives its client and the stream; both are closed when
    the caller leaves, which also frees a reader that waits for the next item. StreamBroken."""
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[tuple[Any, Exception | None, bool]] = asyncio.Queue(QUEUED_ITEMS)
    reader = _Reader(
        open_stream, lambda item: asyncio.run_coroutine_threadsafe(items.put(item), loop).result()
    )
    reader.start()
    try:
        while True:
            item, error, is_last = await items.get()
            if error is not None:
                raise StreamBroken(str(error)) from error
            if is_last:
                return
            yield item
    finally:
        reader.leave()
        while not items.empty():  # frees a reader that waits for room
            items.get_nowait()


class _Reader(threading.Thread):
    def __init__(
        self,
        open_stream: Callable[[], tuple[Any, Any]],
        put: Callable[[tuple[Any, Exception | None, bool]], None],
    ) -> None:
        super().__init__(name="blocking-stream", daemon=True)
        self._open = open_stream
        self._put = put
        self._opened: tuple[Any, Any] | None = None
        self._left = threading.Event()

    def run(self) -> None:
        error: Exception | None = None
        try:
            client, stream = self._opened = self._open()
            try:
                for item in stream:
                    if self._left.is_set():
                        break
                    self._put((item, None, False))
            finally:
                client.close()
        except concurrent.futures.CancelledError:
            return  # the loop ends
        except Exception as raised:  # of a library that raises many kinds when its socket goes
            error = raised
        if not self._left.is_set():
            try:
                self._put((None, error, True))
            except (concurrent.futures.CancelledError, RuntimeError):
                return

    def leave(self) -> None:
        self._left.set()
        if self._opened is not None:
            try:
                self._opened[1].close()
            except Exception:  # it was at its end already: the SDK looks for a socket that is not there
                return
