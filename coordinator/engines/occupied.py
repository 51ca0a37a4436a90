"""What an engine may still run for attempts that are over, taken from what is offered. Pure."""

from __future__ import annotations

from types import MappingProxyType

from attrs import evolve

from coordinator.engines import Occupied
from coordinator.nodes import NodeStatus, with_occupied
from coordinator.snapshot import Snapshot


def is_in_question(snapshot: Snapshot, occupied: Occupied) -> bool:
    """Whether a node that gets new work has such GPUs."""
    return any(
        view.status is NodeStatus.READY for name in occupied if (view := snapshot.nodes.get(name)) is not None
    )


def without_occupied(snapshot: Snapshot, occupied: Occupied) -> Snapshot:
    """The snapshot in which those GPUs are closed. Its nodes are no longer those of `node_log`, so whoever keeps answers
    from cycle to cycle looks at all of them."""
    if not is_in_question(snapshot, occupied):
        return snapshot
    nodes = dict(snapshot.nodes)
    for name, tasks in occupied.items():
        if name in nodes:
            nodes[name] = with_occupied(nodes[name], tasks)
    return evolve(snapshot, nodes=MappingProxyType(nodes))
