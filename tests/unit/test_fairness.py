"""Shares and priorities by hand-computed tables; limits and headroom."""

from __future__ import annotations

from fractions import Fraction as F

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from coordinator import model
from coordinator.fairness import (
    POLICIES,
    Policy,
    Standings,
    headroom,
    millionths,
    over_limit,
    policy_from,
    shares,
    space_time,
)
from coordinator.model import Standing, Tenant
from coordinator.snapshot import Snapshot
from coordinator.usage import Headroom, Use
from tests.builders import GIB, World, node, piece, running, settings
from vgpu.reasons import ReasonCode

POLICY = Policy("space-time", space_time)


def snapshot(
    cluster: int = 1000, held: dict[str, int] | None = None, used: dict[str, int] | None = None, **quotas: int
) -> Snapshot:
    """A cluster of so much memory on one GPU, tenants with these quotas, what they hold and have used."""
    w = World(node("n1", gpus=1, memory=cluster) if cluster else node("n1", gpus=0))
    for name, quota in quotas.items():
        w.tenant(name, quota)
    return evolve(
        w.snapshot(),
        held={name: Use(0, memory) for name, memory in (held or {}).items()},
        usage={name: Use(compute, 0) for name, compute in (used or {}).items()},
    )


@pytest.mark.parametrize(
    ("held", "used", "expected"),
    [
        # nothing ran, nothing held: space is the quota's part, time is 0
        ({}, {}, {"a": (F(1, 2), F(0), F(1, 2)), "b": (F(1, 4), F(0), F(1, 4))}),
        # a holds its quota and all of the past is a's
        ({"a": 500}, {"a": 7}, {"b": (F(1, 4), F(0), F(1, 4)), "a": (F(0), F(1), F(-1))}),
        # negative space: b borrowed 350 beyond its 250; the past is shared 3:1
        (
            {"b": 600},
            {"a": 300, "b": 100},
            {"a": (F(1, 2), F(3, 4), F(-1, 4)), "b": (F(-35, 100), F(1, 4), F(-6, 10))},
        ),
        # time outweighs space: a is entitled to more, but b has not run at all
        ({}, {"a": 1}, {"b": (F(1, 4), F(0), F(1, 4)), "a": (F(1, 2), F(1), F(-1, 2))}),
    ],
)
def test_space_time_and_priority(held, used, expected):
    found = shares(snapshot(1000, held, used, a=500, b=250), POLICY)
    assert {name: (s.space, s.time, s.priority) for name, s in found.items()} == expected
    assert list(found) == list(expected), "in the order of turns"


def test_the_weights_of_the_formula_are_settings():
    only_time = Policy("space-time", space_time, space_weight=0)
    only_space = Policy("space-time", space_time, time_weight=0)
    snap = snapshot(1000, {"a": 100}, {"b": 1}, a=500, b=250)
    assert list(shares(snap, only_time)) == ["a", "b"]
    assert shares(snap, only_space)["b"].priority == F(1, 4)
    assert shares(snap, Policy("space-time", space_time, space_weight=3, time_weight=2))["b"].priority == F(
        -5, 4
    )


def test_equal_priorities_end_in_the_name():
    assert list(shares(snapshot(c=100, a=100, b=100), POLICY)) == ["a", "b", "c"]


def test_a_placement_is_charged_before_the_next_turn():
    standings = Standings(snapshot(1000, a=300, b=250), POLICY)
    assert min(["a", "b"], key=standings.turn) == "a"
    standings.charge("a", Use(1000, 100))
    assert min(["a", "b"], key=standings.turn) == "b"
    assert standings.share("a").space == F(200, 1000)


def with_weights(used: dict[str, int], **weights: int) -> Snapshot:
    snap = snapshot(1000, None, used, **dict.fromkeys(weights, 100))
    return evolve(snap, tenants={name: Tenant(name, 100, weight=w) for name, w in weights.items()})


def test_weight_divides_the_time_share():
    """Both used the same; the tenant of weight 2 counts half of it."""
    found = shares(with_weights({"a": 50, "b": 50}, a=1, b=2), POLICY)
    assert {name: share.priority for name, share in found.items()} == {"b": F(-15, 100), "a": F(-4, 10)}


def test_qf5_weight_0_is_last_and_all_zero_is_equal():
    assert list(shares(with_weights({"one": 10, "two": 10}, zero=0, one=1, two=2), POLICY)) == [
        "two",
        "one",
        "zero",
    ]
    assert list(shares(with_weights({"a": 10, "b": 5}, a=0, b=0), POLICY)) == ["b", "a"]
    share = shares(with_weights({"a": 10, "b": 5}, a=0, b=0), POLICY)["a"]
    assert share.priority == F(1, 10) - F(2, 3)


def test_fr5_an_empty_cluster_has_no_shares_and_cpu_nodes_change_none():
    found = shares(snapshot(0, a=100), POLICY)["a"]
    assert (found.space, found.priority, found.time) == (None, None, F(0))
    w = World(node("n1", gpus=1, memory=1000), node("cpu", gpus=0))
    w.tenant("a", 500)
    assert shares(w.snapshot(), POLICY)["a"].space == F(1, 2)


