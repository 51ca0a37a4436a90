"""Where a process is that does not get on: SIGUSR1 has it say so on standard error, and changes nothing else.

kill -USR1 PID      the stack of every thread, then that of every task of the event loop
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys

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
