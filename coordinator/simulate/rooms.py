"""Where jobs of whole GPUs go in a replay: a pool that only counts, or nodes of equal size.

A job of at most one node goes to the node with the fewest free GPUs that take it, a larger one to whole free nodes.
The reservation stands for one job at a time: it fixes when the job starts at the latest (`due_ms`) and what is left over
beside it then. A job that ends by that time may use anything that is free; any other only what is left over.
"""

from __future__ import annotations

from bisect import insort
from typing import Protocol

Place = tuple[int, ...]


class Room(Protocol):
    """`due_ms` is None without a reservation, at least UNLIMITED_MS where nobody knows when the job could start.
    `broken`: GPUs that are free on nodes which are partly in use."""

    gpus: int
    free: int
    due_ms: int | None

    def fits(self, size: int) -> bool: ...
    def fits_beside(self, size: int) -> bool: ...
    def take(self, size: int, end_ms: int, is_beside: bool) -> Place: ...
    def give(self, size: int, end_ms: int, place: Place) -> None: ...
    def reserve(self, size: int, now_ms: int) -> None: ...
    def drop(self) -> None: ...
    def can_ever(self, size: int) -> bool: ...
    @property
    def broken(self) -> int: ...


class CountRoom:
    """GPUs without nodes."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.free = gpus
        self.due_ms: int | None = None
        self._beside = 0
        self._ends: list[tuple[int, int]] = []

    def can_ever(self, size: int) -> bool:
        return size <= self.gpus

    @property
    def broken(self) -> int:
        return 0

    def fits(self, size: int) -> bool:
        return size <= self.free

    def fits_beside(self, size: int) -> bool:
        return size <= self.free and size <= self._beside

    def take(self, size: int, end_ms: int, is_beside: bool) -> Place:
        self.free -= size
        if is_beside:
            self._beside -= size
        insort(self._ends, (end_ms, size))
        return ()

    def give(self, size: int, end_ms: int, place: Place) -> None:
        self.free += size
        self._ends.remove((end_ms, size))

    def reserve(self, size: int, now_ms: int) -> None:
        free, due_ms = self.free, now_ms
        for end_ms, taken in self._ends:
            if free >= size and end_ms > due_ms:
                break
            free += taken
            due_ms = max(now_ms, end_ms)
        self.due_ms, self._beside = due_ms, free - size

    def drop(self) -> None:
        self.due_ms = None


class NodeRoom:
    """Nodes of `per_node` GPUs each."""

    def __init__(self, gpus: int, per_node: int) -> None:
        self.gpus = gpus
        self.free = gpus
        self.due_ms: int | None = None
        self._per_node = per_node
        self._free = [per_node] * (gpus // per_node)
        self._counts = [0] * per_node + [gpus // per_node]
        self._ends: list[list[tuple[int, int]]] = [[] for _ in self._free]
        self._later: dict[int, int] = {}

    def can_ever(self, size: int) -> bool:
        return self._nodes(size) <= len(self._free)

    @property
    def broken(self) -> int:
        return sum(free * self._counts[free] for free in range(1, self._per_node))

    def fits(self, size: int) -> bool:
        if size <= self._per_node:
            return any(self._counts[size:])
        return self._counts[self._per_node] >= self._nodes(size)

    def fits_beside(self, size: int) -> bool:
        return self.fits(size) and self._find(size, is_beside=True) is not None

    def take(self, size: int, end_ms: int, is_beside: bool) -> Place:
        place = self._find(size, is_beside)
        assert place is not None
        self.free -= size
        for node in place:
            taken = size // len(place)
            self._change(node, -taken)
            insort(self._ends[node], (end_ms, taken))
            if is_beside and node in self._later:
                self._later[node] -= taken
        return place

    def give(self, size: int, end_ms: int, place: Place) -> None:
        self.free += size
        for node in place:
            self._change(node, size // len(place))
            self._ends[node].remove((end_ms, size // len(place)))

    def reserve(self, size: int, now_ms: int) -> None:
        wanted = min(size, self._per_node)
        soonest = sorted((self._when(node, wanted, now_ms), node) for node in range(len(self._free)))
        chosen = soonest[: self._nodes(size)]
        self.due_ms = max(end_ms for (end_ms, _), _ in chosen)
        self._later = {node: left for (_, left), node in chosen}

    def drop(self) -> None:
        self.due_ms = None
        self._later = {}

    def _nodes(self, size: int) -> int:
        return -(-size // self._per_node)

    def _when(self, node: int, size: int, now_ms: int) -> tuple[int, int]:
        """(when the node has so many free GPUs, how many are left over then)."""
        free, due_ms = self._free[node], now_ms
        for end_ms, taken in self._ends[node]:
            if free >= size and end_ms > due_ms:
                break
            free += taken
            due_ms = max(now_ms, end_ms)
        return due_ms, free - size

    def _find(self, size: int, is_beside: bool) -> Place | None:
        later = self._later if is_beside else {}
        if size <= self._per_node:
            fitting = [
                (free, node)
                for node, free in enumerate(self._free)
                if free >= size and later.get(node, size) >= size
            ]
            return (min(fitting)[1],) if fitting else None
        whole = [n for n, free in enumerate(self._free) if free == self._per_node and n not in later]
        nodes = self._nodes(size)
        return tuple(whole[:nodes]) if len(whole) >= nodes else None

    def _change(self, node: int, by: int) -> None:
        self._counts[self._free[node]] -= 1
        self._free[node] += by
        self._counts[self._free[node]] += 1
