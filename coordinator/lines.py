"""The waiting jobs in lines: those of one tenant, one priority and one shape, oldest first. Owned by one `Cluster`.

A job joins the end of its line and leaves its front at once, however long the line is; anywhere else for the price of
finding its place and copying the line once for each snapshot. Snapshots share every line that has not changed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from coordinator.model import Job
from coordinator.shared import Changes
from coordinator.snapshot import SEARCH_DEPTH, JobLine, LineKey, runs_at_most_ms, shape_of
from jobspecs.spec import JobSpec

FORMS_KEPT = 10_000
# Jobs that have left the front of a line stay in its list until they are this part of it, or few in any case.
_LEFT_PART = 4
_LEFT_FEW = 64
# A tenant's log of changed lines begins anew once it is so many times as long as there are lines.
_LOG_PER_LINE = 4


class TenantLines(dict[LineKey, JobLine]):
    """The lines of a tenant as they were at one moment, and the keys of those that have come, changed or gone."""

    __slots__ = ("changes",)
    changes: Changes[LineKey]

    def __init__(self, before: TenantLines | None, keys: Iterable[LineKey]) -> None:
        """As `before`, in which these lines are to be changed at once."""
        super().__init__(before or {})
        changes = Changes[LineKey]() if before is None else before.changes
        self.changes = changes.then(keys, _LOG_PER_LINE * (len(self) + _LEFT_FEW))


class _Line:
    """A line as it is now: `jobs` from `start` on. What was lent sees of `jobs` what was there when it was lent, so that
    only the end of the list may grow; every other change is made in a list of its own."""

    __slots__ = ("jobs", "lent", "limited", "owns", "quickest", "start")

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.start = 0
        self.limited = 0
        self.quickest: int | None = None  # as `JobLine.quickest`
        self.owns = True
        self.lent: JobLine | None = None

    def __len__(self) -> int:
        return len(self.jobs) - self.start

    def add(self, job: Job) -> None:
        self._change()
        jobs, limit_ms = self.jobs, runs_at_most_ms(job)
        self.limited += limit_ms is not None
        if self.start == len(jobs) or _age(jobs[-1]) <= _age(job):
            jobs.append(job)
            if self.quickest is not None and limit_ms is not None and len(self) <= SEARCH_DEPTH:
                self.quickest = min(self.quickest, limit_ms)
        else:
            self._own()
            insort(self.jobs, job, lo=self.start, key=_age)
            self.quickest = None

    def remove(self, job: Job) -> None:
        self._change()
        if len(self) and self.jobs[self.start].id == job.id:
            self.start += 1
            gone = self.jobs[self.start - 1]
            if self.start > max(_LEFT_FEW, len(self.jobs) // _LEFT_PART):
                self._copy()
        else:
            self._own()
            place = bisect_left(self.jobs, _age(job), lo=self.start, key=_age)
            if place == len(self.jobs) or self.jobs[place].id != job.id:
                return
            gone = self.jobs.pop(place)
        limit_ms = runs_at_most_ms(gone)
        self.limited -= limit_ms is not None
        if limit_ms == self.quickest or len(self) >= SEARCH_DEPTH:
            self.quickest = None

    def _change(self) -> None:
        if self.lent is not None:
            self.quickest = self.lent.quickest
            self.lent = None

    def lend(self) -> JobLine:
        if self.lent is None:
            jobs, start = self.jobs, self.start
            self.lent = JobLine(jobs, start, len(jobs), jobs[start], self.limited, self.quickest)
            self.owns = False
        return self.lent

    def _own(self) -> None:
        if not self.owns:
            self._copy()

    def _copy(self) -> None:
        self.jobs = self.jobs[self.start :]
        self.start = 0
        self.owns = True


class WaitingLines:
    def __init__(self) -> None:
        self._lines: dict[str, dict[LineKey, _Line]] = {}
        self._lent: dict[str, TenantLines] = {}
        self._changed: dict[str, dict[LineKey, None]] = {}
        self._key_of_job: dict[str, LineKey] = {}
        self._keys: dict[tuple[object, ...], LineKey] = {}

    def key_of(self, spec: JobSpec) -> LineKey:
        """Equal specs get one and the same key: plain tuples are compared many times faster than shapes."""
        form: tuple[object, ...]
        if len(spec.tasks) == 1 and not spec.constraints:  # most jobs
            task = spec.tasks[0]
            form = spec.priority, task.count, task.gpus, task.cpu_milli, task.memory_mib
        else:
            form = (
                spec.priority,
                tuple(sorted(spec.constraints.items())),
                *[(task.count, task.gpus, task.cpu_milli, task.memory_mib) for task in spec.tasks],
            )
        key = self._keys.get(form)
        if key is None:
            if len(self._keys) >= FORMS_KEPT:
                self._keys.clear()
            key = self._keys[form] = LineKey(spec.priority, shape_of(spec))
        return key

    def add(self, job: Job) -> LineKey:
        """It joins its line, whose key is told."""
        tenant = job.tenant
        key = self._key_of_job[job.id] = self.key_of(job.spec)
        lines = self._lines.get(tenant)
        if lines is None:
            lines = self._lines[tenant] = {}
        line = lines.get(key)
        if line is None:
            line = lines[key] = _Line()
        line.add(job)
        self._change(tenant, key)
        return key

    def remove(self, job: Job) -> LineKey:
        """It leaves the line that it joined, with the record that it joined with."""
        tenant, key = job.tenant, self._key_of_job.pop(job.id)
        self._lines[tenant][key].remove(job)
        self._change(tenant, key)
        return key

    def lend(self) -> Mapping[str, TenantLines]:
        """All lines by tenant, frozen; empty ones are left out. Those of a tenant are the same object as long as none
        of them changes."""
        if self._changed:
            self._lent = dict(self._lent)
            for tenant, keys in self._changed.items():
                self._lend_of(tenant, keys)
            self._changed = {}
        return MappingProxyType(self._lent)

    def _lend_of(self, tenant: str, keys: Mapping[LineKey, None]) -> None:
        lines, lent = self._lines[tenant], TenantLines(self._lent.get(tenant), keys)
        for key in keys:
            line = lines[key]
            if line.start < len(line.jobs):
                lent[key] = line.lend()
            else:
                lent.pop(key, None)
                del lines[key]
        if lent:
            self._lent[tenant] = lent
        else:
            self._lent.pop(tenant, None)
            del self._lines[tenant]

    def _change(self, tenant: str, key: LineKey) -> None:
        changed = self._changed.get(tenant)
        if changed is None:
            changed = self._changed[tenant] = {}
        changed[key] = None


def _age(job: Job) -> tuple[int, str]:
    return job.submitted_at_ms, job.id
