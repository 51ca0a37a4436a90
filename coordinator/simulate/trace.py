"""Traces of jobs as CSV: who asked for how many GPUs, when, and how long they ran.

Columns, in any order; a file that ends in .gz is unpacked:

    tenant, submit_s, duration_s, gpus     needed. submit_s counts from the start of the trace; gpus is for each task
    job_id                                 else the jobs are numbered
    tasks                                  placed all or nothing; 1 unless given
    memory_mib, compute_milli              a slice of each GPU instead of all of it: MiB, and thousandths of its compute
    max_runtime_s                          what the user declared; empty = nothing. Without the column: the duration
    priority, withdrawn_s                  inside the tenant; when its user takes the job back if it still waits

Names of public traces are read too: num_gpus for gpus, cluster for tenant, timestamp (ISO 8601) for submit_s, duration for
duration_s.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from attrs import evolve, frozen

from vgpu.inventory import WHOLE_GPU_MILLI

UNLIMITED_MS = 1 << 62


class TraceInvalid(ValueError):
    """A trace cannot be read: names the line, the field and the value."""


@frozen
class TraceJob:
    """`tenant` by its number in the trace. `gpus` are whole cards, or slices on distinct cards of `memory_mib` and
    `compute_milli` each, in all `tasks`. `limit_ms` is what the scheduler is told of the run time, UNLIMITED_MS where
    nothing is. `withdrawn_ms`: when its user takes it back if it still waits."""

    id: str
    tenant: int
    submit_ms: int
    gpus: int
    duration_ms: int
    limit_ms: int
    withdrawn_ms: int | None = None
    tasks: int = 1
    memory_mib: int | None = None
    compute_milli: int = WHOLE_GPU_MILLI
    priority: int = 0

    @property
    def size(self) -> float:
        """In GPUs, by compute."""
        return self.gpus * self.compute_milli / WHOLE_GPU_MILLI

    @property
    def is_whole(self) -> bool:
        return self.memory_mib is None and self.compute_milli == WHOLE_GPU_MILLI and not self.priority


@frozen
class Trace:
    """Jobs in the order of their submits."""

    name: str
    tenants: Sequence[str]
    jobs: Sequence[TraceJob]

    @property
    def last_submit_ms(self) -> int:
        return self.jobs[-1].submit_ms if self.jobs else 0

    @property
    def is_whole(self) -> bool:
        """Whether every job asks for whole cards."""
        return all(job.is_whole for job in self.jobs)

    def without_limits(self) -> Trace:
        """The same where nobody declares how long a job runs."""
        return evolve(self, jobs=[evolve(job, limit_ms=UNLIMITED_MS) for job in self.jobs])

    def gpu_ms(self) -> list[float]:
        """The work of each tenant."""
        work = [0.0] * len(self.tenants)
        for job in self.jobs:
            work[job.tenant] += job.size * job.duration_ms
        return work


def read(path: Path) -> Trace:
    """A CSV file, packed with gzip if its name ends so. Raises TraceInvalid."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, ValueError, EOFError) as error:
        raise TraceInvalid(f"{path} cannot be read: {error}") from error
    return from_rows(path.name.removesuffix(".gz").removesuffix(".csv"), csv.DictReader(io.StringIO(text)))


def from_rows(name: str, rows: Iterable[Mapping[str, str]]) -> Trace:
    """Rows of any of the forms that the module describes. Raises TraceInvalid."""
    read_rows = list(rows)
    start = min((_field(row, "submit_s", "timestamp", "") for row in read_rows), default="")
    found = []
    for number, row in enumerate(read_rows, start=2):
        try:
            found.append(_job(number, row, start))
        except (KeyError, ValueError) as error:
            raise TraceInvalid(f"line {number} of {name}: {error}") from error
    found.sort(key=lambda pair: pair[1].submit_ms)
    tenants = sorted({tenant for tenant, _ in found})
    numbers = {tenant: n for n, tenant in enumerate(tenants)}
    return Trace(name, tenants, [evolve(job, tenant=numbers[tenant]) for tenant, job in found])


def _job(number: int, row: Mapping[str, str], start: str) -> tuple[str, TraceJob]:
    duration_ms = max(1, _ms(_field(row, "duration_s", "duration")))
    limit = row.get("max_runtime_s")
    declared_ms = _ms(limit) if limit else UNLIMITED_MS
    limit_ms = (
        duration_ms if limit is None else declared_ms
    )  # without the column: what users would have declared
    tasks = _whole(row, "tasks", 1, 1)
    gpus = tasks * _whole({"gpus": _field(row, "num_gpus", "gpus")}, "gpus", 1, 0)
    submit = row.get("submit_s")
    submit_ms = _ms(submit) if submit is not None else _since(_field(row, "timestamp"), start)
    memory = row.get("memory_mib")
    job = TraceJob(
        id=row.get("job_id") or f"job-{number - 2:06}",
        tenant=0,
        submit_ms=submit_ms,
        gpus=gpus,
        duration_ms=min(duration_ms, limit_ms),
        limit_ms=limit_ms,
        withdrawn_ms=_ms(row["withdrawn_s"]) if row.get("withdrawn_s") else None,
        tasks=tasks,
        memory_mib=_whole(row, "memory_mib", 0, 1) if memory else None,
        compute_milli=_whole(row, "compute_milli", WHOLE_GPU_MILLI, 1),
        priority=int(row.get("priority") or 0),
    )
    if submit_ms < 0 or job.compute_milli > WHOLE_GPU_MILLI:
        raise ValueError(f"submit_s is at least 0, compute_milli at most {WHOLE_GPU_MILLI}")
    return _field(row, "tenant", "cluster"), job


def _field(row: Mapping[str, str], *names: str) -> str:
    for name in names:
        if row.get(name):
            return row[name]
    if names[-1] == "":
        return ""
    raise KeyError(f"no column {' or '.join(names)}")


def _whole(row: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = row.get(name)
    value = int(text) if text else default
    if value < least:
        raise ValueError(f"{name} is at least {least}, not {value}")
    return value


def _ms(seconds: str) -> int:
    return round(1000 * float(seconds))


def _since(timestamp: str, start: str) -> int:
    span = datetime.fromisoformat(timestamp) - datetime.fromisoformat(start)
    return round(1000 * span.total_seconds())
