"""Who has the reservation, on which slices, until when, and who may go around it (`serai`)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coordinator import lifecycle, model
from coordinator.cycle import Plan, plan_cycle
from coordinator.index import Index
from coordinator.model import JobState
from tests.builders import GIB, START_MS, World, job, node, piece, running
from vgpu.reasons import Reason
from vgpu.reasons import ReasonCode as R
from vgpu.sentences import sentence

CARD = 80 * GIB
HOUR = 3600


def placed(plan: Plan) -> list[str]:
    return [placement.job.id for placement in plan.placements]


def full(w: World, name: str, gpus: int, limit: int | None, tenant: str = "b", first: int = 0) -> None:
    """One job on so many GPUs of a node."""
    pieces = [piece(f"GPU-{name}-{n}") for n in range(first, first + gpus)]
    id = f"r-{name}-{first}"
    w.submit(running(id, name, pieces, max_runtime_seconds=limit, tenant=tenant))


def halves(*nodes: str, **changes: object) -> World:
    """Two tenants, each entitled to half."""
    w = World(*(node(name) for name in nodes), **changes)
    for tenant in "ab":
        w.tenant(tenant, 4 * len(nodes) * CARD)
    return w


def test_those_who_are_owed_go_first_though_others_have_the_higher_priority():
    """c has lent out its quota and is owed; b's priority is higher only since its quota is larger."""
    w = World(node("n1", gpus=2))
    w.tenant("a", CARD)
    w.tenant("b", CARD)
    w.submit(running("r", "n1", [piece("GPU-n1-0")], tenant="a"))
    w.submit(job("a1"), job("b1", 5, tenant="b"))
    assert placed(w.plan()) == ["b1"]


def test_the_slices_that_free_soonest_are_reserved_and_all_can_see_it():
    w = halves("n1", "n2")
    full(w, "n1", 8, 4 * HOUR)
    full(w, "n2", 4, 2 * HOUR)
    full(w, "n2", 4, 9 * HOUR, first=4)
    w.submit(job("big", gpus=4))
    plan = w.plan()
    assert plan.reservation is not None
    assert (plan.held_for, plan.held) == ("big", {"n2"})
    assert plan.reservation.due_ms == START_MS + 1000 * 2 * HOUR
    gpus = [slice.gpu for task in plan.reservation.tasks for slice in task.slices]
    assert gpus == [f"GPU-n2-{n}" for n in range(4)]
    reason = plan.waiting["big"]
    assert (reason.code, reason.subjects, reason.numbers["due_seconds"]) == (R.RESERVED, ("n2",), 2 * HOUR)
    assert "reserved for it" in sentence(reason)


@pytest.mark.parametrize(
    ("name", "limit", "gpus", "starts"),
    [
        ("ends in time", 2 * HOUR, 2, True),
        ("ends a second late", 2 * HOUR + 1, 2, False),
        ("says nothing", None, 2, False),
        ("late, but on what is left over", 99 * HOUR, 1, True),
        ("says nothing, on what is left over", None, 1, True),
    ],
)
def test_others_go_around_it(name, limit, gpus, starts):
    """Three GPUs are free and five free in two hours; seven are reserved for a, so one of them is left over."""
    w = halves("n1")
    full(w, "n1", 5, 2 * HOUR)
    w.submit(job("big", gpus=7), job("other", 1, tenant="b", gpus=gpus, max_runtime_seconds=limit))
    plan = w.plan()
    assert plan.held_for == "big"
    assert (placed(plan) == ["other"]) is starts
    if not starts:
        reason = plan.waiting["other"]
        assert (reason.code, reason.subjects) == (R.RESERVED_FOR_OTHER, ("big",))
        assert reason.numbers == {"due_seconds": 2 * HOUR}


def test_what_was_left_over_is_given_once():
    w = halves("n1")
    full(w, "n1", 5, 2 * HOUR)
    w.submit(job("big", gpus=7), *(job(f"o{n}", n, tenant="b") for n in range(3)))
    plan = w.plan()
    assert placed(plan) == ["o0"]
    assert plan.waiting["o1"].code is R.RESERVED_FOR_OTHER


def test_short_ones_of_a_line_are_found_behind_long_ones():
    w = halves("n1")
    full(w, "n1", 5, 2 * HOUR)
    limits = [None, 9 * HOUR, HOUR, 9 * HOUR, HOUR, HOUR]
    w.submit(job("big", gpus=8))
    w.submit(*(job(f"o{n}", n, tenant="b", max_runtime_seconds=limit) for n, limit in enumerate(limits)))
    assert placed(w.plan()) == ["o2", "o4", "o5"]


