"""MIG: an instance of a GPU that the hardware keeps apart. Only instances that exist are given out; Serai makes and
destroys none. An instance is known by its own UUID, its sizes come from NVML, and it has one owner."""

from __future__ import annotations

from collections.abc import Sequence

from vgpu.inventory import Gpu
from vgpu.isolation.settings import GpuSettings, Holder, Step
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import Slice, SliceRequest


class Mig:
    name = "mig"
    holder = Holder(memory_by="hardware", compute_by="hardware")

    def why_not(self, request: SliceRequest, gpu: Gpu, sharing: Sequence[str]) -> Reason | None:
        if not gpu.is_mig_instance:
            detail = "the GPU is not divided into MIG instances"
            return Reason(ReasonCode.NO_ISOLATION, subjects=(self.name,), detail=detail)
        if request.is_whole:
            # Who asks for a GPU means the card; a part of it is no GPU of that model.
            return Reason(ReasonCode.GPU_IN_MIG_MODE, subjects=(gpu.card,))
        if sharing:
            return Reason(ReasonCode.GPU_OCCUPIED, subjects=(gpu.uuid,))
        return None

    def launch_settings(self, slices: Sequence[Slice], ordinals: Sequence[int]) -> GpuSettings:
        return GpuSettings()

    def steps(self, slices: Sequence[Slice]) -> tuple[Step, ...]:
        return ()
