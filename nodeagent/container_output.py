"""The output of a container, from the frames that the Docker Engine sends, each with the time it was written at."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from datetime import datetime

from nodeagent.runner import OUTPUT_DROPPED

OpenOutput = Callable[[bool, int | None], AsyncIterator[bytes]]
"""(follow, since_ms) -> frames, each `<RFC 3339 time> <bytes>`"""


async def read_output(
    open_output: OpenOutput, *, has_dropped: bool, follow: bool, tail_bytes: int | None
) -> AsyncIterator[bytes]:
    """The last bytes cannot be asked for, only lines; so everything that is kept is read once, and only its end is held.
    What follows is asked for from the second of the last frame on, and frames that were seen are left out."""
    last = b""
    if tail_bytes is not None:
        kept: deque[bytes] = deque()
        size = 0
        is_whole = True
        async for frame in open_output(False, None):
            last, _, payload = frame.partition(b" ")
            kept.append(payload)
            size += len(payload)
            while kept and size - len(kept[0]) >= tail_bytes:
                size -= len(kept.popleft())
                is_whole = False
        if has_dropped and is_whole and size <= tail_bytes:
            yield OUTPUT_DROPPED
        yield b"".join(kept)[-tail_bytes:] if tail_bytes else b""
        if not follow:
            return
    elif has_dropped:
        yield OUTPUT_DROPPED
    async for frame in open_output(follow, _at_ms(last) if last else None):
        stamp, _, payload = frame.partition(b" ")
        if stamp > last:  # fixed width, so they sort as text
            yield payload


def _at_ms(stamp: bytes) -> int:
    return int(datetime.fromisoformat(stamp.decode()[:19] + "+00:00").timestamp()) * 1000
