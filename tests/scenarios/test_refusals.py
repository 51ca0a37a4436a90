"""TP-6: what a node refuses is not offered to it again at once, while there are others."""

from __future__ import annotations

import pytest

from coordinator import model
from coordinator.cycle import plan_cycle
from coordinator.index import Index
from coordinator.lifecycle import REFUSED_SECONDS
from coordinator.model import Job, NodeAdmin, TaskState
from tests.builders import World, gpu, job, node, task
from vgpu.reasons import ReasonCode

BACK_OFF = 60
DETAIL = "device admission: 4 GPUs in one NUMA domain, 2 are there"


def refuse(w: World, id: str, on: str, fault: ReasonCode = ReasonCode.LAUNCH_FAILED) -> Job:
    """The node says that it will never start its tasks of the job; those of other nodes were stopped for it. What was
    written, once the job's back-off is over."""
    live = w.live(id)
    assert live.allocation is not None
    for placed in live.allocation.tasks:
        said = fault if placed.node == on else ReasonCode.SIBLING_FAILED
        w.see(model.TaskSeen(task(live, placed.task, TaskState.EXITED, fault=said.value, detail=DETAIL)))
    after = next(t.after for t in w.settle() if t.before.id == id)
    w.now += BACK_OFF
    return after


def nodes_of(w: World, id: str) -> tuple[str, ...]:
    allocation = w.live(id).allocation
    return allocation.nodes if allocation else ()


def placed_on_n1(*jobs: Job, nodes: int = 2) -> World:
    """Jobs go to n1 first, since its name is the first."""
    w = World(*(node(f"n{n}", gpus=4) for n in range(1, nodes + 1)))
    w.tenant("a", 1 << 30)
    w.submit(*jobs)
    w.cycle()
    assert nodes_of(w, jobs[0].id) == ("n1",)
    return w


@pytest.mark.parametrize(
    "fault", [ReasonCode.LAUNCH_FAILED, ReasonCode.ISOLATION_STEPS_FAILED, ReasonCode.ENGINE_REFUSED]
)
def test_the_next_attempt_goes_to_another_node(fault: ReasonCode):
    w = placed_on_n1(job("j", gpus=4), nodes=3)
    seen = []
    for _ in range(3):
        seen += nodes_of(w, "j")
        refused = refuse(w, "j", seen[-1], fault)
        assert refused.refused_by == tuple(seen)
        assert w.cycle() == ["j"]
    assert seen == ["n1", "n2", "n3"]


def test_a_launch_that_never_began_counts_as_refused():
    w = placed_on_n1(job("j", gpus=4), nodes=2)
    w.now += w.settings.launch_deadline_seconds
    w.settle()
    live = w.live("j")
    assert live.stop is not None
    w.see(model.TaskSeen(task(live, 0, TaskState.EXITED)))
    w.settle()
    w.now += BACK_OFF
    w.cycle()
    assert nodes_of(w, "j") == ("n2",)


def test_it_waits_for_other_nodes_with_a_reason_and_keeps_nobody_off():
    w = placed_on_n1(job("j", gpus=4), job("there", 1, gpus=4))
    refuse(w, "j", "n1")
    assert w.cycle() == []
    reason = w.plan().waiting["j"]
    assert reason.code is ReasonCode.NODES_REFUSED
    assert reason.subjects == ("n1",)
    assert reason.numbers == {"seconds": REFUSED_SECONDS - BACK_OFF}
    w.submit(job("next", 2, gpus=4))
    assert w.cycle() == ["next"], "of the same shape, and n1 refused it nothing"
    assert nodes_of(w, "next") == ("n1",)
    w.end("there")
    assert w.cycle() == ["j"]
    assert nodes_of(w, "j") == ("n2",)


def test_after_a_while_it_is_tried_there_again():
    w = placed_on_n1(job("j", gpus=4), job("there", 1, gpus=4))
    queued = w.now
    refuse(w, "j", "n1")
    w.now = queued + REFUSED_SECONDS - 1
    assert w.cycle() == []
    due_ms = w.snapshot().next_due_ms
    assert due_ms is not None
    assert due_ms <= w.now_ms + 1000, "time alone changes it"
    w.now += 1
    assert w.cycle() == ["j"]
    assert nodes_of(w, "j") == ("n1",)


