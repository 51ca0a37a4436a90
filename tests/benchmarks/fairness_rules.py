"""What a user would pick instead, as rules of the pool: the policies of other schedulers, written from their definitions.

    fifo           oldest first; nobody passes the first
    fifo-backfill  oldest first; who does not fit is passed over
    smallest       fewest GPUs first, then oldest
    drf            the tenant with the least held / quota
    decay-7d, -1d  the tenant with the least use / quota, use halving every 7 days (1 day)
    slurm          1000 x min(age / 7 d, 1) + 10000 x 2^(-(decayed share) / (quota share)) + 500 x GPUs / cluster
    ...-easy       the first that does not fit is reserved GPUs at its earliest start, others go around it (EASY)

Inside a tenant: fewest GPUs, then oldest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import exp, log

from coordinator.simulate.pool import Class, Pool
from coordinator.simulate.trace import UNLIMITED_MS

DAY_MS = 24 * 3600 * 1000


class _Rules(ABC):
    is_strict = False
    max_wait_ms = UNLIMITED_MS

    def __init__(self, reserves: bool = False) -> None:
        self.reserves = reserves

    @abstractmethod
    def order(self, pool: Pool) -> list[Class]:
        """All classes of waiting jobs, in the order in which they are looked at."""

    def head(self, pool: Pool, order: Sequence[Class]) -> Class | None:
        return order[0] if order else None

    def may_pass(self, pool: Pool, cls: Class) -> bool:
        return False


class Fifo(_Rules):
    def __init__(self, is_strict: bool) -> None:
        super().__init__()
        self.is_strict = is_strict

    def order(self, pool: Pool) -> list[Class]:
        return sorted(_classes(pool), key=lambda cls: (pool.oldest(cls), cls))


class Smallest(_Rules):
    def order(self, pool: Pool) -> list[Class]:
        return sorted(_classes(pool), key=lambda cls: (cls[1], pool.oldest(cls), cls))


class Drf(_Rules):
    def order(self, pool: Pool) -> list[Class]:
        return _by_tenant(pool, lambda t: pool.held[t] / pool.quotas_mib[t])


class _Decayed:
    """Each tenant's use, halving every `half_life_ms`."""

    def __init__(self, half_life_ms: int) -> None:
        self._rate = log(2) / half_life_ms
        self._at_ms = 0
        self._sums: list[float] = []
        self._held: list[int] = []

    def sums(self, pool: Pool) -> list[float]:
        """In GPU-milliseconds as they count now."""
        if not self._sums:
            self._sums = [0.0 for _ in pool.tenants]
            self._held = [0 for _ in pool.tenants]
        span_ms = pool.now_ms - self._at_ms
        if span_ms:
            left = exp(-self._rate * span_ms)
            grown = (1 - left) / self._rate
            self._sums = [s * left + held * grown for s, held in zip(self._sums, self._held, strict=True)]
            self._at_ms = pool.now_ms
        self._held = list(pool.held)
        return self._sums


class Decay(_Rules):
    """Ties of those that have used nothing yet go to who holds less, so that a burst does not take everything."""

    def __init__(self, half_life_ms: int) -> None:
        super().__init__()
        self._use = _Decayed(half_life_ms)

    def order(self, pool: Pool) -> list[Class]:
        sums = self.noted(pool)
        return _by_tenant(pool, lambda t: sums[t] / pool.quotas_mib[t])

    def noted(self, pool: Pool) -> list[float]:
        return self._use.sums(pool)


class Slurm(_Rules):
    def __init__(self, reserves: bool, half_life_ms: int = 7 * DAY_MS) -> None:
        super().__init__(reserves)
        self._use = _Decayed(half_life_ms)

    def order(self, pool: Pool) -> list[Class]:
        sums, quotas = self._use.sums(pool), sum(pool.quotas_mib)
        total = sum(sums) or 1.0
        factors = [2 ** -((s / total) / (q / quotas)) for s, q in zip(sums, pool.quotas_mib, strict=True)]

        def priority(cls: Class) -> float:
            age = min((pool.now_ms - pool.oldest(cls)) / (7 * DAY_MS), 1.0)
            return 1000 * age + 10000 * factors[cls[0]] + 500 * pool.sizes[cls[1]] / pool.room.gpus

        return sorted(_classes(pool), key=lambda cls: (-priority(cls), pool.oldest(cls), cls))


def _classes(pool: Pool) -> list[Class]:
    return [(t, n) for t in pool.tenants for n, queue in enumerate(pool.queues[t]) if queue.jobs]


def _by_tenant(pool: Pool, use: Callable[[int], float]) -> list[Class]:
    """Ties of tenants go to the smaller next job, then to the older."""
    heads = {t: _head(pool, t) for t in pool.tenants if pool.waiting[t]}
    tenants = sorted(heads, key=lambda t: (use(t), heads[t][1], pool.oldest(heads[t])))
    return [(t, n) for t in tenants for n, queue in enumerate(pool.queues[t]) if queue.jobs]


def _head(pool: Pool, tenant: int) -> Class:
    return next((tenant, n) for n, queue in enumerate(pool.queues[tenant]) if queue.jobs)


REFERENCES: dict[str, Callable[[], _Rules]] = {
    "fifo": lambda: Fifo(is_strict=True),
    "fifo-backfill": lambda: Fifo(is_strict=False),
    "smallest": Smallest,
    "drf": Drf,
    "drf-easy": lambda: Drf(reserves=True),
    "decay-7d": lambda: Decay(7 * DAY_MS),
    "decay-1d": lambda: Decay(DAY_MS),
    "slurm": lambda: Slurm(reserves=False),
    "slurm-easy": lambda: Slurm(reserves=True),
}
