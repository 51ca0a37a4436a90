"""Where a process is that does not get on: SIGUSR1 has it say so on standard error, and changes nothing else.

kill -USR1 PID      the stack of every thread, then that of every task of the event loop
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
from collections.abc import Awaitable

# Not what a test may have put in its place: the handler writes to a file descriptor.
_OUT = sys.__stderr__ or 2


def tell_stacks() -> None:
    """From now on, by itself in C, so also while the interpreter is held up. In the main thread."""
    faulthandler.register(signal.SIGUSR1, _OUT)


def tell_tasks() -> None:
    """The tasks of the running loop too, whenever it gets to it: a stack of a thread does not show what waits."""
    faulthandler.unregister(signal.SIGUSR1)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _print_tasks)
    faulthandler.register(signal.SIGUSR1, _OUT, chain=True)


def _print_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()


def stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    tell_tasks()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def first(*waits: Awaitable[object]) -> None:
    """Until the first of them ends; an exception of it is raised. Those that were made here are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for wait, task in zip(waits, tasks, strict=True):
            if wait is not task:
                task.cancel()
