"""`serai backup` and `serai restore`: the records of a cluster, straight from and into etcd."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from coordinator.cli import exits
from coordinator.cli.exits import Stop

if TYPE_CHECKING:
    from coordinator.etcd_store import EtcdStore

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def etcd_options(function: F) -> F:
    """Where etcd is and how to log in, as for the coordinator."""
    for option in (
        click.option("--etcd-user", "user", metavar="NAME:PASSWORD-FILE", default="", help="Login."),
        click.option(
            "--etcd-key", "key_file", metavar="FILE", default="", help="Key of the client certificate (PEM)."
        ),
        click.option(
            "--etcd-cert", "cert_file", metavar="FILE", default="", help="Client certificate (PEM)."
        ),
        click.option(
            "--etcd-ca", "ca_file", metavar="FILE", default="", help="Its certificate authority (PEM)."
        ),
        click.option(
            "--etcd", "etcd_urls", metavar="URL[,URL...]", required=True, help="The etcd that Serai uses."
        ),
    ):
        function = option(function)
    return function


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@etcd_options
def backup(file: Path, etcd_urls: str, user: str, **files: str) -> None:
    """Write all records of the cluster to FILE, as they stand at one moment. Nothing has to be stopped.

    FILE is readable by you alone: it holds hashes of tokens and the environment of jobs.
    """
    from coordinator.backup import back_up

    header, data = _with_etcd(etcd_urls, user, files, lambda store: back_up(store, _now_ms()))
    _write_whole(file, data)
    click.echo(f"{header.count} records at revision {header.revision} in {file}")


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace what the cluster holds, and take it from a leader.")
@etcd_options
def restore(file: Path, force: bool, etcd_urls: str, user: str, **files: str) -> None:
    """Make an empty cluster hold what FILE holds. Stop the coordinators first; agents may go on."""
    from coordinator.backup import BackupInvalid, RestoreRefused, read_backup
    from coordinator.backup import restore as write

    try:
        header, wanted = read_backup(file.read_bytes())
    except BackupInvalid as error:
        raise Stop(exits.REFUSED, f"{file}: {error}", field="FILE", value=str(file)) from None
    try:
        done = _with_etcd(etcd_urls, user, files, lambda store: write(store, wanted, _now_ms(), force=force))
    except RestoreRefused as error:
        hint = "--force replaces everything in it"
        raise Stop(exits.REFUSED, str(error), field="--etcd", value=etcd_urls, hint=hint) from None
    click.echo(
        f"{done.written} records written, {done.kept} stood there already, {done.removed} removed: "
        f"the cluster is as it was at revision {header.revision}"
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _with_etcd(urls: str, user: str, files: dict[str, str], work: Callable[[EtcdStore], Awaitable[T]]) -> T:
    from coordinator.etcd_store import EtcdSettings, EtcdStore
    from coordinator.store import StoreError

    name, _, password_file = user.partition(":")
    password = Path(password_file).read_text().strip() if password_file else ""

    async def run() -> T:
        store = EtcdStore(EtcdSettings.from_url(urls, user=name, password=password, **files))
        try:
            return await work(store)
        finally:
            await store.close()

    try:
        return asyncio.run(run())
    except StoreError as error:
        raise Stop(exits.NO_COORDINATOR, f"etcd at {urls}: {error}", field="--etcd", value=urls) from error
    except ValueError as error:
        raise Stop(exits.USAGE, str(error), field="--etcd", value=urls) from None


def _write_whole(file: Path, data: bytes) -> None:
    """The old file or the whole new one, also where the machine stops in between."""
    draft = file.with_name(f".{file.name}.part")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(draft, file)
