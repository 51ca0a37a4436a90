"""What tests with real processes share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_finish(session: pytest.Session) -> None:
    """The placement's code is compiled once before any coordinator starts, and outside of any test's time. On a fresh
    checkout and a busy machine that takes longer than a test may; from then on it is read from the cache. Where it
    fails, the tests tell why."""
    if session.config.option.collectonly:
        return
    if any(HERE in item.path.parents and item.get_closest_marker("etcd") for item in session.items):
        subprocess.run([sys.executable, "-m", "coordinator", "--compile"], check=False)
