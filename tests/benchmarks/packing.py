"""`make bench-packing`: how much of a cluster is given out before jobs find no room, against published policies.

The experiment is that of `tests.benchmarks.openb`; the published policies are `openb_policies`, ours is Serai's own
placement: inventories and specs in, `gangs.place` on a draft with the index, prices learned by `Pricing`. `serai`
knows the mix beforehand, as FGD does; `serai_learned` counts what has arrived.

    TRACES=default,cpu250  POLICIES=fgd,serai  SEEDS=5  TRACES_FOLDER=...
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import mean

import numpy as np

from coordinator import gangs
from coordinator.cluster import Cluster
from coordinator.config import Settings
from coordinator.index import Index
from coordinator.model import InventorySeen, ReportSeen
from coordinator.placement import Draft
from coordinator.prices import Pricing
from coordinator.snapshot import Shape, TaskShape
from coordinator.worth import Kind, kind_of
from tests.benchmarks import openb, record
from tests.benchmarks.openb import Figures, Node, Pod, Run
from tests.benchmarks.openb_policies import POLICIES, fragmentation, placed_by
from vgpu.inventory import Gpu, NodeInventory, NodeReport
from vgpu.slices import SliceRequest

OURS = ("serai", "serai_learned")
FIRST_SEED = 42
CARD_MIB = 80 * 1024
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


class Adapter:
    """Pods as shapes and nodes as inventories. A pod that allows several models asks for a tag that stands in the
    names of these models, since a request names one part of a model's name."""

    def __init__(self, run: Run) -> None:
        sets = sorted({pod.models for pod in (*run.originals, *run.pods) if pod.models})
        self._tags = {models: f"<{n}>" for n, models in enumerate(sets)}
        self._run = run

    def shape(self, pod: Pod) -> Shape:
        if not pod.gpus:
            request = SliceRequest()
        elif pod.milli == openb.WHOLE:
            request = SliceRequest(pod.gpus, model=self._tag(pod))
        else:
            request = SliceRequest(pod.gpus, CARD_MIB * pod.milli // openb.WHOLE, pod.milli, self._tag(pod))
        return Shape((TaskShape(1, request, pod.cpu_milli, pod.memory_mib),))

    def mix(self) -> Counter[Kind]:
        shapes = Counter(map(self.shape, self._run.originals))
        mix: Counter[Kind] = Counter()
        for shape, count in shapes.items():
            mix[_kind(shape)] += count
        return mix

    def draft(self, index: Index) -> Draft:
        cluster = Cluster(Settings())
        for number, node in enumerate(self._run.nodes):
            inventory = self._inventory(f"n{number:05}", node)
            cluster.apply(InventorySeen(inventory), 0)
            cluster.apply(ReportSeen(NodeReport(inventory.node, 1, 0, ())), 0)
        return Draft(cluster.snapshot(0), index=index)

    def _inventory(self, name: str, node: Node) -> NodeInventory:
        model = node.model + "".join(
            tag for models, tag in self._tags.items() if node.model in models.split("|")
        )
        gpus = tuple(
            Gpu(f"{name}-{n}", n, model, CARD_MIB, CARD_MIB, ("/dev/null",)) for n in range(node.gpus)
        )
        isolations = ("exclusive", "mps", "timeslice")
        return NodeInventory(
            name, name, "1", gpus, (), node.cpu_milli, node.memory_mib, isolations=isolations
        )

    def _tag(self, pod: Pod) -> str:
        return self._tags[pod.models] if pod.models else ""


def _kind(shape: Shape) -> Kind:
    return kind_of(shape.tasks[0].gpus, shape.tasks[0].cpu_milli)


def placed_by_serai(run: Run, is_learned: bool, every: int = 50) -> tuple[list[bool], float]:
    """As `openb_policies.placed_by`."""
    adapter, index = Adapter(run), Index()
    draft = adapter.draft(index)
    mix: Counter[Kind] = Counter() if is_learned else adapter.mix()
    pricing = Pricing(every, is_known=not is_learned)
    shapes = {pod: adapter.shape(pod) for pod in set(run.pods)}
    kinds = {pod: _kind(shape) for pod, shape in shapes.items()}
    placed = []
    for number, pod in enumerate(run.pods):
        if pricing.is_due(number):
            pricing.refresh(mix, number, index.market, CARD_MIB)
            if pricing.worth is not draft.worth:
                draft.reprice(pricing.worth)
        spots = gangs.place(draft, shapes[pod], gangs.NO_LIMIT)
        if spots is not None:
            draft.take(spots)
        placed.append(spots is not None)
        if is_learned:
            mix[kinds[pod]] += 1
    rows = [draft.row(f"n{number:05}") for number in range(len(run.nodes))]
    cpu = np.array([row.cpu_milli for row in rows], np.int64)
    gpus = np.zeros((len(rows), 8), np.int64)
    for number, row in enumerate(rows):
        gpus[number, : len(row.pieces)] = [piece.compute_milli for piece in row.pieces]
    return placed, fragmentation(run, cpu, gpus)


def measured(trace: str, policy: str, seed: int) -> tuple[record.Row, Figures]:
    run = openb.run_of(trace, seed)
    start = time.perf_counter()
    if policy in OURS:
        placed, left = placed_by_serai(run, is_learned=policy == "serai_learned")
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
    traces = _option("TRACES", openb.TRACES)
    if openb.folder() is None:
        print(openb.WHERE)
        traces = [openb.SAMPLE]
    policies = _option("POLICIES", (*POLICIES, *OURS))
    seeds = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("SEEDS") or 3))
    for policy in policies:
        measured(openb.SAMPLE, policy, 0)  # compiles, so that no run pays for it
    rows: list[record.Row] = []
    for trace in traces:
        for policy in policies:
            rows += [measured(trace, policy, seed)[0] for seed in seeds]
        print(record.table(list(_means(rows, [trace])), _COLUMNS), flush=True)
        record.write("packing", rows, record.machine("numpy", "numba"))
    for line in _gains(rows):
        print(line)


_COLUMNS = (
    "trace", "policy", "allocated_100", "published_100", "allocated_130", "fragmentation_130", "seconds"
)  # fmt: skip


def _option(name: str, default: Sequence[str]) -> list[str]:
    return [part for part in os.environ.get(name, "").split(",") if part] or list(default)


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
                for size in ("fraction", "1", "2", "4", "8")
                if _mean([a for a, _ in known], f"refused_{size}")
                > _mean([b for _, b in known], f"refused_{size}") + 0.005
            ]
            refused = f"; refused more: {', '.join(more)}" if more else ""
            yield f"{policy} {trace}: {gains['100'][-1]:+.2f} / {gains['130'][-1]:+.2f} over FGD{refused}"
        if gains["100"]:
            means = " / ".join(f"{mean(gains[at]):+.2f} (least {min(gains[at]):+.2f})" for at in gains)
            yield f"{policy}, mean of {len(gains['100'])} traces at 100 / 130 %: {means}"


if __name__ == "__main__":
    main()
