"""One cycle: turns, borrowing, limits, bounded wait, reasons, what can never run; and properties over random mixes."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import model
from coordinator.cycle import plan_cycle, why_never
from coordinator.model import Job
from coordinator.snapshot import Snapshot
from tests.builders import GIB, START_MS, World, gpu, job, mig, node, piece, report, running, spec
from tests.invariants import check_plan, check_reason
from vgpu.reasons import ReasonCode as R

CARD = 80 * GIB


def placed(w: World) -> list[str]:
    return [placement.job.id for placement in w.plan().placements]


# --- turns -----------------------------------------------------------------------------------------------------------


def test_tenants_take_turns_by_priority_and_are_charged_at_once():
    """Eight GPUs. a is entitled to 6, b to 2: a goes first until its space is no larger than b's."""
    w = World(node("n1"))
    w.tenant("a", 6 * CARD)
    w.tenant("b", 2 * CARD)
    w.submit(*(job(f"a{n}", n) for n in range(8)), *(job(f"b{n}", n, tenant="b") for n in range(8)))
    # space in GPUs, a:b = 6:2 5:2 4:2 3:2 2:2 (tie: a) 1:2 1:1 (tie: a) 0:1
    assert placed(w) == ["a0", "a1", "a2", "a3", "a4", "b0", "a5", "b1"]


def test_who_used_more_time_waits():
    w = World(node("n1", gpus=2))
    w.tenant("a", CARD)
    w.tenant("b", CARD)
    w.snapshot()
    w.submit(running("past", "n1", [piece("GPU-n1-0"), piece("GPU-n1-1")]))
    w.now = 100
    w.end("past")
    w.submit(job("ja"), job("jb", tenant="b"))
    assert placed(w) == ["jb", "ja"]


def test_a_burst_of_submissions_gains_nothing():
    w = World(node("n1", gpus=4))
    w.tenant("a", 2 * CARD)
    w.tenant("b", 2 * CARD)
    w.submit(*(job(f"a{n:03}") for n in range(300)), job("b0", 5, tenant="b"), job("b1", 5, tenant="b"))
    assert Counter(id[0] for id in placed(w)) == {"a": 2, "b": 2}


def test_idle_capacity_is_borrowed_beyond_the_quota():
    w = World(node("n1", gpus=4))
    w.tenant("a", CARD)
    w.tenant("b", 3 * CARD)
    w.submit(*(job(f"a{n}") for n in range(6)))
    assert placed(w) == ["a0", "a1", "a2", "a3"]


def test_a_tenant_whose_next_job_does_not_fit_lets_others_go_on():
    """QF-1, QF-6: a large job at the head blocks neither its own tenant's smaller ones nor others."""
    w = World(node("n1", gpus=4))
    w.tenant("a", 4 * CARD)
    w.submit(running("r", "n1", [piece("GPU-n1-0")], tenant="c"))
    w.submit(job("big", 0, gpus=4, priority=5), job("small", 1), job("other", 2, tenant="b"))
    assert placed(w) == ["small", "other"]


def test_equal_tenants_alternate_by_name():
    w = World(node("n1", gpus=4))
    w.submit(*(job(f"{t}{n}", tenant=t) for t in "ba" for n in range(2)))
    assert placed(w) == ["a0", "b0", "a1", "b1"]


def test_qf5_weight_0_is_served_when_nobody_else_waits():
    w = World(node("n1", gpus=2))
    w.tenant("zero", 2 * CARD, weight=0)
    w.tenant("one", 0)
    w.submit(job("z0", tenant="zero"), job("o0", tenant="one"))
    assert placed(w) == ["o0", "z0"]


def test_a_plan_has_a_bounded_number_of_placements():
    w = World(node("n1"), placements_per_cycle=3)
    w.submit(*(job(f"j{n}") for n in range(5)), job("other", tenant="b"))
    plan = w.plan()
    assert [p.job.id for p in plan.placements] == ["j0", "other", "j1"]
    assert plan.waiting["j2"].code is R.BEHIND_OWN_JOBS
    assert w.cycle() == ["j0", "other", "j1"]
    assert w.cycle() == ["j2", "j3", "j4"]


