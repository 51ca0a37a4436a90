"""The answers of all shapes for all nodes, kept from cycle to cycle: a memo beside the cycle, never the truth.

A shape catches up only when it is asked, with the nodes that changed since: the change log holds their places. Each
block of nodes of one place of the topology tree keeps the least score of every shape, so that the best node is found
by reading one number for each block. Why nodes refuse is counted as answers change.

`sync` takes over a snapshot and is also the rollback of the last draft: rows whose node changed are read anew, and
those that a draft has changed too. With a cold index a cycle gives the same plan as with a warm one. Nodes of a build
that the compiled rules do not know (MIG instances, more than eight GPUs) are answered by `coordinator.fit`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import partial

import numpy as np
from attrs import evolve, frozen

from coordinator import gang_kernels
from coordinator import kernels as k
from coordinator.fit import Fit, after, use_of
from coordinator.gpus import Piece
from coordinator.lineup import Lineups
from coordinator.nodes import Constraints, NodeBuild, NodeView, Row, ViewLog
from coordinator.shared import Changes
from coordinator.snapshot import ClusterSettings, Shape, Snapshot, TaskShape
from coordinator.tables import (
    ISOLATIONS,
    MEMBERS,
    NAMES,
    REASONS,
    STATES,
    Builds,
    Nodes,
    Table,
    code_of,
    compat,
    encoded,
    grown,
    price_tables,
    sharing_of,
)
from coordinator.worth import Worth
from vgpu.reasons import ReasonCode
from vgpu.topology import Location

_EMPTY = (0,) * k.GPUS
# Answers for a node of a build that the compiled rules do not know.
Fallback = Callable[[str], Fit | ReasonCode]
Answer = Callable[[TaskShape, Constraints, str], Fit | ReasonCode]
# What is kept of shapes between two cycles takes no more memory than this: of more, those asked for the longest time ago
# are forgotten. At 10,000 nodes that is some 6,000 shapes.
_MOST_BYTES = 512 << 20
_OF_SHAPES = "_shapes", "_keys", "_counts", "_minima", "_compat", "_positions"
# So many builds may be new, as GPUs fail and are well again, before those that no node has any more are forgotten.
_MORE_BUILDS = 64
_FIRST_SHAPES = 2048  # there is room for
# So many twins there are of one purpose at most; another is made where more than one in so many nodes differs.
_MOST_TWINS = 3
_MANY = 16


@frozen
class _Asked:
    """A shape of task as the index knows it: its row in the tables."""

    task: TaskShape
    constraints: Constraints
    number: int


class Index:
    """See the module. One index serves one draft at a time."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self.worth: Worth | None = None
        # Places of nodes that were read anew since somebody who keeps more about them took this set away.
        self.reread: set[int] = set()
        self.lineups = Lineups()
        # Of the snapshot that it took over last, which goes with its cycle.
        self._seen: ViewLog | None = None
        self._settings: ClusterSettings | None = None
        self._logged = 0
        self._touched: set[int] = set()
        self._held: frozenset[str] = frozenset()
        self._others: dict[str, list[Index]] = {}
        self._reads: Changes[int] = Changes()  # places of nodes as they were read
        self._parent: Index | None = None
        self._followed = self._reads  # of a twin: how far it followed its parent
        self._python_rows: dict[int, Row] = {}
        self._odd_nodes: set[int] = set()
        self._builds = Builds()
        self._most_builds = 0
        self._fits: dict[tuple[int, int, int], Fit] = {}
        self._sums = np.zeros((0, k.SUM_WIDTH), np.int64)
        self._last_shapes: Sequence[Shape] | None = None
        self._last_numbers, self._last_counts = np.zeros(0, np.int64), list[int]()
        self._forget_shapes()
        self._set_prices(None)

    # --- the snapshot ---

    def sync(
        self,
        snapshot: Snapshot,
        rows: Mapping[str, Row] | None = None,
        held: frozenset[str] = frozenset(),
    ) -> None:
        """Takes over the nodes of a snapshot, with other rows for some of them, and its prices; whatever a draft did
        before is undone. `held` nodes refuse everybody; those that did so before cost nothing."""
        if len(self._asked) * self._keys[:1].nbytes > self._most_bytes:
            self._keep_half()
        if self._parent is not None:
            self._take_over(self._parent, snapshot)
        elif self._seen is None or not self._follow(snapshot, self._seen):
            self._rebuild(snapshot)
        self._seen, self._settings = snapshot.view_log, snapshot.settings
        self._touched.difference_update([self._nodes.number[name] for name in rows or ()])
        self._restore()
        self.hold(held)
        self.put(rows or {})
        if snapshot.worth is not self.worth:
            self.price(snapshot.worth)

    def put(self, rows: Mapping[str, Row]) -> None:
        """These rows stand for what is left of the nodes, until the next `sync`."""
        for name, row in rows.items():
            number = self._nodes.number[name]
            self._touched.add(number)
            if self._python_rows.get(number) is not row:
                self._enter_row(number, self._encoded_here(number, row))
                self._python_rows[number] = row

    def forget(self) -> None:
        """Cold again, as after a failure in the middle of a change."""
        self.__init__(self._most_bytes)  # type: ignore[misc]

    def beside(self, purpose: str, held: frozenset[str] = frozenset()) -> Index:
        """An index for another draft of the same cycle, kept for the same purpose in the next one. Of one purpose there
        are a few where those differ much that refuse everybody: each of their answers would be found anew."""
        twins = self._others.setdefault(purpose, [])
        for twin in twins:
            if twin._held is held:
                return twin
        differ = [len(held ^ twin._held) for twin in twins]
        few = len(self._nodes.names) // _MANY if len(twins) < _MOST_TWINS else len(self._nodes.names)
        if not twins or min(differ) > few:
            twins.append(self._twin())
            return twins[-1]
        return twins[differ.index(min(differ))]

    def _twin(self) -> Index:
        """One that knows the same of the nodes, and of shapes nothing yet: others ask there. From now on it follows this
        one, which has looked at the nodes of a snapshot when it is asked for."""
        twin = Index()
        for name, value in vars(self).items():
            if name not in _OF_SHAPES:
                is_changed = isinstance(value, np.ndarray | dict | list | set)
                setattr(twin, name, value.copy() if is_changed else value)
        twin._others, twin._parent, twin._reads = {}, self, Changes()
        twin._followed, twin._base = self._reads, self._base
        twin._nodes = copy(self._nodes)
        twin._nodes.builds = self._nodes.builds.copy()
        twin._forget_shapes()
        return twin

    def _take_over(self, parent: Index, snapshot: Snapshot) -> None:
        """What the other one has read since."""
        assert parent._seen is not None
        assert parent._seen.views is snapshot.nodes
        reads = parent._reads.since(self._followed)
        numbers = set(range(len(self._base)) if reads is None else reads)
        self._followed = parent._reads
        self._know_builds()
        for number in numbers:
            self._read_labels(number, self._nodes.views[number])
        self._note(numbers)

    def price(self, worth: Worth | None) -> None:
        """New prices change every answer."""
        self.worth = worth
        self._set_prices(worth)
        self._positions[:] = -1

    def _follow(self, snapshot: Snapshot, seen: ViewLog) -> bool:
        """Reads anew the nodes that changed; False where so much changed that all must be read."""
        nodes, changed = self._nodes, []
        if len(snapshot.nodes) != len(nodes.views) or snapshot.settings is not self._settings:
            return False
        names = snapshot.view_log.since(seen)
        for name in snapshot.nodes if names is None else names:
            view, number = snapshot.nodes.get(name), nodes.number.get(name, -1)
            if view is None or number < 0:
                return False
            old = nodes.views[number]
            if view is old:
                continue
            build, known = view.row.build, old.row.build
            if view.location is not old.location and view.location != old.location:
                return False
            if build is not known and build != known and not self._may_become(build, known):
                return False
            changed.append((number, view, build is known and view.row.pieces == old.row.pieces))
        for number, view, _ in changed:
            old, nodes.views[number] = nodes.views[number], view
            if view.labels is not old.labels and view.labels != old.labels:
                self._read_labels(number, view)
        self._read(changed)
        return True

    def _may_become(self, build: NodeBuild, known: NodeBuild) -> bool:
        """Whether a node may change so, as when a GPU fails, while all that is known of others stays true."""
        is_ranked_alike = build.topology.mean_cost_milli == known.topology.mean_cost_milli
        return is_ranked_alike and (
            build in self._builds.numbers or len(self._builds.known) < self._most_builds
        )

    def _rebuild(self, snapshot: Snapshot) -> None:
        self._nodes = nodes = Nodes(snapshot)
        self._others.clear()
        self._touched.clear()
        self._held = frozenset()
        self._is_held = np.zeros(len(nodes.views), np.int64)
        self._python_rows.clear()
        self._odd_nodes.clear()
        self._fits.clear()
        self._rows = np.zeros((len(nodes.views), k.WIDTH), np.int64)
        self._base = np.zeros_like(self._rows)  # as the snapshot has them, whoever is held; twins read it too
        self._builds = Builds()  # after the rows, see `market`
        self._sums = np.zeros((len(nodes.views) + 1, k.SUM_WIDTH), np.int64)
        self._place = np.array(nodes.place, np.int64)
        self._idle_in = np.zeros(len(nodes.places), np.int64)
        self._stamps = np.zeros(len(nodes.views), np.int64)
        self._stamp = 0
        self._odd = np.zeros(max(1, len(nodes.views)), np.int64)
        # A ring: who is behind by more than it holds looks at all nodes.
        self._log = np.zeros(max(1024, 1 << (2 * len(nodes.views)).bit_length()), np.int64)
        self._logged = 0
        self._place_rank = nodes.whole_ranks()
        self._forget_shapes()
        self._read([(number, view, False) for number, view in enumerate(nodes.views)])
        self._set_prices(self.worth)
        self._most_builds = _MORE_BUILDS + 2 * len(self._builds.known)

    def _read(self, views: Sequence[tuple[int, NodeView, bool]]) -> None:
        """What the snapshot says of these nodes now, and whether their GPUs are as they were; `_restore` makes it hold."""
        like = [number for number, _, is_like in views if is_like]
        if like:
            self._base[like, : k.BUILD] = [
                self._head(view, view.row) for _, view, is_like in views if is_like
            ]
        other = [number for number, _, is_like in views if not is_like]
        if other:
            self._base[other] = [
                self._encoded(number, view) for number, view, is_like in views if not is_like
            ]
        self._note([number for number, _, _ in views])

    def _note(self, numbers: Collection[int]) -> None:
        """Their nodes were read anew."""
        for number in self._python_rows.keys() & numbers:
            del self._python_rows[number]
        self._touched.update(numbers)
        self.reread.update(numbers)
        self._reads = self._reads.then(numbers, 4 * len(self._base))

    def _restore(self) -> None:
        """Undoes what a draft did."""
        if self._touched:
            touched = np.fromiter(self._touched, np.int64, len(self._touched))
            self._logged = k.restore(
                self._rows, self._sums, self._base, self._is_held, touched, self._builds.table, self._place,
                self._idle_in, self._log, self._logged,
            )  # fmt: skip
            for number, build in zip(touched.tolist(), self._base[touched, k.BUILD].tolist(), strict=True):
                self._note_build(number, build)
                self._python_rows.pop(number, None)
            self._touched.clear()

    def _read_labels(self, number: int, view: NodeView) -> None:
        for constraints, place in self._constraints.items():
            if not constraints:
                continue
            has = view.has_labels(constraints)
            if self._labels[place, number] != has:
                self._labels[place, number] = has
                self._change(number)

    def _enter_row(self, number: int, row: list[int]) -> None:
        if self._rows[number].tolist() != row or row[k.BUILD] < 0:
            self._idle_in[self._nodes.place[number]] += self._idle(row) - self._idle(self._rows[number])
            self._rows[number] = row
            self._note_build(number, row[k.BUILD])
            self._sums[number, k.SUM_IS_KNOWN] = 0
            self._change(number)

    def _note_build(self, number: int, build: int) -> None:
        self._nodes.builds[number] = build
        if build < 0:
            self._odd_nodes.add(number)
        elif self._odd_nodes:
            self._odd_nodes.discard(number)

    def _idle(self, row: list[int] | Table) -> int:
        """Whole GPUs of a row; those of an odd build are kept in the column of its model instead."""
        if row[k.BUILD] < 0:
            return int(row[k.ODD_IDLE])
        return int(k.idle_gpus(np.asarray(row, np.int64), self._builds.table[int(row[k.BUILD])]))

    def _encoded(self, number: int, view: NodeView, known: Row | None = None) -> list[int]:
        row = view.row if known is None else known
        head = self._head(view, row)
        build = self._builds.number(row.build)
        if self._builds_known != len(self._builds.known):
            self._know_builds()
        mib, milli, names, is_open = zip(*row.pieces, strict=True) if row.pieces else ((), (), (), ())
        sharing = [*map(sharing_of, names, is_open)]
        if build < 0 or None in sharing:
            return [*head, -1, 0, self._place_rank[number], 0, row.idle_gpus] + [0] * (k.WIDTH - k.PIECES)
        model = self._builds.models[row.build.gpus[0].model] if mib else 0
        empty = _EMPTY[len(mib) :]
        return [
            *head,
            build,
            len(mib),
            self._place_rank[number],
            model,
            0,
            *mib,
            *empty,
            *milli,
            *empty,
            *[share or 0 for share in sharing],
            *empty,
        ]

    def _head(self, view: NodeView, row: Row) -> tuple[int, int, int]:
        code = view.closed_to_work
        state = 0 if code is None else STATES[code]
        return row.cpu_milli, row.memory_mib, state

    def _encoded_here(self, number: int, row: Row) -> list[int]:
        """As it stands among the rows of the draft."""
        encoded_row = self._encoded(number, self._nodes.views[number], row)
        encoded_row[k.STATE] |= k.HELD * int(self._is_held[number])
        return encoded_row

    def _change(self, number: int) -> None:
        self._log[self._logged & (len(self._log) - 1)] = number
        self._logged += 1

    # --- the draft ---

    def take(self, node: str, task: TaskShape, found: Fit) -> None:
        """The task is there from now on, until the next `sync`."""
        number = self._nodes.number[node]
        self._touched.add(number)
        place = self._nodes.place[number]
        if self._nodes.builds[number] < 0:
            row = after(task, self.row(node), found)
            encoded_row = self._encoded_here(number, row)
            self._idle_in[place] += row.idle_gpus - self._idle(self._rows[number])
            self._rows[number] = encoded_row
            self._sums[number, k.SUM_IS_KNOWN] = 0
            self._python_rows[number] = row
            self._change(number)
        else:
            self._python_rows.pop(number, None)
            gpus = task.gpus
            k.take(
                self._rows, self._sums, self._builds.table, self._idle_in, place, self._log, self._logged, number,
                task.cpu_milli, task.memory_mib, -1 if gpus.memory_mib is None else gpus.memory_mib,
                gpus.compute_milli, code_of(found.gpus, found.isolations),
            )  # fmt: skip
            self._logged += 1

    def hold(self, nodes: frozenset[str]) -> None:
        """These nodes refuse everybody, and no others do."""
        if nodes is self._held or nodes == self._held:
            return
        numbers = np.array([self._nodes.number[node] for node in nodes ^ self._held], np.int64)
        self._held = nodes
        self._is_held[numbers] ^= 1
        self._logged = k.hold(self._rows, numbers, self._log, self._logged)

    def row(self, node: str) -> Row:
        """What is left of the node in the draft."""
        number = self._nodes.number[node]
        view = self._nodes.views[number]
        if number not in self._touched:
            return view.row
        known = self._python_rows.get(number)
        if known is not None:
            return known
        line = self._rows[number].tolist()
        if line[k.BUILD] < 0:
            return view.row
        count = line[k.COUNT]
        mib, milli, sharing = (line[k.PIECES + n * k.GPUS :][:count] for n in range(3))
        pieces = tuple(
            Piece(m, c, NAMES[share] if share >= 0 else (), share >= 0)
            for m, c, share in zip(mib, milli, sharing, strict=True)
        )
        row = Row(view.row.build, line[k.CPU], line[k.MEMORY], pieces)
        self._python_rows[number] = row
        return row

    def idle_gpus(self, node: str) -> int:
        number = self._nodes.number[node]
        if self._sums[number, k.SUM_IS_KNOWN]:
            return int(self._sums[number, k.SUM_IDLE])
        return self._idle(self._rows[number])

    def idle_in(self, location: Location) -> int:
        return int(self._idle_in[self._nodes.places.index(location)])

    def remoteness(self, location: Location) -> int:
        return self._nodes.remoteness[location]

    # --- shapes ---

    def ask(self, task: TaskShape, constraints: Constraints) -> _Asked:
        """The shape, from now on answered for all nodes."""
        known = self._asked.get((task, constraints))
        if known is None:
            known = self._asked[task, constraints] = self._enter(task, constraints)
        return known

    def catch_up(self, asked: _Asked, fallback: Fallback) -> None:
        """Answers anew for the nodes that changed."""
        if self._positions[asked.number] != self._logged:
            self._stamp += 1
            left = k.catch_up(*self._tables(asked.number))
            self._fall_back(asked, left, fallback)

    def place(
        self, asked: _Asked, fallback: Fallback, *, taking: bool = False
    ) -> tuple[str, Fit | None, int] | None:
        """The node with the lowest score, ties by the idle GPUs of its place, then by name; how the task fits there; and
        how many whole GPUs the node has. None: it fits nowhere. With `taking` the task is there from now on. Of a node
        of an odd build only the name is known, and nothing is taken there."""
        self._stamp += 1
        nodes = self._nodes
        left, node, code, idle = k.place(
            *self._tables(asked.number),
            nodes.block_place, self._idle_in, nodes.name_order, taking,
        )  # fmt: skip
        if left:
            self._fall_back(asked, left, fallback)
            return self.place(asked, fallback, taking=taking)
        if node < 0:
            return None
        found = self._fit(asked, node, code)
        if taking and found is not None:
            self._logged += 1
            self._touched.add(node)
            self._python_rows.pop(node, None)
        return nodes.names[node], found, idle

    def _tables(self, number: int | Table) -> tuple[object, ...]:
        """What `kernels.catch_up` wants for a shape."""
        return (
            self._rows, self._sums, self._shapes, number, self._builds.table, self._compat, self._labels,
            self._prices, self._cpu_prices, self._values, self._whole, self._step_mib,
            self._keys, self._counts, self._minima, self._nodes.block_of, self._nodes.block_starts,
            self._log, self._positions, self._logged, self._stamps, self._stamp, self._odd,
        )  # fmt: skip

    def _fall_back(self, asked: _Asked, left: int, fallback: Fallback) -> None:
        """Nodes of odd builds are answered by the caller."""
        for number in self._odd[:left].tolist():
            self._put(asked, number, fallback(self._nodes.names[number]))

    def in_order(self, asked: _Asked) -> list[str]:
        """All nodes where it fits, the best one first."""
        keys = self._keys[asked.number]
        idle = self._idle_in[self._place]
        order = np.lexsort((self._nodes.name_order, idle, keys))
        return [self._nodes.names[n] for n in order.tolist() if keys[n] >= 0]

    def fitting(self, asked: _Asked) -> list[str]:
        names = self._nodes.names
        return [names[n] for n in np.flatnonzero(self._keys[asked.number] >= 0).tolist()]

    def fits_somewhere(self, asked: _Asked) -> bool:
        return not k.is_refused(self._counts, asked.number, len(self._rows))

    def found(self, asked: _Asked, node: str) -> Fit | None:
        """How it fits on a node where it does; None for a node of an odd build."""
        number = self._nodes.number[node]
        if self._rows[number, k.BUILD] < 0:
            return None
        chosen = k.choose(
            self._rows, self._sums, self._shapes, asked.number, number, self._builds.table, self._compat,
            self._prices, self._cpu_prices, self._values, self._whole, self._step_mib,
        )  # fmt: skip
        return self._fit(asked, number, chosen)

    def together(self, asked: _Asked, count: int) -> list[tuple[str, Fit]] | None:
        """Where so many tasks of the shape go as a gang, which has caught up; None if they do not all fit. No node of
        an odd build may be among those where it fits."""
        nodes, size = self._nodes, len(self._nodes.names)
        tables = (
            self._rows, self._shapes, asked.number, self._builds.table, self._compat,
            self._prices, self._cpu_prices, self._values, self._whole, self._step_mib,
            np.empty(gang_kernels.WORK + 3 * count, np.int64),
        )  # fmt: skip
        room, left_mib, idle = (np.empty(size, np.int64) for _ in range(3))
        on, amounts, codes = (np.zeros(count, np.int64) for _ in range(3))
        if gang_kernels.capacities(*tables, self._keys, count, room, left_mib, idle) < count:
            return None
        most = min(count, k.GPUS)  # a node takes no more of those that have a GPU each
        known = np.full((len(self._builds.table), 1 << k.GPUS, most + 1), -1, np.int64)
        asking = *tables, room, left_mib, idle, nodes.name_order, count, known, on, amounts
        used = gang_kernels.best_single(*asking)
        for starts in () if used else nodes.levels:
            used = gang_kernels.best_domain(*asking, nodes.tree, nodes.tree_costs, starts)
            if used:
                break
        gang_kernels.fill(*tables, on, amounts, used, codes)
        places = np.repeat(on[:used], amounts[:used]).tolist()
        found = []
        for number, code in zip(places, codes.tolist(), strict=False):
            fit = self._fit(asked, number, code)
            assert fit is not None
            found.append((nodes.names[number], fit))
        return found or None

    def is_odd_among(self, asked: _Asked) -> bool:
        """Whether it fits on a node of an odd build."""
        return any(self._keys[asked.number, number] >= 0 for number in self._odd_nodes)

    def counts(self, asked: _Asked) -> Mapping[ReasonCode, int]:
        counts = self._counts[asked.number].tolist()
        return {code: count for code, count in zip(REASONS, counts, strict=True) if count}

    def free_pieces(self, asked: _Asked) -> tuple[int, int, int, int]:
        """(largest memory, largest compute, all memory, all compute) on nodes of known builds."""
        found = k.free_pieces(self._rows, asked.number, self._compat, self._keys)
        return found[0], found[1], found[2], found[3]

    def odd_nodes(self) -> list[str]:
        return [self._nodes.names[number] for number in sorted(self._odd_nodes)]

    def fitting_shapes(self, shapes: Sequence[Shape], answer: Answer) -> list[bool]:
        """For each shape whether all kinds of its tasks fit somewhere, in one call. Fastest for the sequence that it was
        asked for last, and where no node of an odd build has changed."""
        if self._last_shapes is not shapes:
            self._last_shapes, known = shapes, self._shape_numbers
            numbers_of = [known.get(shape) or self._numbers_of(shape) for shape in shapes]
            self._last_numbers = np.array([*itertools.chain.from_iterable(numbers_of)], np.int64)
            self._last_counts = [len(numbers) for numbers in numbers_of]
        fits, is_left = (np.zeros(len(self._last_numbers), np.bool_) for _ in range(2))
        k.fit_somewhere(*self._tables(self._last_numbers), fits, is_left)
        self._stamp += len(fits)
        if self._odd_nodes and is_left.any():
            all_asked = [*self._asked.values()]
            for i in np.flatnonzero(is_left).tolist():
                asked = all_asked[self._last_numbers[i]]
                self.catch_up(asked, partial(answer, asked.task, asked.constraints))
                fits[i] = self.fits_somewhere(asked)
        found: list[bool] = fits.tolist()
        if self._last_counts.count(1) == len(self._last_counts):
            return found
        each = iter(found)
        return [all(tuple(itertools.islice(each, count))) for count in self._last_counts]

    def _numbers_of(self, shape: Shape) -> tuple[int, ...]:
        known = self._shape_numbers.get(shape)
        if known is None:
            asked = (self.ask(task, shape.constraints) for task in shape.tasks if task.count)
            known = self._shape_numbers[shape] = tuple(one.number for one in asked)
        return known

    # --- the market, for the next prices ---

    @property
    def is_ready(self) -> bool:
        """Whether it has seen a snapshot."""
        return self._seen is not None

    @property
    def card_mib(self) -> int:
        """Memory of the largest card; 0 where there is none."""
        return max((gpu.memory_mib for build in self._builds.numbers for gpu in build.gpus), default=0)

    def market(self, worth: Worth) -> tuple[dict[str, int], dict[int, int], int]:
        """What `coordinator.prices.with_market` must know of the nodes, at equal prices of models."""
        cpu, values, whole = price_tables(worth)
        while True:  # it may be asked from another thread: the builds of those rows, or later ones
            builds, rows = self._builds, self._rows.copy()
            if builds is self._builds:
                break
        models = dict(builds.models)
        found, idle, milli = k.node_values(
            rows, builds.table, cpu, values, whole, worth.memory_step_mib, len(models)
        )
        by_model = {model: int(found[n]) for model, n in models.items() if n and found[n] > 0}
        return by_model, dict(enumerate(idle.tolist())), int(milli)

    # --- tables ---

    def _forget_shapes(self) -> None:
        self._asked: dict[tuple[TaskShape, Constraints], _Asked] = {}
        self._shape_numbers: dict[Shape, tuple[int, ...]] = {}
        self._last_shapes = None
        self._constraints: dict[Constraints, int] = {}
        nodes = len(self._nodes.views) if hasattr(self, "_nodes") else 0
        blocks = len(self._nodes.block_starts) - 1 if nodes else 0
        # What is not written takes no memory.
        widths = k.S_WIDTH, nodes, len(REASONS), blocks, len(self._builds.table)
        tables = [np.zeros((_FIRST_SHAPES, width), np.int64) for width in widths]
        self._of_shapes = (*tables, np.zeros(_FIRST_SHAPES, np.int64))
        self._labels = np.ones((4, nodes), np.bool_)
        self._builds_known = len(self._builds.known)
        self._fits.clear()

    def _keep_half(self) -> None:
        """Of the shapes, those that were asked for last."""
        last = sorted(self._asked.values(), key=lambda asked: -self._positions[asked.number])
        kept = last[: len(last) // 2]
        numbers = [asked.number for asked in kept]
        self._of_shapes = tuple(table[numbers] for table in self._of_shapes)
        self._asked = {
            (asked.task, asked.constraints): evolve(asked, number=number) for number, asked in enumerate(kept)
        }
        self._shape_numbers.clear()
        self._last_shapes = None
        self._fits.clear()

    @property
    def _of_shapes(self) -> tuple[Table, ...]:
        """The tables that have a row for each shape."""
        return self._shapes, self._keys, self._counts, self._minima, self._compat, self._positions

    @_of_shapes.setter
    def _of_shapes(self, tables: tuple[Table, ...]) -> None:
        self._shapes, self._keys, self._counts, self._minima, self._compat, self._positions = tables

    def _know_builds(self) -> None:
        """What the shapes make of those that are new, and what their GPUs cost."""
        builds = self._builds
        if self._compat.shape[1] < len(builds.table):
            wider = np.zeros((len(self._compat), len(builds.table)), np.int64)
            wider[:, : self._compat.shape[1]] = self._compat
            self._compat = wider
        for build in range(self._builds_known, len(builds.known)):
            for asked in self._asked.values():
                self._compat[asked.number, build] = compat(asked.task, builds.known[build])
        self._builds_known = len(builds.known)
        if len(builds.models) != len(self._prices):
            self._set_prices(self.worth)

    def _enter(self, task: TaskShape, constraints: Constraints) -> _Asked:
        number = len(self._asked)
        if number == len(self._keys):
            self._of_shapes = tuple(map(grown, self._of_shapes))
        self._keys[number], self._counts[number], self._minima[number] = k.UNKNOWN, 0, k.NOTHING
        self._positions[number] = -1
        if constraints not in self._constraints:
            place = self._constraints[constraints] = len(self._constraints)
            if place == len(self._labels):
                self._labels = np.concatenate([self._labels, np.ones_like(self._labels)])
            self._labels[place] = [view.has_labels(constraints) for view in self._nodes.views]
        gpus = task.gpus
        self._shapes[number] = (
            gpus.count,
            task.cpu_milli,
            task.memory_mib,
            -1 if gpus.memory_mib is None else gpus.memory_mib,
            gpus.compute_milli,
            gpus.is_whole,
            self._constraints[constraints],
        )
        for build, known in enumerate(self._builds.known[: self._builds_known]):
            self._compat[number, build] = compat(task, known)
        return _Asked(task, constraints, number)

    def _put(self, asked: _Asked, number: int, found: Fit | ReasonCode) -> None:
        if isinstance(found, ReasonCode):
            answer = -1 - REASONS.index(found)
        else:
            answer = encoded(asked.task, found.score, self._place_rank[number])
        k.put(
            self._keys, self._counts, self._minima, self._nodes.block_of, self._nodes.block_starts,
            asked.number, number, answer,
        )  # fmt: skip

    def _fit(self, asked: _Asked, number: int, code: int) -> Fit | None:
        """From what `kernels.choose` tells, once for all nodes alike."""
        build = self._nodes.builds[number]
        if build < 0:
            return None
        known = self._fits.get((asked.number, build, code))
        if known is not None:
            return known
        kinds, gpus = self._builds.known[build], MEMBERS[code >> 32]
        names = tuple([ISOLATIONS[code >> 4 * place & 15] for place in reversed(range(len(gpus)))])
        cost = kinds.topology.set_cost(gpus) if len(gpus) > 1 else 0
        use = use_of(asked.task.gpus, kinds.gpus, gpus, names)
        found = self._fits[asked.number, build, code] = Fit(gpus, names, (), cost, use)
        return found

    def _set_prices(self, worth: Worth | None) -> None:
        self._sums[:, k.SUM_IS_KNOWN] = 0
        self._cpu_prices, self._values, self._whole = price_tables(worth)
        self._step_mib = worth.memory_step_mib if worth else 1
        self._prices = np.array(
            [
                0 if not model else worth.models.get(model, 1000) if worth else 1000
                for model in self._builds.models
            ],
            np.int64,
        )
