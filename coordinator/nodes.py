"""What one node can still give: its inventory and report seen through the slices that live jobs hold on it.

Owns the rule of what is free. Nothing here is stored: a view is derived anew from the node's records and the
allocations on it whenever one of them changes, so that use can neither leak nor drift. What cannot be known to be
free is not offered: a GPU with a process of an attempt that no live job accounts for, one that two nodes claim, one
with a fault.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from attrs import evolve, field, frozen

from coordinator.model import Job, NodeAdmin, TaskPlacement
from vgpu.inventory import INVENTORY_VERSION, Gpu, GpuReport, NodeInventory, NodeReport
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import Slice
from vgpu.topology import Location, NodeTopology, TopologyCosts, location, node_topology

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


@frozen
class Use:
    """One task of a live job on a node."""

    job: Job
    placement: TaskPlacement

    @property
    def attempt_key(self) -> str:
        return f"{self.job.id}.{self.job.attempt}.{self.placement.task}"


@frozen
class Holding:
    """A slice and who holds it."""

    job: str
    tenant: str
    attempt: int
    task: int
    piece: Slice


@frozen
class GpuView:
    """One GPU with what is on it. Free figures are 0 and never negative; `closed` says why nothing may be placed.
    `foreign_memory_mib` is used by processes that are none of ours."""

    gpu: Gpu
    memory_free_mib: int
    compute_free_milli: int
    holdings: tuple[Holding, ...] = ()
    foreign_memory_mib: int = 0
    closed: Reason | None = None
    report: GpuReport | None = None

    @property
    def is_idle(self) -> bool:
        """Open, with nobody on it: a whole-card job may have it."""
        return self.closed is None and not self.holdings and self.foreign_memory_mib == 0


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


@frozen
class NodeFacts:
    """The records of a node as they were last seen, and what the cluster knows about it beside them."""

    name: str
    inventory: NodeInventory | None = None
    report: NodeReport | None = None
    admin: NodeAdmin | None = None
    build: NodeBuild = field(factory=NodeBuild)
    missing_since_ms: int | None = None
    unreadable: tuple[str, ...] = ()
    claimed_twice: frozenset[str] = frozenset()
    released: Mapping[str, int] = field(factory=dict)


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
        """The node as it would be with nobody on it and everything on it well."""
        build = self.row.build
        pieces = tuple(
            Piece(0, 0, (), False) if gpu.unavailable else Piece(gpu.memory_mib, gpu.compute_milli)
            for gpu in build.gpus
        )
        return Row(build, build.cpu_milli, build.memory_mib, pieces)

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


def status_of(facts: NodeFacts, now_ms: int, lost_ms: int) -> tuple[NodeStatus, Reason | None]:
    """Silence comes before anything else: what a silent node would accept does not matter.

    Only the time since this coordinator first missed the report counts (LE-1, LE-3), never the node's clock."""
    if facts.report is None:
        silent_ms = max(0, now_ms - (now_ms if facts.missing_since_ms is None else facts.missing_since_ms))
        reason = Reason(ReasonCode.NODE_NOT_READY, {"silent_seconds": silent_ms // 1000}, (facts.name,))
        return (NodeStatus.LOST if silent_ms >= lost_ms else NodeStatus.UNKNOWN), reason
    if facts.unreadable:
        return NodeStatus.CLOSED, Reason(ReasonCode.ALLOCATION_UNREADABLE, subjects=facts.unreadable)
    if facts.inventory is None:
        return NodeStatus.CLOSED, Reason(
            ReasonCode.NODE_NOT_READY, subjects=(facts.name,), detail="no inventory"
        )
    if (version := facts.inventory.version) > INVENTORY_VERSION:  # its fields may mean something else (UP-1)
        detail = f"incompatible: agent {facts.inventory.agent_version} writes records of version {version}, this coordinator knows {INVENTORY_VERSION}; update the coordinator"
        return NodeStatus.CLOSED, Reason(ReasonCode.NODE_CLOSED, subjects=(facts.name,), detail=detail)
    if facts.report.closed:
        # Its agent says that it can start nothing, as while its Docker Engine is down.
        return NodeStatus.CLOSED, Reason(
            ReasonCode.NODE_CLOSED, subjects=(facts.name,), detail=facts.report.closed
        )
    return NodeStatus.READY, None


def view_node(facts: NodeFacts, uses: Sequence[Use], now_ms: int, lost_ms: int) -> NodeView:
    """Order of `uses` does not matter: equal input gives an equal view."""
    ordered = tuple(sorted(uses, key=lambda use: (use.job.id, use.job.attempt, use.placement.task)))
    status, reason = status_of(facts, now_ms, lost_ms)
    inventory = facts.inventory
    labels = dict(inventory.labels) if inventory else {}
    if facts.admin is not None:
        labels.update(facts.admin.labels)
    gpus = _gpu_views(facts, ordered)
    cpu_milli = inventory.cpu_milli if inventory else 0
    memory_mib = inventory.memory_mib if inventory else 0
    row = Row(
        facts.build,
        max(0, cpu_milli - sum(use.placement.cpu_milli for use in ordered)),
        max(0, memory_mib - sum(use.placement.memory_mib for use in ordered)),
        tuple(_piece(view) for view in gpus),
    )
    return NodeView(
        name=facts.name,
        inventory=inventory,
        report=facts.report,
        admin=facts.admin,
        row=row,
        status=status,
        status_reason=reason,
        missing_since_ms=facts.missing_since_ms,
        labels=labels,
        location=location(labels),
        gpus=gpus,
        cpu_free_milli=row.cpu_milli,
        memory_free_mib=row.memory_mib,
        uses=ordered,
    )


def with_report(view: NodeView, report: NodeReport | None) -> NodeView:
    """The view with the figures of a newer report, from which nothing else follows."""
    reports = {gpu.uuid: gpu for gpu in report.gpus} if report else {}
    gpus = tuple(evolve(gpu, report=reports.get(gpu.gpu.uuid)) for gpu in view.gpus) if reports else view.gpus
    return evolve(view, report=report, gpus=gpus)


def _gpu_views(facts: NodeFacts, uses: Sequence[Use]) -> tuple[GpuView, ...]:
    if facts.inventory is None:
        return ()
    holdings: dict[str, list[Holding]] = {}
    for use in uses:
        for piece in use.placement.slices:
            holding = Holding(use.job.id, use.job.tenant, use.job.attempt, use.placement.task, piece)
            holdings.setdefault(piece.gpu, []).append(holding)
    reports = {report.uuid: report for report in facts.report.gpus} if facts.report else {}
    held = _held_elsewhere(facts, uses)
    return tuple(
        _gpu_view(gpu, tuple(holdings.get(gpu.uuid, ())), reports, held, facts.claimed_twice)
        for gpu in facts.inventory.gpus
    )


def _piece(view: GpuView) -> Piece:
    sharing = tuple(sorted({holding.piece.isolation for holding in view.holdings})) if view.holdings else ()
    return Piece(view.memory_free_mib, view.compute_free_milli, sharing, view.closed is None)


def _gpu_view(
    gpu: Gpu,
    holdings: tuple[Holding, ...],
    reports: Mapping[str, GpuReport],
    held: Mapping[str, tuple[str, ...]],
    claimed_twice: frozenset[str],
) -> GpuView:
    report = reports.get(gpu.uuid)
    foreign_mib, is_unknown = _foreign(report, bool(holdings) or gpu.uuid in held)
    closed = _why_closed(gpu, reports, held, claimed_twice)
    if closed is None and is_unknown:
        closed = Reason(ReasonCode.GPU_OCCUPIED, subjects=(gpu.uuid,), detail="a process of unknown size")
    used_mib, used_milli = foreign_mib, 0
    for holding in holdings:
        used_mib += holding.piece.memory_mib
        used_milli += holding.piece.compute_milli
    return GpuView(
        gpu=gpu,
        memory_free_mib=0 if closed else max(0, gpu.memory_mib - used_mib),
        compute_free_milli=0 if closed else max(0, gpu.compute_milli - used_milli),
        holdings=holdings,
        foreign_memory_mib=foreign_mib,
        closed=closed,
        report=report,
    )


def _why_closed(
    gpu: Gpu,
    reports: Mapping[str, GpuReport],
    held: Mapping[str, tuple[str, ...]],
    claimed_twice: frozenset[str],
) -> Reason | None:
    if gpu.unavailable:
        return Reason(ReasonCode.GPU_UNHEALTHY, subjects=(gpu.uuid,), detail=gpu.unavailable)
    if gpu.uuid in claimed_twice:
        return Reason(ReasonCode.GPU_CLAIMED_TWICE, subjects=(gpu.uuid,))
    # A fault of a card is one of each MIG instance on it.
    for uuid in {gpu.uuid, gpu.card} if reports else ():
        if uuid in reports and reports[uuid].fault:
            return Reason(ReasonCode.GPU_UNHEALTHY, subjects=(gpu.uuid,), detail=reports[uuid].fault)
    if gpu.uuid in held:
        return Reason(ReasonCode.GPU_OCCUPIED, subjects=(gpu.uuid, *held[gpu.uuid]))
    return None


def _held_elsewhere(facts: NodeFacts, uses: Sequence[Use]) -> dict[str, tuple[str, ...]]:
    """GPU -> attempts that exist on it by the node's account, as a container or as a process, though no live job holds
    it for them (DA-9).

    A report that is older than the confirmed end of an attempt says nothing about it any more, so that slices are
    free at once and not only after the next report (LK-10)."""
    if facts.report is None:
        return {}
    granted = {(use.attempt_key, piece.gpu) for use in uses for piece in use.placement.slices}
    held: dict[str, list[str]] = {}
    for attempt_key, uuid in _present(facts.report):
        is_stale = facts.released.get(attempt_key, -1) >= facts.report.at_ms
        if not is_stale and (attempt_key, uuid) not in granted:
            held.setdefault(uuid, []).append(attempt_key)
    return {uuid: tuple(sorted(set(keys))) for uuid, keys in held.items()}


def _present(report: NodeReport) -> Iterator[tuple[str, str]]:
    """(attempt, GPU) of everything of ours that the node saw."""
    for attempt_key, uuids in report.held.items():
        yield from ((attempt_key, uuid) for uuid in uuids)
    for gpu in report.gpus:
        yield from ((process.attempt, gpu.uuid) for process in gpu.processes or () if process.attempt)


def _foreign(report: GpuReport | None, is_ours: bool) -> tuple[int, bool]:
    """(memory used by processes that are none of ours, whether there is one of unknown size)."""
    if report is None:
        return 0, False
    if report.processes is None:
        # Without a list of processes, use of a GPU where we have nobody must be somebody else's.
        used_mib = report.memory_used_mib or 0
        return (used_mib if not is_ours and used_mib > DRIVER_CONTEXT_MIB else 0), False
    foreign = [process for process in report.processes if not process.attempt]
    known = sum(process.memory_mib for process in foreign if process.memory_mib is not None)
    return known, any(process.memory_mib is None for process in foreign)
