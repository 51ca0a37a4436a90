"""The GPUs of this machine as NVIDIA's driver sees them (NVML). The only importer of pynvml; none of its objects leave.

What it keeps: one GPU that is lost or odd never hides the others, a value that the driver does not give is None and never
0, and a card is known by its UUID alone. NVML counts the GPUs at nvmlInit, so a card that comes back is seen only by a
new init: after an empty or incomplete reading the library is given back and opened again, with a back-off (GH-10).
Pids are those of the machine only if the agent runs in the machine's pid namespace.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import pynvml
from attrs import define, field
from msgspec.structs import replace

from nodeagent.device_nodes import KernelFiles, pci_address
from nodeagent.gpu_facts import (
    IN_MIG_MODE,
    Memory,
    NvLinks,
    carry_over,
    instances_hit,
    mig_instance,
    nvlinks_between,
    odd_uuid,
    processes_of,
    share_instance_memory,
)
from nodeagent.gpu_health import GpuHealth, recovery_complaint
from nodeagent.gpu_source import AttemptOf, GpuInventory, GpusNotReady, Held, WhyNotReady, XidEvent
from vgpu.inventory import Gpu, GpuReport, Link, LinkLevel

_WHY = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: WhyNotReady.NO_LIBRARY,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: WhyNotReady.DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: WhyNotReady.DRIVER_TOO_OLD,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: WhyNotReady.DRIVER_MISMATCH,
    pynvml.NVML_ERROR_NO_PERMISSION: WhyNotReady.NO_PERMISSION,
    pynvml.NVML_ERROR_TIMEOUT: WhyNotReady.NO_ANSWER,
}
_LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND)
_EMPTY_SLOT = (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT)
_NO_MORE_LINKS = (pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_SUPPORTED)
_LEVELS = dict(
    zip(range(0, 60, 10), LinkLevel, strict=True)
)  # nvmlGpuTopologyLevel_t, nearest first as LinkLevel
_EVENTS_AT_ONCE = 1000
_MOST_PATIENCE = 16


@define
class _Reading:
    """One pass over the devices: what was found so far, with the handles that the reports will ask."""

    gpus: list[Gpu] = field(factory=list)
    handles: dict[str, Any] = field(factory=dict)
    # (card, GPU instance, compute instance) -> UUID of the MIG instance
    instances: dict[tuple[str, int, int], str] = field(factory=dict)
    why_missing: dict[str, str] = field(factory=dict)
    warnings: list[str] = field(factory=list)
    complete: bool = True


class NvmlSource:
    """A `GpuSource`. `known` are the GPUs that an earlier agent saw here: those that are missing are shown as lost."""

    simulated = False
    blocking = True

    def __init__(
        self, known: tuple[Gpu, ...] = (), files: KernelFiles | None = None, good_probes_needed: int = 12
    ) -> None:
        self.warnings: tuple[str, ...] = ()
        self._files = files or KernelFiles()
        self._health = GpuHealth(good_probes_needed)
        self._known = known
        self._reading: _Reading | None = None
        self._event_set: Any = None
        self._registered: set[str] = set()
        self._events: list[XidEvent] = []
        self._open = False
        self._reopen = False
        # How many readings to wait for the next init while something is missing, and waited so far.
        self._patience, self._waited = 1, 0

    def read_inventory(self) -> GpuInventory:
        self._reopen_if_due()
        reading = _Reading()
        count = self._count()
        for index in range(count):
            self._read_device(index, reading)
        lost, notes = carry_over(self._known, reading.gpus, reading.why_missing)
        gpus = (*reading.gpus, *lost)
        if count == 0:
            reading.warnings.append("the driver is loaded and reports no GPUs")
        # Which card is at the other end of an NVLink is told by addresses, so links come after all cards.
        links = _read_links([gpu for gpu in reading.gpus if not gpu.parent], reading.handles)
        self._register_events(reading)
        self._reopen = not reading.complete or not reading.gpus or bool(lost)
        if not self._reopen or not reading.gpus:
            self._patience = 1
        self._known, self._reading = gpus, reading
        self._health.forget_all_but(frozenset(gpu.uuid for gpu in gpus))
        for gpu in lost:
            self._health.see_probe(gpu.uuid, gpu.unavailable)
        return GpuInventory(gpus, links, (*reading.warnings, *notes))

    def read_report(self, attempt_of: AttemptOf, held: Held) -> tuple[GpuReport, ...]:
        self._count()
        if self._reading is None:
            self.read_inventory()
        reading = self._reading
        assert reading is not None
        self._drain_events(reading)
        warnings: list[str] = []
        reports = [self._report(gpu, reading, attempt_of, warnings) for gpu in self._known]
        gone = sorted({p.gpu for pieces in held.values() for p in pieces} - {gpu.uuid for gpu in self._known})
        self.warnings = tuple(warnings)
        return (*reports, *(GpuReport(uuid, fault="gone: the machine no longer has it") for uuid in gone))

    def take_events(self) -> tuple[XidEvent, ...]:
        taken, self._events = tuple(self._events), []
        return taken

    def clear_fault(self, uuid: str) -> None:
        self._health.clear(uuid)

    def close(self) -> None:
        if self._event_set is not None:
            _or_none(pynvml.nvmlEventSetFree, self._event_set)
        if self._open:
            _or_none(pynvml.nvmlShutdown)
        self._open, self._event_set, self._reading, self._reopen = False, None, None, False
        self._registered.clear()

    def _reopen_if_due(self) -> None:
        """An init takes long and drops events, so a card that stays away is asked for ever less often."""
        self._waited = self._waited + 1 if self._reopen else 0
        if self._waited < self._patience:
            return
        if self._reading is not None:
            self._drain_events(self._reading)
        self.close()
        self._patience, self._waited = min(2 * self._patience, _MOST_PATIENCE), 0

    def _count(self) -> int:
        """Opens the library if need be. An error here concerns no single GPU: the inventory is not ready."""
        try:
            if not self._open:
                pynvml.nvmlInit()
                self._open = True
            return int(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            self.close()
            raise GpusNotReady(_WHY.get(error.value, WhyNotReady.FAILED), str(error)) from None

    def _read_device(self, index: int, reading: _Reading) -> None:
        """Adds one card, with its MIG instances. Its failure is its own (GH-1)."""
        uuid = ""
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            mode = _maybe(pynvml.nvmlDeviceGetMigMode, handle)
            in_mig_mode = mode is not None and mode[0] == 1
            card = self._read_card(index, uuid, handle, in_mig_mode, reading.warnings)
            instances = self._read_instances(card, handle, reading) if in_mig_mode else ()
        except pynvml.NVMLError as error:
            reading.complete = False
            if uuid:
                reading.why_missing[uuid] = str(error)
            reading.warnings.append(f"GPU {index} {uuid}".rstrip() + f" cannot be read: {error}")
            return
        reading.handles[uuid] = handle
        reading.gpus += [card, *instances]

    def _read_card(self, index: int, uuid: str, handle: Any, in_mig_mode: bool, warnings: list[str]) -> Gpu:
        memory = _memory(handle)
        pci = _maybe(pynvml.nvmlDeviceGetPciInfo_v3, handle)
        address = pci_address(pci.busId) if pci is not None else ""
        minor = _maybe(pynvml.nvmlDeviceGetMinorNumber, handle)
        odd = odd_uuid(uuid, mig=False)
        card = Gpu(
            uuid=uuid,
            index=index,
            model=_maybe(pynvml.nvmlDeviceGetName, handle) or "unknown",
            memory_mib=memory.schedulable_mib,
            memory_total_mib=memory.total_mib,
            device_paths=self._files.of_card(minor),
            pci_bus_id=address,
            numa_node=self._files.numa_node(address) if address else None,
            unavailable=odd or (IN_MIG_MODE if in_mig_mode else ""),
        )
        if odd:
            warnings.append(f"GPU {index} may not be used: {odd}")
        if not card.device_paths:
            node = f"/dev/nvidia{'?' if minor is None else minor}"
            warnings.append(f"GPU {index} {uuid} has no device node {node}")
        if memory.reserved_mib is None:
            warnings.append(f"GPU {index} {uuid}: the driver does not say how much memory it keeps")
        return card

    def _read_instances(self, card: Gpu, handle: Any, reading: _Reading) -> tuple[Gpu, ...]:
        slots = _maybe(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
        minor = _maybe(pynvml.nvmlDeviceGetMinorNumber, handle)
        found: list[Gpu] = []
        instance_of: dict[str, int] = {}
        for slot in range(slots):
            uuid = ""
            try:
                mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
                uuid = pynvml.nvmlDeviceGetUUID(mig)
                gi, ci = pynvml.nvmlDeviceGetGpuInstanceId(mig), pynvml.nvmlDeviceGetComputeInstanceId(mig)
                memory = _memory(mig)
                attributes = _maybe(pynvml.nvmlDeviceGetAttributes_v2, mig)
            except pynvml.NVMLError as error:
                if uuid or error.value not in _EMPTY_SLOT:
                    reading.why_missing[uuid] = str(error)
                    name = uuid or str(slot)
                    reading.warnings.append(f"MIG instance {name} of {card.uuid} cannot be read: {error}")
                continue
            instance = mig_instance(
                replace(card, uuid=uuid, device_paths=self._files.of_mig_instance(minor, gi, ci)),
                card.uuid,
                memory,
                (attributes.computeInstanceSliceCount if attributes is not None else None, slots),
                _or_none(pynvml.nvmlDeviceGetName, mig) or "",
            )
            if attributes is None:
                reading.warnings.append(
                    f"MIG instance {uuid}: its compute is not known, counted as one slice"
                )
            if instance.unavailable:
                reading.warnings.append(
                    f"MIG instance of {card.uuid} may not be used: {instance.unavailable}"
                )
            found.append(instance)
            instance_of[uuid] = gi
            reading.handles[uuid] = mig
            reading.instances[card.uuid, gi, ci] = uuid
        return share_instance_memory(found, instance_of)

    def _report(self, gpu: Gpu, reading: _Reading, attempt_of: AttemptOf, warnings: list[str]) -> GpuReport:
        handle = reading.handles.get(gpu.uuid)
        if handle is None:
            return GpuReport(gpu.uuid, fault=self._health.fault(gpu.uuid) or gpu.unavailable)
        try:
            memory = _memory(handle)
            utilization = _maybe(pynvml.nvmlDeviceGetUtilizationRates, handle)
            temperature = _maybe(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
            power = _maybe(pynvml.nvmlDeviceGetPowerUsage, handle)
            rows = _process_rows(handle)
            self._health.see_probe(gpu.uuid, _complaint(handle))
        except pynvml.NVMLError as error:
            self._reopen = True
            self._health.see_probe(gpu.uuid, str(error))
            return GpuReport(gpu.uuid, fault=self._health.fault(gpu.uuid))
        return GpuReport(
            uuid=gpu.uuid,
            memory_used_mib=memory.used_mib,
            utilization_percent=utilization.gpu if utilization is not None else None,
            temperature_celsius=temperature,
            power_milliwatt=power,
            processes=processes_of(gpu, rows, attempt_of, warnings),
            fault=self._health.fault(gpu.parent) or self._health.fault(gpu.uuid),
        )

    def _register_events(self, reading: _Reading) -> None:
        """Asks for the Xids of each card. A driver that has no events still has its probes."""
        try:
            if self._event_set is None:
                self._event_set = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            reading.warnings.append(f"Xid events cannot be read: {error}")
            return
        for gpu in reading.gpus:
            if gpu.parent or gpu.uuid in self._registered:
                continue
            try:
                pynvml.nvmlDeviceRegisterEvents(
                    reading.handles[gpu.uuid], pynvml.nvmlEventTypeXidCriticalError, self._event_set
                )
                self._registered.add(gpu.uuid)
            except pynvml.NVMLError as error:
                reading.warnings.append(f"Xid events of GPU {gpu.index} {gpu.uuid} cannot be read: {error}")

    def _drain_events(self, reading: _Reading) -> None:
        # Compared by address: a card that has just fallen off the bus cannot be asked for its UUID any more.
        card_at = {_address(reading.handles[g.uuid]): g.uuid for g in reading.gpus if not g.parent}
        for _ in range(_EVENTS_AT_ONCE if self._event_set is not None else 0):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._event_set, 1)
            except pynvml.NVMLError:
                return  # nothing more (a timeout); anything worse shows in the probes
            card = card_at.get(_address(event.device))
            if card is None or not event.eventType & pynvml.nvmlEventTypeXidCriticalError:
                continue
            xid = int(event.eventData)
            rule = self._health.see_xid(card, xid)
            touched = instances_hit(reading.instances, card, event.gpuInstanceId, event.computeInstanceId)
            self._events += [XidEvent(uuid, xid, rule.kind, rule.text) for uuid in touched or [card]]


def _or_none(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except pynvml.NVMLError:
        return None


def _maybe(getter: Callable[..., Any], *args: Any) -> Any:
    """What the driver answers, None where it does not support, allow or know it (NV-2). A lost GPU raises."""
    try:
        return getter(*args)
    except pynvml.NVMLError as error:
        if error.value in _LOST:
            raise
        return None


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _memory(handle: Any) -> Memory:
    """The second layout tells the driver's reserve apart from what is used; the first counts it as used (FR-7)."""
    two = _maybe(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if two is not None:
        return Memory.of_bytes(two.total, two.reserved, two.used)
    one = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Memory.of_bytes(one.total, None, one.used)


def _complaint(handle: Any) -> str:
    """What the driver itself finds wrong with a GPU that answers, empty when nothing."""
    rows = _maybe(pynvml.nvmlDeviceGetRemappedRows, handle)
    if rows is not None and rows[3]:
        return "a bad row of its memory could not be remapped"
    values = _maybe(pynvml.nvmlDeviceGetFieldValues, handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if values is None or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return ""
    return recovery_complaint(values[0].value.uiVal)


def _process_rows(handle: Any) -> list[tuple[int, int | None]] | None:
    """(pid, bytes); None when the driver has no list. Each version of the call has its own layout of a row, so the
    version is named and never left to the library (NV-1)."""
    for getter in (
        pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
        pynvml.nvmlDeviceGetComputeRunningProcesses_v2,
    ):
        try:
            return [(row.pid, row.usedGpuMemory) for row in getter(handle)]
        except pynvml.NVMLError as error:
            if error.value in _LOST:
                raise
            if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                return None
    return None


def _read_links(cards: list[Gpu], handles: dict[str, Any]) -> tuple[Link, ...]:
    addresses = frozenset(card.pci_bus_id for card in cards if card.pci_bus_id)
    nvlinks = {card.uuid: _nvlinks(handles[card.uuid], addresses) for card in cards}
    return tuple(
        Link(one.uuid, two.uuid, _level(one, two, handles), nvlinks_between(one, two, nvlinks))
        for one, two in itertools.combinations(cards, 2)
    )


def _level(first: Gpu, second: Gpu, handles: dict[str, Any]) -> LinkLevel:
    code = _or_none(pynvml.nvmlDeviceGetTopologyCommonAncestor, handles[first.uuid], handles[second.uuid])
    if code in _LEVELS:
        return _LEVELS[code]
    # Not said: no nearer than what the machine's own description proves.
    same_half = first.numa_node is not None and first.numa_node == second.numa_node
    return LinkLevel.NUMA_NODE if same_half else LinkLevel.SYSTEM


def _nvlinks(handle: Any, addresses: frozenset[str]) -> NvLinks:
    switched = 0
    direct: dict[str, int] = {}
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
        except pynvml.NVMLError as error:
            if error.value in _NO_MORE_LINKS:  # the library knows more links than this card has
                break
            continue
        kind = _or_none(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        pci = _or_none(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        address = pci_address(pci.busId) if pci is not None else ""
        if address in addresses:
            direct[address] = direct.get(address, 0) + 1
        elif kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            switched += 1
    return NvLinks(switched, direct)
