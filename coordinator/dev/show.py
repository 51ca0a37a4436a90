"""What the person who started the trial sees: a live picture on a terminal, lines anywhere else; then the table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import click
from rich.console import Console
from rich.live import Live

from coordinator.cli import figures
from coordinator.cli.output import Column, has_colour, is_terminal, print_table, sentence
from coordinator.cli.picture import Frame, whole
from coordinator.dev.outcome import Outcome


class Show(Protocol):
    def note(self, text: str) -> None:
        """Something that happened, in one line."""

    def frame(self, frame: Frame) -> None:
        """How things stand now."""

    def close(self) -> None: ...


def make_show() -> Show:
    return Picture() if is_terminal() else Lines()


class Lines:
    """A line for each thing that happens to a job: its states with their reasons, and both why's when it is placed."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._told: set[tuple[str, int, str]] = set()

    def note(self, text: str) -> None:
        click.echo(f"{time.monotonic() - self._begin:6.1f}s  {text}")

    def frame(self, frame: Frame) -> None:
        # STARTING gives way to RUNNING at the same place of the history, so the state belongs to what was told.
        news = []
        for job in frame.jobs:
            at = ""
            for number, happening in enumerate(job["history"]):
                at = max(
                    at, happening["at"]
                )  # a node's clock may be behind: the history is in order all the same
                news.append((at, (job["id"], number, happening["state"]), job, happening))
        for _, key, job, happening in sorted(news, key=lambda each: each[:2]):
            if key not in self._told:
                self._told.add(key)
                self._tell(job, happening)

    def close(self) -> None:
        return

    def _tell(self, job: Mapping[str, Any], happening: Mapping[str, Any]) -> None:
        where = ""
        if happening["state"] == "ALLOCATED" and job["placed"] is not None:
            where = "on " + ", ".join(sorted({task["node"] for task in job["tasks"] if task["node"]}))
        elif happening["state"] not in ("STARTING", "RUNNING"):
            where = sentence(happening["reason"])
        self.note(f"{job['tenant']:<7} {job['name']:<13} {happening['state']:<10} {where}".rstrip())
        if happening["state"] == "ALLOCATED" and job["placed"] is not None:
            click.echo(f"{'':9}{_why('chosen', sentence(job['chosen']))}")
            click.echo(f"{'':9}{_why('placed', sentence(job['placed']))}")


class Picture:
    """The live picture, with the notes above it."""

    def __init__(self) -> None:
        self._console = Console(no_color=not has_colour(), highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._is_open = False

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def frame(self, frame: Frame) -> None:
        if not self._is_open:
            self._live.start()
            self._is_open = True
        self._live.update(whole(frame, width=self._console.width), refresh=True)

    def close(self) -> None:
        if self._is_open:
            self._live.stop()
            self._is_open = False


_COLUMNS = [
    Column("JOB", "name"),
    Column("TENANT", "tenant"),
    Column("WANTED", "wanted"),
    Column("ENDED", "state"),
    Column("", "as_wanted"),
    Column("ON", "nodes"),
    Column("GPUS", "gpus"),
    Column("WAITED", "waited_seconds", right=True),
    Column("RAN", "ran_seconds", right=True),
]


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """What ran where, one row for each job; then why each was chosen, and why it was placed there (or refused)."""
    click.echo()
    print_table(_COLUMNS, [_row(each) for each in outcomes], cut=True)
    click.echo()
    for each in outcomes:
        lines = [("chosen", sentence(each.job["chosen"]))] if each.job is not None else []
        lines += [("placed" if each.nodes else "refused", each.why)]
        for number, (verb, why) in enumerate((verb, why) for verb, why in lines if why):
            click.echo(f"{each.trial.name if number == 0 else '':<13} {_why(verb, why)}")
    click.echo()


def _why(verb: str, why: str) -> str:
    """The sentence with its verb before it, unless it begins with that."""
    return why if why.startswith(verb) else f"{verb}: {why}"


def _row(each: Outcome) -> list[str]:
    job = each.job or {}
    ended = each.state
    if job.get("exit_code"):
        ended += f", exit code {job['exit_code']}"
    return [
        each.trial.name,
        each.trial.tenant,
        each.trial.wanted.text,
        ended,
        "ok" if each.is_as_wanted else "NOT AS WANTED",
        ", ".join(each.nodes) or "-",
        gpus_text(each.gpus()),
        figures.duration(job["waited_seconds"]) if job else "-",
        figures.duration(job["ran_seconds"]) if job and job["ran_seconds"] is not None else "-",
    ]


def gpus_text(pieces: Sequence[Mapping[str, Any]]) -> str:
    """`4 x 80GiB 100%`; equal slices are counted together."""
    counts: dict[str, int] = {}
    for piece in pieces:
        text = f"{figures.size(piece['memory_mib'])} {figures.compute(piece['compute_milli'])}"
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(f"{count} x {text}" if count > 1 else text for text, count in counts.items()) or "-"
