"""One cycle: from a frozen snapshot to a frozen plan. This page is the product; everything else serves it.

    1. See what is free, and who waits, in each tenant's own order.
    2. First those who are owed, the tenant with the highest priority first: a job within its tenant's entitled share
       starts if it fits; the first that does not fit gets the reservation. (Where the policy knows no debt: the job
       that has waited beyond the bounded wait.)
    3. Then everybody, the tenant with the highest priority first, around the reservation. A job is placed whole or not
       at all; a shape that did not fit is not asked again in this cycle.
    4. The tenant is charged at once, and the next turn is decided anew.
    5. Until nobody who waits can be placed, or the cycle is full: then the plan is committed and the next one starts.

Capacity only shrinks in a cycle, so "did not fit" stays true to its end. Reasons are found when somebody asks for
them: a hundred thousand waiting jobs of fifty shapes have fifty reasons.
"""

from __future__ import annotations

import functools
import heapq
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import frozen
from msgspec import Struct

from coordinator import gangs
from coordinator.fairness import STARVED_AFTER, Entitlement, Policy, Standings
from coordinator.holds import Reservation, Room, ends_by
from coordinator.lineup import Line, Lineups, Shapes
from coordinator.model import Allocation, Job, Standing
from coordinator.placement import Draft, Spot
from coordinator.queues import TenantQueues, overdue
from coordinator.reasoning import Waiting, why_never
from coordinator.snapshot import Shape, Snapshot
from coordinator.usage import NO_LIMIT
from vgpu.reasons import Reason, ReasonCode, few, only

if TYPE_CHECKING:
    from coordinator.index import Index

ALL_LINES = -1
# After so many refused shapes it is cheaper to ask for all at once than to find the next ones one after the other.
_MANY_REFUSALS = 8

__all__ = ["Placement", "Plan", "Policy", "plan_cycle", "why_never"]


class Placement(Struct, frozen=True, gc=False):
    """A waiting job, as its record stood, and what it is to hold."""

    job: Job
    allocation: Allocation


@frozen(eq=False)
class Plan:
    """`waiting`: a reason for every job that still waits, found when asked for. `reservation`: for whom what frees
    soonest is kept."""

    revision: int
    placements: tuple[Placement, ...]
    waiting: Mapping[str, Reason]
    reservation: Reservation | None = None

    @property
    def held(self) -> frozenset[str]:
        """The nodes that the reservation is about."""
        return self.reservation.nodes if self.reservation else frozenset()

    @property
    def held_for(self) -> str:
        return self.reservation.job.id if self.reservation else ""


def plan_cycle(snapshot: Snapshot, policy: Policy, memo: Index | None = None) -> Plan:
    """Pure: the same snapshot gives the same plan. `memo` keeps answers from cycle to cycle; it changes how long a
    cycle takes and nothing else. The plan's reasons must be read before the memo serves the next cycle."""
    cycle = _Cycle(snapshot, policy, memo)
    if policy.owed_first:
        cycle.serve_the_starved()
        cycle.serve_those_who_are_owed()
    else:
        cycle.serve_the_longest_waiting()
    cycle.serve_everybody()
    placed = frozenset([placement.job.id for placement in cycle.placements])
    waiting = Waiting(
        snapshot, cycle.room, cycle.standings, cycle.entitlement, cycle.lineup.order.cards, placed
    )
    return Plan(snapshot.revision, tuple(cycle.placements), waiting, cycle.room.reservation)


