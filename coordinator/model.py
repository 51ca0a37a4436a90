"""The frozen nouns of the coordinator, and the events that change its state.

Nothing here does anything. Times are whole milliseconds since 1970 (`_at_ms`), sizes whole MiB, compute whole
thousandths of a GPU. These classes are also the JSON that stands in etcd (`coordinator.records`), so a field is only
ever added, with a default.

There may be a million of them. They are msgspec's, which are made in a tenth of the time that other frozen classes
take, and since none ever refers to itself the garbage collector need not look at them (`gc=False`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from msgspec import Struct, field

from jobspecs.spec import JobSpec
from vgpu.inventory import NodeInventory, NodeReport
from vgpu.reasons import Reason
from vgpu.slices import Slice


class JobState(enum.Enum):
    """See `coordinator.lifecycle` for the edges. STARTING and RUNNING are derived from the task records."""

    PENDING = "PENDING"
    ALLOCATED = "ALLOCATED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    EVICTING = "EVICTING"
    CANCELLING = "CANCELLING"
    LOST = "LOST"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    # Every event of a job looks at its state: an attribute, and the hash of any object, cost a fifth of what the
    # property and the hash of an enumeration do.
    is_final: bool
    __hash__ = object.__hash__

    def __init__(self, name: str) -> None:
        self.is_final = name in ("SUCCEEDED", "FAILED", "CANCELLED")


class TaskState(enum.Enum):
    """What a node saw of one task. PREPARED: its isolation steps are done. EXITED: it has ended, or will never start."""

    PREPARED = "PREPARED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    EXITED = "EXITED"


class Tenant(Struct, frozen=True, gc=False):
    """`quota_memory_mib` is guaranteed in the long run; `limit_memory_mib` and `limit_compute_milli` are the hard
    ceilings of what it may hold at once (None = the cluster). `weight` divides its time share: a tenant of weight 2
    may use twice as much before it counts the same; weight 0 is served only when nobody else waits. `closing`: it is
    being deleted and takes no new jobs."""

    name: str
    quota_memory_mib: int = 0
    limit_memory_mib: int | None = None
    limit_compute_milli: int | None = None
    weight: int = 1
    created_at_ms: int = 0
    closing: bool = False
    version: int = 1


class TaskPlacement(Struct, frozen=True, gc=False):
    """Where one task of a job is, and what it holds there."""

    task: int
    node: str
    slices: tuple[Slice, ...]
    cpu_milli: int
    memory_mib: int


class Standing(Struct, frozen=True, gc=False):
    """A tenant's shares in space and in time, and the priority made of them, when a job of it was next
    (`coordinator.fairness`)."""

    space_millionths: int
    time_millionths: int
    priority_millionths: int


class Allocation(Struct, frozen=True, gc=False):
    """Everything that one attempt of a job holds. All of it is granted and freed as one.

    `standing` and `placed` tell why the job was next and why it went there, as numbers that the user is shown.
    """

    attempt: int
    tasks: tuple[TaskPlacement, ...]
    allocated_at_ms: int
    standing: Standing | None = None
    placed: Reason | None = None

    @property
    def memory_mib(self) -> int:
        memory_mib = 0
        for task in self.tasks:
            for piece in task.slices:
                memory_mib += piece.memory_mib
        return memory_mib

    @property
    def compute_milli(self) -> int:
        compute_milli = 0
        for task in self.tasks:
            for piece in task.slices:
                compute_milli += piece.compute_milli
        return compute_milli

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted({task.node for task in self.tasks}))


class Happening(Struct, frozen=True, gc=False):
    """One line of a job's history: it came into `state` because of `reason`."""

    state: JobState
    at_ms: int
    attempt: int
    reason: Reason | None = None


class PastAttempt(Struct, frozen=True, gc=False):
    """What an ended attempt held and how its tasks ended: for the user's view, and to find its output. Holds nothing."""

    allocation: Allocation
    tasks: tuple[Task, ...] = ()


class Job(Struct, frozen=True, gc=False):
    """The record of a job, in one of three folders: queue/ (PENDING), jobs/ (holds slices), done/ (final).

    `state` is one of the written states; STARTING and RUNNING come from the task records (`lifecycle.shown_state`).
    `ran_ms` sums the running time of ended attempts. `not_before_ms` is the end of a back-off. `failures` counts
    attempts that used up a retry. `past` are the newest ended attempts, `refused_by` the nodes that would not start one,
    newest last. `stop` is set once the leader has asked the nodes to end this attempt, and says why.
    """

    id: str
    spec: JobSpec
    state: JobState
    submitted_at_ms: int
    queued_at_ms: int
    attempt: int = 1
    allocation: Allocation | None = None
    reason: Reason | None = None
    exit_code: int | None = None
    started_at_ms: int | None = None
    ended_at_ms: int | None = None
    ran_ms: int = 0
    failures: int = 0
    not_before_ms: int = 0
    stop: Reason | None = None
    history: tuple[Happening, ...] = ()
    past: tuple[PastAttempt, ...] = ()
    refused_by: tuple[str, ...] = ()
    idempotency: str = ""
    version: int = 1

    @property
    def tenant(self) -> str:
        return self.spec.tenant


