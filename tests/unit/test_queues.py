"""The order inside a tenant, by table."""

from __future__ import annotations

import pytest

from coordinator.lineup import Cards, Lineups, Needs
from coordinator.model import Job
from coordinator.queues import TenantQueue, overdue
from coordinator.snapshot import shape_of
from jobspecs.spec import TaskSpec
from tests.builders import GIB, START_MS, World, gpu, job, mig, node, spec, wants

DAY = 24 * 3600


def order(*jobs: Job, now: int = 0, max_wait: int = 3 * DAY, refuse: tuple[str, ...] = ()) -> list[str]:
    """Ids as the queue hands them out; the lines of those in `refuse` are refused."""
    w = World(node("n1", [gpu("n1", 0, 16 * GIB, "T4"), gpu("n1", 1, 80 * GIB, "A100")]))
    w.now = now
    w.submit(*jobs)
    snapshot = w.snapshot()
    queue = TenantQueue(snapshot, "a", Lineups().of(snapshot), max_wait)
    out = []
    while (head := queue.first()) is not None:
        _, one = head
        if one.id in refuse:
            queue.refuse()
            continue
        out.append(one.id)
        queue.take(one)
    return out


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([job("old", 1), job("new", 2)], ["old", "new"]),
        ([job("b", 1), job("a", 1)], ["a", "b"]),  # of one age: by id
        ([job("low", priority=-1), job("none"), job("high", priority=5)], ["high", "none", "low"]),
        ([job("big", memory=8000, compute=100), job("small", 9, memory=1000, compute=100)], ["small", "big"]),
        (
            [job("much", memory=1000, compute=500), job("little", 9, memory=1000, compute=100)],
            ["little", "much"],
        ),
        ([job("cpus", cpu=8000), job("cpu", 9, cpu=1000)], ["cpu", "cpus"]),
        ([job("two", gpus=2), job("one", 9, gpus=1)], ["one", "two"]),
        ([job("gang", count=3), job("single", 9)], ["single", "gang"]),
        # a whole card counts as the smallest that matches: 16 GiB is less than a slice of 20
        ([job("slice", memory=20 * GIB, compute=100), job("card", 9)], ["card", "slice"]),
        ([job("a100", model="a100"), job("slice", 9, memory=20 * GIB, compute=100)], ["slice", "a100"]),
        # equal needs in other shapes: the older first
        ([job("y", 2, model="t4"), job("x", 3), job("z", 1)], ["z", "y", "x"]),
        # priority counts before need
        ([job("big", gpus=2, priority=1), job("small")], ["big", "small"]),
    ],
)
def test_order_inside_a_tenant(jobs, expected):
    assert order(*jobs) == expected
    assert order(*reversed(jobs)) == expected


def test_a_job_in_back_off_is_passed_over():
    jobs = [job("resting", 0, not_before_ms=START_MS + 60_000), job("next", 1)]
    assert order(*jobs) == ["next"]
    assert order(*jobs, now=60) == ["resting", "next"]


def test_le1_a_back_off_that_has_yet_to_begin_was_written_by_a_clock_that_was_ahead():
    ahead_ms = START_MS + 3_600_000
    jobs = [job("ahead", 0, queued_at_ms=ahead_ms, not_before_ms=ahead_ms + 2000)]
    jobs += [job("resting", 0, queued_at_ms=START_MS, not_before_ms=START_MS + 2000)]
    assert order(*jobs, now=1) == ["ahead"]


def test_a_job_that_was_passed_over_for_too_long_goes_ahead_of_smaller_ones():
    jobs = [job("big", 0, gpus=2), job("small", DAY), job("bigger", 10, gpus=2, count=2)]
    assert order(*jobs, now=DAY) == ["small", "big", "bigger"]
    assert order(*jobs, now=3 * DAY) == ["big", "small", "bigger"]
    assert order(*jobs, now=3 * DAY + 10) == ["big", "bigger", "small"]


def test_the_bounded_wait_stays_inside_a_priority():
    jobs = [job("old", 0), job("urgent", 3 * DAY, gpus=2, priority=1)]
    assert order(*jobs, now=3 * DAY) == ["urgent", "old"]


def test_waiting_counts_from_the_last_time_it_was_queued():
    jobs = [job("again", 0, gpus=2, queued_at_ms=START_MS + 2000 * DAY), job("small", 1)]
    assert order(*jobs, now=3 * DAY) == ["small", "again"]


def test_a_refused_line_is_dropped_whole_and_others_go_on():
    jobs = [job("s1", 1), job("s2", 2), job("b1", 1, gpus=2), job("b2", 2, gpus=2)]
    assert order(*jobs, refuse=("s1",)) == ["b1", "b2"]
    assert order(*jobs, refuse=("b1",)) == ["s1", "s2"]


def test_overdue_looks_at_the_front_of_each_line():
    w = World(node("n1"))
    w.submit(job("j1", 0), job("j2", 50), job("b", 0, gpus=2), job("later", 200))
    w.now = 150
    assert sorted(one.id for _, one in overdue(w.snapshot(), "a", 100)) == ["b", "j1", "j2"]
    assert overdue(w.snapshot(), "nobody", 100) == []


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (spec(gpus=2, memory=2048, compute=20), Needs(4096, 40, 1000)),  # QT-1: counts are multiplied
        (spec(gpus=2, count=3), Needs(6 * 16 * GIB, 6000, 3000)),
        (spec(model="A100"), Needs(80 * GIB, 1000, 1000)),
        (spec(model="H100"), Needs(0, 1000, 1000)),
        (spec(gpus=0, cpu=500), Needs(0, 0, 500)),
        (
            spec(
                tasks=[TaskSpec(gpus=wants(1, 100, 10), cpu_milli=1), TaskSpec(count=2, gpus=wants(2, 7, 5))]
            ),
            Needs(128, 30, 2001),
        ),
    ],
)
def test_what_a_job_needs_in_all(of, expected):
    w = World(node("n1", [gpu("n1", 0, 16 * GIB, "T4"), gpu("n1", 1, 80 * GIB, "A100")]), node("cpu", gpus=0))
    assert Cards(w.snapshot().kinds).needs(shape_of(of)) == expected


def test_fr5_a_whole_card_is_no_mig_instance_and_no_card_in_mig_mode():
    cards = [
        gpu("n1", 0, 8 * GIB, unavailable="MIG mode"),
        mig("n1", 0, 1, 4 * GIB, 142),
        gpu("n1", 2, 40 * GIB),
    ]
    w = World(node("n1", cards))
    assert Cards(w.snapshot().kinds).needs(shape_of(spec())).memory_mib == 40 * GIB
