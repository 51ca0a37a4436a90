"""`serai jobs`, `job`, `logs`, `cancel`, `wait`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from coordinator.cli import exits, figures
from coordinator.cli.follow import copy_output, stay
from coordinator.cli.output import Column, Shape, is_terminal, print_list, print_one, say, sentence
from coordinator.cli.session import DURATION, ask, connection, find_job, job_exit, shaped, tell_detach

if TYPE_CHECKING:
    from coordinator.client import Client
    from coordinator.client.views import JobView

STATES = (
    "PENDING",
    "ALLOCATED",
    "STARTING",
    "RUNNING",
    "EVICTING",
    "CANCELLING",
    "LOST",
    "SUCCEEDED",
    "FAILED",
    "CANCELLED",
)
# A terminal shows a screenful; a pipe gets everything.
_ON_TERMINAL = 50


def columns() -> list[Column]:
    zone = figures.zone()
    return [
        Column("ID", "id"),
        Column("NAME", "name"),
        Column("TENANT", "tenant"),
        Column("STATE", "state"),
        Column("ASKED", "spec.gpus", lambda job: figures.asked(job["spec"])),
        Column("NODES", "nodes", nodes_of),
        Column("WAITED", "waited_seconds", lambda job: figures.duration(job["waited_seconds"]), right=True),
        Column("RAN", "ran_seconds", lambda job: figures.duration(job["ran_seconds"]), right=True),
        Column(
            "EXIT",
            "exit_code",
            lambda job: "" if job["exit_code"] is None else str(job["exit_code"]),
            right=True,
        ),
        Column("PRIORITY", "priority", wide=True, right=True),
        Column("ATTEMPT", "attempt", wide=True, right=True),
        Column(
            f"SUBMITTED ({zone})", "submitted_at", lambda job: figures.moment(job["submitted_at"]), wide=True
        ),
        Column(f"ENDED ({zone})", "ended_at", lambda job: figures.moment(job["ended_at"]), wide=True),
        Column("REASON", "reason.sentence", lambda job: sentence(job["reason"])),
    ]


def nodes_of(job: Mapping[str, Any]) -> str:
    return ",".join(sorted({task["node"] for task in job["tasks"] if task.get("node")}))


@click.command()
@click.option("-A", "--all", "everyone", is_flag=True, help="All jobs you may see, not only your tenant's.")
@click.option("--tenant", help="Of one tenant [env SERAI_TENANT].")
@click.option("--state", multiple=True, type=click.Choice(STATES, case_sensitive=False), help="Repeatable.")
@click.option("--name", help="Of this name.")
@click.option("-n", "--limit", type=click.IntRange(min=0), help="At most so many, newest first (0 = all).")
@shaped(lists=True)
def jobs(
    everyone: bool,
    tenant: str | None,
    state: tuple[str, ...],
    name: str | None,
    limit: int | None,
    shape: Shape,
) -> None:
    """List jobs, newest first."""
    wanted = None if everyone else tenant or connection().tenant or None
    if limit is None:
        limit = _ON_TERMINAL if is_terminal() and shape.is_table and not (shape.sort or shape.filters) else 0

    async def work(client: Client) -> list[JobView]:
        found = client.jobs(
            tenant=wanted,
            state=",".join(state).upper() or None,
            name=name,
            sort="-submitted_at",
            limit=limit + 1 if limit else None,
        )
        return [job async for job in found]

    items = ask(work)
    print_list(
        items[:limit] if limit else items,
        columns(),
        shape,
        name="id",
        empty="no jobs; submit one: serai submit FILE",
    )
    if limit and len(items) > limit:
        say(f"the newest {limit} are shown; -n 0 shows all")


@click.command()
@click.argument("reference", metavar="JOB")
@shaped(lists=False)
def job(reference: str, shape: Shape) -> None:
    """Show one job: what it asked, what it was granted, where it is and why.

    JOB is an id, a unique prefix of one, or the name of exactly one live job."""

    async def work(client: Client) -> JobView:
        return await find_job(client, reference)

    found = ask(work)
    print_one(found, _lines(found), shape, name="id")


def _lines(job: JobView) -> list[tuple[str, str]]:
    lines = [
        ("job", job["id"]),
        ("name", job["name"]),
        ("tenant", job["tenant"]),
        ("state", f"{job['state']}{f', exit code {code}' if (code := job['exit_code']) is not None else ''}"),
        ("reason", sentence(job["reason"])),
        ("asked", figures.asked(job["spec"])),
        ("priority", str(job["priority"])),
        (
            "attempt",
            f"{job['attempt']}, {job['failures']} failed" if job["failures"] else str(job["attempt"]),
        ),
        (f"submitted ({figures.zone()})", figures.moment(job["submitted_at"])),
        ("waited", figures.duration(job["waited_seconds"])),
        ("ran", figures.duration(job["ran_seconds"])),
        ("chosen", sentence(job["chosen"])),
        ("placed", sentence(job["placed"])),
    ]
    for task in job["tasks"]:
        ended = "" if task["exit_code"] is None else f", exit code {task['exit_code']}"
        ended += ", out of memory" if task["oom_killed"] else ""
        why = " ".join(part for part in (task["fault"], task["detail"]) if part)
        lines.append(
            (
                f"task {task['task']}",
                f"{task['state'] or 'waiting'} on {task['node'] or figures.UNKNOWN}{ended} {why}".rstrip(),
            )
        )
        for piece in task["slices"]:
            held = f"{piece['isolation']}, memory by {piece['memory_by'] or figures.UNKNOWN}, compute by {piece['compute_by'] or figures.UNKNOWN}"
            size, part = figures.size(piece["memory_mib"]), figures.compute(piece["compute_milli"])
            lines.append(
                ("", f"GPU {piece['index']} {piece['model'] or ''} {piece['gpu']}: {size}, {part} ({held})")
            )
    for number, line in enumerate(job["history"]):
        text = f"{figures.moment(line['at'])}  {line['state']}  {sentence(line['reason'])}".rstrip()
        lines.append(("history" if number == 0 else "", text))
    return [(title, text) for title, text in lines if text]


@click.command()
@click.argument("reference", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Stay until the job ends, and exit with its code.")
@click.option("--task", type=click.IntRange(min=0), help="Only this task (default: all).")
@click.option("--attempt", type=click.IntRange(min=1), help="An earlier attempt.")
@click.option("--stream", type=click.Choice(["stdout", "stderr", "both"]), default="both")
@click.option(
    "--tail", "tail_bytes", type=click.IntRange(min=0), metavar="BYTES", help="Only the last bytes."
)
@shaped(lists=False)
def logs(
    reference: str,
    follow: bool,
    task: int | None,
    attempt: int | None,
    stream: str,
    tail_bytes: int | None,
    shape: Shape,
) -> int:
    """Show what a job printed: its stdout on stdout, its stderr on stderr."""

    async def work(client: Client) -> int:
        found = await find_job(client, reference)
        if follow and task is None and attempt is None and tail_bytes is None and stream == "both":
            tell_detach(found["id"])
            return job_exit(await stay(client, found["id"], show_states=False, show_output=True))
        numbers = [task] if task is not None else [each["task"] for each in found["tasks"]] or [0]
        streams = ("stdout", "stderr") if stream == "both" else (stream,)
        wanted: dict[str, Any] = {"attempt": attempt, "follow": follow, "tail_bytes": tail_bytes}
        copies = [
            copy_output(
                client.logs(found["id"], task=number, stream=each, **wanted),
                sys.stdout.buffer if each == "stdout" else sys.stderr.buffer,
                f"[{number}] " if len(numbers) > 1 else "",
            )
            for number in numbers
            for each in streams
        ]
        if not follow:
            for copy in copies:
                await copy
            return exits.DONE
        await asyncio.gather(*copies)
        return job_exit(await client.wait_for(found["id"]))

    return _detachable(reference, lambda: ask(work))


@click.command()
@click.argument("references", metavar="JOB...", nargs=-1, required=True)
@click.option("--wait", "wait_for_end", is_flag=True, help="Stay until they have ended.")
@shaped(lists=False)
def cancel(references: tuple[str, ...], wait_for_end: bool, shape: Shape) -> None:
    """Cancel jobs. One that has ended already stays as it is."""

    async def work(client: Client) -> list[JobView]:
        found = [await find_job(client, reference) for reference in references]
        ended = [await client.cancel(each["id"]) for each in found]
        if wait_for_end:
            ended = [await client.wait_for(each["id"]) for each in found]
        return ended

    _print_jobs(ask(work), shape)


@click.command()
@click.argument("references", metavar="JOB...", nargs=-1, required=True)
@click.option("--timeout", type=DURATION, help="Give up after this time, with exit code 7.")
@shaped(lists=False)
def wait(references: tuple[str, ...], timeout: float | None, shape: Shape) -> int:
    """Wait until jobs have ended; exits with the highest of their codes."""

    async def work(client: Client) -> list[JobView]:
        found = [await find_job(client, reference) for reference in references]
        tell_detach(found[0]["id"])
        waits = (client.wait_for(each["id"], timeout_seconds=timeout) for each in found)
        return list(await asyncio.gather(*waits))

    ended: list[JobView] = []

    def run() -> int:
        ended.extend(ask(work))
        return max(job_exit(each) for each in ended)

    code = _detachable(references[0], run)
    _print_jobs(ended, shape)
    return code


def _print_jobs(found: list[JobView], shape: Shape) -> None:
    if shape.format == "table":
        for each in found:
            click.echo(f"{each['id']}  {each['state']}  {sentence(each['reason'])}".rstrip())
    elif shape.format == "json" and len(found) == 1:
        click.echo(json.dumps(found[0]))
    elif found:
        print_list(found, columns(), shape, name="id")


def _detachable(reference: str, run: Any) -> int:
    try:
        return int(run())
    except KeyboardInterrupt:
        say(f"\ndetached; `serai logs -f {reference}` follows again")
        return exits.DETACHED
