"""What follows from what a driver said about the GPUs: plausible processes, links of pairs, lost and replaced cards. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import field, frozen
from msgspec.structs import replace

from vgpu.inventory import WHOLE_GPU_MILLI, Gpu, GpuProcess

MIB = 1 << 20
# The kernel's PID_MAX_LIMIT on 64-bit machines (Linux, include/linux/threads.h); a pid above it is a misread row (NV-1).
HIGHEST_PID = 4 * 1024 * 1024
IN_MIG_MODE = "in MIG mode"
NO_INSTANCE = 0xFFFFFFFF

_HEX = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_CARD_UUID = re.compile(rf"GPU-{_HEX}", re.IGNORECASE)
# MIG-<uuid> since driver 470, MIG-GPU-<card's uuid>/<GPU instance>/<compute instance> before.
_MIG_UUID = re.compile(rf"MIG-({_HEX}|GPU-{_HEX}/\d+/\d+)", re.IGNORECASE)


def odd_uuid(uuid: str, *, mig: bool) -> str:
    """Why a device with this UUID may not be given out, empty when the form is known. CUDA and the container runtime
    select devices by these forms, so one that is not understood must not be offered (MG-5)."""
    if (_MIG_UUID if mig else _CARD_UUID).fullmatch(uuid):
        return ""
    return f"UUID {uuid!r} has a form that is not known for a {'MIG instance' if mig else 'GPU'}"


@frozen
class Memory:
    """In whole MiB. `reserved` is what the driver keeps for itself, rounded up; None when it does not say."""

    total_mib: int
    reserved_mib: int | None
    used_mib: int

    @classmethod
    def of_bytes(cls, total: int, reserved: int | None, used: int) -> Memory:
        return cls(total // MIB, None if reserved is None else -(-reserved // MIB), -(-used // MIB))

    @property
    def schedulable_mib(self) -> int:
        """What may be given out: a T4 packed to its total runs its last job out of memory (FR-7)."""
        return max(0, self.total_mib - (self.reserved_mib or 0))


def mig_instance(like: Gpu, card: str, memory: Memory, slices: tuple[int | None, int], name: str) -> Gpu:
    """One MIG instance. `like` is its card with the instance's own UUID and device nodes; `slices` are its compute
    slices, None when not known, and the card's (7 on A100 and H100, 4 on A30).

    Memory is what the driver says, never what the profile's name says: 1g.18gb has 16384 MiB (MG-1). Compute is rounded
    down, so that the instances of a card never add up to more than the card.
    """
    own, of_card = slices[0] or 1, slices[1]
    return replace(
        like,
        memory_mib=memory.schedulable_mib,
        memory_total_mib=memory.total_mib,
        compute_milli=WHOLE_GPU_MILLI * own // max(of_card, own),
        parent=card,
        mig_profile=name.partition(" MIG ")[2],
        unavailable=odd_uuid(like.uuid, mig=True),
    )


def share_instance_memory(gpus: Sequence[Gpu], instance_of: Mapping[str, int]) -> tuple[Gpu, ...]:
    """Compute instances inside one MIG GPU instance see the same memory; each is offered an equal part of it, so that
    it is not given out twice. `instance_of`: UUID -> id of the GPU instance, all of one card."""
    sharers = Counter(instance_of[gpu.uuid] for gpu in gpus)
    return tuple(replace(gpu, memory_mib=gpu.memory_mib // sharers[instance_of[gpu.uuid]]) for gpu in gpus)


def processes_of(
    gpu: Gpu,
    rows: Sequence[tuple[int, int | None]] | None,
    attempt_of: Callable[[int], str],
    warnings: list[str],
) -> tuple[GpuProcess, ...] | None:
    """The (pid, bytes) rows that can be true, None when nothing is known. Some drivers answer with another layout of
    the row than the library asked for, which swaps pid and memory (NV-1)."""
    if rows is None:
        warnings.append(f"process info unavailable for GPU {gpu.uuid}")
        return None
    total = gpu.memory_total_mib * MIB
    kept = [
        GpuProcess(pid, None if used is None else -(-used // MIB), attempt_of(pid))
        for pid, used in rows
        if 0 < pid <= HIGHEST_PID and (used is None or 0 <= used <= total)
    ]
    wrong = len(rows) - len(kept)
    if wrong:
        warnings.append(
            f"process info unavailable for GPU {gpu.uuid}: {wrong} of {len(rows)} rows cannot be true"
        )
    return None if wrong and not kept else tuple(kept)


def instances_hit(
    instances: Mapping[tuple[str, int, int], str], card: str, gpu_instance: int, compute_instance: int
) -> tuple[str, ...]:
    """UUIDs of the MIG instances of a card that an event is about; the driver names all of a GPU instance by
    NO_INSTANCE in place of the compute instance, and the whole card by NO_INSTANCE in both."""
    return tuple(
        uuid
        for (parent, gi, ci), uuid in instances.items()
        if parent == card and gi == gpu_instance and compute_instance in (ci, NO_INSTANCE)
    )


@frozen
class NvLinks:
    """The active NVLinks of one card: to an NVSwitch, and by the PCI address of the card at the other end."""

    switched: int = 0
    direct: Mapping[str, int] = field(factory=dict)


def nvlinks_between(first: Gpu, second: Gpu, links_of: Mapping[str, NvLinks]) -> int:
    """Active NVLinks between two cards; `links_of` is by UUID. Through a switch each card reaches every other with all
    the links it has, so the card with fewer decides."""
    one, other = links_of[first.uuid], links_of[second.uuid]
    # A link that only one end reports as active carries nothing yet.
    direct = min(one.direct.get(second.pci_bus_id, 0), other.direct.get(first.pci_bus_id, 0))
    return direct + min(one.switched, other.switched)


def carry_over(
    known: Iterable[Gpu], found: Sequence[Gpu], why_missing: Mapping[str, str]
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """What was known and is not found now: lost cards stay, marked; replaced and removed devices go, with a warning.

    Returns the GPUs to add to `found`, and the warnings. A card whose PCI address now holds another UUID was replaced
    (GH-4); a MIG instance that its present card no longer has was removed by the operator (MG-4), which concerns only
    who holds it. `why_missing`: UUID -> what the driver said when it was asked.
    """
    here = {gpu.uuid for gpu in found}
    at_address = {gpu.pci_bus_id: gpu for gpu in found if gpu.pci_bus_id and not gpu.parent}
    in_mig_mode = {gpu.uuid for gpu in found if gpu.unavailable == IN_MIG_MODE}
    lost: list[Gpu] = []
    warnings: list[str] = []
    for gpu in known:
        if gpu.uuid in here:
            continue
        successor = at_address.get(gpu.pci_bus_id)
        if gpu.parent and gpu.uuid not in why_missing and (gpu.parent in here or successor is not None):
            state = "no longer exists" if gpu.parent in in_mig_mode else "went when its card left MIG mode"
            warnings.append(f"MIG instance {gpu.uuid} of {gpu.parent} {state}")
        elif not gpu.parent and successor is not None:
            warnings.append(f"GPU {gpu.uuid} at {gpu.pci_bus_id} was replaced by {successor.uuid}")
        else:
            why = why_missing.get(gpu.uuid, "the driver no longer lists it")
            lost.append(replace(gpu, unavailable=f"lost: {why}"))
    return tuple(lost), tuple(warnings)
