"""What is reserved for the one job that is next and does not fit, and what all others may use meanwhile.

The slices are those that free soonest: what holds them is taken away in the order of its end (`max_runtime`, counted
from the allocation) until the job fits; that end is when it is due. A job without a time limit may end at any time or
never; those come last, the least busy nodes first, and then nobody knows when the job is due.

Beside a reservation another job may start
- anywhere, if it ends before the reserved one is due;
- else on what the reserved one leaves over of the same nodes, and on all other nodes.
Where nobody knows the due time and the policy looks first at who is owed, borrowing stops ("hold"): only jobs within
their tenant's share start, anywhere, until the reserved one has waited beyond the bounded wait; then they too keep off.
What the reserved job could not use anyway is held from nobody (QF-3).

Chosen anew in each cycle, so a reservation ends with its cause (QF-7). It moves rarely: what is reserved only gets
less busy.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from itertools import compress

from attrs import frozen
from msgspec.structs import replace

from coordinator.fairness import STARVED_AFTER, Policy
from coordinator.fit import Fit, after
from coordinator.freeing_kernels import UNKNOWN_MS
from coordinator.gangs import NO_LIMIT, place
from coordinator.gpus import Piece
from coordinator.lifecycle import REFUSED_SECONDS
from coordinator.lineup import Line, Shapes
from coordinator.model import Job, TaskPlacement
from coordinator.nodes import OTHER_THAN, Row
from coordinator.placement import Draft, Spot
from coordinator.queues import is_overdue
from coordinator.snapshot import Shape, Snapshot, TaskShape
from coordinator.soonest import Soonest
from coordinator.usage import Headroom


@frozen
class Reservation:
    """`due_ms`: when the job starts at the latest, unless something outlives its time; None where nobody knows.
    `is_overdue`: it has waited beyond the bounded wait."""

    job: Job
    tasks: tuple[TaskPlacement, ...]
    due_ms: int | None
    is_overdue: bool

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset(placed.node for placed in self.tasks)


def ends_by(job: Job, now_ms: int, due_ms: int) -> bool:
    """Whether a job that starts now is over by then, by its own limit."""
    limit_seconds = job.spec.max_runtime_seconds
    return limit_seconds is not None and now_ms + 1000 * limit_seconds - job.ran_ms <= due_ms


def elsewhere(job: Job, shape: Shape) -> Shape:
    """The job's shape, less the nodes that would not start it."""
    others = tuple((OTHER_THAN, node) for node in job.refused_by)
    return replace(shape, constraints=shape.constraints + others)


