"""`make bench-packing`: how much of a cluster is given out before jobs find no room, against published policies.

The experiment is that of `tests.benchmarks.openb`; the published policies are `openb_policies`, ours is Serai's own
placement (`openb_serai`). `serai` knows the mix beforehand, as FGD does; `serai_learned` counts what has arrived.

    TRACES=default,cpu250  POLICIES=fgd,serai  SEEDS=5  TRACES_FOLDER=...

MEMORY=independent (or some of small,uniform,large) does it in two dimensions instead, see `openb_memory`. The rows of
both stand in one file, those of two dimensions with `memory`; a run of the one leaves those of the other alone.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import mean

from tests.benchmarks import openb, openb_memory, record
from tests.benchmarks.openb import Figures
from tests.benchmarks.openb_policies import POLICIES, fragmentation, placed_by
from tests.benchmarks.openb_serai import placed_by_serai

OURS = ("serai", "serai_learned")
FIRST_SEED = 42
PUBLISHED_WITHIN = 0.3
KINDS = ("fraction", "1", "2", "4", "8")  # of jobs, by how many GPUs they ask for
# Means of ten seeds as published (experiments/analysis/expected_results of the simulator), at 100 and 130 % arrived.
PUBLISHED_100 = {
    "default": (86.30, 90.62, 91.65, 91.78, 92.86, 95.23),
    "multigpu20": (86.92, 91.85, 93.34, 93.50, 93.73, 95.53),
    "multigpu30": (86.63, 93.11, 94.55, 94.70, 94.57, 96.36),
    "multigpu40": (85.38, 94.04, 95.35, 95.59, 95.10, 96.91),
    "multigpu50": (81.28, 94.73, 95.69, 96.06, 95.62, 97.09),
    "gpushare40": (84.86, 89.30, 89.76, 89.77, 91.44, 93.96),
    "gpushare60": (82.81, 86.82, 86.90, 87.15, 89.06, 91.25),
    "gpushare80": (80.62, 84.14, 84.50, 84.65, 86.66, 89.08),
    "gpushare100": (78.90, 81.98, 82.22, 82.13, 84.62, 86.64),
    "gpuspec10": (86.26, 90.17, 91.96, 92.24, 93.10, 94.66),
    "gpuspec20": (85.90, 88.29, 89.11, 89.28, 88.46, 94.66),
    "gpuspec25": (85.42, 85.44, 86.41, 86.77, 85.67, 93.91),
    "gpuspec33": (83.87, 79.82, 81.09, 82.22, 80.39, 87.84),
    "cpu050": (89.02, 93.03, 93.52, 93.46, 93.56, 95.00),
    "cpu100": (87.44, 91.73, 92.42, 92.50, 93.26, 95.21),
    "cpu200": (83.03, 87.45, 89.67, 89.98, 92.15, 94.82),
    "cpu250": (80.00, 83.57, 87.75, 88.05, 91.21, 93.20),
}


def measured(trace: str, policy: str, seed: int) -> tuple[record.Row, Figures]:
    run = openb.run_of(trace, seed)
    start = time.perf_counter()
    if policy in OURS:
        placed, rest = placed_by_serai(run, is_learned=policy == "serai_learned")
        seconds = time.perf_counter() - start
        left = fragmentation(run, rest.cpu, rest.gpus)
    else:
        answer, left = placed_by(policy, run, seed)
        placed = answer.tolist()
        seconds = time.perf_counter() - start
    found = openb.figures(run, placed)
    row: record.Row = {
        "trace": trace,
        "policy": policy,
        "seed": seed,
        "allocated_100": round(found.allocated_100, 4),
        "allocated_130": round(found.allocated_130, 4),
        "fragmentation_130": round(left, 4),
        "seconds": round(seconds, 3),
        **{f"refused_{size}": round(share, 4) for size, share in sorted(found.refused.items())},
    }
    return row, found


def main() -> None:
    if openb.folder() is None:
        print(openb.WHERE)
    if os.environ.get("MEMORY"):
        _in_two_dimensions()
    else:
        _in_one_dimension()


def _in_one_dimension() -> None:
    traces = _option("TRACES", openb.TRACES) if openb.folder() else [openb.SAMPLE]
    policies = _option("POLICIES", (*POLICIES, *OURS))
    for policy in policies:
        measured(openb.SAMPLE, policy, 0)  # compiles, so that no run pays for it
    others = [row for row in record.rows("packing") if "memory" in row]
    rows: list[record.Row] = []
    for trace in traces:
        for policy in policies:
            rows += [measured(trace, policy, seed)[0] for seed in _seeds()]
        print(record.table(list(_means(rows, [trace])), _COLUMNS), flush=True)
        record.write("packing", [*rows, *others], record.machine("numpy", "numba"))
    for line in (*_off(rows), *_gains(rows)):
        print(line)


def _in_two_dimensions() -> None:
    named = _option("MEMORY", ())
    memories = list(openb_memory.MEMORIES) if named == ["independent"] else named
    traces = _option("TRACES", openb_memory.TRACES) if openb.folder() else [openb.SAMPLE]
    policies = _option("POLICIES", openb_memory.POLICIES)
    for policy in policies:
        openb_memory.measured(openb.SAMPLE, "uniform", policy, 0)  # compiles, so that no run pays for it
    others = [row for row in record.rows("packing") if "memory" not in row]
    rows: list[record.Row] = []
    for trace in traces:
        for memory in memories:
            found = [
                openb_memory.measured(trace, memory, policy, seed) for policy in policies for seed in _seeds()
            ]
            rows += found
            print(record.table(list(openb_memory.means(found)), openb_memory.COLUMNS))
            print(*openb_memory.leads(found), sep="\n", flush=True)
            record.write("packing", [*others, *rows], record.machine("numpy", "numba"))


_COLUMNS = (
    "trace", "policy", "allocated_100", "published_100", "allocated_130", "fragmentation_130", "seconds"
)  # fmt: skip


def _option(name: str, default: Sequence[str]) -> list[str]:
    return [part for part in os.environ.get(name, "").split(",") if part] or list(default)


def _seeds() -> range:
    return range(FIRST_SEED, FIRST_SEED + int(os.environ.get("SEEDS") or 3))


def _means(rows: Sequence[record.Row], traces: Sequence[str]) -> Iterator[record.Row]:
    groups: dict[tuple[str, str], list[record.Row]] = defaultdict(list)
    for row in rows:
        groups[str(row["trace"]), str(row["policy"])].append(row)
    for (trace, policy), group in groups.items():
        if trace in traces:
            published = PUBLISHED_100.get(trace, ())
            place = POLICIES.index(policy) if policy in POLICIES else len(published)
            yield {
                "trace": trace,
                "policy": policy,
                "published_100": published[place] if place < len(published) else None,
                **{
                    name: _mean(group, name)
                    for name in _COLUMNS
                    if name in group[0] and name not in ("trace", "policy")
                },
            }


def _mean(rows: Sequence[record.Row], name: str) -> float:
    return mean(float(row.get(name) or 0.0) for row in rows)


def _off(rows: Sequence[record.Row]) -> Iterator[str]:
    """Published policies whose mean is not the published one, which is of ten runs: of fewer the means of those that
    cluster differ by up to half a point."""
    known = [row for row in _means(rows, openb.TRACES) if row["published_100"] is not None]
    off = [
        f"{row['trace']} {row['policy']} {delta:+.2f}"
        for row in known
        if abs(delta := float(row["allocated_100"] or 0) - float(row["published_100"] or 0))
        > PUBLISHED_WITHIN
    ]
    if known:
        found = f"; not {', '.join(off)}" if off else ""
        yield f"{len(known) - len(off)} of {len(known)} within {PUBLISHED_WITHIN} of the published mean{found}"


def _gains(rows: Sequence[record.Row]) -> Iterator[str]:
    """The bars: gain over FGD in the same run, trace by trace and in the mean, and who is refused more."""
    by = {(row["trace"], row["policy"], row["seed"]): row for row in rows}
    traces = list(dict.fromkeys(str(row["trace"]) for row in rows))
    seeds = sorted({int(row["seed"] or 0) for row in rows})
    for policy in OURS:
        gains: dict[str, list[float]] = {"100": [], "130": []}
        for trace in traces:
            pairs = [(by.get((trace, policy, s)), by.get((trace, "fgd", s))) for s in seeds]
            known = [(ours, fgd) for ours, fgd in pairs if ours is not None and fgd is not None]
            if not known:
                continue
            for at in gains:
                name = f"allocated_{at}"
                gains[at].append(mean(float(a[name] or 0) - float(b[name] or 0) for a, b in known))
            more = [
                f"{size} ({_mean([a for a, _ in known], f'refused_{size}'):.2f} against"
                f" {_mean([b for _, b in known], f'refused_{size}'):.2f})"
                for size in KINDS
                if _mean([a for a, _ in known], f"refused_{size}")
                > _mean([b for _, b in known], f"refused_{size}") + 0.005
            ]
            refused = f"; refused more: {', '.join(more)}" if more else ""
            yield f"{policy} {trace}: {gains['100'][-1]:+.2f} / {gains['130'][-1]:+.2f} over FGD{refused}"
        if gains["100"]:
            means = " / ".join(f"{mean(gains[at]):+.2f} (least {min(gains[at]):+.2f})" for at in gains)
            yield f"{policy}, mean of {len(gains['100'])} traces at 100 / 130 %: {means}"
            ours, fgd = ([row for row in rows if row["policy"] == name] for name in (policy, "fgd"))
            kinds = (
                f"{size} {_mean(ours, f'refused_{size}'):.2f} ({_mean(fgd, f'refused_{size}'):.2f})"
                for size in KINDS
            )
            yield f"{policy}, GPUs refused to each kind in % of the cluster (fgd): {', '.join(kinds)}"


if __name__ == "__main__":
    main()
