"""The order of jobs inside a tenant: higher priority first; then what needs least (GPU memory, compute, CPU); then
the older. A job that was passed over longer than the bounded wait goes ahead of smaller ones of its priority.

Jobs of one line (one priority, one shape) are answered alike, so a queue hands out the first of a line and drops the
whole line once its shape was refused; it never looks at all jobs.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from attrs import frozen

from coordinator.fit import matches_model
from coordinator.model import Job
from coordinator.snapshot import LineKey, Lines, Shape, Snapshot, TaskShape
from coordinator.usage import Use
from vgpu.inventory import Gpu


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
    """The kinds of GPU in the cluster, to say what a whole card is at least (FR-5: only real GPUs count)."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.kinds = snapshot.kinds
        self.fronts = _fronts_kept()
        self._needs: dict[Shape, Needs] = {}

    def needs(self, shape: Shape) -> Needs:
        """With a whole card taken for the smallest one that matches; 0 where there is none."""
        known = self._needs.get(shape)
        if known is None:
            memory = sum(task.count * task.gpus.count * self._memory_mib(task) for task in shape.tasks)
            known = self._needs[shape] = Needs(memory, shape.compute_milli, shape.cpu_milli)
        return known

    def _memory_mib(self, task: TaskShape) -> int:
        if task.gpus.memory_mib is not None:
            return task.gpus.memory_mib
        return next((gpu.memory_mib for gpu in self.kinds if self._is_enough(task, gpu)), 0)

    def _is_enough(self, task: TaskShape, gpu: Gpu) -> bool:
        return matches_model(task.gpus, gpu) and gpu.compute_milli >= task.gpus.compute_milli


def is_ready(job: Job, now_ms: int) -> bool:
    """Not in a back-off."""
    return job.not_before_ms <= now_ms


def is_overdue(job: Job, now_ms: int, max_wait_seconds: int) -> bool:
    return now_ms - job.queued_at_ms >= 1000 * max_wait_seconds


def overdue(snapshot: Snapshot, tenant: str, max_wait_seconds: int) -> list[tuple[Shape, Job]]:
    """A tenant's jobs that were passed over for too long. Only the front of each line is looked at: nobody can have
    waited longer than since its submit."""
    bound_ms = snapshot.now_ms - 1000 * max_wait_seconds
    late = []
    for key, line in snapshot.lines.get(tenant, {}).items():
        for job in line:
            if job.submitted_at_ms > bound_ms:
                break
            if is_overdue(job, snapshot.now_ms, max_wait_seconds) and is_ready(job, snapshot.now_ms):
                late.append((key.shape, job))
    return late


def fronts_of(snapshot: Snapshot, cards: Cards) -> dict[str, Front]:
    """By tenant: what of its lines is the same until they change."""
    return {tenant: cards.fronts.of(tenant, lines, cards) for tenant, lines in snapshot.lines.items()}


def wanted(fronts: Mapping[str, Front]) -> Mapping[str, Use]:
    """What the waiting jobs of each tenant would hold."""
    return {tenant: front.wanted for tenant, front in fronts.items()}


# More lines than this are dropped all at once.
_DROPPED_ONE_BY_ONE = 4
# A search for a job that may start beside a reservation looks at so many of a line.
_SEARCH_DEPTH = 500

Order = tuple[int, int, tuple[int, ...], int, str]


@frozen(eq=False)
class Line:
    """The waiting jobs of one tenant, one priority and one shape. `bit` stands for the shape in a set of shapes."""

    shape: Shape
    bit: int
    needs: Needs
    jobs: Sequence[Job]

    @cached_property
    def quickest_ms(self) -> int | None:
        """How long the one runs at most that runs shortest; None where nobody has a limit. As far as a search goes."""
        jobs = self.jobs[:_SEARCH_DEPTH]
        limits = [
            1000 * job.spec.max_runtime_seconds - job.ran_ms
            for job in jobs
            if job.spec.max_runtime_seconds is not None
        ]
        return min(limits, default=None)


