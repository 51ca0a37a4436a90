"""Cards as the spec of the fake library has them, and what the tests ask of a source."""

from __future__ import annotations

from nodeagent.nvml import NvmlSource
from vgpu.inventory import Gpu

NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND = 3, 4, 9, 13
GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, UNKNOWN = 15, 18, 999


def uuid_of(letter: str, *, mig: bool = False) -> str:
    return f"{'MIG' if mig else 'GPU'}-{letter * 8}-{letter * 4}-{letter * 4}-{letter * 4}-{letter * 12}"


A, B, C, D = (uuid_of(letter) for letter in "abcd")
FOUR = [
    f"gpu uuid={uuid} model=NVIDIA_T4 mem=15360 reserved=450 bus={n + 1}"
    for n, uuid in enumerate((A, B, C, D))
]

# Sizes as an H200 shows them: 1g.18gb is 16384 MiB, far from the 18 of its name (MG-1).
MIG = [
    f"gpu uuid={A} model=NVIDIA_H200 mem=143771 mig=1",
    f"gpu uuid={B} model=NVIDIA_H200 mem=143771",
    f"mig gpu=0 uuid={uuid_of('1', mig=True)} model=NVIDIA_H200_MIG_1g.18gb mem=16384 gi=7 slices=1",
    f"mig gpu=0 uuid={uuid_of('2', mig=True)} model=NVIDIA_H200_MIG_2g.35gb mem=33280 gi=3 slices=2 used=100",
    f"mig gpu=0 uuid={uuid_of('3', mig=True)} model=NVIDIA_H200_MIG_3g.71gb mem=71424 gi=1 slices=3",
]
M1, M2, M3 = (uuid_of(letter, mig=True) for letter in "123")


def by_uuid(gpus: tuple[Gpu, ...]) -> dict[str, Gpu]:
    return {gpu.uuid: gpu for gpu in gpus}


def nobody(pid: int) -> str:
    return ""


def fault_of(source: NvmlSource, uuid: str) -> str:
    return next(report.fault for report in source.read_report(nobody, {}) if report.uuid == uuid)
