"""The search for the jobs on which planning fails, against what the test made fail."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.waiting import WaitingReasons
from coordinator.cycle import Plan
from coordinator.guard import MOST_TRIES, MOST_TRIES_IN_LINE, planned, reason_of, without
from coordinator.snapshot import Snapshot
from tests.builders import START_MS, World, job, node
from vgpu.reasons import ReasonCode

SEEN: Counter[str] = Counter()


def _snapshot(lines: list[int]) -> Snapshot:
    """So many jobs of each shape, of two tenants."""
    world = World(node("n1", gpus=8))
    for line, count in enumerate(lines):
        for number in range(count):
            world.submit(job(f"{line:02}.{number:04}", tenant="ab"[line % 2], gpus=1 + line))
    return world.snapshot()


class Planner:
    """Fails while one of `bad` waits, or all of a pair."""

    def __init__(self, bad: set[str], pair: frozenset[str] = frozenset()) -> None:
        self.bad, self.pair = bad, pair
        self.tries = 0

    def __call__(self, snapshot: Snapshot) -> Plan:
        self.tries += 1
        waiting = snapshot.waiting_jobs.keys()
        assert {j.id for lines in snapshot.lines.values() for line in lines.values() for j in line} == waiting
        assert all(line for lines in snapshot.lines.values() for line in lines.values())
        if waiting & self.bad or (self.pair and self.pair <= waiting):
            raise ValueError("bad")
        return Plan(0, (), dict.fromkeys(waiting))  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_those_at_fault_are_left_out_and_nobody_else_property(lines: list[int], data: st.DataObject) -> None:
    snapshot = _snapshot(lines)
    ids = sorted(snapshot.waiting_jobs)
    bad = set(data.draw(st.lists(st.sampled_from(ids), max_size=4)))
    planner = Planner(bad)
    plan, at_fault = planned(snapshot, planner)
    assert at_fault.keys() == bad
    assert set(plan.waiting) == set(ids) - bad
    SEEN["nobody"] += not bad
    SEEN["several"] += len(bad) > 1
    SEEN["all"] += len(bad) == len(ids)
    SEEN["whole line"] += any(
        {j.id for j in line} <= bad for ls in snapshot.lines.values() for line in ls.values()
    )


def test_the_property_above_was_not_vacuous() -> None:
    if SEEN:
        assert all(SEEN[name] for name in ("nobody", "several", "all", "whole line")), SEEN


def test_of_two_jobs_that_fail_only_together_one_is_left_out() -> None:
    snapshot = _snapshot([4, 4, 4])
    pair = frozenset({"00.0001", "02.0003"})
    _, at_fault = planned(snapshot, Planner(set(), pair))
    assert len(at_fault) == 1
    assert at_fault.keys() < pair


def test_one_bad_job_of_thousands_takes_few_plans() -> None:
    planner = Planner({"01.0777"})
    _, at_fault = planned(_snapshot([1000, 1000, 1000]), planner)
    assert set(at_fault) == {"01.0777"}
    assert planner.tries <= 32


def test_a_shape_that_is_bad_as_a_whole_costs_no_plan_for_each_of_its_jobs() -> None:
    """All of it is left out when the tries for one line are used up."""
    snapshot = _snapshot([10, 500, 10])
    planner = Planner({id for id in snapshot.waiting_jobs if id.startswith("01.")})
    plan, at_fault = planned(snapshot, planner)
    assert at_fault.keys() == planner.bad
    assert len(plan.waiting) == 20
    assert planner.tries <= 20 + MOST_TRIES_IN_LINE


def test_the_number_of_plans_has_an_end_whatever_fails() -> None:
    snapshot = _snapshot([6] * 7)
    planner = Planner(set(snapshot.waiting_jobs))
    _, at_fault = planned(snapshot, planner)
    assert at_fault.keys() == planner.bad
    assert planner.tries <= 3 + MOST_TRIES


def test_a_fault_with_nobody_waiting_is_nobodys() -> None:
    def broken(snapshot: Snapshot) -> Plan:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        planned(_snapshot([2]), broken)


def test_without_nobody_a_snapshot_is_itself() -> None:
    snapshot = _snapshot([1])
    assert without(snapshot, ["gone"]) is snapshot


async def test_a_page_of_the_queue_shows_everybody_though_planning_fails_on_one() -> None:
    """The API plans for itself. The job that it fails on, and the one that the leader has set aside, come last."""
    world = World(node("n1", gpus=1))
    told = reason_of(ValueError())
    world.submit(job("set-aside", reason=told), job("first"), job("second", gpus=2))
    world.submit(job("poisoned", priority="high"))
    reasons = WaitingReasons(
        lambda: world.cluster.snapshot(START_MS), lambda: 0, world.policy, lambda: START_MS
    )
    seen = await reasons.now()
    assert [(n, j.id) for n, j in seen.from_position(1)] == [
        (1, "first"), (2, "second"), (3, "poisoned"), (4, "set-aside")
    ]  # fmt: skip
    second = seen.reason("second")
    assert second is not None
    assert second.code is ReasonCode.TASK_LARGER_THAN_ANY_NODE
    assert seen.reason("set-aside") is None, "its record tells it"
    await reasons.close()
