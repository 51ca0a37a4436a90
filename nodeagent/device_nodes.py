"""What the kernel's file systems say about a GPU: its NUMA node, and the device nodes that a container needs.

Sources: the PCI `numa_node` attribute (Linux, Documentation/ABI/testing/sysfs-bus-pci); NVIDIA's MIG User Guide, "Device
Nodes and Capabilities" (https://docs.nvidia.com/datacenter/tesla/mig-user-guide/device-nodes-and-capabilities.html).
"""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

_SHARED = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
_PCI_BUS_ID = re.compile(r"([0-9a-fA-F]+):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-9a-fA-F])")


def pci_address(bus_id: str | bytes) -> str:
    """NVML writes `00000000:3B:00.0`, Linux `0000:3b:00.0`: the form of Linux, empty for what is no bus id."""
    text = bus_id.decode(errors="replace") if isinstance(bus_id, bytes) else bus_id
    match = _PCI_BUS_ID.fullmatch(text.strip())
    if match is None:
        return ""
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()


@frozen
class KernelFiles:
    """The roots are injected, so that a test can lay out a machine in a folder. A device path is looked for below
    `dev_root`, and named as the host names it (/dev/...)."""

    sys_root: Path = Path("/sys")
    dev_root: Path = Path("/dev")
    proc_root: Path = Path("/proc")

    def numa_node(self, address: str) -> int | None:
        """None when the machine does not say (-1, or no such file)."""
        try:
            node = int((self.sys_root / "bus/pci/devices" / address / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def of_card(self, minor: int | None) -> tuple[str, ...]:
        """The GPU's own node and the shared ones, those that exist; empty when the GPU's own does not."""
        if minor is None or not (self.dev_root / f"nvidia{minor}").exists():
            return ()
        shared = tuple(f"/dev/{name}" for name in _SHARED if (self.dev_root / name).exists())
        return (f"/dev/nvidia{minor}", *shared)

    def of_mig_instance(self, minor: int | None, gpu_instance: int, compute_instance: int) -> tuple[str, ...]:
        """The card's nodes and the two capabilities that open this instance only. Empty when one of them is missing:
        a container could not use the instance."""
        card = self.of_card(minor)
        gi = f"gpu{minor}/mig/gi{gpu_instance}"
        caps = [self._capability(f"{gi}/access"), self._capability(f"{gi}/ci{compute_instance}/access")]
        if not card or None in caps:
            return ()
        return (*card, *(cap for cap in caps if cap is not None))

    def _capability(self, path: str) -> str | None:
        try:
            text = (self.proc_root / "driver/nvidia/capabilities" / path).read_text()
        except OSError:
            return None
        match = re.search(r"^DeviceFileMinor:\s*(\d+)\s*$", text, re.MULTILINE)
        if match is None:
            return None
        name = f"nvidia-caps/nvidia-cap{match.group(1)}"
        return f"/dev/{name}" if (self.dev_root / name).exists() else None