def test_slices_of_a_card_are_reserved_not_the_card():
    """FR: a slice of 60 GiB waits for one of the two cards; the other 20 GiB there stay open to others."""
    w = World(node("n1", gpus=2))
    for tenant in "ab":
        w.tenant(tenant, CARD)
    for n, limit in ((0, 2 * HOUR), (1, 9 * HOUR)):
        held = piece(f"GPU-n1-{n}", 70 * GIB, 800, "mps")
        w.submit(running(f"r{n}", "n1", [held], tenant="b", max_runtime_seconds=limit))
    w.submit(job("slice", memory=60 * GIB, compute=700))
    w.submit(job("fits", 1, tenant="b", memory=10 * GIB, compute=100))
    w.submit(job("late", 2, tenant="b", memory=10 * GIB, compute=200))
    plan = w.plan()
    assert plan.reservation is not None
    [slice] = plan.reservation.tasks[0].slices
    assert (slice.gpu, slice.memory_mib, plan.reservation.due_ms) == (
        "GPU-n1-0",
        60 * GIB,
        START_MS + 2000 * HOUR,
    )
    assert sorted(placed(plan)) == ["fits", "late"]
    on = {p.job.id: p.allocation.tasks[0].slices[0].gpu for p in plan.placements}
    assert on == {"fits": "GPU-n1-0", "late": "GPU-n1-1"} or on == {"fits": "GPU-n1-1", "late": "GPU-n1-0"}


def test_a_gang_is_due_when_the_last_of_its_nodes_is():
    w = halves("n1", "n2", "n3", "n4")
    for n, hours in enumerate((5, 2, 3, 9), start=1):
        full(w, f"n{n}", 8, hours * HOUR)
    w.submit(job("gang", gpus=8, count=2))
    plan = w.plan()
    assert plan.reservation is not None
    assert (plan.held, plan.reservation.due_ms) == ({"n2", "n3"}, START_MS + 3000 * HOUR)
    assert [task.task for task in plan.reservation.tasks] == [0, 1]


# --- nobody knows the end ---


def test_borrowing_stops_where_nobody_knows_the_end():
    """ "Hold": a is owed a node; b, which has its share, borrows nothing more; c, which is owed too, starts."""
    w = World(node("n1"), node("n2"))
    for tenant in "abc":
        w.tenant(tenant, 5 * CARD)
    full(w, "n1", 7, None)
    w.submit(job("big", gpus=8), job("borrow", 1, tenant="b"), job("own", 2, tenant="c"))
    full(w, "n2", 4, None, tenant="c")
    plan = w.plan()
    assert plan.reservation is not None
    assert plan.reservation.due_ms is None
    assert placed(plan) == ["own"]
    reason = plan.waiting["borrow"]
    assert (reason.code, reason.subjects) == (R.BORROWING_STOPPED, ("big", "b"))
    assert "borrows nothing more" in sentence(reason)


def test_qf3_what_the_holder_cannot_use_is_held_from_nobody():
    w = World(node("n1"), node("l4", gpus=2, memory=24 * GIB, model="NVIDIA L4"))
    w.tenant("a", 8 * CARD)
    full(w, "n1", 2, None)
    w.submit(job("big", gpus=8, model="A100"), job("l4-job", 1, tenant="b", model="L4"))
    w.submit(job("a100-job", 2, tenant="b", model="A100"), job("cpu-job", 3, tenant="b", gpus=0))
    plan = w.plan()
    assert plan.held_for == "big"
    assert sorted(placed(plan)) == ["cpu-job", "l4-job"]
    assert plan.waiting["a100-job"].code is R.BORROWING_STOPPED


def test_after_the_bounded_wait_those_who_are_owed_keep_off_too():
    w = World(node("n1"), max_wait_seconds=HOUR)
    for tenant in "abc":
        w.tenant(tenant, 5 * CARD)
    full(w, "n1", 2, None, tenant="b")
    w.submit(job("big", gpus=8))
    w.submit(job("own", 1, tenant="c", queued_at_ms=START_MS + 5000 * HOUR))
    assert placed(w.plan()) == ["own"]
    w.now = HOUR
    plan = w.plan()
    assert placed(plan) == []
    assert plan.waiting["own"].code is R.HELD_FOR_LONG_WAIT


def test_qf6_qf7_a_hold_has_an_end():
    """It waits for a job of which nobody knows the end: after `hold_seconds` the others go on."""
    w = World(node("n1"), hold_seconds=10 * HOUR)
    w.tenant("a", 8 * CARD)
    full(w, "n1", 2, None)
    w.submit(job("big", gpus=8), job("borrow", 1, tenant="b"))
    w.now = 10 * HOUR - 1
    assert placed(w.plan()) == []
    w.now = 10 * HOUR
    plan = w.plan()
    assert (placed(plan), plan.reservation) == (["borrow"], None)


# --- it lives as long as its job ---


def test_qf7_it_dies_with_its_job():
    w = halves("n1")
    full(w, "n1", 2, HOUR)
    w.submit(job("big", gpus=8), job("other", 1, tenant="b"))
    assert (w.plan().held_for, placed(w.plan())) == ("big", [])
    w.see(model.JobGone("big", "queue"))
    assert (w.plan().reservation, placed(w.plan())) == (None, ["other"])


