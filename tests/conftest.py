"""Fixtures that every kind of test may use. A service that must be there under CI=true fails the run, not skips."""

from __future__ import annotations

import asyncio
import os

import pytest
from hypothesis import settings

# A busy machine is no failure, so no example has a deadline. CI looks at the same examples each time, so that a change
# is judged by what it changed; everybody else looks at new ones.
settings.register_profile("serai", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "serai")

# One etcd and one Docker Engine for the whole run, whichever test asks first.
pytest_plugins = ["tests.docker_engine", "tests.etcd_server"]


def pytest_configure(config: pytest.Config) -> None:
    """pytest-asyncio asks for the thread's event loop before its first test; on Python 3.11 that makes one which
    nobody closes, and its warning would fail the run."""
    asyncio.set_event_loop(None)


def missing_service(what: str) -> None:
    """Skips the test with a line that says what it lacks; under CI=true that is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} must be there in CI")
    pytest.skip(f"{what} is not there")
