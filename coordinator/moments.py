"""When time alone concerns jobs: the moments that are still to come. Owned by one `Cluster`.

Most of them come in order (a bounded wait, a launch deadline: so long after what has just happened), and most jobs go
long before theirs. So those in order stand in a row, the others in a heap, and both keep what holds no more until it
comes up, or until there is more of that than is worth keeping.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sized

_FEW = 1_000


class Moments:
    """Of `jobs`, as they come and go. `holds` tells whether a moment of a job that was added is one still."""

    def __init__(self, jobs: Sized, holds: Callable[[str, int], bool]) -> None:
        self._jobs = jobs
        self._holds = holds
        self._heap: list[tuple[int, str]] = []
        # Side by side: a pair for each would cost more than what is in it.
        self._row: deque[str] = deque()
        self._row_ms: deque[int] = deque()
        self._enough = _FEW

    def __len__(self) -> int:
        return len(self._heap) + len(self._row)

    def add(self, job: str, at_ms: int) -> None:
        last_ms = self._row_ms[-1] if self._row_ms else at_ms
        if at_ms >= last_ms:
            self._row.append(job)
            # Many are of one moment: the same number for all of them.
            self._row_ms.append(last_ms if at_ms == last_ms else at_ms)
        else:
            heapq.heappush(self._heap, (at_ms, job))
        if len(self._heap) + len(self._row) > self._enough:
            self._forget()

    @property
    def next_ms(self) -> int | None:
        heap, row, row_ms = self._heap, self._row, self._row_ms
        while heap and not self._holds(heap[0][1], heap[0][0]):
            heapq.heappop(heap)
        while row and not self._holds(row[0], row_ms[0]):
            row.popleft()
            row_ms.popleft()
        if heap and row:
            return min(heap[0][0], row_ms[0])
        return heap[0][0] if heap else row_ms[0] if row else None

    def pop(self, now_ms: int) -> str | None:
        """A job of which a moment has come, the earliest first."""
        next_ms = self.next_ms
        if next_ms is None or next_ms > now_ms:
            return None
        if self._row and self._row_ms[0] == next_ms:
            self._row_ms.popleft()
            return self._row.popleft()
        return heapq.heappop(self._heap)[1]

    def _forget(self) -> None:
        """What holds no more, where that may be much."""
        worth_keeping = _FEW + len(self._jobs) * 3 // 2
        if len(self) > worth_keeping:
            self._heap = [(at_ms, job) for at_ms, job in self._heap if self._holds(job, at_ms)]
            heapq.heapify(self._heap)
            row = zip(self._row, self._row_ms, strict=True)
            kept = [(job, at_ms) for job, at_ms in row if self._holds(job, at_ms)]
            self._row, self._row_ms = deque([job for job, _ in kept]), deque([at_ms for _, at_ms in kept])
        self._enough = max(worth_keeping, 2 * len(self))
