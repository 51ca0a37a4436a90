"""What one node can still give: its inventory and report seen through the slices that live jobs hold on it.

Nothing here is stored: a view is derived (`coordinator.views`) from the node's records and the allocations on it
whenever one of them changes, so that use can neither leak nor drift. What cannot be known to be free is not offered:
a GPU with a process of an attempt that no live job accounts for, one that two nodes claim, one with a fault.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from attrs import field, frozen
from msgspec import Struct
from msgspec.structs import replace

from coordinator.gpus import GpuView, NodeFacts, Piece, Use, gpu_views
from coordinator.model import NodeAdmin
from coordinator.shared import Changes
from vgpu.inventory import Gpu, NodeInventory, NodeReport
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import Slice
from vgpu.topology import Location, NodeTopology, TopologyCosts, node_topology

# Labels of a node that must be equal.
Constraints = tuple[tuple[str, str], ...]
# Stands for a label in a constraint: any node but the named one. No user can name it, since it is not printable.
OTHER_THAN = "\0other-than"


class NodeStatus(enum.Enum):
    """UNKNOWN: has not reported in time, its jobs keep their slices. LOST: for so long that they are given up.
    CLOSED: reports, but may not get new work."""

    READY = "ready"
    UNKNOWN = "unknown"
    LOST = "lost"
    CLOSED = "closed"


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


class NodeView(Struct, frozen=True, eq=False, dict=True):
    """A node in a snapshot. `uses` are the tasks of live jobs there, `occupied` those that may still be on a GPU though no
    live job holds it for them, beside what its own report says."""

    facts: NodeFacts
    row: Row
    status: NodeStatus
    status_reason: Reason | None
    labels: Mapping[str, str]
    location: Location
    uses: tuple[Use, ...]
    occupied: Mapping[str, Sequence[str]] = {}

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def inventory(self) -> NodeInventory | None:
        return self.facts.inventory

    @property
    def report(self) -> NodeReport | None:
        return self.facts.report

    @property
    def admin(self) -> NodeAdmin | None:
        return self.facts.admin

    @property
    def cpu_free_milli(self) -> int:
        return self.row.cpu_milli

    @property
    def memory_free_mib(self) -> int:
        return self.row.memory_mib

    @property
    def slices(self) -> list[Slice]:
        """What live jobs hold of the GPUs that it has."""
        have = {gpu.uuid for gpu in self.facts.gpus}
        return [piece for use in self.uses for piece in use.placement.slices if piece.gpu in have]

    @cached_property
    def gpus(self) -> tuple[GpuView, ...]:
        views = gpu_views(self.facts, self.uses)
        return tuple([_occupied(view, self.occupied) for view in views]) if self.occupied else views

    @cached_property
    def kept(self) -> dict[object, Any]:
        """For whoever derives more from the view than stands in it: each under a key of its own."""
        return {}

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
        return sum(gpu.memory_mib for gpu in self.facts.gpus if not gpu.unavailable)

    @property
    def gpu_compute_milli(self) -> int:
        return sum(gpu.compute_milli for gpu in self.facts.gpus if not gpu.unavailable)


def with_occupied(view: NodeView, tasks: Mapping[str, Sequence[str]]) -> NodeView:
    """The view with these GPUs closed, each for tasks that may still use it though no live job holds it for them."""
    pieces = tuple(
        Piece(0, 0, piece.sharing, False) if tasks.get(gpu.uuid) else piece
        for gpu, piece in zip(view.facts.gpus, view.row.pieces, strict=True)
    )
    return replace(view, occupied=tasks, row=view.row._replace(pieces=pieces))


def _occupied(gpu: GpuView, tasks: Mapping[str, Sequence[str]]) -> GpuView:
    found = tasks.get(gpu.gpu.uuid)
    if not found or gpu.closed is not None:
        return gpu
    reason = Reason(ReasonCode.GPU_OCCUPIED, subjects=(gpu.gpu.uuid, *found))
    return replace(gpu, memory_free_mib=0, compute_free_milli=0, closed=reason)


@frozen(eq=False)
class ViewLog:
    """The views of all nodes, and the names of those that have come, changed or gone."""

    views: Mapping[str, NodeView]
    changes: Changes[str]

    def since(self, earlier: ViewLog) -> Collection[str] | None:
        """Each of them once. None: so much that nobody knows."""
        names = self.changes.since(earlier.changes)
        return None if names is None else dict.fromkeys(names).keys()
