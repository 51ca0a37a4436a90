"""Runs a command that ends when the process that started it ends, however that happens (even by SIGKILL).

    python -I -S tied.py PARENT_PID COMMAND [ARGUMENT...]

A program of its own, and not code between fork and exec, since the parent has threads. Linux only; elsewhere the
command just runs.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # The parent may have gone before that was set; then nobody would send the signal.
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])
