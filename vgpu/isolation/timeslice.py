"""Tasks take turns on a GPU, by the driver's own round robin. Nothing holds them to their size: the node agent
watches how much memory the processes of a slice use and stops the task that uses more than it was granted."""

from __future__ import annotations

from collections.abc import Sequence

from vgpu.inventory import Gpu
from vgpu.isolation.settings import GpuSettings, Holder, Step
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import Slice, SliceRequest


class Timeslice:
    name = "timeslice"
    holder = Holder(memory_by="watch", compute_by="nobody")

    def why_not(self, request: SliceRequest, gpu: Gpu, sharing: Sequence[str]) -> Reason | None:
        if gpu.is_mig_instance:
            return Reason(ReasonCode.GPU_IN_MIG_MODE, subjects=(gpu.card,))
        others = sorted(set(sharing) - {self.name})
        if others:
            detail = f"the GPU is already cut by {', '.join(others)}, and the two do not mix"
            return Reason(ReasonCode.NO_ISOLATION, subjects=(self.name, *others), detail=detail)
        return None

    def launch_settings(self, slices: Sequence[Slice], ordinals: Sequence[int]) -> GpuSettings:
        return GpuSettings()

    def steps(self, slices: Sequence[Slice]) -> tuple[Step, ...]:
        return ()
