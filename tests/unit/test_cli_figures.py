"""Figures as people read them."""

from __future__ import annotations

import pytest

from coordinator.cli import figures
from coordinator.cli.nodes import bar


@pytest.mark.parametrize(
    ("mib", "text"),
    [(None, "n/a"), (0, "0MiB"), (512, "512MiB"), (1536, "1536MiB"), (20480, "20GiB"), (81559, "79.6GiB")],
)
def test_size(mib: int | None, text: str) -> None:
    assert figures.size(mib) == text


@pytest.mark.parametrize(
    ("milli", "text"), [(None, "n/a"), (0, "0%"), (500, "50%"), (333, "33.3%"), (1000, "100%")]
)
def test_compute(milli: int | None, text: str) -> None:
    assert figures.compute(milli) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "n/a"),
        (0.0, "0.0s"),
        (9.94, "9.9s"),
        (59.9, "59s"),
        (61, "1m01s"),
        (3600, "1h00m"),
        (90000, "1d01h"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert figures.duration(seconds) == text


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({}, "no GPU"),
        ({"gpus": 0}, "no GPU"),
        ({"gpus": 1}, "1 GPU"),
        ({"gpus": {"count": 4, "model": "A100"}}, "4 GPUs A100"),
        ({"gpus": {"count": 1, "memory": "20GiB", "compute": "50%"}}, "20GiB 50%"),
        ({"gpus": {"count": 2, "memory": "20GiB", "compute": "50%"}}, "2 x 20GiB 50%"),
        ({"tasks": 3, "gpus": 4}, "3 x 4 GPUs"),
        ({"tasks": [{"count": 2, "gpus": 1}, {"name": "cpu"}], "gpus": 0}, "2 x 1 GPU + no GPU"),
    ],
)
def test_asked(spec: dict[str, object], text: str) -> None:
    assert figures.asked(spec) == text


@pytest.mark.parametrize(("part", "cells"), [(0, 0), (0.001, 1), (0.5, 5), (1, 10), (1.2, 10)])
def test_a_bar_shows_anything_above_nothing(part: float, cells: int) -> None:
    assert bar(part).count("█") == cells
    assert len(bar(part)) == 10


def test_moment_is_local_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert figures.moment("2026-01-02T23:04:05.000Z") == "2026-01-03 08:04:05"
        assert figures.zone() == "JST"
    finally:
        monkeypatch.undo()
        time.tzset()
    assert figures.moment(None) == "n/a"
