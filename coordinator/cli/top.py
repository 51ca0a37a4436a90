"""`serai top`: the live view of nodes, queue and shares."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from coordinator.cli import exits
from coordinator.cli.output import has_colour, is_terminal
from coordinator.cli.session import DURATION, ask, connection_options

if TYPE_CHECKING:
    from coordinator.cli.picture import Frame
    from coordinator.client import Client
    from coordinator.client.views import JobView

_PAPER = 200  # off a terminal
_LIVE = "ALLOCATED,STARTING,RUNNING,EVICTING,CANCELLING"


@click.command()
@click.option("--interval", type=DURATION, default="2s", show_default=True, help="Between two looks.")
@click.option("--once", is_flag=True, help="Show it once, as off a terminal.")
@connection_options
def top(interval: float, once: bool) -> int:
    """Live view: slices on the nodes, tenants with their shares, who waits and why. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    from coordinator.cli.picture import whole

    console = Console(no_color=not has_colour(), highlight=False, width=None if is_terminal() else _PAPER)

    async def work(client: Client) -> None:
        if once or not is_terminal():
            console.print(whole(await look(client), width=console.width))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(whole(await look(client), "serai top", console.width), refresh=True)
                await asyncio.sleep(interval)

    try:
        ask(work)
    except KeyboardInterrupt:
        return exits.DONE
    return exits.DONE


async def look(client: Client) -> Frame:
    """One frame of the picture."""
    from coordinator.cli.picture import Frame

    async def jobs() -> list[JobView]:
        return [job async for job in client.jobs(state=_LIVE, limit=500)]

    cluster, nodes, queue, tenants, live = await asyncio.gather(
        client.cluster(), client.nodes(), client.queue(), client.tenants(), jobs()
    )
    return Frame(nodes=nodes, queue=queue, tenants=tenants, jobs=live, cluster=cluster)
