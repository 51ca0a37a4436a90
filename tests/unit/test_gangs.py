"""Gangs: all or none, under the lowest common switch, on few nodes."""

from __future__ import annotations

import pytest

from coordinator import gangs
from coordinator.gangs import NO_LIMIT, communication_cost
from coordinator.placement import Draft, Spot, wait_reason
from coordinator.snapshot import shape_of
from coordinator.usage import Headroom
from jobspecs.spec import JobSpec, TaskSpec
from tests.builders import GIB, World, gpu, node, piece, running, spec, wants
from vgpu.inventory import NodeInventory
from vgpu.reasons import ReasonCode


def rack(name: str, rack_name: str, zone: str = "z1", gpus: int = 8) -> NodeInventory:
    return node(name, gpus=gpus, labels={"rack": rack_name, "zone": zone})


def busy(w: World, name: str, *gpus: int) -> None:
    w.submit(running(f"busy-{name}", name, [piece(f"GPU-{name}-{n}") for n in gpus]))


def place(w: World, of: JobSpec, headroom: Headroom = NO_LIMIT) -> tuple[Spot, ...] | None:
    return gangs.place(Draft(w.snapshot()), shape_of(of), headroom)


def nodes(w: World, of: JobSpec) -> list[str] | None:
    """The node of each task, by task number."""
    spots = place(w, of)
    if spots is None:
        return None
    assert [spot.number for spot in spots] == list(range(of.task_count))
    return [spot.node for spot in spots]


def test_a_gang_goes_into_one_node_where_it_can():
    w = World(rack("n1", "r1", gpus=4), rack("n2", "r1"), rack("n3", "r1"))
    busy(w, "n3", 0, 1)
    assert nodes(w, spec(gpus=2, count=3)) == ["n3"] * 3


def test_in_one_node_the_least_cost_then_the_fullest():
    w = World(rack("n1", "r1"), rack("n2", "r1"))
    busy(w, "n2", 4, 5, 6, 7)
    assert nodes(w, spec(gpus=2, count=2)) == ["n2", "n2"]
    spots = place(w, spec(gpus=2, count=2))
    assert spots is not None
    assert sorted(gpu for spot in spots for gpu in spot.found.gpus) == [0, 1, 2, 3]


def test_tp1_a_gang_goes_wholly_into_the_rack_that_has_room():
    """Rack A has one free node, rack B two: the fuller rack does not get the first task."""
    w = World(rack("a1", "A"), rack("a2", "A"), rack("b1", "B"), rack("b2", "B"))
    busy(w, "a1", *range(8))
    assert sorted(nodes(w, spec(gpus=8, count=2)) or []) == ["b1", "b2"]


def test_a_rack_then_a_zone_then_the_cluster():
    w = World(rack("a1", "A", "z1"), rack("b1", "B", "z1"), rack("c1", "C", "z2"), rack("c2", "C", "z2"))
    two, three, four = (spec(gpus=8, count=n) for n in (2, 3, 4))
    assert sorted(nodes(w, two) or []) == ["c1", "c2"]
    busy(w, "c2", 0)
    assert sorted(nodes(w, two) or []) == ["a1", "b1"]
    busy(w, "b1", 0)
    assert sorted(nodes(w, two) or []) == ["a1", "c1"]
    assert nodes(w, three) is None, "nothing is placed where not all fit"
    assert nodes(w, four) is None


def test_of_two_racks_that_fit_the_smaller_gets_it():
    w = World(*(rack(f"a{n}", "A") for n in range(3)), *(rack(f"b{n}", "B") for n in range(2)))
    assert sorted(nodes(w, spec(gpus=8, count=2)) or []) == ["b0", "b1"]


def test_of_two_racks_that_fit_the_one_with_the_cheaper_sets_before_the_smaller():
    fast = [node(f"a{n}", groups=(range(8),), labels={"rack": "A"}) for n in range(3)]
    slow = [node(f"b{n}", groups=(), labels={"rack": "B"}) for n in range(2)]
    w = World(*fast, *slow)
    assert sorted(nodes(w, spec(gpus=8, count=2)) or []) == ["a0", "a1"]


def test_over_racks_the_next_node_is_the_closest():
    w = World(
        rack("a1", "A", gpus=4), rack("a2", "A", gpus=7), rack("b1", "B", gpus=5), rack("c1", "C", gpus=6)
    )
    assert sorted(nodes(w, spec(gpus=4, count=3)) or []) == ["a1", "a2", "b1"]


def test_a_gang_lies_on_few_nodes():
    w = World(rack("n1", "r", gpus=2), rack("n2", "r", gpus=4), rack("n3", "r"))
    assert nodes(w, spec(gpus=2, count=6)) == ["n3"] * 4 + ["n2"] * 2


