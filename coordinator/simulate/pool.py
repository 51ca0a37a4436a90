"""A replay of jobs of whole GPUs, fast enough for a year of a cluster: equal jobs stand in one class, and only the
classes are looked at.

The policies are those of `coordinator.fairness`, called with the same figures as a cycle calls them; what is simpler here
is the room (`coordinator.simulate.rooms`). Events are arrivals and departures; at each, jobs are started one at a time
until nothing more may start, and the tenant is charged before the next is chosen. Nothing is preempted or moved.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import define, field

from coordinator.fairness import STARVED_AFTER, Policy, TenantUse, Totals
from coordinator.shares import ShareLedger, water_fill
from coordinator.simulate.meter import Meter, Outcome
from coordinator.simulate.rooms import Place, Room
from coordinator.simulate.trace import UNLIMITED_MS, Trace

MILLI = 1000
GPU_MIB = 80 * 1024
# A search for a job that ends in time looks at so many of a class.
BACKFILL_DEPTH = 500

# A class of equal jobs: (tenant, size), both by their number.
Class = tuple[int, int]


class Rules(Protocol):
    """Which class is next. `reserves`: the first of them that does not fit gets a reservation. `is_strict`: nobody
    passes a job that does not fit."""

    reserves: bool
    is_strict: bool
    max_wait_ms: int

    def order(self, pool: Pool) -> list[Class]:
        """The classes with waiting jobs, best first."""
        ...

    def head(self, pool: Pool, order: Sequence[Class]) -> Class | None:
        """Who may have the reservation."""
        ...

    def may_pass(self, pool: Pool, cls: Class) -> bool:
        """Whether it may start while somebody has a reservation of which nobody knows when it ends."""
        ...


@define
class _Queue:
    """The waiting jobs of a class, oldest first. No job of it runs shorter than `shortest_ms`."""

    jobs: list[int] = field(factory=list)
    shortest_ms: int = UNLIMITED_MS


class Pool:
    """`quotas_mib` by tenant number."""

    def __init__(
        self,
        trace: Trace,
        room: Room,
        quotas_mib: Sequence[int],
        rules: Rules,
        window_ms: int,
    ) -> None:
        self.trace = trace
        self.room = room
        self.quotas_mib = quotas_mib
        self.rules = rules
        self.now_ms = 0
        tenants = len(trace.tenants)
        self.tenants = range(tenants)
        self.sizes = sorted({job.gpus for job in trace.jobs})
        self.queues = [[_Queue() for _ in self.sizes] for _ in self.tenants]
        self.held = [0] * tenants
        self.waiting = [0] * tenants
        self.shares_milli = [0] * tenants
        self.barred_ms = [-UNLIMITED_MS] * tenants
        self.window_ms = window_ms
        self._past = _Held(tenants, window_ms)
        self._ledger = ShareLedger(window_ms)
        self._terms: tuple[list[int], list[int]] | None = None
        self._size = {size: n for n, size in enumerate(self.sizes)}
        self._places: dict[int, Place] = {}
        self._ends: list[tuple[int, int]] = []
        self._starts: list[int | None] = [None] * len(trace.jobs)
        self._gone: set[int] = set()
        self._reserved: int | None = None
        self._meter = Meter([job.size for job in trace.jobs], tenants, room.gpus, trace.last_submit_ms)

    def run(self, tick: Callable[[int], None] | None = None) -> Outcome:
        """`tick` is told how many jobs have come, now and then."""
        jobs, arrived, count = self.trace.jobs, 0, len(self.trace.jobs)
        leaves = sorted((job.withdrawn_ms, n) for n, job in enumerate(jobs) if job.withdrawn_ms is not None)
        left = 0
        while arrived < count or self._ends:
            times = [jobs[arrived].submit_ms] if arrived < count else []
            times += [self._ends[0][0]] if self._ends else []
            times += [leaves[left][0]] if left < len(leaves) else []
            self._advance(min(times))
            while self._ends and self._ends[0][0] <= self.now_ms:
                self._end(heapq.heappop(self._ends)[1])
            while left < len(leaves) and leaves[left][0] <= self.now_ms:
                self._withdraw(leaves[left][1])
                left += 1
            while arrived < count and jobs[arrived].submit_ms <= self.now_ms:
                self._arrive(arrived)
                arrived += 1
            self._share()
            self._decide()
            self._meter.note(self.held, self.shares_milli, self.room.broken)
            if tick is not None and arrived % 256 == 0:
                tick(arrived)
        return Outcome(self._starts, self._meter)

    def integrals(self) -> tuple[list[int], list[int]]:
        """(held, entitled) of each tenant over the window, in thousandths x milliseconds."""
        if self._terms is None:
            entitled = self._ledger.window(self.now_ms)
            held = [MILLI * amount for amount in self._past.window(self.now_ms, self.held)]
            self._terms = held, [entitled.get(name, 0) for name in self.trace.tenants]
        return self._terms

    def oldest(self, cls: Class) -> int:
        """When the first job of a class came."""
        return self.trace.jobs[self.queues[cls[0]][cls[1]].jobs[0]].submit_ms

    # --- events ---

    def _advance(self, now_ms: int) -> None:
        self._meter.advance(now_ms)
        self.now_ms = now_ms
        self._terms = None

    def _arrive(self, n: int) -> None:
        job = self.trace.jobs[n]
        if not self.room.can_ever(job.gpus) or n in self._gone:
            return
        queue = self.queues[job.tenant][self._size[job.gpus]]
        queue.jobs.append(n)
        queue.shortest_ms = min(queue.shortest_ms, job.limit_ms)
        self.waiting[job.tenant] += job.gpus
        self._meter.arrive(n)

    def _end(self, n: int) -> None:
        job = self.trace.jobs[n]
        start_ms = self._starts[n]
        assert start_ms is not None
        self._past.change(self.now_ms, job.tenant, self.held[job.tenant], -job.gpus)
        self.held[job.tenant] -= job.gpus
        self.room.give(job.gpus, start_ms + job.limit_ms, self._places.pop(n))
        self._meter.finish(n)

    def _withdraw(self, n: int) -> None:
        """Its user takes back a job that waits; one that runs goes on."""
        job = self.trace.jobs[n]
        if self._starts[n] is not None:
            return
        queue = self.queues[job.tenant][self._size[job.gpus]]
        if n not in queue.jobs:
            self._gone.add(n)
            return
        queue.jobs.remove(n)
        self.waiting[job.tenant] -= job.gpus
        self._meter.leave(n)
        if n == self._reserved:
            self.barred_ms[job.tenant] = self.now_ms

    def _share(self) -> None:
        demands = [MILLI * (held + wait) for held, wait in zip(self.held, self.waiting, strict=True)]
        self.shares_milli = water_fill(MILLI * self.room.gpus, self.quotas_mib, demands)
        self._ledger.set(self.now_ms, dict(zip(self.trace.tenants, self.shares_milli, strict=True)))

    # --- decisions ---

    def _decide(self) -> None:
        room, rules = self.room, self.rules
        room.drop()
        self._reserved = None
        while True:
            least = min(
                (s for t in self.queues for q, s in zip(t, self.sizes, strict=True) if q.jobs), default=0
            )
            if not least or not (room.fits(least) or rules.reserves):
                return
            order = rules.order(self)
            if rules.reserves and room.due_ms is None:
                head = rules.head(self, order)
                if head is not None and room.fits(self.sizes[head[1]]):
                    self._start(head, 0, False)
                    continue
                if head is not None:
                    self._reserve(head)
            if not room.fits(least) or not self._start_first(order[:1] if rules.is_strict else order):
                return

    def _reserve(self, head: Class) -> None:
        self._reserved = self.queues[head[0]][head[1]].jobs[0]
        self.room.reserve(self.sizes[head[1]], self.now_ms)

    def _start_first(self, order: Sequence[Class]) -> bool:
        """Starts the first job that may."""
        room, due_ms = self.room, self.room.due_ms
        for cls in order:
            size, queue = self.sizes[cls[1]], self.queues[cls[0]][cls[1]]
            if not room.fits(size):
                continue
            if due_ms is None:
                self._start(cls, 0, False)
                return True
            if due_ms >= UNLIMITED_MS:
                late = self._reserved_is_late
                if self.rules.may_pass(self, cls) and (not late or room.fits_beside(size)):
                    self._start(cls, 0, late)
                    return True
                continue
            place = self._first_in_time(queue, due_ms - self.now_ms, room.fits_beside(size))
            if place is not None:
                is_short = self.trace.jobs[queue.jobs[place]].limit_ms <= due_ms - self.now_ms
                self._start(cls, place, not is_short)
                return True
        return False

    @property
    def _reserved_is_late(self) -> bool:
        """Those who are owed keep off what is reserved only for a job that has waited beyond the bounded wait."""
        n = self._reserved
        return n is not None and self.now_ms - self.trace.jobs[n].submit_ms >= self.rules.max_wait_ms

    def _first_in_time(self, queue: _Queue, slack_ms: int, fits_beside: bool) -> int | None:
        """The place in the queue of the first job that ends in time, or of the first if it need not."""
        if fits_beside:
            return 0
        if queue.shortest_ms > slack_ms:
            return None
        jobs, shortest_ms = self.trace.jobs, UNLIMITED_MS
        for place, n in enumerate(queue.jobs[:BACKFILL_DEPTH]):
            if jobs[n].limit_ms <= slack_ms:
                return place
            shortest_ms = min(shortest_ms, jobs[n].limit_ms)
        queue.shortest_ms = shortest_ms
        return None

    def _start(self, cls: Class, place: int, is_beside: bool) -> None:
        n = self.queues[cls[0]][cls[1]].jobs.pop(place)
        job = self.trace.jobs[n]
        self._places[n] = self.room.take(job.gpus, self.now_ms + job.limit_ms, is_beside)
        self._starts[n] = self.now_ms
        heapq.heappush(self._ends, (self.now_ms + job.duration_ms, n))
        self._past.change(self.now_ms, job.tenant, self.held[job.tenant], job.gpus)
        self.held[job.tenant] += job.gpus
        self.waiting[job.tenant] -= job.gpus


class _Held:
    """The integral of what each tenant held over the window, exactly: what it was from the start of the replay, less
    what it was up to the start of the window."""

    def __init__(self, tenants: int, window_ms: int) -> None:
        self._window_ms = window_ms
        self._lead = [(0, 0)] * tenants  # (integral, at)
        self._trail = [(0, 0, 0)] * tenants  # (integral, at, rate)
        self._log: deque[tuple[int, int, int]] = deque()

    def change(self, now_ms: int, tenant: int, rate: int, by: int) -> None:
        """`rate` is what it held until now."""
        integral, at_ms = self._lead[tenant]
        self._lead[tenant] = integral + rate * (now_ms - at_ms), now_ms
        self._log.append((now_ms, tenant, by))

    def window(self, now_ms: int, rates: Sequence[int]) -> list[int]:
        start_ms = now_ms - self._window_ms
        while self._log and self._log[0][0] <= start_ms:
            at_ms, tenant, by = self._log.popleft()
            integral, since_ms, rate = self._trail[tenant]
            self._trail[tenant] = integral + rate * (at_ms - since_ms), at_ms, rate + by
        found = []
        for (lead, lead_ms), (trail, trail_ms, trail_rate), rate in zip(
            self._lead, self._trail, rates, strict=True
        ):
            past = trail + trail_rate * (start_ms - trail_ms) if start_ms > trail_ms else trail
            found.append(lead + rate * (now_ms - lead_ms) - past)
        return found


class PolicyRules:
    """A policy of `coordinator.fairness` in a pool."""

    is_strict = False

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.reserves = policy.owed_first
        self.max_wait_ms = 1000 * policy.max_wait_seconds

    def order(self, pool: Pool) -> list[Class]:
        held, entitled = pool.integrals()
        gpus, policy = pool.room.gpus, self._policy
        totals = Totals(gpus * GPU_MIB, max(1, sum(held)), 1, MILLI * gpus, pool.window_ms)
        turns = []
        for tenant in pool.tenants:
            if pool.waiting[tenant]:
                quota_mib, held_mib = pool.quotas_mib[tenant], GPU_MIB * pool.held[tenant]
                use = TenantUse(quota_mib, held_mib, held[tenant], 1, False, entitled[tenant])
                turns.append((-policy.rank(policy, use, totals), pool.trace.tenants[tenant], tenant))
        turns.sort()
        return [cls for *_, tenant in turns for cls in self._inside(pool, tenant)]

    def head(self, pool: Pool, order: Sequence[Class]) -> Class | None:
        """The job that is starved longest, of a tenant not above its share; else the first of the first tenant that is
        owed it."""
        starved = [cls for cls in order if self._is_starved(pool, cls) and self.may_pass(pool, cls)]
        if starved:
            return min(starved, key=pool.oldest)
        seen: set[int] = set()
        for cls in order:
            if cls[0] in seen:
                continue
            seen.add(cls[0])
            barred = pool.now_ms - pool.barred_ms[cls[0]] < 1000 * self._policy.withdrawal_seconds
            if self.may_pass(pool, cls) and not (barred and not pool.room.fits(pool.sizes[cls[1]])):
                return cls
        return None

    def may_pass(self, pool: Pool, cls: Class) -> bool:
        tenant, size = cls[0], MILLI * pool.sizes[cls[1]]
        share = pool.shares_milli[tenant]
        return self._policy.is_owed(MILLI * pool.held[tenant], size, share, self._is_starved(pool, cls))

    def _is_starved(self, pool: Pool, cls: Class) -> bool:
        return pool.now_ms - pool.oldest(cls) >= STARVED_AFTER * self.max_wait_ms

    def _inside(self, pool: Pool, tenant: int) -> list[Class]:
        """Who waited too long first, by age; then the smallest."""
        classes = [(tenant, n) for n, queue in enumerate(pool.queues[tenant]) if queue.jobs]
        bound_ms = pool.now_ms - self.max_wait_ms
        late = [cls for cls in classes if pool.oldest(cls) <= bound_ms]
        late.sort(key=pool.oldest)
        return late + [cls for cls in classes if cls not in late] if late else classes
