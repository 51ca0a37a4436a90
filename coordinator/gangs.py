"""Where the tasks of a gang go: all of them or none, under the lowest common switch.

Domains are tried from the bottom of the tree upward: one node, one rack, one zone, the cluster. In the first level
at which a domain takes the whole gang, the one with the least communication cost gets it, then the smallest that
fits. Inside a domain nodes are filled one after the other, each time the one that takes most of what is left, so
that the gang lies on few nodes. Filling is greedy: large tasks first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coordinator.fit import Fit, after
from coordinator.nodes import Row
from coordinator.placement import Draft, IndexedSearch, Spot
from coordinator.snapshot import Shape, TaskShape
from coordinator.usage import NO_LIMIT, Headroom
from vgpu.topology import Location, node_cost

__all__ = ["NO_LIMIT", "communication_cost", "place"]

# What is left to place: how many of each task of the shape.
Left = tuple[int, ...]
# What a node takes of it: (amount in thousandths of GPUs and tasks, (task, fit) ..., what is left then).
Pack = tuple[int, tuple[tuple[int, Fit], ...], Left]


def place(draft: Draft, shape: Shape, headroom: Headroom) -> tuple[Spot, ...] | None:
    """Spots for all tasks of a job in the order of their numbers; None if they do not all fit. Changes nothing."""
    task = shape.only_task
    if task is not None:
        spot = draft.search(task, shape.constraints).best(headroom)
        return None if spot is None else (spot,)
    if shape.task_count == 0:
        return None
    searches = [draft.search(task, shape.constraints) for task in shape.tasks if task.count]
    if not all(search.fits_somewhere for search in searches):
        return None
    alike = searches[0] if len(searches) == 1 else None
    if isinstance(alike, IndexedSearch) and alike.is_compiled:
        spots = alike.together()
    else:
        spots = _Gang(draft, shape).spots()
    return spots if spots is not None and headroom.allows(draft.charge(spots)) else None


def communication_cost(draft: Draft, spots: Sequence[Spot]) -> int:
    """Cost of all pairs of GPUs of the job, inside its nodes and between them. A task without a GPU counts as one
    end of each connection to other nodes."""
    costs = draft.snapshot.settings.topology
    ends: dict[str, int] = {}
    gpus: dict[str, list[int]] = {}
    for spot in spots:
        ends[spot.node] = ends.get(spot.node, 0) + max(1, len(spot.found.gpus))
        gpus.setdefault(spot.node, []).extend(spot.found.gpus)
    cost = sum(draft.views[node].topology.set_cost(sorted(set(used))) for node, used in gpus.items())
    nodes = sorted(ends)
    for place_, first in enumerate(nodes):
        for second in nodes[place_ + 1 :]:
            between = node_cost(draft.views[first].location, draft.views[second].location, costs)
            cost += ends[first] * ends[second] * between
    return cost


class _Gang:
    """Nodes where none of the tasks fits are left out from the start: they give no room. `_twins` names the first of
    the nodes with an equal row, so that what was found for one is looked up for the others at no cost."""

    def __init__(self, draft: Draft, shape: Shape) -> None:
        self._draft = draft
        self._shape = shape
        tasks = [task for task in shape.tasks if task.count]
        fitting = {node for task in tasks for node in draft.search(task, shape.constraints).fitting()}
        self._nodes = sorted(fitting)
        self._rows = {node: draft.row(node) for node in self._nodes}
        first: dict[Row, str] = {}
        self._twins = {node: first.setdefault(row, node) for node, row in self._rows.items()}
        self._size = {twin: (row.idle_gpus, row.gpu_memory_mib) for row, twin in first.items()}
        self._order = sorted(range(len(shape.tasks)), key=lambda n: (_size(shape.tasks[n]), -n), reverse=True)
        self._packs: dict[tuple[str, Left], Pack] = {}

    def spots(self) -> tuple[Spot, ...] | None:
        for level in self._levels():
            fitting = []
            for domain in level:
                spots = self._filled(domain)
                if spots is not None:
                    fitting.append((communication_cost(self._draft, spots), *self._room(domain), spots))
            if fitting:
                return min(fitting, key=lambda choice: choice[:-1])[-1]
        return None

    def _levels(self) -> Iterator[list[list[str]]]:
        """The domains of each level of the tree, lowest first. A node is tried once for all nodes alike."""
        yield [[node] for node in dict.fromkeys(self._twins.values())]
        places = {node: self._draft.views[node].location for node in self._nodes}
        for name_of in (_rack, _zone, _cluster):
            domains: dict[tuple[str, ...], list[str]] = {}
            for node in self._nodes:
                domains.setdefault(name_of(places[node]), []).append(node)
            yield [domains[name] for name in sorted(domains) if len(domains[name]) > 1]

    def _room(self, domain: Sequence[str]) -> tuple[int, int, str]:
        sizes = [self._size[self._twins[node]] for node in domain]
        return sum(idle for idle, _ in sizes), sum(mib for _, mib in sizes), domain[0]

    def _filled(self, domain: Sequence[str]) -> tuple[Spot, ...] | None:
        left: Left = tuple(task.count for task in self._shape.tasks)
        nodes = list(domain)
        chosen: list[tuple[str, tuple[tuple[int, Fit], ...]]] = []
        while any(left):
            best = min(nodes, key=lambda node: self._fill_order(node, left, chosen), default=None)
            _, taken, rest = self._packed(best, left) if best else (0, (), left)
            if best is None or not taken:
                return None
            chosen.append((best, taken))
            nodes.remove(best)
            left = rest
        return self._numbered(chosen)

    def _fill_order(
        self, node: str, left: Left, chosen: Sequence[tuple[str, object]]
    ) -> tuple[int, int, int, int, str]:
        """Takes most of what is left; closest to the nodes chosen before; fewest idle GPUs; least free memory."""
        amount, _, _ = self._packed(node, left)
        near = 0
        if chosen:
            views, costs = self._draft.views, self._draft.snapshot.settings.topology
            near = node_cost(views[node].location, views[chosen[-1][0]].location, costs)
        return -amount, near, *self._size[self._twins[node]], node

    def _packed(self, node: str, left: Left) -> Pack:
        """As many of the tasks left as the node takes, large ones first."""
        key = self._twins[node], left
        known = self._packs.get(key)
        if known is not None:
            return known
        row, taken, rest = self._rows[node], [], list(left)
        for n in self._order:
            while rest[n]:
                found = self._draft.fit(self._shape.tasks[n], row)
                if not isinstance(found, Fit):
                    break
                row = after(self._shape.tasks[n], row, found)
                taken.append((n, found))
                rest[n] -= 1
        amount = sum(1000 * len(found.gpus) + 1 for _, found in taken)
        self._packs[key] = amount, tuple(taken), tuple(rest)
        return self._packs[key]

    def _numbered(self, chosen: Sequence[tuple[str, tuple[tuple[int, Fit], ...]]]) -> tuple[Spot, ...]:
        """Tasks of one kind get their numbers in the order of the nodes, so that neighbours have neighbouring ranks."""
        first, numbers = 0, []
        for task in self._shape.tasks:
            numbers.append(first)
            first += task.count
        spots = []
        for node, taken in chosen:
            for n, found in taken:
                spots.append(Spot(numbers[n], node, self._shape.tasks[n], found))
                numbers[n] += 1
        return tuple(sorted(spots, key=lambda spot: spot.number))


def _size(task: TaskShape) -> tuple[int, ...]:
    """What is harder to place comes first: more compute, more GPUs, whole cards, one model only, more of the rest."""
    request = task.gpus
    return (
        request.count * request.compute_milli,
        request.count,
        int(request.memory_mib is None),
        int(bool(request.model)),
        request.memory_mib or 0,
        task.cpu_milli,
    )


def _rack(place_: Location) -> tuple[str, ...]:
    return place_.zone, place_.rack


def _zone(place_: Location) -> tuple[str, ...]:
    return (place_.zone,)


def _cluster(place_: Location) -> tuple[str, ...]:
    return ()
