"""What the agent reads of the machine itself: its identity, its CPUs and memory, and how busy they are. Linux only."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from attrs import define, field, frozen


@frozen
class Machine:
    """`cpu_milli` and `memory_mib` are what may be given out."""

    id: str
    cpu_milli: int
    memory_mib: int


def read_machine(root: Path = Path("/")) -> Machine:
    return Machine(machine_id(root), len(os.sched_getaffinity(0)) * 1000, _meminfo(root)["MemTotal"] // 1024)


def machine_id(root: Path = Path("/")) -> str:
    """Tells this machine from any other, also from one made from the same disk image (ID-1): such clones share
    /etc/machine-id but not the identity that their firmware or hypervisor gave them. Hashed, since systemd asks that
    its id is not shown. RuntimeError when the machine has neither."""
    parts = [
        _text(root / "etc/machine-id") or _text(root / "var/lib/dbus/machine-id"),
        _text(root / "sys/class/dmi/id/product_uuid"),  # readable by root only
    ]
    if not any(parts):
        raise RuntimeError("this machine has no /etc/machine-id; make one with `systemd-machine-id-setup`")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@define
class Load:
    """Measures use between two calls of `read`."""

    root: Path = Path("/")
    _last: tuple[int, int] | None = field(default=None, init=False)

    def read(self) -> tuple[int | None, int | None]:
        """(CPU in use since the last call in thousandths of a core, memory in use in MiB); None where not known."""
        memory = _meminfo(self.root)
        used_mib = (memory["MemTotal"] - memory["MemAvailable"]) // 1024 if "MemAvailable" in memory else None
        lines = _text(self.root / "proc/stat").splitlines()
        if not lines:
            return None, used_mib
        ticks = [int(word) for word in lines[0].split()[1:9]]
        now = (sum(ticks) - ticks[3] - ticks[4], sum(ticks))  # idle and iowait are no use
        last, self._last = self._last, now
        if last is None or now[1] <= last[1]:
            return None, used_mib
        cores = sum(line.startswith("cpu") for line in lines) - 1
        return max(0, now[0] - last[0]) * 1000 * cores // (now[1] - last[1]), used_mib


def _meminfo(root: Path) -> dict[str, int]:
    """In KiB."""
    values = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.strip().endswith("kB"):
            values[name] = int(value.split()[0])
    return values


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
