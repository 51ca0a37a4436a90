"""What the nodes have in all: the GPUs of those that are not given up. Owned by one `Machines`, which tells it of every
view that changed."""

from __future__ import annotations

from collections import Counter

from coordinator.nodes import NodeBuild, NodeStatus, NodeView
from vgpu.inventory import Gpu


class Totals:
    def __init__(self) -> None:
        self.memory_mib = self.compute_milli = 0
        self._nodes_of: Counter[NodeBuild] = Counter()
        self._kinds: tuple[Gpu, ...] | None = ()

    @property
    def kinds(self) -> tuple[Gpu, ...]:
        """The kinds of GPU that can be used at all, the smallest first."""
        if self._kinds is None:
            kinds = {gpu for build in self._nodes_of for gpu in build.gpus if not gpu.unavailable}
            self._kinds = tuple(
                sorted(kinds, key=lambda gpu: (gpu.memory_mib, gpu.model, gpu.compute_milli, gpu.mig_profile))
            )
        return self._kinds

    def change(self, before: NodeView | None, after: NodeView | None) -> None:
        was_here = before is not None and before.status is not NodeStatus.LOST
        is_here = after is not None and after.status is not NodeStatus.LOST
        if before and after and was_here and is_here and before.inventory is after.inventory:
            return
        if before and was_here:
            self._count(before, -1)
        if after and is_here:
            self._count(after, 1)

    def _count(self, view: NodeView, times: int) -> None:
        self.memory_mib += times * view.gpu_memory_mib
        self.compute_milli += times * view.gpu_compute_milli
        build = view.row.build
        self._nodes_of[build] += times
        if not self._nodes_of[build]:
            del self._nodes_of[build]
        self._kinds = None
