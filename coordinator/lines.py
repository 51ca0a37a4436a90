"""The waiting jobs in lines: those of one tenant, one priority and one shape, oldest first. Owned by one `Cluster`.

A job joins and leaves its line for the price of finding its place. Snapshots share every line that has not changed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from types import MappingProxyType

from coordinator.model import Job
from coordinator.snapshot import LineKey, shape_of
from jobspecs.spec import JobSpec

FORMS_KEPT = 10_000


class WaitingLines:
    def __init__(self) -> None:
        self._frozen: dict[str, Mapping[LineKey, tuple[Job, ...]]] = {}
        self._changed: dict[str, dict[LineKey, list[Job]]] = {}
        self._keys: dict[tuple[object, ...], LineKey] = {}

    def key_of(self, spec: JobSpec) -> LineKey:
        """Equal specs get one and the same key: plain tuples are compared many times faster than shapes."""
        form = (
            spec.priority,
            tuple(sorted(spec.constraints.items())) if spec.constraints else (),
            *[
                (
                    task.count,
                    task.gpus.count,
                    task.gpus.memory_mib,
                    task.gpus.compute_milli,
                    task.gpus.model,
                    task.gpus.isolation,
                    task.cpu_milli,
                    task.memory_mib,
                )
                for task in spec.tasks
            ],
        )
        key = self._keys.get(form)
        if key is None:
            if len(self._keys) >= FORMS_KEPT:
                self._keys.clear()
            key = self._keys[form] = LineKey(spec.priority, shape_of(spec))
        return key

    def add(self, job: Job, key: LineKey) -> None:
        line = self._line(job.tenant, key)
        if not line or _age(line[-1]) <= _age(job):
            line.append(job)
        else:
            insort(line, job, key=_age)

    def remove(self, job: Job, key: LineKey) -> None:
        line = self._line(job.tenant, key)
        place = bisect_left(line, _age(job), key=_age)
        if place < len(line) and line[place].id == job.id:
            del line[place]

    def lend(self) -> Mapping[str, Mapping[LineKey, tuple[Job, ...]]]:
        """All lines by tenant, frozen; empty ones are left out."""
        if self._changed:
            frozen = dict(self._frozen)
            for tenant, changed in self._changed.items():
                lines = {**frozen.pop(tenant, {}), **{key: tuple(jobs) for key, jobs in changed.items()}}
                if any(lines.values()):
                    frozen[tenant] = {key: jobs for key, jobs in lines.items() if jobs}
            self._frozen = frozen
            self._changed = {}
        return MappingProxyType(self._frozen)

    def _line(self, tenant: str, key: LineKey) -> list[Job]:
        lines = self._changed.setdefault(tenant, {})
        if key not in lines:
            lines[key] = list(self._frozen.get(tenant, {}).get(key, ()))
        return lines[key]


def _age(job: Job) -> tuple[int, str]:
    return job.submitted_at_ms, job.id
