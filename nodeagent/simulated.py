"""GPUs that are not there, for a trial on any machine: the same `GpuSource` as the driver's, made from a description.

    8x80GiB:A100-SXM4-80GB:nvlink=4     eight GPUs of 80 GiB, NVLinks within each four
    4x40GiB:A100-PCIE-40GB              four without NVLinks
    2x16GiB:T4:numa=2                   two, each at its own NUMA node

A group is `<count>x<memory>:<model>[:nvlink=<cards in an NVLink group>][:links=<NVLinks of a pair in it>][:numa=<NUMA
nodes>]`; several groups are joined by `+`. Nothing here is random: the same node name and description give the same UUIDs,
and what is measured follows from what is held. The simulated driver keeps no memory for itself, so all of it may be given
out. The device node is /dev/null, so that the path which mounts devices into containers is the real one.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Iterable, Mapping

from attrs import frozen
from msgspec.structs import replace

from nodeagent.gpu_health import GpuHealth
from nodeagent.gpu_source import AttemptOf, GpuInventory, GpusNotReady, Held, XidEvent
from vgpu.inventory import WHOLE_GPU_MILLI, Gpu, GpuProcess, GpuReport, Link, LinkLevel

MOST_GPUS = 64
DEVICE_PATHS = ("/dev/null",)
_NAMESPACE = uuid.UUID("6b1c0ff8-52a0-5c0d-9c52-7ea1f0e9a1d7")
_UNITS_MIB = {"GIB": 1024, "G": 1024, "MIB": 1, "M": 1}
_HEAD = re.compile(r"(\d+)\s*x\s*(.+)", re.IGNORECASE)
_SIZE = re.compile(r"(\d+)\s*([a-z]*)", re.IGNORECASE)
_IDLE_CELSIUS, _BUSY_CELSIUS = 32, 74
_IDLE_MILLIWATT, _BUSY_MILLIWATT = 55_000, 380_000

Description = str | Mapping[str, object]


class BadDescription(ValueError):
    """A description of simulated GPUs that cannot be used; the message names the field, the value and what is allowed."""


@frozen
class GpuGroup:
    """`nvlink` is how many cards make an NVLink group (1 = no NVLinks), `links` the NVLinks between two of them."""

    count: int
    memory_mib: int
    model: str
    nvlink: int = 1
    links: int = 12
    numa: int = 1


def parse_description(description: Description) -> tuple[GpuGroup, ...]:
    """Raises BadDescription. A mapping has the fields count, memory, model, nvlink, links and numa of one group."""
    if isinstance(description, Mapping):
        return (_group(dict(description), shown=str(dict(description))),)
    groups = tuple(_group(_fields(part), shown=part.strip()) for part in description.split("+"))
    total = sum(group.count for group in groups)
    if total > MOST_GPUS:
        raise BadDescription(f"simulated GPUs {description!r}: {total} GPUs are more than {MOST_GPUS}")
    return groups


def _fields(part: str) -> dict[str, object]:
    head, *rest = (piece.strip() for piece in part.strip().split(":"))
    match = _HEAD.fullmatch(head)
    if match is None:
        raise BadDescription(
            f"simulated GPUs {part!r}: begins with {head!r}, expected <count>x<memory>, such as 8x80GiB:A100-SXM4-80GB"
        )
    fields: dict[str, object] = {"count": match.group(1), "memory": match.group(2)}
    for position, piece in enumerate(rest):
        key, equals, value = piece.partition("=")
        if not equals and position > 0:
            raise BadDescription(f"simulated GPUs {part!r}: {piece!r} is no <option>=<number>")
        fields[key if equals else "model"] = value if equals else piece
    return fields


def _group(fields: Mapping[str, object], shown: str) -> GpuGroup:
    allowed = ("count", "memory", "model", "nvlink", "links", "numa")
    for key in fields:
        if key not in allowed:
            raise BadDescription(
                f"simulated GPUs {shown!r}: unknown field {key!r}; known are {', '.join(allowed)}"
            )
    model = str(fields.get("model", "")).strip()
    if not model:
        raise BadDescription(f"simulated GPUs {shown!r}: model is missing, as in 8x80GiB:A100-SXM4-80GB")
    count = _number(fields, "count", None, (1, MOST_GPUS), shown)
    nvlink = _number(fields, "nvlink", 1, (1, count), shown)
    numa = _number(fields, "numa", 2 if count >= 4 and count % 2 == 0 else 1, (1, count), shown)
    for name, parts in (("nvlink", nvlink), ("numa", numa)):
        if count % parts:
            raise BadDescription(f"simulated GPUs {shown!r}: {name}={parts} does not divide the {count} GPUs")
    links = _number(fields, "links", 12, (1, 36), shown)
    return GpuGroup(count, _memory_mib(fields.get("memory"), shown), model, nvlink, links, numa)


def _number(
    fields: Mapping[str, object], name: str, default: int | None, limits: tuple[int, int], shown: str
) -> int:
    value = fields.get(name, default)
    text = str(value).strip()
    low, high = limits
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", text) or not low <= int(text) <= high:
        raise BadDescription(
            f"simulated GPUs {shown!r}: {name} is {value!r}, must be a whole number from {low} to {high}"
        )
    return int(text)


def _memory_mib(value: object, shown: str) -> int:
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = _UNITS_MIB.get(match.group(2).upper()) if match else None
    if match is None or unit is None or not 0 < int(match.group(1)) * unit <= 1024 * 1024:
        raise BadDescription(
            f"simulated GPUs {shown!r}: memory is {value!r}, must be a size up to 1024GiB with a unit (GiB, MiB)"
        )
    return int(match.group(1)) * unit


def simulated_uuid(node: str, index: int) -> str:
    return f"GPU-{uuid.uuid5(_NAMESPACE, f'{node}/{index}')}"


class SimulatedSource:
    """A `GpuSource` that never blocks. The methods from `lose` on make faults for demonstrations and tests."""

    simulated = True
    blocking = False

    def __init__(self, node: str, description: Description, good_probes_needed: int = 3) -> None:
        groups = parse_description(description)
        self.warnings: tuple[str, ...] = ()
        self._gpus, self._links = _machine(node, groups)
        self._health = GpuHealth(good_probes_needed)
        self._lost: dict[str, str] = {}
        self._sick: dict[str, str] = {}
        self._foreign: dict[str, tuple[GpuProcess, ...]] = {}
        self._not_ready: GpusNotReady | None = None
        self._events: list[XidEvent] = []

    def read_inventory(self) -> GpuInventory:
        if self._not_ready is not None:
            raise self._not_ready
        gpus = tuple(
            replace(gpu, unavailable=f"lost: {self._lost[gpu.uuid]}") if gpu.uuid in self._lost else gpu
            for gpu in self._gpus
        )
        present = tuple(x for x in self._links if x.first not in self._lost and x.second not in self._lost)
        return GpuInventory(gpus, present)

    def read_report(self, attempt_of: AttemptOf, held: Held) -> tuple[GpuReport, ...]:
        if self._not_ready is not None:
            raise self._not_ready
        memory: dict[str, int] = {}
        compute: dict[str, int] = {}
        for piece in itertools.chain.from_iterable(held.values()):
            memory[piece.gpu] = memory.get(piece.gpu, 0) + piece.memory_mib
            compute[piece.gpu] = compute.get(piece.gpu, 0) + piece.compute_milli
        return tuple(
            self._report(gpu, memory.get(gpu.uuid, 0), compute.get(gpu.uuid, 0), attempt_of)
            for gpu in self._gpus
        )

    def _report(self, gpu: Gpu, held_mib: int, held_milli: int, attempt_of: AttemptOf) -> GpuReport:
        self._health.see_probe(gpu.uuid, self._lost.get(gpu.uuid) or self._sick.get(gpu.uuid, ""))
        fault = self._health.fault(gpu.uuid)
        if gpu.uuid in self._lost:
            return GpuReport(gpu.uuid, fault=fault)
        foreign = tuple(replace(p, attempt=attempt_of(p.pid)) for p in self._foreign.get(gpu.uuid, ()))
        # Nine tenths: a job never quite fills what it holds.
        busy_percent = min(100, held_milli * 90 // WHOLE_GPU_MILLI)
        return GpuReport(
            uuid=gpu.uuid,
            memory_used_mib=min(gpu.memory_mib, held_mib + sum(p.memory_mib or 0 for p in foreign)),
            utilization_percent=busy_percent,
            temperature_celsius=_between(_IDLE_CELSIUS, _BUSY_CELSIUS, busy_percent),
            power_milliwatt=_between(_IDLE_MILLIWATT, _BUSY_MILLIWATT, busy_percent),
            processes=foreign,
            fault=fault,
        )

    def take_events(self) -> tuple[XidEvent, ...]:
        taken, self._events = tuple(self._events), []
        return taken

    def clear_fault(self, uuid: str) -> None:
        self._health.clear(uuid)

    def close(self) -> None:
        """Nothing is open."""

    def lose(self, uuid: str, why: str = "GPU is lost") -> None:
        """The GPU falls off the bus, until `restore`."""
        self._lost[self._own(uuid)] = why

    def sicken(self, uuid: str, why: str) -> None:
        """The GPU answers, and its probes are bad, until `restore`."""
        self._sick[self._own(uuid)] = why

    def restore(self, uuid: str) -> None:
        """The GPU is there and its probes are good; its fault clears after enough of them."""
        self._lost.pop(self._own(uuid), None)
        self._sick.pop(uuid, None)

    def raise_xid(self, uuid: str, xid: int) -> None:
        """The driver reports this Xid."""
        rule = self._health.see_xid(self._own(uuid), xid)
        self._events.append(XidEvent(uuid, xid, rule.kind, rule.text))

    def occupy(self, uuid: str, processes: Iterable[GpuProcess]) -> None:
        """These processes, and no other foreign ones, use the GPU."""
        self._foreign[self._own(uuid)] = tuple(processes)

    def set_not_ready(self, error: GpusNotReady | None) -> None:
        """Every reading fails with this, until it is None."""
        self._not_ready = error

    def _own(self, uuid: str) -> str:
        if all(gpu.uuid != uuid for gpu in self._gpus):
            raise KeyError(f"no simulated GPU {uuid}")
        return uuid


def _between(idle: int, busy: int, percent: int) -> int:
    return idle + (busy - idle) * percent // 100


def _machine(node: str, groups: tuple[GpuGroup, ...]) -> tuple[tuple[Gpu, ...], tuple[Link, ...]]:
    gpus: list[Gpu] = []
    places: list[tuple[int, int, GpuGroup]] = []  # number of the group, place in it
    for number, group in enumerate(groups):
        for place in range(group.count):
            index = len(gpus)
            gpus.append(
                Gpu(
                    uuid=simulated_uuid(node, index),
                    index=index,
                    model=group.model,
                    memory_mib=group.memory_mib,
                    memory_total_mib=group.memory_mib,
                    device_paths=DEVICE_PATHS,
                    pci_bus_id=f"0000:{0x10 + index:02x}:00.0",
                    numa_node=place * group.numa // group.count,
                )
            )
            places.append((number, place, group))
    links = tuple(
        _link(gpus[a], gpus[b], places[a], places[b]) for a, b in itertools.combinations(range(len(gpus)), 2)
    )
    return tuple(gpus), links


def _link(first: Gpu, second: Gpu, at: tuple[int, int, GpuGroup], other: tuple[int, int, GpuGroup]) -> Link:
    """Two neighbours share a PCIe switch, cards of one NUMA node its host bridges, all others the system's interconnect;
    groups of NVLinks lie on top of that."""
    (number, place, group), (other_number, other_place, _) = at, other
    same = number == other_number
    if same and place // 2 == other_place // 2 and first.numa_node == second.numa_node:
        level = LinkLevel.PCIE_SWITCH
    else:
        level = LinkLevel.NUMA_NODE if first.numa_node == second.numa_node else LinkLevel.SYSTEM
    linked = same and group.nvlink > 1 and place // group.nvlink == other_place // group.nvlink
    return Link(first.uuid, second.uuid, level, group.links if linked else 0)
