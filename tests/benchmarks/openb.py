"""The openb placement experiment (Weng et al., USENIX ATC'23): nodes, pods, the stream of a run, and its figures.

The traces are not part of Serai. They lie in `data/csv` of hkust-adsl/kubernetes-scheduler-simulator (Apache-2.0) as
`openb_node_list_gpu_node.csv` and `openb_pod_list_<trace>.csv`, plain or with `.gz`; TRACES_FOLDER (or SERAI_TRACES)
names the folder. Without it a made-up cluster with a made-up mix of the same kind is used, under the name `sample`.

Pods arrive one by one and never leave; who finds no room is dropped. Figures are the mean share of all GPUs that is
allocated over the events at which the GPUs asked for so far round to 100 % (130 %) of the cluster.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from attrs import frozen

WHOLE = 1000
# No card of the trace has its memory told; all are taken for alike.
CARD_MIB = 80 * 1024
TUNE = 1.3
TRACES = (
    "default",
    *(f"multigpu{n}" for n in (20, 30, 40, 50)),
    *(f"gpushare{n}" for n in (40, 60, 80, 100)),
    *(f"gpuspec{n}" for n in (10, 20, 25, 33)),
    *(f"cpu{n}" for n in ("050", "100", "200", "250")),
)
SAMPLE = "sample"
WHERE = (
    "no traces: TRACES_FOLDER must name a folder with openb_pod_list_*.csv[.gz] and "
    "openb_node_list_gpu_node.csv[.gz] (data/csv of github.com/hkust-adsl/kubernetes-scheduler-simulator); "
    "a made-up sample is used instead"
)
Kind = TypeVar("Kind", bound=tuple[Any, ...])


@frozen
class Node:
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str


@frozen(cache_hash=True)
class Pod:
    """`milli` of each of `gpus` GPUs; `models` that are allowed, joined by "|", empty for any. `drawn_mib` is memory of
    a GPU that does not go with compute (`openb_memory`)."""

    cpu_milli: int
    memory_mib: int
    milli: int
    gpus: int
    models: str = ""
    drawn_mib: int | None = None

    @property
    def gpu_mib(self) -> int:
        """Memory of each of its GPUs: in proportion to compute unless it was drawn."""
        return CARD_MIB * self.milli // WHOLE if self.drawn_mib is None else self.drawn_mib

    @property
    def asked_milli(self) -> int:
        return self.milli * self.gpus

    @property
    def kind(self) -> tuple[int, int, int, str]:
        return self.cpu_milli, self.milli, self.gpus, self.models

    def runs_on(self, model: str) -> bool:
        return not self.models or model in self.models.split("|")


@frozen
class Run:
    """One stream: pods in the order of their arrival, nodes in the order that breaks ties."""

    nodes: tuple[Node, ...]
    originals: tuple[Pod, ...]
    pods: tuple[Pod, ...]

    @property
    def capacity_milli(self) -> int:
        return WHOLE * sum(node.gpus for node in self.nodes)


def folder() -> Path | None:
    """Where the traces lie; None where nobody said."""
    named = os.environ.get("TRACES_FOLDER") or os.environ.get("SERAI_TRACES") or ""
    for path in (Path(named), Path(named) / "fgd"):
        if named and any(path.glob("openb_node_list_gpu_node.csv*")):
            return path
    return None


def nodes_of(trace: str) -> tuple[Node, ...]:
    if trace == SAMPLE:
        return _sample_nodes()
    rows = _rows("openb_node_list_gpu_node.csv")
    return tuple(
        Node(int(r["cpu_milli"]), int(r["memory_mib"]), int(r["gpu"]), r["model"] or "") for r in rows
    )


def pods_of(trace: str) -> tuple[Pod, ...]:
    return _sample_pods() if trace == SAMPLE else tuple(map(_pod, _rows(f"openb_pod_list_{trace}.csv")))


def run_of(trace: str, seed: int) -> Run:
    return stream_of(nodes_of(trace), pods_of(trace), seed)


def stream_of(nodes: Sequence[Node], originals: Sequence[Pod], seed: int) -> Run:
    """The original pods shuffled, then pods drawn from them until the next would pass 1.3 times the cluster; where
    they ask for more from the start, some are left out. Then the nodes in an order of their own."""
    rng = np.random.default_rng(seed)
    stream = [originals[n] for n in rng.permutation(len(originals))]
    most = TUNE * WHOLE * sum(node.gpus for node in nodes)
    asked = sum(pod.asked_milli for pod in stream)
    is_short = asked <= most
    while asked > most:
        asked -= stream.pop(int(rng.integers(len(stream)))).asked_milli
    while is_short:
        pod = originals[int(rng.integers(len(originals)))]
        is_short = asked + pod.milli <= most  # one GPU of it, as the experiment has it
        if is_short:
            asked += pod.asked_milli
            stream.append(pod)
    order = rng.permutation(len(nodes))
    return Run(tuple(nodes[n] for n in np.argsort(order)), tuple(originals), tuple(stream))


def typical(pods: Sequence[Pod]) -> list[tuple[tuple[int, int, int, str], float]]:
    """The kinds of pods that make up 95 % of all, the commonest first, with their shares among these."""
    return commonest([pod.kind for pod in pods])


def commonest(kinds: Sequence[Kind]) -> list[tuple[Kind, float]]:
    """Those that make up 95 % of all, the commonest first, with their shares among these."""
    counts = sorted(Counter(kinds).items(), key=lambda item: (item[1], item[0]), reverse=True)
    kept, total = [], 0
    for kind, count in counts:
        if total >= 0.95 * len(kinds):
            break
        kept.append((kind, count))
        total += count
    return [(kind, count / total) for kind, count in kept]


@frozen
class Figures:
    allocated_100: float
    allocated_130: float
    refused: dict[str, float]  # by kind of pod: GPUs refused until 100 % arrived, in % of the cluster


def figures(run: Run, placed: Sequence[bool]) -> Figures:
    used = arrived = 0
    at: dict[int, list[float]] = {100: [], 130: []}
    refused: Counter[str] = Counter()
    for pod, is_placed in zip(run.pods, placed, strict=True):
        arrived += pod.asked_milli
        used += pod.asked_milli * is_placed
        percent = round(100 * arrived / run.capacity_milli)
        if percent <= 100 and not is_placed:
            refused[size_of(pod)] += pod.asked_milli
        if percent in at:
            at[percent].append(100 * used / run.capacity_milli)
    means = {percent: sum(seen) / len(seen) for percent, seen in at.items()}
    return Figures(
        means[100], means[130], {size: 100 * milli / run.capacity_milli for size, milli in refused.items()}
    )


def size_of(pod: Pod) -> str:
    if not pod.gpus:
        return "cpu"
    return "fraction" if pod.milli < WHOLE else str(pod.gpus)


def _rows(name: str) -> list[dict[str, str]]:
    path = folder()
    assert path is not None, WHERE
    packed = path / f"{name}.gz"
    with gzip.open(packed, "rt") if packed.exists() else (path / name).open() as lines:
        return list(csv.DictReader(lines))


def _pod(row: dict[str, str]) -> Pod:
    gpus = int(float(row["num_gpu"]))
    milli = min(WHOLE, max(0, int(float(row["gpu_milli"])))) if gpus else 0
    models = row.get("gpu_spec") or ""
    return Pod(
        int(float(row["cpu_milli"])), int(float(row["memory_mib"])), milli, gpus, models if gpus else ""
    )


def _sample_nodes() -> tuple[Node, ...]:
    return (
        *(Node(96_000, 393_216, 8, "G2") for _ in range(56)),
        *(Node(104_000, 524_288, 2, "T4") for _ in range(40)),
        *(Node(64_000, 262_144, 2, "P100") for _ in range(13)),
        *(Node(32_000, 131_072, 4, "V100M16") for _ in range(6)),
    )


def _sample_pods() -> tuple[Pod, ...]:
    """Made up: whole GPUs are most of the demand, fractions of a few sizes that fill a GPU badly, and some CPU only."""
    rng = np.random.default_rng(1)
    sizes = (810, 470, 650, 320, 230, 140, 460, 550, 100)
    shares = (0.34, 0.24, 0.12, 0.1, 0.06, 0.05, 0.04, 0.03, 0.02)
    pods = []
    for _ in range(950):
        what = rng.random()
        if what < 0.13:
            pods.append(Pod(int(rng.choice([1000, 4000, 8000, 16000])), 8192, 0, 0))
        elif what < 0.5:
            milli = int(rng.choice(sizes, p=shares))
            pods.append(Pod(int(rng.choice([2000, 4000, 8000, 11_900])), 12_288, milli, 1))
        elif what < 0.985:
            pods.append(Pod(int(rng.choice([3000, 8000, 11_900, 16_000])), 32_768, WHOLE, 1))
        else:
            gpus = int(rng.choice([2, 4, 8]))
            pods.append(Pod(8000 * gpus, 32_768 * gpus, WHOLE, gpus))
    return tuple(pods)
