"""What the subcommands share: the options of connection and output, and one conversation with the coordinator."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from coordinator.cli import exits
from coordinator.cli.exits import Stop
from coordinator.cli.output import FORMATS, Shape, is_terminal
from coordinator.cli.settings import Connection, resolve

if TYPE_CHECKING:
    from coordinator.client import Client
    from coordinator.client.views import JobView

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_META = "serai."
_ID = re.compile(r"^[0-9a-hjkmnp-tv-z]{1,16}$")
_ID_LENGTH = 16
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)(ms|s|m|h|d)$")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Duration(click.ParamType[float]):
    """`30s`, `5m`, `36h`; a bare number is refused, since nobody knows its unit."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = _DURATION.match(str(value))
        if found is None:
            self.fail(f"{value!r} needs a unit: {value}s, {value}m or {value}h", param, ctx)
        return float(found[1]) * _UNIT_SECONDS[found[2]]


DURATION = Duration()


def connection_options(function: F) -> F:
    """--address, --token, --token-file: taken before and after the subcommand alike."""
    for option in (
        click.option("--token-file", metavar="FILE", help="File that holds the token.", **_remembered()),
        click.option("--token", metavar="TOKEN", help="Bearer token [env SERAI_TOKEN].", **_remembered()),
        click.option("--address", metavar="URL", help="Coordinator [env SERAI_ADDRESS].", **_remembered()),
    ):
        function = option(function)
    return function


def shaped(*, lists: bool) -> Callable[[F], F]:
    """-o, --json, -q, and for lists --sort, --filter, --no-trunc: handed to the command as one `shape`."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def command(
            *args: Any,
            output: str,
            as_json: bool,
            quiet: bool,
            no_trunc: bool = False,
            sort: str = "",
            filters: tuple[str, ...] = (),
            **rest: Any,
        ) -> Any:
            format = "name" if quiet else "json" if as_json else output
            shape = Shape(format=format, sort=sort, filters=filters, no_trunc=no_trunc)
            return function(*args, shape=shape, **rest)

        decorated: Any = command
        for option in reversed(_output_options(lists)):
            decorated = option(decorated)
        return connection_options(decorated)  # type: ignore[no-any-return]

    return decorate


def _output_options(lists: bool) -> list[Callable[[Any], Any]]:
    options = [
        click.option("-o", "--output", type=click.Choice(FORMATS), default="table", help="Format."),
        click.option("--json", "as_json", is_flag=True, help="Short for -o json."),
        click.option("-q", "--quiet", is_flag=True, help="Only ids (or names)."),
    ]
    if lists:
        options += [
            click.option("--sort", metavar="[-]FIELD", default="", help="Sort by a field of the JSON."),
            click.option(
                "--filter",
                "filters",
                metavar="FIELD=VALUE",
                multiple=True,
                help="Also != and ~ (contains).",
            ),
            click.option("--no-trunc", is_flag=True, help="Cut nothing."),
        ]
    return options


def connection() -> Connection:
    """The settings of this call."""
    meta = click.get_current_context().meta
    return resolve({name: meta.get(_META + name) for name in ("address", "token", "token_file", "tenant")})


def ask(work: Callable[[Client], Awaitable[T]], *, retry_seconds: float = 3.0) -> T:
    """Runs one conversation with the coordinator to its end."""
    from coordinator.client import Client

    to = connection()

    async def conversation() -> T:
        async with Client(to.address, to.token, retry_seconds=retry_seconds) as client:
            return await work(client)

    return asyncio.run(conversation())


async def find_job(client: Client, reference: str) -> JobView:
    """The job of this id, of this name where exactly one live job has it, or of this unique prefix of an id."""
    from coordinator.client import ApiError
    from coordinator.client.views import is_final

    looks_like_id = _ID.match(reference) is not None
    if looks_like_id and len(reference) == _ID_LENGTH:
        try:
            return await client.job(reference)
        except ApiError as error:
            if error.status != 404:
                raise
    named = [job async for job in client.jobs(name=reference, limit=200) if job["name"] == reference]
    live = [job for job in named if not is_final(job)]
    if len(live) == 1:
        return live[0]
    if len(live) > 1:
        raise _ambiguous(reference, f"{len(live)} live jobs have the name", live)
    if looks_like_id:
        starting = [job async for job in client.jobs(id_prefix=reference, limit=5)]
        if len(starting) == 1:
            return starting[0]
        if starting:
            raise _ambiguous(reference, "several jobs have the id prefix", starting)
    hint = "see `serai jobs`"
    if named:
        hint = f"ended jobs have that name: {', '.join(job['id'] for job in named[:3])}"
    raise Stop(
        exits.NOT_FOUND,
        f"there is no job {reference!r}, or it is not yours",
        field="job",
        value=reference,
        hint=hint,
    )


def tell_detach(id: str) -> None:
    """What Ctrl-C does is said before it is needed."""
    import sys

    if is_terminal(sys.stderr):
        print(f"Ctrl-C detaches, the job goes on (`serai cancel {id}` ends it)", file=sys.stderr)


def job_exit(job: JobView) -> int:
    """The exit code of a command that waited for this job: the job's own where it has one."""
    code = job["exit_code"]
    if code is not None and (code != 0 or job["state"] == "SUCCEEDED"):
        return min(code, 255)
    if job["state"] == "SUCCEEDED":
        return exits.DONE
    return exits.NOT_STARTED if job["state"] == "FAILED" else exits.FAILED


def _ambiguous(reference: str, why: str, jobs: list[JobView]) -> Stop:
    ids = ", ".join(job["id"] for job in jobs[:5])
    return Stop(
        exits.USAGE, f"{why} {reference!r}: {ids}", field="job", value=reference, hint="use one of these ids"
    )


def _remembered() -> dict[str, Any]:
    def remember(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None:
            ctx.meta[f"{_META}{param.name}"] = value

    return {"default": None, "expose_value": False, "callback": remember}
