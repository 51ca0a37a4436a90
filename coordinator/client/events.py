"""Server-sent events: the lines of a stream into events, and the stream that resumes where it broke."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import aiohttp
from attrs import frozen

from coordinator.client.errors import ApiError, Unreachable
from coordinator.client.transport import Request, Transport

# The coordinator sends a comment each 15 seconds: three missing ones mean a dead connection.
_SILENCE_SECONDS = 45.0


@frozen
class Event:
    """Something changed. `id` is the store revision, to resume from; `kind` is job, node, tenant, or resync: then
    events were missed, and the lists must be read again."""

    id: str
    kind: str
    data: dict[str, Any]


async def parse(lines: AsyncIterable[bytes]) -> AsyncIterator[Event]:
    """The events of a stream, as the HTML standard reads them (comments and unknown fields are left out)."""
    id, kind, data = "", "", list[str]()
    async for raw in lines:
        line = raw.decode(errors="replace").rstrip("\r\n")
        if not line:
            if data:
                yield Event(id, kind or "message", _object("\n".join(data)))
            kind, data = "", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            id = value
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)


async def follow(transport: Transport, last_event_id: str = "") -> AsyncIterator[Event]:
    """Every event after `last_event_id` (empty: from now on), for ever. A broken stream is opened again at the last
    event seen. Raises `ApiError` when the coordinator refuses it for good."""
    tries = 0
    while True:
        headers = {"Accept": "text/event-stream"}
        if last_event_id:
            headers["Last-Event-ID"] = last_event_id
        request = Request("GET", "/v1/events", headers=headers)
        try:
            async with transport.open(request, timeout_seconds=None, idle_seconds=_SILENCE_SECONDS) as answer:
                async for event in parse(answer.content):
                    tries = 0
                    last_event_id = event.id or last_event_id
                    yield event
        except (Unreachable, aiohttp.ClientError, TimeoutError):
            pass  # opened again below
        except ApiError as error:
            if error.status not in (429, 502, 503, 504):
                raise
        await transport.back_off(tries)
        tries += 1


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"text": text}
