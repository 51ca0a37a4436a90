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

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from attrs import evolve, frozen

from coordinator.fairness import STARVED_AFTER, Policy
from coordinator.fit import Fit, after
from coordinator.gangs import NO_LIMIT, place
from coordinator.lifecycle import REFUSED_SECONDS
from coordinator.model import Job, TaskPlacement
from coordinator.nodes import OTHER_THAN, NodeBuild, NodeView, Piece, Row
from coordinator.placement import Draft, Spot, wait_reason
from coordinator.queues import is_overdue
from coordinator.snapshot import Shape, Snapshot
from coordinator.usage import Headroom
from vgpu.reasons import Reason

_UNKNOWN_MS = 1 << 62
# A job that has run out its time, or was asked to stop, ends soon; it is not over before its end is confirmed.
_SOON_MS = 1000


@frozen
class Reservation:
    """`due_ms`: when the job starts at the latest, unless something outlives its time; None where nobody knows.
    `reason`: why it does not fit now. `is_overdue`: it has waited beyond the bounded wait."""

    job: Job
    tasks: tuple[TaskPlacement, ...]
    due_ms: int | None
    reason: Reason
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
    return evolve(shape, constraints=shape.constraints + others)


class Room:
    """What the jobs of one cycle may use. `draft` is everything that is free."""

    def __init__(self, draft: Draft, policy: Policy) -> None:
        self.draft = draft
        self.reservation: Reservation | None = None
        self._policy = policy
        self._now_ms = draft.snapshot.now_ms
        self._taken: list[tuple[Job, Spot]] = []
        self._later: dict[str, Row] = {}
        self._usable: frozenset[str] = frozenset()
        self._rest: Draft | None = None
        self._elsewhere: Draft | None = None
        self._refused: dict[Draft, set[Shape]] = {draft: set()}

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

    def spots(self, shape: Shape, headroom: Headroom, draft: Draft | None) -> tuple[Spot, ...] | None:
        """Where a job of this shape goes, within what its tenant may still hold. A shape for which there is no room
        whoever asks is refused for the rest of the cycle."""
        if draft is None or self.is_refused(shape, draft):
            return None
        spots = place(draft, shape, headroom)
        if spots is None and place(draft, shape, NO_LIMIT) is None:
            self._refused[draft].add(shape)
        return spots

    def spots_of(
        self, job: Job, shape: Shape, headroom: Headroom, draft: Draft | None
    ) -> tuple[Spot, ...] | None:
        """As `spots`, and first without the nodes that would not start the job before (TP-6)."""
        if job.refused_by:
            spots = self.spots(elsewhere(job, shape), headroom, draft)
            if spots is not None or self.avoids(job, shape):
                return spots
        return self.spots(shape, headroom, draft)

    def avoids(self, job: Job, shape: Shape) -> bool:
        """Whether the job still waits for other nodes than those that would not start it: for a while, and as long as
        there are some that could take it when empty."""
        if not job.refused_by or self._now_ms >= job.queued_at_ms + 1000 * REFUSED_SECONDS:
            return False
        others = {
            view.row.build: view.full_row
            for name, view in self.draft.views.items()
            if name not in job.refused_by and self.draft.gate(name, shape.constraints) is None
        }
        return any(self._could_take(row, shape) for row in others.values())

    def fitting(self, shapes: Mapping[int, Shape]) -> int:
        """Of these shapes, each by its bit, those that may find room in the whole draft; the others are refused."""
        fits = self.draft.fitting(list(shapes.values()))
        left = 0
        for (bit, shape), is_fitting in zip(shapes.items(), fits, strict=True):
            if is_fitting:
                left |= bit
            else:
                self._refused[self.draft].add(shape)
        return left

    def is_refused(self, shape: Shape, draft: Draft | None = None) -> bool:
        """Whether nobody has room for the shape any more; of `draft` alone where one is given."""
        return shape in self._refused[self.draft] or (draft is not None and shape in self._refused[draft])

    def take(self, job: Job, spots: Sequence[Spot]) -> None:
        """From now on the job is there."""
        reservation = self.reservation
        self.draft.take(spots)
        self._taken += [(job, spot) for spot in spots]
        if reservation is None or self._rest is None:
            return
        if self._elsewhere is not None:
            self._elsewhere.take([spot for spot in spots if spot.node not in self._usable])
        is_back = reservation.due_ms is not None and ends_by(job, self._now_ms, reservation.due_ms)
        touched = [spot for spot in spots if spot.node in self._later]
        if not is_back:
            for spot in touched:
                self._later[spot.node] = after(spot.task, self._later[spot.node], spot.found)
        if touched and (is_back or self.stops_borrowing):
            self._look_again()  # it may stand on what is reserved
        else:
            self._rest.take(spots)

    def reserve(self, shape: Shape, job: Job) -> bool:
        """Reserves for the job what frees soonest. False where the nodes that are up could not take it even when
        empty, so that it holds nothing from anybody; and where nobody knows when it would be free and it has waited
        so long for that already that the others were kept off long enough."""
        could_take: dict[NodeBuild, bool] = {}
        usable = []
        for name, view in self.draft.views.items():
            if self.draft.gate(name, shape.constraints) is None:
                build = view.row.build
                if build not in could_take:
                    could_take[build] = self._could_take(view.full_row, shape)
                if could_take[build]:
                    usable.append(name)
        self._usable = frozenset(usable)
        found = _Freeing(self.draft, self._holders()).soonest(shape)
        waited_ms = self._now_ms - job.queued_at_ms
        if found is None or (found[1] >= _UNKNOWN_MS and waited_ms >= 1000 * self._policy.hold_seconds):
            return False
        spots, due_ms, rows = found
        self._later = rows
        for spot in spots:
            self._later[spot.node] = after(spot.task, self._later[spot.node], spot.found)
        self.reservation = Reservation(
            job,
            self.draft.placements(spots),
            None if due_ms >= _UNKNOWN_MS else due_ms,
            wait_reason(shape, self.draft),
            self.is_late(job),
        )
        self._look_again()
        if self.stops_borrowing and len(self._usable) < len(self.draft.views):
            self._elsewhere = self._copy({}, "elsewhere")
            self._elsewhere.hold(self._usable)
        return True

    def _could_take(self, row: Row, shape: Shape) -> bool:
        return any(isinstance(self.draft.fit(task, row), Fit) for task in shape.tasks if task.count)

    def _look_again(self) -> None:
        rows = {name: _lesser(self.draft.row(name), later) for name, later in self._later.items()}
        refused = self._refused.pop(self._rest, set()) if self._rest is not None else set()
        self._rest = self._copy(rows, "rest")
        self._refused[self._rest] |= refused

    def _copy(self, rows: dict[str, Row], purpose: str) -> Draft:
        changed = {spot.node: self.draft.row(spot.node) for _, spot in self._taken}
        draft = self.draft.beside(changed | rows, purpose)
        self._refused[draft] = set()
        return draft

    def _holders(self) -> list[_Holder]:
        """What holds slices of the nodes that the job could use, in no order."""
        taken = [(job, spot) for job, spot in self._taken if spot.node in self._usable]
        found = [_holder_of(spot, self.draft, self._end_ms(job)) for job, spot in taken]
        for name in self._usable:
            endless, others = _held_of(self.draft.views[name])
            found += endless
            found += [_Holder(self._end_ms(job), *rest) for job, rest in others]
        return found

    def _end_ms(self, job: Job) -> int:
        """When a job that holds slices, or starts now, is over at the latest."""
        if job.stop is not None:
            return self._now_ms + _SOON_MS + 1000 * job.spec.stop_grace_seconds
        limit_seconds = job.spec.max_runtime_seconds
        if limit_seconds is None:
            return _UNKNOWN_MS
        since_ms = job.allocation.allocated_at_ms if job.allocation else self._now_ms
        return max(self._now_ms + _SOON_MS, since_ms + 1000 * limit_seconds - job.ran_ms)


