"""Where a job goes: the draft of a cycle, the best node for one task, and the reasons of the nodes that refused.

A `Draft` is a what-if view on a snapshot: it holds only the rows that it changed, and dropping it is the rollback.
`Search` answers one shape of task over all nodes: it scores every node once, and later only those that changed since
it was last asked. The filters and the score of one node are `coordinator.fit`'s, gangs are `coordinator.gangs`'s.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from attrs import field, frozen

from coordinator.fit import Fit, Score, after, cut_slice, fit
from coordinator.model import TaskPlacement
from coordinator.nodes import NodeStatus, NodeView, Row
from coordinator.snapshot import Shape, Snapshot, TaskShape
from coordinator.usage import Headroom, Use
from vgpu.reasons import Reason, ReasonCode
from vgpu.topology import Location, TopologyCosts, node_cost

Constraints = tuple[tuple[str, str], ...]


@frozen
class Spot:
    """One task of a job on a node."""

    number: int
    node: str
    task: TaskShape
    found: Fit


class Draft:
    """`held` nodes are kept for one job and refuse all others. With `ignore_state` nodes that are down or closed to
    new work are taken for well: what could run some day."""

    def __init__(
        self, snapshot: Snapshot, rows: Mapping[str, Row] | None = None, ignore_state: bool = False
    ) -> None:
        self.snapshot = snapshot
        self.views: Mapping[str, NodeView] = snapshot.nodes
        self._ignore_state = ignore_state
        self.changed: list[str] = []
        self.held: frozenset[str] = frozenset()
        self._rows: dict[str, Row] = dict(rows or {})
        self._fits: dict[TaskShape, dict[Row, Fit | ReasonCode]] = {}
        self._searches: dict[tuple[TaskShape, Constraints], Search] = {}
        self._idle_in: Counter[Location] = Counter()
        for name, view in self.views.items():
            self._idle_in[view.location] += self.row(name).idle_gpus
        self._remoteness = _remoteness(self.views.values(), snapshot.settings.topology)

    def row(self, node: str) -> Row:
        row = self._rows.get(node)
        return self.views[node].row if row is None else row

    def gate(self, node: str, constraints: Constraints) -> ReasonCode | None:
        """What a node refuses whatever is free on it: its own state, then its labels."""
        view = self.views[node]
        state = None if self._ignore_state else _state(view)
        if state is not None:
            return state
        differs = any(view.labels.get(label) != value for label, value in constraints)
        return ReasonCode.LABELS_DIFFER if differs else None

    def fit(self, task: TaskShape, row: Row) -> Fit | ReasonCode:
        """`coordinator.fit.fit`, once for all nodes alike."""
        known = self._fits.setdefault(task, {})
        found = known.get(row)
        if found is None:
            found = known[row] = fit(task, row)
        return found

    def search(self, task: TaskShape, constraints: Constraints) -> Search:
        key = (task, constraints)
        if key not in self._searches:
            self._searches[key] = Search(self, task, constraints)
        return self._searches[key]

    def take(self, spots: Iterable[Spot]) -> None:
        """From now on the tasks are there."""
        for spot in spots:
            row = self.row(spot.node)
            taken = after(spot.task, row, spot.found)
            self._idle_in[self.views[spot.node].location] += taken.idle_gpus - row.idle_gpus
            self._rows[spot.node] = taken
            self.changed.append(spot.node)

    def hold(self, nodes: Iterable[str]) -> None:
        """Keeps the nodes from everybody from now on."""
        self.held = self.held | frozenset(nodes)
        self.changed.extend(sorted(self.held))

    def idle_in(self, location: Location) -> int:
        return self._idle_in[location]

    def remoteness(self, node: str) -> int:
        """Communication cost from a node to all others."""
        return self._remoteness[self.views[node].location]

    def placements(self, spots: Sequence[Spot]) -> tuple[TaskPlacement, ...]:
        """What the allocation says, with the UUIDs of the cards."""
        return tuple(
            TaskPlacement(
                spot.number,
                spot.node,
                tuple(
                    cut_slice(spot.task.gpus, self.views[spot.node].gpus[gpu].gpu, name)
                    for gpu, name in zip(spot.found.gpus, spot.found.isolations, strict=True)
                ),
                spot.task.cpu_milli,
                spot.task.memory_mib,
            )
            for spot in spots
        )

    def charge(self, spots: Iterable[Spot]) -> Use:
        """What a tenant would hold for them, in all slices of all tasks (QT-1)."""
        use = Use()
        for spot in spots:
            kinds = self.views[spot.node].row.build.gpus
            for gpu, name in zip(spot.found.gpus, spot.found.isolations, strict=True):
                piece = cut_slice(spot.task.gpus, kinds[gpu], name)
                use = use.plus(Use(piece.compute_milli, piece.memory_mib))
        return use


@frozen
class Refusals:
    """How many nodes refused one shape of task, by their first reason, and the largest pieces that are free."""

    counts: Mapping[ReasonCode, int] = field(factory=dict)
    largest_memory_mib: int = 0
    largest_compute_milli: int = 0
    total_memory_mib: int = 0
    total_compute_milli: int = 0


class Search:
    """The best node for one shape of task. Nodes stand in buckets of equal score, so that ties are broken by figures
    that change with other nodes (idle GPUs of the rack) at the time of asking."""

    def __init__(self, draft: Draft, task: TaskShape, constraints: Constraints) -> None:
        self._draft = draft
        self._task = task
        self._constraints = constraints
        self._answers: dict[str, Score | ReasonCode] = {}
        self._buckets: dict[Score, set[str]] = {}
        self._scores: list[Score] = []
        self._counts: Counter[ReasonCode] = Counter()
        self._seen = len(draft.changed)
        for node in draft.views:
            self._answer(node)

    def best(self, headroom: Headroom) -> Spot | None:
        """The best node whose slices the tenant may hold; None where no node has room."""
        self._catch_up()
        while self._scores and not self._buckets.get(self._scores[0]):
            self._buckets.pop(heapq.heappop(self._scores), None)
        if not self._scores:
            return None
        best = self._spot(min(self._buckets[self._scores[0]], key=self._tie))
        if headroom.allows(self._draft.charge([best])):
            return best
        for score in sorted(self._buckets):
            for node in sorted(self._buckets[score], key=self._tie):
                spot = self._spot(node)
                if headroom.allows(self._draft.charge([spot])):
                    return spot
        return None

    @property
    def fits_somewhere(self) -> bool:
        self._catch_up()
        return any(self._buckets.values())

    def refusals(self) -> Refusals:
        """Counts are of now. Free figures are those of GPUs that the task might have had: of nodes that let it in,
        of its model, with something left of both."""
        self._catch_up()
        memory, compute, largest_memory, largest_compute = 0, 0, 0, 0
        for node in self._draft.views:
            if node in self._draft.held or self._draft.gate(node, self._constraints) is not None:
                continue
            row = self._draft.row(node)
            for kind, piece in zip(row.build.gpus, row.pieces, strict=True):
                if self._task.gpus.model.lower() in kind.model.lower():
                    memory += piece.memory_mib
                    compute += piece.compute_milli
                    if piece.memory_mib and piece.compute_milli:
                        largest_memory = max(largest_memory, piece.memory_mib)
                        largest_compute = max(largest_compute, piece.compute_milli)
        return Refusals(dict(self._counts), largest_memory, largest_compute, memory, compute)

    def _catch_up(self) -> None:
        if self._seen < len(self._draft.changed):
            changed = set(self._draft.changed[self._seen :])
            self._seen = len(self._draft.changed)
            for node in changed:
                self._answer(node)

    def _answer(self, node: str) -> None:
        before = self._answers.get(node)
        if isinstance(before, ReasonCode):
            self._counts[before] -= 1
        elif before is not None:
            self._buckets[before].discard(node)
        answer: Score | ReasonCode
        refused = self._draft.gate(node, self._constraints)
        found = refused or self._draft.fit(self._task, self._draft.row(node))
        if isinstance(found, Fit) and node in self._draft.held:
            # The last filter: a hold is the reason only where there is no other.
            found = ReasonCode.HELD_FOR_LONG_WAIT
        if isinstance(found, ReasonCode):
            self._counts[found] += 1
            answer = found
        else:
            answer = self._score(node, found)
            if answer not in self._buckets:
                self._buckets[answer] = set()
                heapq.heappush(self._scores, answer)
            self._buckets[answer].add(node)
        self._answers[node] = answer

    def _score(self, node: str, found: Fit) -> Score:
        """One whole GPU goes to the most remote node first; nothing else looks beyond the node."""
        if self._task.gpus.is_whole and self._task.gpus.count == 1:
            return (-self._draft.remoteness(node), *found.score)
        return found.score

    def _tie(self, node: str) -> tuple[int, str]:
        return self._draft.idle_in(self._draft.views[node].location), node

    def _spot(self, node: str) -> Spot:
        found = self._draft.fit(self._task, self._draft.row(node))
        assert isinstance(found, Fit)
        return Spot(0, node, self._task, found)


def empty_draft(snapshot: Snapshot) -> Draft:
    """The cluster with nobody on it: what could ever fit."""
    return Draft(snapshot, {name: view.full_row for name, view in snapshot.nodes.items()}, ignore_state=True)


def _state(view: NodeView) -> ReasonCode | None:
    if view.status is NodeStatus.CLOSED:
        return ReasonCode.NODE_CLOSED
    if view.status is not NodeStatus.READY:
        return ReasonCode.NODE_NOT_READY
    return ReasonCode.NODE_CORDONED if view.is_cordoned else None


def wait_reason(shape: Shape, draft: Draft) -> Reason:
    """Why nothing of this shape can be placed now: how many nodes refused for what, and the largest free piece
    beside what was asked (FR-2, FR-3). Every number is at least 0 (QT-6)."""
    if not draft.views:
        return Reason(ReasonCode.NO_NODES)
    searches = [draft.search(task, shape.constraints) for task in shape.tasks]
    stuck = next((n for n, search in enumerate(searches) if not search.fits_somewhere), None)
    task, refusals = shape.tasks[stuck or 0], searches[stuck or 0].refusals()
    numbers = {"nodes": len(draft.views), "tasks": shape.task_count}
    numbers |= {code.value: count for code, count in refusals.counts.items() if count}
    if task.gpus.count:
        numbers |= {
            "gpus": task.gpus.count,
            "compute_milli": task.gpus.compute_milli,
            "largest_free_memory_mib": refusals.largest_memory_mib,
            "largest_free_compute_milli": refusals.largest_compute_milli,
            "total_free_memory_mib": refusals.total_memory_mib,
            "total_free_compute_milli": refusals.total_compute_milli,
        }
        if task.gpus.memory_mib is not None:
            numbers["memory_mib"] = task.gpus.memory_mib
    numbers |= {"cpu_milli": task.cpu_milli, "node_memory_mib": task.memory_mib}
    if stuck is None:
        return Reason(ReasonCode.GANG_DOES_NOT_FIT, numbers)
    return Reason(_loudest(refusals.counts), numbers)


def _loudest(counts: Mapping[ReasonCode, int]) -> ReasonCode:
    """The reason of most nodes; among equals the one that let a job come farthest."""
    order = {code: place for place, code in enumerate(ReasonCode)}
    code, _ = max(counts.items(), key=lambda item: (item[1], order[item[0]]))
    return code


def _remoteness(views: Iterable[NodeView], costs: TopologyCosts) -> dict[Location, int]:
    """Sum of the costs from a node at each place to all other nodes; by place, not by node, since there are few."""
    nodes_at = Counter(view.location for view in views)
    return {
        here: sum(count * node_cost(here, there, costs) for there, count in nodes_at.items()) - costs.rack
        for here in nodes_at
    }
