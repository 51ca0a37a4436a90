"""What each tenant is entitled to: now, and over the window.

The entitled share is weighted max-min (water-filling): capacity is dealt out by weight, and what a tenant does not want
goes to the others, again by weight. All whole numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from attrs import define, field
from msgspec.structs import replace

from coordinator.model import Tenant, UsageHour
from coordinator.usage import UsageLedger, Use

# Shares are taken anew as often as this while demand changes; in between they count as they were.
EVERY_MS = 1000
BUCKET_MS = 5 * 60 * 1000
BUCKETS = 12  # in an hour
# Water levels are compared in steps of 2^-32 of a unit of weight; below that tenants count as equal.
_LEVEL_BITS = 32


def water_fill(capacity: int, weights: Sequence[int], demands: Sequence[int]) -> list[int]:
    """Each one's share of `capacity`, rounded down, at most its demand. Those of weight 0 get what all others leave,
    equally. The sum is the capacity or the sum of demands, whichever is less, but for rounding."""
    shares = [0] * len(weights)
    left = _fill(capacity, [n for n, w in enumerate(weights) if w > 0], weights, demands, shares)
    if left > 0:
        ones = [1] * len(weights)
        _fill(left, [n for n, w in enumerate(weights) if w <= 0], ones, demands, shares)
    return shares


def share_weights(tenants: Sequence[Tenant]) -> list[int]:
    """By quota; equal where nobody has one. A tenant of weight 0 comes after all others."""
    weights = [tenant.quota_memory_mib if tenant.weight > 0 else 0 for tenant in tenants]
    return weights if any(weights) else [1 if tenant.weight > 0 else 0 for tenant in tenants]


def _fill(
    left: int, members: list[int], weights: Sequence[int], demands: Sequence[int], shares: list[int]
) -> int:
    """Deals out to those who are satisfied soonest first; what is left over."""
    asking = [((demands[n] << _LEVEL_BITS) // weights[n], n) for n in members if demands[n] > 0]
    asking.sort()
    weight = sum(weights[n] for _, n in asking)
    for _, n in asking:
        share = left * weights[n] // weight
        demand = demands[n]
        if share > demand:
            share = demand
        shares[n] = share
        left -= share
        weight -= weights[n]
    return left


@define
class _Bucket:
    start_ms: int
    amounts: dict[str, int] = field(factory=dict)


class ShareLedger:
    """The integral of each tenant's entitled share over a sliding window, in share x milliseconds.

    It is kept in buckets of five minutes, so that it costs as much for a busy cluster as for an idle one; of the
    oldest bucket only the part inside the window counts, taken as even. Owned by one `Cluster`."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._rates: dict[str, int] = {}
        self._at_ms: int | None = None
        self._buckets: deque[_Bucket] = deque()
        self._by_start: dict[int, _Bucket] = {}
        self._sums: dict[str, int] = {}
        self._unwritten: set[tuple[str, int]] = set()

    def set(self, now_ms: int, rates: Mapping[str, int]) -> None:
        """From now on the tenants are entitled to `rates`; until now it was what was last set."""
        self._advance(now_ms)
        self._rates = {tenant: rate for tenant, rate in rates.items() if rate}

    def past(self, tenant: str, hour_ms: int, amounts: Sequence[int]) -> None:
        """What an earlier leader wrote of one hour."""
        for number, amount in enumerate(amounts):
            if amount:
                bucket = self._bucket(hour_ms + number * BUCKET_MS)
                bucket.amounts[tenant] = bucket.amounts.get(tenant, 0) + amount
                self._sums[tenant] = self._sums.get(tenant, 0) + amount

    def amounts(self, tenant: str, hour_ms: int) -> tuple[int, ...]:
        starts = range(hour_ms, hour_ms + BUCKETS * BUCKET_MS, BUCKET_MS)
        found = (self._by_start.get(start_ms) for start_ms in starts)
        return tuple(bucket.amounts.get(tenant, 0) if bucket else 0 for bucket in found)

    def changed_hours(self, now_ms: int) -> list[tuple[str, int]]:
        """(tenant, hour) of what has changed since the last call."""
        self._advance(now_ms)
        changed, self._unwritten = sorted(self._unwritten), set()
        return changed

    def _bucket(self, start_ms: int) -> _Bucket:
        bucket = self._by_start.get(start_ms)
        if bucket is None:
            bucket = self._by_start[start_ms] = _Bucket(start_ms)
            if self._buckets and start_ms < self._buckets[-1].start_ms:
                self._buckets = deque(sorted([*self._buckets, bucket], key=lambda one: one.start_ms))
            else:
                self._buckets.append(bucket)
        return bucket

    def window(self, now_ms: int) -> dict[str, int]:
        """Each tenant's integral over [now - window, now]."""
        self._advance(now_ms)
        start_ms = now_ms - self._window_ms
        while self._buckets and self._buckets[0].start_ms + BUCKET_MS <= start_ms:
            gone = self._buckets.popleft()
            del self._by_start[gone.start_ms]
            for tenant, amount in gone.amounts.items():
                self._sums[tenant] -= amount
                if not self._sums[tenant]:
                    del self._sums[tenant]
        if not self._buckets or self._buckets[0].start_ms >= start_ms:
            return dict(self._sums)
        oldest = self._buckets[0]
        past_ms = start_ms - oldest.start_ms
        return {
            tenant: amount - oldest.amounts.get(tenant, 0) * past_ms // BUCKET_MS
            for tenant, amount in self._sums.items()
        }

    def _advance(self, now_ms: int) -> None:
        at_ms = self._at_ms
        self._at_ms = now_ms if at_ms is None else max(at_ms, now_ms)
        if at_ms is None or now_ms <= at_ms or not self._rates:
            return
        at_ms = max(at_ms, now_ms - self._window_ms - BUCKET_MS)
        while at_ms < now_ms:
            start_ms = at_ms - at_ms % BUCKET_MS
            until_ms = min(now_ms, start_ms + BUCKET_MS)
            amounts, sums, span_ms = self._bucket(start_ms).amounts, self._sums, until_ms - at_ms
            hour_ms = start_ms - start_ms % (BUCKETS * BUCKET_MS)
            for tenant, rate in self._rates.items():
                amounts[tenant] = amounts.get(tenant, 0) + rate * span_ms
                sums[tenant] = sums.get(tenant, 0) + rate * span_ms
                self._unwritten.add((tenant, hour_ms))
            at_ms = until_ms


