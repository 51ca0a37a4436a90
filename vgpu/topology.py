"""The topology tree, and what it costs two GPUs to talk: cluster - zone - rack - node - NUMA domain - PCIe switch or
NVLink domain - GPU - slice.

Costs are data (`TopologyCosts`). Inside a node the cost of a pair comes from NVML's lowest common ancestor and its
NVLinks; between nodes from the labels `zone` and `rack`. Everything is in whole numbers, so that the same cluster
gives the same answer on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb

from attrs import frozen

from vgpu.inventory import Link, NodeInventory

ZONE_LABEL = "zone"
RACK_LABEL = "rack"
# Up to this many sets the best one is found by looking at all of them: any choice among 8 GPUs has at most 70.
_EXACT_SETS = 100


@frozen
class TopologyCosts:
    """Cost of communication between two GPUs, by their lowest common ancestor; lower is closer. The figures follow
    the order of bandwidth (NVLink, PCIe switch, host bridge, socket link, rack switch, spine), not its exact ratio:
    only their order decides a placement. NVLinked GPUs cost `nvlink` whatever their PCIe level."""

    same_card: int = 0
    nvlink: int = 1
    same_board: int = 2
    pcie_switch: int = 4
    pcie_switches: int = 6
    host_bridge: int = 8
    numa_node: int = 10
    system: int = 20
    rack: int = 100
    zone: int = 400
    cluster: int = 1000


def link_cost(link: Link, costs: TopologyCosts) -> int:
    """Cost of one pair of GPUs of a node."""
    if link.nvlinks > 0:
        return costs.nvlink
    return int(getattr(costs, link.level.value))


@frozen
class Location:
    """Where a node stands in the tree. A node without a rack label is in the rack "" of its zone."""

    zone: str = ""
    rack: str = ""


def location(labels: Mapping[str, str]) -> Location:
    return Location(labels.get(ZONE_LABEL, ""), labels.get(RACK_LABEL, ""))


def node_cost(first: Location, second: Location, costs: TopologyCosts) -> int:
    """Cost between two different nodes: under one rack switch, in one zone, or across the cluster."""
    if first == second:
        return costs.rack
    return costs.zone if first.zone == second.zone else costs.cluster


@frozen(cache_hash=True)
class NodeTopology:
    """Costs between the GPUs of one node, by their place in its inventory: `pairs[i][j]`."""

    pairs: tuple[tuple[int, ...], ...]

    @property
    def mean_cost_milli(self) -> int:
        """Mean cost of all pairs, in thousandths; -1 where there is no pair."""
        size = len(self.pairs)
        if size < 2:
            return -1
        return 1000 * sum(map(sum, self.pairs)) // (size * (size - 1))

    def set_cost(self, gpus: Sequence[int]) -> int:
        """Sum of the costs of all pairs of the set."""
        return sum(self.pairs[first][second] for first, second in combinations(gpus, 2))

    def cost_to(self, gpu: int, others: Sequence[int]) -> int:
        row = self.pairs[gpu]
        return sum(row[other] for other in others if other != gpu)

    def domain_size(self, gpus: Sequence[int], among: Sequence[int]) -> int:
        """How many of `among` are as close to the set as its own members are to each other: the size of the smallest
        domain of the tree that holds the set."""
        if len(gpus) < 2:
            return len(gpus)
        return len(self.around(gpus, among))

    def around(self, gpus: Sequence[int], among: Sequence[int]) -> tuple[int, ...]:
        """Those of `among` that are as close to a set of two or more as its own members are to each other."""
        widest = max(self.pairs[first][second] for first, second in combinations(gpus, 2))
        return tuple(
            gpu for gpu in among if gpu in gpus or any(self.pairs[gpu][member] <= widest for member in gpus)
        )

    def nearest(self, gpu: int) -> tuple[int, ...]:
        """The other GPUs that cost the least: with it they are its NVLink group, or what is behind its switch."""
        row = self.pairs[gpu]
        others = [other for other in range(len(row)) if other != gpu]
        least = min((row[other] for other in others), default=0)
        return tuple(other for other in others if row[other] == least)

    @property
    def is_flat(self) -> bool:
        """All pairs cost the same: the node has no domains below itself."""
        return len({cost for n, row in enumerate(self.pairs) for m, cost in enumerate(row) if n != m}) <= 1


def node_topology(inventory: NodeInventory, costs: TopologyCosts) -> NodeTopology:
    """A pair that the node did not report costs `system`, the most that a node can; MIG instances of one card cost
    `same_card`, those of different cards what their cards cost."""
    cards = [gpu.card for gpu in inventory.gpus]
    known: dict[tuple[str, str], int] = {}
    for link in inventory.links:
        known[link.first, link.second] = known[link.second, link.first] = link_cost(link, costs)
    return NodeTopology(
        tuple(
            tuple(costs.same_card if a == b else known.get((a, b), costs.system) for b in cards)
            for a in cards
        )
    )


def least_cost_set(
    topology: NodeTopology, candidates: Sequence[int], count: int
) -> tuple[tuple[int, ...], int, int] | None:
    """The `count` candidates with the least communication cost, then in the smallest domain, then of the lowest
    places: (set, cost, domain size). None where there are too few.

    All sets are looked at where that is cheap. Otherwise a set grows from each candidate by the nearest one, which is
    exact where distances form a tree, as they do behind PCIe and NVSwitch."""
    if len(candidates) < count:
        return None
    ordered = sorted(candidates)
    if comb(len(ordered), count) <= _EXACT_SETS:
        sets = set(combinations(ordered, count))
    else:
        sets = {_grown(topology, seed, ordered, count) for seed in ordered}
    cost, size, best = min(
        (topology.set_cost(gpus), topology.domain_size(gpus, ordered), gpus) for gpus in sets
    )
    return best, cost, size


def _grown(topology: NodeTopology, seed: int, candidates: Sequence[int], count: int) -> tuple[int, ...]:
    chosen = [seed]
    rest = [gpu for gpu in candidates if gpu != seed]
    while len(chosen) < count:
        nearest = min(rest, key=lambda gpu: (topology.cost_to(gpu, chosen), gpu))
        chosen.append(nearest)
        rest.remove(nearest)
    return tuple(sorted(chosen))
