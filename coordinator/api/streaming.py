"""GET /v1/events: one stream of live events for one caller."""

from __future__ import annotations

import asyncio

from aiohttp import web

from coordinator.api.context import api_of, caller_of
from coordinator.api.events import Line, Subscription
from coordinator.api.problems import Fault, Problem, bad_parameter
from coordinator.api.queries import header, known_only
from coordinator.store import StoreError

_RETRY = b"retry: 2000\n\n"


async def follow_events(request: web.Request) -> web.StreamResponse:
    known_only(request, ())
    api = api_of(request)
    limit = api.limits.streams
    if len(api.streams) >= limit:
        text = f"{limit} streams are open here"
        raise Problem(429, "too_many_streams", text, (Fault("streams", text, limit, len(api.streams)),))
    after = _last_event(request)
    if after is not None and after > api.revision:
        await api.catch_up()  # another instance, which told it, may be a little ahead
    subscription = api.hub.subscribe(caller_of(request), after)
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )
    await response.prepare(request)
    task = asyncio.current_task()
    assert task is not None
    api.streams.add(task)
    try:
        await response.write(_RETRY)
        await _tell(subscription, response, api.limits.comment_seconds)
    except StoreError:
        pass  # the client comes back with the last event it has seen
    except ConnectionError:
        pass
    finally:
        api.streams.discard(task)
    return response


async def _tell(subscription: Subscription, response: web.StreamResponse, comment_seconds: float) -> None:
    while True:
        try:
            # Not wait_for, here and elsewhere: that of Python 3.11 can swallow a cancellation.
            async with asyncio.timeout(comment_seconds):
                lines = await subscription.more()
        except TimeoutError:
            await response.write(b": still here\n\n")
        else:
            await response.write(_text(lines))


def _text(lines: list[Line]) -> bytes:
    following = [line.revision for line in lines[1:]] + [-1]
    return b"".join(
        line.text(with_id=line.revision != after) for line, after in zip(lines, following, strict=True)
    )


def _last_event(request: web.Request) -> int | None:
    text = header(request, "Last-Event-ID").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise bad_parameter("Last-Event-ID", "the id of an event", text)
    return int(text)