def test_qf7_it_yields_to_a_job_of_higher_priority():
    w = halves("n1")
    full(w, "n1", 2, HOUR)
    w.submit(job("low", gpus=8))
    assert w.plan().held_for == "low"
    w.submit(job("high", 5, gpus=8, priority=3))
    assert w.plan().held_for == "high"


def test_qf7_what_can_never_run_has_none():
    w = halves("n1")
    full(w, "n1", 2, HOUR)
    w.submit(job("never", gpus=9), job("other", 1, tenant="b"))
    plan = w.plan()
    assert (plan.reservation, placed(plan)) == (None, ["other"])


def test_it_starts_when_it_is_due():
    w = halves("n1")
    full(w, "n1", 5, 2 * HOUR)
    w.submit(job("big", gpus=8), job("short", 1, tenant="b", gpus=3, max_runtime_seconds=2 * HOUR))
    assert w.cycle() == ["short"]
    w.now = 2 * HOUR
    w.end("short")
    assert w.plan().held_for == "big", "the other is late: it holds on"
    w.end("r-n1-0")
    assert w.cycle() == ["big"]


def test_a_job_that_was_asked_to_stop_frees_soonest():
    w = halves("n1", "n2")
    full(w, "n1", 8, HOUR)
    full(w, "n2", 8, None)
    stopping = replace(w.live("r-n2-0"), state=JobState.CANCELLING, stop=Reason(R.CANCELLED_BY_USER))
    w.put(stopping)
    w.submit(job("big", gpus=8))
    plan = w.plan()
    assert plan.held == {"n2"}


def test_who_withdraws_a_job_with_a_reservation_gets_none_for_a_day():
    w = halves("n1")
    full(w, "n1", 2, HOUR)
    w.submit(job("fake", gpus=8), job("other", 1, tenant="b", gpus=2))
    plan = w.plan()
    assert plan.held_for == "fake"
    w.put(replace(w.cluster.waiting_jobs["fake"], reason=plan.waiting["fake"]))  # as the leader writes it
    w.put(lifecycle.cancelled(w.cluster.waiting_jobs["fake"], w.now_ms))
    assert w.snapshot().withdrawn == {"a": START_MS}
    w.submit(job("fake2", 2, gpus=8))
    plan = w.plan()
    assert (plan.reservation, placed(plan)) == (None, ["other"])
    w.now = 24 * HOUR
    assert w.plan().held_for == "fake2"


def test_who_withdraws_a_job_without_a_reservation_loses_nothing():
    w = halves("n1")
    w.submit(job("j", gpus=8))
    w.put(lifecycle.cancelled(w.cluster.waiting_jobs["j"], w.now_ms))
    assert w.snapshot().withdrawn == {}


@pytest.mark.parametrize("limit", [600, None])
def test_qf3_the_small_jobs_of_a_tenant_do_not_starve_its_own_large_one(limit):
    """One tenant alone, eight GPUs always full of its jobs of 10 minutes: after twice the bounded wait the large one is
    owed, though its tenant holds all of its share."""
    w = World(node("n1"), max_wait_seconds=HOUR)
    w.tenant("a", 8 * CARD)
    w.submit(*(job(f"s{n:04}", max_runtime_seconds=limit) for n in range(8)), job("big", 1, gpus=8))
    ends_at: dict[str, int] = {}
    started = number = 8
    for minute in range(200):
        w.now = 60 * minute
        for id in [id for id, end in ends_at.items() if end <= minute]:
            w.end(id)
            del ends_at[id]
        while number < started + 2:
            w.submit(job(f"s{number:04}", w.now, max_runtime_seconds=limit))
            number += 1
        for id in w.cycle():
            ends_at[id] = minute + 10 - (int(id[1:]) % 3 if id != "big" else 0)
            started = max(started, number)
        if "big" in ends_at:
            break
    assert 120 <= minute <= 131, f"big started after {minute} minutes"


def test_among_many_shapes_that_must_keep_off_the_one_that_ends_in_time_is_found():
    """Once much was refused beside a reservation, what is left of each line is only a job that ends in time."""
    w = halves("n1")
    full(w, "n1", 6, 2 * HOUR)
    w.submit(job("big", gpus=8))
    for n in range(20):
        w.submit(
            job(
                f"late{n:02}",
                1 + n,
                tenant="b",
                memory=(40 + n) * GIB,
                compute=500,
                max_runtime_seconds=3 * HOUR,
            )
        )
    for n in range(3):
        w.submit(
            job(f"same{n}", 90 + n, tenant="b", memory=70 * GIB, compute=700, max_runtime_seconds=3 * HOUR)
        )
    w.submit(job("quick", 99, tenant="b", memory=70 * GIB, compute=700, max_runtime_seconds=HOUR))
    for memo in (None, Index()):
        plan = plan_cycle(w.snapshot(), w.policy, memo)
        assert plan.held_for == "big"
        assert placed(plan) == ["quick"]
        assert plan.waiting["same2"].code is plan.waiting["late19"].code is R.RESERVED_FOR_OTHER
