"""The ledger of use: how much GPU compute and memory each tenant held, exactly, over a sliding window.

Two fronts for each tenant, each an integral since the beginning: the leading one takes in a change at once, the
trailing one when the start of the window has passed it. The integral over the window is their difference: O(1) for a
change and O(tenants) for a reading. Compute is in thousandths of a GPU x milliseconds, memory in MiB x milliseconds.

What the trailing front has yet to take in is summed up by tenant and minute, so that it does not grow with the jobs of
a whole window. That loses nothing once the start of the window has passed the minute: what a window holds is exact where
it starts on a whole minute, and else leaves open what the tenant's changes within that one minute are worth in a minute.
A window of less than an hour, in which a minute is much, is exact everywhere.

Beside it the ledger fills buckets of five minutes, which outlive a leader as `UsageHour` records. The past that was
read from them is exact at bucket bounds and even in between.
"""

from __future__ import annotations

import heapq

from attrs import define, field
from msgspec import Struct

from coordinator.model import UsageHour

BUCKET_MS = 5 * 60 * 1000
BUCKETS = 12
HOUR_MS = BUCKET_MS * BUCKETS
MINUTE_MS = 60 * 1000
_MOST_NEW = 10_000


class Use(Struct, frozen=True, gc=False):
    """Compute and memory: as a rate (thousandths, MiB) or as an integral over time (x milliseconds)."""

    compute: int = 0
    memory: int = 0

    def plus(self, other: Use, times: int = 1) -> Use:
        return Use(self.compute + times * other.compute, self.memory + times * other.memory)


class Headroom(Struct, frozen=True, gc=False):
    """How much more a tenant may hold; None is no limit."""

    memory_mib: int | None = None
    compute_milli: int | None = None

    @property
    def is_unlimited(self) -> bool:
        return self.memory_mib is None and self.compute_milli is None

    def allows(self, use: Use) -> bool:
        memory_ok = self.memory_mib is None or use.memory <= self.memory_mib
        return memory_ok and (self.compute_milli is None or use.compute <= self.compute_milli)


NO_USE = Use()
NO_LIMIT = Headroom()


@define
class _Hour:
    """What was used in each of its buckets."""

    compute: list[int] = field(factory=lambda: [0] * BUCKETS)
    memory: list[int] = field(factory=lambda: [0] * BUCKETS)


@define
class _Account:
    """The integral over the window that ends at t is `base + lead_rate * t - trail_rate * (t - window)`, for compute and
    for memory: each front is a straight line between its changes, also back to a change that comes late."""

    base_compute: int = 0
    base_memory: int = 0
    lead_compute: int = 0
    lead_memory: int = 0
    trail_compute: int = 0
    trail_memory: int = 0
    compute: int = 0
    memory: int = 0
    booked_ms: int = 0
    hours: dict[int, _Hour] = field(factory=dict)
    unwritten: set[int] = field(factory=set)

    def fill(self, from_ms: int, until_ms: int, compute: int, memory: int) -> None:
        """So much was held from then until then."""
        while from_ms < until_ms:
            hour_ms = from_ms - from_ms % HOUR_MS
            number = (from_ms - hour_ms) // BUCKET_MS
            end_ms = min(until_ms, hour_ms + (number + 1) * BUCKET_MS)
            hour = self.hours.get(hour_ms)
            if hour is None:
                hour = self.hours[hour_ms] = _Hour()
            hour.compute[number] += compute * (end_ms - from_ms)
            hour.memory[number] += memory * (end_ms - from_ms)
            self.unwritten.add(hour_ms)
            from_ms = end_ms

    def book(self, until_ms: int) -> None:
        if until_ms > self.booked_ms:
            if self.compute or self.memory:
                self.fill(self.booked_ms, until_ms, self.compute, self.memory)
            self.booked_ms = until_ms


