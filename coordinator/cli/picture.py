"""Pictures of the cluster for a terminal, made from the API's views: slices on the nodes as bars, the queue with its
reasons, the tenants with their shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.cli import figures
from coordinator.cli.output import sentence

if TYPE_CHECKING:
    from coordinator.client.views import (
        ClusterView,
        GpuView,
        JobView,
        NodeView,
        QueueView,
        TenantView,
    )

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_CELLS = 8
_LABEL = 12
_WIDE = 120  # so wide a terminal has room for four GPUs beside each other


@frozen
class Frame:
    """Everything that one picture shows, read at about one time."""

    nodes: Sequence[NodeView]
    queue: QueueView
    tenants: Sequence[TenantView]
    jobs: Sequence[JobView] = ()
    cluster: ClusterView | None = None
    colours: Mapping[str, str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        names = sorted(tenant["name"] for tenant in self.tenants)
        colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
        object.__setattr__(self, "colours", colours)


def bars(frame: Frame, width: int = 120) -> RenderableType:
    """Each GPU as a bar of its memory, slices in the colour of their tenant, with the names of the jobs."""
    across = 4 if width >= _WIDE else 2
    names = {job["id"]: job["name"] for job in frame.jobs}
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    for _ in range(across):
        table.add_column(no_wrap=True)
    for node in frame.nodes:
        gpus = list(node["gpus"])
        for start in range(0, max(len(gpus), 1), across):
            cells = [_gpu(gpu, frame, names) for gpu in gpus[start : start + across]]
            table.add_row(_node_title(node) if start == 0 else Text(""), *cells)
    return table


def _node_title(node: NodeView) -> Text:
    title = Text(node["name"], style="bold")
    if node["status"] != "ready" or node["cordoned"]:
        title.append(f" {node['status']}{' cordoned' if node['cordoned'] else ''}", style="red")
    return title


def _gpu(gpu: GpuView, frame: Frame, names: Mapping[str, str]) -> Text:
    text = Text(f"{gpu['index']} ")
    total = max(gpu["memory_mib"], 1)
    drawn = 0
    for piece in gpu["slices"]:
        cells = min(_CELLS - drawn, max(1, round(piece["memory_mib"] / total * _CELLS)))
        text.append("█" * cells, style=frame.colours.get(piece["tenant"] or "", "white"))
        drawn += cells
    text.append("░" * (_CELLS - drawn), style="red" if gpu["unavailable"] else "dim")
    here = [names.get(piece["job"] or "", piece["job"] or "?") for piece in gpu["slices"]]
    label = gpu["unavailable"] or ",".join(here) or figures.size(gpu["memory_mib"])
    return text.append(f" {label[:_LABEL]:<{_LABEL}}", style="" if here else "dim")


def tenants(frame: Frame) -> RenderableType:
    """Quota, what is granted, both shares and the priority; the next in turn first."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for title in ("TENANT", "QUOTA", "GRANTED", "RUNNING", "WAITING", "SPACE", "- TIME", "= PRIORITY"):
        table.add_column(title, justify="left" if title == "TENANT" else "right", no_wrap=True)
    for tenant in sorted(frame.tenants, key=lambda each: (-(each["priority"] or 0.0), each["name"])):
        table.add_row(
            Text(tenant["name"], style=frame.colours[tenant["name"]]),
            figures.size(tenant["quota_memory_mib"]),
            figures.size(tenant["used_memory_mib"]),
            str(tenant["running"]),
            str(tenant["waiting"]),
            figures.share(tenant["space_share"]),
            figures.share(tenant["time_share"]),
            figures.share(tenant["priority"]),
        )
    return table


def queue(frame: Frame, most: int = 8) -> RenderableType:
    """Who waits, in order, and why."""
    if not frame.queue["items"]:
        return Text("nothing waits", style="dim")
    table = Table(box=None, padding=(0, 1), header_style="bold")
    items = frame.queue["items"][:most]
    for title, name in (("#", "position"), ("WAITING", "name"), ("TENANT", "tenant"), ("WAITED", "")):
        longest = max(len(str(item.get(name, ""))) for item in items)
        table.add_column(title, no_wrap=True, min_width=min(max(longest, len(title)), 24))
    table.add_column("REASON", no_wrap=True, overflow="ellipsis")
    for item in items:
        tenant = Text(item["tenant"], style=frame.colours.get(item["tenant"], ""))
        waited = figures.duration(item["waited_seconds"])
        table.add_row(str(item["position"]), item["name"], tenant, waited, sentence(item["reason"]))
    rest = len(frame.queue["items"]) - most
    return Group(table, Text(f"and {rest} more", style="dim")) if rest > 0 else table


def running(frame: Frame, most: int = 8) -> RenderableType:
    """The newest jobs that hold slices: why each was chosen, with the numbers, and why it went there."""
    live = [job for job in frame.jobs if job["placed"] is not None]
    live.sort(key=lambda job: (job["started_at"] or "~", job["id"]))
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column(
        "JOB", no_wrap=True, min_width=min(24, max((len(job["name"]) for job in live), default=1))
    )
    table.add_column("STATE", no_wrap=True, min_width=9)
    table.add_column("CHOSEN, AND PLACED", overflow="ellipsis", no_wrap=True)
    for job in live[-most:]:
        name = Text(job["name"], style=frame.colours.get(job["tenant"], ""))
        table.add_row(name, job["state"], sentence(job["chosen"]))
        table.add_row("", "", Text(sentence(job["placed"]), style="dim"))
    return table if live else Text("no job was placed yet", style="dim")


def whole(frame: Frame, title: str = "", width: int = 120) -> RenderableType:
    parts: list[RenderableType] = []
    if title:
        parts.append(Text(title, style="bold reverse"))
    if frame.cluster is not None:
        parts.append(_summary(frame.cluster))
    for part in (bars(frame, width), tenants(frame), queue(frame), running(frame)):
        parts += [part, Text("")]
    return Group(*parts[:-1])


def _summary(cluster: ClusterView) -> Text:
    leader = cluster["leader"]
    return Text(
        f"{cluster['gpus']} GPUs, {figures.gpus(cluster['compute_granted_milli'])} granted; "
        f"{figures.size(cluster['memory_granted_mib'])} of {figures.size(cluster['memory_mib'])} granted; "
        f"leader {leader['id'] if leader else 'none'}; revision {cluster['revision']}"
    )
