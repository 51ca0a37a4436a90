"""`serai queue` and `serai events`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from coordinator.cli import exits, figures
from coordinator.cli.output import Column, Shape, print_list, print_table, say, select, sentence
from coordinator.cli.session import ask, find_job, shaped

if TYPE_CHECKING:
    from coordinator.client import Client
    from coordinator.client.views import HappeningView, QueueView, ReservationView

_COLUMNS = [
    Column("#", "position", right=True),
    Column("ID", "id"),
    Column("NAME", "name"),
    Column("TENANT", "tenant"),
    Column("PRIORITY", "priority", wide=True, right=True),
    Column("WAITED", "waited_seconds", lambda item: figures.duration(item["waited_seconds"]), right=True),
    Column("ASKED", "asked", lambda item: asked_of(item["asked"])),
    Column("REASON", "reason.sentence", lambda item: sentence(item["reason"])),
]
_TURNS = [
    Column("TENANT", "tenant"),
    Column("SPACE", "space_share", right=True),
    Column("TIME", "time_share", right=True),
    Column("PRIORITY", "priority", right=True),
]


def asked_of(asked: Mapping[str, Any]) -> str:
    """The sum that a waiting job asks for: `4 GPU 80GiB`; the memory is left out where whatever the cards have is meant."""
    if not asked.get("gpus"):
        return f"{asked.get('cpu_milli', 0) / 1000:g} cores"
    words = [f"{figures.gpus(asked.get('gpu_compute_milli'))} GPU"]
    if asked.get("gpu_memory_mib") is not None:
        words.append(figures.size(asked["gpu_memory_mib"]))
    return " ".join(words)


def _reserved(reservation: ReservationView) -> str:
    gpus = len(reservation["slices"])
    when = (
        f"due by {figures.moment(reservation['due_at'])}"
        if reservation["due_at"]
        else "nobody knows until when"
    )
    return f"reserved for {reservation['job']}: {gpus} GPU{'' if gpus == 1 else 's'} on {', '.join(reservation['nodes'])}, {when}"


@click.command()
@shaped(lists=True)
def queue(shape: Shape) -> None:
    """Waiting jobs in their order with the reason of each, and the tenants in order of their turn."""

    async def work(client: Client) -> QueueView:
        return await client.queue()

    found = ask(work)
    envelope = {name: value for name, value in found.items() if name != "items"}
    print_list(found["items"], _COLUMNS, shape, name="id", envelope=envelope, empty="nothing waits")
    reservation = found.get("reservation")
    if shape.is_table and reservation:
        click.echo()
        click.echo(_reserved(reservation))
    if shape.is_table and found["tenants"]:
        click.echo()
        rows = [
            [
                turn["tenant"],
                *(
                    figures.share(value)
                    for value in (turn["space_share"], turn["time_share"], turn["priority"])
                ),
            ]
            for turn in found["tenants"]
        ]
        print_table(_TURNS, rows, cut=not shape.no_trunc)


@click.command()
@click.option("--job", "reference", metavar="JOB", help="The history of one job, and then the end.")
@click.option(
    "--since", metavar="ID", default="", help="Events after this one (an event id is a store revision)."
)
@shaped(lists=True)
def events(reference: str | None, since: str, shape: Shape) -> int:
    """Follow what changes in the cluster, or show the history of one job."""
    if reference is not None:
        return _history(reference, shape)

    async def work(client: Client) -> None:
        async for event in client.events(since):
            item: dict[str, Any] = {"id": event.id, "event": event.kind, **{"data": event.data}}
            if not select([item], shape):
                continue
            if shape.is_table:
                click.echo(f"{event.id}  {event.kind:<6}  {_summary(event.data)}")
            elif shape.format == "name":
                click.echo(event.id)
            else:
                click.echo(json.dumps(item))

    try:
        ask(work)
    except KeyboardInterrupt:
        say("")
    return exits.DONE


def _history(reference: str, shape: Shape) -> int:
    async def work(client: Client) -> list[HappeningView]:
        return await client.job_events((await find_job(client, reference))["id"])

    columns = [
        Column(f"AT ({figures.zone()})", "at", lambda item: figures.moment(item["at"])),
        Column("STATE", "state"),
        Column("ATTEMPT", "attempt", right=True),
        Column("REASON", "reason.sentence", lambda item: sentence(item["reason"])),
    ]
    print_list(ask(work), columns, shape, name="state")
    return exits.DONE


def _summary(data: dict[str, Any]) -> str:
    words = [
        str(data[name])
        for name in ("id", "job", "node", "tenant", "name", "state", "status")
        if data.get(name)
    ]
    reason = data.get("reason")
    return " ".join([*words, sentence(reason) if isinstance(reason, dict) else ""]).rstrip() or json.dumps(
        data
    )
