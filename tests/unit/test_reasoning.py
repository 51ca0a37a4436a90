"""What can never run says so at once; what merely cannot run now is not refused (QF-1, QF-2, QT-7)."""

from __future__ import annotations

import pytest

from coordinator import model
from coordinator.cycle import why_never
from tests.builders import GIB, World, gpu, job, mig, node, piece, running, spec
from vgpu.reasons import ReasonCode as R
from vgpu.sentences import sentence

CARD = 80 * GIB


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
    ("of", "numbers", "told"),
    [
        (spec(gpus=9), {"gpus": 9, "largest_gpus": 8}, "it needs 9 GPUs, the largest node has 8 GPUs"),
        (
            spec(cpu=9000, model="A40"),
            {"cpu_milli": 9000, "largest_cpu_milli": 8000},
            "it needs 9 cores, the largest such node has 8 cores",
        ),
        (
            spec(node_memory=1024 * GIB + 1024),
            {"node_memory_mib": 1024 * GIB + 1024, "largest_node_memory_mib": 1024 * GIB},
            "it needs 1049600 MiB of memory, the largest such node has 1048576 MiB",
        ),
        (
            spec(memory=200 * GIB, compute=1000),
            {"memory_mib": 200 * GIB, "largest_memory_mib": CARD},
            "larger than any GPU; it needs 204800 MiB of GPU memory, the largest GPU has 81920 MiB",
        ),
    ],
)
def test_qf2_of_what_no_node_has_only_that_is_told_which_is_at_fault(of, numbers, told):
    reason = why_never(of, cluster().snapshot())
    assert reason.numbers == numbers
    assert told in sentence(reason)


def test_qf2_of_a_slice_with_more_compute_than_any_gpu_has_the_compute_is_told():
    w = World(node("n1", [mig("n1", 0, 1, 16384, 142)], isolations=("mig",)))
    reason = why_never(spec(), w.snapshot())
    assert reason.numbers == {"compute_milli": 1000, "largest_compute_milli": 142}
    assert sentence(reason).endswith("it needs 100% of a GPU, the largest has 14.2%")


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
