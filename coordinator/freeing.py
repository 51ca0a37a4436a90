"""Who holds what of the nodes and until when, and what is left of a node as that ends, one holder after the other.

A job ends by its limit (`max_runtime`), counted from the allocation. One without a limit may end at any time or never:
those come last, the least busy nodes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from coordinator.fit import Fit, after
from coordinator.freeing_kernels import NEVER_MS, SOON_MS, UNKNOWN_MS
from coordinator.gpus import Piece
from coordinator.model import Job
from coordinator.nodes import NodeView, Row
from coordinator.placement import Draft, Spot
from coordinator.snapshot import TaskShape

# What jobs took in this cycle, by node.
Taken = Mapping[str, Sequence[tuple[Job, Spot]]]
# (spots, when all of them are free, the rows of their nodes then).
Found = tuple[tuple[Spot, ...], int, dict[str, Row]]


class Held(NamedTuple):
    gpu: int
    memory_mib: int
    compute_milli: int
    isolation: str


class Lease(NamedTuple):
    """One task that holds something of a node. `busy_milli`: of all tasks there. `when_ms`: its end, or how long it
    still takes whatever the time is. The order is that of leases with one end."""

    busy_milli: int
    node: str
    id: str
    pieces: tuple[Held, ...]
    cpu_milli: int
    memory_mib: int
    when_ms: int
    is_relative: bool

    def end_ms(self, now_ms: int) -> int:
        return now_ms + self.when_ms if self.is_relative else max(now_ms + SOON_MS, self.when_ms)


# A lease with its end. Their order is that in which they are taken away.
Holder = tuple[int, Lease]
_LAST = Lease(1 << 62, "", "", (), 0, 0, 0, False)


def all_by(end_ms: int) -> Holder:
    """Comes after all holders of this end, and before those of a later one."""
    return end_ms, _LAST


class Change(NamedTuple):
    """How many tasks a node takes, and the first of its holders after whose end it takes another number: when that
    is, how busy the node was for it, its place among the holders of the node, and the number then."""

    before: int
    end_ms: int
    busy_milli: int
    place: int
    after: int


def _until(job: Job) -> tuple[int, bool]:
    """`when_ms` and `is_relative` of what the job holds, or takes now."""
    if job.stop is not None:
        return SOON_MS + 1000 * job.spec.stop_grace_seconds, True
    limit_seconds = job.spec.max_runtime_seconds
    if limit_seconds is None:
        return UNKNOWN_MS, False
    left_ms = 1000 * limit_seconds - job.ran_ms
    if job.allocation is None:
        return max(SOON_MS, left_ms), True
    return job.allocation.allocated_at_ms + left_ms, False


# What is kept with a view: a node that nothing happened to is not looked through again in each cycle.
_LEASES, _OUTLOOK = "leases", "outlook"


def _leases_of(view: NodeView) -> list[Lease]:
    known: list[Lease] | None = view.kept.get(_LEASES)
    if known is None:
        places = {gpu.uuid: n for n, gpu in enumerate(view.facts.gpus)}
        busy_milli = sum(piece.compute_milli for use in view.uses for piece in use.placement.slices)
        known = []
        for use in view.uses:
            placed = use.placement
            pieces = tuple(
                Held(places[piece.gpu], piece.memory_mib, piece.compute_milli, piece.isolation)
                for piece in placed.slices
                if piece.gpu in places
            )
            size = placed.cpu_milli, placed.memory_mib
            known.append(Lease(busy_milli, view.name, use.attempt_key, pieces, *size, *_until(use.job)))
        known.sort()
        view.kept[_LEASES] = known
    return known


def _outlook_of(view: NodeView) -> tuple[int, int, int]:
    """`Holdings.outlook`, of those who held it before."""
    known: tuple[int, int, int] | None = view.kept.get(_OUTLOOK)
    if known is None:
        fixed = moving = NEVER_MS
        for use in view.uses:
            when_ms, is_relative = _until(use.job)
            if is_relative:
                moving = min(moving, when_ms)
            elif when_ms < fixed:
                fixed = when_ms
        # What is gone of the open GPUs is held; to ask each holder costs more than everything else here.
        busy_milli = 0
        for gpu, piece in zip(view.row.build.gpus, view.row.pieces, strict=True):
            if piece.is_open:
                busy_milli += gpu.compute_milli - piece.compute_milli
        known = view.kept[_OUTLOOK] = fixed, moving, busy_milli
    return known


def _taken_lease(job: Job, spot: Spot, draft: Draft) -> Lease:
    """`id` only orders those of one end."""
    [placed] = draft.placements([spot])
    pieces = tuple(
        Held(gpu, piece.memory_mib, piece.compute_milli, piece.isolation)
        for gpu, piece in zip(spot.found.gpus, placed.slices, strict=True)
    )
    size = spot.task.cpu_milli, spot.task.memory_mib
    return Lease(0, spot.node, f"{spot.number}", pieces, *size, *_until(job))


class Holdings:
    """Who holds what in the draft of a cycle, and what is left of the nodes when some of it has ended."""

    def __init__(self, draft: Draft, taken: Taken) -> None:
        self.draft = draft
        self.taken = taken
        self.now_ms = draft.snapshot.now_ms

    def leases(self, node: str) -> list[Lease]:
        """In their order."""
        known = _leases_of(self.draft.views[node])
        taken = self.taken.get(node)
        if not taken:
            return known
        return sorted([*known, *(_taken_lease(job, spot, self.draft) for job, spot in taken)])

    def outlook(self, node: str) -> tuple[int, int, int]:
        """What can be told of the holders without looking closely: the first end of those whose end is fixed, that of
        the others from now on, and how busy the node is at least for one of them."""
        fixed, moving, busy_milli = _outlook_of(self.draft.views[node])
        taken = self.taken.get(node)
        if not taken:
            return fixed, moving, busy_milli
        for job, _ in taken:
            when_ms, is_relative = _until(job)
            if is_relative:
                moving = min(moving, when_ms)
            else:
                fixed = min(fixed, when_ms)
        return fixed, moving, 0

    def holders(self, node: str) -> list[Holder]:
        """In their order."""
        return sorted((lease.end_ms(self.now_ms), lease) for lease in self.leases(node))

    def row(self, node: str, limit: Holder) -> Row:
        """What is left of the node once everything up to and with `limit` has ended."""
        row, holders = self.draft.row(node), self.holders(node)
        while holders and holders[0] <= limit:
            _, gone = holders.pop(0)
            row = freed(row, gone, [lease for _, lease in holders])
        return row

    def count(self, task: TaskShape, row: Row, most: int) -> int:
        """How many such tasks, up to `most`, fit one beside the other."""
        count = 0
        while count < most and isinstance(found := self.draft.fit(task, row), Fit):
            count += 1
            if count < most:
                row = after(task, row, found)
        return count

    def change(self, node: str, task: TaskShape, most: int, skip: int = 0) -> Change:
        """The first change once the first `skip` holders have ended."""
        row, holders = self.draft.row(node), self.holders(node)
        count = None
        for place_ in range(len(holders) + 1):
            if place_:
                row = freed(row, holders[place_ - 1][1], [lease for _, lease in holders[place_:]])
            if place_ < skip:
                continue
            now = self.count(task, row, most)
            if count is None:
                count = now
            elif now != count:
                end_ms, lease = holders[place_ - 1]
                return Change(count, end_ms, lease.busy_milli, place_, now)
        return Change(count or 0, NEVER_MS, 0, len(holders), count or 0)


def freed(row: Row, gone: Lease, left: Iterable[Lease]) -> Row:
    """The row once the lease has ended; `left` are the others there."""
    pieces = list(row.pieces)
    for held in gone.pieces:
        piece = pieces[held.gpu]
        if piece.is_open:
            sharing = {other.isolation for lease in left for other in lease.pieces if other.gpu == held.gpu}
            pieces[held.gpu] = Piece(
                piece.memory_mib + held.memory_mib,
                piece.compute_milli + held.compute_milli,
                tuple(sorted(sharing)),
            )
    return Row(row.build, row.cpu_milli + gone.cpu_milli, row.memory_mib + gone.memory_mib, tuple(pieces))