class _Cycle:
    """`open` are the lines, as a set (`coordinator.lineup`), that may still find room in the whole draft, `beside` those
    that may find some beside the reserved job."""

    def __init__(self, snapshot: Snapshot, policy: Policy, memo: Index | None) -> None:
        self.snapshot = snapshot
        self.policy = policy
        self.standings = Standings(snapshot, policy)
        self.lineup = (Lineups() if memo is None else memo.lineups).of(snapshot)
        self.entitlement = Entitlement(snapshot, policy, self.lineup.wanted)
        self.room = Room(Draft(snapshot, index=memo), policy)
        self.queues = TenantQueues(snapshot, self.lineup, policy.max_wait_seconds)
        self.open = ALL_LINES
        self.refusals = 0
        self.times_all_asked = 0
        self.beside = ALL_LINES
        self.refusals_beside = 0
        self.narrowed: set[str] = set()
        self.placements: list[Placement] = []
        self.starving: dict[str, set[str]] = {}

    def serve_those_who_are_owed(self) -> None:
        """Until one of them does not fit: that one has the reservation, where it may have one."""
        turns = self._turns()
        while turns and not self._is_full and self.room.reservation is None:
            tenant = turns[0][-1]
            head = self.queues[tenant].first()
            if head is None or not self._is_owed(*head):
                heapq.heappop(turns)
            elif self._serve(*head, self.room.draft):
                heapq.heapreplace(turns, self.standings.turn(tenant))
            else:
                line, job = head
                if self.room.is_refused(line.shape) and not self._has_withdrawn(tenant):
                    self.room.reserve(line.shape, job)
                self._refuse(line, job)

    def serve_the_starved(self) -> None:
        """Of the starved jobs whose tenants hold no more than their share, the one that has waited longest goes ahead of
        everybody, or has the reservation: so a wait has an end, whatever the other tenants and its own submit (QF-3)."""
        for line, job in self._waited_too_long(STARVED_AFTER):
            self.starving.setdefault(job.tenant, set()).add(job.id)
            if self.room.reservation is not None or not self._is_owed(line, job):
                continue
            if not self._serve(line, job, self.room.draft) and self.room.is_refused(line.shape):
                self.room.reserve(line.shape, job)

    def serve_the_longest_waiting(self) -> None:
        """It goes ahead of everybody, or has the reservation. Only one: a cluster full of them would serve nobody."""
        for line, job in self._waited_too_long(1):
            if self._serve(line, job, self.room.draft):
                return
            if self.room.is_refused(line.shape) and self.room.reserve(line.shape, job):
                return

    def serve_everybody(self) -> None:
        """By priority, each by its tenant's order, within what the reservation leaves open to it. Where somebody waits for
        one there is little room: then what has none is not found out one by one."""
        if self.room.reservation is not None:
            self._ask_all()
        turns, room, asked = self._turns(), self.room, self.times_all_asked
        stops_borrowing = room.stops_borrowing
        while turns and not self._is_full:
            if asked != self.times_all_asked:
                turns, asked = self._turns(), self.times_all_asked
                continue
            tenant = turns[0][-1]
            if self.refusals_beside >= _MANY_REFUSALS:
                self._narrow(tenant)
            head = self.queues[tenant].first(self.open)
            if head is None:
                heapq.heappop(turns)
                continue
            line, job = head
            is_owed = not stops_borrowing or self._is_owed(line, job)
            draft = room.open_to(job, is_owed)
            if draft is not None and self._serve(line, job, draft):
                heapq.heapreplace(turns, self.standings.turn(tenant))
            elif draft is room.draft or room.is_refused(line.shape):
                self._refuse(line, job)
            else:
                self._pass_over(line, job, draft)

    def _serve(self, line: Line, job: Job, draft: Draft) -> bool:
        """Places the job whole or not at all, and charges its tenant at once."""
        tenant, standings = job.tenant, self.standings
        headroom = standings.headroom(tenant)
        if headroom is not NO_LIMIT and not headroom.allows(line.use):
            return False
        if self.starving and self._starves_its_own(line, job):
            return False
        started = self.room.start(job, line, headroom, draft)
        if started is None:
            return False
        spots, idle_gpus = started
        self.placements.append(self._placement(job, spots, idle_gpus, standings.standing(tenant)))
        standings.charge(tenant, Draft.charge(spots))
        self.queues[tenant].take(job)
        return True

    def _refuse(self, line: Line, job: Job) -> None:
        """Its line has no chance any more, unless it only avoids nodes that others of its line may use. Each time
        that much was refused all shapes that wait are asked at once, and what has no room is looked at no more."""
        queue, is_refused = self.queues[job.tenant], self.room.is_refused(line.shape)
        if job.refused_by and not is_refused:
            queue.pass_over(lambda other: other.refused_by != job.refused_by)
        else:
            queue.refuse()
        if is_refused:
            self.open &= ~self.lineup.order.of_shape(line.shape)
            self.refusals += 1
            if self.refusals % _MANY_REFUSALS == 0:
                self._ask_all()

    def _ask_all(self) -> None:
        """From now on only lines of shapes that may find room."""
        self.open &= self.room.fitting(self._waiting_shapes())
        self.times_all_asked += 1

    def _pass_over(self, line: Line, job: Job, draft: Draft | None) -> None:
        """Only a job that ends before the reserved one is due may have what is kept for that one. Shapes for which there
        is nothing beside it are found as `_refuse` finds those for which there is nothing at all."""
        reservation, queue = self.room.reservation, self.queues[job.tenant]
        if reservation is None or reservation.due_ms is None:
            queue.refuse()
            return
        queue.pass_over(self._ends_in_time)
        if draft is not None and self.beside & line.bit and self.room.is_refused(line.shape, draft):
            self.beside &= ~self.lineup.order.of_shape(line.shape)
            self.refusals_beside += 1
            if self.refusals_beside % _MANY_REFUSALS == 0:
                self.beside &= self.room.fitting(self._waiting_shapes(), draft)
                self.narrowed.clear()

    def _narrow(self, tenant: str) -> None:
        """Once it is known what has room beside the reserved job, of all other lines only those with a job that ends
        in time are looked at."""
        reservation = self.room.reservation
        if tenant in self.narrowed or reservation is None:
            return
        self.narrowed.add(tenant)
        if reservation.due_ms is not None:
            self.queues[tenant].keep(self.beside, reservation.due_ms - self.snapshot.now_ms)

    def _waiting_shapes(self) -> Shapes:
        """Of all tenants; those refused already too, so that the set is the same from cycle to cycle."""
        waiting = functools.reduce(operator.or_, [front.all for front in self.lineup.fronts.values()])
        return self.lineup.order.shapes(waiting)

    @property
    def _is_full(self) -> bool:
        return len(self.placements) >= self.policy.placements_per_cycle

    def _turns(self) -> list[tuple[bool, int, str]]:
        """Of those who may still have a chance."""
        fronts, lines, turn = self.lineup.fronts, self.open, self.standings.turn
        if lines == ALL_LINES:
            turns = [turn(tenant) for tenant in fronts]
        else:
            turns = [turn(tenant) for tenant, front in fronts.items() if front.all & lines]
        heapq.heapify(turns)
        return turns

    def _is_owed(self, line: Line, job: Job) -> bool:
        tenant, covers = job.tenant, self.entitlement.covers
        held_mib, need_mib = self.standings.held_mib(tenant), line.needs.memory_mib
        if covers(tenant, held_mib, need_mib, is_starved=False):
            return True
        return self.room.is_starved(job) and covers(tenant, held_mib, need_mib, is_starved=True)

    def _ends_in_time(self, job: Job) -> bool:
        reservation = self.room.reservation
        due_ms = reservation.due_ms if reservation else None
        return due_ms is not None and ends_by(job, self.snapshot.now_ms, due_ms)

    def _has_withdrawn(self, tenant: str) -> bool:
        """Whether it took back a job for which slices were reserved, a short while ago: demand that is not meant
        must not cost others their turn."""
        at_ms = self.snapshot.withdrawn.get(tenant)
        return at_ms is not None and self.snapshot.now_ms - at_ms < 1000 * self.policy.withdrawal_seconds

    def _starves_its_own(self, line: Line, job: Job) -> bool:
        """A starved job is owed as long as its tenant holds no more than its share; nothing else of it may go beyond."""
        starving = self.starving.get(job.tenant)
        if not starving or job.id in starving:
            return False
        held_mib = self.standings.held_mib(job.tenant)
        return held_mib + line.needs.memory_mib > self.entitlement.share_mib(job.tenant)

    def _waited_too_long(self, times: int) -> Iterator[tuple[Line, Job]]:
        """The jobs that may go ahead of everybody, one of each shape, the most urgent and then the oldest first: having
        waited for so many times the bounded wait, allowed by their tenant's limit, and able to run here at all, so that
        a hold dies with its cause (QF-7)."""
        seconds = times * self.policy.max_wait_seconds
        late = [
            (self.lineup.order.lines[key], job)
            for tenant, front in self.lineup.fronts.items()
            if front.waits_since(self.snapshot.now_ms - 1000 * seconds)
            for key, job in overdue(self.snapshot, tenant, seconds)
            if self.standings.headroom(tenant).allows(self.lineup.order.lines[key].use)
        ]
        seen: set[Shape] = set()
        for line, job in sorted(late, key=lambda pair: (-pair[0].priority, pair[1].queued_at_ms, pair[1].id)):
            if line.shape not in seen and why_never(job.spec, self.snapshot) is None:
                yield line, job
            seen.add(line.shape)

    def _placement(self, job: Job, spots: Sequence[Spot], idle_gpus: int, standing: Standing) -> Placement:
        draft = self.room.draft
        placed = _placed(spots, idle_gpus, draft)
        tasks = draft.placements(spots)
        return Placement(job, Allocation(job.attempt, tasks, self.snapshot.now_ms, standing, placed))


def _placed(spots: Sequence[Spot], idle_gpus: int, draft: Draft) -> Reason:
    """Why there: what the set costs, and how full the nodes were."""
    if len(spots) == 1:  # most jobs: a set of one node costs what its GPUs cost each other
        found = spots[0].found
        nodes, gpus, cost = only(spots[0].node), len(found.gpus), found.cost
    else:
        nodes = tuple(sorted({spot.node for spot in spots}))
        gpus = sum(len(spot.found.gpus) for spot in spots)
        cost = gangs.communication_cost(draft, spots)
    return Reason(ReasonCode.PLACED, _placed_numbers(gpus, len(nodes), cost, idle_gpus), nodes)


@functools.lru_cache(maxsize=1 << 14)
def _placed_numbers(gpus: int, nodes: int, cost: int, idle_gpus: int) -> Mapping[str, int]:
    return few(
        ("gpus", gpus), ("nodes", nodes), ("communication_cost", cost), ("idle_gpus_before", idle_gpus)
    )