def test_a_placement_says_why_next_and_why_there():
    w = World(node("n1"))
    w.tenant("a", 4 * CARD)
    w.submit(job("j", gpus=2))
    [placement] = w.plan().placements
    allocation = placement.allocation
    assert (allocation.attempt, allocation.allocated_at_ms) == (1, START_MS)
    assert allocation.chosen.code is R.CHOSEN
    assert allocation.chosen.subjects == ("a",)
    assert allocation.chosen.numbers == {
        "space_millionths": 500_000,
        "time_millionths": 0,
        "priority_millionths": 500_000,
    }
    assert (allocation.placed.code, allocation.placed.subjects) == (R.PLACED, ("n1",))
    assert allocation.placed.numbers == {
        "gpus": 2,
        "nodes": 1,
        "communication_cost": 1,
        "idle_gpus_before": 8,
    }


# --- sharing a card ----------------------------------------------------------------------------------------------------


def test_da2_a_card_is_never_sold_twice():
    w = World(node("n1", gpus=1, memory=24576))
    w.submit(*(job(f"j{n}", memory=12288, compute=100) for n in range(3)))
    plan = w.plan()
    assert [p.job.id for p in plan.placements] == ["j0", "j1"]
    reason = plan.waiting["j2"]
    assert (reason.numbers["memory_mib"], reason.numbers["largest_free_memory_mib"]) == (12288, 0)


def test_da5_two_jobs_of_one_cycle_never_get_the_same_node():
    w = World(node("n1"), node("n2"))
    w.submit(job("ja", gpus=8), job("jb", gpus=8, tenant="b"), job("jc", gpus=8, tenant="c"))
    assert placed(w) == ["ja", "jb"]
    w.see(model.ReportSeen(report("n1", faults={"GPU-n1-0": "Xid 79"})))
    assert placed(w) == ["ja"]


def test_fr1_whole_numbers_of_mib():
    w = World(node("n1", gpus=1, memory=46068))
    w.submit(*(job(f"j{n:02}", memory=2000, compute=40) for n in range(24)))
    assert len(placed(w)) == 23


def test_fr2_free_space_is_known_for_each_gpu():
    """80 slices of 0.18 on 16 GPUs: five on each. The next one waits, though 1.6 GPUs are free in all."""
    w = World(node("n1"), node("n2"))
    w.submit(*(job(f"j{n:02}", memory=1024, compute=180) for n in range(81)))
    assert w.cycle() == [f"j{n:02}" for n in range(80)]
    reason = w.plan().waiting["j80"]
    assert reason.code is R.NOT_ENOUGH_GPU_COMPUTE
    assert reason.numbers["largest_free_compute_milli"] == 100
    assert reason.numbers["total_free_compute_milli"] == 1600


def test_fr3_what_is_free_in_all_and_in_one_piece():
    w = World(node("n1", gpus=2))
    w.submit(*(job(f"j{n}", memory=1024, compute=600) for n in range(3)))
    w.cycle()
    numbers = w.plan().waiting["j2"].numbers
    assert (numbers["total_free_compute_milli"], numbers["largest_free_compute_milli"]) == (800, 400)


def test_fr9_the_quota_counts_every_job_that_is_accepted():
    w = World(node("n1"))
    w.tenant("a", limit_memory_mib=0, limit_compute_milli=0)
    w.submit(job("gpu", memory=1, compute=1), job("cpu", gpus=0))
    assert placed(w) == ["cpu"]


# --- limits ------------------------------------------------------------------------------------------------------------


def test_qt1_usage_counts_every_slice_and_a_limit_is_met_exactly():
    w = World(node("n1"))
    w.tenant("a", limit_memory_mib=4096 + 10, limit_compute_milli=50)
    w.submit(job("two", gpus=2, memory=2048, compute=20))
    w.cycle()
    held = w.snapshot().held["a"]
    assert (held.memory, held.compute) == (4096, 40)
    w.submit(job("j1", 1, memory=11, compute=1), job("j2", 2, memory=10, compute=10))
    plan = w.plan()
    assert [p.job.id for p in plan.placements] == ["j2"]
    reason = plan.waiting["j1"]
    assert reason.code is R.OVER_LIMIT
    assert (reason.numbers["held_memory_mib"], reason.numbers["limit_memory_mib"]) == (4106, 4106)


