"""What tenants are entitled to, by hand; and the policy that looks first at who is owed."""

from __future__ import annotations

from fractions import Fraction as F

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import model
from coordinator.fairness import TRILLION, Entitlement, Policy, TenantUse, Totals, debt_first, shares
from coordinator.model import Tenant
from coordinator.shares import BUCKET_MS, ShareLedger, share_weights, water_fill
from coordinator.usage import Use
from tests.builders import GIB, World, job, node, piece, running

CARD = 80 * GIB
SERAI = Policy("serai", debt_first, owed_first=True)


@pytest.mark.parametrize(
    ("capacity", "weights", "demands", "expected"),
    [
        (8, [1, 1, 1], [8, 8, 2], [3, 3, 2]),  # Gandiva_fair's example
        (12, [1, 2], [100, 100], [4, 8]),
        (12, [1, 2], [100, 3], [9, 3]),
        (12, [1, 2], [1, 1], [1, 1]),
        (10, [1, 1, 1], [9, 9, 9], [3, 3, 4]),  # what rounding leaves over goes to the last
        (10, [1, 0], [4, 9], [4, 6]),  # weight 0 gets what is left
        (10, [1, 0], [99, 9], [10, 0]),
        (10, [0, 0], [9, 9], [5, 5]),
        (0, [1, 1], [9, 9], [0, 0]),
        (10, [], [], []),
        (10, [3, 1], [0, 0], [0, 0]),
    ],
)
def test_water_filling_by_hand(capacity, weights, demands, expected):
    assert water_fill(capacity, weights, demands) == expected


@given(
    st.integers(0, 10**6),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10**6)), max_size=12),
)
def test_water_filling_property(capacity, given_tenants):
    """Nothing is dealt out twice or left over, nobody gets more than he wants, and of two that want more the shares
    are as their weights."""
    weights, demands = [w for w, _ in given_tenants], [d for _, d in given_tenants]
    found = water_fill(capacity, weights, demands)
    assert all(0 <= share <= demand for share, demand in zip(found, demands, strict=True))
    assert sum(found) == min(capacity, sum(demands))
    level = [F(s, w) for s, w, d in zip(found, weights, demands, strict=True) if w and s < d - 1]
    assert not level or max(level) - min(level) <= 2
    thirsty = any(s < d - 1 for s, w, d in zip(found, weights, demands, strict=True) if w)
    if thirsty:
        assert all(s == 0 for s, w in zip(found, weights, strict=True) if not w)


def test_weights_are_the_quotas_and_equal_where_nobody_has_one():
    assert share_weights([Tenant("a", 30), Tenant("b", 10), Tenant("c", 10, weight=0)]) == [30, 10, 0]
    assert share_weights([Tenant("a"), Tenant("b"), Tenant("c", weight=0)]) == [1, 1, 0]


