"""Serai's own placement in the openb experiment: inventories and specs in, `gangs.place` on a draft with the index,
prices made by `Pricing` as `coordinator.market` does it."""

from __future__ import annotations

from collections import Counter

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from coordinator import gangs
from coordinator.cluster import Cluster
from coordinator.config import Settings
from coordinator.index import Index
from coordinator.model import InventorySeen, ReportSeen
from coordinator.placement import Draft
from coordinator.prices import Pricing
from coordinator.snapshot import Shape, TaskShape
from coordinator.worth import Kind, kind_of
from tests.benchmarks import openb
from tests.benchmarks.openb import CARD_MIB, Node, Pod, Run
from vgpu.inventory import Gpu, NodeInventory, NodeReport
from vgpu.slices import SliceRequest


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
            request = SliceRequest(pod.gpus, pod.gpu_mib, pod.milli, self._tag(pod))
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


@frozen
class Left:
    """What is left of the nodes at the end: CPU, and compute of each GPU."""

    cpu: NDArray[np.int64]
    gpus: NDArray[np.int64]


def placed_by_serai(run: Run, is_learned: bool, every: int = 50) -> tuple[list[bool], Left]:
    """(whether each pod was placed, what is left). `is_learned`: it counts what has arrived; else it knows the mix."""
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
    return placed, Left(cpu, gpus)