def test_qt3_a_limit_below_use_stops_new_starts_and_nothing_else():
    w = World(node("n1"))
    w.tenant("a", 8 * CARD, limit_memory_mib=8 * CARD)
    w.submit(job("j1", gpus=4))
    w.cycle()
    w.tenant("a", 2 * CARD, limit_memory_mib=2 * CARD)
    w.submit(job("j2"))
    plan = w.plan()
    assert plan.placements == ()
    check_reason(plan.waiting["j2"])
    assert w.settle() == ()
    assert w.live("j1").id == "j1"


def test_qt4_jobs_of_a_tenant_without_a_record_hold_what_they_hold():
    w = World(node("n1", gpus=4))
    w.submit(running("r", "n1", [piece(f"GPU-n1-{n}") for n in range(4)], tenant="gone"))
    w.submit(job("j", tenant="b"))
    assert placed(w) == []


def test_a_limit_counts_the_card_that_is_granted():
    """The smallest card would be within the limit, but only large ones are free."""
    w = World(node("big", gpus=1), node("small", gpus=1, memory=16 * GIB))
    w.tenant("a", limit_memory_mib=20 * GIB)
    w.submit(running("r", "small", [piece("GPU-small-0", 16 * GIB)], tenant="b"))
    w.submit(job("j"), job("k", 1, tenant="c"))
    assert placed(w) == ["k"], "what one tenant may not have is still offered to another"


# --- what can never run ------------------------------------------------------------------------------------------------


def cluster() -> World:
    w = World(
        node("n1"),
        node("n2", gpus=4, memory=40 * GIB, model="NVIDIA A40", labels={"zone": "b"}, cpu=8000),
        node("n3", [gpu("n3", 0, unavailable="MIG mode"), mig("n3", 0, 1, 16384, 142)], isolations=("mig",)),
    )
    w.tenant("a", limit_memory_mib=10 * CARD, limit_compute_milli=20_000)
    return w


@pytest.mark.parametrize(
    ("of", "code", "numbers"),
    [
        (spec(model="H100"), R.NO_SUCH_GPU, {"gpus": 1}),
        (spec(gpus=9), R.TASK_LARGER_THAN_ANY_NODE, {"gpus": 9, "largest_gpus": 8}),
        (spec(gpus=5, model="A40"), R.TASK_LARGER_THAN_ANY_NODE, {"gpus": 5, "largest_gpus": 4}),
        (spec(memory=CARD + 1, compute=1), R.SLICE_LARGER_THAN_ANY_GPU, {"largest_memory_mib": CARD}),
        (
            spec(memory=41 * GIB, compute=1, model="A40"),
            R.SLICE_LARGER_THAN_ANY_GPU,
            {"memory_mib": 41 * GIB},
        ),
        (spec(cpu=128_001), R.TASK_LARGER_THAN_ANY_NODE, {"largest_cpu_milli": 128_000}),
        (
            spec(node_memory=1024 * GIB + 1),
            R.TASK_LARGER_THAN_ANY_NODE,
            {"largest_node_memory_mib": 1024 * GIB},
        ),
        (spec(cpu=9000, model="A40"), R.TASK_LARGER_THAN_ANY_NODE, {"cpu_milli": 9000}),
        (spec(gpus=8, count=2, model="A100"), R.JOB_LARGER_THAN_LIMIT, {"limit_memory_mib": 10 * CARD}),
        (
            spec(gpus=8, count=2, tenant="b"),
            R.JOB_LARGER_THAN_CLUSTER,
            {"tasks": 2, "gpus": 16, "cluster_gpus": 13},
        ),
        (spec(constraints={"zone": "nowhere"}), R.LABELS_DIFFER, {"nodes": 3}),
        (spec(gpus=5, constraints={"zone": "b"}), R.TASK_LARGER_THAN_ANY_NODE, {"largest_gpus": 4}),
        (spec(memory=1024, compute=100, isolation="no-such"), R.NO_ISOLATION, {}),
        (spec(gpus=11, memory=CARD, compute=1000), R.JOB_LARGER_THAN_LIMIT, {"needed_memory_mib": 11 * CARD}),
    ],
)
def test_qf2_what_can_never_run_says_why(of, code, numbers):
    reason = why_never(of, cluster().snapshot())
    assert reason is not None
    assert reason.code is code
    assert {name: reason.numbers.get(name) for name in numbers} == numbers