def test_a_lost_node_is_no_part_of_the_cluster_and_a_silent_one_is():
    w = World(node("n1", gpus=1, memory=1000), node("n2", gpus=1, memory=1000), lost_seconds=600)
    w.see(model.ReportGone("n2"))
    assert w.snapshot().cluster_memory_mib == 2000
    w.now = 600
    assert w.snapshot().cluster_memory_mib == 1000


def test_qt4_use_of_a_tenant_whose_record_is_gone_counts():
    w = World(node("n1", gpus=2))
    w.submit(running("j", "n1", [piece("GPU-n1-0")], tenant="gone"))
    share = shares(w.snapshot(), POLICY)["gone"]
    assert (share.held.memory, share.space) == (80 * GIB, F(-1, 2))


def test_qt3_a_quota_below_use_shows_what_is_over_and_never_a_negative_headroom():
    tenant = Tenant("a", 500, limit_memory_mib=500, limit_compute_milli=2000)
    assert headroom(tenant, Use(2500, 800)) == Headroom(0, 0)
    snap = evolve(snapshot(1000, {"a": 800}), tenants={"a": tenant})
    share = shares(snap, POLICY)["a"]
    assert (share.over_by_memory_mib, share.headroom.memory_mib) == (300, 0)


@pytest.mark.parametrize(
    ("limits", "use", "is_allowed"),
    [
        ({}, Use(10**9, 10**9), True),
        ({"limit_memory_mib": 4096}, Use(0, 4096), True),
        ({"limit_memory_mib": 4096}, Use(0, 4097), False),
        ({"limit_compute_milli": 500}, Use(500, 10**9), True),
        ({"limit_compute_milli": 500}, Use(501, 0), False),
        ({"limit_memory_mib": 0}, Use(0, 0), True),
        ({"limit_memory_mib": 0}, Use(0, 1), False),
    ],
)
def test_a_limit_is_met_exactly(limits, use, is_allowed):
    """QT-1: equal to the rest is accepted, one more is not."""
    assert headroom(Tenant("a", **limits), Use()).allows(use) is is_allowed


def test_over_limit_says_limit_held_and_need():
    reason = over_limit(Tenant("a", limit_memory_mib=4096), Use(40, 4000), Use(20, 100))
    assert reason.code is ReasonCode.OVER_LIMIT
    assert reason.numbers == {
        "needed_memory_mib": 100,
        "needed_compute_milli": 20,
        "held_memory_mib": 4000,
        "held_compute_milli": 40,
        "limit_memory_mib": 4096,
    }


def test_the_sliding_window_forgets():
    """a ran 100 s long ago, b ran 100 s just now; W = 1000 s."""
    w = World(node("n1", gpus=2), window_seconds=1000)
    w.snapshot()
    for id, tenant, start in (("ja", "a", 0), ("jb", "b", 950)):
        w.now = start
        w.submit(running(id, "n1", [piece("GPU-n1-0")], since=start, tenant=tenant))
        w.now += 100
        w.end(id)
    w.now = 1050
    found = shares(w.snapshot(), POLICY)
    assert {name: share.time for name, share in found.items()} == {"a": F(1, 3), "b": F(2, 3)}
    w.now = 1100
    assert shares(w.snapshot(), POLICY)["b"].time == 1, "a's use has left the window"
    w.now = 3000
    assert {share.time for share in shares(w.snapshot(), POLICY).values()} == set()


def test_a_standing_is_told_in_millionths():
    standing = Standings(snapshot(1000, {"a": 600}, {"a": 1, "b": 2}, a=500, b=1), POLICY).standing("a")
    assert standing == Standing(
        space_millionths=-100_000, time_millionths=333_333, priority_millionths=-433_333
    )
    assert millionths(F(2, 3)) == 666_667


def test_the_policy_comes_from_the_settings():
    policy = policy_from(
        settings(policy="space-time", space_weight=3, max_wait_seconds=7, placements_per_cycle=9)
    )
    assert (policy.rank, policy.space_weight, policy.max_wait_seconds, policy.placements_per_cycle) == (
        POLICIES["space-time"],
        3,
        7,
        9,
    )
    with pytest.raises(KeyError):
        policy_from(settings(policy="no such policy"))


tenants = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**18), st.integers(0, 50)),
    min_size=2,
)


@given(tenants, st.integers(1, 10**9))
def test_the_order_is_that_of_the_exact_fractions(given_tenants, cluster):
    snap = snapshot(cluster)
    snap = evolve(
        snap,
        tenants={n: Tenant(n, quota, weight=w) for n, (quota, _, _, w) in given_tenants.items()},
        held={n: Use(0, held) for n, (_, held, _, _) in given_tenants.items()},
        usage={n: Use(used, 0) for n, (_, _, used, _) in given_tenants.items()},
    )
    total = max(1, sum(used for _, _, used, _ in given_tenants.values()))
    all_last = all(w == 0 for *_, w in given_tenants.values())

    def by_hand(name: str) -> tuple[bool, F, str]:
        quota, held, used, weight = given_tenants[name]
        priority = F(quota - held, cluster) - F(used, total) / (weight or 1)
        return weight == 0 and not all_last, -priority, name

    found = shares(snap, POLICY)
    assert list(found) == sorted(given_tenants, key=by_hand)
    assert all(share.priority == -by_hand(name)[1] for name, share in found.items())