# (order, line, place of the job in it, the job)
Entry = tuple[Order, Line, int, Job]


@frozen(eq=False)
class Front:
    """What is the same for all cycles while a tenant's lines stay as they are: the first jobs of all of them in order,
    their shapes, what all of them want, when the oldest came. `is_plain`: none of the first jobs was ever in a
    back-off."""

    lines: Lines
    kinds: Sequence[Gpu]
    by_key: dict[LineKey, Entry]
    by_bit: dict[int, list[Entry]]
    heap: list[Entry]
    bits: int
    wanted: Use
    oldest_ms: int
    is_plain: bool


class Fronts:
    """A memo, kept from cycle to cycle: the fronts of the tenants, compared with what they were made from, and the
    place of each shape in sets of bits. Several threads may plan, so a place is never given twice."""

    def __init__(self) -> None:
        self._known: dict[str, Front] = {}
        self._places: dict[Shape, int] = {}
        self._shapes: dict[int, Shape] = {}
        self._next_place = itertools.count()
        self._last_shapes: tuple[int, Mapping[int, Shape]] = 0, {}

    @property
    def is_full(self) -> bool:
        return len(self._places) > _MOST_SHAPES or len(self._known) > _MOST_TENANTS

    def bit(self, shape: Shape) -> int:
        place = self._places.get(shape)
        if place is None:
            place = self._places.setdefault(shape, next(self._next_place))
            self._shapes[place] = shape
        return 1 << place

    def shapes(self, bits: int) -> Mapping[int, Shape]:
        """Those of a set of bits, each by its own. The same set as last time costs nothing."""
        known = self._last_shapes
        if known[0] != bits:
            found, left = {}, bits
            while left:
                lowest = left & -left
                found[lowest] = self._shapes[lowest.bit_length() - 1]
                left ^= lowest
            known = self._last_shapes = bits, found
        return known[1]

    def of(self, tenant: str, lines: Lines, cards: Cards) -> Front:
        """Lines that are as they were when last asked for cost a comparison each."""
        known = self._known.get(tenant)
        is_same = known is not None and known.kinds == cards.kinds
        if known is not None and is_same and known.lines is lines:
            return known
        found = self._known[tenant] = self._made(lines, cards, known.by_key if known and is_same else {})
        return found

    def _made(self, lines: Lines, cards: Cards, old: Mapping[LineKey, Entry]) -> Front:
        by_key: dict[LineKey, Entry] = {}
        by_bit: dict[int, list[Entry]] = {}
        memory = compute = bits = 0
        for key, jobs in lines.items():
            entry = old.get(key)
            if entry is None:
                entry = _entry(Line(key.shape, self.bit(key.shape), cards.needs(key.shape), jobs), 0)
            elif entry[1].jobs is not jobs:
                line = entry[1]
                entry = _entry(Line(line.shape, line.bit, line.needs, jobs), 0)
            by_key[key] = entry
            line, count = entry[1], len(jobs)
            by_bit.setdefault(line.bit, []).append(entry)
            bits |= line.bit
            memory += line.needs.memory_mib * count
            compute += line.needs.compute_milli * count
        heap = sorted(by_key.values(), key=_order_of)
        oldest_ms = min([job.submitted_at_ms for _, _, _, job in heap], default=0)
        is_plain = not any(job.not_before_ms for _, _, _, job in heap)
        use = Use(compute, memory)
        return Front(lines, cards.kinds, by_key, by_bit, heap, bits, use, oldest_ms, is_plain)


_MOST_TENANTS = 10_000
_MOST_SHAPES = 20_000
_FRONTS = [Fronts()]


def _fronts_kept() -> Fronts:
    """One that is full is left to those who still use it."""
    if _FRONTS[0].is_full:
        _FRONTS[0] = Fronts()
    return _FRONTS[0]


def _order_of(entry: Entry) -> Order:
    return entry[0]


