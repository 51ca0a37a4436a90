"""When time alone concerns a job: one moment for each job, the next one. Owned by one `Cluster`.

What a job's moment was before stays in the heap until it comes up, or until there is more of that than is worth keeping:
most jobs go long before their bounded wait or launch deadline comes.
"""

from __future__ import annotations

import heapq


class Moments:
    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        self._at_ms: dict[str, int] = {}

    def set(self, job: str, at_ms: int | None) -> None:
        """From now on it is this moment, or none."""
        if at_ms is None:
            self._at_ms.pop(job, None)
        elif self._at_ms.get(job) != at_ms:
            self._at_ms[job] = at_ms
            heapq.heappush(self._heap, (at_ms, job))
            if len(self._heap) > len(self._at_ms) * 3 // 2 + 1_000:
                self._heap = [(at_ms, job) for job, at_ms in self._at_ms.items()]
                heapq.heapify(self._heap)

    @property
    def next_ms(self) -> int | None:
        heap = self._heap
        while heap and self._at_ms.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop(self, now_ms: int) -> str | None:
        """A job whose moment has come; it has none from now on."""
        next_ms = self.next_ms
        if next_ms is None or next_ms > now_ms:
            return None
        _, job = heapq.heappop(self._heap)
        del self._at_ms[job]
        return job
