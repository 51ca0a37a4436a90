"""Who stands in front of all lines, kept from cycle to cycle: what it costs grows with the lines that changed.

A line is the waiting jobs of one priority and one shape. Sets of lines are whole numbers with one bit for each line,
and the line that goes first has the lowest: higher priority, then what needs least (GPU memory, compute, CPU). So
which line of a tenant is next among those that may still fit is one `and` and the lowest bit of it.

All of this is a memo, compared with what it was made from; nothing is decided here.
"""

from __future__ import annotations

import functools
import itertools
import operator
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from attrs import define, frozen
from msgspec import Struct

from coordinator.fit import matches_model
from coordinator.lines import TenantLines
from coordinator.snapshot import NEVER_MS, LineKey, Lines, Shape, Snapshot, TaskShape
from coordinator.usage import NO_USE, Use
from vgpu.inventory import Gpu

# So many places of a set are there for each line, so that most new lines find one between two others.
_SPREAD = 8
_FEW_LINES = 1000


@frozen
class Needs:
    """What a job needs in all, as far as it is known before a card is chosen."""

    memory_mib: int
    compute_milli: int
    cpu_milli: int

    @cached_property
    def use(self) -> Use:
        return Use(self.compute_milli, self.memory_mib)

    @cached_property
    def size(self) -> tuple[int, int, int]:
        """What jobs are ordered by."""
        return self.memory_mib, self.compute_milli, self.cpu_milli


class Cards:
    """The kinds of GPU in the cluster (`Snapshot.kinds`), to say what a whole card is at least (FR-5: only real GPUs count)."""

    def __init__(self, kinds: Sequence[Gpu]) -> None:
        self.kinds = kinds
        self._needs: dict[Shape, Needs] = {}

    def needs(self, shape: Shape) -> Needs:
        """With a whole card taken for the smallest one that matches; 0 where there is none."""
        known = self._needs.get(shape)
        if known is None:
            memory = sum(task.count * task.gpus.count * self._memory_mib(task) for task in shape.tasks)
            known = self._needs[shape] = Needs(memory, shape.compute_milli, shape.cpu_milli)
        return known

    def most(self, shape: Shape) -> Use:
        """What a job of this shape may hold at most: all of the largest cards, as with a MIG instance."""
        largest_mib = max((gpu.memory_mib for gpu in self.kinds), default=0)
        return Use(1000 * shape.gpu_count, largest_mib * shape.gpu_count)

    def _memory_mib(self, task: TaskShape) -> int:
        if task.gpus.memory_mib is not None:
            return task.gpus.memory_mib
        return next((gpu.memory_mib for gpu in self.kinds if self._is_enough(task, gpu)), 0)

    def _is_enough(self, task: TaskShape, gpu: Gpu) -> bool:
        return matches_model(task.gpus, gpu) and gpu.compute_milli >= task.gpus.compute_milli


@define(eq=False)
class Line:
    """`place` is where it stands in sets of lines, `bit` the set of it alone, `peers` that of all lines that are equal but
    for their shape: among those the older job goes first. A job holds at least `use` and nowhere more than `most`."""

    key: LineKey
    priority: int
    shape: Shape
    needs: Needs
    use: Use
    most: Use
    place: int
    bit: int
    peers: int


# Priority, turned round, and `Needs.size`.
Rank = tuple[int, tuple[int, int, int]]


class Shapes(NamedTuple):
    """Shapes, and beside each the set of all its lines."""

    lines: Sequence[int]
    shapes: Sequence[Shape]


