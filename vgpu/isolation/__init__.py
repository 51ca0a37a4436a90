"""The isolation backends: how a slice of a GPU is kept to its size. Data only: the node agent performs the steps.

`choose` says which backend cuts a slice from one GPU, or why none does; `cut` says how large the slice becomes;
`gpu_settings` and `gpu_steps` say what that means for the container of one task. Nothing here looks at free memory
or compute: those are filters of placement.

Rules that hold over all backends:
1. `exclusive` and a MIG instance have one owner and share with nobody.
2. `mps` and `timeslice` never meet on one GPU: a process outside MPS would time-slice against the MPS server, and
   the compute shares that MPS promised would be wrong.
3. An isolation that was asked for by name is honoured or refused; it is never exchanged for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from vgpu.inventory import Gpu
from vgpu.isolation.devices import mounted, visible
from vgpu.isolation.exclusive import Exclusive
from vgpu.isolation.mig import Mig
from vgpu.isolation.mps import Mps
from vgpu.isolation.settings import Device, GpuSettings, Holder, Mount, Step
from vgpu.isolation.timeslice import Timeslice
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import Slice, SliceRequest


class Backend(Protocol):
    """What one isolation is. `holder` tells users who keeps a slice to its memory and to its compute."""

    name: str
    holder: Holder

    def why_not(self, request: SliceRequest, gpu: Gpu, sharing: Sequence[str]) -> Reason | None:
        """Why it cannot cut such a slice from `gpu` beside slices of the isolations in `sharing`; None if it can."""

    def launch_settings(self, slices: Sequence[Slice], ordinals: Sequence[int]) -> GpuSettings:
        """What the backend adds to the container for its own `slices` of one task, beyond what makes the GPUs
        visible. `ordinals` are the numbers of those GPUs inside the container."""

    def steps(self, slices: Sequence[Slice]) -> tuple[Step, ...]:
        """What the node must do before the container starts."""


BACKENDS: Mapping[str, Backend] = {
    backend.name: backend for backend in (Exclusive(), Mig(), Mps(), Timeslice())
}

# The order in which a fraction without a wish gets its isolation: the one that promises most comes first.
_FRACTIONS = ("mps", "timeslice")


def choose(request: SliceRequest, gpu: Gpu, offered: Sequence[str], sharing: Sequence[str]) -> str | Reason:
    """The isolation of a slice of `gpu`, or why there is none.

    `offered` are the isolations of the node, `sharing` those of the slices that are on this GPU already. Without a
    wish a MIG instance is cut by `mig`, whole cards by `exclusive`, and a fraction by `mps` before `timeslice`, where
    the first that is offered and can be beside the others wins. The first refusal is the one that is told.
    """
    refusal: Reason | None = None
    for name in _candidates(request, gpu):
        refused = _refusal(name, request, gpu, offered, sharing)
        if refused is None:
            return name
        refusal = refusal or refused
    return refusal or Reason(ReasonCode.NO_ISOLATION, subjects=(request.isolation,))


def cut(request: SliceRequest, gpu: Gpu, isolation: str) -> Slice:
    """The slice that `request` becomes on `gpu`: a MIG instance is always given out as it is, since nobody else can
    have the rest of it; memory that was not named is all of the card's."""
    if isolation == "mig":
        return Slice(gpu.uuid, gpu.memory_mib, gpu.compute_milli, isolation)
    memory_mib = gpu.memory_mib if request.memory_mib is None else request.memory_mib
    return Slice(gpu.uuid, memory_mib, request.compute_milli, isolation)


def gpu_settings(slices: Sequence[Slice], gpus: Mapping[str, Gpu], container_gpus: str) -> GpuSettings:
    """How all slices of one task enter its container, whatever their isolations. `gpus` are those of its node, by
    UUID; the slices keep their order, which is that of the GPUs inside. Raises KeyError for an unknown GPU."""
    settings = visible(slices, [gpus[piece.gpu] for piece in slices], container_gpus)
    for name in _isolations(slices):
        ordinals = [number for number, piece in enumerate(slices) if piece.isolation == name]
        added = BACKENDS[name].launch_settings([slices[number] for number in ordinals], ordinals)
        settings = mounted(settings, added)
    return settings


def gpu_steps(slices: Sequence[Slice]) -> tuple[Step, ...]:
    """What the node must do before a container with these slices starts; empty for most."""
    return tuple(
        step
        for name in _isolations(slices)
        for step in BACKENDS[name].steps([piece for piece in slices if piece.isolation == name])
    )


def holder(isolation: str) -> Holder:
    """Who keeps a slice of this isolation to its size; nobody known for a name from a newer version."""
    backend = BACKENDS.get(isolation)
    return backend.holder if backend is not None else Holder("nobody", "nobody")


def _isolations(slices: Sequence[Slice]) -> list[str]:
    return list(dict.fromkeys(piece.isolation for piece in slices))


def _candidates(request: SliceRequest, gpu: Gpu) -> tuple[str, ...]:
    if request.isolation:
        return (request.isolation,)
    if gpu.is_mig_instance:
        return ("mig",)
    return ("exclusive",) if request.is_whole else _FRACTIONS


def _refusal(
    name: str, request: SliceRequest, gpu: Gpu, offered: Sequence[str], sharing: Sequence[str]
) -> Reason | None:
    backend = BACKENDS.get(name)
    if backend is None or name not in offered:
        return Reason(ReasonCode.NO_ISOLATION, subjects=(name,), detail="this node does not offer it")
    return backend.why_not(request, gpu, sharing)


__all__ = [
    "BACKENDS",
    "Backend",
    "Device",
    "GpuSettings",
    "Holder",
    "Mount",
    "Step",
    "choose",
    "cut",
    "gpu_settings",
    "gpu_steps",
    "holder",
]
