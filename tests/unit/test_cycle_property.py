"""Properties of a cycle over random job mixes; each shows that its interesting cases occurred."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.cycle import plan_cycle, why_never
from coordinator.model import Job
from coordinator.snapshot import Snapshot
from tests.builders import GIB, World, gpu, job, mig, node
from tests.invariants import check_plan

CARD = 80 * GIB


def placed(w: World) -> list[str]:
    return [placement.job.id for placement in w.plan().placements]


sizes = st.one_of(
    st.builds(lambda n: {"gpus": n}, st.integers(0, 4)),
    st.builds(
        lambda n, m: {"gpus": n, "model": m}, st.integers(1, 2), st.sampled_from(["A100", "T4", "H100"])
    ),
    st.builds(
        lambda m, c, n: {"memory": m * GIB, "compute": c, "gpus": n},
        st.integers(1, 90),
        st.integers(1, 1000),
        st.integers(1, 3),
    ),
    st.builds(lambda c: {"compute": c}, st.integers(1, 999)),
)
mixes = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        sizes,
        st.integers(1, 3),
        st.integers(-1, 1),
        st.integers(0, 50),
        st.integers(1, 60_000),
    ),
    min_size=4,
    max_size=30,
)


def mix_jobs(mix: list[tuple[str, dict[str, int], int, int, int, int]]) -> list[Job]:
    return [
        job(f"j{n:02}", age, tenant=tenant, count=count, priority=priority, cpu=cpu, **size)
        for n, (tenant, size, count, priority, age, cpu) in enumerate(mix)
    ]


def mix_world(**changes: object) -> World:
    w = World(
        node("n1", gpus=4, labels={"rack": "r1"}),
        node("n2", gpus=2, groups=(), labels={"rack": "r1"}),
        node("n3", gpus=2, memory=16 * GIB, model="T4"),
        node(
            "n4", [gpu("n4", 0, unavailable="MIG mode"), *(mig("n4", 0, 1 + n, 16384, 142) for n in range(3))]
        ),
        **changes,
    )
    w.tenant("a", 4 * CARD, limit_memory_mib=6 * CARD)
    w.tenant("b", 2 * CARD, limit_compute_milli=3500, weight=2)
    w.tenant("c", 0, weight=0)
    return w


SEEN: Counter[str] = Counter()


@settings(max_examples=120, deadline=None)
@given(mixes, st.randoms(use_true_random=False))
def test_invariants_hold_over_random_mixes_property(mix, random: Random):
    """Jobs come, run, end well or badly and are cancelled in random order; every step is checked by `World`."""
    w = mix_world(max_wait_seconds=60)
    waiting = mix_jobs(mix)
    while waiting or w.cluster.live_jobs:
        w.now += 20
        for one in waiting[:12]:
            w.submit(replace(one, submitted_at_ms=w.now_ms, queued_at_ms=w.now_ms))
        waiting = waiting[12:]
        ids = w.cycle()
        SEEN["placed"] += len(ids)
        SEEN["gang"] += sum(w.live(id).spec.task_count > 1 for id in ids)
        SEEN["waited"] += len(w.cluster.waiting_jobs)
        SEEN["held"] += w.plan().held_for != ""
        live = sorted(w.cluster.live_jobs)
        for id in random.sample(live, min(len(live), 1)):
            w.run(id)
            w.now += 1
            w.end(id, random.choice((0, 0, 1)))
        plan = w.plan()
        for reason in plan.waiting.values():
            SEEN[reason.code.value] += 1


def test_the_property_above_was_not_vacuous():
    if not SEEN:
        pytest.skip("the property did not run")
    wanted = ("placed", "gang", "waited", "held", "not_enough_idle_gpus", "over_limit", "no_such_gpu")
    assert all(SEEN[name] > 0 for name in wanted), SEEN


def shuffled(snapshot: Snapshot, random: Random) -> Snapshot:
    def mixed(mapping):
        items = list(mapping.items())
        random.shuffle(items)
        return dict(items)

    return evolve(
        snapshot,
        nodes=mixed(snapshot.nodes),
        jobs=mixed(snapshot.jobs),
        waiting_jobs=mixed(snapshot.waiting_jobs),
        lines=mixed({tenant: mixed(lines) for tenant, lines in snapshot.lines.items()}),
        tenants=mixed(snapshot.tenants),
        held=mixed(snapshot.held),
        usage=mixed(snapshot.usage),
        tasks=mixed(snapshot.tasks),
    )


@settings(max_examples=60, deadline=None)
@given(mixes, st.randoms(use_true_random=False))
def test_a_plan_is_equal_under_shuffled_input_property(mix, random: Random):
    w = mix_world()
    jobs = mix_jobs(mix)
    w.submit(*jobs[: len(jobs) // 2])
    w.cycle()
    w.now = 60
    w.submit(*jobs[len(jobs) // 2 :])
    snapshot = w.snapshot()
    first = plan_cycle(snapshot, w.policy)
    second = plan_cycle(shuffled(snapshot, random), w.policy)
    check_plan(snapshot, second)
    assert first.placements == second.placements
    assert first.held == second.held
    assert dict(first.waiting) == dict(second.waiting)


@given(mixes)
@settings(max_examples=40, deadline=None)
def test_what_was_placed_could_run_and_what_never_can_was_not_property(mix):
    w = mix_world()
    w.submit(*mix_jobs(mix))
    snapshot = w.snapshot()
    plan = plan_cycle(snapshot, w.policy)
    for placement in plan.placements:
        assert why_never(placement.job.spec, snapshot) is None
    empty = mix_world().snapshot()
    for one in snapshot.waiting_jobs.values():
        alone = mix_world()
        alone.submit(one)
        fits = bool(plan_cycle(alone.snapshot(), alone.policy).placements)
        assert fits is (why_never(one.spec, empty) is None), "alone it runs exactly if it can ever run"
