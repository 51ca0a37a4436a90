"""`serai nodes`: list, show, cordon, uncordon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from coordinator.cli import figures
from coordinator.cli.output import Column, Shape, print_list, print_one
from coordinator.cli.session import ask, shaped

if TYPE_CHECKING:
    from coordinator.client import Client
    from coordinator.client.views import NodeView

_BAR = 10


def _sum(node: Mapping[str, Any], field: str) -> int:
    return sum(gpu[field] for gpu in node["gpus"])


def _models(node: Mapping[str, Any]) -> str:
    counts: dict[str, int] = {}
    for gpu in node["gpus"]:
        text = f"{gpu['model']} {figures.size(gpu['memory_mib'])}"
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(f"{count} x {text}" for text, count in counts.items()) or "none"


def status_of(node: Mapping[str, Any]) -> str:
    return f"{node['status']}{', cordoned' if node['cordoned'] else ''}"


def bar(part: float, width: int = _BAR) -> str:
    """A part of one as a bar; anything above nothing shows at least one cell."""
    filled = min(width, max(1 if part > 0 else 0, round(part * width)))
    return "█" * filled + "░" * (width - filled)


_COLUMNS = [
    Column("NODE", "name"),
    Column("STATUS", "status", status_of),
    Column("GPUS", "gpus", _models),
    Column("GPU FREE", "gpu_free", lambda node: figures.gpus(_sum(node, "compute_free_milli")), right=True),
    Column(
        "MEMORY FREE", "memory_free", lambda node: figures.size(_sum(node, "memory_free_mib")), right=True
    ),
    Column("CPU FREE", "cpu_free_milli", lambda node: f"{node['cpu_free_milli'] / 1000:g}", right=True),
    Column("MAIN FREE", "memory_free_mib", lambda node: figures.size(node["memory_free_mib"]), right=True),
    Column(
        "LABELS", "labels", lambda node: ",".join(f"{k}={v}" for k, v in node["labels"].items()), wide=True
    ),
    Column("WHY", "status_reason"),
]


@click.group(invoke_without_command=True)
@shaped(lists=True)
@click.pass_context
def nodes(ctx: click.Context, shape: Shape) -> None:
    """List nodes; show, cordon or uncordon one."""
    if ctx.invoked_subcommand is None:
        _list(shape)


@nodes.command(name="list")
@shaped(lists=True)
def list_nodes(shape: Shape) -> None:
    """List nodes."""
    _list(shape)


def _list(shape: Shape) -> None:
    async def work(client: Client) -> list[NodeView]:
        return await client.nodes()

    print_list(ask(work), _COLUMNS, shape, name="name", empty="no nodes; start `serai agent` on one")


@nodes.command()
@click.argument("node")
@shaped(lists=False)
def show(node: str, shape: Shape) -> None:
    """Show one node: its GPUs, and the slices on them."""

    async def work(client: Client) -> NodeView:
        return await client.node(node)

    found = ask(work)
    print_one(found, _lines(found), shape, name="name")


@nodes.command()
@click.argument("node")
@click.option("--reason", default="", help="Shown to whoever waits.")
@shaped(lists=False)
def cordon(node: str, reason: str, shape: Shape) -> None:
    """No new work on a node; what runs goes on."""

    async def work(client: Client) -> NodeView:
        return await client.cordon(node, reason)

    found = ask(work)
    print_one(found, [("node", found["name"]), ("status", status_of(found))], shape, name="name")


@nodes.command()
@click.argument("node")
@shaped(lists=False)
def uncordon(node: str, shape: Shape) -> None:
    """New work on a node again."""

    async def work(client: Client) -> NodeView:
        return await client.uncordon(node)

    found = ask(work)
    print_one(found, [("node", found["name"]), ("status", status_of(found))], shape, name="name")


def _lines(node: NodeView) -> list[tuple[str, str]]:
    why = f" ({node['status_reason']})" if node["status_reason"] else ""
    lines = [
        ("node", f"{node['name']}{' (simulated GPUs)' if node['simulated'] else ''}"),
        ("status", status_of(node) + why),
        ("labels", ", ".join(f"{name}={value}" for name, value in node["labels"].items())),
        ("cpu", f"{node['cpu_free_milli'] / 1000:g} of {node['cpu_milli'] / 1000:g} cores free"),
        ("memory", f"{figures.size(node['memory_free_mib'])} of {figures.size(node['memory_mib'])} free"),
        ("engine id", node["engine_node_id"]),
    ]
    for gpu in node["gpus"]:
        granted = gpu["memory_mib"] - gpu["memory_free_mib"]
        part = granted / gpu["memory_mib"] if gpu["memory_mib"] else 0
        state = (
            gpu["unavailable"]
            or f"{figures.size(gpu['memory_free_mib'])} of {figures.size(gpu['memory_mib'])} free"
        )
        used = f"used {figures.size(gpu['memory_used_mib'])}"
        lines.append((f"GPU {gpu['index']}", f"{bar(part)} {gpu['model']} {gpu['uuid']}: {state}, {used}"))
        for piece in gpu["slices"]:
            whose = f"job {piece['job']} task {piece['task']}" if piece["job"] else "another tenant's job"
            size, compute = figures.size(piece["memory_mib"]), figures.compute(piece["compute_milli"])
            lines.append(("", f"{size}, {compute} {piece['isolation']}: {whose}"))
    return [(title, text) for title, text in lines if text]
