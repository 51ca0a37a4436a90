"""CUDA MPS: the processes of a GPU share one scheduler, which gives each at most its part of the multiprocessors and
of the memory.

One control daemon serves one GPU, with its own folder under /run/serai/mps/, so that a fault or a restart on one GPU
leaves the others alone and no daemon occupies a GPU that is given out whole. A CUDA process talks to exactly one
daemon, so a task can have an MPS slice of one GPU only. The limits count for each process: the children of a task
each get the whole limit, and a process may change its own environment, hence `client_process` as the holder.
Sources: NVIDIA's "Multi-Process Service" guide, appendix on environment variables.
"""

from __future__ import annotations

from collections.abc import Sequence

from vgpu.inventory import Gpu
from vgpu.isolation.settings import GpuSettings, Holder, Mount, Step
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import Slice, SliceRequest

MPS_FOLDER = "/run/serai/mps"
START_DAEMON = "start_mps_daemon"


class Mps:
    name = "mps"
    holder = Holder(memory_by="client_process", compute_by="client_process")

    def why_not(self, request: SliceRequest, gpu: Gpu, sharing: Sequence[str]) -> Reason | None:
        if gpu.is_mig_instance:
            return Reason(ReasonCode.GPU_IN_MIG_MODE, subjects=(gpu.card,))
        if request.count > 1:
            detail = (
                "a task can have an MPS slice of one GPU only: ask for one GPU in each task, or for timeslice"
            )
            return Reason(ReasonCode.NO_ISOLATION, {"needed_gpus": request.count}, (self.name,), detail)
        others = sorted(set(sharing) - {self.name})
        if others:
            detail = f"the GPU is already cut by {', '.join(others)}, and the two do not mix"
            return Reason(ReasonCode.NO_ISOLATION, subjects=(self.name, *others), detail=detail)
        return None

    def launch_settings(self, slices: Sequence[Slice], ordinals: Sequence[int]) -> GpuSettings:
        # The limit is given by ordinal: the driver has been seen to ignore it when it is given by UUID.
        limits = ",".join(
            f"{ordinal}={piece.memory_mib}M" for ordinal, piece in zip(ordinals, slices, strict=True)
        )
        # There is one percentage for each client, not one for each GPU: the smallest, so that no slice gets more than
        # was granted. It is a whole percent, rounded down for the same reason, but never 0, which means "no limit".
        percentage = max(1, min(piece.compute_milli for piece in slices) // 10)
        folder = f"{MPS_FOLDER}/{slices[0].gpu}"
        return GpuSettings(
            env={
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": limits,
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage),
                "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
                # Not mounted: a client writes nothing there, and the daemon's log names other tenants' processes.
                "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
            },
            mounts=(
                Mount(f"{folder}/pipe", f"{folder}/pipe", read_only=False),
                # Client and server exchange buffers through shared memory, so both must see the same /dev/shm.
                Mount(f"{folder}/shm", "/dev/shm", read_only=False),
            ),
        )

    def steps(self, slices: Sequence[Slice]) -> tuple[Step, ...]:
        return tuple(_daemon(gpu) for gpu in dict.fromkeys(piece.gpu for piece in slices))


def _daemon(gpu: str) -> Step:
    folder = f"{MPS_FOLDER}/{gpu}"
    return Step(
        START_DAEMON,
        gpu,
        {
            "pipe_directory": f"{folder}/pipe",
            "log_directory": f"{folder}/log",
            "shm_directory": f"{folder}/shm",
        },
    )
