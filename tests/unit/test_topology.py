"""Costs of communication, by hand-computed tables."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import gpu, mig, node
from vgpu.inventory import Link, LinkLevel
from vgpu.topology import (
    Location,
    NodeTopology,
    TopologyCosts,
    least_cost_set,
    link_cost,
    location,
    node_cost,
    node_topology,
)

COSTS = TopologyCosts()
# GPUs 0..3 and 4..7 are joined by NVLink (cost 1), the rest by the socket link (cost 20).
TWO_GROUPS = node_topology(node("n1"), COSTS)


@pytest.mark.parametrize(
    ("level", "nvlinks", "cost"),
    [
        (LinkLevel.SAME_BOARD, 0, 2),
        (LinkLevel.PCIE_SWITCH, 0, 4),
        (LinkLevel.PCIE_SWITCHES, 0, 6),
        (LinkLevel.HOST_BRIDGE, 0, 8),
        (LinkLevel.NUMA_NODE, 0, 10),
        (LinkLevel.SYSTEM, 0, 20),
        (LinkLevel.SYSTEM, 2, 1),  # NVLink decides, whatever lies between them on PCIe
    ],
)
def test_a_pair_costs_what_its_lowest_common_ancestor_costs(level, nvlinks, cost):
    assert link_cost(Link("a", "b", level, nvlinks), COSTS) == cost


def test_costs_are_data():
    assert link_cost(Link("a", "b", LinkLevel.SYSTEM, 0), TopologyCosts(system=77)) == 77


@pytest.mark.parametrize(
    ("first", "second", "cost"),
    [
        (("z1", "r1"), ("z1", "r1"), 100),
        (("z1", "r1"), ("z1", "r2"), 400),
        (("z1", "r1"), ("z2", "r1"), 1000),  # racks of one name in two zones are two racks
        (("", ""), ("", ""), 100),
    ],
)
def test_nodes_cost_by_rack_and_zone(first, second, cost):
    assert node_cost(Location(*first), Location(*second), COSTS) == cost


def test_location_comes_from_labels():
    assert location({"zone": "z", "rack": "r", "other": "x"}) == Location("z", "r")
    assert location({}) == Location("", "")


def test_pairs_are_symmetric_and_unknown_pairs_cost_most():
    bare = node_topology(node("n1", gpus=2, links=()), COSTS)
    assert bare.pairs == ((0, 20), (20, 0))
    assert all(TWO_GROUPS.pairs[a][b] == TWO_GROUPS.pairs[b][a] for a, b in combinations(range(8), 2))


def test_mig_instances_of_one_card_cost_nothing_and_others_what_their_cards_cost():
    cards = [gpu("n", 0, unavailable="MIG mode"), gpu("n", 1, unavailable="MIG mode")]
    instances = [mig("n", 0, 2, 16384, 142), mig("n", 0, 3, 16384, 142), mig("n", 1, 4, 16384, 142)]
    link = Link(cards[0].uuid, cards[1].uuid, LinkLevel.HOST_BRIDGE)
    topology = node_topology(node("n", [*cards, *instances], links=(link,)), COSTS)
    assert topology.pairs[2][3] == 0
    assert topology.pairs[2][4] == 8


def test_mean_cost_counts_each_pair():
    assert NodeTopology(((0, 4), (4, 0))).mean_cost_milli == 4000
    assert NodeTopology(((0,),)).mean_cost_milli == -1
    # 12 of the 28 pairs of two groups of four cost 1, the other 16 cost 20: 332 / 28.
    assert TWO_GROUPS.mean_cost_milli == 332_000 // 28


@pytest.mark.parametrize(
    ("free", "count", "chosen", "cost", "domain"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 4, (0, 1, 2, 3), 6, 4),
        ([0, 1, 4, 5, 6], 3, (4, 5, 6), 3, 3),  # the group that holds three, though another comes first
        ([0, 1, 2, 4, 5], 2, (4, 5), 1, 2),  # equal cost: the smaller domain, so that three stay together
        ([3, 4], 2, (3, 4), 20, 2),
        ([0, 1, 2, 4], 4, (0, 1, 2, 4), 63, 4),
        ([5], 1, (5,), 0, 1),
    ],
)
def test_the_set_of_least_cost_then_of_the_smallest_domain(free, count, chosen, cost, domain):
    assert least_cost_set(TWO_GROUPS, free, count) == (chosen, cost, domain)


def test_too_few_gpus_are_no_set():
    assert least_cost_set(TWO_GROUPS, [1], 2) is None


def test_tp2_two_gpus_go_to_the_numa_domain_that_has_two():
    cards = [gpu("n", n) for n in range(4)]
    level = {True: LinkLevel.PCIE_SWITCH, False: LinkLevel.SYSTEM}
    pairs = tuple(
        Link(a.uuid, b.uuid, level[a.index // 2 == b.index // 2]) for a, b in combinations(cards, 2)
    )
    topology = node_topology(node("n", cards, links=pairs), COSTS)
    assert least_cost_set(topology, [0, 1, 2], 2) == ((0, 1), 4, 2)


@given(st.sets(st.integers(0, 15), min_size=1), st.integers(1, 8))
def test_growing_finds_the_best_set_of_a_tree(free, count):
    """16 GPUs in groups of four under two sockets: too many sets to look at all, and growing is as good."""
    pairs = tuple(
        tuple(0 if a == b else 1 if a // 4 == b // 4 else 10 if a // 8 == b // 8 else 20 for b in range(16))
        for a in range(16)
    )
    topology = NodeTopology(pairs)
    found = least_cost_set(topology, sorted(free), count)
    if len(free) < count:
        assert found is None
        return
    assert found is not None
    cheapest = min(topology.set_cost(gpus) for gpus in combinations(sorted(free), count))
    # A tree of distances is not a tree of sums: growing may miss the optimum by a little where no domain holds all.
    assert cheapest <= found[1] <= cheapest * 5 // 4 + 1
    assert len(set(found[0])) == count
    assert set(found[0]) <= free