class Room:
    """What the jobs of one cycle may use. `draft` is everything that is free."""

    def __init__(self, draft: Draft, policy: Policy) -> None:
        self.draft = draft
        self.reservation: Reservation | None = None
        self._policy = policy
        self._now_ms = draft.snapshot.now_ms
        self._started: list[tuple[Job, Sequence[Spot]]] = []
        self._later: dict[str, Row] = {}
        self._rest: Draft | None = None
        self._elsewhere: Draft | None = None

    @property
    def stops_borrowing(self) -> bool:
        """Only jobs within their tenant's share may start."""
        return self._policy.owed_first and self.reservation is not None and self.reservation.due_ms is None

    def is_late(self, job: Job) -> bool:
        """It has waited beyond the bounded wait."""
        return is_overdue(job, self._now_ms, self._policy.max_wait_seconds)

    def is_starved(self, job: Job) -> bool:
        return is_overdue(job, self._now_ms, STARVED_AFTER * self._policy.max_wait_seconds)

    def open_to(self, job: Job, is_owed: bool) -> Draft | None:
        """What this job may use; None for nothing."""
        reservation = self.reservation
        if reservation is None:
            return self.draft
        if reservation.due_ms is not None:
            return self.draft if ends_by(job, self._now_ms, reservation.due_ms) else self._rest
        if not self._policy.owed_first:
            return self._rest
        if not is_owed:
            return self._elsewhere
        return self._rest if reservation.is_overdue else self.draft

    def spots(self, shape: Shape, headroom: Headroom, draft: Draft) -> tuple[Spot, ...] | None:
        """Where a job of this shape goes, within what its tenant may still hold. A shape for which there is no room
        whoever asks is refused for the rest of the cycle."""
        if self.is_refused(shape, draft):
            return None
        spots = place(draft, shape, headroom)
        if spots is None and (headroom.is_unlimited or place(draft, shape, NO_LIMIT) is None):
            draft.refused.add(shape)
        return spots

    def spots_of(self, job: Job, shape: Shape, headroom: Headroom, draft: Draft) -> tuple[Spot, ...] | None:
        """As `spots`, and first without the nodes that would not start the job before (TP-6)."""
        if job.refused_by:
            spots = self.spots(elsewhere(job, shape), headroom, draft)
            if spots is not None or self.avoids(job, shape):
                return spots
        return self.spots(shape, headroom, draft)

    def avoids(self, job: Job, shape: Shape) -> bool:
        """Whether the job still waits for other nodes than those that would not start it: for a while, and as long as
        they could take all of it when empty (of tasks that differ, each kind for itself)."""
        if not job.refused_by or self._now_ms >= job.queued_at_ms + 1000 * REFUSED_SECONDS:
            return False
        others = [
            view
            for name, view in self.draft.views.items()
            if name not in job.refused_by and self.draft.gate(name, shape.constraints) is None
        ]
        alike = Counter(view.row.build for view in others)
        rows = {view.row.build: view.full_row for view in others}
        return all(
            sum(self._could_take(row, task) * alike[build] for build, row in rows.items()) >= task.count
            for task in shape.tasks
        )

    def fitting(self, asked: Shapes, draft: Draft | None = None) -> int:
        """The lines of those shapes that may find room in the draft, the whole one where none is given."""
        fits = (draft or self.draft).fitting(asked.shapes)
        return functools.reduce(operator.or_, compress(asked.lines, fits), 0)

    def is_refused(self, shape: Shape, draft: Draft | None = None) -> bool:
        """Whether nobody has room for the shape any more; of `draft` alone where one is given."""
        return shape in self.draft.refused or (draft is not None and shape in draft.refused)

    def start(
        self, job: Job, line: Line, headroom: Headroom, draft: Draft
    ) -> tuple[tuple[Spot, ...], int] | None:
        """Puts a job of this line where there is room for all of it, from now on; and how many whole GPUs its nodes had.
        None where there is no room."""
        shape = line.shape
        if (
            shape.only_task is not None
            and not job.refused_by
            and (headroom is NO_LIMIT or headroom.allows(line.most))
        ):
            if self.is_refused(shape, draft):
                return None
            found = draft.take_best(shape)
            if found is None:
                draft.refused.add(shape)
                return None
            spot, idle = found
            if draft is not self.draft:
                idle = self.draft.idle_gpus(spot.node)
            self._note(job, (spot,), draft)
            return (spot,), idle
        spots = self.spots_of(job, shape, headroom, draft)
        if spots is None:
            return None
        idle = sum(self.draft.idle_gpus(node) for node in {spot.node for spot in spots})
        draft.take(spots)
        self._note(job, spots, draft)
        return spots, idle

    def _note(self, job: Job, spots: Sequence[Spot], taken: Draft) -> None:
        """From now on the job is there, in the other drafts than `taken` too."""
        self._started.append((job, spots))
        if taken is not self.draft:
            self.draft.take(spots)
        reservation = self.reservation
        if reservation is None or self._rest is None:
            return
        if self._elsewhere is not None and taken is not self._elsewhere:
            self._elsewhere.take([spot for spot in spots if spot.node not in self._elsewhere.held])
        is_back = reservation.due_ms is not None and ends_by(job, self._now_ms, reservation.due_ms)
        touched = [spot for spot in spots if spot.node in self._later]
        if not is_back:
            for spot in touched:
                self._later[spot.node] = after(spot.task, self._later[spot.node], spot.found)
        if touched and (is_back or self.stops_borrowing):
            self._rest.put({spot.node: self.draft.row(spot.node) for spot in spots})
            self._look_again()  # it may stand on what is reserved
        elif taken is not self._rest:
            self._rest.take(spots)

    def reserve(self, shape: Shape, job: Job) -> bool:
        """Reserves for the job what frees soonest. False where the nodes that are up could not take it even when
        empty, so that it holds nothing from anybody; and where nobody knows when it would be free and it has waited
        so long for that already that the others were kept off long enough."""
        taken: dict[str, list[tuple[Job, Spot]]] = {}
        for other, there in self._started:
            for spot in there:
                taken.setdefault(spot.node, []).append((other, spot))
        soonest = Soonest(self.draft, taken, shape)
        found = soonest.found()
        waited_ms = self._now_ms - job.queued_at_ms
        if found is None or (found[1] >= UNKNOWN_MS and waited_ms >= 1000 * self._policy.hold_seconds):
            return False
        spots, due_ms, rows = found
        self._later = rows
        for spot in spots:
            self._later[spot.node] = after(spot.task, self._later[spot.node], spot.found)
        self.reservation = Reservation(
            job,
            self.draft.placements(spots),
            None if due_ms >= UNKNOWN_MS else due_ms,
            self.is_late(job),
        )
        self._look_again()
        if self.stops_borrowing and soonest.leaves_nodes_open:
            self._elsewhere = self._copy({}, "elsewhere", soonest.usable)
        return True

    def _could_take(self, row: Row, task: TaskShape) -> int:
        """How many of these tasks there is room for, up to all."""
        number = 0
        while number < task.count and isinstance(found := self.draft.fit(task, row), Fit):
            number, row = number + 1, after(task, row, found)
        return number

    def _look_again(self) -> None:
        """What is left beside the reserved job, as it is now."""
        rows = {name: _lesser(self.draft.row(name), later) for name, later in self._later.items()}
        if self._rest is None:
            self._rest = self._copy(rows, "rest")
        else:
            self._rest.put(rows)

    def _copy(self, rows: dict[str, Row], purpose: str, held: frozenset[str] = frozenset()) -> Draft:
        nodes = dict.fromkeys([spot.node for _, spots in self._started for spot in spots])
        changed = {node: self.draft.row(node) for node in nodes}
        return self.draft.beside(changed | rows, purpose, held)


def _lesser(now: Row, later: Row) -> Row:
    """What is free now and still over when the reserved job is there."""
    pieces = tuple(
        Piece(
            max(0, min(a.memory_mib, b.memory_mib)),
            max(0, min(a.compute_milli, b.compute_milli)),
            tuple(sorted({*a.sharing, *b.sharing})),
            a.is_open and b.is_open,
        )
        for a, b in zip(now.pieces, later.pieces, strict=True)
    )
    return Row(
        now.build,
        max(0, min(now.cpu_milli, later.cpu_milli)),
        max(0, min(now.memory_mib, later.memory_mib)),
        pieces,
    )


def waits_for(reservation: Reservation, snapshot: Snapshot) -> dict[str, int]:
    """The figures of a reservation that users are told."""
    if reservation.due_ms is None:
        return {}
    return {"due_seconds": max(0, reservation.due_ms - snapshot.now_ms + 999) // 1000}