class EntitledShares:
    """What each tenant is entitled to of the cluster's compute as demand changes, and the integral of that. `changed`
    and `want` say that demand is another from now on; `update` takes the shares anew."""

    def __init__(self, window_ms: int) -> None:
        self._ledger = ShareLedger(window_ms)
        self._wanted_milli: dict[str, int] = {}
        self._updated_ms: int | None = None
        self._changed_ms: int | None = None
        self._capacity_milli = 0

    def want(self, tenant: str, by_milli: int, now_ms: int) -> None:
        """The waiting jobs of the tenant ask for so much more."""
        self._wanted_milli[tenant] = self._wanted_milli.get(tenant, 0) + by_milli
        if self._changed_ms is None:
            self._changed_ms = now_ms

    def changed(self, now_ms: int) -> None:
        if self._changed_ms is None:
            self._changed_ms = now_ms

    def is_due(self, now_ms: int) -> bool:
        """Events of one moment are taken in together."""
        return self._changed_ms is not None and now_ms > self._changed_ms and not self._is_recent(now_ms)

    def update(
        self, now_ms: int, capacity_milli: int, held: Mapping[str, Use], tenants: Mapping[str, Tenant]
    ) -> None:
        """Weighted by quota, of what each holds and wants within its limit. Does nothing where nothing changed, and
        shortly after the last time."""
        if self._is_recent(now_ms) or (self._changed_ms is None and capacity_milli == self._capacity_milli):
            return
        self._updated_ms, self._changed_ms, self._capacity_milli = now_ms, None, capacity_milli
        self._wanted_milli = {name: milli for name, milli in self._wanted_milli.items() if milli}
        names = sorted({*self._wanted_milli, *held})
        records = [tenants.get(name) or Tenant(name) for name in names]
        demands = []
        for name, record in zip(names, records, strict=True):
            demand_milli = held[name].compute if name in held else 0
            demand_milli += self._wanted_milli.get(name, 0)
            limit_milli = record.limit_compute_milli
            demands.append(demand_milli if limit_milli is None else min(demand_milli, limit_milli))
        shares = water_fill(capacity_milli, share_weights(records), demands)
        self._ledger.set(now_ms, dict(zip(names, shares, strict=True)))

    def _is_recent(self, now_ms: int) -> bool:
        return self._updated_ms is not None and self._updated_ms < now_ms < self._updated_ms + EVERY_MS

    def window(self, now_ms: int) -> dict[str, int]:
        return self._ledger.window(now_ms)

    def past(self, hour: UsageHour) -> None:
        self._ledger.past(hour.tenant, hour.hour_ms, hour.entitled_milli_ms)

    def hours(self, changed: Sequence[UsageHour], ledger: UsageLedger, now_ms: int) -> tuple[UsageHour, ...]:
        """`changed` and whatever else has changed here, all with what the tenants were entitled to."""
        found = {(hour.tenant, hour.hour_ms): hour for hour in changed}
        for tenant, hour_ms in self._ledger.changed_hours(now_ms):
            if (tenant, hour_ms) not in found:
                found[tenant, hour_ms] = ledger.hour(tenant, hour_ms, now_ms)
        return tuple(
            replace(hour, entitled_milli_ms=self._ledger.amounts(*key)) for key, hour in sorted(found.items())
        )