@pytest.mark.parametrize(
    "of",
    [
        spec(gpus=8),
        spec(gpus=6, count=1),
        spec(gpus=4, count=2),
        spec(gpus=4, constraints={"zone": "b"}),
        spec(memory=16000, compute=100, isolation="mig"),
        spec(gpus=0, cpu=1),
    ],
)
def test_what_can_run_some_day_is_not_refused(of):
    w = cluster()
    assert why_never(of, w.snapshot()) is None
    w.submit(*(running(f"r{n}", "n1", [piece(f"GPU-n1-{n}")], tenant="c") for n in range(8)))
    w.see(model.ReportGone("n2"), model.AdminSeen(model.NodeAdmin("n3", cordoned=True)))
    assert why_never(of, w.snapshot()) is None, "busy, down and cordoned nodes count as there"


def test_qf2_two_tasks_of_six_are_fine_where_one_of_twelve_is_not():
    w = World(node("n1"), node("n2"))
    assert why_never(spec(gpus=12), w.snapshot()).code is R.TASK_LARGER_THAN_ANY_NODE
    assert why_never(spec(gpus=6, count=2), w.snapshot()) is None


def test_qf2_the_only_large_node_is_down():
    w = World(node("n1"), node("n2", gpus=2))
    w.see(model.ReportGone("n1"))
    w.submit(job("j", gpus=8))
    reason = w.plan().waiting["j"]
    assert reason.numbers["node_not_ready"] == 1
    assert reason.code in (R.NODE_NOT_READY, R.NOT_ENOUGH_IDLE_GPUS)


def test_nothing_is_refused_before_a_node_is_known():
    """FR-5: unknown, not too large."""
    assert why_never(spec(gpus=99), World().snapshot()) is None


def test_qf1_an_impossible_job_is_told_and_blocks_nobody():
    w = World(node("n1", gpus=4))
    w.submit(job("j1", 0, gpus=6, priority=9), job("j2", 1))
    plan = w.plan()
    assert [p.job.id for p in plan.placements] == ["j2"]
    assert plan.waiting["j1"].code is R.TASK_LARGER_THAN_ANY_NODE


def test_qt7_a_limit_lowered_after_the_submit_makes_it_impossible_and_raised_again_possible():
    w = World(node("n1"))
    w.tenant("a", limit_memory_mib=4 * CARD)
    w.submit(job("j", gpus=5))
    reason = w.plan().waiting["j"]
    assert reason.code is R.JOB_LARGER_THAN_LIMIT
    assert (reason.numbers["needed_memory_mib"], reason.numbers["limit_memory_mib"]) == (5 * CARD, 4 * CARD)
    w.tenant("a", limit_memory_mib=5 * CARD)
    assert w.cycle() == ["j"]


# --- reasons -----------------------------------------------------------------------------------------------------------


def test_every_kind_of_wait_has_its_reason():
    w = World(node("n1", gpus=2), placements_per_cycle=1)
    w.tenant("capped", limit_memory_mib=0)
    w.submit(
        job("first", 0),
        job("own", 1),
        job("rest", 2, not_before_ms=START_MS + 1500),
        job("other", 3, tenant="b"),
        job("cap", 4, tenant="capped", memory=1, compute=1),
    )
    plan = w.plan()
    assert {id: reason.code for id, reason in plan.waiting.items()} == {
        "own": R.BEHIND_OWN_JOBS,
        "rest": R.BACK_OFF,
        "other": R.BEHIND_OTHER_TENANTS,
        "cap": R.JOB_LARGER_THAN_LIMIT,
    }
    assert plan.waiting["rest"].numbers == {"seconds": 2}
    assert len(plan.waiting) == 4
    with pytest.raises(KeyError):
        plan.waiting["first"]
    with pytest.raises(KeyError):
        plan.waiting["no such job"]


# --- the bounded wait --------------------------------------------------------------------------------------------------


