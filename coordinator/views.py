"""How a node's view is derived: from its records and the allocations on it, never from another view's figures.

The short ways derive anew only what a change is about: the GPUs of a job that came or went, the figures of a newer
report. Each gives the view that a whole look would.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from msgspec.structs import replace

from coordinator.gpus import NodeFacts, Piece, Use, pieces
from coordinator.nodes import NodeBuild, NodeStatus, NodeView, Row
from vgpu.inventory import INVENTORY_VERSION, NodeReport
from vgpu.reasons import Reason, ReasonCode
from vgpu.topology import location


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


def view_node(facts: NodeFacts, build: NodeBuild, uses: Sequence[Use], now_ms: int, lost_ms: int) -> NodeView:
    """Order of `uses` does not matter: equal input gives an equal view."""
    ordered = tuple(sorted(uses))
    status, reason = status_of(facts, now_ms, lost_ms)
    labels = facts.inventory.labels if facts.inventory else {}
    if facts.admin is not None and facts.admin.labels:
        labels = {**labels, **facts.admin.labels}
    row = _row(facts, build, ordered, tuple(pieces(facts, ordered, facts.gpus)))
    return NodeView(facts, row, status, reason, labels, location(labels), ordered)


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
    known, left = facts.gpus, [*view.row.pieces]
    places = [place for place, gpu in enumerate(known) if gpu.uuid in touched]
    for place, piece in zip(places, pieces(facts, uses, [known[place] for place in places]), strict=True):
        left[place] = piece
    row = _row(facts, view.row.build, uses, tuple(left))
    return NodeView(facts, row, status, reason, view.labels, view.location, uses)


def with_report(view: NodeView, report: NodeReport | None) -> NodeView:
    """The view with the figures of a newer report, from which nothing else follows."""
    return replace(view, facts=replace(view.facts, report=report))


def _row(facts: NodeFacts, build: NodeBuild, uses: Sequence[Use], left: tuple[Piece, ...]) -> Row:
    cpu_milli, memory_mib = 0, 0
    if facts.inventory is not None:
        cpu_milli, memory_mib = facts.inventory.cpu_milli, facts.inventory.memory_mib
    for use in uses:
        cpu_milli -= use.placement.cpu_milli
        memory_mib -= use.placement.memory_mib
    return Row(build, max(0, cpu_milli), max(0, memory_mib), left)