def test_tasks_may_differ():
    of = spec(
        tasks=[
            TaskSpec("server", count=1, gpus=wants(0), cpu_milli=64_000, memory_mib=1024),
            TaskSpec("worker", count=2, gpus=wants(8), cpu_milli=65_000, memory_mib=1024),
        ]
    )
    w = World(rack("n1", "r"), rack("n2", "r"), rack("cpu", "r", gpus=0))
    assert nodes(w, of) in (["cpu", "n1", "n2"], ["cpu", "n2", "n1"])
    assert nodes(World(rack("n1", "r"), rack("n2", "r")), of) is None


def test_large_tasks_are_placed_before_small_ones_break_their_gpus():
    small = TaskSpec("small", gpus=wants(2, memory=10 * GIB), cpu_milli=1, memory_mib=1)
    large = TaskSpec("large", gpus=wants(2), cpu_milli=1, memory_mib=1)
    w = World(node("n1", gpus=4))
    w.submit(running("p", "n1", [piece(f"GPU-n1-{n}", 1024, 100, "timeslice") for n in (2, 3)]))
    spots = place(w, spec(tasks=[small, large]))
    assert spots is not None
    assert [spot.found.gpus for spot in spots] == [(2, 3), (0, 1)]


def test_a_task_that_wants_one_model_comes_before_one_that_takes_any():
    anything = TaskSpec("any", gpus=wants(1), cpu_milli=1, memory_mib=1)
    picky = TaskSpec("picky", gpus=wants(1, model="A100"), cpu_milli=1, memory_mib=1)
    w = World(node("n1", [gpu("n1", 0), gpu("n1", 1, 16 * GIB, "T4")]))
    spots = place(w, spec(tasks=[anything, picky]))
    assert spots is not None
    assert [spot.found.gpus for spot in spots] == [(1,), (0,)]


def test_slices_of_a_gang_may_share_a_gpu():
    w = World(node("n1", gpus=1))
    of = spec(memory=20 * GIB, compute=250, count=4)
    assert nodes(w, of) == ["n1"] * 4
    assert nodes(w, spec(memory=20 * GIB, compute=250, count=5)) is None


def test_constraints_bound_the_domain():
    w = World(rack("a1", "A", "z1"), rack("b1", "B", "z2"))
    assert nodes(w, spec(gpus=8, count=2, constraints={"zone": "z1"})) is None
    assert nodes(w, spec(gpus=8, count=2)) is not None


def test_the_limit_is_for_the_whole_gang():
    w = World(node("n1"))
    assert place(w, spec(gpus=2, count=2), Headroom(memory_mib=4 * 80 * GIB)) is not None
    assert place(w, spec(gpus=2, count=2), Headroom(memory_mib=4 * 80 * GIB - 1)) is None


def test_a_gang_that_does_not_fit_says_so_when_each_task_alone_would():
    w = World(rack("n1", "r"), rack("n2", "r"))
    busy(w, "n1", 0)
    shape = shape_of(spec(gpus=8, count=2))
    reason = wait_reason(shape, Draft(w.snapshot()))
    assert reason.code is ReasonCode.GANG_DOES_NOT_FIT
    assert (reason.numbers["tasks"], reason.numbers["nodes"], reason.numbers["not_enough_idle_gpus"]) == (
        2,
        2,
        1,
    )
    busy(w, "n2", 0)
    assert wait_reason(shape, Draft(w.snapshot())).code is ReasonCode.NOT_ENOUGH_IDLE_GPUS


@pytest.mark.parametrize(
    ("of", "cost"),
    [
        (spec(gpus=4), 6),  # six NVLinked pairs
        (spec(gpus=2, count=2), 6),  # on one node its pairs count across tasks
        (spec(gpus=8, count=2), 2 * (12 * 1 + 16 * 20) + 64 * 100),  # two nodes of one rack
        (spec(gpus=0, count=2), 0),
    ],
)
def test_communication_cost(of, cost):
    w = World(rack("n1", "r"), rack("n2", "r"))
    draft = Draft(w.snapshot())
    spots = gangs.place(draft, shape_of(of), NO_LIMIT)
    assert spots is not None
    assert communication_cost(draft, spots) == cost


def test_a_gang_of_twenty_nodes_fills_one_rack():
    w = World(*(rack(f"n{n:04}", f"r{n // 20:02}", f"z{n // 200}") for n in range(400)))
    busy(w, "n0000", 0)
    placed = nodes(w, spec(gpus=8, count=20))
    assert placed is not None
    assert len(set(placed)) == 20
    assert len({int(name[1:]) // 20 for name in placed}) == 1
