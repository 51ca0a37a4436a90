"""The processes of this machine as /proc shows them (proc(5)), and the mark by which those of a task are known among
them. Linux only."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from nodeagent.runner import TaskKey

MARK = "SERAI_PROCESS_OF"


@frozen
class Process:
    """`session` is the pid of the session's leader; `start_ticks` since boot, which tells two users of one pid apart."""

    pid: int
    session: int
    start_ticks: int
    is_zombie: bool


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def live_processes() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := process_of(int(name))) is not None and not process.is_zombie:
            yield process


def process_of(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        found, session, start_ticks = parse_stat(text)
    except (OSError, ValueError):
        return None
    return Process(found, session, start_ticks, text.rpartition(")")[2].split()[0] in ("Z", "X"))


def parse_stat(text: str) -> tuple[int, int, int]:
    """pid, session and start time of a /proc/<pid>/stat (proc(5): fields 1, 6 and 22; 2 may hold blanks and brackets)."""
    pid = int(text.partition(" ")[0])
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20:
        raise ValueError("not a /proc/<pid>/stat")
    return pid, int(fields[3]), int(fields[19])


def mark_of(state_folder: Path, key: TaskKey | str) -> str:
    """The value of the MARK in the environment of a task's processes. By folder, so that two agents on one machine never
    take each other's processes for their own."""
    return f"{state_folder.resolve()}:{key}"


def marked_key(state_folder: Path, pid: int) -> TaskKey | None:
    """The task of this state folder that a process belongs to: every child has the mark, unless it cleared it."""
    prefix = f"{MARK}={mark_of(state_folder, '')}".encode()
    for entry in environment_of(pid):
        if entry.startswith(prefix):
            try:
                return TaskKey.parse(entry[len(prefix) :].decode())
            except ValueError:
                return None
    return None


def environment_of(pid: int) -> frozenset[bytes]:
    """The entries that a process was started with; empty when it is gone or not ours to read."""
    try:
        return frozenset(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return frozenset()


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
