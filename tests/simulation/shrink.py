"""Makes a failing scenario smaller: leaves out jobs, faults and kinds of small faults for as long as it still fails alike."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from tests.simulation.controls import Control
from tests.simulation.scenario import Scenario
from tests.simulation.world import Result, play


@frozen
class Cut:
    """What is left out of a scenario: numbers of jobs and of faults, and kinds of small faults."""

    jobs: frozenset[int] = frozenset()
    faults: frozenset[int] = frozenset()
    odds: frozenset[str] = frozenset()

    def of(self, scenario: Scenario) -> Scenario:
        return evolve(
            scenario,
            wishes=tuple(wish for n, wish in enumerate(scenario.wishes) if n not in self.jobs),
            faults=tuple(fault for n, fault in enumerate(scenario.faults) if n not in self.faults),
            odds={kind: odds for kind, odds in scenario.odds.items() if kind not in self.odds},
        )

    def options(self) -> str:
        parts = [("jobs", self.jobs), ("faults", self.faults), ("odds", self.odds)]
        return "".join(f" --without-{name} {','.join(map(str, sorted(out)))}" for name, out in parts if out)


def alike(failure: str) -> str:
    """A failure without what differs from run to run."""
    return re.sub(r"\S*\d\S*", "#", failure.split(":")[0])[:80]


def shrunk(
    scenario: Scenario,
    failure: str,
    control: Control | None,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Cut, Result]:
    """The smallest cut that was found in the time, and how the scenario ends with it."""
    deadline, wanted = clock() + seconds, alike(failure)
    cut, result = Cut(), play(scenario, control)

    def attempt(wider: Cut) -> bool:
        nonlocal cut, result
        if clock() >= deadline:
            return False
        found = play(wider.of(scenario), control)
        if found.failure and alike(found.failure) == wanted:
            cut, result = wider, found
            return True
        return False

    for kind in sorted(scenario.odds):
        attempt(evolve(cut, odds=cut.odds | {kind}))
    for chunk in _chunks(len(scenario.faults)):
        attempt(evolve(cut, faults=cut.faults | set(chunk)))
    for chunk in _chunks(len(scenario.wishes)):
        attempt(evolve(cut, jobs=cut.jobs | set(chunk)))
    return cut, result


def _chunks(count: int) -> Sequence[range]:
    """Halves, quarters, and so on down to single ones."""
    chunks: list[range] = []
    size = (count + 1) // 2
    while size >= 1:
        chunks += [range(start, min(start + size, count)) for start in range(0, count, size)]
        size = 0 if size == 1 else (size + 1) // 2
    return chunks
