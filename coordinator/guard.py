"""So that one record which the core fails on does not stop everybody: such a job is found and set aside for a while.

    1. Who plans tries a failing plan once more with a cold memo, since what was kept from earlier cycles may be at fault.
    2. If that fails too, `search` says which waiting jobs to leave out of the next tries, and is told how they went. It
       lets the jobs back in by halves, first whole lines (what fails is mostly a shape) and then the jobs of a line that
       failed, so that a bad job among 100,000 takes some forty plans and the number of plans has an end.
    3. Whoever is at fault waits (`Aside`), with a reason that says so, and is tried again after a few minutes.

A fault that is there with nobody waiting is not of a job: then nobody is set aside, and nothing is planned for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence, Set

from attrs import evolve

from coordinator.cycle import Plan
from coordinator.lifecycle import AllocationIncomplete
from coordinator.model import Job
from coordinator.snapshot import JobLine, Snapshot
from vgpu.reasons import Reason, ReasonCode

ASIDE_MS = 5 * 60 * 1000
# Plans that one search may make: enough for some twenty bad lines among thousands, and one bad job in a line of 30,000.
MOST_TRIES = 400
MOST_TRIES_IN_LINE = 32

# Jobs of one shape; one job.
Unit = Sequence[str]
# Yields the jobs to leave out, is sent the error of the plan without them, and returns the jobs at fault.
Search = Generator[Set[str], Exception | None, Mapping[str, Exception]]


def without(snapshot: Snapshot, ids: Collection[str]) -> Snapshot:
    """The snapshot as if these waiting jobs were not there."""
    out = {id for id in ids if id in snapshot.waiting_jobs}
    if not out:
        return snapshot
    lines = dict(snapshot.lines)
    for tenant in {snapshot.waiting_jobs[id].tenant for id in out}:
        kept = {
            key: JobLine.of(left)
            for key, line in lines.pop(tenant).items()
            if (left := [job for job in line if job.id not in out])
        }
        if kept:
            lines[tenant] = kept
    waiting = {id: job for id, job in snapshot.waiting_jobs.items() if id not in out}
    return evolve(snapshot, waiting_jobs=waiting, lines=lines)


def search(snapshot: Snapshot) -> Search:
    """The jobs on which planning fails, each with the error; empty where it fails with nobody waiting. Planning without
    them has succeeded. Jobs for which the tries did not last are among them."""
    lines = [
        tuple(job.id for job in line)
        for tenant in sorted(snapshot.lines)
        for line in snapshot.lines[tenant].values()
    ]
    out = set(snapshot.waiting_jobs)
    last = yield frozenset(out)
    if last is not None:
        return {}
    at_fault: dict[str, Exception] = {}
    for line, error in (yield from _narrow(lines, out, MOST_TRIES)):
        alone: Sequence[Unit] = [(id,) for id in line]
        bad = (yield from _narrow(alone, out, MOST_TRIES_IN_LINE)) if len(line) > 1 else [(line, error)]
        at_fault |= {id: fault for (id,), fault in bad}
        last = error
    for id in sorted(out - at_fault.keys()):
        at_fault[id] = last or RuntimeError("not tried")
    return at_fault


def _narrow(
    units: Sequence[Unit], out: set[str], tries: int
) -> Generator[Set[str], Exception | None, list[tuple[Unit, Exception]]]:
    """The units that fail beside all that have not; those are taken from `out`."""
    failing = []
    groups = [units] if units else []
    while groups and tries:
        group, tries = groups.pop(), tries - 1
        back = {id for unit in group for id in unit}
        error = yield frozenset(out - back)
        if error is None:
            out -= back
        elif len(group) == 1:
            failing.append((group[0], error))
        else:
            middle = len(group) // 2
            groups += [group[middle:], group[:middle]]
    return failing


def planned(snapshot: Snapshot, plan: Callable[[Snapshot], Plan]) -> tuple[Plan, Mapping[str, Exception]]:
    """A plan without the jobs on which `plan` fails, and those. Raises what it raises with nobody waiting."""
    try:
        return plan(snapshot), {}
    except Exception:
        tries = search(snapshot)
    out = next(tries)
    while True:
        error = None
        try:
            plan(without(snapshot, out))
        except Exception as failure:
            error = failure
        try:
            out = tries.send(error)
        except StopIteration as end:
            at_fault: Mapping[str, Exception] = end.value
            return plan(without(snapshot, at_fault)), at_fault


def reason_of(error: Exception) -> Reason:
    """What its user is told. An error of somewhere deep may quote what nobody else should read; the log has it."""
    detail = str(error) if isinstance(error, AllocationIncomplete) else type(error).__name__
    return Reason(ReasonCode.INTERNAL_ERROR, {"retry_seconds": ASIDE_MS // 1000}, detail=detail)


def is_marked(job: Job) -> bool:
    """Whether the leader has written to the record that it set the job aside."""
    return job.reason is not None and job.reason.code is ReasonCode.INTERNAL_ERROR


class Aside:
    """The waiting jobs that are left out of planning, by one leader, each for a while."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[int, Reason]] = {}

    def add(self, id: str, error: Exception, now_ms: int) -> None:
        self._until[id] = now_ms + ASIDE_MS, reason_of(error)

    def left_by(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot without them. Those whose time is over, and those that do not wait any more, are forgotten."""
        self._until = {
            id: (until_ms, reason)
            for id, (until_ms, reason) in self._until.items()
            if until_ms > snapshot.now_ms and id in snapshot.waiting_jobs
        }
        return without(snapshot, self._until)

    @property
    def reasons(self) -> Mapping[str, Reason]:
        return {id: reason for id, (_, reason) in self._until.items()}

    @property
    def due_ms(self) -> int | None:
        """When the first of them is tried again."""
        return min((until_ms for until_ms, _ in self._until.values()), default=None)
