"""`serai submit` and `serai run`: specs from files, or one from flags."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from coordinator.cli import exits
from coordinator.cli.exits import Stop
from coordinator.cli.follow import stay
from coordinator.cli.output import Shape, is_terminal, say, sentence
from coordinator.cli.session import DURATION, ask, connection, job_exit, shaped, tell_detach

if TYPE_CHECKING:
    from coordinator.client import Client
    from coordinator.client.views import JobView

F = TypeVar("F", bound=Callable[..., Any])

# A submit that meets a coordinator that restarts is worth waiting for: it is sent again with the same key.
_RETRY_SECONDS = 20.0

_OPTIONS = [
    click.option("--image", help="Container image; the arguments are then the command."),
    click.option("--name", help="Any name, 1 to 128 characters."),
    click.option("--tenant", help="Whose job it is [env SERAI_TENANT]; needed with an admin token."),
    click.option("--tasks", type=click.IntRange(min=1), help="So many equal tasks, all or nothing."),
    click.option("--gpus", type=click.IntRange(min=0), help="GPUs for each task."),
    click.option(
        "--gpu-memory", metavar="SIZE", help="Memory of each GPU, such as 20GiB (default: all of it)."
    ),
    click.option("--gpu-compute", metavar="PART", help="Compute of each GPU: 50%, 0.5 or 500m."),
    click.option("--gpu-model", metavar="TEXT", help="GPU model contains this text."),
    click.option("--isolation", help="exclusive, mps, mig or timeslice."),
    click.option("--cpu", metavar="CORES", help="Cores for each task: 2, 0.5 or 500m."),
    click.option("--memory", metavar="SIZE", help="Main memory for each task, such as 4GiB."),
    click.option("--shm", metavar="SIZE", help="Shared memory for each task."),
    click.option("-e", "--env", "env", metavar="KEY=VALUE", multiple=True, help="Repeatable."),
    click.option(
        "--constraint", "constraints", metavar="LABEL=VALUE", multiple=True, help="Node label; repeatable."
    ),
    click.option("--priority", type=click.IntRange(-1000, 1000), help="Among your tenant's own jobs."),
    click.option("--max-runtime", metavar="TIME", help="30m, 36h or D-HH:MM:SS."),
    click.option("--retries", type=click.IntRange(0, 100), help="Start again so often when it fails."),
    click.option("--stop-grace", metavar="TIME", help="Between asking it to stop and killing it."),
    click.option("--idempotency-key", metavar="KEY", help="Same key and same job: submitted once."),
]


def spec_options(function: F) -> F:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command()
@click.argument("words", metavar="[FILE...|-] [-- COMMAND...]", nargs=-1, type=click.UNPROCESSED)
@spec_options
@click.option("--wait", "wait_for_end", is_flag=True, help="Stay until the jobs end; exit with their code.")
@click.option("-f", "--follow", is_flag=True, help="As --wait, and show the output.")
@click.option("--timeout", type=DURATION, help="With --wait: give up after this time, with exit code 7.")
@shaped(lists=False)
def submit(
    words: tuple[str, ...],
    wait_for_end: bool,
    follow: bool,
    timeout: float | None,
    shape: Shape,
    **flags: Any,
) -> int:
    """Submit jobs: from YAML or JSON files (`-` is standard input; several are accepted all or none), or one from
    flags: serai submit --image busybox:1.36 --gpus 1 -- sh -c 'echo hello'"""
    return _submit(words, flags, wait_for_end or follow, follow, timeout, shape)


@click.command()
@click.argument("words", metavar="[FILE] [-- COMMAND...]", nargs=-1, type=click.UNPROCESSED)
@spec_options
@click.option("--timeout", type=DURATION, help="Give up after this time, with exit code 7.")
@shaped(lists=False)
def run(words: tuple[str, ...], timeout: float | None, shape: Shape, **flags: Any) -> int:
    """Submit a job, show its output, and exit with its code."""
    return _submit(words, flags, True, True, timeout, shape)


def _submit(
    words: tuple[str, ...],
    flags: dict[str, Any],
    stays: bool,
    follows: bool,
    timeout: float | None,
    shape: Shape,
) -> int:
    specs = read_specs(words, flags, connection().tenant)
    key = flags["idempotency_key"] or ""
    submitted: list[JobView] = []
    ended: list[JobView] = []

    async def work(client: Client) -> None:
        if len(specs) == 1:
            submitted.append(await client.submit(specs[0], idempotency_key=key))
        else:
            submitted.extend(await client.submit(specs, idempotency_key=key))
        if stays:
            _tell(submitted, shape)
            tell_detach(submitted[0]["id"])
            ended.extend(await _until_ended(client, submitted, follows, timeout))

    try:
        ask(work, retry_seconds=_RETRY_SECONDS)
    except KeyboardInterrupt:
        if not submitted:
            raise
        say(f"\ndetached; `serai logs -f {submitted[0]['id']}` follows again")
        return exits.DETACHED
    if not stays or shape.is_data:
        _print(ended if stays else submitted, shape)
    for job in ended:
        if job["state"] != "SUCCEEDED":
            say(f"{job['id']} {job['state']}: {sentence(job['reason'])}")
    return max((job_exit(job) for job in ended), default=exits.DONE)


async def _until_ended(
    client: Client, jobs: list[JobView], follows: bool, timeout: float | None
) -> list[JobView]:
    """Stays with the jobs, one after the other, until all have ended; `timeout` is for all of them."""
    import asyncio

    from coordinator.client import WaitedTooLong

    try:
        async with asyncio.timeout(timeout):
            return [await stay(client, job["id"], show_states=True, show_output=follows) for job in jobs]
    except TimeoutError:
        what = jobs[0]["id"] if len(jobs) == 1 else f"{len(jobs)} jobs"
        raise WaitedTooLong(f"{what} not ended within {timeout:g} s; what lives goes on") from None


def read_specs(words: tuple[str, ...], flags: dict[str, Any], tenant: str) -> list[dict[str, Any]]:
    """The specs that are meant: of the files, each with the flags on top, or one of the flags alone."""
    given = spec_of_flags(flags)
    if flags["image"]:
        if words:
            given["command"] = list(words)
        specs = [{"name": _name_of(given), **given}]
    elif not words:
        raise Stop(
            exits.USAGE,
            "nothing to submit",
            field="FILE",
            hint="name a file, `-`, or use --image IMAGE -- COMMAND",
        )
    else:
        specs = [{**spec, **given} for word in words for spec in read_file(word)]
    if tenant:
        specs = [{"tenant": tenant, **spec} for spec in specs]
    return specs


def spec_of_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """Only what was given; the words of the spec."""
    spec = {
        name: flags[name]
        for name in (
            "name",
            "tenant",
            "image",
            "tasks",
            "cpu",
            "memory",
            "shm",
            "priority",
            "max_runtime",
            "retries",
        )
        if flags[name] is not None
    }
    if flags["stop_grace"] is not None:
        spec["stop_grace"] = flags["stop_grace"]
    if flags["env"]:
        spec["env"] = _pairs(flags["env"], "--env")
    if flags["constraints"]:
        spec["constraints"] = _pairs(flags["constraints"], "--constraint")
    pieces = {
        "count": flags["gpus"],
        "memory": flags["gpu_memory"],
        "compute": flags["gpu_compute"],
        "model": flags["gpu_model"],
        "isolation": flags["isolation"],
    }
    gpus = {name: value for name, value in pieces.items() if value is not None}
    if gpus:
        spec["gpus"] = {"count": 1, **gpus}
    return spec


def read_file(name: str) -> list[dict[str, Any]]:
    """The specs of one file: one, a list, or several YAML documents. Read by the same strict rules as in the API."""
    from jobspecs.documents import DocumentInvalid, parse_json, parse_yaml

    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
    except OSError as error:
        hint = "a command needs --image IMAGE" if not name.endswith((".yaml", ".yml", ".json")) else None
        raise Stop(exits.USAGE, f"{name}: {error.strerror}", field="FILE", value=name, hint=hint) from None
    except UnicodeDecodeError:
        raise Stop(exits.REFUSED, f"{name} is not text", field="FILE", value=name) from None
    documents = []
    for line, part in _documents(text):
        try:
            documents.append(parse_json(part) if name.endswith(".json") else parse_yaml(part))
        except DocumentInvalid as error:
            where = f", line {error.line + line}" if error.line else ""
            raise Stop(exits.REFUSED, f"{name}{where}: {error.message}", field="FILE", value=name) from None
    specs: list[dict[str, Any]] = []
    for document in documents:
        for spec in document if isinstance(document, list) else [document]:
            if not isinstance(spec, dict):
                raise Stop(
                    exits.REFUSED, f"{name}: a job is a mapping, not {spec!r}", field="FILE", value=spec
                )
            specs.append(spec)
    if not specs:
        raise Stop(exits.REFUSED, f"{name} holds no job", field="FILE", value=name)
    return specs


def _documents(text: str) -> list[tuple[int, str]]:
    """The YAML documents of a text, each with the number of lines before it; those without content are left out."""
    found: list[tuple[int, str]] = []
    line = 0
    for part in re.split(r"(?m)^---(?=\s|$)", text):
        if any(row.strip() and not row.lstrip().startswith(("#", "...")) for row in part.splitlines()):
            found.append((line, part))
        line += part.count("\n")
    return found


def _pairs(texts: tuple[str, ...], option: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise Stop(exits.USAGE, f"{option} {text!r} is not KEY=VALUE", field=option, value=text)
        pairs[name] = value
    return pairs


def _name_of(spec: dict[str, Any]) -> str:
    """A job from flags alone is called after its image."""
    return str(spec["image"]).rsplit("/", 1)[-1].split("@")[0].split(":")[0] or "job"


def _tell(jobs: list[JobView], shape: Shape) -> None:
    for job in jobs:
        if not shape.is_data:
            say(f"submitted {job['id']} ({job['name']})")


def _print(jobs: list[JobView], shape: Shape) -> None:
    if shape.format == "json":
        click.echo(json.dumps(jobs[0] if len(jobs) == 1 else {"items": jobs}))
    elif shape.format == "jsonl":
        for job in jobs:
            click.echo(json.dumps(job))
    elif is_terminal() and shape.format != "name":
        for job in jobs:
            click.echo(f"submitted {job['id']} ({job['name']}); next: serai logs -f {job['id']}")
    else:
        for job in jobs:
            click.echo(job["id"])
