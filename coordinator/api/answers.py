"""What all answers share: JSON, times, and lists that are paged by cursor.

A cursor names the last item that was given, not a position, so that items that come or go in between neither repeat
nor hide others. The sort key of a list is unique and never changes for one item.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from heapq import nlargest, nsmallest
from typing import TypeVar

import msgspec
from aiohttp import web

JSON = "application/json"
REVISION_HEADER = "X-Serai-Revision"

_encoder = msgspec.json.Encoder(decimal_format="number")
T = TypeVar("T")


class CursorInvalid(ValueError):
    """The cursor was not made by this list."""


def dump(value: object) -> bytes:
    return _encoder.encode(value)


def answer(
    value: object, *, status: int = 200, revision: int | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    """A JSON answer. `revision` is what it reflects, where that is not the replica's of now."""
    all_headers = dict(headers or {})
    if revision is not None:
        all_headers[REVISION_HEADER] = str(revision)
    return web.Response(status=status, body=dump(value), content_type=JSON, headers=all_headers)


def time_text(at_ms: int | None) -> str | None:
    """RFC 3339 in UTC with milliseconds; None stays None."""
    if at_ms is None:
        return None
    seconds, milliseconds = divmod(at_ms, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{milliseconds:03d}Z"


def encode_cursor(key: Sequence[str | int]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(list(key))).decode().rstrip("=")


def decode_cursor(text: str, shape: type[T]) -> T:
    """The sort key inside; raises `CursorInvalid` where it has not this shape."""
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return msgspec.json.decode(raw, type=shape)
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise CursorInvalid("the cursor was not made by this list") from error


def page(
    items: Iterable[T],
    *,
    key: Callable[[T], tuple[str, ...]],
    limit: int,
    cursor: str,
    newest_first: bool = False,
) -> tuple[list[T], str | None]:
    """The next `limit` items after the cursor in order of `key`, and the cursor after them (None at the end).
    Costs one pass over the items and a heap of `limit`, whatever their number."""
    if cursor:
        after = decode_cursor(cursor, tuple[str, ...])
        items = [item for item in items if (key(item) < after if newest_first else key(item) > after)]
    ordered = nlargest(limit + 1, items, key=key) if newest_first else nsmallest(limit + 1, items, key=key)
    found = ordered[:limit]
    more = len(ordered) > limit
    return found, encode_cursor(key(found[-1])) if more else None