class Order:
    """The places of lines in sets. Lines are only added, so that who has taken it may go on while others add theirs; once
    there is no place left between two lines, the next to come starts with another order."""

    def __init__(self, cards: Cards, keys: Iterable[LineKey] = ()) -> None:
        self.cards = cards
        self.lines: dict[LineKey, Line] = {}
        self.at: dict[int, Line] = {}  # by place
        self._of_shape: dict[Shape, int] = {}
        self._ranks: list[Rank] = []
        self._places: list[int] = []
        self._last_shapes = 0, Shapes((), ())
        self._told: dict[Shape, int] = {}  # the places of shapes in it

        # Of equal rank in any order: no decision depends on it.
        ranked = sorted(((self._rank(key), key) for key in keys), key=operator.itemgetter(0))
        for spot, (rank, key) in enumerate(ranked):
            self._put(key, rank, spot, _SPREAD * (spot + 1))
        for _, group in itertools.groupby(self.at.values(), lambda line: (line.priority, line.needs.size)):
            lines = [*group]
            peers = functools.reduce(operator.or_, [line.bit for line in lines])
            for line in lines:
                line.peers = peers

    def add(self, key: LineKey) -> bool:
        """False where there is no place for it."""
        rank = self._rank(key)
        first, last = bisect_left(self._ranks, rank), bisect_right(self._ranks, rank)
        # Between which two of its peers does not matter: where most is left.
        spot = max(range(first, last + 1), key=self._gap)
        gap = self._gap(spot)
        if gap < 2:
            return False
        peers = [self.at[place] for place in self._places[first:last]]
        below = self._places[spot - 1] if spot else -1
        line = self._put(key, rank, spot, below + (gap + 1) // 2)
        for peer in peers:
            peer.peers |= line.bit
            line.peers |= peer.bit
        return True

    def _rank(self, key: LineKey) -> Rank:
        return -key.priority, self.cards.needs(key.shape).size

    def _put(self, key: LineKey, rank: Rank, spot: int, place: int) -> Line:
        needs, bit = self.cards.needs(key.shape), 1 << place
        most = self.cards.most(key.shape)
        line = Line(key, key.priority, key.shape, needs, needs.use, most, place, bit, bit)
        self._ranks.insert(spot, rank)
        self._places.insert(spot, place)
        self.at[place] = self.lines[key] = line
        self._of_shape[key.shape] = self._of_shape.get(key.shape, 0) | bit
        return line

    def _gap(self, spot: int) -> int:
        """How far the places before and after it are from each other."""
        below = self._places[spot - 1] if spot else -1
        return self._places[spot] - below if spot < len(self._places) else 2 * _SPREAD

    def of_shape(self, shape: Shape) -> int:
        """All lines of a shape."""
        return self._of_shape[shape]

    def shapes(self, lines: int) -> Shapes:
        """The shapes of a set of lines, and maybe as many more: as long as that is true of those that were told last,
        those. The same `Shapes.shapes` where only lines of known shapes are new."""
        covered, last = self._last_shapes
        if 2 * lines.bit_count() < covered.bit_count():
            covered, last = 0, Shapes((), ())
            self._told.clear()
        new = lines & ~covered
        if new:
            sets, added = [*last.lines], []
            while new:
                shape = self.at[(new & -new).bit_length() - 1].shape
                of_shape, place = self._of_shape[shape], self._told.get(shape)
                if place is None:
                    self._told[shape] = len(sets)
                    sets.append(of_shape)
                    added.append(shape)
                else:
                    sets[place] = of_shape
                covered |= of_shape
                new &= ~covered
            last = Shapes(sets, (*last.shapes, *added) if added else last.shapes)
            self._last_shapes = covered, last
        return last


class Front(Struct, eq=False, gc=False):
    """What of one tenant's lines is the same for all cycles until they change. `all` are its lines as a set. `quickest`
    are those in which a job has a limit of its time, as (`JobLine.quickest_ms`, place) in that order. Nobody came before
    `oldest_ms`; with `is_bound` nobody need have come just then."""

    lines: Lines
    all: int
    quickest: Sequence[tuple[int, int]]
    wanted: Use
    oldest_ms: int
    is_bound: bool = False

    def waits_since(self, at_ms: int) -> bool:
        """Whether somebody came then or before."""
        if self.is_bound and self.oldest_ms <= at_ms:
            self.oldest_ms = min(
                [line.first.submitted_at_ms for line in self.lines.values()], default=NEVER_MS
            )
            self.is_bound = False
        return self.oldest_ms <= at_ms


_NOBODY = Front({}, 0, (), NO_USE, NEVER_MS)


class Lineup(Struct, frozen=True, eq=False):
    """The fronts of all tenants with somebody waiting, and the order that their sets are in."""

    order: Order
    fronts: Mapping[str, Front]

    @property
    def wanted(self) -> Mapping[str, Use]:
        """What the waiting jobs of each tenant would hold."""
        return {tenant: front.wanted for tenant, front in self.fronts.items()}


class Lineups:
    """The newest lineup, from which the next one is made. It serves one cycle at a time."""

    def __init__(self) -> None:
        self._last = Lineup(Order(Cards(())), {})

    def of(self, snapshot: Snapshot) -> Lineup:
        lineup = self._follow(snapshot)
        if lineup is None:
            self._begin_anew(snapshot)
            lineup = self._follow(snapshot)
            assert lineup is not None
        self._last = lineup
        return lineup

    def _follow(self, snapshot: Snapshot) -> Lineup | None:
        """None where all must be made anew: other cards, no place for a new line, or too many that nobody waits in."""
        order, known = self._last.order, self._last.fronts
        waited_in = sum(map(len, snapshot.lines.values()))
        if order.cards.kinds != snapshot.kinds or len(order.lines) > _FEW_LINES + 8 * waited_in:
            return None
        changed: dict[str, Collection[LineKey]] = {}
        for tenant, lines in snapshot.lines.items():
            front = known.get(tenant, _NOBODY)
            if front.lines is not lines:
                keys = changed[tenant] = _changed(lines, front.lines)
                for key in keys:
                    if key not in order.lines and key in lines and not order.add(key):
                        return None
        fronts = {
            tenant: _front(known.get(tenant, _NOBODY), lines, changed[tenant], order)
            if tenant in changed
            else known[tenant]
            for tenant, lines in snapshot.lines.items()
        }
        return Lineup(order, fronts)

    def _begin_anew(self, snapshot: Snapshot) -> None:
        """Another order, with places for all lines. Those that nobody waits in any more are kept, unless they are many."""
        before, fronts = self._last.order, self._last.fronts
        keys, cards = {key for lines in snapshot.lines.values() for key in lines}, before.cards
        if cards.kinds != snapshot.kinds or len(before.lines) > _FEW_LINES + 4 * len(keys):
            cards, fronts = Cards(snapshot.kinds), {}
        else:
            keys |= before.lines.keys()
        order = Order(cards, keys)
        moved = {tenant: _moved(front, before, order) for tenant, front in fronts.items()}
        self._last = Lineup(order, moved)


def _moved(front: Front, before: Order, order: Order) -> Front:
    """The front in terms of another order, which has all of its lines."""
    everything = functools.reduce(operator.or_, [order.lines[key].bit for key in front.lines], 0)
    quickest = sorted((ms, order.lines[before.at[place].key].place) for ms, place in front.quickest)
    return Front(front.lines, everything, quickest, front.wanted, front.oldest_ms, front.is_bound)


def _changed(lines: Lines, before: Lines) -> Collection[LineKey]:
    """The keys of lines that may differ."""
    if isinstance(lines, TenantLines) and isinstance(before, TenantLines):
        known = lines.changes.since(before.changes)
        if known is not None:
            return known
    return [key for key in {**before, **lines} if lines.get(key) is not before.get(key)]


def _front(front: Front, lines: Lines, keys: Iterable[LineKey], order: Order) -> Front:
    """The front as it is once these lines have changed."""
    everything, quickest, before = front.all, [*front.quickest], front.lines
    memory, compute = front.wanted.memory, front.wanted.compute
    oldest_ms, is_bound = front.oldest_ms, front.is_bound
    line_of, old_of, new_of = order.lines.get, before.get, lines.get
    for key in keys:
        line = line_of(key)
        if line is None:
            continue  # it came and went in between
        old, new = old_of(key), new_of(key)
        more = 0
        if (old is None) is not (new is None):
            everything ^= line.bit
        has_same_first = old is not None and new is not None and new.first is old.first
        if old is not None:
            more -= old.stop - old.start
            if not has_same_first and old.first.submitted_at_ms == front.oldest_ms:
                is_bound = True
            if old.limited:
                del quickest[bisect_left(quickest, (old.quickest_ms, line.place))]
        if new is not None:
            more += new.stop - new.start
            if not has_same_first and new.first.submitted_at_ms < oldest_ms:
                oldest_ms = new.first.submitted_at_ms
            if new.limited:
                insort(quickest, (new.quickest_ms, line.place))
        if more:
            memory += more * line.use.memory
            compute += more * line.use.compute
    return Front(lines, everything, quickest, Use(compute, memory), oldest_ms, is_bound)
