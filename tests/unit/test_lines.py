"""Waiting jobs in lines: in order whatever the order of arrival, and what was lent stays as it was."""

from __future__ import annotations

from random import Random

from attrs import evolve

from coordinator.lines import WaitingLines
from coordinator.snapshot import LineKey, shape_of
from tests.builders import job, spec


def test_lines_hold_the_same_as_sorting_everything_would_give() -> None:
    random = Random(7)
    lines, waiting = WaitingLines(), {}
    lent, expected_then = lines.lend(), {}
    left = 0
    for step in range(3_000):
        if waiting and random.random() < 0.45:
            one = waiting.pop(random.choice(sorted(waiting)))
            lines.remove(one, lines.key_of(one.spec))
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
            lines.add(one, lines.key_of(one.spec))
        if step % 100 == 0:
            assert {t: dict(of) for t, of in lent.items()} == expected_then, "a snapshot never changes"
            lent, expected_then = lines.lend(), _sorted(waiting.values())
            assert {t: dict(of) for t, of in lent.items()} == expected_then
    assert left > 500


def test_equal_specs_get_one_key_and_others_another() -> None:
    lines = WaitingLines()
    base = spec(gpus=2, constraints={"zone": "a", "rack": "1"})
    again = spec("other", "b", gpus=2, constraints={"rack": "1", "zone": "a"})
    assert lines.key_of(base) is lines.key_of(again)
    assert lines.key_of(base) == LineKey(0, shape_of(base))
    others = [
        evolve(base, priority=1),
        evolve(base, constraints={}),
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
