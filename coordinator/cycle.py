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

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from coordinator import gangs
from coordinator.fairness import Entitlement, Policy, Standings
from coordinator.holds import Reservation, Room, ends_by
from coordinator.model import Allocation, Job
from coordinator.placement import Draft, Spot
from coordinator.queues import Cards, TenantQueue, overdue, wanted
from coordinator.reasoning import Waiting, why_never
from coordinator.snapshot import Shape, Snapshot
from vgpu.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from coordinator.index import Index

__all__ = ["Placement", "Plan", "Policy", "plan_cycle", "why_never"]


@frozen
class Placement:
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
        cycle.serve_those_who_are_owed()
    else:
        cycle.serve_the_longest_waiting()
    cycle.serve_everybody()
    placed = frozenset(placement.job.id for placement in cycle.placements)
    waiting = Waiting(snapshot, cycle.room, cycle.standings, cycle.entitlement, cycle.cards, placed)
    return Plan(snapshot.revision, tuple(cycle.placements), waiting, cycle.room.reservation)


class _Cycle:
    def __init__(self, snapshot: Snapshot, policy: Policy, memo: Index | None) -> None:
        self.snapshot = snapshot
        self.policy = policy
        self.cards = Cards(snapshot)
        self.standings = Standings(snapshot, policy)
        self.entitlement = Entitlement(snapshot, policy, wanted(snapshot, self.cards))
        self.room = Room(Draft(snapshot, index=memo), policy)
        self.queues = {
            tenant: TenantQueue(snapshot, tenant, self.cards, policy.max_wait_seconds)
            for tenant in snapshot.lines
        }
        self.placements: list[Placement] = []

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
                if self.room.is_refused(head[0]) and not self._has_withdrawn(tenant):
                    self.room.reserve(*head)
                self._refuse(tenant, *head)

    def serve_the_longest_waiting(self) -> None:
        """It goes ahead of everybody, or has the reservation. Only one: a cluster full of them would serve nobody."""
        for shape, job in self._waited_too_long():
            if self._serve(shape, job, self.room.draft):
                return
            if self.room.is_refused(shape) and self.room.reserve(shape, job):
                return

    def serve_everybody(self) -> None:
        """By priority, each by its tenant's order, within what the reservation leaves open to it."""
        turns, room = self._turns(), self.room
        while turns and not self._is_full:
            tenant = turns[0][-1]
            head = self.queues[tenant].first(room.refused)
            if head is None:
                heapq.heappop(turns)
                continue
            shape, job = head
            is_owed = not room.stops_borrowing or self._is_owed(shape, job)
            draft = room.open_to(job, is_owed)
            if self._serve(shape, job, draft):
                heapq.heapreplace(turns, self.standings.turn(tenant))
            elif draft is room.draft or room.is_refused(shape):
                self._refuse(tenant, shape, job)
            else:
                self.queues[tenant].pass_over(self._ends_in_time)

    def _serve(self, shape: Shape, job: Job, draft: Draft | None) -> bool:
        """Places the job whole or not at all, and charges its tenant at once."""
        headroom = self.standings.headroom(job.tenant)
        if not headroom.allows(self.cards.needs(shape).use):
            return False
        spots = self.room.spots_of(job, shape, headroom, draft)
        if spots is None:
            return False
        self.placements.append(self._placement(job, spots))
        self.room.take(job, spots)
        self.standings.charge(job.tenant, self.room.draft.charge(spots))
        self.queues[job.tenant].take(job)
        return True

    def _refuse(self, tenant: str, shape: Shape, job: Job) -> None:
        """Its line has no chance any more, unless it only avoids nodes that others of its line may use."""
        if job.refused_by and not self.room.is_refused(shape):
            self.queues[tenant].pass_over(lambda other: other.refused_by != job.refused_by)
        else:
            self.queues[tenant].refuse()

    @property
    def _is_full(self) -> bool:
        return len(self.placements) >= self.policy.placements_per_cycle

    def _turns(self) -> list[tuple[bool, int, str]]:
        turns = [self.standings.turn(tenant) for tenant in self.queues]
        heapq.heapify(turns)
        return turns

    def _is_owed(self, shape: Shape, job: Job) -> bool:
        held, need = self.standings.held(job.tenant), self.cards.needs(shape).use
        return self.entitlement.covers(job.tenant, held, need, self.room.is_starved(job))

    def _ends_in_time(self, job: Job) -> bool:
        reservation = self.room.reservation
        due_ms = reservation.due_ms if reservation else None
        return due_ms is not None and ends_by(job, self.snapshot.now_ms, due_ms)

    def _has_withdrawn(self, tenant: str) -> bool:
        """Whether it took back a job for which slices were reserved, a short while ago: demand that is not meant
        must not cost others their turn."""
        at_ms = self.snapshot.withdrawn.get(tenant)
        return at_ms is not None and self.snapshot.now_ms - at_ms < 1000 * self.policy.withdrawal_seconds

    def _waited_too_long(self) -> Iterator[tuple[Shape, Job]]:
        """The jobs that may go ahead of everybody, one of each shape, the most urgent and then the oldest first: overdue,
        allowed by their tenant's limit, and able to run here at all, so that a hold dies with its cause (QF-7)."""
        late: Iterable[tuple[Shape, Job]] = (
            (shape, job)
            for tenant in self.snapshot.lines
            for shape, job in overdue(self.snapshot, tenant, self.policy.max_wait_seconds)
            if self.standings.headroom(tenant).allows(self.cards.needs(shape).use)
        )
        seen: set[Shape] = set()
        for shape, job in sorted(
            late, key=lambda pair: (-pair[1].spec.priority, pair[1].queued_at_ms, pair[1].id)
        ):
            if shape not in seen and why_never(job.spec, self.snapshot) is None:
                yield shape, job
            seen.add(shape)

    def _placement(self, job: Job, spots: Sequence[Spot]) -> Placement:
        allocation = Allocation(
            attempt=job.attempt,
            tasks=self.room.draft.placements(spots),
            allocated_at_ms=self.snapshot.now_ms,
            chosen=self.standings.chosen(job.tenant),
            placed=_placed(spots, self.room.draft),
        )
        return Placement(job, allocation)


def _placed(spots: Sequence[Spot], draft: Draft) -> Reason:
    """Why there: what the set costs, and how full the nodes were."""
    nodes = sorted({spot.node for spot in spots})
    numbers = {
        "gpus": sum(len(spot.found.gpus) for spot in spots),
        "nodes": len(nodes),
        "communication_cost": gangs.communication_cost(draft, spots),
        "idle_gpus_before": sum(draft.idle_gpus(node) for node in nodes),
    }
    return Reason(ReasonCode.PLACED, numbers, tuple(nodes))
