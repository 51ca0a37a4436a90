"""Plays seeds of the simulation and writes down what was found.

    python -m tests.simulation --seeds 300 --from 0      plays them, writes build/bench/simulate.json
    python -m tests.simulation --seed 60 --story         plays one and tells it
    python -m tests.simulation --seed 60 --control fence-off

A seed gives the same run each time: the process starts itself again with a fixed PYTHONHASHSEED, since the order of
sets of strings depends on it. Exit code 1 when a promise was broken, or a control was not found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tests.simulation.controls import Control
from tests.simulation.scenario import draw
from tests.simulation.seeds import Chunk, find_control, play_span
from tests.simulation.shrink import Cut, shrunk
from tests.simulation.world import play

CHUNK = 10
PROGRESS_EACH = 200
SHRINK_SECONDS = 60.0
SHRUNK_AT_MOST = 5
CONTROL_SEEDS = 600
RESULT = Path("build/bench/simulate.json")


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], environment)
    options = _options()
    if options.seed is not None:
        return _one(options)
    began = time.monotonic()
    wanted = (
        [Control(options.only_control)] if options.only_control else list(Control) if options.controls else []
    )
    chunks, controls = _play_all(options, wanted)
    failures = [failure for chunk in chunks for failure in chunk.failures]
    shown = [_shown(seed, text) for seed, text in failures[:SHRUNK_AT_MOST]]
    shown += [{"seed": seed, "violation": text} for seed, text in failures[SHRUNK_AT_MOST:]]
    faults: Counter[str] = Counter()
    for chunk in chunks:
        faults += chunk.faults
    result = {
        "seeds": options.seeds,
        "from": options.first,
        "steps": sum(chunk.steps for chunk in chunks),
        "jobs": sum(chunk.jobs for chunk in chunks),
        "virtual_seconds": round(sum(chunk.virtual_seconds for chunk in chunks)),
        "faults": dict(sorted(faults.items())),
        "failures": shown,
        "controls": controls,
        "seconds": round(time.monotonic() - began, 1),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{options.seeds} seeds, {len(failures)} failures, {result['seconds']} s, see {options.output}")
    return 1 if failures or any(control["found_at_seed"] is None for control in controls) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--controls", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only-control", choices=[control.value for control in Control])
    parser.add_argument("--control-seeds", type=int, default=CONTROL_SEEDS)
    parser.add_argument("--seed", type=int, help="play this one only")
    parser.add_argument("--story", action="store_true")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--control", choices=[control.value for control in Control])
    for name in ("jobs", "faults", "odds"):
        parser.add_argument(f"--without-{name}", default="")
    return parser.parse_args()


def _one(options: argparse.Namespace) -> int:
    control = Control(options.control) if options.control else None
    numbers = {name: _numbers(getattr(options, f"without_{name}")) for name in ("jobs", "faults")}
    cut = Cut(numbers["jobs"], numbers["faults"], frozenset(filter(None, options.without_odds.split(","))))
    whole = draw(options.seed, late=control is Control.RENEWAL_OFF)
    scenario = cut.of(whole)
    result = play(scenario, control)
    if options.story:
        print("\n".join(result.story))
    print(f"seed {options.seed}: {result.failure or 'every promise was kept'}")
    if result.failure and options.shrink:
        smaller, _ = shrunk(whole, result.failure, control, SHRINK_SECONDS)
        print(f"python -m tests.simulation --seed {options.seed}{smaller.options()} --story")
    return 1 if result.failure else 0


def _numbers(text: str) -> frozenset[int]:
    return frozenset(int(word) for word in text.split(",") if word)


def _play_all(
    options: argparse.Namespace, wanted: Sequence[Control]
) -> tuple[list[Chunk], list[dict[str, object]]]:
    """The seeds, and the controls in the same processes beside them."""
    first, end = options.first, options.first + options.seeds
    spans = [(start, min(start + CHUNK, end)) for start in range(first, end, CHUNK)]
    look = partial(find_control, seeds=options.control_seeds)
    if options.workers <= 1:
        return list(_told(map(play_span, spans), options.seeds)), [look(control) for control in wanted]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        controls = pool.map(look, wanted)
        return list(_told(pool.map(play_span, spans), options.seeds)), list(controls)


def _told(chunks: Iterator[Chunk], seeds: int) -> Iterator[Chunk]:
    """The same, with a line of progress now and then."""
    played = 0
    for chunk in chunks:
        before, played = played, played + chunk.seeds
        if before // PROGRESS_EACH < played // PROGRESS_EACH:
            print(f"{played} of {seeds} seeds", flush=True)
        yield chunk


def _shown(seed: int, violation: str) -> dict[str, object]:
    cut, result = shrunk(draw(seed), violation, None, SHRINK_SECONDS)
    command = f"python -m tests.simulation --seed {seed}{cut.options()} --story"
    print(f"seed {seed}, made smaller: {command}", flush=True)
    return {"seed": seed, "violation": violation, "replay": command, "story": result.story[-60:]}


if __name__ == "__main__":
    sys.exit(main())
