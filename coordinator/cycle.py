"""One cycle: from a frozen snapshot to a frozen plan. This page is the product; everything else serves it.

    1. See what is free, and who waits, in each tenant's own order.
    2. The job that has waited beyond the bounded wait goes first; where it does not fit, the nodes it needs are held.
    3. The tenant with the highest priority has its turn: space it is entitled to, less the time it has used.
    4. Its next job is placed whole or not at all; a shape that did not fit is not asked again in this cycle.
    5. The tenant is charged at once, and the next turn is decided anew.
    6. Until nobody who waits can be placed, or the cycle is full: then the plan is committed and the next one starts.

Capacity only shrinks in a cycle, so "did not fit" stays true to its end. Reasons are found when somebody asks for
them: a hundred thousand waiting jobs of fifty shapes have fifty reasons.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import frozen

from coordinator import gangs
from coordinator.fairness import Policy, Standings
from coordinator.holds import nodes_to_hold
from coordinator.model import Allocation, Job
from coordinator.placement import Draft, Spot, wait_reason
from coordinator.queues import Cards, TenantQueue, overdue
from coordinator.reasoning import Waiting, why_never
from coordinator.snapshot import Shape, Snapshot
from coordinator.usage import Headroom
from vgpu.reasons import Reason, ReasonCode

__all__ = ["Placement", "Plan", "Policy", "plan_cycle", "why_never"]


@frozen
class Placement:
    """A waiting job, as its record stood, and what it is to hold."""

    job: Job
    allocation: Allocation


@frozen(eq=False)
class Plan:
    """`waiting`: a reason for every job that still waits, found when asked for. `held` are the nodes that are kept
    for `held_for`, the job that waited too long."""

    revision: int
    placements: tuple[Placement, ...]
    waiting: Mapping[str, Reason]
    held: frozenset[str] = frozenset()
    held_for: str = ""


def plan_cycle(snapshot: Snapshot, policy: Policy) -> Plan:
    """Pure: the same snapshot gives the same plan."""
    # 1. what is free, who waits
    draft, standings, cards = Draft(snapshot), Standings(snapshot, policy), Cards(snapshot)
    queues = {t: TenantQueue(snapshot, t, cards, policy.max_wait_seconds) for t in snapshot.lines}
    refused: set[Shape] = set()

    # 2. the bounded wait
    placements, held_for = _ahead_of_everybody(draft, standings, cards, policy)
    for placement in placements:
        queues[placement.job.tenant].take(placement.job)

    # 3. the tenants, by priority
    turns = [standings.turn(tenant) for tenant in queues]
    heapq.heapify(turns)
    while turns and len(placements) < policy.placements_per_cycle:
        tenant = turns[0][-1]
        head = queues[tenant].first()
        if head is None:
            heapq.heappop(turns)
            continue
        # 4. its next job, whole or not at all
        shape, job = head
        spots = _spots(shape, draft, standings.headroom(tenant), cards, refused)
        if spots is None:
            queues[tenant].refuse()
            continue
        # 5. charged at once
        placements.append(_place(job, spots, draft, standings))
        queues[tenant].take(job)
        heapq.heapreplace(turns, standings.turn(tenant))

    # 6. everybody else waits, for a reason
    placed = frozenset(placement.job.id for placement in placements)
    waiting = Waiting(snapshot, draft, standings, cards, frozenset(refused), placed, held_for)
    return Plan(snapshot.revision, tuple(placements), waiting, draft.held, held_for[0] if held_for else "")


def _spots(
    shape: Shape, draft: Draft, headroom: Headroom, cards: Cards, refused: set[Shape]
) -> tuple[Spot, ...] | None:
    """Where a job of this shape goes, within what its tenant may still hold. A shape for which there is no room
    whoever asks is refused for the rest of the cycle."""
    if shape in refused or not headroom.allows(cards.needs(shape).use):
        return None
    spots = gangs.place(draft, shape, headroom)
    if spots is None and gangs.place(draft, shape, gangs.NO_LIMIT) is None:
        refused.add(shape)
    return spots


def _ahead_of_everybody(
    draft: Draft, standings: Standings, cards: Cards, policy: Policy
) -> tuple[list[Placement], tuple[str, Reason] | None]:
    """The placement of the job that has waited too long, or that job and why it waits while nodes are held for it."""
    for shape, job in _waited_too_long(draft.snapshot, policy, standings, cards):
        spots = gangs.place(draft, shape, standings.headroom(job.tenant))
        if spots is not None:
            return [_place(job, spots, draft, standings)], None
        nodes = nodes_to_hold(draft, shape)
        if nodes:
            reason = wait_reason(shape, draft)
            draft.hold(nodes)
            return [], (job.id, reason)
    return [], None


def _place(job: Job, spots: Sequence[Spot], draft: Draft, standings: Standings) -> Placement:
    chosen = standings.chosen(job.tenant)
    placed = _placed(spots, draft)
    allocation = Allocation(
        attempt=job.attempt,
        tasks=draft.placements(spots),
        allocated_at_ms=draft.snapshot.now_ms,
        chosen=chosen,
        placed=placed,
    )
    draft.take(spots)
    standings.charge(job.tenant, draft.charge(spots))
    return Placement(job, allocation)


def _placed(spots: Sequence[Spot], draft: Draft) -> Reason:
    """Why there: what the set costs, and how full the nodes were."""
    nodes = sorted({spot.node for spot in spots})
    numbers = {
        "gpus": sum(len(spot.found.gpus) for spot in spots),
        "nodes": len(nodes),
        "communication_cost": gangs.communication_cost(draft, spots),
        "idle_gpus_before": sum(draft.row(node).idle_gpus for node in nodes),
    }
    return Reason(ReasonCode.PLACED, numbers, tuple(nodes))


def _waited_too_long(
    snapshot: Snapshot, policy: Policy, standings: Standings, cards: Cards
) -> Iterator[tuple[Shape, Job]]:
    """The jobs that may go ahead of everybody, one of each shape, the most urgent and then the oldest first: overdue,
    allowed by their tenant's limit, and able to run here at all, so that a hold dies with its cause (QF-7). Only one
    of them is served in a cycle: a cluster full of holds would serve nobody."""
    late: Iterable[tuple[Shape, Job]] = (
        (shape, job)
        for tenant in snapshot.lines
        for shape, job in overdue(snapshot, tenant, policy.max_wait_seconds)
        if standings.headroom(tenant).allows(cards.needs(shape).use)
    )
    seen: set[Shape] = set()
    for shape, job in sorted(
        late, key=lambda pair: (-pair[1].spec.priority, pair[1].queued_at_ms, pair[1].id)
    ):
        if shape not in seen and why_never(job.spec, snapshot) is None:
            yield shape, job
        seen.add(shape)
