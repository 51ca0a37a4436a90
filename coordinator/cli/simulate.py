"""`serai simulate`: what a policy would have made of a trace. Needs no coordinator."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from attrs import evolve
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from coordinator.cli import exits
from coordinator.cli.exits import Stop
from coordinator.config import FairnessSettings
from coordinator.fairness import POLICIES
from coordinator.simulate.drawing import picture
from coordinator.simulate.hardware import HardwareInvalid, hardware
from coordinator.simulate.study import Study, StudyInvalid, quotas_of, study
from coordinator.simulate.trace import Trace, TraceInvalid, read

_FIGURES = (
    ("share error E", "share_error", "%"),
    ("greatest lag", "max_lag_gpu_hours", "GPU-hours"),
    ("Jain index", "jain", ""),
    ("rho, worst", "rho_worst", ""),
    ("rho, p99", "rho_p99", ""),
    ("rho above 1.05", "rho_unfair_share", "%"),
    ("tenant rho, worst", "tenant_rho_worst", ""),
    ("sharing anomalies", "anomalies", "tenants"),
    ("completion, mean", "jct_mean_hours", "h"),
    ("completion, median", "jct_median_hours", "h"),
    ("completion, p99", "jct_p99_hours", "h"),
    ("wait, mean", "wait_mean_hours", "h"),
    ("wait, p99", "wait_p99_hours", "h"),
    ("makespan", "makespan_hours", "h"),
    ("use", "utilisation", "%"),
    ("fragmentation", "fragmentation", "%"),
    ("jobs that ended", "jobs", ""),
)
_TENANT = (
    ("tenant", "tenant"), ("quota", "quota_gpus"), ("jobs", "jobs"), ("GPU-hours", "gpu_hours"),
    ("received %", "received_share"), ("wait mean h", "wait_mean_hours"), ("wait p99 h", "wait_p99_hours"),
    ("alone, mean h", "wait_alone_hours"), ("rho", "rho"),
)  # fmt: skip


@click.command()
@click.argument("trace", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--nodes",
    required=True,
    metavar="SPEC",
    help="8x8 (nodes x GPUs), 8x8@80,4x2@24 (GiB), or 64 GPUs without nodes.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=["serai"],
    show_default=True,
    type=click.Choice(sorted(POLICIES)),
    help="Several are compared.",
)
@click.option("--quotas", default="equal", show_default=True, help="equal, gpu-hours, or TENANT=PART,...")
@click.option("--no-runtimes", is_flag=True, help="Nobody declares how long a job runs.")
@click.option(
    "--exact", is_flag=True, help="On the core itself also where whole GPUs would go through the fast pool."
)
@click.option("--max-wait-hours", type=click.IntRange(min=0), help="The bounded wait.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("simulation"),
    show_default=True,
    help="Folder for JSON, CSV and pictures.",
)
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def simulate(
    trace: Path, nodes: str, policies: Sequence[str], quotas: str, no_runtimes: bool, exact: bool,
    max_wait_hours: int | None, out: Path, output: str,
) -> None:  # fmt: skip
    """Replay TRACE (CSV) on a cluster of --nodes under one or more policies.

    Columns: tenant, submit_s, duration_s, gpus; optional job_id, tasks, memory_mib, compute_milli, max_runtime_s,
    priority, withdrawn_s. Prints the measures, and writes into --out for each policy POLICY.json, POLICY.csv (a
    line for each job) and POLICY.svg (use by tenant over time).
    """
    try:
        jobs, machines = read(trace), hardware(nodes)
        parts = quotas_of(jobs, quotas)
    except (TraceInvalid, HardwareInvalid, StudyInvalid) as error:
        raise Stop(exits.USAGE, str(error)) from error
    if not jobs.jobs:
        raise Stop(exits.USAGE, f"{trace} holds no jobs")
    jobs = jobs.without_limits() if no_runtimes else jobs
    fairness = FairnessSettings()
    if max_wait_hours is not None:
        fairness = evolve(fairness, max_wait_seconds=3600 * max_wait_hours)
    console = Console(stderr=output == "json")
    studies = []
    for policy in dict.fromkeys(policies):
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task(policy, total=len(jobs.jobs))
            tick = partial(_tick, progress, bar)
            studies.append(study(jobs, machines, parts, evolve(fairness, policy=policy), exact, tick))
    out.mkdir(parents=True, exist_ok=True)
    for one in studies:
        _write(one, out, nodes)
    if output == "json":
        click.echo(json.dumps([document(one, nodes) for one in studies], indent=1))
    else:
        _show(console, studies, nodes)
        click.echo(f"written to {out}/")


def _tick(progress: Progress, bar: TaskID, done: int) -> None:
    progress.update(bar, completed=done)


def document(one: Study, nodes: str) -> dict[str, Any]:
    """What is found of one policy, as data."""
    return {
        "trace": one.trace.name,
        "nodes": nodes,
        "gpus": one.hardware.gpus,
        "policy": one.policy,
        "core": one.core,
        **one.figures,
        "tenants": list(one.tenants),
    }


def _write(one: Study, out: Path, nodes: str) -> None:
    (out / f"{one.policy}.json").write_text(json.dumps(document(one, nodes), indent=1) + "\n")
    (out / f"{one.policy}.csv").write_text(_jobs(one.trace, one))
    title = f"{one.trace.name} on {nodes}, {one.policy}"
    (out / f"{one.policy}.svg").write_text(
        picture(title, one.trace.tenants, one.outcome.meter.timeline, one.hardware.gpus)
    )


def _jobs(trace: Trace, one: Study) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job_id", "tenant", "gpus", "submit_s", "start_s", "end_s", "wait_s"])
    for n, job in enumerate(trace.jobs):
        start_ms, end_ms = one.outcome.starts_ms[n], one.outcome.meter.ends_ms[n]
        times = ["" if at is None else at / 1000 for at in (start_ms, end_ms)]
        wait = "" if start_ms is None else (start_ms - job.submit_ms) / 1000
        writer.writerow([job.id, trace.tenants[job.tenant], job.size, job.submit_ms / 1000, *times, wait])
    return text.getvalue()


def _show(console: Console, studies: Sequence[Study], nodes: str) -> None:
    table = Table(title=f"{studies[0].trace.name} on {nodes}", title_justify="left", box=None)
    table.add_column("")
    for one in studies:
        table.add_column(one.policy, justify="right")
    for title, name, unit in _FIGURES:
        table.add_row(title, *(_figure(one.figures[name], unit) for one in studies))
    console.print(table)
    for one in studies:
        _show_tenants(console, one)


def _show_tenants(console: Console, one: Study) -> None:
    table = Table(title=f"\ntenants under {one.policy}", title_justify="left", box=None)
    for title, name in _TENANT:
        table.add_column(title, justify="left" if name == "tenant" else "right")
    for row in one.tenants:
        table.add_row(*(_figure(row[name], "") for _, name in _TENANT))
    console.print(table)


def _figure(value: float | int | str, unit: str) -> str:
    text = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
    return f"{text} {unit}".rstrip()
