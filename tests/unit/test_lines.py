"""Waiting jobs in lines: in order whatever the order of arrival, and what was lent stays as it was."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from coordinator.lines import WaitingLines
from coordinator.snapshot import SEARCH_DEPTH, LineKey, shape_of
from tests.builders import job, spec


def test_lines_hold_the_same_as_sorting_everything_would_give() -> None:
    random = Random(7)
    lines, waiting = WaitingLines(), {}
    lent, expected_then = lines.lend(), {}
    left = 0
    for step in range(3_000):
        if waiting and random.random() < 0.45:
            one = waiting.pop(random.choice(sorted(waiting)))
            lines.remove(one)
            left += 1
        else:
            one = job(
                f"j{step}",
                random.randrange(500),
                tenant=random.choice("abc"),
                gpus=random.choice((1, 2)),
                priority=random.choice((0, 5)),
            )
            waiting[one.id] = one
            lines.add(one)
        if step % 100 == 0:
            assert {t: dict(of) for t, of in lent.items()} == expected_then, "a snapshot never changes"
            lent, expected_then = lines.lend(), _sorted(waiting.values())
            assert {t: dict(of) for t, of in lent.items()} == expected_then
    assert left > 500


def test_a_lent_line_is_the_tuple_that_it_was_lent_as() -> None:
    """Mostly jobs join at the end and leave at the front, sometimes anywhere."""
    random = Random(5)
    lines, waiting = WaitingLines(), []
    lent = []
    for step in range(4_500):
        chance = random.random()
        if waiting and chance < (0.2 if step < 1_500 else 0.75):
            place = random.randrange(len(waiting)) if random.random() < 0.05 else 0
            lines.remove(waiting.pop(place))
        else:
            is_late = random.random() < 0.02
            one = job(f"j{step:05}", random.randrange(step + 1) if is_late else step)
            waiting.append(one)
            waiting.sort(key=lambda one: (one.submitted_at_ms, one.id))
            lines.add(one)
        if random.random() < 0.1:
            line = next(iter(lines.lend()["a"].values())) if waiting else ()
            lent.append((line, tuple(waiting)))
            assert bool(line) == bool(waiting)
    assert max(len(copy) for _, copy in lent) > 700
    assert min(len(copy) for _, copy in lent) == 0
    for line, copy in lent:
        assert tuple(line) == copy == tuple(line[:])
        assert len(line) == len(copy)
        for part in (slice(3), slice(-3, None), slice(2, 9, 3), slice(5, 2, -1)):
            assert line[part] == copy[part]
        for place in (0, 1, len(copy) // 2, len(copy) - 1, -1, -len(copy)):
            if -len(copy) <= place < len(copy):
                assert line[place] is copy[place]
        for place in (len(copy), -len(copy) - 1):
            with pytest.raises(IndexError):
                line[place]


def test_a_long_line_is_not_copied_for_a_job_that_joins_or_leaves_in_its_turn() -> None:
    lines = WaitingLines()
    jobs = [job(f"j{n:04}", n) for n in range(1_000)]
    for one in jobs[:900]:
        lines.add(one)
    [before] = lines.lend()["a"].values()
    lines.add(jobs[900])
    lines.remove(jobs[0])
    [after] = lines.lend()["a"].values()
    assert (after[0], after[-1], len(before)) == (jobs[1], jobs[900], 900)
    assert after.jobs is before.jobs
    lines.remove(jobs[500])
    [now] = lines.lend()["a"].values()
    assert now.jobs is not before.jobs
    for one in jobs[1:500]:
        lines.remove(one)
    assert len(next(iter(lines.lend()["a"].values())).jobs) < 600, "who left long ago is not kept"


def test_the_lines_of_a_tenant_are_the_same_object_while_nothing_changes() -> None:
    lines = WaitingLines()
    lines.add(job("a1", tenant="a", gpus=1))
    lines.add(job("a2", tenant="a", gpus=2))
    lines.add(job("b1", tenant="b"))
    before = lines.lend()
    lines.add(job("b2", tenant="b"))
    after = lines.lend()
    assert after["a"] is before["a"]
    assert after["b"] is not before["b"]
    lines.add(job("a3", tenant="a", gpus=2))
    one, two = (next(key for key in after["a"] if key.shape.gpu_count == gpus) for gpus in (1, 2))
    assert lines.lend()["a"][one] is after["a"][one]
    assert len(lines.lend()["a"][two]) == 2
    lines.remove(job("b1", tenant="b"))
    lines.remove(job("b2", tenant="b"))
    assert set(lines.lend()) == {"a"}


def test_equal_specs_get_one_key_and_others_another() -> None:
    lines = WaitingLines()
    base = spec(gpus=2, constraints={"zone": "a", "rack": "1"})
    again = spec("other", "b", gpus=2, constraints={"rack": "1", "zone": "a"})
    assert lines.key_of(base) is lines.key_of(again)
    assert lines.key_of(base) == LineKey(0, shape_of(base))
    others = [
        replace(base, priority=1),
        replace(base, constraints={}),
        spec(gpus=1),
        spec(gpus=2, cpu=1),
        spec(gpus=2, node_memory=2),
        spec(gpus=2, count=2),
        spec(gpus=2, model="H100"),
        spec(gpus=2, isolation="mps"),
        spec(gpus=2, compute=500),
        spec(gpus=2, memory=4096),
    ]
    keys = [lines.key_of(base), *(lines.key_of(other) for other in others)]
    assert len(set(keys)) == len(keys)


def _sorted(jobs):
    found: dict = {}
    for one in sorted(jobs, key=lambda j: (j.submitted_at_ms, j.id)):
        key = LineKey(one.spec.priority, shape_of(one.spec))
        found.setdefault(one.tenant, {}).setdefault(key, []).append(one)
    return {tenant: {key: tuple(line) for key, line in of.items()} for tenant, of in found.items()}


def test_the_quickest_of_a_line_is_the_least_limit_as_far_as_a_search_goes() -> None:
    random = Random(11)
    lines, waiting = WaitingLines(), []

    def join(step: int) -> None:
        limit = random.choice((None, None, 60 + random.randrange(2_000)))
        one = job(f"j{step:05}", step - random.choice((0, 0, 90)), max_runtime_seconds=limit)
        waiting.append(one)
        waiting.sort(key=lambda one: (one.submitted_at_ms, one.id))
        lines.add(one)

    for step in range(SEARCH_DEPTH + 20):
        join(step)
    for step in range(1_000, 3_000):
        if random.random() < 0.5:
            lines.remove(waiting.pop(random.choice((0, 0, random.randrange(len(waiting))))))
        else:
            join(step)
        [line] = lines.lend()["a"].values()
        limits = [one.spec.max_runtime_seconds for one in waiting]
        assert line.limited == sum(limit is not None for limit in limits)
        if random.random() < 0.7:  # else nobody asks, and the next one is to know it
            assert line.quickest_ms == 1000 * min(
                limit for limit in limits[:SEARCH_DEPTH] if limit is not None
            )
