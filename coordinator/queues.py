"""The order of jobs inside a tenant: higher priority first; then what needs least (GPU memory, compute, CPU); then
the older. A job that was passed over longer than the bounded wait goes ahead of smaller ones of its priority.

Jobs of one line (one priority, one shape) are answered alike, so a queue hands out the first of a line and drops the
whole line once its shape was refused; it never looks at all jobs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from coordinator.lineup import Line, Lineup
from coordinator.model import Job
from coordinator.snapshot import SEARCH_DEPTH, LineKey, Snapshot


def is_ready(job: Job, now_ms: int) -> bool:
    """Not in a back-off. One that has yet to begin was written by a clock that was ahead, and counts as over (LE-1)."""
    return not job.queued_at_ms <= now_ms < job.not_before_ms


def is_overdue(job: Job, now_ms: int, max_wait_seconds: int) -> bool:
    return now_ms - job.queued_at_ms >= 1000 * max_wait_seconds


def overdue(snapshot: Snapshot, tenant: str, max_wait_seconds: int) -> list[tuple[LineKey, Job]]:
    """A tenant's jobs that were passed over for too long. Only the front of each line is looked at: nobody can have
    waited longer than since its submit."""
    bound_ms = snapshot.now_ms - 1000 * max_wait_seconds
    late = []
    for key, line in snapshot.lines.get(tenant, {}).items():
        for job in line:
            if job.submitted_at_ms > bound_ms:
                break
            if is_overdue(job, snapshot.now_ms, max_wait_seconds) and is_ready(job, snapshot.now_ms):
                late.append((key, job))
    return late


class TenantQueue:
    """Hands out a tenant's jobs in their order. The job at the front is `first`; `take` after it was placed, `refuse`
    once its shape is known not to fit for the rest of the cycle. `bits` are sets of lines (`coordinator.lineup`)."""

    def __init__(self, snapshot: Snapshot, tenant: str, lineup: Lineup, max_wait_seconds: int) -> None:
        front = lineup.fronts[tenant]
        self._now_ms = snapshot.now_ms
        self._lines = lineup.order.at
        self._jobs = front.lines
        self._quickest = front.quickest
        self._left = front.all
        self._next: dict[int, int] = {}  # by line: where in it the jobs begin that may be handed out
        self._taken: set[str] = set()
        self._late: list[tuple[int, int, str, Line, Job]] = []
        self._front: Line | None = None  # of the job that was handed out last, unless it is a late one
        if front.waits_since(snapshot.now_ms - 1000 * max_wait_seconds):
            for key, job in overdue(snapshot, tenant, max_wait_seconds):
                line = lineup.order.lines[key]
                self._late.append((-line.priority, job.queued_at_ms, job.id, line, job))
            heapq.heapify(self._late)

    def first(self, bits: int = -1) -> tuple[Line, Job] | None:
        """Of the lines in `bits`."""
        late = self._first_late(bits) if self._late else None
        while left := self._left & bits:
            line = self._lines[(left & -left).bit_length() - 1]
            if late is not None and late[0].priority >= line.priority:
                break
            if left & line.peers != line.bit:
                line = self._oldest(line, left & line.peers)
            job = self._job(line)
            if job is not None:
                self._front = line
                return line, job
            self._left &= ~line.bit
        self._front = None
        return late

    def keep(self, bits: int, within_ms: int) -> None:
        """Only lines of these, and those with a job that is over in this time."""
        for quickest_ms, place in self._quickest:
            if quickest_ms > within_ms:
                break
            bits |= 1 << place
        self._left &= bits
        self._late = [late for late in self._late if late[3].bit & bits]
        heapq.heapify(self._late)

    def take(self, job: Job) -> None:
        self._taken.add(job.id)
        line = self._front
        if line is None:
            return
        jobs = self._jobs[line.key]
        if jobs.stop - jobs.start == 1 and jobs.first is job:
            self._left &= ~line.bit  # as `first` would find out

    def refuse(self) -> None:
        """The line of the job at the front has no chance any more in this cycle."""
        if self._front is None:
            heapq.heappop(self._late)
        else:
            self._left &= ~self._front.bit

    def pass_over(self, may: Callable[[Job], bool]) -> None:
        """The job at the front may not start now; of its line only one that `may` has a chance."""
        line = self._front
        if line is None:
            heapq.heappop(self._late)
            return
        jobs, at = self._jobs[line.key], self._next.get(line.place, 0) + 1
        for later in range(at, min(len(jobs), at + SEARCH_DEPTH)):
            if self._is_left(jobs[later]) and may(jobs[later]):
                self._next[line.place] = later
                return
        self._left &= ~line.bit

    def _first_late(self, bits: int) -> tuple[Line, Job] | None:
        while self._late:
            _, _, _, line, job = self._late[0]
            if line.bit & bits and job.id not in self._taken:
                return line, job
            heapq.heappop(self._late)
        return None

    def _oldest(self, first: Line, peers: int) -> Line:
        """Of lines that are equal but for their shape the one with the oldest job; `first` where none has one left."""
        found = []
        while peers:
            line = self._lines[(peers & -peers).bit_length() - 1]
            peers &= ~line.bit
            job = self._job(line)
            if job is not None:
                found.append((job.submitted_at_ms, job.id, line))
        return min(found)[-1] if found else first

    def _job(self, line: Line) -> Job | None:
        """The first of the line that may be handed out."""
        jobs, place = self._jobs[line.key], self._next.get(line.place, 0)
        if not place:
            job = jobs.first  # nearly always the one
            if not job.not_before_ms and job.id not in self._taken:
                return job
        for later in range(place, len(jobs)):
            job = jobs[later]
            if self._is_left(job):
                self._next[line.place] = later
                return job
        return None

    def _is_left(self, job: Job) -> bool:
        is_at_rest = job.not_before_ms and not is_ready(job, self._now_ms)
        return not is_at_rest and job.id not in self._taken


class TenantQueues(dict[str, TenantQueue]):
    """The queues of one cycle, each made when it is first asked for."""

    def __init__(self, snapshot: Snapshot, lineup: Lineup, max_wait_seconds: int) -> None:
        super().__init__()
        self._made_of = snapshot, lineup, max_wait_seconds

    def __missing__(self, tenant: str) -> TenantQueue:
        snapshot, lineup, max_wait_seconds = self._made_of
        queue = self[tenant] = TenantQueue(snapshot, tenant, lineup, max_wait_seconds)
        return queue