class _Held(NamedTuple):
    gpu: int
    memory_mib: int
    compute_milli: int
    isolation: str


class _Holder(NamedTuple):
    """One task that holds something of a node. `busy_milli`: of all tasks there."""

    end_ms: int
    busy_milli: int
    node: str
    id: str
    pieces: tuple[_Held, ...]
    cpu_milli: int
    memory_mib: int


def _holder_of(spot: Spot, draft: Draft, end_ms: int) -> _Holder:
    """`id` only orders those of one end."""
    [placed] = draft.placements([spot])
    pieces = tuple(
        _Held(gpu, piece.memory_mib, piece.compute_milli, piece.isolation)
        for gpu, piece in zip(spot.found.gpus, placed.slices, strict=True)
    )
    return _Holder(end_ms, 0, spot.node, f"{spot.number}", pieces, spot.task.cpu_milli, spot.task.memory_mib)


_Rest = tuple[int, str, str, tuple[_Held, ...], int, int]
# By view: a node that nothing happened to is not looked through again in each cycle.
_HeldBy = tuple[list[_Holder], list[tuple[Job, _Rest]]]
_HELD: WeakKeyDictionary[NodeView, _HeldBy] = WeakKeyDictionary()


def _held_of(view: NodeView) -> _HeldBy:
    """Who holds something of a node: those who may do so for ever, and what a `_Holder` says of the others beside
    their end."""
    known = _HELD.get(view)
    if known is None:
        places = {gpu.gpu.uuid: n for n, gpu in enumerate(view.gpus)}
        busy_milli = sum(piece.compute_milli for use in view.uses for piece in use.placement.slices)
        endless: list[_Holder] = []
        others: list[tuple[Job, _Rest]] = []
        for use in view.uses:
            pieces = tuple(
                _Held(places[piece.gpu], piece.memory_mib, piece.compute_milli, piece.isolation)
                for piece in use.placement.slices
                if piece.gpu in places
            )
            size = use.placement.cpu_milli, use.placement.memory_mib
            rest: _Rest = (busy_milli, view.name, use.attempt_key, pieces, *size)
            if use.job.stop is None and use.job.spec.max_runtime_seconds is None:
                endless.append(_Holder(_UNKNOWN_MS, *rest))
            else:
                others.append((use.job, rest))
        known = _HELD[view] = endless, others
    return known


