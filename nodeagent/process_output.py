"""The output files of plain processes: read with or without following, and kept from filling the disk (OB-2).

A file that grew too long gives its beginning back to the disk as a hole, while the process goes on writing to it: no
byte of the rest moves, so nothing is lost in between and a reader keeps its place.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from nodeagent.runner import OUTPUT_DROPPED

CHUNK_BYTES = 64 * 1024
POLL_SECONDS = 0.1
BLOCK_BYTES = 4096
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02  # linux/falloc.h


def drop_beginning(path: Path, kept_bytes: int) -> None:
    """Leaves at least the last `kept_bytes`; drops only when there is twice as much, so that it is rarely done. On a
    file system that has no holes the file just grows."""
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            start = _first_data(file.fileno())
            if size - start <= 2 * kept_bytes:
                return
            end = (size - kept_bytes) // BLOCK_BYTES * BLOCK_BYTES
            libc = ctypes.CDLL(None, use_errno=True)
            libc.fallocate(file.fileno(), _KEEP_SIZE_PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(end))
    except OSError:
        return


async def read_output(
    path: Path, is_running: Callable[[], bool], tail_bytes: int | None
) -> AsyncIterator[bytes]:
    """What the file holds, then what is added to it while `is_running`."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        start = _first_data(file.fileno())
        wanted = 0 if tail_bytes is None else max(0, size - tail_bytes)
        if start > wanted:
            yield OUTPUT_DROPPED
        position = max(start, wanted)
        while True:
            running = is_running()  # before the read: what is written until the end is read after it
            while chunk := os.pread(file.fileno(), CHUNK_BYTES, position):
                position += len(chunk)
                yield chunk
                start = _first_data(file.fileno())
                if start > position:  # this reader was slower than the writer
                    yield OUTPUT_DROPPED
                    position = start
            if not running:
                return
            await asyncio.sleep(POLL_SECONDS)


def _first_data(descriptor: int) -> int:
    """Where the file begins to hold data; its size when it is empty."""
    try:
        return os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError:
        return os.fstat(descriptor).st_size