class UsageLedger:
    """Mutable, and owned by one `Cluster`. Times may come out of order. Its length is how many entries it keeps."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._accounts: dict[str, _Account] = {}
        self._step_ms = MINUTE_MS if window_ms >= HOUR_MS else 1
        # By the end of the minute and the tenant what the trailing front will take in: the change of the rates, and of
        # the bases.
        self._minutes: dict[int, dict[str, list[int]]] = {}
        self._ends: list[int] = []  # a heap of those minutes
        # What came since it was last asked: the placements of a cycle are of one moment, and many of one tenant.
        self._new: dict[tuple[str, int], list[int]] = {}

    def __len__(self) -> int:
        self._take_in()
        return sum(len(tenants) for tenants in self._minutes.values())

    def change(self, tenant: str, at_ms: int, rate: Use) -> None:
        """From `at_ms` on the tenant holds `rate` more (negative: less)."""
        sums = self._new.get((tenant, at_ms))
        if sums is None:
            if len(self._new) >= _MOST_NEW:
                self._take_in()  # nobody asks a replica that does not lead
            self._new[tenant, at_ms] = [rate.compute, rate.memory]
        else:
            sums[0] += rate.compute
            sums[1] += rate.memory

    def _take_in(self) -> None:
        for (tenant, at_ms), (compute, memory) in self._new.items():
            account = self._account(tenant)
            account.book(at_ms)
            if at_ms < account.booked_ms:
                account.fill(at_ms, account.booked_ms, compute, memory)
            account.compute += compute
            account.memory += memory
            self._enter(account, tenant, at_ms, compute, memory)
        self._new.clear()

    def past(self, hour: UsageHour) -> None:
        """What an earlier leader wrote. The caller adds nothing that it already covers."""
        self._take_in()
        account = self._account(hour.tenant)
        account.booked_ms = max(account.booked_ms, hour.until_ms)
        empty = (0,) * BUCKETS
        account.hours[hour.hour_ms] = _Hour(
            [*hour.compute_milli_ms, *empty][:BUCKETS], [*hour.memory_mib_ms, *empty][:BUCKETS]
        )
        uses = [Use(c, m) for c, m in zip(hour.compute_milli_ms, hour.memory_mib_ms, strict=False)]
        for number, use in enumerate(uses):
            start_ms = hour.hour_ms + number * BUCKET_MS
            span_ms = min(BUCKET_MS, hour.until_ms - start_ms)
            if span_ms > 0 and use != NO_USE:
                rate = Use(use.compute // span_ms, use.memory // span_ms)
                self._enter(account, hour.tenant, start_ms, rate.compute, rate.memory)
                # What whole numbers leave over comes at the end, so that the bucket's sum stays exact.
                rest, end_ms = use.plus(rate, -span_ms), start_ms + span_ms
                self._enter(account, hour.tenant, end_ms, -rate.compute, -rate.memory, rest)

    def window(self, now_ms: int) -> dict[str, Use]:
        """Each tenant's integral over [now - window, now]; tenants that held nothing in it are left out."""
        start_ms = now_ms - self._window_ms
        self._take_in()
        self._advance(start_ms)
        use = {}
        longest = self._window_ms // HOUR_MS + 3
        for tenant, account in self._accounts.items():
            if len(account.hours) > longest:
                self._forget(account, now_ms)  # nobody takes them from a replica that does not lead
            compute = account.base_compute + account.lead_compute * now_ms - account.trail_compute * start_ms
            memory = account.base_memory + account.lead_memory * now_ms - account.trail_memory * start_ms
            if compute or memory:
                use[tenant] = Use(compute, memory)
        return use

    def _advance(self, start_ms: int) -> None:
        """The trailing fronts to `start_ms`."""
        while self._ends and self._ends[0] <= start_ms:
            for tenant, sums in self._minutes.pop(heapq.heappop(self._ends)).items():
                account = self._accounts[tenant]
                account.trail_compute += sums[0]
                account.trail_memory += sums[1]
                account.base_compute -= sums[2]
                account.base_memory -= sums[3]

    def hours(self, now_ms: int) -> tuple[UsageHour, ...]:
        """The records that have changed since the last call; those that no window needs any more are forgotten."""
        self._take_in()
        changed = []
        for tenant in sorted(self._accounts):
            account = self._accounts[tenant]
            account.book(now_ms)
            for hour_ms in sorted(account.unwritten & account.hours.keys()):
                changed.append(_record(tenant, hour_ms, account))
            account.unwritten.clear()
            self._forget(account, now_ms)
        return tuple(changed)

    def hour(self, tenant: str, hour_ms: int, now_ms: int) -> UsageHour:
        """The record of one hour as it stands, also of one in which nothing was held."""
        self._take_in()
        account = self._accounts.get(tenant) or _Account(booked_ms=now_ms)
        account.hours.setdefault(hour_ms, _Hour())
        return _record(tenant, hour_ms, account)

    def _forget(self, account: _Account, now_ms: int) -> None:
        for hour_ms in [h for h in account.hours if h + HOUR_MS < now_ms - self._window_ms]:
            del account.hours[hour_ms]
            account.unwritten.discard(hour_ms)

    def _enter(
        self, account: _Account, tenant: str, at_ms: int, compute: int, memory: int, lump: Use = NO_USE
    ) -> None:
        """From `at_ms` on so much more was held, and `lump` came on top. The leading front takes it in at once, the
        trailing one at the end of its minute."""
        base_compute = lump.compute - compute * at_ms
        base_memory = lump.memory - memory * at_ms
        account.lead_compute += compute
        account.lead_memory += memory
        account.base_compute += base_compute
        account.base_memory += base_memory
        end_ms = at_ms + -at_ms % self._step_ms
        tenants = self._minutes.get(end_ms)
        if tenants is None:
            tenants = self._minutes[end_ms] = {}
            heapq.heappush(self._ends, end_ms)
        sums = tenants.get(tenant)
        if sums is None:
            sums = tenants[tenant] = [0, 0, 0, 0]
        sums[0] += compute
        sums[1] += memory
        sums[2] += base_compute
        sums[3] += base_memory

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account()
        return account


def _record(tenant: str, hour_ms: int, account: _Account) -> UsageHour:
    hour = account.hours[hour_ms]
    until_ms = min(account.booked_ms, hour_ms + HOUR_MS)
    return UsageHour(tenant, hour_ms, until_ms, tuple(hour.compute), tuple(hour.memory))
