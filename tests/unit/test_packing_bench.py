"""The packing benchmark on its made-up sample: the experiment's rules, and that ours packs better than FGD."""

from __future__ import annotations

import numpy as np
import pytest

from tests.benchmarks import openb, openb_memory
from tests.benchmarks.openb import Node, Pod, Run
from tests.benchmarks.openb_policies import POLICIES, fragmentation, placed_by
from tests.benchmarks.openb_serai import Adapter, placed_by_serai


@pytest.fixture(scope="module")
def run() -> Run:
    return openb.run_of(openb.SAMPLE, 42)


def fits(run: Run, placed: list[bool]) -> None:
    used = sum(pod.asked_milli for pod, here in zip(run.pods, placed, strict=True) if here)
    assert 0 < used <= run.capacity_milli


def test_the_stream_asks_for_130_percent(run):
    asked = sum(pod.asked_milli for pod in run.pods)
    assert 1.299 * run.capacity_milli < asked <= 1.3 * run.capacity_milli + 7000
    assert openb.run_of(openb.SAMPLE, 42) == run
    assert openb.run_of(openb.SAMPLE, 43) != run


def test_of_more_than_130_percent_some_are_left_out():
    nodes, pods = (Node(96_000, 1000, 8, "A"),) * 10, (Pod(1, 1, 1000, 8),) * 20
    assert len(openb.stream_of(nodes, pods, 1).pods) == 13


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_fills_the_cluster(run, policy):
    placed, left = placed_by(policy, run, 42)
    fits(run, placed.tolist())
    assert 0 < left < 40


def test_fragmentation_is_what_typical_pods_cannot_use():
    """By hand: one kind, 600 of a GPU. 400 and 500 are too small for it, 700 is not; a node without CPU has all lost."""
    run = Run((Node(4000, 1, 3, "A"), Node(0, 1, 1, "A")), (Pod(1000, 1, 600, 1),) * 10, ())
    gpus = np.zeros((2, 8), np.int64)
    gpus[0, :3] = 400, 500, 700
    gpus[1, 0] = 1000
    left = fragmentation(run, np.array([4000, 0]), gpus)
    assert left == pytest.approx(100 * (400 + 500 + 1000) / 4000)


def test_a_pod_that_allows_some_models_runs_on_these_alone():
    nodes = (Node(64_000, 64_000, 8, "A"), Node(64_000, 64_000, 8, "B"), Node(64_000, 64_000, 8, "C"))
    pods = (Pod(1000, 1000, 1000, 8, "A|C"),) * 3
    placed, _ = placed_by_serai(Run(nodes, pods, pods), is_learned=True)
    assert placed == [True, True, False]
    shape = Adapter(Run(nodes, pods, pods)).shape(Pod(1000, 1000, 470, 1))
    assert (shape.tasks[0].gpus.memory_mib, shape.tasks[0].gpus.compute_milli) == (
        80 * 1024 * 470 // 1000,
        470,
    )


def test_serai_packs_better_than_fgd(run):
    """Also without knowing the mix."""
    fgd = openb.figures(run, placed_by("fgd", run, 42)[0].tolist())
    for is_learned in (False, True):
        placed, _ = placed_by_serai(run, is_learned)
        fits(run, placed)
        ours = openb.figures(run, placed)
        assert ours.allocated_100 > fgd.allocated_100 + 0.3, is_learned
        assert ours.allocated_130 > fgd.allocated_130 + 0.3, is_learned


def test_memory_is_drawn_once_for_fractions_alone_and_independently_of_compute(run):
    pods = openb_memory.with_memory(run.originals, "uniform", 1)
    assert pods == openb_memory.with_memory(run.originals, "uniform", 1)
    assert all(pod.drawn_mib is None for pod in pods if openb.size_of(pod) != "fraction")
    parts = [pod for pod in pods if openb.size_of(pod) == "fraction"]
    drawn = np.array([(pod.milli, pod.gpu_mib) for pod in parts]).T
    assert len(set(drawn[1].tolist())) == 8
    assert abs(np.corrcoef(drawn)[0, 1]) < 0.15
    large = [pod.gpu_mib for pod in openb_memory.with_memory(run.originals, "large", 1) if pod.drawn_mib]
    assert np.mean(large) > 1.2 * drawn[1].mean()


def test_shares_of_two_dimensions_by_hand():
    """Two GPUs. The first pod has half the compute and all memory of one, the second a whole one, the third finds no
    room: 1.5 GPUs of compute, 2 of memory, and 2 by the larger share of each."""
    pods = (
        Pod(1, 1, 500, 1, drawn_mib=openb.CARD_MIB),
        Pod(1, 1, 1000, 1),
        Pod(1, 1, 500, 1, drawn_mib=1024),
    )
    run = Run((Node(9, 9, 2, "A"),), pods, (*pods, Pod(1, 1, 600, 1)))
    found = openb_memory.figures(run, [True, True, False, False])
    assert (found["compute_100"], found["memory_100"]) == (75.0, 100.0)
    assert (found["sum_100"], found["scarcer_100"]) == (175.0, 100.0)
    assert found["compute_130"] == 75.0


def test_what_typical_pods_cannot_use_of_two_shares_by_hand():
    """A GPU with 600 of compute and 200 of memory is of no use to a pod of 500 and 300: by the scarcer share 200 are
    lost, by the mean of both 400."""
    usual, shares = np.array([(1000, 500, 300, 1)]), np.array([1.0])
    compute, memory = np.array([600, 1000, *[0] * 6]), np.array([200, 1000, *[0] * 6])
    for policy, lost in (("fgd_scarcer", 200), ("fgd_sum", 400)):
        number = openb_memory.POLICIES.index(policy)
        assert openb_memory._frag.py_func(number, 1000, compute, memory, usual, shares) == lost
        everything = lost + 1000
        assert openb_memory._frag.py_func(number, 999, compute, memory, usual, shares) == everything
