"""The core benchmark on a few nodes: every mode gives its figures."""

from __future__ import annotations

import gc

import pytest

from tests.benchmarks import core


@pytest.fixture(autouse=True)
def _collector():
    """The benchmark sets the garbage collector up for itself."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.parametrize("mode", ["arrivals", "backlog", "single"])
def test_filling(mode):
    row = core.measured(10, mode, 100, 3, 1, False)
    assert row["placed"]
    assert row["placements_per_second"] > row["with_events_per_second"] > 0
    assert row["given_percent"] > (30 if mode != "single" else 1)


def test_a_full_cluster():
    row = core.measured(10, "steady", 60, 3, 1, True)
    assert 0 < row["departure_p50_ms"] <= row["departure_p99_ms"]
    assert row["nothing_fits_p99_ms"] > 0
    assert row["all_changed_ms"] > 0


def test_of_several_runs_each_figure_is_the_best():
    rows = [
        {"placements_per_second": 5, "departure_p99_ms": 2.0},
        {"placements_per_second": 7, "departure_p99_ms": 3.0},
    ]
    assert core._best(rows) == {"placements_per_second": 7, "departure_p99_ms": 2.0}
