"""The order of jobs inside a tenant: higher priority first; then what needs least (GPU memory, compute, CPU); then
the older. A job that was passed over longer than the bounded wait goes ahead of smaller ones of its priority.

Jobs of one line (one priority, one shape) are answered alike, so a queue hands out the first of a line and drops the
whole line once its shape was refused; it never looks at all jobs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property

from attrs import frozen

from coordinator.fit import matches_model
from coordinator.model import Job
from coordinator.nodes import NodeStatus
from coordinator.snapshot import Lines, Shape, Snapshot, TaskShape
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
        builds = {view.row.build for view in snapshot.nodes.values() if view.status is not NodeStatus.LOST}
        kinds = {gpu for build in builds for gpu in build.gpus if not gpu.unavailable}
        self.kinds = sorted(kinds, key=lambda gpu: (gpu.memory_mib, gpu.model))
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


def wanted(snapshot: Snapshot, cards: Cards) -> Mapping[str, Use]:
    """What the waiting jobs of each tenant would hold."""
    return {tenant: _fronts(tenant, lines, cards).wanted for tenant, lines in snapshot.lines.items()}


# A search for a job that may start beside a reservation looks at so many of a line.
_SEARCH_DEPTH = 500

Order = tuple[int, int, tuple[int, ...], int, str]


# (order, shape, job, its line, its place in it). A job that goes ahead of its line comes without one.
Entry = tuple[Order, Shape, Job, Sequence[Job], int]


@frozen(eq=False)
class _Fronts:
    """What is the same for all cycles while a tenant's lines stay as they are: their first jobs as a heap, what all of
    them want, when the oldest came. `is_plain`: none of the first jobs was ever in a back-off."""

    lines: Lines
    kinds: Sequence[Gpu]
    heap: Sequence[Entry]
    wanted: Use
    oldest_ms: int
    is_plain: bool


# By tenant. A memo: what is looked up is compared with what it was made from.
_FRONTS: dict[str, _Fronts] = {}
_MOST_TENANTS = 10_000


def _fronts(tenant: str, lines: Lines, cards: Cards) -> _Fronts:
    known = _FRONTS.get(tenant)
    if known is not None and known.lines is lines and known.kinds == cards.kinds:
        return known
    memory = compute = 0
    heap = []
    for key, line in lines.items():
        needs = cards.needs(key.shape)
        memory += needs.memory_mib * len(line)
        compute += needs.compute_milli * len(line)
        if line:
            heap.append(_entry(key.shape, line, 0, cards))
    heapq.heapify(heap)
    first = [job for _, _, job, _, _ in heap]
    if len(_FRONTS) >= _MOST_TENANTS:
        _FRONTS.clear()
    oldest_ms = min((job.submitted_at_ms for job in first), default=0)
    is_plain = not any(job.not_before_ms for job in first)
    _FRONTS[tenant] = _Fronts(lines, cards.kinds, tuple(heap), Use(compute, memory), oldest_ms, is_plain)
    return _FRONTS[tenant]


def _entry(shape: Shape, line: Sequence[Job], place: int, cards: Cards) -> Entry:
    job = line[place]
    order: Order = (-job.spec.priority, 1, cards.needs(shape).size, job.submitted_at_ms, job.id)
    return order, shape, job, line, place


class TenantQueue:
    """Hands out a tenant's jobs in their order. The job at the front is `first`; `take` after it was placed, `refuse`
    once its shape is known not to fit for the rest of the cycle."""

    def __init__(self, snapshot: Snapshot, tenant: str, cards: Cards, max_wait_seconds: int) -> None:
        self._now_ms = snapshot.now_ms
        self._taken: set[str] = set()
        self._needs = cards
        lines = snapshot.lines.get(tenant, {})
        fronts = _fronts(tenant, lines, cards)
        if fronts.is_plain:
            self._heap = list(fronts.heap)
        else:
            entries = (self._next(key.shape, line, 0) for key, line in lines.items())
            self._heap = [entry for entry in entries if entry is not None]
            heapq.heapify(self._heap)
        if fronts.oldest_ms <= snapshot.now_ms - 1000 * max_wait_seconds:
            for shape, job in overdue(snapshot, tenant, max_wait_seconds):
                order: Order = (-job.spec.priority, 0, (), job.queued_at_ms, job.id)
                heapq.heappush(self._heap, (order, shape, job, (), 0))

    def first(self, refused: Container[Shape] = ()) -> tuple[Shape, Job] | None:
        """Lines of refused shapes are dropped on the way."""
        heap = self._heap
        while heap:
            _, shape, job, line, place = heap[0]
            if shape in refused:
                heapq.heappop(heap)
                continue
            if job.id not in self._taken:
                return shape, job
            entry = self._next(shape, line, place + 1)
            if entry is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, entry)
        return None

    def take(self, job: Job) -> None:
        self._taken.add(job.id)

    def refuse(self) -> None:
        """The line of the job at the front has no chance any more in this cycle."""
        heapq.heappop(self._heap)

    def pass_over(self, may: Callable[[Job], bool]) -> None:
        """The job at the front may not start now; of its line only one that `may` has a chance."""
        _, shape, _, line, place = heapq.heappop(self._heap)
        for later in range(place + 1, min(len(line), place + 1 + _SEARCH_DEPTH)):
            if may(line[later]) and self._is_left(line[later]):
                heapq.heappush(self._heap, _entry(shape, line, later, self._needs))
                return

    def _is_left(self, job: Job) -> bool:
        return job.not_before_ms <= self._now_ms and job.id not in self._taken

    def _next(self, shape: Shape, line: Sequence[Job], place: int) -> Entry | None:
        """The first job of the line from `place` on that may be handed out."""
        while place < len(line):
            if self._is_left(line[place]):
                return _entry(shape, line, place, self._needs)
            place += 1
        return None