Found = tuple[tuple[Spot, ...], int, dict[str, Row]]


class _Freeing:
    """The nodes as they become free, holder after holder."""

    def __init__(self, draft: Draft, holders: list[_Holder]) -> None:
        self._draft = draft
        self._holders = holders

    def soonest(self, shape: Shape) -> Found | None:
        """(spots, when all of them are free, the rows of their nodes then)."""
        if shape.task_count == 0:
            return None
        return self._of_one(shape) if shape.task_count == 1 else self._of_gang(shape)

    def _of_one(self, shape: Shape) -> Found | None:
        task = next(task for task in shape.tasks if task.count)
        left = _by_node(self._holders)
        rows: dict[str, Row] = {}
        ending = list(self._holders)
        heapq.heapify(ending)
        while ending:
            holder = heapq.heappop(ending)
            left[holder.node].remove(holder)
            row = _freed(rows.get(holder.node) or self._draft.row(holder.node), holder, left[holder.node])
            rows[holder.node] = row
            found = self._draft.fit(task, row)
            if isinstance(found, Fit):
                row = self._with_all_by(holder, row, left[holder.node])
                found = self._draft.fit(task, row)
                assert isinstance(found, Fit)
                return (Spot(0, holder.node, task, found),), holder.end_ms, {holder.node: row}
        return None

    def _with_all_by(self, last: _Holder, row: Row, left: list[_Holder]) -> Row:
        """The row once everything that ends with `last` is gone."""
        for holder in sorted(left):
            if last.end_ms < _UNKNOWN_MS and holder.end_ms <= last.end_ms:
                left.remove(holder)
                row = _freed(row, holder, left)
        return row

    def _of_gang(self, shape: Shape) -> Found | None:
        """The fewest holders that must end, by halving: what fits when some have ended fits when more have."""
        self._holders.sort()
        low, high = 0, len(self._holders)
        best = self._after(high, shape)
        if best is None:
            return None
        while low + 1 < high:
            middle = (low + high) // 2
            found = self._after(middle, shape)
            if found is None:
                low = middle
            else:
                high, best = middle, found
        end_ms = best[1]
        while end_ms < _UNKNOWN_MS and high < len(self._holders) and self._holders[high].end_ms <= end_ms:
            high += 1  # what ends with the last of them is free then too
        return self._sparing(high, shape) or best

    def _sparing(self, count: int, shape: Shape) -> Found | None:
        """The same, with as few as can be of the nodes that are free already: those are left to others until then."""
        ending = {holder.node for holder in self._holders[:count]}
        free = [
            name for name in sorted(self._draft.views) if name not in ending and self._is_free(name, shape)
        ]
        low, high, best = 0, len(free), self._after(count, shape, free) if free else None
        if best is not None or not free:
            return best
        while low + 1 < high:
            middle = (low + high) // 2
            found = self._after(count, shape, free[:middle])
            if found is None:
                high = middle
            else:
                low, best = middle, found
        return best

    def _is_free(self, node: str, shape: Shape) -> bool:
        row = self._draft.row(node)
        return any(isinstance(self._draft.fit(task, row), Fit) for task in shape.tasks if task.count)

    def _after(self, count: int, shape: Shape, spared: Sequence[str] = ()) -> Found | None:
        left = _by_node(self._holders)
        rows: dict[str, Row] = {node: self._draft.row(node) for node in left}
        for holder in self._holders[:count]:
            left[holder.node].remove(holder)
            rows[holder.node] = _freed(rows[holder.node], holder, left[holder.node])
        later = self._draft.beside(rows, "later")
        later.hold(spared)
        spots = place(later, shape, NO_LIMIT)
        if spots is None:
            return None
        end_ms = self._holders[count - 1].end_ms if count else self._draft.snapshot.now_ms
        return spots, end_ms, {s.node: rows.get(s.node) or self._draft.row(s.node) for s in spots}


def _by_node(holders: Iterable[_Holder]) -> dict[str, list[_Holder]]:
    found: dict[str, list[_Holder]] = {}
    for holder in holders:
        found.setdefault(holder.node, []).append(holder)
    return found


def _freed(row: Row, gone: _Holder, left: Iterable[_Holder]) -> Row:
    pieces = list(row.pieces)
    for held in gone.pieces:
        piece = pieces[held.gpu]
        if piece.is_open:
            sharing = {other.isolation for h in left for other in h.pieces if other.gpu == held.gpu}
            pieces[held.gpu] = Piece(
                piece.memory_mib + held.memory_mib,
                piece.compute_milli + held.compute_milli,
                tuple(sorted(sharing)),
            )
    return Row(row.build, row.cpu_milli + gone.cpu_milli, row.memory_mib + gone.memory_mib, tuple(pieces))


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
