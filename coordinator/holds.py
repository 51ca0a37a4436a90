"""Which nodes are kept free for a job that has waited beyond the bounded wait.

One set of nodes that it could run on once they are empty: those that free soonest by their jobs' time limits, then
the least busy. Chosen anew in each cycle, so a hold ends with its job. It moves rarely: what is held only gets less
busy, since nobody else is placed there.
"""

from __future__ import annotations

from coordinator.fit import Fit
from coordinator.gangs import NO_LIMIT, place
from coordinator.nodes import NodeView
from coordinator.placement import Draft
from coordinator.snapshot import Shape, Snapshot

# A job without a time limit may end at any time or never; it counts as one that runs for a year.
_UNLIMITED_MS = 365 * 24 * 3600 * 1000


def nodes_to_hold(draft: Draft, shape: Shape) -> tuple[str, ...]:
    """Node names; empty where the nodes that are up could not take the job even when empty."""
    usable = [
        name
        for name in draft.views
        if draft.gate(name, shape.constraints) is None and _could_take(draft, draft.views[name], shape)
    ]
    usable.sort(key=lambda name: (*_free_again(draft.views[name], draft.snapshot), name))
    if shape.task_count == 1:
        return tuple(usable[:1])
    rows = {name: draft.row(name) for name in draft.views}
    size = 1
    while usable:
        rows |= {name: draft.views[name].full_row for name in usable[:size]}
        spots = place(Draft(draft.snapshot, rows), shape, NO_LIMIT)
        if spots is not None:
            return tuple(sorted({spot.node for spot in spots}))
        if size >= len(usable):
            return ()
        size *= 2
    return ()


def _could_take(draft: Draft, view: NodeView, shape: Shape) -> bool:
    row = view.full_row
    return any(isinstance(draft.fit(task, row), Fit) for task in shape.tasks)


def _free_again(view: NodeView, snapshot: Snapshot) -> tuple[int, int]:
    """(when the last of its jobs ends at the latest, compute in use)."""
    ends = [0]
    for use in view.uses:
        limit_seconds = use.job.spec.max_runtime_seconds
        since_ms = use.job.allocation.allocated_at_ms if use.job.allocation else snapshot.now_ms
        ends.append(since_ms + (_UNLIMITED_MS if limit_seconds is None else 1000 * limit_seconds))
    busy_milli = sum(piece.compute_milli for use in view.uses for piece in use.placement.slices)
    return max(ends), busy_milli
