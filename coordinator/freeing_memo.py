"""What frees soonest for a shape of task on each node, kept from cycle to cycle beside an index: a memo, never the truth.

What `coordinator.freeing` says of a node depends on that node alone: on its row, on who holds what of it, and on the
time only where one of its holders is past its limit or was asked to stop. So a shape looks again at the nodes that
changed since it was last asked, and at those with such a holder; the node that is first is then found by reading one
number for each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, ref

import numpy as np
from numpy.typing import NDArray

from coordinator import freeing_kernels as f
from coordinator import kernels as k
from coordinator.fit import Fit
from coordinator.freeing import Change, Found, Holder, Holdings, Lease
from coordinator.index import Index
from coordinator.nodes import Constraints, NodeView, Row, full_row
from coordinator.placement import Draft
from coordinator.snapshot import TaskShape
from coordinator.tables import BITS, Table

# More shapes than this are not remembered; a reservation is for one.
_MOST_SHAPES = 64
_BIT_PLACES = {name: bit.bit_length() - 1 for name, bit in BITS.items()}


class _Kept:
    """What is known of one shape: by build whether an empty node could take it; by node whether it is `usable` to it,
    whether it is open to work but not to this, how many of several tasks it takes now, and the first change of that
    where it is `exact`."""

    def __init__(self, nodes: int) -> None:
        self.could = np.zeros(0, np.bool_)
        self.counts, self.ends, self.busy = (np.zeros(nodes, np.int64) for _ in range(3))
        self.exact, self.usable, self.outside = (np.zeros(nodes, np.bool_) for _ in range(3))
        self.position = -1
        self.names: frozenset[str] | None = None
        self.found: tuple[object, Found] | None = None


class Memo:
    """Of one index. Holders stand in one table, those of a node in one piece of it."""

    def __init__(self) -> None:
        self._nodes: object = None
        self.now_ms = 0
        self._taken: dict[int, tuple[ref[Draft], int]] = {}
        self._log: list[int] = []
        self._shapes: dict[tuple[TaskShape, Constraints], _Kept] = {}
        self._named: dict[bytes, frozenset[str]] = {}
        self.rows: dict[int, tuple[object, Row]] = {}

    def catch_up(self, index: Index, holdings: Holdings) -> None:
        """Who holds what, as of the draft that `holdings` are of."""
        if self._nodes is not index._nodes:
            self._start(index)
        if holdings.now_ms < self.now_ms:
            self._shapes.clear()  # ends that were past then are not now
        self.now_ms = holdings.now_ms
        changed, index.reread = index.reread, set()
        number = index._nodes.number
        draft = ref(holdings.draft)
        taken = {number[node]: (draft, len(spots)) for node, spots in holdings.taken.items()}
        untaken = {n for n, mark in self._taken.items() if taken.get(n) != mark}
        changed |= untaken
        changed |= {n for n, mark in taken.items() if self._taken.get(n) != mark}
        self._taken = taken
        names = index._nodes.names
        views = holdings.draft.views
        for n in changed:
            view, before = views[names[n]], self._views[n]
            self._views[n] = view
            self.entered[n] += 1
            if n in taken or n in untaken or before is None or not _is_held_alike(view, before):
                self._see(n, holdings.outlook(names[n]))
        self._log += changed
        if len(self._log) > 4 * len(names) + 64:
            self._log.clear()
            self._shapes.clear()

    def _start(self, index: Index) -> None:
        self._nodes = index._nodes
        count = len(index._nodes.names)
        self.held = np.zeros((8 * count + 64, f.H_WIDTH), np.int64)
        self.starts, self.lengths, self._room = (np.zeros(count, np.int64) for _ in range(3))
        self._used, self.work = 0, np.zeros(f.WORK + 64, np.int64)
        self._next_ms, self._stopping = f.NEVER_MS, 0  # no fixed end is sooner; nodes with another
        # The first end there: one of those that are known, or so long from now; and how busy it is at least.
        self.absolute, self.relative = (np.full(count, f.NEVER_MS, np.int64) for _ in range(2))
        self.least_busy = np.zeros(count, np.int64)
        self.entered = np.zeros(count, np.int64)  # how often it changed
        self._views: list[NodeView | None] = [None] * count
        self.rows.clear()
        self._named.clear()
        self._taken.clear()
        self._log.clear()
        self._shapes.clear()
        index.reread = set(range(count))

    def _see(self, n: int, outlook: tuple[int, int, int]) -> None:
        """Who holds the node is entered when somebody must know."""
        self.lengths[n] = -1
        self._stopping -= bool(self.relative[n] != f.NEVER_MS)
        self.absolute[n], self.relative[n], self.least_busy[n] = outlook
        self._stopping += bool(self.relative[n] != f.NEVER_MS)
        self._next_ms = min(self._next_ms, outlook[0])

    def enter(self, n: int, leases: Sequence[Lease]) -> None:
        """Who holds the node, which is of a known build."""
        lines: list[tuple[int, ...]] = []
        for lease in leases:
            figures = lease.when_ms, lease.is_relative, lease.busy_milli, lease.cpu_milli, lease.memory_mib
            if not lease.pieces:
                lines.append((1, *figures, -1, 0, 0, 0))
            for place, (gpu, mib, milli, name) in enumerate(lease.pieces):
                lines.append((place == 0, *figures, gpu, mib, milli, _BIT_PLACES.get(name, 0)))
        length = len(lines)
        if length > self._room[n]:
            self._make_room(n, length + length // 2 + 2)
        self.lengths[n] = length
        if f.WORK + 2 * length > len(self.work):
            self.work = np.zeros(f.WORK + 4 * length, np.int64)
        if lines:
            start = int(self.starts[n])
            self.held[start : start + length] = lines

    def _make_room(self, n: int, length: int) -> None:
        while self._used + length > len(self.held):
            self.held = np.concatenate([self.held, np.zeros_like(self.held)])
        self.starts[n], self._room[n] = self._used, length
        self._used += length

    def named(self, index: Index, mask: NDArray[np.bool_]) -> frozenset[str]:
        """The names of these nodes; equal sets are one object, which tells at once that they are equal."""
        key = np.packbits(mask).tobytes()
        if len(self._named) > _MOST_SHAPES:
            self._named.clear()
        if key not in self._named:
            self._named[key] = frozenset([index._nodes.names[n] for n in np.flatnonzero(mask).tolist()])
        return self._named[key]

    def ask(self, index: Index, holdings: Holdings, task: TaskShape, constraints: Constraints) -> Answers:
        """What frees soonest for all tasks of this kind of one job; `catch_up` comes first."""
        kept = self._shapes.pop((task, constraints), None)
        if kept is None:
            if len(self._shapes) >= _MOST_SHAPES:
                del self._shapes[next(iter(self._shapes))]  # asked for the longest time ago
            kept = _Kept(len(self.starts))
        self._know_builds(kept, index, holdings.draft, task)
        self._shapes[task, constraints] = kept
        answers = Answers(self, kept, index, holdings, task, constraints)
        if kept.position < 0:
            answers.look(np.arange(len(self.starts)))
        elif kept.position < len(self._log):
            answers.look(np.array(self._log[kept.position :], np.int64))
        kept.position = len(self._log)
        if self._moves:
            kept.exact &= (self.absolute >= self.now_ms + f.SOON_MS) & (self.relative == f.NEVER_MS)
        return answers

    def moves(self, n: int) -> bool:
        """Whether the end of a holder of this node moves with the time."""
        return bool(self.absolute[n] < self.now_ms + f.SOON_MS or self.relative[n] != f.NEVER_MS)

    @property
    def _moves(self) -> bool:
        """Whether the end of a holder moves with the time: its job is past its limit, or was asked to stop."""
        soon_ms = self.now_ms + f.SOON_MS
        if self._next_ms < soon_ms:
            self._next_ms = int(self.absolute.min())
        return self._next_ms < soon_ms or self._stopping > 0

    def _know_builds(self, kept: _Kept, index: Index, draft: Draft, task: TaskShape) -> None:
        """Also of those that are new whether an empty node of it takes the task."""
        builds = index._builds.known
        if len(kept.could) < len(builds):
            new = [isinstance(draft.fit(task, full_row(build)), Fit) for build in builds[len(kept.could) :]]
            kept.could = np.concatenate([kept.could, np.array(new, np.bool_)])


class Answers:
    """What frees soonest for one shape in one draft."""

    def __init__(
        self,
        memo: Memo,
        kept: _Kept,
        index: Index,
        holdings: Holdings,
        task: TaskShape,
        constraints: Constraints,
    ) -> None:
        self._memo = memo
        self._kept = kept
        self._index = index
        self._holdings = holdings
        self._task = task
        self._constraints = constraints
        asked = index.ask(task, constraints)
        self._shape = index._shapes[asked.number]
        self._compat = index._compat[asked.number]
        self._labels = index._labels[int(self._shape[k.S_LABELS])]

    def look(self, nodes: Table) -> None:
        """Sees anew what is known of these nodes."""
        kept, index = self._kept, self._index
        odd = np.empty(len(nodes), np.int64)
        left, is_other = f.look(
            index._rows, nodes, self._shape, index._builds.table, self._compat, self._labels, kept.could,
            self._task.count, kept.counts, kept.exact, kept.usable, kept.outside, odd,
            self._memo.work,
        )  # fmt: skip
        for n in odd[:left].tolist():
            is_other |= self._look_at_odd(n)
        if is_other:
            kept.names = None

    def _look_at_odd(self, n: int) -> bool:
        kept, task, name = self._kept, self._task, self._index._nodes.names[n]
        draft = self._holdings.draft
        is_usable = draft.gate(name, self._constraints) is None and isinstance(
            draft.fit(task, draft.views[name].full_row), Fit
        )
        was_usable, kept.usable[n] = bool(kept.usable[n]), is_usable
        kept.outside[n] = not is_usable and draft.gate(name, ()) is None
        if task.count > 1:
            kept.counts[n] = self._holdings.count(task, draft.row(name), task.count) if is_usable else 0
        return was_usable != is_usable

    @property
    def usable(self) -> frozenset[str]:
        """The nodes that are open to the job and could take it when empty."""
        if self._kept.names is None:
            self._kept.names = self._memo.named(self._index, self._kept.usable)
        return self._kept.names

    @property
    def leaves_nodes_open(self) -> bool:
        """Whether a node that the job could not use is open to work."""
        return bool(self._kept.outside.any())

    def last_holder(self) -> Holder | None:
        """The first holder in their order after whose end all tasks fit; None where they never do. Now they do not."""
        kept, total = self._kept, int(self._kept.counts.sum())
        ends, busy, exact = kept.ends, kept.busy, kept.exact
        coming: dict[int, Change] = {}
        while (n := self._first(ends, busy, exact)) >= 0:
            change = coming.get(n) or self._change(n)
            total += change.after - change.before
            if total >= self._task.count:
                return self._holdings.holders(self._index._nodes.names[n])[change.place - 1]
            if not coming:
                ends, busy, exact = ends.copy(), busy.copy(), exact.copy()
            coming[n] = self._change(n, change.place)
            ends[n], busy[n] = coming[n].end_ms, coming[n].busy_milli
        return None

    def single(self, find: Callable[[Holder], Found]) -> Found | None:
        """What `find` finds for the last holder of one task; the former answer while what it depends on is the same."""
        kept, memo = self._kept, self._memo
        n = self._first(kept.ends, kept.busy, kept.exact)
        if n < 0:
            return None
        basis = n, int(memo.entered[n]), int(kept.ends[n]), self._holdings.draft.worth
        if memo.moves(n) or kept.found is None or kept.found[0] != basis:
            last = self._holdings.holders(self._index._nodes.names[n])[self._change(n).place - 1]
            kept.found = basis, find(last)
        spots, end_ms, rows = kept.found[1]
        return spots, end_ms, dict(rows)

    def _first(self, ends: Table, busy: Table, exact: NDArray[np.bool_]) -> int:
        """The node with the first change that these know of; -1 for none. They know more afterwards."""
        memo, index, kept = self._memo, self._index, self._kept
        while True:
            n, is_left = f.first_change(
                index._rows, memo.held, memo.starts, memo.lengths, memo.now_ms, self._shape,
                index._builds.table, self._compat, self._task.count, memo.work, kept.usable,
                memo.absolute, memo.relative, memo.least_busy, index._nodes.name_order, ends, busy, exact,
            )  # fmt: skip
            if not is_left:
                return int(n)
            if index._rows[n, k.BUILD] < 0:
                change = self._change(n)
                ends[n], busy[n], exact[n] = change.end_ms, change.busy_milli, True
            else:
                self._enter(n)

    def _enter(self, n: int) -> None:
        if self._memo.lengths[n] < 0:
            self._memo.enter(n, self._holdings.leases(self._index._nodes.names[n]))

    def _change(self, n: int, skip: int = 0) -> Change:
        memo, index = self._memo, self._index
        if index._rows[n, k.BUILD] < 0:
            return self._holdings.change(index._nodes.names[n], self._task, self._task.count, skip)
        self._enter(n)
        return Change(
            *f.change_of(
                index._rows, n, memo.held, memo.starts, memo.lengths, memo.now_ms, self._shape,
                index._builds.table, self._compat, self._task.count, skip, memo.work,
            )
        )  # fmt: skip

    def rows_by(self, limit: Holder) -> dict[str, Row]:
        """What is left, once everything up to `limit` has ended, of the nodes that take a task then, and maybe of
        others."""
        memo, index, rows = self._memo, self._index, dict[str, Row]()
        for n in self._free_by(limit):
            name, basis = index._nodes.names[n], (int(memo.entered[n]), limit)
            known = memo.rows.get(n)
            if known is None or known[0] != basis or memo.moves(n):
                known = memo.rows[n] = basis, self._holdings.row(name, limit)
            rows[name] = known[1]
        return rows

    def _free_by(self, limit: Holder) -> list[int]:
        kept, memo, (end_ms, lease) = self._kept, self._memo, limit
        now_ms = memo.now_ms
        soonest = np.minimum(np.maximum(now_ms + f.SOON_MS, memo.absolute), now_ms + memo.relative)
        ends = np.where(kept.exact, kept.ends, soonest)
        busy = np.where(kept.exact, kept.busy, memo.least_busy)
        by_then = (ends < end_ms) | ((ends == end_ms) & (busy <= lease.busy_milli))
        return np.flatnonzero((by_then & kept.usable) | (kept.counts > 0)).tolist()

    def free_now(self) -> list[str]:
        """Nodes that take a task now."""
        return self._names(self._kept.counts > 0)

    def _names(self, mask: NDArray[np.bool_]) -> list[str]:
        names = self._index._nodes.names
        return [names[n] for n in np.flatnonzero(mask).tolist()]


def _is_held_alike(view: NodeView, before: NodeView) -> bool:
    """Whether the same tasks hold the same GPUs of the node."""
    if view.uses is before.uses:
        return view.inventory is before.inventory
    same_uses = len(view.uses) == len(before.uses) and all(map(operator.is_, view.uses, before.uses))
    return same_uses and view.inventory is before.inventory


_MEMOS: WeakKeyDictionary[Index, Memo] = WeakKeyDictionary()


def memo_of(index: Index) -> Memo:
    memo = _MEMOS.get(index)
    if memo is None:
        memo = _MEMOS[index] = Memo()
    return memo
