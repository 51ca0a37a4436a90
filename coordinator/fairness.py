"""Whose turn it is: each tenant's share in space and in time, its limits, and the policy that ranks tenants.

    space(t)    = (quota_memory_mib(t) - held_memory_mib(t)) / cluster_memory_mib              may be negative
    time(t)     = integral of t's compute over the window / the same integral of all tenants   0 when nothing ran
    priority(t) = space_weight * space(t) - time_weight * time(t) / weight(t)

No floats: inside a cycle all priorities share one denominator, so they are compared as whole numbers, exactly. A
tenant of weight 0 comes after all others and is served when nobody else waits; where all have weight 0 they are
equal (QF-5). Quota may be exceeded while capacity is idle, up to the limit.

A policy is data and one function, `rank`; `POLICIES` names them. `space-time` is the formula above. `serai`, "debt
first", keeps its two terms, but divides both by the tenant's own quota, and counts as debt only what was held beyond
the entitled share, so that using what nobody else wanted costs nothing later:

    space(t)    = 1 - held_memory_mib(t) / quota_memory_mib(t)
    time(t)     = integral of (t's compute - t's entitled share of it) over the window W / (W * t's quota of compute)

Its jobs that are within the entitled share go first, and the first of them that does not fit has the reservation
(`Entitlement`, `coordinator.cycle`). A tenant without a quota is owed nothing: its space is -held / cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from math import lcm
from typing import Protocol

from attrs import frozen
from msgspec import Struct

from coordinator.model import Standing, Tenant
from coordinator.shares import share_weights, water_fill
from coordinator.snapshot import Snapshot
from coordinator.usage import NO_LIMIT, NO_USE, Headroom, Use
from vgpu.reasons import Reason, ReasonCode

MILLION = 1_000_000
TRILLION = 10**12
# A job is starved after so many times the bounded wait. At the first of them it goes ahead of its tenant's other jobs.
STARVED_AFTER = 2


@frozen
class Totals:
    """What shares are shares of, and the common multiple of all weights. `window_ms` and the cluster's compute only
    matter where time is measured against the entitled share."""

    cluster_memory_mib: int
    integral: int
    weights: int
    cluster_compute_milli: int = 1
    window_ms: int = 1


class TenantUse(Struct, gc=False):
    """What one tenant's rank depends on. `weight` is never 0 here; `is_last` says that it was. `entitled` is the
    integral of its entitled share of compute, beside `integral` of what it held. In a cycle what it holds grows."""

    quota_memory_mib: int
    held_memory_mib: int
    integral: int
    weight: int
    is_last: bool
    entitled: int = 0
    held_compute_milli: int = 0
    time: int | None = None  # the term of `debt_first`, once found: it stays while the other one changes


Rank = Callable[["Policy", TenantUse, Totals], int]


class PolicyNumbers(Protocol):
    """What a policy reads of `coordinator.config.FairnessSettings`."""

    @property
    def policy(self) -> str: ...
    @property
    def space_weight(self) -> int: ...
    @property
    def time_weight(self) -> int: ...
    @property
    def max_wait_seconds(self) -> int: ...
    @property
    def round_up_milli(self) -> int: ...
    @property
    def withdrawal_seconds(self) -> int: ...
    @property
    def hold_seconds(self) -> int: ...


class PolicySettings(Protocol):
    @property
    def fairness(self) -> PolicyNumbers: ...
    @property
    def placements_per_cycle(self) -> int: ...


@frozen
class Policy:
    """`rank` gives the priority of a tenant in units of 1 / `unit`. With `owed_first` those who are owed are looked
    at first and one of them may hold the reservation; without, only a job that waited beyond the bounded wait may.
    A job is within its tenant's share if `round_up_milli` thousandths of it are: 500 is the nearest whole job."""

    name: str
    rank: Rank
    space_weight: int = 1
    time_weight: int = 1
    max_wait_seconds: int = 72 * 3600
    placements_per_cycle: int = 500
    owed_first: bool = False
    round_up_milli: int = 500
    withdrawal_seconds: int = 24 * 3600
    hold_seconds: int = 7 * 24 * 3600

    def unit(self, totals: Totals) -> int:
        return TRILLION if self.owed_first else totals.cluster_memory_mib * totals.integral * totals.weights

    def is_owed(self, held: int, need: int, share: int, is_starved: bool = False) -> bool:
        """Whether a job that needs `need` is within the entitled share of a tenant that holds `held`: memory, in any
        unit. The first job of a tenant always is, so that a share below one job is no share of nothing; and one that
        needs none of it. For one that is starved it is enough that its tenant is not above its share, so that no tenant's
        small jobs keep its own large one out for ever."""
        if need <= 0:
            return True
        part = 0 if is_starved else self.round_up_milli
        return share > 0 and (held <= 0 or 1000 * held + part * need <= 1000 * share)


