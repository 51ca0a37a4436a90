"""Are tenants given what they are owed? Public traces, our policies and what a user would pick instead, in one run.

    make bench-fairness                   the sub-sample in tests/benchmarks/data: 6 cases
    make bench-fairness TRACES=FOLDER     with the other two Philly sub-samples: 18 cases

Each case is a trace, a cluster size and a rule for quotas (equal, or in proportion to GPU-hours), count-only and on nodes
of eight GPUs. `serai` and `space-time` are `coordinator.fairness` itself; the others stand in `fairness_rules`. Run times
are known to all that reserve; `serai-hold` is `serai` where nobody declares them. Measures: `coordinator.simulate.measures`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import exp, log
from multiprocessing import Pool as Processes
from pathlib import Path
from time import process_time

from coordinator.fairness import OWED_FIRST, POLICIES, Policy
from coordinator.simulate.measures import alone, measure
from coordinator.simulate.pool import GPU_MIB, PolicyRules, Pool, Rules
from coordinator.simulate.rooms import CountRoom, NodeRoom
from coordinator.simulate.trace import Trace, read
from tests.benchmarks import record
from tests.benchmarks.fairness_rules import REFERENCES

DATA = Path(__file__).parent / "data"
SIZES = {
    "philly_small": (64, 80, 96),
    "philly_week_20171106": (256, 320, 384),
    "philly_2wk_20171009": (384, 448, 512),
}
QUOTAS = ("equal", "gpu_hours")
PER_NODE = 8
WINDOW_MS = 24 * 3_600_000
OURS = ("space-time", "serai", "serai-hold")
WITHOUT_RESERVATION = (
    "fifo",
    "fifo-backfill",
    "smallest",
    "drf",
    "decay-7d",
    "decay-1d",
    "slurm",
    "space-time",
)
COLUMNS = (
    "policy", "share_error", "max_lag_gpu_hours", "rho_worst", "rho_p99", "rho_unfair_share", "tenant_rho_worst", "jain",
    "jct_mean_hours", "jct_p99_hours", "wait_p99_hours", "makespan_hours", "utilisation", "cpu_seconds",
)  # fmt: skip
Row = dict[str, record.Value]
Case = tuple[str, int, str, bool, str]  # trace, GPUs, quotas, nodes, policy


def rules(policy: str) -> Rules:
    if policy in REFERENCES:
        return REFERENCES[policy]()
    name = policy.removesuffix("-hold")
    return PolicyRules(Policy(name, POLICIES[name], owed_first=name in OWED_FIRST))


@cache
def trace(path: str) -> Trace:
    return read(Path(path))


def shares_of(jobs: Trace, quotas: str) -> list[int]:
    """Quotas by tenant, in any unit."""
    return [1] * len(jobs.tenants) if quotas == "equal" else [round(work) for work in jobs.gpu_ms()]


@cache
def _alone(path: str, gpus: int, quotas: str) -> list[tuple[float, float]]:
    jobs = trace(path)
    parts = shares_of(jobs, quotas)
    return alone(jobs, [part / sum(parts) for part in parts], gpus)


def run(path: str, case: Case) -> Row:
    name, gpus, quotas, nodes, policy = case
    jobs = trace(path)
    parts = shares_of(jobs, quotas)
    quotas_mib = [GPU_MIB * gpus * part // sum(parts) for part in parts]
    room = NodeRoom(gpus, PER_NODE) if nodes else CountRoom(gpus)
    start = process_time()
    known = jobs.without_limits() if policy.endswith("-hold") else jobs
    outcome = Pool(known, room, quotas_mib, rules(policy), WINDOW_MS).run()
    figures = measure(jobs, outcome, _alone(path, gpus, quotas))
    spent = process_time() - start
    about: Row = {"trace": name, "gpus": gpus, "quotas": quotas, "nodes": nodes, "policy": policy}
    return about | figures | {"cpu_seconds": spent}


def cases(traces: Iterable[str], policies: Sequence[str]) -> list[Case]:
    """The long ones first, so that processes end together."""
    return [
        (name, gpus, quotas, nodes, policy)
        for name in sorted(traces, key=lambda name: -SIZES[name][-1])
        for gpus in SIZES[name]
        for quotas in QUOTAS
        for nodes in (False, True)
        for policy in policies
    ]


def found_traces(folder: Path | None) -> dict[str, str]:
    folders = [DATA] if folder is None else [folder, folder / "philly", DATA]
    paths = {name: [f / f"{name}.csv.gz" for f in folders] for name in SIZES}
    return {name: str(p) for name, options in paths.items() for p in options[::-1] if p.exists()}


def summary(rows: Sequence[Row]) -> list[Row]:
    """Plain means over the cases of each policy."""
    found = []
    for policy in dict.fromkeys(str(row["policy"]) for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        means = {name: sum(_number(row, name) for row in own) / len(own) for name in COLUMNS[1:]}
        found.append({"policy": policy, **means})
    return sorted(found, key=lambda row: _number(row, "share_error"))


def bars(rows: Sequence[Row]) -> list[Row]:
    """What `serai` must reach, measured: each as a figure, its bound, and whether it holds. With nodes only E counts."""
    counted = [row for row in rows if not row["nodes"]]
    cases = {_case(row): {str(r["policy"]): r for r in rows if _case(r) == _case(row)} for row in rows}
    flat = {case: found for case, found in cases.items() if not case[3]}
    on_nodes = {case: found for case, found in cases.items() if case[3]}
    mean = {str(row["policy"]): row for row in summary(counted)}

    def ratio(name: str, other: str) -> float:
        return _number(mean["serai"], name) / _number(mean[other], name)

    errors = [
        _number(c["serai"], "share_error") / _number(c["drf-easy"], "share_error") for c in flat.values()
    ]
    best_use = max(_number(row, "utilisation") for row in mean.values())
    best_span = min(_number(row, "makespan_hours") for row in mean.values())
    geometric = exp(sum(log(e) for e in errors) / len(errors))
    found: list[tuple[str, float, float]] = [
        ("E / DRF + EASY, geometric mean", geometric, 1.0),
        ("E / DRF + EASY, worst case", max(errors), 1.10),
        ("cases not below all without a reservation", len(flat) - _wins(flat), 0),
        ("the same with nodes", len(on_nodes) - _wins(on_nodes), len(on_nodes) // 9),
        ("greatest lag / DRF + EASY", ratio("max_lag_gpu_hours", "drf-easy"), 0.85),
        ("worst rho / DRF + EASY", ratio("rho_worst", "drf-easy"), 1.1),
        ("worst rho / space-time", ratio("rho_worst", "space-time"), 0.7),
        ("p99 rho / space-time", ratio("rho_p99", "space-time"), 1.3),
        ("worst tenant rho", _number(mean["serai"], "tenant_rho_worst"), 1.15),
        ("use below the best, points", best_use - _number(mean["serai"], "utilisation"), 0.3),
        ("makespan / best", _number(mean["serai"], "makespan_hours") / best_span, 1.02),
    ]
    return [
        {
            "bar": bar,
            "measured": f"{figure:.3f}",
            "at_most": f"{most:g}",
            "met": "yes" if figure <= most else "NO",
        }
        for bar, figure, most in found
    ]


def _wins(found: dict[Case, dict[str, Row]]) -> int:
    return sum(
        all(
            _number(c["serai"], "share_error") < _number(c[other], "share_error")
            for other in WITHOUT_RESERVATION
        )
        for c in found.values()
    )


def _case(row: Row) -> Case:
    return str(row["trace"]), int(_number(row, "gpus")), str(row["quotas"]), bool(row["nodes"]), ""


def _number(row: Row, name: str) -> float:
    value = row[name]
    assert isinstance(value, int | float)
    return value


def main(arguments: Sequence[str] | None = None, say: Callable[[str], object] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    folder = os.environ.get("TRACES_FOLDER") or None
    parser.add_argument(
        "--traces", type=Path, default=folder and Path(folder), help="folder of the sub-samples"
    )
    parser.add_argument("--policies", default=",".join([*REFERENCES, *OURS]), help="comma-separated")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    paths, policies = found_traces(options.traces), options.policies.split(",")
    tasks = cases(paths, policies)
    rows: list[Row] = []
    with Processes(options.processes) as processes:
        for row in processes.starmap(run, [(paths[case[0]], case) for case in tasks], chunksize=1):
            rows.append(row)
    for nodes in (False, True):
        own = [row for row in rows if row["nodes"] is nodes]
        where = f"nodes of {PER_NODE} GPUs" if nodes else "count-only"
        say(f"\n{len(own) // len(policies)} cases, {where}, means\n{record.table(summary(own), COLUMNS)}")
    if {"serai", "drf-easy", *WITHOUT_RESERVATION} <= set(policies):
        say("\n" + record.table(bars(rows), ("bar", "measured", "at_most", "met")))
    say(f"\n{record.write('fairness', rows, record.machine('attrs'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
