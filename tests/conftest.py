"""Fixtures that every kind of test may use. A service that must be there under CI=true fails the run, not skips."""

from __future__ import annotations

import os

import pytest


def missing_service(what: str) -> None:
    """Skips the test with a line that says what it lacks; under CI=true that is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} must be there in CI")
    pytest.skip(f"{what} is not there")