def _entry(line: Line, place: int) -> Entry:
    job = line.jobs[place]
    order: Order = (-job.spec.priority, 1, line.needs.size, job.submitted_at_ms, job.id)
    return order, line, place, job


class TenantQueue:
    """Hands out a tenant's jobs in their order. The job at the front is `first`; `take` after it was placed, `refuse`
    once its shape is known not to fit for the rest of the cycle."""

    def __init__(self, snapshot: Snapshot, tenant: str, cards: Cards, max_wait_seconds: int) -> None:
        self._now_ms = snapshot.now_ms
        self._taken: set[str] = set()
        lines = snapshot.lines.get(tenant, {})
        fronts = cards.fronts.of(tenant, lines, cards)
        self._by_bit = fronts.by_bit
        self._bits = fronts.bits
        self._is_whole = fronts.is_plain  # what is left of the front can be made anew from it
        if fronts.is_plain:
            self._heap = fronts.heap.copy()
        else:
            entries = (self._next(line, 0) for _, line, _, _ in fronts.heap)
            self._heap = [entry for entry in entries if entry is not None]
            heapq.heapify(self._heap)
        if fronts.oldest_ms <= snapshot.now_ms - 1000 * max_wait_seconds:
            self._is_whole = False
            for shape, job in overdue(snapshot, tenant, max_wait_seconds):
                order: Order = (-job.spec.priority, 0, (), job.queued_at_ms, job.id)
                line = Line(shape, cards.fronts.bit(shape), cards.needs(shape), (job,))
                heapq.heappush(self._heap, (order, line, 0, job))

    def first(self, bits: int = -1) -> tuple[Line, Job] | None:
        """Lines of shapes that are not among `bits` are dropped on the way."""
        heap = self._heap
        while heap:
            _, line, place, job = heap[0]
            if not line.bit & bits:
                if (self._bits & ~bits).bit_count() > _DROPPED_ONE_BY_ONE:
                    heap = self._kept(bits)
                else:
                    heapq.heappop(heap)
                continue
            if job.id not in self._taken:
                return line, job
            entry = self._next(line, place + 1)
            if entry is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, entry)
        return None

    def keep(self, bits: int, within_ms: int) -> None:
        """Only lines of these shapes, and those with a job that is over in this time."""
        self._is_whole = False
        self._heap = [
            entry
            for entry in self._heap
            if entry[1].bit & bits or ((ms := entry[1].quickest_ms) is not None and ms <= within_ms)
        ]
        heapq.heapify(self._heap)

    def take(self, job: Job) -> None:
        self._taken.add(job.id)

    def refuse(self) -> None:
        """The line of the job at the front has no chance any more in this cycle."""
        self._is_whole = False
        heapq.heappop(self._heap)

    def pass_over(self, may: Callable[[Job], bool]) -> None:
        """The job at the front may not start now; of its line only one that `may` has a chance."""
        self._is_whole = False
        _, line, place, _ = heapq.heappop(self._heap)
        for later in range(place + 1, min(len(line.jobs), place + 1 + _SEARCH_DEPTH)):
            if may(line.jobs[later]) and self._is_left(line.jobs[later]):
                heapq.heappush(self._heap, _entry(line, later))
                return

    def _kept(self, bits: int) -> list[Entry]:
        """What is left once all lines of other shapes are dropped, at the price of those that stay where that can be."""
        self._bits &= bits
        if self._is_whole:
            self._heap = []
            left = self._bits
            while left:
                lowest = left & -left
                self._heap += self._by_bit[lowest]
                left ^= lowest
        else:
            self._heap = [entry for entry in self._heap if entry[1].bit & bits]
        heapq.heapify(self._heap)
        return self._heap

    def _is_left(self, job: Job) -> bool:
        return job.not_before_ms <= self._now_ms and job.id not in self._taken

    def _next(self, line: Line, place: int) -> Entry | None:
        """The first job of the line from `place` on that may be handed out."""
        while place < len(line.jobs):
            if self._is_left(line.jobs[place]):
                return _entry(line, place)
            place += 1
        return None
