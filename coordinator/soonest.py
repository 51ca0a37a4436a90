"""Which slices free soonest for a job that does not fit.

Holders are taken away in their order (`coordinator.freeing`) until the job fits; the end of the last of them is when
it is due. Of a gang, nodes that are free already are used as few as can be: those are left to others until then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from coordinator.fit import Fit
from coordinator.freeing import Found, Holder, Holdings, Lease, Taken, all_by, freed
from coordinator.freeing_kernels import UNKNOWN_MS
from coordinator.freeing_memo import Answers, memo_of
from coordinator.gangs import place
from coordinator.nodes import NodeBuild, Row
from coordinator.placement import Draft, Spot
from coordinator.snapshot import Shape, TaskShape
from coordinator.usage import NO_LIMIT


class Soonest:
    """For one shape in one draft, of which `taken` went to other jobs in this cycle. Over an index the holder that must
    end last is looked up; without one, and for a gang of different tasks, all holders are walked through."""

    def __init__(self, draft: Draft, taken: Taken, shape: Shape) -> None:
        self._draft = draft
        self._shape = shape
        self._tasks = [task for task in shape.tasks if task.count]
        self._holdings = Holdings(draft, taken)
        self._answers: Answers | None = None
        if draft.index is not None and len(self._tasks) == 1:
            memo = memo_of(draft.index)
            memo.catch_up(draft.index, self._holdings)
            self._answers = memo.ask(draft.index, self._holdings, self._tasks[0], shape.constraints)
        self._usable: frozenset[str] | None = None
        self._rows: dict[Holder, dict[str, Row]] = {}

    @property
    def usable(self) -> frozenset[str]:
        """The nodes that are open to the job and could take one of its tasks when empty."""
        if self._answers is not None:
            return self._answers.usable
        if self._usable is None:
            draft, could_take = self._draft, dict[NodeBuild, bool]()
            usable = []
            for name, view in draft.views.items():
                if draft.gate(name, self._shape.constraints) is None:
                    build = view.row.build
                    if build not in could_take:
                        could_take[build] = self._fits(view.full_row)
                    if could_take[build]:
                        usable.append(name)
            self._usable = frozenset(usable)
        return self._usable

    @property
    def leaves_nodes_open(self) -> bool:
        """Whether a node that the job could not use is open to work."""
        if self._answers is not None:
            return self._answers.leaves_nodes_open
        draft, usable = self._draft, self.usable
        return any(name not in usable and draft.gate(name, ()) is None for name in draft.views)

    def found(self) -> Found | None:
        """None where the job does not fit whatever ends."""
        if not self._tasks:
            return None
        if len(self._tasks) > 1:
            return self._by_halving()
        [task] = self._tasks
        if self._answers is None:
            last = self._last_of_all()
        elif task.count == 1:
            return self._answers.single(lambda last: self._single(task, last))
        else:
            last = self._answers.last_holder()
        if last is None:
            return None
        return self._gang(last) if task.count > 1 else self._single(task, last)

    def _fits(self, row: Row) -> bool:
        return any(isinstance(self._draft.fit(task, row), Fit) for task in self._tasks)

    def _last_of_all(self) -> Holder | None:
        """As `Answers.last_holder`, by walking through all holders."""
        [task] = self._tasks
        holdings, most = self._holdings, task.count
        left: dict[str, list[Lease]] = {node: list(holdings.leases(node)) for node in self.usable}
        rows = {node: self._draft.row(node) for node in left}
        counts = {node: holdings.count(task, row, most) if most > 1 else 0 for node, row in rows.items()}
        total = sum(counts.values())
        ending = [(lease.end_ms(holdings.now_ms), lease) for leases in left.values() for lease in leases]
        heapq.heapify(ending)
        while ending:
            holder = heapq.heappop(ending)
            lease = holder[1]
            node = lease.node
            left[node].remove(lease)
            rows[node] = freed(rows[node], lease, left[node])
            count = holdings.count(task, rows[node], most)
            total += count - counts[node]
            counts[node] = count
            if total >= most:
                return holder
        return None

    def _single(self, task: TaskShape, last: Holder) -> Found:
        """What ends with the last holder is free then too."""
        end_ms, lease = last
        row = self._holdings.row(lease.node, all_by(end_ms) if end_ms < UNKNOWN_MS else last)
        found = self._draft.fit(task, row)
        assert isinstance(found, Fit)
        return (Spot(0, lease.node, task, found),), end_ms, {lease.node: row}

    # --- gangs ---

    def _gang(self, last: Holder) -> Found | None:
        best = self._after(last)
        limit = all_by(last[0]) if last[0] < UNKNOWN_MS else last
        return self._sparing(limit) or best

    def _by_halving(self) -> Found | None:
        """What fits when some have ended fits when more have."""
        holders = sorted(holder for node in self.usable for holder in self._holdings.holders(node))
        if not holders or self._after(holders[-1]) is None:
            return None
        return self._gang(holders[_first(len(holders) - 1, lambda n: self._after(holders[n]) is not None)])

    def _sparing(self, limit: Holder) -> Found | None:
        """With as few as can be of the nodes that are free already."""
        free = [node for node in self._free_now() if not self._ends_some(node, limit)]
        spared = len(free) - _first(
            len(free), lambda n: self._after(limit, free[: len(free) - n]) is not None
        )
        return self._after(limit, free[:spared]) if spared else None

    def _free_now(self) -> Sequence[str]:
        if self._answers is not None:
            return sorted(self._answers.free_now())
        return [node for node in sorted(self.usable) if self._fits(self._draft.row(node))]

    def _ends_some(self, node: str, limit: Holder) -> bool:
        return any(holder <= limit for holder in self._holdings.holders(node))

    def _after(self, limit: Holder, spared: Iterable[str] = ()) -> Found | None:
        """Where the job goes once everything up to `limit` has ended."""
        if limit not in self._rows:
            if self._answers is not None:
                self._rows[limit] = self._answers.rows_by(limit)
            else:
                self._rows[limit] = {node: self._holdings.row(node, limit) for node in self.usable}
        changed = {node: self._draft.row(node) for node in self._holdings.taken}
        later = self._draft.beside(changed | self._rows[limit], "later", frozenset(spared))
        spots = place(later, self._shape, NO_LIMIT)
        return (
            None if spots is None else (spots, limit[0], {spot.node: later.row(spot.node) for spot in spots})
        )


def _first(count: int, is_enough: Callable[[int], bool]) -> int:
    """The first of 0 to `count` that is enough, by halving; `count` is."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return low
