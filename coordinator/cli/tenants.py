"""`serai tenants`: list, show, create, set, delete; apply for a quota, and the answers to that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from coordinator.cli import exits, figures
from coordinator.cli.exits import Stop
from coordinator.cli.output import Column, Shape, print_list, print_one
from coordinator.cli.session import ask, connection, shaped

if TYPE_CHECKING:
    from coordinator.client import Client
    from coordinator.client.views import ApplicationView, TenantView


def _limit(tenant: Mapping[str, Any]) -> str:
    parts = []
    if tenant["limit_memory_mib"] is not None:
        parts.append(figures.size(tenant["limit_memory_mib"]))
    if tenant["limit_compute_milli"] is not None:
        parts.append(f"{figures.gpus(tenant['limit_compute_milli'])} GPU")
    return " ".join(parts) or "none"


_COLUMNS = [
    Column("TENANT", "name"),
    Column("QUOTA", "quota_memory_mib", lambda tenant: figures.size(tenant["quota_memory_mib"]), right=True),
    Column("GRANTED", "used_memory_mib", lambda tenant: figures.size(tenant["used_memory_mib"]), right=True),
    Column(
        "OVER BY", "over_by_memory_mib", lambda tenant: figures.size(tenant["over_by_memory_mib"]), right=True
    ),
    Column(
        "GPUS", "used_compute_milli", lambda tenant: figures.gpus(tenant["used_compute_milli"]), right=True
    ),
    Column("LIMIT", "limit_memory_mib", _limit, right=True),
    Column("WEIGHT", "weight", right=True),
    Column("RUNNING", "running", right=True),
    Column("WAITING", "waiting", right=True),
    Column("SPACE", "space_share", lambda tenant: figures.share(tenant["space_share"]), right=True),
    Column("TIME", "time_share", lambda tenant: figures.share(tenant["time_share"]), right=True),
    Column("PRIORITY", "priority", lambda tenant: figures.share(tenant["priority"]), right=True),
]
_APPLICATIONS = [
    Column("ID", "id"),
    Column("TENANT", "tenant"),
    Column("ASKED", "quota_memory_mib", lambda item: figures.size(item["quota_memory_mib"]), right=True),
    Column("STATE", "state"),
    Column("AT", "at", lambda item: figures.moment(item["at"])),
    Column("TEXT", "text"),
    Column("ANSWER", "answer"),
]


@click.group(invoke_without_command=True)
@shaped(lists=True)
@click.pass_context
def tenants(ctx: click.Context, shape: Shape) -> None:
    """Tenants, their quotas and shares. SPACE - TIME = PRIORITY: the highest goes next."""
    if ctx.invoked_subcommand is None:
        _list(shape)


@tenants.command(name="list")
@shaped(lists=True)
def list_tenants(shape: Shape) -> None:
    """List tenants."""
    _list(shape)


def _list(shape: Shape) -> None:
    async def work(client: Client) -> list[TenantView]:
        return await client.tenants()

    print_list(
        ask(work), _COLUMNS, shape, name="name", empty="no tenants; `serai tenants create NAME --quota SIZE`"
    )


@tenants.command()
@click.argument("name")
@shaped(lists=False)
def show(name: str, shape: Shape) -> None:
    """Show one tenant."""

    async def work(client: Client) -> TenantView:
        return await client.tenant(name)

    _print(ask(work), shape)


@tenants.command()
@click.argument("name")
@click.option("--quota", metavar="SIZE", help="GPU memory it is entitled to, such as 320GiB.")
@click.option("--limit-memory", metavar="SIZE", help="GPU memory it may hold at most, borrowed included.")
@click.option("--limit-compute", metavar="GPUS", help="GPUs it may hold at most.")
@click.option("--weight", type=click.IntRange(min=0), help="Divides its time share.")
@shaped(lists=False)
def create(name: str, shape: Shape, **flags: Any) -> None:
    """Create a tenant."""

    async def work(client: Client) -> TenantView:
        return await client.create_tenant(name, **_fields(flags))

    _print(ask(work), shape)


@tenants.command(name="set")
@click.argument("name")
@click.option("--quota", metavar="SIZE", help="GPU memory it is entitled to.")
@click.option("--limit-memory", metavar="SIZE", help="At most; `none` for no limit.")
@click.option("--limit-compute", metavar="GPUS", help="At most; `none` for no limit.")
@click.option("--weight", type=click.IntRange(min=0), help="Divides its time share.")
@shaped(lists=False)
def set_tenant(name: str, shape: Shape, **flags: Any) -> None:
    """Change quota, limits or weight. What runs is not touched."""
    fields = _fields(flags)
    if not fields:
        raise Stop(exits.USAGE, "nothing to set", hint="--quota, --limit-memory, --limit-compute or --weight")

    async def work(client: Client) -> TenantView:
        return await client.update_tenant(name, **fields)

    _print(ask(work), shape)


@tenants.command()
@click.argument("name")
@shaped(lists=False)
def delete(name: str, shape: Shape) -> None:
    """Delete a tenant that has no live jobs."""

    async def work(client: Client) -> None:
        await client.delete_tenant(name)

    ask(work)
    if shape.is_table:
        click.echo(f"deleted {name}")


@tenants.command()
@click.argument("quota", metavar="SIZE")
@click.option("--tenant", help="Which tenant [env SERAI_TENANT; else the token's].")
@click.option("--text", "-m", default="", help="Why.")
@shaped(lists=False)
def apply(quota: str, tenant: str | None, text: str, shape: Shape) -> None:
    """Apply for another quota; an administrator grants or refuses it."""

    async def work(client: Client) -> ApplicationView:
        return await client.apply_for_quota(await _tenant(client, tenant), quota, text)

    _print_application(ask(work), shape)


@tenants.command()
@click.option("--tenant", help="Of one tenant (default: of all you may see).")
@shaped(lists=True)
def applications(tenant: str | None, shape: Shape) -> None:
    """Applications for quotas, and their answers."""

    async def work(client: Client) -> list[ApplicationView]:
        names = [tenant] if tenant else [each["name"] for each in await client.tenants()]
        return [found for name in names for found in await client.applications(name)]

    print_list(ask(work), _APPLICATIONS, shape, name="id", empty="no applications")


@tenants.command()
@click.argument("tenant")
@click.argument("id")
@click.option("--answer", "-m", default="", help="Said to the tenant.")
@shaped(lists=False)
def grant(tenant: str, id: str, answer: str, shape: Shape) -> None:
    """Grant an application: the quota is changed at once."""
    _answer(tenant, id, answer, shape, is_granted=True)


@tenants.command()
@click.argument("tenant")
@click.argument("id")
@click.option("--answer", "-m", default="", help="Why not.")
@shaped(lists=False)
def refuse(tenant: str, id: str, answer: str, shape: Shape) -> None:
    """Refuse an application."""
    _answer(tenant, id, answer, shape, is_granted=False)


def _answer(tenant: str, id: str, answer: str, shape: Shape, *, is_granted: bool) -> None:
    async def work(client: Client) -> ApplicationView:
        return await client.answer_application(tenant, id, grant=is_granted, answer=answer)

    _print_application(ask(work), shape)


async def _tenant(client: Client, given: str | None) -> str:
    name = given or connection().tenant or (await client.whoami()).get("tenant")
    if not name:
        raise Stop(exits.USAGE, "which tenant?", field="--tenant", hint="use --tenant NAME")
    return name


def _fields(flags: dict[str, Any]) -> dict[str, Any]:
    names = {"quota": "quota_memory"}
    given = {names.get(name, name): value for name, value in flags.items() if value is not None}
    return {name: None if value == "none" else value for name, value in given.items()}


def _print(tenant: TenantView, shape: Shape) -> None:
    print_one(
        tenant, [(column.title.lower(), column.text(tenant)) for column in _COLUMNS], shape, name="name"
    )


def _print_application(found: ApplicationView, shape: Shape) -> None:
    print_one(
        found, [(column.title.lower(), column.text(found)) for column in _APPLICATIONS], shape, name="id"
    )
