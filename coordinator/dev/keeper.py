"""Nothing is left running, and no folder is left behind, whatever happens to the trial.

    keeper (the process that the user started; adopts orphans)
      trial (does everything; runs in a fork)
        etcd, coordinator, agents (end with the trial, see `tied`)
          tasks (in sessions of their own, meant to outlive their agent)

When the trial is over, or was killed, whatever was started under the keeper is its child by now: all of it is ended.
When the keeper is killed, the trial gets a SIGTERM from the kernel and ends in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.dev.tied import PR_SET_PDEATHSIG

PR_SET_CHILD_SUBREAPER = 36
_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.02


def keep(trial: Callable[[], int], folder: Path, *, remove_folder: bool) -> int:
    """Runs `trial` in a fork and answers its exit code once everything under it is gone. Call it before there are
    threads, and in the main thread."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os._exit(_in_fork(trial, parent))

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    code = _wait_for(child)
    end_descendants(_GRACE_SECONDS)
    if remove_folder:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _in_fork(trial: Callable[[], int], parent: int) -> int:
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    code = 1
    try:
        code = trial()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        import sys

        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    return code


def _wait_for(child: int) -> int:
    """Reaps orphans on the way; the exit code of `child`."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def end_descendants(grace_seconds: float) -> None:
    """Ends every descendant of this process: SIGTERM, and after the grace SIGKILL until none is left."""
    number = signal.SIGTERM
    deadline = time.monotonic() + grace_seconds
    asked: set[int] = set()
    while living := descendants(os.getpid()):
        if number is signal.SIGTERM and time.monotonic() > deadline:
            number = signal.SIGKILL
        for pid in living:
            if number is signal.SIGKILL or pid not in asked:
                asked.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        _reap()
        time.sleep(_POLL_SECONDS)
        if time.monotonic() > deadline + 10 * grace_seconds:
            return  # something in the kernel holds them; waiting longer would hang the user's terminal


def descendants(root: int) -> list[int]:
    """Living processes under `root`, as /proc shows them; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit():
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if fields[0] not in ("Z", "X"):
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    queue = [root]
    while queue:
        under = children.get(queue.pop(), [])
        found += under
        queue += under
    return found


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
