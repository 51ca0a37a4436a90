"""One cycle: turns, borrowing, sharing cards, limits, and the reasons of those who wait."""

from __future__ import annotations

from collections import Counter

import pytest

from coordinator import model
from coordinator.model import Standing
from tests.builders import GIB, START_MS, World, job, node, piece, report, running
from tests.invariants import check_reason
from vgpu.reasons import ReasonCode as R

CARD = 80 * GIB


def placed(w: World) -> list[str]:
    return [placement.job.id for placement in w.plan().placements]


# --- turns ---


def test_tenants_take_turns_by_priority_and_are_charged_at_once():
    """Eight GPUs. a is entitled to 6, b to 2: a goes first until its space is no larger than b's."""
    w = World(node("n1"), policy="space-time")
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
    w = World(node("n1", gpus=4), policy="space-time")
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
    w = World(node("n1"), policy="space-time")
    w.tenant("a", 4 * CARD)
    w.submit(job("j", gpus=2))
    [placement] = w.plan().placements
    allocation = placement.allocation
    assert (allocation.attempt, allocation.allocated_at_ms) == (1, START_MS)
    assert allocation.standing == Standing(
        space_millionths=500_000, time_millionths=0, priority_millionths=500_000
    )
    assert (allocation.placed.code, allocation.placed.subjects) == (R.PLACED, ("n1",))
    assert allocation.placed.numbers == {
        "gpus": 2,
        "nodes": 1,
        "communication_cost": 1,
        "idle_gpus_before": 8,
    }


# --- sharing a card ---


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
    w = World(node("n1"), node("n2"), policy="space-time")
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


# --- limits ---


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


# --- reasons ---


def test_every_kind_of_wait_has_its_reason():
    w = World(node("n1", gpus=2), placements_per_cycle=1)
    w.tenant("capped", limit_memory_mib=0)
    w.submit(
        job("first", 0),
        job("own", 1),
        job("rest", 0, not_before_ms=START_MS + 1500),
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
