"""What one node can still give: its inventory and report seen through the slices that live jobs hold on it.

Nothing here is stored: a view is derived (`coordinator.views`) from the node's records and the allocations on it
whenever one of them changes, so that use can neither leak nor drift. What cannot be known to be free is not offered:
a GPU with a process of an attempt that no live job accounts for, one that two nodes claim, one with a fault.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from attrs import evolve, field, frozen
from msgspec import Struct
from msgspec.structs import replace

from coordinator.model import Job, NodeAdmin, TaskPlacement
from vgpu.inventory import Gpu, GpuReport, NodeInventory, NodeReport
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import Slice
from vgpu.topology import Location, NodeTopology, TopologyCosts, node_topology

# Labels of a node that must be equal.
Constraints = tuple[tuple[str, str], ...]
# Stands for a label in a constraint: any node but the named one. No user can name it, since it is not printable.
OTHER_THAN = "\0other-than"

# What a driver and its persistence daemon keep on an idle GPU whose processes cannot be listed.
DRIVER_CONTEXT_MIB = 512


class NodeStatus(enum.Enum):
    """UNKNOWN: has not reported in time, its jobs keep their slices. LOST: for so long that they are given up.
    CLOSED: reports, but may not get new work."""

    READY = "ready"
    UNKNOWN = "unknown"
    LOST = "lost"
    CLOSED = "closed"


class Use(Struct, frozen=True, order=True, gc=False):
    """One task of a live job on a node, the `number`th of its allocation. Uses are in the order of their first fields,
    which stand here too, since to look them up in the job costs a node of many jobs more than everything else."""

    id: str
    task: int
    number: int
    job: Job
    placement: TaskPlacement

    @property
    def attempt_key(self) -> str:
        return f"{self.id}.{self.job.attempt}.{self.task}"


class GpuView(Struct, frozen=True, gc=False):
    """One GPU with what is on it. Free figures are 0 and never negative; `closed` says why nothing may be placed.
    `uses` are the tasks with a slice of it; `foreign_memory_mib` is used by processes that are none of ours."""

    gpu: Gpu
    memory_free_mib: int
    compute_free_milli: int
    uses: tuple[Use, ...] = ()
    foreign_memory_mib: int = 0
    closed: Reason | None = None
    report: GpuReport | None = None

    @property
    def is_idle(self) -> bool:
        """Open, with nobody on it: a whole-card job may have it."""
        return self.closed is None and not self.uses and self.foreign_memory_mib == 0

    @property
    def slices(self) -> list[tuple[Use, Slice]]:
        """Who holds what of it."""
        return [
            (use, piece) for use in self.uses for piece in use.placement.slices if piece.gpu == self.gpu.uuid
        ]


@frozen(cache_hash=True)
class NodeBuild:
    """What a node is made of, less what tells it from its twins (names, UUIDs): nodes of one build and with the same
    left over are alike to placement. `gpus` are kinds, with everything of the single card taken out."""

    gpus: tuple[Gpu, ...] = ()
    topology: NodeTopology = field(default=NodeTopology(()))
    isolations: tuple[str, ...] = ()
    cpu_milli: int = 0
    memory_mib: int = 0


def build_of(inventory: NodeInventory, costs: TopologyCosts) -> NodeBuild:
    kinds = tuple(
        Gpu(
            uuid="",
            index=0,
            model=gpu.model,
            memory_mib=gpu.memory_mib,
            memory_total_mib=gpu.memory_total_mib,
            device_paths=(),
            compute_milli=gpu.compute_milli,
            parent="card" if gpu.parent else "",
            mig_profile=gpu.mig_profile,
            unavailable=gpu.unavailable,
        )
        for gpu in inventory.gpus
    )
    topology = node_topology(inventory, costs)
    return NodeBuild(kinds, topology, inventory.isolations, inventory.cpu_milli, inventory.memory_mib)


class Piece(NamedTuple):
    """What is left of one GPU, and the isolations of the slices that are on it. Nothing is left of a closed one."""

    memory_mib: int
    compute_milli: int
    sharing: tuple[str, ...] = ()
    is_open: bool = True


class Row(NamedTuple):
    """What is left of one node; equal rows are alike to placement."""

    build: NodeBuild
    cpu_milli: int
    memory_mib: int
    pieces: tuple[Piece, ...]

    def is_idle(self, gpu: int) -> bool:
        kind, piece = self.build.gpus[gpu], self.pieces[gpu]
        return (
            piece.is_open
            and not piece.sharing
            and piece.memory_mib == kind.memory_mib
            and piece.compute_milli == kind.compute_milli
        )

    @property
    def idle_gpus(self) -> int:
        return sum(1 for gpu in range(len(self.pieces)) if self.is_idle(gpu))

    @property
    def gpu_memory_mib(self) -> int:
        return sum(piece.memory_mib for piece in self.pieces)


def full_row(build: NodeBuild) -> Row:
    """A node as it would be with nobody on it and everything on it well."""
    pieces = tuple(
        Piece(0, 0, (), False) if gpu.unavailable else Piece(gpu.memory_mib, gpu.compute_milli)
        for gpu in build.gpus
    )
    return Row(build, build.cpu_milli, build.memory_mib, pieces)


@frozen(eq=False)
class NodeView:
    """A node in a snapshot. `missing_since_ms`: when this coordinator first saw no report of it."""

    name: str
    inventory: NodeInventory | None
    report: NodeReport | None
    admin: NodeAdmin | None
    row: Row
    status: NodeStatus
    status_reason: Reason | None
    missing_since_ms: int | None
    labels: Mapping[str, str]
    location: Location
    gpus: tuple[GpuView, ...]
    cpu_free_milli: int
    memory_free_mib: int
    uses: tuple[Use, ...]

    @property
    def topology(self) -> NodeTopology:
        return self.row.build.topology

    @cached_property
    def full_row(self) -> Row:
        return full_row(self.row.build)

    @property
    def closed_to_work(self) -> ReasonCode | None:
        """Why it gets no new work whatever is free on it; None for a node that is well."""
        if self.status is NodeStatus.CLOSED:
            return ReasonCode.NODE_CLOSED
        if self.status is not NodeStatus.READY:
            return ReasonCode.NODE_NOT_READY
        return ReasonCode.NODE_CORDONED if self.is_cordoned else None

    def has_labels(self, constraints: Constraints) -> bool:
        return all(
            self.name != value if label == OTHER_THAN else self.labels.get(label) == value
            for label, value in constraints
        )

    @property
    def is_cordoned(self) -> bool:
        return self.admin is not None and self.admin.cordoned

    @property
    def cpu_milli(self) -> int:
        return self.inventory.cpu_milli if self.inventory else 0

    @property
    def memory_mib(self) -> int:
        return self.inventory.memory_mib if self.inventory else 0

    @property
    def gpu_memory_mib(self) -> int:
        """All the GPU memory that the node could ever give out."""
        return sum(view.gpu.memory_mib for view in self.gpus if not view.gpu.unavailable)

    @property
    def gpu_compute_milli(self) -> int:
        return sum(view.gpu.compute_milli for view in self.gpus if not view.gpu.unavailable)


def with_occupied(view: NodeView, tasks: Mapping[str, Sequence[str]]) -> NodeView:
    """The view with these GPUs closed, each for tasks that may still use it though no live job holds it for them."""
    gpus, pieces = list(view.gpus), list(view.row.pieces)
    for place, gpu in enumerate(view.gpus):
        found = tasks.get(gpu.gpu.uuid)
        if found and gpu.closed is None:
            reason = Reason(ReasonCode.GPU_OCCUPIED, subjects=(gpu.gpu.uuid, *found))
            gpus[place] = replace(gpu, memory_free_mib=0, compute_free_milli=0, closed=reason)
            pieces[place] = Piece(0, 0, pieces[place].sharing, False)
    return evolve(view, gpus=tuple(gpus), row=view.row._replace(pieces=tuple(pieces)))


@frozen(eq=False)
class ViewLog:
    """The views of all nodes, and which of them changed: the first `length` of `names`, a list that later logs share and
    that only grows."""

    views: Mapping[str, NodeView]
    names: Sequence[str]
    length: int

    def since(self, earlier: ViewLog) -> Collection[str] | None:
        """The nodes that have come, changed or gone between that one and this. None: so much that nobody knows."""
        if earlier.names is not self.names or earlier.length > self.length:
            return None
        return dict.fromkeys(self.names[earlier.length : self.length]).keys()
