"""The end of a trial: ends every process that any agent started with a state folder. Blocks; for use without an agent."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from nodeagent.process_table import Process, live_processes, marked_key, parse_stat, process_of, send
from nodeagent.runner import KILL_CONFIRM_SECONDS

POLL_SECONDS = 0.05


def stop_all(state_folder: Path, grace_seconds: float = 2.0) -> None:
    """Ends every task that any agent started with this state folder, and forgets them; for the end of a trial."""
    for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, float(KILL_CONFIRM_SECONDS))):
        deadline = time.monotonic() + seconds
        left = tuple(_left_in(state_folder))
        for process in left:
            send(process.pid, number)
        while left and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            left = tuple(_left_in(state_folder))
            if (
                number is signal.SIGKILL
            ):  # again: what was forked while the others were being killed is still there
                for process in left:
                    send(process.pid, number)
        if not left:
            break
    shutil.rmtree(state_folder, ignore_errors=True)


def _left_in(state_folder: Path) -> Iterator[Process]:
    """All processes in the sessions of the tasks of a state folder, and those that carry its mark."""
    shells: dict[int, int] = {}
    for record in state_folder.glob("*/shell"):
        try:
            pid, _, start_ticks = parse_stat(record.read_text())
        except (OSError, ValueError):
            continue
        shells[pid] = start_ticks
    for process in live_processes():
        leader = process_of(process.session)
        is_in_session = leader is not None and shells.get(leader.pid) == leader.start_ticks
        if is_in_session or marked_key(state_folder, process.pid) is not None:
            yield process
