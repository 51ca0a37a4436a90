"""Why each waiting job waits, and whose turn it is: planned on the replica's own snapshot, beside the requests.

Any replica can answer, since a plan is a pure function of a snapshot. At most one is computed at a time, in a thread;
an answer for a revision that has just passed is given rather than making a request wait long, and says which one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from attrs import frozen

from coordinator.cluster import Snapshot
from coordinator.cycle import Plan, plan_cycle
from coordinator.fairness import Policy
from coordinator.model import Job
from vgpu.reasons import Reason

_PATIENCE_SECONDS = 1.0
# Shares move with time even when nothing is written.
_FRESH_MS = 5_000


@frozen
class Planned:
    """A plan that is only looked at. `at_ms` is the snapshot's own time."""

    snapshot: Snapshot
    plan: Plan
    at_ms: int

    @property
    def revision(self) -> int:
        return self.snapshot.revision

    @property
    def reasons(self) -> Mapping[str, Reason]:
        return self.plan.waiting


class WaitingReasons:
    """`snapshot` takes one of now; `revision` is the newest that could be taken."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        revision: Callable[[], int],
        policy: Policy,
        clock_ms: Callable[[], int],
    ) -> None:
        self._snapshot = snapshot
        self._revision = revision
        self._policy = policy
        self._clock_ms = clock_ms
        self._newest: Planned | None = None
        self._running: asyncio.Task[Planned] | None = None

    def last(self, job: Job) -> Reason | None:
        """What the newest plan said of the job, where there is one; never computes."""
        return self._newest.reasons.get(job.id) if self._newest is not None else None

    async def now(self) -> Planned:
        """The plan for the revision of now where it can be had soon, else the newest there is."""
        wanted = self._revision()
        newest = self._newest
        if newest is None:
            return await self._at_least(wanted)
        try:
            return await asyncio.wait_for(self._at_least(wanted), _PATIENCE_SECONDS)
        except TimeoutError:
            return self._newest or newest

    async def _at_least(self, revision: int) -> Planned:
        """One that was under way already may be too old: then the next is waited for."""
        while self._newest is None or not self._is_fresh(self._newest, revision):
            if self._running is None or self._running.done():
                self._running = asyncio.create_task(self._compute(), name="waiting-reasons")
            await asyncio.shield(self._running)
        return self._newest

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _is_fresh(self, planned: Planned, revision: int) -> bool:
        return planned.revision >= revision and self._clock_ms() - planned.at_ms < _FRESH_MS

    async def _compute(self) -> Planned:
        at_ms, snapshot = self._clock_ms(), self._snapshot()
        plan = await asyncio.to_thread(plan_cycle, snapshot, self._policy)
        self._newest = Planned(snapshot, plan, at_ms)
        return self._newest
