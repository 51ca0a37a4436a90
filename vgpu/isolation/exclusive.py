"""A whole physical GPU for one task."""

from __future__ import annotations

from collections.abc import Sequence

from vgpu.inventory import Gpu
from vgpu.isolation.settings import GpuSettings, Holder, Step
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import Slice, SliceRequest


class Exclusive:
    name = "exclusive"
    holder = Holder(memory_by="hardware", compute_by="hardware")

    def why_not(self, request: SliceRequest, gpu: Gpu, sharing: Sequence[str]) -> Reason | None:
        if not request.is_whole:
            detail = (
                "exclusive gives whole GPUs only: leave out memory and compute, or choose another isolation"
            )
            return Reason(ReasonCode.NO_ISOLATION, subjects=(self.name,), detail=detail)
        if gpu.is_mig_instance:
            return Reason(ReasonCode.GPU_IN_MIG_MODE, subjects=(gpu.card,))
        if sharing:
            return Reason(ReasonCode.NOT_ENOUGH_IDLE_GPUS, subjects=(gpu.uuid,))
        return None

    def launch_settings(self, slices: Sequence[Slice], ordinals: Sequence[int]) -> GpuSettings:
        return GpuSettings()

    def steps(self, slices: Sequence[Slice]) -> tuple[Step, ...]:
        return ()