def test_qf3_a_large_job_starts_within_a_bound_under_a_steady_flow_of_small_ones():
    """Eight GPUs always full of jobs of 10 minutes; a job of 8 waits from the start. Without the bound it would wait
    for ever; a job for another model of GPU is not held up."""
    w = World(node("n1"), node("l4", gpus=1, memory=24 * GIB, model="NVIDIA L4"), max_wait_seconds=3600)
    w.submit(
        *(job(f"s{n:04}", model="A100") for n in range(8)), job("big", 1, gpus=8, model="A100", tenant="z")
    )
    ends_at: dict[str, int] = {}
    started = number = 8
    for minute in range(0, 180):
        w.now = 60 * minute
        for id in [id for id, end in ends_at.items() if end <= minute]:
            w.end(id)
            del ends_at[id]
        while number < started + 2:
            w.submit(job(f"s{number:04}", w.now, model="A100"))
            number += 1
        for id in w.cycle():
            # Ends are spread, so that the node is never empty by chance.
            ends_at[id] = minute + 10 - (int(id[1:]) % 3 if id != "big" else 0)
            started = max(started, number)
        if "big" in ends_at:
            break
        if minute == 65:
            plan = w.plan()
            assert (plan.held_for, plan.held) == ("big", {"n1"})
            reason = plan.waiting[f"s{number - 1:04}"]
            assert (reason.code, reason.subjects) == (R.HELD_FOR_LONG_WAIT, ("big",))
            assert plan.waiting["big"].code is R.NOT_ENOUGH_IDLE_GPUS
            w.submit(job("l4-job", w.now, model="L4"))
            assert "l4-job" in w.cycle()
    assert 60 <= minute <= 71, f"big started after {minute} minutes"


def test_without_the_bound_it_starves():
    """The control of the test above: the same flow, and no bound in reach."""
    w = World(node("n1"), max_wait_seconds=10**6)
    w.submit(job("big", 0, gpus=8), *(job(f"s{n}", 1) for n in range(4)))
    running_now = w.cycle()
    for turn in range(1, 50):
        w.now = 600 * turn
        w.submit(*(job(f"t{turn}-{n}", w.now) for n in range(4)))
        for id in running_now[:2]:
            w.end(id)
        running_now = running_now[2:] + w.cycle()
    assert "big" in w.snapshot().waiting_jobs


def test_the_node_that_frees_soonest_is_held():
    w = World(node("n1"), node("n2"), node("n3"), max_wait_seconds=100)
    for name, limit in (("n1", None), ("n2", 900), ("n3", 5000)):
        w.submit(running(f"r-{name}", name, [piece(f"GPU-{name}-0")], max_runtime_seconds=limit, tenant="b"))
    w.submit(job("big", gpus=8))
    w.now = 100
    plan = w.plan()
    assert plan.held == {"n2"}
    w.submit(job("small", 100), job("bigger", 100, gpus=7))
    plan = w.plan()
    assert {n for p in plan.placements for n in p.allocation.nodes} <= {"n1", "n3"}


def test_a_gang_is_held_as_many_nodes_as_it_needs():
    w = World(*(node(f"n{n}") for n in range(4)), max_wait_seconds=100)
    w.submit(*(running(f"r{n}", f"n{n}", [piece(f"GPU-n{n}-0")], tenant="b") for n in range(3)))
    w.submit(job("gang", gpus=8, count=2))
    w.now = 100
    plan = w.plan()
    assert len(plan.held) == 2
    assert "n3" in plan.held, "the empty one is the first to be kept"


def test_qf7_a_hold_ends_with_its_job_and_is_not_given_to_what_can_never_run():
    w = World(node("n1"), max_wait_seconds=100)
    w.submit(running("r", "n1", [piece("GPU-n1-0")], tenant="b"), job("big", gpus=8), job("never", gpus=9))
    w.now = 100
    w.submit(job("small", 100))
    assert w.plan().held_for == "big"
    assert placed(w) == []
    w.see(model.JobGone("big", "queue"))
    plan = w.plan()
    assert (plan.held, plan.held_for) == (frozenset(), "")
    assert [p.job.id for p in plan.placements] == ["small"]


def test_no_hold_for_a_job_beyond_its_tenants_limit():
    w = World(node("n1"), max_wait_seconds=100)
    w.tenant("a", limit_memory_mib=8 * CARD)
    w.submit(running("r", "n1", [piece("GPU-n1-0")]), job("big", gpus=8))
    w.now = 100
    assert w.plan().held_for == ""


# --- properties ----------------------------------------------------------------------------------------------------------

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
            w.submit(evolve(one, submitted_at_ms=w.now_ms, queued_at_ms=w.now_ms))
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
