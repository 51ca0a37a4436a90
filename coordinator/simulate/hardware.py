"""The cluster of a replay, from a short text.

64            64 GPUs that are only counted
8x8           8 nodes of 8 GPUs, of 80 GiB each
8x8,4x2@24    also 4 nodes of 2 GPUs of 24 GiB
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import frozen

from vgpu.inventory import Gpu, Link, LinkLevel, NodeInventory

GIB = 1024
_GROUP = re.compile(r"(\d+)x(\d+)(?:@(\d+))?")
_NVLINKS = 4
_NODES_PER_RACK = 4


class HardwareInvalid(ValueError):
    """The text names no cluster."""


@frozen
class Group:
    nodes: int
    gpus: int
    memory_mib: int


@frozen
class Hardware:
    """`is_counted`: GPUs without nodes."""

    groups: Sequence[Group]
    is_counted: bool = False

    @property
    def gpus(self) -> int:
        return sum(group.nodes * group.gpus for group in self.groups)

    @property
    def memory_mib(self) -> int:
        return sum(group.nodes * group.gpus * group.memory_mib for group in self.groups)

    @property
    def per_node(self) -> int:
        """GPUs of the largest node."""
        return max(group.gpus for group in self.groups)

    @property
    def is_even(self) -> bool:
        """All nodes alike."""
        return len(self.groups) == 1

    def inventories(self) -> list[NodeInventory]:
        """Four nodes to a rack, all GPUs of a node linked; CPU and memory never the limit."""
        sizes = [group for group in self.groups for _ in range(group.nodes)]
        return [_inventory(number, group) for number, group in enumerate(sizes)]


def hardware(text: str) -> Hardware:
    """Raises HardwareInvalid."""
    if text.isdecimal() and int(text) > 0:
        return Hardware([Group(int(text), 1, 80 * GIB)], is_counted=True)
    groups = []
    for part in text.split(","):
        found = _GROUP.fullmatch(part.strip())
        if found is None or not int(found[1]) or not int(found[2]):
            raise HardwareInvalid(
                f"{part!r} is no group of nodes: write NODESxGPUS, such as 8x8, or 8x8@80 for 80 GiB"
            )
        groups.append(Group(int(found[1]), int(found[2]), int(found[3] or 80) * GIB))
    return Hardware(groups)


def _inventory(number: int, group: Group) -> NodeInventory:
    name = f"n{number:05}"
    gpus = tuple(
        Gpu(f"{name}-{n}", n, "simulated", group.memory_mib, group.memory_mib, ("/dev/null",), numa_node=0)
        for n in range(group.gpus)
    )
    links = tuple(
        Link(first.uuid, second.uuid, LinkLevel.SYSTEM, _NVLINKS)
        for place, first in enumerate(gpus)
        for second in gpus[place + 1 :]
    )
    return NodeInventory(
        node=name,
        machine_id=name,
        agent_version="",
        gpus=gpus,
        links=links,
        cpu_milli=1_000_000,
        memory_mib=1_000_000_000,
        labels={"rack": f"r{number // _NODES_PER_RACK:04}"},
        isolations=("exclusive", "mps"),
    )
