"""Why each waiting job waits, and in which order they stand: planned on the replica's own snapshot.

Any replica can answer, since a plan is a pure function of a snapshot. At most one is computed at a time, in a thread;
an answer for a revision that has just passed is given rather than making a request wait long, and says which one.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain

from attrs import define, field

from coordinator.cluster import Snapshot
from coordinator.cycle import Plan, plan_cycle
from coordinator.fairness import Policy, Standings
from coordinator.guard import is_marked, planned, reason_of, without
from coordinator.lineup import Lineups
from coordinator.model import Job
from coordinator.queues import TenantQueue, is_ready
from vgpu.reasons import Reason

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 1.0
# Shares move with time even when nothing is written.
_FRESH_MS = 5_000
_OLD_MS = 60_000
_KEPT = 8


def waiting_order(snapshot: Snapshot, policy: Policy, first: str = "") -> Iterator[Job]:
    """The waiting jobs in the order in which they would get slices if all of them fitted: the tenant whose turn it is
    gives its next job and is charged for it. The job that nodes are held for (`first`) leads; those in a back-off
    come last. Each step costs the logarithm of the tenants and lines, so that a page of a long queue is cheap."""
    standings, lineup = Standings(snapshot, policy), Lineups().of(snapshot)
    queues = {t: TenantQueue(snapshot, t, lineup, policy.max_wait_seconds) for t in snapshot.lines}
    ahead = snapshot.waiting_jobs.get(first)
    if ahead is not None:
        queues[ahead.tenant].take(ahead)
        yield ahead
    turns = [standings.turn(tenant) for tenant in queues]
    heapq.heapify(turns)
    while turns:
        tenant = turns[0][-1]
        head = queues[tenant].first()
        if head is None:
            heapq.heappop(turns)
            continue
        line, job = head
        queues[tenant].take(job)
        standings.charge(tenant, line.use)
        heapq.heapreplace(turns, standings.turn(tenant))
        yield job
    resting = [job for job in snapshot.waiting if not is_ready(job, snapshot.now_ms) and job.id != first]
    yield from sorted(resting, key=lambda job: (job.not_before_ms, job.id))


def _say_failure(task: asyncio.Task[None]) -> None:
    """Nobody may be waiting for it."""
    if not task.cancelled() and task.exception() is not None:
        logger.error("no plan for the reasons of waiting jobs", exc_info=task.exception())


@define(eq=False)
class Planned:
    """A plan that is only looked at, and as much of the order as was asked for."""

    snapshot: Snapshot
    plan: Plan
    _rest: Iterator[Job]
    _order: list[Job] = field(factory=list)

    @property
    def revision(self) -> int:
        return self.snapshot.revision

    def reason(self, id: str) -> Reason | None:
        """None for a job that the plan knows nothing of: it was placed, or planning failed on it."""
        try:
            return self.plan.waiting.get(id)
        except Exception as error:
            # Reasons are found when asked for, and one that cannot be must not hide the others.
            logger.exception("no reason for job=%s", id)
            return reason_of(error)

    def from_position(self, position: int) -> Iterator[tuple[int, Job]]:
        """(position, job) from there on; positions count from 1."""
        while True:
            if len(self._order) < position:
                job = next(self._rest, None)
                if job is None:
                    return
                self._order.append(job)
                continue
            yield position, self._order[position - 1]
            position += 1


class WaitingReasons:
    """`snapshot` takes one of now; `revision` is the newest that could be taken."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        revision: Callable[[], int],
        policy: Policy,
        clock_ms: Callable[[], int],
    ) -> None:
        self.policy = policy
        self._snapshot = snapshot
        self._revision = revision
        self._clock_ms = clock_ms
        self._newest: Planned | None = None
        self._running: asyncio.Task[None] | None = None
        self._kept: OrderedDict[tuple[int, int], Planned] = OrderedDict()

    def last(self, job: Job) -> Reason | None:
        """What the newest plan says of the job, if it is not old; never waits for a new one, but has it made, so that
        whoever asks again gets it."""
        newest, now_ms = self._newest, self._clock_ms()
        if newest is None or now_ms - newest.snapshot.now_ms >= _FRESH_MS:
            self._start()
        if newest is None or now_ms - newest.snapshot.now_ms >= _OLD_MS:
            return None
        return newest.reason(job.id)

    async def now(self) -> Planned:
        """The plan for the revision of now where it can be had soon, else the newest there is."""
        wanted = self._revision()
        newest = self._newest
        if newest is None:
            return await self._at_least(wanted)
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                return await self._at_least(wanted)
        except TimeoutError:
            return self._newest or newest

    def keep(self, planned: Planned) -> tuple[int, int]:
        """For the following pages of a list: its name, under which `kept` finds it for a while."""
        name = (planned.revision, planned.snapshot.now_ms)
        self._kept[name] = planned
        self._kept.move_to_end(name)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return name

    def kept(self, name: tuple[int, int]) -> Planned | None:
        return self._kept.get(name)

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _at_least(self, revision: int) -> Planned:
        """One that was under way already may be too old: then the next is waited for."""
        while self._newest is None or not self._is_fresh(self._newest, revision):
            await asyncio.shield(self._start())
        return self._newest

    def _start(self) -> asyncio.Task[None]:
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._compute(), name="waiting-reasons")
            self._running.add_done_callback(_say_failure)
        return self._running

    def _is_fresh(self, planned: Planned, revision: int) -> bool:
        return planned.revision >= revision and self._clock_ms() - planned.snapshot.now_ms < _FRESH_MS

    async def _compute(self) -> None:
        """Jobs that the leader has set aside are left out, and those on which planning fails here: they come last, with
        the reason that stands in their record."""
        snapshot = self._snapshot()
        marked = [job.id for job in snapshot.waiting if is_marked(job)]
        asked = without(snapshot, marked)
        plan, at_fault = await asyncio.to_thread(planned, asked, lambda s: plan_cycle(s, self.policy))
        for id, error in at_fault.items():
            logger.error("planning fails on job=%s", id, exc_info=error)
        order = waiting_order(without(asked, at_fault), self.policy, plan.held_for)
        last = (snapshot.waiting_jobs[id] for id in sorted({*marked, *at_fault}))
        self._newest = Planned(snapshot, plan, chain(order, last))
