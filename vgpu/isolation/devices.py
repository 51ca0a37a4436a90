"""How the GPUs of a task become visible in its container, the same for all isolations.

Device nodes: a node of a real GPU (`/dev/nvidia0`, `/dev/nvidiactl`, `/dev/nvidia-uvm`, `/dev/nvidia-caps/...`) keeps
its path, and one that several GPUs name is mounted once. Any other file, such as the /dev/null of a simulated GPU,
stands for a GPU: it is mounted as `/dev/nvidia<k>` for the k-th slice of the task, so that two simulated GPUs with
the same harmless file do not collide and the container sees what it would see on a real machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from vgpu.inventory import Gpu
from vgpu.isolation.settings import Device, GpuSettings
from vgpu.slices import Slice

_REAL_DEVICES = ("/dev/nvidia", "/dev/dri/")
# Reading, writing, but no making of further device nodes.
_PERMISSIONS = "rw"


def visible(slices: Sequence[Slice], gpus: Sequence[Gpu], container_gpus: str) -> GpuSettings:
    """The devices and the environment that show these GPUs, and only these, to the container.

    An image or a user may carry NVIDIA_VISIBLE_DEVICES=all: these values are laid over theirs, also for a task
    without a GPU. UUIDs and not indexes, since inside the container the devices are counted anew.
    `container_gpus` is the node's way: devices, nvidia-runtime or cdi.
    """
    if not slices:
        return GpuSettings(env={"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": ""})
    uuids = ",".join(gpu.uuid for gpu in gpus)
    env = {
        "NVIDIA_VISIBLE_DEVICES": uuids,
        "CUDA_VISIBLE_DEVICES": uuids,
        "SERAI_GPU_MEMORY_MIB": ",".join(str(piece.memory_mib) for piece in slices),
        "SERAI_GPU_COMPUTE_MILLI": ",".join(str(piece.compute_milli) for piece in slices),
    }
    if container_gpus == "nvidia-runtime":
        # Without it the runtime mounts no CUDA library into an image that is not built on NVIDIA's.
        env["NVIDIA_DRIVER_CAPABILITIES"] = "compute,utility,video"
        return GpuSettings(env=env, runtime="nvidia")
    if container_gpus == "cdi":
        return GpuSettings(env=env, cdi_devices=tuple(f"nvidia.com/gpu={gpu.uuid}" for gpu in gpus))
    return GpuSettings(env=env, devices=device_nodes(gpus))


def device_nodes(gpus: Sequence[Gpu]) -> tuple[Device, ...]:
    """The device nodes of the GPUs as a container sees them; no path inside the container occurs twice."""
    inside: dict[str, Device] = {}
    for position, gpu in enumerate(gpus):
        stand_ins = 0
        for host_path in gpu.device_paths:
            path = host_path
            if not host_path.startswith(_REAL_DEVICES):
                path = f"/dev/nvidia{position}" + (f".{stand_ins}" if stand_ins else "")
                stand_ins += 1
            inside.setdefault(path, Device(host_path, path, _PERMISSIONS))
    return tuple(inside.values())


def mounted(settings: GpuSettings, added: GpuSettings) -> GpuSettings:
    """`settings` with what a backend adds."""
    return evolve(
        settings,
        env={**settings.env, **added.env},
        devices=settings.devices + added.devices,
        mounts=settings.mounts + added.mounts,
    )
