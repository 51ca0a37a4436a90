"""A cycle with a warm memo, with a cold one and with none: the same plan and the same reasons."""

from __future__ import annotations

import gc
from collections import Counter
from random import Random
from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator import lifecycle
from coordinator.config import Settings
from coordinator.cycle import Plan, plan_cycle
from coordinator.fairness import policy_from
from coordinator.index import Index
from coordinator.prices import size_prices
from tests.builders import World, job, node
from tests.builders import settings as settings_with
from tests.unit.test_cycle_property import mix_jobs, mix_world, mixes

SEEN: Counter[str] = Counter()


def shown(plan: Plan) -> tuple[object, ...]:
    return plan.placements, plan.held, plan.held_for, dict(plan.waiting)


def mixed_prices(w: World) -> None:
    mix = {kind: 30 * count for kind, count in w.cluster.mix.counts.items()}
    w.cluster.worth = size_prices(mix, 80 * 1024)


@settings(max_examples=40, deadline=None)
@given(
    mixes,
    st.sampled_from(["serai", "space-time"]),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_cold_warm_and_no_memo_give_one_plan_property(mix, policy, with_prices, commits, random: Random):
    """Also after commits of which some failed, and after ends."""
    w = mix_world(policy=policy_from(named(policy)), max_wait_seconds=60)
    warm = Index()
    waiting = mix_jobs(mix)
    for turn in range(5):
        w.now += 20
        for one in waiting[:8]:
            w.submit(replace(one, submitted_at_ms=w.now_ms, queued_at_ms=w.now_ms))
        waiting = waiting[8:]
        if with_prices and turn == 1:
            mixed_prices(w)
            SEEN["priced"] += w.cluster.worth is not None
        snapshot = w.snapshot()
        plan = plan_cycle(snapshot, w.policy, warm)
        expected = shown(plan_cycle(snapshot, w.policy))
        assert shown(plan) == expected
        assert shown(plan_cycle(snapshot, w.policy, Index())) == expected
        SEEN["placed"] += len(plan.placements)
        SEEN["gang"] += sum(p.job.spec.task_count > 1 for p in plan.placements)
        SEEN["waiting"] += len(plan.waiting)
        SEEN["reserved"] += plan.reservation is not None
        for placement in plan.placements:
            if commits or random.random() < 0.7:
                w.put(lifecycle.allocated(placement.job, placement.allocation))
            else:
                SEEN["commit failed"] += 1
        for id in random.sample(sorted(w.cluster.live_jobs), min(2, len(w.cluster.live_jobs))):
            w.run(id)
            w.end(id)


def named(name: str) -> Settings:

    return settings_with(policy=name, max_wait_seconds=60)


def test_a_snapshot_goes_with_its_plan_though_the_memo_stays():
    """Whoever keeps one makes the state note every change for it."""
    w, memo = World(node("n1"), node("n2"), policy="serai"), Index()
    w.submit(job("a", gpus=8), job("b", gpus=4), job("c", gpus=8), job("d", gpus=4), job("e", gpus=1))
    gc.disable()  # nothing is left to it
    try:
        snapshot = w.snapshot()
        lent = ref(snapshot.waiting_jobs)
        plan = plan_cycle(snapshot, w.policy, memo)
        assert len(plan.placements) > 1
        assert plan.reservation is not None
        assert len(dict(plan.waiting)) > 0
        del plan, snapshot
        assert lent() is None
    finally:
        gc.enable()


def test_the_property_above_was_not_vacuous():
    if not SEEN:
        pytest.skip("the property did not run")
    wanted = ("placed", "gang", "waiting", "reserved", "priced", "commit failed")
    assert all(SEEN[name] > 0 for name in wanted), SEEN
