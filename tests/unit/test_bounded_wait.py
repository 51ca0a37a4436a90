"""A job that waited too long: it goes first, and what it needs is held for it (QF-3, QF-7)."""

from __future__ import annotations

from coordinator import model
from tests.builders import GIB, World, job, node, piece, running
from vgpu.reasons import ReasonCode as R

CARD = 80 * GIB


def placed(w: World) -> list[str]:
    return [placement.job.id for placement in w.plan().placements]


def test_qf3_a_large_job_starts_within_a_bound_under_a_steady_flow_of_small_ones():
    """Eight GPUs always full of jobs of 10 minutes; a job of 8 waits from the start. Without the bound it would wait
    for ever; a job for another model of GPU is not held up."""
    w = World(
        node("n1"),
        node("l4", gpus=1, memory=24 * GIB, model="NVIDIA L4"),
        max_wait_seconds=3600,
        policy="space-time",
    )
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
            assert plan.waiting["big"].code is R.RESERVED
            assert plan.waiting["big"].numbers["not_enough_idle_gpus"] == 1
            w.submit(job("l4-job", w.now, model="L4"))
            assert "l4-job" in w.cycle()
    assert 60 <= minute <= 71, f"big started after {minute} minutes"


def test_without_the_bound_it_starves():
    """The control of the test above: the same flow, and no bound in reach."""
    w = World(node("n1"), max_wait_seconds=10**6, policy="space-time")
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
    w = World(node("n1"), node("n2"), node("n3"), max_wait_seconds=100, policy="space-time")
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
    w = World(*(node(f"n{n}") for n in range(4)), max_wait_seconds=100, policy="space-time")
    w.submit(*(running(f"r{n}", f"n{n}", [piece(f"GPU-n{n}-0")], tenant="b") for n in range(3)))
    w.submit(job("gang", gpus=8, count=2))
    w.now = 100
    plan = w.plan()
    assert len(plan.held) == 2
    assert "n3" in plan.held, "the empty one is the first to be kept"


def test_qf7_a_hold_ends_with_its_job_and_is_not_given_to_what_can_never_run():
    w = World(node("n1"), max_wait_seconds=100, policy="space-time")
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
    w = World(node("n1"), max_wait_seconds=100, policy="space-time")
    w.tenant("a", limit_memory_mib=8 * CARD)
    w.submit(running("r", "n1", [piece("GPU-n1-0")]), job("big", gpus=8))
    w.now = 100
    assert w.plan().held_for == ""


def test_a_job_whose_nodes_are_down_does_not_take_the_hold_from_the_next():
    w = World(node("n1"), node("t4", gpus=4, model="T4"), max_wait_seconds=100, policy="space-time")
    w.submit(running("r", "n1", [piece("GPU-n1-0")], tenant="b"))
    w.submit(job("on-t4", 0, gpus=4, model="T4"), job("big", 1, gpus=8, model="A100"))
    w.see(model.ReportGone("t4"))
    w.now = 101
    plan = w.plan()
    assert (plan.held_for, plan.held) == ("big", {"n1"})
    assert plan.waiting["on-t4"].code is R.GPU_MODEL_DIFFERS
    assert plan.waiting["on-t4"].numbers["node_not_ready"] == 1


def test_the_overdue_job_goes_before_every_tenant():
    w = World(node("n1", gpus=1), max_wait_seconds=100, policy="space-time")
    w.tenant("rich", 8 * CARD)
    w.submit(job("old", 0, tenant="poor"), job("new", 100, tenant="rich"))
    w.now = 99
    assert placed(w) == ["new"]
    w.now = 100
    assert placed(w) == ["old"]