@frozen
class Share:
    """A tenant's standing, exactly, in the terms of the policy. Shares are None while the cluster has no GPU memory:
    unknown, not 0 (FR-5).
    `over_by_memory_mib` is what it holds beyond its quota; `headroom` what it may still get, never negative (QT-3)."""

    tenant: Tenant
    held: Use
    space: Fraction | None
    time: Fraction
    priority: Fraction | None
    over_by_memory_mib: int
    headroom: Headroom


def space_time(policy: Policy, use: TenantUse, totals: Totals) -> int:
    space = (use.quota_memory_mib - use.held_memory_mib) * totals.integral * totals.weights
    time = use.integral * totals.cluster_memory_mib * (totals.weights // use.weight)
    return policy.space_weight * space - policy.time_weight * time


# Numerator and denominator, in no lowest terms: made for each placement, and a `Fraction` is slow to make.
Term = tuple[int, int]


def space_of_cluster(use: TenantUse, totals: Totals) -> Term:
    return use.quota_memory_mib - use.held_memory_mib, totals.cluster_memory_mib


def time_of_all(use: TenantUse, totals: Totals) -> Term:
    return use.integral, totals.integral


def space_of_quota(use: TenantUse, totals: Totals) -> Term:
    """Who has no quota counts against the cluster, and is owed nothing of it."""
    quota_mib = use.quota_memory_mib
    if quota_mib > 0:
        return quota_mib - use.held_memory_mib, quota_mib
    return -use.held_memory_mib, totals.cluster_memory_mib


def time_of_debt(use: TenantUse, totals: Totals) -> Term:
    quota_mib, memory_mib = use.quota_memory_mib, totals.cluster_memory_mib
    base_mib = quota_mib if quota_mib > 0 else memory_mib
    whole = totals.window_ms * base_mib * totals.cluster_compute_milli * use.weight
    return (use.integral - use.entitled) * memory_mib, whole


def debt_first(policy: Policy, use: TenantUse, totals: Totals) -> int:
    """Its two terms in trillionths, each rounded down: no fractions, since this is asked most."""
    if use.time is None:
        debt, whole = time_of_debt(use, totals)
        use.time = TRILLION * debt // whole
    left, base = space_of_quota(use, totals)
    return policy.space_weight * (TRILLION * left // base) - policy.time_weight * use.time


POLICIES: Mapping[str, Rank] = {"space-time": space_time, "serai": debt_first}
OWED_FIRST = frozenset({"serai"})


def policy_from(settings: PolicySettings) -> Policy:
    """The policy that the settings name. Raises KeyError for one that there is not."""
    fairness = settings.fairness
    return Policy(
        fairness.policy,
        POLICIES[fairness.policy],
        fairness.space_weight,
        fairness.time_weight,
        fairness.max_wait_seconds,
        settings.placements_per_cycle,
        fairness.policy in OWED_FIRST,
        fairness.round_up_milli,
        fairness.withdrawal_seconds,
        fairness.hold_seconds,
    )


class Entitlement:
    """What each tenant is entitled to hold now of the cluster's GPU memory, given what all of them hold and want."""

    def __init__(self, snapshot: Snapshot, policy: Policy, wanted: Mapping[str, Use]) -> None:
        """`wanted`: what the waiting jobs of each tenant would hold."""
        self._policy = policy
        held, known = dict(snapshot.held.items()), dict(snapshot.tenants.items())
        names = sorted(held.keys() | wanted.keys())
        records = [known.get(name) or snapshot.tenant(name) for name in names]
        demands = [held.get(name, NO_USE).memory + wanted.get(name, NO_USE).memory for name in names]
        for place, record in enumerate(records):
            if record.limit_memory_mib is not None:
                demands[place] = min(demands[place], record.limit_memory_mib)
        shares = water_fill(snapshot.cluster_memory_mib, share_weights(records), demands)
        self._shares = dict(zip(names, shares, strict=True))

    def share_mib(self, tenant: str) -> int:
        return self._shares.get(tenant, 0)

    def covers(self, tenant: str, held_mib: int, need_mib: int, is_starved: bool) -> bool:
        return self._policy.is_owed(held_mib, need_mib, self.share_mib(tenant), is_starved)


class Standings:
    """The tenants' standing in one cycle. `charge` counts a placement at once, so that a burst gains nothing."""

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        self._policy = policy
        known, held = dict(snapshot.tenants.items()), dict(snapshot.held.items())
        names = known.keys() | held.keys() | snapshot.lines.keys() | snapshot.usage.keys()
        self._tenants = {name: known.get(name) or snapshot.tenant(name) for name in sorted(names)}
        weights = {name: max(0, tenant.weight) for name, tenant in self._tenants.items()}
        all_last = not any(weights.values())
        memory_mib = snapshot.cluster_memory_mib
        self._has_gpus = memory_mib > 0
        self._totals = Totals(
            max(1, memory_mib),
            max(1, sum(use.compute for use in snapshot.usage.values())),
            lcm(*(weight or 1 for weight in weights.values())),
            max(1, snapshot.cluster_compute_milli),
            1000 * snapshot.settings.fairness.window_seconds,
        )
        self._unit = policy.unit(self._totals)
        self._space = space_of_quota if policy.owed_first else space_of_cluster
        self._time = time_of_debt if policy.owed_first else time_of_all
        self._use: dict[str, TenantUse] = {}
        for name, tenant in self._tenants.items():
            holds = held.get(name, NO_USE)
            self._use[name] = TenantUse(
                tenant.quota_memory_mib,
                holds.memory,
                snapshot.usage.get(name, NO_USE).compute,
                weights[name] or 1,
                not all_last and not weights[name],
                snapshot.entitled.get(name, 0),
                holds.compute,
            )
        self._unlimited = {
            name
            for name, tenant in self._tenants.items()
            if tenant.limit_memory_mib is None and tenant.limit_compute_milli is None
        }
        # By tenant, once asked for: its turn, until it is charged; and the share in time, which stays.
        self._turns: dict[str, tuple[bool, int, str]] = {}
        self._time_millionths: dict[str, int] = {}

    def turn(self, tenant: str) -> tuple[bool, int, str]:
        """Sort key: the tenant with the lowest goes first. Ties end in the name."""
        known = self._turns.get(tenant)
        if known is None:
            use = self._use[tenant]
            priority = self._policy.rank(self._policy, use, self._totals)
            known = self._turns[tenant] = use.is_last, -priority, tenant
        return known

    def charge(self, tenant: str, use: Use) -> None:
        self._turns.pop(tenant, None)
        known = self._use[tenant]
        known.held_memory_mib += use.memory
        known.held_compute_milli += use.compute

    def held(self, tenant: str) -> Use:
        use = self._use[tenant]
        return Use(use.held_compute_milli, use.held_memory_mib)

    def held_mib(self, tenant: str) -> int:
        return self._use[tenant].held_memory_mib

    def headroom(self, tenant: str) -> Headroom:
        if tenant in self._unlimited:
            return NO_LIMIT
        return headroom(self._tenants[tenant], self.held(tenant))

    def share(self, tenant: str) -> Share:
        is_known = self._has_gpus
        record, held, use = self._tenants[tenant], self.held(tenant), self._use[tenant]
        space, time = self._space(use, self._totals), self._time(use, self._totals)
        return Share(
            tenant=record,
            held=held,
            space=Fraction(*space) if is_known else None,
            time=Fraction(*time),
            priority=Fraction(-self.turn(tenant)[1], self._unit) if is_known else None,
            over_by_memory_mib=max(0, held.memory - record.quota_memory_mib),
            headroom=headroom(record, held),
        )

    def standing(self, tenant: str) -> Standing:
        """Why a job of this tenant is next."""
        time_millionths = self._time_millionths.get(tenant)
        if time_millionths is None:
            time = self._time(self._use[tenant], self._totals)
            time_millionths = self._time_millionths[tenant] = nearest_millionths(*time)
        space_millionths = priority_millionths = 0
        if self._has_gpus:
            space_millionths = nearest_millionths(*self._space(self._use[tenant], self._totals))
            priority_millionths = nearest_millionths(-self.turn(tenant)[1], self._unit)
        return Standing(space_millionths, time_millionths, priority_millionths)

    def tenants(self) -> Iterable[str]:
        return self._tenants


def shares(snapshot: Snapshot, policy: Policy) -> Mapping[str, Share]:
    """Every tenant's standing, in the order of their turns."""
    standings = Standings(snapshot, policy)
    return {name: standings.share(name) for name in sorted(standings.tenants(), key=standings.turn)}


def headroom(tenant: Tenant, held: Use) -> Headroom:
    memory, compute = tenant.limit_memory_mib, tenant.limit_compute_milli
    return Headroom(
        None if memory is None else max(0, memory - held.memory),
        None if compute is None else max(0, compute - held.compute),
    )


def over_limit(tenant: Tenant, held: Use, need: Use) -> Reason:
    """Why a job that would hold `need` must wait for its own tenant's jobs."""
    numbers = {
        "needed_memory_mib": need.memory,
        "needed_compute_milli": need.compute,
        "held_memory_mib": held.memory,
        "held_compute_milli": held.compute,
    }
    if tenant.limit_memory_mib is not None:
        numbers["limit_memory_mib"] = tenant.limit_memory_mib
    if tenant.limit_compute_milli is not None:
        numbers["limit_compute_milli"] = tenant.limit_compute_milli
    return Reason(ReasonCode.OVER_LIMIT, numbers, (tenant.name,))


def millionths(share: Fraction) -> int:
    """Rounded to the nearest, halves to even; as `round(share * MILLION)`, for a third of its price."""
    return nearest_millionths(share.numerator, share.denominator)


def nearest_millionths(numerator: int, denominator: int) -> int:
    whole, rest = divmod(numerator * MILLION, denominator)
    rest *= 2
    return whole if rest < denominator else whole + (rest > denominator or whole % 2)
