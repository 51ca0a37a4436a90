"""How a node's view is derived: from its records and the allocations on it, never from another view's figures.

The short ways derive anew only what a change is about: the GPUs of a job that came or went, the figures of a newer
report. Each gives the view that a whole look would.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import lru_cache

from attrs import evolve, field, frozen

from coordinator.model import NodeAdmin
from coordinator.nodes import (
    DRIVER_CONTEXT_MIB,
    GpuView,
    NodeBuild,
    NodeStatus,
    NodeView,
    Piece,
    Row,
    Use,
)
from vgpu.inventory import INVENTORY_VERSION, Gpu, GpuReport, NodeInventory, NodeReport
from vgpu.reasons import Reason, ReasonCode
from vgpu.topology import location


@frozen
class NodeFacts:
    """The records of a node as they were last seen, and what the cluster knows about it beside them. `silent_together`:
    so many nodes fell silent with it that it is not given up (`coordinator.silence`); 0 for a node of its own."""

    name: str
    inventory: NodeInventory | None = None
    report: NodeReport | None = None
    admin: NodeAdmin | None = None
    build: NodeBuild = field(factory=NodeBuild)
    missing_since_ms: int | None = None
    unreadable: tuple[str, ...] = ()
    claimed_twice: frozenset[str] = frozenset()
    released: Mapping[str, int] = field(factory=dict)
    silent_together: int = 0


def status_of(facts: NodeFacts, now_ms: int, lost_ms: int) -> tuple[NodeStatus, Reason | None]:
    """Silence comes before anything else: what a silent node would accept does not matter.

    Only the time since this coordinator first missed the report counts (LE-1, LE-3), never the node's clock."""
    if facts.report is None:
        silent_ms = max(0, now_ms - (now_ms if facts.missing_since_ms is None else facts.missing_since_ms))
        numbers = {"silent_seconds": silent_ms // 1000}
        if facts.silent_together:
            numbers["silent_nodes"] = facts.silent_together
        reason = Reason(ReasonCode.NODE_NOT_READY, numbers, (facts.name,))
        if facts.silent_together:
            return NodeStatus.UNKNOWN, reason
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
    ordered = tuple(sorted(uses))
    status, reason = status_of(facts, now_ms, lost_ms)
    inventory = facts.inventory
    labels = inventory.labels if inventory else {}
    if facts.admin is not None and facts.admin.labels:
        labels = {**labels, **facts.admin.labels}
    gpus = tuple(_gpu_views(facts, ordered, inventory.gpus if inventory else ()))
    row = _row(facts, ordered, tuple([_piece(view) for view in gpus]))
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


def with_uses(
    view: NodeView,
    facts: NodeFacts,
    uses: tuple[Use, ...],
    touched: Container[str],
    now_ms: int,
    lost_ms: int,
) -> NodeView:
    """The view of a node of which only the jobs changed, those that have or had slices of the GPUs `touched`, and the
    time. `uses` are all of them, in their order."""
    status, reason = status_of(facts, now_ms, lost_ms)
    known = facts.inventory.gpus if facts.inventory else ()
    places = [place for place, gpu in enumerate(known) if gpu.uuid in touched]
    gpus, pieces = list(view.gpus), list(view.row.pieces)
    fresh = _gpu_views(facts, uses, [known[place] for place in places])
    for place, gpu in zip(places, fresh, strict=True):
        gpus[place] = gpu
        pieces[place] = _piece(gpu)
    row = _row(facts, uses, tuple(pieces))
    return NodeView(
        view.name,
        view.inventory,
        view.report,
        view.admin,
        row,
        status,
        reason,
        view.missing_since_ms,
        view.labels,
        view.location,
        tuple(gpus),
        row.cpu_milli,
        row.memory_mib,
        uses,
    )


def with_report(view: NodeView, report: NodeReport | None) -> NodeView:
    """The view with the figures of a newer report, from which nothing else follows."""
    reports = {gpu.uuid: gpu for gpu in report.gpus} if report else {}
    gpus = tuple([_reported(gpu, reports.get(gpu.gpu.uuid)) for gpu in view.gpus]) if reports else view.gpus
    return evolve(view, report=report, gpus=gpus)


def _reported(view: GpuView, report: GpuReport | None) -> GpuView:
    return GpuView(
        view.gpu,
        view.memory_free_mib,
        view.compute_free_milli,
        view.uses,
        view.foreign_memory_mib,
        view.closed,
        report,
    )


def _row(facts: NodeFacts, uses: Sequence[Use], pieces: tuple[Piece, ...]) -> Row:
    cpu_milli, memory_mib = 0, 0
    if facts.inventory is not None:
        cpu_milli, memory_mib = facts.inventory.cpu_milli, facts.inventory.memory_mib
    cpu_milli -= sum([use.placement.cpu_milli for use in uses])
    memory_mib -= sum([use.placement.memory_mib for use in uses])
    return Row(facts.build, max(0, cpu_milli), max(0, memory_mib), pieces)


def _gpu_views(facts: NodeFacts, uses: Sequence[Use], gpus: Sequence[Gpu]) -> list[GpuView]:
    """Of these GPUs of the node."""
    on: dict[str, list[Use]] = {gpu.uuid: [] for gpu in gpus}
    for use in uses:
        for piece in use.placement.slices:
            there = on.get(piece.gpu)
            if there is not None and (not there or there[-1] is not use):
                there.append(use)
    reports = {report.uuid: report for report in facts.report.gpus} if facts.report else {}
    held = _held_elsewhere(facts, on)
    return [_gpu_view(gpu, tuple(on[gpu.uuid]), reports, held, facts.claimed_twice) for gpu in gpus]


def _piece(view: GpuView) -> Piece:
    sharing: tuple[str, ...] = ()
    if view.uses:
        slices = [piece for use in view.uses for piece in use.placement.slices]
        sharing = _sharing(frozenset([piece.isolation for piece in slices if piece.gpu == view.gpu.uuid]))
    return _same_piece(view.memory_free_mib, view.compute_free_milli, sharing, view.closed is None)


# Of GPUs with as much left one object: a large cluster has ten times more of them than there are kinds of rest.
_same_piece = lru_cache(maxsize=1 << 14)(Piece)


@lru_cache(maxsize=1 << 10)
def _sharing(isolations: frozenset[str]) -> tuple[str, ...]:
    """The same tuple for all GPUs that are shared alike."""
    return tuple(sorted(isolations))


def _gpu_view(
    gpu: Gpu,
    uses: tuple[Use, ...],
    reports: Mapping[str, GpuReport],
    held: Mapping[str, tuple[str, ...]],
    claimed_twice: frozenset[str],
) -> GpuView:
    report = reports.get(gpu.uuid)
    foreign_mib, is_unknown = _foreign(report, bool(uses) or gpu.uuid in held)
    closed = _why_closed(gpu, reports, held, claimed_twice)
    if closed is None and is_unknown:
        closed = Reason(ReasonCode.GPU_OCCUPIED, subjects=(gpu.uuid,), detail="a process of unknown size")
    used_mib, used_milli = foreign_mib, 0
    for use in uses:
        for piece in use.placement.slices:
            if piece.gpu == gpu.uuid:
                used_mib += piece.memory_mib
                used_milli += piece.compute_milli
    return GpuView(
        gpu=gpu,
        memory_free_mib=0 if closed else _left(gpu.memory_mib, used_mib),
        compute_free_milli=0 if closed else _left(gpu.compute_milli, used_milli),
        uses=uses,
        foreign_memory_mib=foreign_mib,
        closed=closed,
        report=report,
    )


def _left(whole: int, used: int) -> int:
    """The very number of the whole where nothing is used: most of a large cluster's memory would be copies of it."""
    return max(0, whole - used) if used else whole


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


def _held_elsewhere(facts: NodeFacts, on: Mapping[str, Sequence[Use]]) -> dict[str, tuple[str, ...]]:
    """GPU -> attempts that exist on it by the node's account, as a container or as a process, though no live job holds
    it for them (DA-9). Of the GPUs in `on`, with what is held of each.

    A report that is older than the confirmed end of an attempt says nothing about it any more, so that slices are
    free at once and not only after the next report (LK-10)."""
    if facts.report is None:
        return {}
    held: dict[str, set[str]] = {}
    granted: dict[str, set[str]] = {}
    for attempt_key, uuid in _present(facts.report):
        if uuid not in on or facts.released.get(attempt_key, -1) >= facts.report.at_ms:
            continue
        if uuid not in granted:
            granted[uuid] = {use.attempt_key for use in on[uuid]}
        if attempt_key not in granted[uuid]:
            held.setdefault(uuid, set()).add(attempt_key)
    return {uuid: tuple(sorted(keys)) for uuid, keys in held.items()}


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
