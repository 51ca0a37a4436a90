"""What a pass of the agent decides on, and the actions it may order: the input and the output of `reconcile`, as data."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from coordinator.model import Task
from jobspecs.container import ContainerSettings, Grant
from nodeagent.runner import ObservedTask, TaskKey
from vgpu.isolation.settings import Step

StepId = tuple[str, str, tuple[tuple[str, str], ...]]


def step_id(step: Step) -> StepId:
    """Two grants that ask for an equal step ask for one and the same thing."""
    return (step.kind, step.gpu, tuple(sorted(step.parameters.items())))


@frozen
class SeenGrant:
    """A grant as it stands in the store, with the revision that fences the writes about it."""

    grant: Grant
    create_revision: int


@frozen
class Failure:
    """Why a launch came to nothing; see `runner.LaunchFailed`."""

    fault: str
    detail: str
    at_ms: int
    exit_code: int | None = None


@frozen
class Limits:
    orphan_grace_ms: int = 30_000
    log_retention_ms: int = 3_600_000
    stop_deadline_ms: int = 120_000


@frozen
class View:
    """Everything that a pass decides on.

    `withdrawn`: attempts whose grant was seen to go; `unreadable`: those whose grant cannot be read, which are left alone.
    `records`: the task records that stand in the store; `in_doubt`: tasks whose record may yet say something else, since
    the answer to a write of that was lost, or is the former agent's. `busy`: tasks with an operation under way,
    `starting` those among them that are being started. `stops`: when each stop was first asked for. `failures`: launches
    that came to nothing. `steps_done`, `steps_busy`, `steps_failed`: by step id.
    `gpus`: GPU -> why nothing may start on it, empty if it may; None while the GPUs cannot be read. `on_gpu`: processes
    still on a GPU, by the task they belong to. `orphans`: first sighting of each task without a grant. `condemned`: tasks
    that the node itself ends, and why (it used more than its slice). `notes`: what else was seen of a task, for the
    detail of a bad end (an Xid).
    """

    node: str
    now_ms: int
    limits: Limits = field(factory=Limits)
    grants: tuple[SeenGrant, ...] = ()
    withdrawn: frozenset[tuple[str, int]] = frozenset()
    unreadable: frozenset[tuple[str, int]] = frozenset()
    observed: tuple[ObservedTask, ...] = ()
    records: Mapping[TaskKey, Task] = field(factory=dict)
    in_doubt: frozenset[TaskKey] = frozenset()
    busy: frozenset[TaskKey] = frozenset()
    starting: frozenset[TaskKey] = frozenset()
    stops: Mapping[TaskKey, int] = field(factory=dict)
    failures: Mapping[TaskKey, Failure] = field(factory=dict)
    steps_done: Mapping[StepId, Step] = field(factory=dict)
    steps_busy: frozenset[StepId] = frozenset()
    steps_failed: Mapping[StepId, str] = field(factory=dict)
    gpus: Mapping[str, str] | None = field(factory=dict)
    on_gpu: Mapping[TaskKey, tuple[int, ...]] = field(factory=dict)
    orphans: Mapping[TaskKey, int] = field(factory=dict)
    condemned: Mapping[TaskKey, Failure] = field(factory=dict)
    notes: Mapping[TaskKey, str] = field(factory=dict)


@frozen
class Start:
    seen: SeenGrant
    container: ContainerSettings
    key: TaskKey


@frozen
class Stop:
    """`ungranted`: ask the store once more, with a linearizable read, that there is no grant (RR-6)."""

    key: TaskKey
    grace_seconds: int
    ungranted: bool = False


@frozen
class Remove:
    key: TaskKey


@frozen
class PerformStep:
    step: Step


@frozen
class UndoStep:
    step: Step


@frozen
class WriteTask:
    """To be written only if the grant still has this create revision."""

    task: Task
    grant_revision: int


Action = Start | Stop | Remove | PerformStep | UndoStep | WriteTask
