"""Plays seeds in a row, and looks for controls; what a worker process is asked for."""

from __future__ import annotations

import gc
from collections import Counter

from attrs import frozen

from tests.simulation.controls import Control
from tests.simulation.scenario import draw
from tests.simulation.world import Result, play


@frozen
class Chunk:
    """What some seeds in a row gave: failing seeds with their violation, faults by kind."""

    seeds: int
    steps: int
    jobs: int
    virtual_seconds: float
    faults: Counter[str]
    failures: tuple[tuple[int, str], ...]


def play_span(span: tuple[int, int]) -> Chunk:
    """Seeds from the first to the one before the second."""
    gc.collect()  # else what is left of the span before is kept for good
    gc.freeze()  # what was imported need not be looked at after each seed
    faults: Counter[str] = Counter()
    failures = []
    steps = jobs = 0
    virtual_seconds = 0.0
    for seed in range(*span):
        result = _played(seed)
        faults.update(result.faults)
        steps, jobs, virtual_seconds = (
            steps + result.steps,
            jobs + result.jobs,
            virtual_seconds + result.virtual_seconds,
        )
        if result.failure:
            failures.append((seed, result.failure))
            print(
                f"seed {seed}: {result.failure}\n  python -m tests.simulation --seed {seed} --story",
                flush=True,
            )
    return Chunk(span[1] - span[0], steps, jobs, virtual_seconds, faults, tuple(failures))


def _played(seed: int) -> Result:
    """A fault of the simulation itself is a failure like any other."""
    try:
        return play(draw(seed))
    except Exception as error:
        return Result(seed, f"the simulation broke: {error!r}", 0, {}, 0, 0.0, ())


def find_control(control: Control, seeds: int) -> dict[str, object]:
    """The first seed at which the missing safeguard is noticed."""
    for seed in range(seeds):
        result = play(draw(seed, late=control is Control.RENEWAL_OFF), control)
        if result.failure:
            return {"control": control.value, "found_at_seed": seed, "violation": result.failure}
    return {"control": control.value, "found_at_seed": None, "seeds": seeds}