class Task(Struct, frozen=True, gc=False):
    """What was observed of one task of one attempt. Written by the node agent, or by the observer of an engine.

    `released`: its end is confirmed and no process of it is left on its GPUs, so its slices are free. `fault` is a
    reason code name when the task could not be run or was stopped (launch_failed, image_unavailable, out_of_memory,
    gpu_lost ...), empty for an ordinary exit. `exit_code` is None when it never ran.
    """

    job: str
    attempt: int
    task: int
    node: str
    state: TaskState
    started_at_ms: int | None = None
    ended_at_ms: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    oom_killed: bool = False
    fault: str = ""
    detail: str = ""
    released: bool = False
    container: str = ""
    version: int = 1

    @property
    def attempt_key(self) -> str:
        return f"{self.job}.{self.attempt}.{self.task}"


class NodeAdmin(Struct, frozen=True, gc=False):
    """What an administrator set: no new work (cordon), the reason, and labels that override the agent's."""

    node: str
    cordoned: bool = False
    cordon_reason: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    version: int = 1


class UsageHour(Struct, frozen=True, gc=False):
    """What a tenant used in one hour, in twelve buckets of five minutes: compute in thousandths x milliseconds and
    memory in MiB x milliseconds; and what it was entitled to of the compute. Complete up to `until_ms`."""

    tenant: str
    hour_ms: int
    until_ms: int
    compute_milli_ms: tuple[int, ...]
    memory_mib_ms: tuple[int, ...]
    entitled_milli_ms: tuple[int, ...] = ()
    version: int = 1


class MixLine(Struct, frozen=True, gc=False):
    """So many tasks of one kind: `gpus` of this compute each, and of this memory (None: all of the card's)."""

    tasks: int
    gpus: int
    compute_milli: int
    memory_mib: int | None
    model: str
    cpu_milli: int


class Mix(Struct, frozen=True, gc=False):
    """What tenants submitted up to `until_ms`, the commonest first; the far past counts less (`coordinator.mix`)."""

    until_ms: int
    lines: tuple[MixLine, ...]
    version: int = 1


# --- events: the only way the state of `coordinator.cluster` changes -------------------------------------------------


class JobSeen(Struct, frozen=True, gc=False):
    """The record of a job stands in its folder, at this modification revision."""

    job: Job
    revision: int


class JobGone(Struct, frozen=True, gc=False):
    """The record has left the folder (`queue`, `jobs` or `done`)."""

    id: str
    folder: str


class TaskSeen(Struct, frozen=True, gc=False):
    task: Task


class TaskGone(Struct, frozen=True, gc=False):
    job: str
    attempt: int
    task: int


class TenantSeen(Struct, frozen=True, gc=False):
    tenant: Tenant


class TenantGone(Struct, frozen=True, gc=False):
    name: str


class InventorySeen(Struct, frozen=True, gc=False):
    inventory: NodeInventory


class InventoryGone(Struct, frozen=True, gc=False):
    node: str


class ReportSeen(Struct, frozen=True, gc=False):
    report: NodeReport


class ReportGone(Struct, frozen=True, gc=False):
    """The node's lease ended: it has not reported in time."""

    node: str


class AdminSeen(Struct, frozen=True, gc=False):
    admin: NodeAdmin


class AdminGone(Struct, frozen=True, gc=False):
    node: str


class GrantSeen(Struct, frozen=True, gc=False):
    """`stopping`: the leader has asked the node to end it."""

    node: str
    job: str
    attempt: int
    stopping: bool


class GrantGone(Struct, frozen=True, gc=False):
    node: str
    job: str
    attempt: int


class UsageSeen(Struct, frozen=True, gc=False):
    usage: UsageHour


class MixSeen(Struct, frozen=True, gc=False):
    mix: Mix


class RecordUnreadable(Struct, frozen=True, gc=False):
    """A record could not be read. `key` is its path, `detail` why. An unreadable record of jobs/ or grants/ closes
    the nodes it may be about to new work: its use is unknown, so it is never taken for zero."""

    key: str
    detail: str


class RecordGone(Struct, frozen=True, gc=False):
    """A key that named no record, and so could not be read, is gone."""

    key: str


Event = (
    JobSeen
    | JobGone
    | TaskSeen
    | TaskGone
    | TenantSeen
    | TenantGone
    | InventorySeen
    | InventoryGone
    | ReportSeen
    | ReportGone
    | AdminSeen
    | AdminGone
    | GrantSeen
    | GrantGone
    | UsageSeen
    | MixSeen
    | RecordUnreadable
    | RecordGone
)
