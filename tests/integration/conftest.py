"""What tests with real processes share."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMPILE_SECONDS = 300


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """The placement's code is compiled once before any coordinator starts. On a fresh checkout and a busy machine that
    takes longer than a test waits for a process; from then on it is read from the cache."""
    program = "from coordinator.rehearsal import load_compiled; load_compiled()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=COMPILE_SECONDS)