def test_the_ledger_of_shares_slides():
    """2 for 10 buckets, then 5; W is ten buckets. Of the oldest bucket the part inside counts."""
    ledger = ShareLedger(10 * BUCKET_MS)
    ledger.set(0, {"a": 2})
    assert ledger.window(BUCKET_MS) == {"a": 2 * BUCKET_MS}
    ledger.set(10 * BUCKET_MS, {"a": 5, "b": 1})
    assert ledger.window(10 * BUCKET_MS) == {"a": 20 * BUCKET_MS}
    assert ledger.window(14 * BUCKET_MS) == {"a": 12 * BUCKET_MS + 20 * BUCKET_MS, "b": 4 * BUCKET_MS}
    half = 29 * BUCKET_MS // 2
    assert ledger.window(half) == {"a": 11 * BUCKET_MS + 45 * BUCKET_MS // 2, "b": 9 * BUCKET_MS // 2}
    ledger.set(half, {})
    assert ledger.window(40 * BUCKET_MS) == {}


@pytest.mark.parametrize(
    ("quota", "held", "integral", "entitled", "expected"),
    [
        (500, 0, 0, 0, F(1)),  # space 1
        (500, 250, 0, 0, F(1, 2)),
        (500, 750, 0, 0, F(-1, 2)),
        (250, 0, 100, 100, F(1)),  # what it was entitled to is no debt
        (250, 0, 600, 100, F(1) - F(500, 10 * 1000)),  # time = 500 / (10 ms x 250/1000 of 4000)
        (250, 0, 100, 600, F(1) + F(500, 10 * 1000)),  # it is owed
        (0, 0, 0, 0, F(0)),  # without a quota: nothing is owed, below all who are
        (0, 250, 0, 0, F(-1, 4)),
    ],
)
def test_debt_first_by_hand(quota, held, integral, entitled, expected):
    """A cluster of 1000 MiB and 4000 thousandths, W = 10 ms."""
    use = TenantUse(quota, held, integral, 1, False, entitled)
    totals = Totals(1000, max(1, integral), 1, 4000, 10)
    assert F(debt_first(SERAI, use, totals), TRILLION) == expected


@pytest.mark.parametrize(
    ("held", "need", "share", "is_owed"),
    [
        (0, 8, 2, True),  # the first job always
        (0, 8, 0, False),  # but nothing of no share
        (4, 2, 5, True),  # half of it is within
        (4, 3, 5, False),
        (6, 1, 5, False),
        (9, 0, 0, True),  # a job without a GPU takes nothing
    ],
)
def test_who_is_owed(held, need, share, is_owed):
    assert SERAI.is_owed(held, need, share) is is_owed


def test_what_nobody_else_wanted_is_no_debt():
    """a had the cluster to itself for an hour, entitled to all of it, since b wanted nothing: both stand equal, where
    `space-time` puts a behind (the sleeper of the fairness study)."""
    w = World(node("n1", gpus=2))
    w.tenant("a", CARD)
    w.tenant("b", CARD)
    w.snapshot()
    w.submit(running("past", "n1", [piece("GPU-n1-0"), piece("GPU-n1-1")]))
    w.snapshot()
    w.now = 3600
    w.end("past")
    found = shares(w.snapshot(), w.policy)
    assert found["a"].time == found["b"].time == 0
    assert found["a"].priority == found["b"].priority == 1


def test_what_was_held_beyond_the_share_is_debt():
    """Two GPUs for an hour while b waited for one of them: a owes half of what it held."""
    w = World(node("n1", gpus=2), window_seconds=7200)
    w.tenant("a", CARD)
    w.tenant("b", CARD)
    w.snapshot()
    w.submit(running("past", "n1", [piece("GPU-n1-0"), piece("GPU-n1-1")]), job("jb", tenant="b"))
    w.snapshot()
    w.now = 3600
    found = shares(w.snapshot(), w.policy)
    # held 2 GPU-hours, entitled to 1: (2 - 1) / (2 h x 1 GPU)
    assert (found["a"].time, found["b"].time) == (F(1, 2), F(-1, 2))
    assert (found["a"].space, found["b"].space) == (F(-1), F(1))


def test_entitlement_is_of_what_is_held_and_wanted_within_the_limit():
    w = World(node("n1"))
    w.tenant("a", CARD)
    w.tenant("b", CARD)
    w.tenant("c", 2 * CARD, limit_memory_mib=CARD)
    w.submit(running("r", "n1", [piece("GPU-n1-0")], tenant="b"))
    wanted = {"a": Use(0, 20 * CARD), "c": Use(0, 20 * CARD)}
    entitlement = Entitlement(w.snapshot(), SERAI, wanted)
    assert [entitlement.share_mib(name) for name in "abc"] == [6 * CARD, CARD, CARD]


def test_what_tenants_were_entitled_to_outlives_a_leader():
    """The next leader reads it from the hours of use, also of a tenant that only waited."""
    w = World(node("n1", gpus=2))
    w.tenant("a", CARD)
    w.tenant("b", CARD)
    w.snapshot()
    w.submit(running("past", "n1", [piece("GPU-n1-0"), piece("GPU-n1-1")]), job("jb", tenant="b"))
    w.snapshot()
    w.now = 2 * 3600
    before = shares(w.snapshot(), w.policy)
    hours = w.cluster.usage_hours(w.now_ms)
    assert {hour.tenant for hour in hours} == {"a", "b"}
    assert w.cluster.usage_hours(w.now_ms) == ()
    after = World(node("n1", gpus=2))
    after.now = w.now
    for event in (
        *(model.TenantSeen(tenant) for tenant in w.cluster.tenants.values()),
        *(model.UsageSeen(hour) for hour in hours),
        model.JobSeen(w.live("past"), 1),
        model.JobSeen(w.cluster.waiting_jobs["jb"], 2),
    ):
        after.see(event)
    found = shares(after.snapshot(), after.policy)
    assert {name: share.time for name, share in found.items()} == {name: s.time for name, s in before.items()}
    assert found["b"].time < 0
    after.now = w.now = 5 * 3600
    later, as_if_one = shares(after.snapshot(), after.policy), shares(w.snapshot(), w.policy)
    assert {n: s.time for n, s in later.items()} == {n: s.time for n, s in as_if_one.items()}
