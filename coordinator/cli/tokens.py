"""`serai tokens`: create, list, delete; and `serai bootstrap`, which makes the first one."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from coordinator.cli import exits, figures
from coordinator.cli.exits import Stop
from coordinator.cli.output import Column, Shape, print_list, print_one, say
from coordinator.cli.session import ask, shaped

if TYPE_CHECKING:
    from coordinator.client import Client
    from coordinator.client.views import TokenView

_COLUMNS = [
    Column("SHA256", "sha256"),
    Column("ROLE", "role"),
    Column("TENANT", "tenant"),
    Column("LABEL", "label"),
    Column("CREATED", "created_at", lambda token: figures.moment(token.get("created_at"))),
]


@click.group(invoke_without_command=True)
@shaped(lists=True)
@click.pass_context
def tokens(ctx: click.Context, shape: Shape) -> None:
    """Tokens: who may do what. Only their hashes are stored."""
    if ctx.invoked_subcommand is None:
        _list(shape)


@tokens.command(name="list")
@shaped(lists=True)
def list_tokens(shape: Shape) -> None:
    """List tokens by their hashes."""
    _list(shape)


def _list(shape: Shape) -> None:
    async def work(client: Client) -> list[TokenView]:
        return await client.tokens()

    print_list(ask(work), _COLUMNS, shape, name="sha256")


@tokens.command()
@click.option("--tenant", default="", help="A token of this tenant.")
@click.option("--admin", is_flag=True, help="A token that may do everything.")
@click.option("--label", default="", help="To tell it from others later.")
@shaped(lists=False)
def create(tenant: str, admin: bool, label: str, shape: Shape) -> None:
    """Create a token. It is shown this once."""
    if admin == bool(tenant):
        raise Stop(exits.USAGE, "say whose token: --tenant NAME or --admin", field="--tenant")

    async def work(client: Client) -> TokenView:
        return await client.create_token("admin" if admin else "tenant", tenant=tenant, label=label)

    made = ask(work)
    if shape.format == "table":
        click.echo(made["token"])
        say("the token is not stored: keep it now")
    else:
        print_one(made, [], shape, name="token")


@tokens.command()
@click.argument("sha256")
@shaped(lists=False)
def delete(sha256: str, shape: Shape) -> None:
    """Delete a token by its hash or a unique prefix of it."""

    async def work(client: Client) -> str:
        found = [token for token in await client.tokens() if token["sha256"].startswith(sha256)]
        if len(found) != 1:
            code = exits.USAGE if found else exits.NOT_FOUND
            raise Stop(code, f"{len(found)} tokens begin with {sha256!r}", field="sha256", value=sha256)
        await client.delete_token(found[0]["sha256"])
        return found[0]["sha256"]

    deleted = ask(work)
    if shape.is_table:
        click.echo(f"deleted {deleted}")


@click.command()
@click.option("--etcd", "etcd_urls", metavar="URL[,URL...]", required=True, help="The etcd that Serai uses.")
@click.option("--etcd-ca", "ca_file", metavar="FILE", default="", help="Its certificate authority (PEM).")
@click.option("--etcd-cert", "cert_file", metavar="FILE", default="", help="Client certificate (PEM).")
@click.option(
    "--etcd-key", "key_file", metavar="FILE", default="", help="Key of the client certificate (PEM)."
)
@click.option(
    "--etcd-user", "user", metavar="NAME:PASSWORD-FILE", default="", help="Login, as for the coordinator."
)
@click.option("--tenant", default="", help="Make a token of this tenant instead of an admin one.")
@click.option("--label", default="bootstrap", show_default=True)
def bootstrap(etcd_urls: str, user: str, tenant: str, label: str, **files: str) -> None:
    """Write a first token straight into etcd, and print it once. Whoever may write to that etcd may do this."""
    name, _, password_file = user.partition(":")
    password = Path(password_file).read_text().strip() if password_file else ""
    at_ms = time.time_ns() // 1_000_000
    work = write_token(
        etcd_urls, tenant=tenant, label=label, at_ms=at_ms, user=name, password=password, **files
    )
    click.echo(asyncio.run(work))
    say("the token is not stored: keep it now, for example as SERAI_TOKEN")


async def write_token(etcd_urls: str, *, tenant: str, label: str, at_ms: int, **etcd: str) -> str:
    """A new token, its hash in etcd. `etcd` are further fields of `EtcdSettings`."""
    from coordinator import records
    from coordinator.etcd_store import EtcdSettings, EtcdStore
    from coordinator.store import Put, StoreError, absent

    token = f"serai_{secrets.token_urlsafe(24)}"
    record = records.Token(
        role="tenant" if tenant else "admin", tenant=tenant, label=label, created_at_ms=at_ms
    )
    key = records.token_key(token)
    try:
        store = EtcdStore(EtcdSettings.from_url(etcd_urls, **etcd))
    except ValueError as error:
        raise Stop(exits.USAGE, str(error), field="--etcd", value=etcd_urls) from None
    try:
        written = await store.txn([absent(key)], [Put(key, records.encode(record))])
    except StoreError as error:
        raise Stop(
            exits.NO_COORDINATOR, f"etcd at {etcd_urls}: {error}", field="--etcd", value=etcd_urls
        ) from error
    finally:
        await store.close()
    if not written.succeeded:
        raise Stop(exits.FAILED, "the token was there already; try again")
    return token
