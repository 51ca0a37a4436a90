"""Whether nodes fall silent one by one or together (LE-11).

When most nodes stop to report at once, it is hardly they that have died: their leases went with a restored store, a
stalled disk of it, a clock that jumped, or the network between. Then none of them is given up for a time, so that not
every job of a cluster is started anew for nothing; they get no new work meanwhile, and their jobs keep their slices.

One node after the other is not together: a node that was given up at its time counts no more. Nor does one that an
administrator has cordoned: that is how somebody who knows better has a node given up.
"""

from __future__ import annotations

from collections.abc import Collection

# Fewer silent nodes are never taken for trouble of the store: one of one, or two of two, may well have died.
FEWEST_NODES = 3


class MassSilence:
    """`held` are the nodes that are not given up. `percent`: more of the nodes than this must be silent; `hold_ms`: for so
    long at most, counted from when so many were silent first. After that they are given up each by its own time."""

    def __init__(self, percent: int, hold_seconds: int) -> None:
        self._percent = percent
        self._hold_ms = 1000 * hold_seconds
        self._since_ms: int | None = None
        self.held: frozenset[str] = frozenset()

    @property
    def due_ms(self) -> int | None:
        """When the hold ends, whatever comes."""
        return self._since_ms + self._hold_ms if self._since_ms is not None and self.held else None

    def look(self, silent: Collection[str], reporting: int, now_ms: int) -> frozenset[str]:
        """The nodes that were held and are not any more since others report again: those that are still silent then are
        so by themselves, and get their full grace from now on."""
        before = self.held
        are_many = len(silent) >= FEWEST_NODES
        if not are_many or 100 * len(silent) <= self._percent * (len(silent) + reporting):
            self._since_ms, self.held = None, frozenset()
            return before
        if self._since_ms is None:
            self._since_ms = now_ms
        is_over = now_ms - self._since_ms >= self._hold_ms
        self.held = frozenset() if is_over else frozenset(silent)
        return frozenset()
