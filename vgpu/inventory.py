"""What a node has (inventory) and what it measures (report). Plain data; made by the node agent, kept in etcd.

GPUs are known by UUID; an index is for display. Memory is in whole MiB, compute in thousandths of a physical GPU
(`compute_milli`, 1000 = one whole GPU). Unknown is None, never 0.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from msgspec import Struct, field

WHOLE_GPU_MILLI = 1000


class LinkLevel(enum.Enum):
    """The lowest common ancestor of two GPUs of one node, nearest first (NVML's nvmlGpuTopologyLevel_t)."""

    SAME_BOARD = "same_board"
    PCIE_SWITCH = "pcie_switch"
    PCIE_SWITCHES = "pcie_switches"
    HOST_BRIDGE = "host_bridge"
    NUMA_NODE = "numa_node"
    SYSTEM = "system"


class Link(Struct, frozen=True, gc=False):
    """How two GPUs of a node reach each other. Each pair stands once, in the order of the GPUs. `nvlinks` counts
    active direct NVLinks (0 = none); behind an NVSwitch every pair counts all links of a GPU."""

    first: str
    second: str
    level: LinkLevel
    nvlinks: int = 0


class Gpu(Struct, frozen=True, gc=False):
    """One thing that a slice may be cut from: a physical GPU, or a MIG instance (then `parent` names the card).

    `memory_mib` is what may be given out: the total less the driver's reserve. `unavailable` says why nothing may be
    placed on it at all (in MIG mode, lost), empty otherwise. `device_paths` are the device nodes of this GPU on the
    host; a simulated GPU names a harmless one, such as /dev/null.
    """

    uuid: str
    index: int
    model: str
    memory_mib: int
    memory_total_mib: int
    device_paths: tuple[str, ...]
    pci_bus_id: str = ""
    numa_node: int | None = None
    compute_milli: int = WHOLE_GPU_MILLI
    parent: str = ""
    mig_profile: str = ""
    unavailable: str = ""

    @property
    def is_mig_instance(self) -> bool:
        return bool(self.parent)

    @property
    def card(self) -> str:
        """UUID of the physical card."""
        return self.parent or self.uuid


# Raised when a field comes to mean something else; a field that is only added leaves it alone.
INVENTORY_VERSION = 1


class NodeInventory(Struct, frozen=True, gc=False):
    """What a machine has. `isolations` are the names of the backends that may be used here; `engine_node_id` is the
    node's id in the engine (Nomad), `machine_id` the operating system's, which tells two machines of one name apart.
    `container_gpus` says how GPUs enter a container: by their device nodes, the NVIDIA runtime, or CDI."""

    node: str
    machine_id: str
    agent_version: str
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    cpu_milli: int
    memory_mib: int
    labels: Mapping[str, str] = field(default_factory=dict)
    isolations: tuple[str, ...] = ("exclusive", "timeslice")
    engine_node_id: str = ""
    container_gpus: str = "devices"  # devices | nvidia-runtime | cdi
    simulated: bool = False
    version: int = INVENTORY_VERSION


class GpuProcess(Struct, frozen=True, gc=False):
    """A process that the driver sees on a GPU. `attempt` is the `<job>.<attempt>.<task>` it belongs to, empty when it
    is none of ours (a foreign process)."""

    pid: int
    memory_mib: int | None
    attempt: str = ""


class GpuReport(Struct, frozen=True, gc=False):
    """What one GPU measured. Fields that the driver does not support are None. `fault` says why it may not be given
    out (lost, hardware Xid), empty when healthy."""

    uuid: str
    memory_used_mib: int | None = None
    utilization_percent: int | None = None
    temperature_celsius: int | None = None
    power_milliwatt: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    fault: str = ""


class NodeReport(Struct, frozen=True, gc=False):
    """What a node measured in one monitoring period. `held` names every `<job>.<attempt>.<task>` of ours that still
    exists on the machine or is being started, granted or not, with the UUIDs of its GPUs: a GPU in it is not free for
    anyone else. `closed` says why the node can start nothing now (its container engine does not answer), empty when it
    can."""

    node: str
    sequence: int
    at_ms: int
    gpus: tuple[GpuReport, ...]
    held: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cpu_used_milli: int | None = None
    memory_used_mib: int | None = None
    warnings: tuple[str, ...] = ()
    closed: str = ""
    version: int = 1
