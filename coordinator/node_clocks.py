"""Which nodes' clocks are off, beside the coordinator's (LE-1).

Nothing is decided by it: a node is missed by the coordinator's own time, and running times are measured by one clock
each. But the times that users are shown come from nodes, and a time limit that the leader enforces begins when a node
says that the job began. So it is told.

A report tells the time at which it was made. It may have lain in the store or the watch for a while, as when everything
is listed at a start; so the smaller one of the last two differences counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Clocks that are kept by NTP at all are nearer than this by far.
OFF_SECONDS = 5


class NodeClocks:
    """`off`: by how many seconds the clocks of nodes are ahead (behind: negative), only those that are off."""

    def __init__(self) -> None:
        self._newest_ms: dict[str, int] = {}
        self.off: Mapping[str, int] = MappingProxyType({})

    def reported(self, node: str, at_ms: int, now_ms: int) -> None:
        before_ms, self._newest_ms[node] = self._newest_ms.get(node, 0), at_ms - now_ms
        offset_ms = min(before_ms, at_ms - now_ms, key=abs)
        self._tell(node, int(offset_ms / 1000))

    def gone(self, node: str) -> None:
        self._newest_ms.pop(node, None)
        self._tell(node, 0)

    def _tell(self, node: str, seconds: int) -> None:
        """The mapping is shared with snapshots, so it is replaced and never changed."""
        known = self.off.get(node, 0)
        told = seconds if abs(seconds) >= OFF_SECONDS else 0
        if told != known:
            others = {name: off for name, off in self.off.items() if name != node}
            self.off = MappingProxyType({**others, node: told} if told else others)
