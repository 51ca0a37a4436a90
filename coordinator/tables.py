"""Nodes, builds, shapes and prices as rows of whole numbers: what `coordinator.index` keeps and `coordinator.kernels`
reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from coordinator import kernels as k
from coordinator.fit import matches_model, remoteness
from coordinator.nodes import NodeBuild
from coordinator.snapshot import Snapshot, TaskShape
from coordinator.worth import Worth
from vgpu import isolation
from vgpu.inventory import WHOLE_GPU_MILLI, Gpu
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import SliceRequest
from vgpu.topology import NodeTopology

Table = NDArray[np.int64]

# By the numbers that `coordinator.kernels` has for them.
REASONS = (
    ReasonCode.NODE_NOT_READY,
    ReasonCode.NODE_CORDONED,
    ReasonCode.NODE_CLOSED,
    ReasonCode.LABELS_DIFFER,
    ReasonCode.GPU_MODEL_DIFFERS,
    ReasonCode.NOT_ENOUGH_IDLE_GPUS,
    ReasonCode.NOT_ENOUGH_TOTAL_MEMORY,
    ReasonCode.NOT_ENOUGH_DISTINCT_GPUS,
    ReasonCode.NOT_ENOUGH_GPU_MEMORY,
    ReasonCode.NOT_ENOUGH_GPU_COMPUTE,
    ReasonCode.NO_ISOLATION,
    ReasonCode.NOT_ENOUGH_CPU,
    ReasonCode.NOT_ENOUGH_NODE_MEMORY,
    ReasonCode.HELD_FOR_LONG_WAIT,
)
# The isolations that the compiled rules know, one bit each.
BITS = {"exclusive": 1, "mps": 2, "mig": 4, "timeslice": 8}
# By the place of its bit.
ISOLATIONS = tuple(BITS)
NAMES = tuple(tuple(sorted(name for name, bit in BITS.items() if sharing & bit)) for sharing in range(16))
MEMBERS = tuple(tuple(n for n in range(k.GPUS) if mask >> n & 1) for mask in range(256))
# Nodes of one place stand in blocks of so many.
_BLOCK = 64
STATES = {ReasonCode.NODE_NOT_READY: 1, ReasonCode.NODE_CORDONED: 2, ReasonCode.NODE_CLOSED: 3}


def encoded(task: TaskShape, score: tuple[int, ...], place: int) -> int:
    """A score of `coordinator.fit` as the one number that the compiled rules make of it. Of one whole GPU `place` stands
    for what depends on the node alone (`Nodes.whole_ranks`)."""
    is_one = task.gpus.count == 1 and task.gpus.is_whole
    is_none, is_fraction = task.gpus.count == 0, _is_fraction(task)
    has_worth = len(score) == (4 if is_one else 2 if is_none or is_fraction else 3)
    if has_worth and (is_none or is_fraction):
        return score[0] << 1 | score[1]
    if is_none:
        return score[0] << 54 | score[1] << 27 | score[2]
    if is_fraction:
        return score[0] << 44 | score[1] << 32 | score[2] << 26 | score[3]
    first = k.rank_of_whole(place, score[2]) if is_one else score[0] << 6 | score[1]
    rest = score[3 if is_one else 2 :]
    return first << 26 | rest[0] if has_worth else first << 32 | rest[0] << 26 | rest[1]


def _is_fraction(task: TaskShape) -> bool:
    return task.gpus.count == 1 and not task.gpus.is_whole


@lru_cache(maxsize=10_000)
def code_of(gpus: tuple[int, ...], isolations: tuple[str, ...]) -> int:
    """What `kernels.choose` would tell of a task that has these."""
    code = 0
    for gpu, name in zip(gpus, isolations, strict=True):
        code = (code | 1 << 32 + gpu) & ~0xFFFFFFFF | (code & 0x0FFFFFFF) << 4 | ISOLATIONS.index(name)
    return code


class Nodes:
    """The nodes in order of place and name, and what of them changes only with their inventories and labels."""

    def __init__(self, snapshot: Snapshot) -> None:
        views = list(snapshot.nodes.values())
        self.given = [view.name for view in views]
        self.views = sorted(views, key=lambda v: (v.location.zone, v.location.rack, v.name))
        self.names = [view.name for view in self.views]
        self.number = {name: number for number, name in enumerate(self.names)}
        self.places = sorted({v.location for v in views}, key=lambda place: (place.zone, place.rack))
        place_of = {place: number for number, place in enumerate(self.places)}
        self.place = [place_of[view.location] for view in self.views]
        self.remoteness = remoteness(views, snapshot.settings.topology)
        starts, self.block_of = [0], np.zeros(len(views), np.int64)
        for number, place in enumerate(self.place):
            if number and (place != self.place[number - 1] or number - starts[-1] >= _BLOCK):
                starts.append(number)
            self.block_of[number] = len(starts) - 1
        self.block_starts = np.array([*starts, len(views)] if views else [0], np.int64)
        self.block_place = np.array([self.place[start] for start in self.block_starts[:-1]], np.int64)
        by_name = {name: order for order, name in enumerate(sorted(self.names))}
        self.name_order = np.array([by_name[name] for name in self.names], np.int64)
        zones = {place.zone: number for number, place in reversed(list(enumerate(self.places)))}
        tree = [(place, zones[self.places[place].zone]) for place in self.place]
        self.tree = np.array(tree, np.int64).reshape(-1, 2)
        costs = snapshot.settings.topology
        self.tree_costs = np.array([costs.rack, costs.zone, costs.cluster], np.int64)
        # As the rows have them: an own list, since a number of a list is read many times faster.
        self.builds = [-1] * len(views)

    @cached_property
    def levels(self) -> list[Table]:
        """The bounds of the domains of each level of the tree above a node: racks, zones, the cluster."""
        ends = [len(self.views)]
        racks = np.flatnonzero(np.diff(self.tree[:, 0], prepend=-1)).tolist()
        zones = np.flatnonzero(np.diff(self.tree[:, 1], prepend=-1)).tolist()
        return [np.array(starts + ends, np.int64) for starts in (racks, zones, [0])]

    def whole_ranks(self) -> list[int]:
        """Two ranks of each node in one number, the upper one before and the lower one after the bit that tells whether
        one whole GPU would break a group (`kernels.rank_of_whole`): see `coordinator.fit` and `placement.Search`."""
        means = [view.topology.mean_cost_milli for view in self.views]
        worst = _ranks([(0 if mean < 0 else 1, -mean) for mean in means])
        remote = _ranks([(-self.remoteness[view.location],) for view in self.views])
        return [
            upper << k.REMOTE_BITS | min(lower, (1 << k.REMOTE_BITS) - 1)
            for upper, lower in zip(worst, remote, strict=True)
        ]


def _ranks(keys: Sequence[tuple[int, ...]]) -> list[int]:
    ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    return [ranks[key] for key in keys]


def price_tables(worth: Worth | None) -> tuple[Table, Table, Table]:
    """Prices of CPU, values of pieces and of whole GPUs; the five prices of CPU stand side by side."""
    if worth is None:
        return np.zeros(0, np.int64), np.zeros((1, 1, 0), np.int64), np.zeros((1, 0), np.int64)
    values = np.array(worth.values, np.int64).transpose(1, 2, 0)
    whole = np.array(worth.whole, np.int64).transpose()
    return np.array(worth.cpu, np.int64), np.ascontiguousarray(values), np.ascontiguousarray(whole)


def grown(table: Table) -> Table:
    """Twice as long. The other half is not written, so that it takes no memory before it is used."""
    longer = np.empty((2 * len(table), *table.shape[1:]), table.dtype)
    longer[: len(table)] = table
    return longer


@lru_cache(maxsize=1000)
def sharing_of(sharing: tuple[str, ...], is_open: bool) -> int | None:
    """One bit for each isolation; -1 closed; None where one is unknown."""
    if not is_open:
        return -1
    bits = 0
    for name in sharing:
        if name not in BITS:
            return None
        bits |= BITS[name]
    return bits


def is_odd(build: NodeBuild) -> bool:
    kinds = {(gpu.is_mig_instance, gpu.compute_milli, gpu.memory_mib > 0) for gpu in build.gpus}
    return len(build.gpus) > k.GPUS or not kinds <= {(False, WHOLE_GPU_MILLI, True)}


def compat(task: TaskShape, build: NodeBuild) -> int:
    """Which GPUs are of the model that is wanted (8 bits), beside which isolations the task can have a slice (16 bits),
    and which one it would have there (2 bits each)."""
    asked = task.gpus
    size = (asked.memory_mib, asked.compute_milli) if asked.is_whole else (1, 1)
    return _compat(SliceRequest(asked.count, *size, asked.model, asked.isolation), build)


@lru_cache(maxsize=10_000)
def _compat(request: SliceRequest, build: NodeBuild) -> int:
    """The size of a slice decides nothing here."""
    if not build.gpus:
        return 0
    match = sum(1 << n for n, gpu in enumerate(build.gpus) if matches_model(request, gpu))
    kind: Gpu = build.gpus[0]
    for sharing, names in enumerate(NAMES):
        name = isolation.choose(request, kind, build.isolations, names)
        if not isinstance(name, Reason):
            match |= 1 << (8 + sharing) | (BITS[name].bit_length() - 1) << (24 + 2 * sharing)
    return match


class Builds:
    """The builds of nodes and the models of their GPUs by number; a build that the compiled rules do not know is -1.
    They only become more, so that several indexes share them."""

    def __init__(self) -> None:
        self.numbers: dict[NodeBuild, int] = {}
        self.known: list[NodeBuild] = []
        self.models: dict[str, int] = {"": 0}
        self.table = np.zeros((4, k.BUILD_WIDTH), np.int64)

    def number(self, build: NodeBuild) -> int:
        known = self.numbers.get(build)
        if known is None:
            known = self.numbers[build] = -1 if is_odd(build) else len(self.known)
            if known >= 0:
                self._add(build)
        return known

    def _add(self, build: NodeBuild) -> None:
        if len(self.known) == len(self.table):
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
        self.table[len(self.known)] = build_row(build)
        if build.gpus:
            self.models.setdefault(build.gpus[0].model, len(self.models))
        self.known.append(build)


def build_row(build: NodeBuild) -> list[int]:
    """Memory of each GPU, costs of pairs, cost of each set, and which GPUs are as near to a set as its members are
    to each other (`NodeTopology.domain_size`)."""
    topology: NodeTopology = build.topology
    size = len(build.gpus)
    memory = [build.gpus[n].memory_mib if n < size else 0 for n in range(k.GPUS)]
    pairs = [
        topology.pairs[a][b] if a < size and b < size else 0 for a in range(k.GPUS) for b in range(k.GPUS)
    ]
    costs, near = [], []
    for mask in range(256):
        gpus = MEMBERS[mask]
        is_there = bool(gpus) and gpus[-1] < size
        costs.append(topology.set_cost(gpus) if is_there else 0)
        around = topology.around(gpus, range(size)) if is_there and len(gpus) > 1 else ()
        near.append(sum(1 << gpu for gpu in around))
    row = [*memory, *pairs, *costs, *near, int(topology.is_flat)]
    return row + [0] * (k.BUILD_WIDTH - len(row))