def test_without_another_node_that_could_take_it_nobody_waits_for_one():
    """Others are too small, or take no new work."""
    w = World(node("n1", gpus=4), node("n2", gpus=4), node("n3", gpus=2))
    w.see(model.AdminSeen(NodeAdmin("n2", cordoned=True)))
    w.submit(job("j", gpus=4))
    w.cycle()
    refuse(w, "j", "n1")
    assert w.cycle() == ["j"]


def test_of_a_gang_only_the_node_that_refused_is_avoided():
    w = World(*(node(f"n{n}", gpus=1) for n in range(1, 5)))
    w.submit(job("g", gpus=1, count=2))
    w.cycle()
    first, second = nodes_of(w, "g")
    assert refuse(w, "g", second).refused_by == (second,)
    w.cycle()
    assert second not in nodes_of(w, "g")
    assert first in nodes_of(w, "g")


def test_a_gang_does_not_wait_for_nodes_that_could_hold_a_part_of_it_only():
    """It would wait in vain for as long as it waits at all."""
    w = World(node("n1", gpus=3), node("n2", gpus=2))
    w.submit(job("g", gpus=1, count=3))
    w.cycle()
    refuse(w, "g", "n1")
    assert w.cycle() == ["g"]
    assert nodes_of(w, "g") == ("n1",)


def test_what_all_nodes_of_a_gang_refuse_tells_nothing_of_one():
    w = World(*(node(f"n{n}", gpus=1) for n in range(1, 3)))
    w.submit(job("g", gpus=1, count=2))
    w.cycle()
    live = w.live("g")
    for number in range(2):
        w.see(model.TaskSeen(task(live, number, TaskState.EXITED, fault="engine_refused")))
    assert next(t.after for t in w.settle()).refused_by == ()


def test_a_job_that_failed_by_itself_avoids_nothing():
    w = placed_on_n1(job("j", gpus=4, retries=1))
    assert w.end("j", exit_code=1).refused_by == ()


def test_a_warm_index_avoids_the_same_nodes_as_a_cold_one():
    w = placed_on_n1(job("j", gpus=4), job("there", 1, gpus=4), nodes=3)
    memo = Index()
    plan_cycle(w.snapshot(), w.policy, memo)
    refuse(w, "j", "n1")
    w.submit(job("other", 2, gpus=4))
    snapshot = w.snapshot()
    plan = plan_cycle(snapshot, w.policy, memo)
    assert plan.placements == plan_cycle(snapshot, w.policy).placements
    assert {p.job.id: p.allocation.nodes for p in plan.placements} == {"j": ("n3",), "other": ("n1",)}


def test_four_gpus_of_one_numa_domain_come_before_two_and_two():
    """There is no wish for one domain as a hard rule (CONTRIBUTING, decision 13): the domain is the first thing that the
    set of least cost takes, wherever it is free."""
    halves = [gpu("split", n, numa_node=n // 4) for n in range(8)]
    whole = [gpu("whole", n, numa_node=n // 4) for n in range(8)]
    w = World(node("split", halves, groups=()), node("whole", whole, groups=()))
    w.tenant("a", 1 << 30)
    w.submit(*(job(f"s{n}", gpus=2, constraints={}) for n in range(4)))
    w.cycle()
    for id in ("s0", "s1", "s2", "s3"):
        assert len({_numa(w, uuid) for uuid in w.where(id)}) == 1
    w.submit(job("four", 1, gpus=4))
    w.cycle()
    assert len({_numa(w, uuid) for uuid in w.where("four")}) == 1


def _numa(w: World, uuid: str) -> tuple[str, int | None]:
    return next(
        (view.name, gpu.gpu.numa_node)
        for view in w.snapshot().nodes.values()
        for gpu in view.gpus
        if gpu.gpu.uuid == uuid
    )
