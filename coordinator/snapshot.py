"""The frozen input of one cycle: what the cluster looked like at one revision, with one `now`.

Everything that a decision depends on stands in here. Waiting jobs stand in lines: those of one tenant, one priority
and one shape, oldest first, since they are all answered alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol, overload

from attrs import field, frozen
from msgspec import Struct

from coordinator.model import Job, Task, Tenant
from coordinator.nodes import NodeView, ViewLog
from coordinator.shared import Changes
from coordinator.usage import Use
from coordinator.worth import Worth
from jobspecs.spec import JobSpec
from vgpu.inventory import Gpu, NodeInventory
from vgpu.slices import SliceRequest
from vgpu.topology import TopologyCosts


class FairnessNumbers(Protocol):
    """The part of the fairness settings that the state of the cluster depends on."""

    @property
    def window_seconds(self) -> int: ...
    @property
    def max_wait_seconds(self) -> int: ...


class ClusterSettings(Protocol):
    """What the core reads of `coordinator.config.Settings`, which stands above it."""

    @property
    def lost_seconds(self) -> int: ...
    @property
    def mass_silence_percent(self) -> int: ...
    @property
    def mass_silence_hold_seconds(self) -> int: ...
    @property
    def launch_deadline_seconds(self) -> int: ...
    @property
    def stop_deadline_seconds(self) -> int: ...
    @property
    def launch_retries(self) -> int: ...
    @property
    def back_off_seconds(self) -> int: ...
    @property
    def fairness(self) -> FairnessNumbers: ...
    @property
    def topology(self) -> TopologyCosts: ...


class TaskShape(Struct, frozen=True, cache_hash=True):
    """What placement must know of `count` equal tasks."""

    count: int
    gpus: SliceRequest
    cpu_milli: int
    memory_mib: int


class Shape(Struct, frozen=True, cache_hash=True, dict=True):
    """What placement must know of a job: jobs of one shape get one answer. Tasks keep their order and numbers."""

    tasks: tuple[TaskShape, ...]
    constraints: tuple[tuple[str, str], ...] = ()

    @cached_property
    def task_count(self) -> int:
        return sum(task.count for task in self.tasks)

    @cached_property
    def only_task(self) -> TaskShape | None:
        """The one task that it has; None for a gang, or for nothing."""
        return next(task for task in self.tasks if task.count) if self.task_count == 1 else None

    @cached_property
    def gpu_count(self) -> int:
        return sum(task.count * task.gpus.count for task in self.tasks)

    @cached_property
    def compute_milli(self) -> int:
        return sum(task.count * task.gpus.count * task.gpus.compute_milli for task in self.tasks)

    @cached_property
    def cpu_milli(self) -> int:
        return sum(task.count * task.cpu_milli for task in self.tasks)


# Equal shapes are one object, so that they are compared by identity wherever they are looked up. A memo: it may be
# emptied at any time, and is once it is large.
_TASKS: dict[TaskShape, TaskShape] = {}
_SHAPES: dict[Shape, Shape] = {}
_MOST_SHAPES = 20_000
# A search for a job that may start beside a reservation looks at so many of a line.
SEARCH_DEPTH = 500
NEVER_MS = 1 << 62


def shape_of(spec: JobSpec) -> Shape:
    if len(_SHAPES) > _MOST_SHAPES:
        _TASKS.clear()
        _SHAPES.clear()
    tasks = (TaskShape(task.count, task.gpus, task.cpu_milli, task.memory_mib) for task in spec.tasks)
    shape = Shape(
        tuple([_TASKS.setdefault(task, task) for task in tasks]),
        tuple(sorted(spec.constraints.items())) if spec.constraints else (),
    )
    return _SHAPES.setdefault(shape, shape)


class LineKey(Struct, frozen=True, cache_hash=True):
    priority: int
    shape: Shape


def runs_at_most_ms(job: Job) -> int | None:
    """How long it runs from now on at most; None where nobody knows."""
    seconds = job.spec.max_runtime_seconds
    return None if seconds is None else 1000 * seconds - job.ran_ms


class JobLine(Struct, eq=False, gc=False):
    """The waiting jobs of one tenant, one priority and one shape, oldest first, as they were at one moment: `jobs` from
    `start` to `stop`, a list that only grows behind it. It is never empty. `first` is the oldest job, `limited` how many
    have a limit of their time."""

    jobs: list[Job]
    start: int
    stop: int
    first: Job
    limited: int
    quickest: int | None = None  # `quickest_ms`, once somebody has asked

    @classmethod
    def of(cls, jobs: Iterable[Job]) -> JobLine:
        """A line of these jobs, in their order."""
        line = [*jobs]
        limited = sum(job.spec.max_runtime_seconds is not None for job in line)
        return cls(line, 0, len(line), line[0], limited)

    @property
    def quickest_ms(self) -> int:
        """How long the job with a limit runs at most that runs shortest, as far as a search goes."""
        if self.quickest is None:
            limits = map(runs_at_most_ms, self[:SEARCH_DEPTH])
            self.quickest = min([limit for limit in limits if limit is not None], default=NEVER_MS)
        return self.quickest

    def __len__(self) -> int:
        return self.stop - self.start

    @overload
    def __getitem__(self, place: int) -> Job: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Job, ...]: ...
    def __getitem__(self, place: int | slice) -> Job | tuple[Job, ...]:
        if isinstance(place, slice):
            places = range(self.start, self.stop)[place]
            return tuple([self.jobs[at] for at in places])
        at = place + (self.start if place >= 0 else self.stop)
        if self.start <= at < self.stop:
            return self.jobs[at]
        raise IndexError(place)

    def __iter__(self) -> Iterator[Job]:
        return map(self.jobs.__getitem__, range(self.start, self.stop))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobLine | Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"JobLine({[job.id for job in self]})"


Lines = Mapping[LineKey, JobLine]


@frozen(eq=False)
class Snapshot:
    """`jobs` hold slices, `waiting_jobs` do not; `lines` are the latter in order, by tenant. `tasks` go by (job, attempt).
    `held` is what each tenant holds now, `usage` its integral over the window, `entitled` that of the compute it was
    entitled to; `withdrawn` tells when a tenant last took back a job for which slices were reserved. `restless` are the
    live jobs that may have to be settled. `next_due_ms` is the next moment at which time alone changes something.
    `silent_together`: nodes that fell silent at once and are not given up for it.
    `clocks_off`: by how many seconds the clocks of nodes are ahead, or behind, of those that are off.
    `news` is `Cluster.news`: of two snapshots of one cluster with the same, the later needs no cycle.
    `cluster_memory_mib` and `cluster_compute_milli` are the GPUs of all nodes that are not given up: what a tenant's
    shares are shares of. `kinds` are the kinds of GPU on those nodes that can be used at all, the smallest first."""

    revision: int
    now_ms: int
    settings: ClusterSettings
    nodes: Mapping[str, NodeView]
    jobs: Mapping[str, Job]
    waiting_jobs: Mapping[str, Job]
    lines: Mapping[str, Lines]
    done: Mapping[str, Job]
    tenants: Mapping[str, Tenant]
    tasks: Mapping[tuple[str, int], Mapping[int, Task]]
    held: Mapping[str, Use]
    usage: Mapping[str, Use]
    entitled: Mapping[str, int] = field(factory=dict)
    withdrawn: Mapping[str, int] = field(factory=dict)
    restless: frozenset[str] = frozenset()
    unreadable: tuple[str, ...] = ()
    silent_together: int = 0
    clocks_off: Mapping[str, int] = field(factory=dict)
    next_due_ms: int | None = None
    worth: Worth | None = None
    news: int = 0
    cluster_memory_mib: int = 0
    cluster_compute_milli: int = 0
    kinds: tuple[Gpu, ...] = ()
    node_log: ViewLog | None = None

    @property
    def waiting(self) -> Collection[Job]:
        return self.waiting_jobs.values()

    def inventories_of(self, nodes: Sequence[str]) -> Mapping[str, NodeInventory]:
        views = {name: self.nodes[name].inventory for name in nodes if name in self.nodes}
        return {name: inventory for name, inventory in views.items() if inventory is not None}

    @property
    def view_log(self) -> ViewLog:
        """The log of its nodes, which tells those that have come, changed or gone since that of an earlier snapshot, and
        for which nobody has to keep that one. One of its own where these are not the nodes of `node_log`: then all of
        them must be looked at."""
        log = self.node_log
        return log if log is not None and log.views is self.nodes else ViewLog(self.nodes, Changes())

    def job(self, id: str) -> Job | None:
        """Live, waiting, or ended and still known."""
        return self.jobs.get(id) or self.waiting_jobs.get(id) or self.done.get(id)

    def tasks_of(self, job: Job) -> Mapping[int, Task]:
        """What was seen of the present attempt, by task number."""
        return self.tasks.get((job.id, job.attempt), {})

    def tenant(self, name: str) -> Tenant:
        """A tenant whose record is gone still counts, with no quota of its own (QT-4)."""
        return self.tenants.get(name) or Tenant(name)
