"""Where a job goes: the draft of a cycle, the best node for one task, and the reasons of the nodes that refused.

A `Draft` is a what-if view on a snapshot: it holds only the rows that it changed, and dropping it is the rollback.
`Search` answers one shape of task over all nodes: it scores every node once, and later only those that changed since
it was last asked. The filters and the score of one node are `coordinator.fit`'s, gangs are `coordinator.gangs`'s.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import proxy

from attrs import field, frozen
from msgspec import Struct

from coordinator.fit import Fit, Score, after, fit, matches_model, remoteness
from coordinator.model import TaskPlacement
from coordinator.nodes import Constraints, NodeView, Row
from coordinator.snapshot import Shape, Snapshot, TaskShape
from coordinator.usage import NO_LIMIT, Headroom, Use
from coordinator.worth import Worth
from vgpu.isolation import cut
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import Slice
from vgpu.topology import Location

if TYPE_CHECKING:
    from coordinator.index import Index


class Spot(Struct, frozen=True, gc=False):
    """One task of a job on a node."""

    number: int
    node: str
    task: TaskShape
    found: Fit


class Draft:
    """`held` nodes are kept for one job and refuse all others. With `ignore_state` nodes that are down or closed to
    new work are taken for well: what could run some day. With an `index` answers are kept from cycle to cycle; without
    one they are found anew, which is slow and gives the same."""

    def __init__(
        self,
        snapshot: Snapshot,
        rows: Mapping[str, Row] | None = None,
        ignore_state: bool = False,
        index: Index | None = None,
        held: frozenset[str] = frozenset(),
    ) -> None:
        self.snapshot = snapshot
        self.worth = snapshot.worth
        self.views: Mapping[str, NodeView] = snapshot.nodes
        self._ignore_state = ignore_state
        self.changed: list[str] = []
        self.refused: set[Shape] = (
            set()
        )  # those that have no room here any more, whoever asks; kept by `holds.Room`
        self.held = held
        self._rows: dict[str, Row] = dict(rows or {})
        self._fits: dict[TaskShape, dict[Row, Fit | ReasonCode]] = {}
        self._searches: dict[tuple[TaskShape, Constraints], Search | IndexedSearch] = {}
        self._take_best: dict[Shape, Callable[[], tuple[Spot, int] | None]] = {}  # for shapes of one task
        self._idle_in: Counter[Location] = Counter()
        self._index = index
        if index is not None:
            index.sync(snapshot, rows, held)
            return
        for name, view in self.views.items():
            self._idle_in[view.location] += self.row(name).idle_gpus
        self._remoteness = remoteness(self.views.values(), snapshot.settings.topology)

    @property
    def index(self) -> Index | None:
        return self._index

    def row(self, node: str) -> Row:
        if self._index is not None:
            return self._index.row(node)
        row = self._rows.get(node)
        return self.views[node].row if row is None else row

    def beside(self, rows: Mapping[str, Row], purpose: str, held: frozenset[str] = frozenset()) -> Draft:
        """Another draft on the snapshot with these rows instead of its own. Of each purpose one is in use at a time."""
        index = None if self._index is None else self._index.beside(purpose, held)
        return Draft(self.snapshot, rows, self._ignore_state, index, held)

    def put(self, rows: Mapping[str, Row]) -> None:
        """These rows stand for what is left of the nodes from now on."""
        if self._index is not None:
            self._index.put(rows)
            return
        for node, row in rows.items():
            self._idle_in[self.views[node].location] += row.idle_gpus - self.row(node).idle_gpus
            self._rows[node] = row
            self.changed.append(node)

    def idle_gpus(self, node: str) -> int:
        return self.row(node).idle_gpus if self._index is None else self._index.idle_gpus(node)

    def reprice(self, worth: Worth | None) -> None:
        """New prices in the middle of a draft; in a cycle they come with the snapshot."""
        self.worth = worth
        self._fits.clear()
        self._searches.clear()
        self._take_best.clear()
        if self._index is not None:
            self._index.price(worth)

    def gate(self, node: str, constraints: Constraints) -> ReasonCode | None:
        """What a node refuses whatever is free on it: its own state, then its labels."""
        view = self.views[node]
        closed = None if self._ignore_state else view.closed_to_work
        if closed is not None:
            return closed
        return None if view.has_labels(constraints) else ReasonCode.LABELS_DIFFER

    def fit(self, task: TaskShape, row: Row) -> Fit | ReasonCode:
        """`coordinator.fit.fit`, once for all nodes alike."""
        known = self._fits.setdefault(task, {})
        found = known.get(row)
        if found is None:
            found = known[row] = fit(task, row, self.worth)
        return found

    def answer(self, task: TaskShape, constraints: Constraints, node: str) -> Fit | ReasonCode:
        """All filters of one node. A hold is the last one: it is the reason only where there is no other."""
        found = self.gate(node, constraints) or self.fit(task, self.row(node))
        held = isinstance(found, Fit) and node in self.held
        return ReasonCode.HELD_FOR_LONG_WAIT if held else found

    def search(self, task: TaskShape, constraints: Constraints) -> Search | IndexedSearch:
        key = (task, constraints)
        search = self._searches.get(key)
        if search is None:
            if self._index is None:
                search = Search(self, task, constraints)
            else:
                search = IndexedSearch(self, self._index, task, constraints)
            self._searches[key] = search
        return search

    def take_best(self, shape: Shape) -> tuple[Spot, int] | None:
        """The best node for the one task of a job whose tenant may hold whatever it costs, taken at once; and how many
        whole GPUs it had. None where no node has room."""
        take = self._take_best.get(shape)
        if take is None:
            task = shape.only_task
            assert task is not None
            take = self._take_best[shape] = self.search(task, shape.constraints).take_best
        return take()

    def fitting(self, shapes: Sequence[Shape]) -> list[bool]:
        """For each shape whether all kinds of its tasks fit somewhere; a gang may still not fit as a whole."""
        if self._index is not None:
            return self._index.fitting_shapes(shapes, self.answer)
        return [
            all(self.search(task, shape.constraints).fits_somewhere for task in shape.tasks if task.count)
            for shape in shapes
        ]

    def take(self, spots: Iterable[Spot]) -> None:
        """From now on the tasks are there."""
        for spot in spots:
            if self._index is not None:
                self._index.take(spot.node, spot.task, spot.found)
                continue
            row = self.row(spot.node)
            taken = after(spot.task, row, spot.found)
            self._idle_in[self.views[spot.node].location] += taken.idle_gpus - row.idle_gpus
            self._rows[spot.node] = taken
            self.changed.append(spot.node)

    def hold(self, nodes: Iterable[str]) -> None:
        """Keeps the nodes from everybody from now on."""
        self.held = self.held | frozenset(nodes)
        self.changed.extend(sorted(self.held))
        if self._index is not None:
            self._index.hold(self.held)

    def idle_in(self, location: Location) -> int:
        return self._idle_in[location] if self._index is None else self._index.idle_in(location)

    def remoteness(self, node: str) -> int:
        """Communication cost from a node to all others."""
        place = self.views[node].location
        return self._remoteness[place] if self._index is None else self._index.remoteness(place)

    def placements(self, spots: Sequence[Spot]) -> tuple[TaskPlacement, ...]:
        """What the allocation says, with the UUIDs of the cards."""
        if len(spots) == 1:  # most jobs
            return (self._placement(spots[0]),)
        return tuple([self._placement(spot) for spot in spots])

    def _placement(self, spot: Spot) -> TaskPlacement:
        task, found = spot.task, spot.found
        slices: tuple[Slice, ...] = ()
        if found.gpus:
            cards, request, names = self.views[spot.node].facts.gpus, task.gpus, found.isolations
            slices = tuple([cut(request, cards[gpu], names[at]) for at, gpu in enumerate(found.gpus)])
        return TaskPlacement(spot.number, spot.node, slices, task.cpu_milli, task.memory_mib)

    @staticmethod
    def charge(spots: Sequence[Spot]) -> Use:
        """What a tenant would hold for them, in all slices of all tasks (QT-1)."""
        if len(spots) == 1:
            return spots[0].found.use
        return Use(
            sum(spot.found.use.compute for spot in spots), sum(spot.found.use.memory for spot in spots)
        )


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

    def take_best(self) -> tuple[Spot, int] | None:
        """The best node for whoever may hold whatever it costs, taken at once; and how many whole GPUs it had."""
        spot = self.best(NO_LIMIT)
        if spot is None:
            return None
        idle = self._draft.idle_gpus(spot.node)
        self._draft.take([spot])
        return spot, idle

    @property
    def fits_somewhere(self) -> bool:
        self._catch_up()
        return any(self._buckets.values())

    def fitting(self) -> list[str]:
        """All nodes where it fits, in no order."""
        self._catch_up()
        return [node for nodes in self._buckets.values() for node in nodes]

    def refusals(self) -> Refusals:
        """Counts are of now. Free figures are those of GPUs that the task might have had: of nodes that let it in,
        of its model, with something left of both."""
        self._catch_up()
        free = _free_pieces(self._draft, self._draft.views, self._task, self._constraints)
        return Refusals({code: count for code, count in self._counts.items() if count}, *free)

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
        found = self._draft.answer(self._task, self._constraints, node)
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
        """One whole GPU goes to the node whose GPUs are connected worst, then to what is broken already, then to the
        most remote node; nothing else looks beyond the node."""
        if self._task.gpus.is_whole and self._task.gpus.count == 1:
            return (*found.score[:3], -self._draft.remoteness(node), *found.score[3:])
        return found.score

    def _tie(self, node: str) -> tuple[int, str]:
        return self._draft.idle_in(self._draft.views[node].location), node

    def _spot(self, node: str) -> Spot:
        found = self._draft.fit(self._task, self._draft.row(node))
        assert isinstance(found, Fit)
        return Spot(0, node, self._task, found)


class IndexedSearch:
    """As `Search`, with the answers that the index keeps."""

    def __init__(self, draft: Draft, index: Index, task: TaskShape, constraints: Constraints) -> None:
        self._draft: Draft = proxy(draft)  # which keeps its searches: all go at once, with their snapshot
        self._index = index
        self._task = task
        self._constraints = constraints
        self._asked = index.ask(task, constraints)

    def best(self, headroom: Headroom) -> Spot | None:
        answer = self._index.place(self._asked, self._fallback)
        if answer is None:
            return None
        best = self._spot(answer[0], answer[1])
        if headroom.is_unlimited or headroom.allows(self._draft.charge([best])):
            return best
        for node in self._index.in_order(self._asked):
            spot = self._spot(node, self._index.found(self._asked, node))
            if headroom.allows(self._draft.charge([spot])):
                return spot
        return None

    def take_best(self) -> tuple[Spot, int] | None:
        """As `Search.take_best`."""
        answer = self._index.place(self._asked, self._fallback, taking=True)
        if answer is None:
            return None
        node, found, idle = answer
        if found is not None:
            return Spot(0, node, self._task, found), idle
        spot, idle = self._spot(node, None), self._index.idle_gpus(node)
        self._index.take(node, self._task, spot.found)
        return spot, idle

    @property
    def fits_somewhere(self) -> bool:
        self._catch_up()
        return self._index.fits_somewhere(self._asked)

    def fitting(self) -> list[str]:
        self._catch_up()
        return self._index.fitting(self._asked)

    @property
    def is_compiled(self) -> bool:
        """Whether `together` can answer."""
        self._catch_up()
        return not self._index.is_odd_among(self._asked)

    def together(self) -> tuple[Spot, ...] | None:
        """All tasks of the kind as a gang, as `coordinator.gangs` places them."""
        self._catch_up()
        found = self._index.together(self._asked, self._task.count)
        if found is None:
            return None
        return tuple(Spot(number, node, self._task, fit) for number, (node, fit) in enumerate(found))

    def refusals(self) -> Refusals:
        self._catch_up()
        known = self._index.free_pieces(self._asked)
        odd = _free_pieces(self._draft, self._index.odd_nodes(), self._task, self._constraints)
        free = max(known[0], odd[0]), max(known[1], odd[1]), known[2] + odd[2], known[3] + odd[3]
        return Refusals(self._index.counts(self._asked), *free)

    def _catch_up(self) -> None:
        self._index.catch_up(self._asked, self._fallback)

    def _fallback(self, node: str) -> Fit | ReasonCode:
        return self._draft.answer(self._task, self._constraints, node)

    def _spot(self, node: str, known: Fit | None) -> Spot:
        found = known or self._draft.fit(self._task, self._draft.row(node))
        assert isinstance(found, Fit)
        return Spot(0, node, self._task, found)


def _free_pieces(
    draft: Draft, nodes: Iterable[str], task: TaskShape, constraints: Constraints
) -> tuple[int, int, int, int]:
    """(largest memory, largest compute, all memory, all compute) of GPUs that the task might have had."""
    memory, compute, largest_memory, largest_compute = 0, 0, 0, 0
    for node in nodes:
        if node in draft.held or draft.gate(node, constraints) is not None:
            continue
        row = draft.row(node)
        for kind, piece in zip(row.build.gpus, row.pieces, strict=True):
            if matches_model(task.gpus, kind):
                memory += piece.memory_mib
                compute += piece.compute_milli
                if piece.memory_mib and piece.compute_milli:
                    largest_memory = max(largest_memory, piece.memory_mib)
                    largest_compute = max(largest_compute, piece.compute_milli)
    return largest_memory, largest_compute, memory, compute


def empty_draft(snapshot: Snapshot) -> Draft:
    """The cluster with nobody on it: what could ever fit."""
    return Draft(snapshot, {name: view.full_row for name, view in snapshot.nodes.items()}, ignore_state=True)


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
