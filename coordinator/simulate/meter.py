"""What a replay measures while it runs; integrals between events, in GPU-milliseconds.

share error E   integral of sum max(0, s - a) / integral of sum s, from the first to the last moment
lag of a tenant integral of (s - a) so far; the greatest over tenants and time is reported
s: entitled share (weighted max-min of all GPUs by quota, capped by what runs and waits); a: GPUs held
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


class Meter:
    """`note` says what holds from now on, `advance` that time has passed since. `sizes`: GPUs of each job."""

    def __init__(self, sizes: Sequence[float], tenants: int, gpus: float, last_submit_ms: int) -> None:
        self.gpus = gpus
        self.now_ms = 0
        self.short = 0.0
        self.entitled = 0.0
        self.max_lag = 0.0
        self.received = [0.0] * tenants
        self.owed = [0.0] * tenants
        self.used = 0.0
        self.free = 0.0
        self.broken = 0.0
        self.demand = 0.0
        self.demand_at: list[tuple[float, float]] = [(0.0, 0.0)] * len(sizes)
        self.ends_ms: list[int | None] = [None] * len(sizes)
        self.timeline: list[tuple[int, tuple[float, ...]]] = []
        self._sizes = sizes
        self._lags = [0.0] * tenants
        self._in_system = 0.0
        self._held: Sequence[float] = [0.0] * tenants
        self._shares: Sequence[float] = [0.0] * tenants
        self._broken = 0.0
        self._submits_end_ms = last_submit_ms

    def advance(self, now_ms: int) -> None:
        """Up to the last submit, what was used and received counts apart: after it the tail would hide it."""
        span = now_ms - self.now_ms
        inside = max(0, min(now_ms, self._submits_end_ms) - self.now_ms)
        self.demand += self._in_system * span
        for tenant, (held, share) in enumerate(zip(self._held, self._shares, strict=True)):
            lag = share - held
            if lag:
                if lag > 0:
                    self.short += lag * span
                self._lags[tenant] += lag * span
                if self._lags[tenant] > self.max_lag:
                    self.max_lag = self._lags[tenant]
            self.entitled += share * span
            if inside:
                self.received[tenant] += held * inside
                self.owed[tenant] += share * inside
                self.used += held * inside
        if inside:
            self.free += (self.gpus - sum(self._held)) * inside
            self.broken += self._broken * inside
        self.now_ms = now_ms

    def note(self, held: Sequence[float], shares_milli: Sequence[int], broken: float) -> None:
        """`broken`: GPUs that are free on nodes which are partly in use."""
        self._held = tuple(held)
        self._shares = [share / 1000 for share in shares_milli]
        self._broken = broken
        self.timeline.append((self.now_ms, self._held))

    def arrive(self, n: int) -> None:
        self._in_system += self._sizes[n]
        self.demand_at[n] = (self.demand, 0.0)

    def finish(self, n: int) -> None:
        self.demand_at[n] = (self.demand_at[n][0], self.demand)
        self.ends_ms[n] = self.now_ms
        self._in_system -= self._sizes[n]

    def leave(self, n: int) -> None:
        """Withdrawn while it waited."""
        self._in_system -= self._sizes[n]


@frozen
class Outcome:
    """When each job started (None: never), and the measures that were taken on the way."""

    starts_ms: Sequence[int | None]
    meter: Meter
