"""Where servers of tests keep their data: in memory where there is room. A test does not wait for a disk then, nor for
whoever else keeps it busy: one that takes half a minute for a flush stops an etcd for as long."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import psutil

IN_MEMORY = Path("/dev/shm")
ON_DISK = Path("/tmp")  # not TMPDIR: a socket's path must be short
# An etcd lays out 128 MiB for its log, whatever it holds; a Docker Engine keeps the output of its containers.
ROOM_BYTES = 4 << 30


def quick_folder(prefix: str) -> Path:
    """A new folder, whose name begins with `prefix`. Who asks for it removes it; what a run that was killed has left is
    removed by the next, since it is memory."""
    try:
        _remove_left(prefix)
        room = min(shutil.disk_usage(IN_MEMORY).free, psutil.virtual_memory().available)
        if room >= ROOM_BYTES:
            return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=IN_MEMORY))
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix=prefix, dir=ON_DISK))


def _remove_left(prefix: str) -> None:
    for folder in IN_MEMORY.glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
