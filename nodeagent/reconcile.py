"""What a node must do so that it matches its grants: a pure function from what is known to a list of actions.

    granted, not there, never ran        steps first, then Start                (steps failed: EXITED, released)
    granted, not there, has run          EXITED: it vanished; it never starts a second time, and a start that is under
                                         way is called off
    granted, runs                        RUNNING; Stop when the grant is stopping
    granted, ended                       EXITED; `released` once no process of it is left on its GPUs (GH-9)
    stopping, not there                  EXITED without an exit code, released
    not granted, runs                    Stop at once if the grant was seen to go, else after two sightings that lie
                                         the orphan grace apart (RR-6)
    ended and written down               Remove when its output has been kept long enough (LK-10, OB-1)

Nothing is remembered here but what the caller passes in, and an action that is asked for twice does no harm: the agent
calls this again after each change, and a write that did not reach the store is simply asked for again.

A grant of another engine (Nomad) only has its steps performed. While the GPUs of the machine cannot be read, nothing
that needs one is started or released, and nothing is stopped for that reason (RR-2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from coordinator.model import Task, TaskState
from jobspecs.container import ContainerSettings, Grant
from nodeagent.runner import Observed, ObservedTask, TaskKey
from nodeagent.view import (
    Action,
    Failure,
    PerformStep,
    Remove,
    SeenGrant,
    Start,
    StepId,
    Stop,
    UndoStep,
    View,
    WriteTask,
    step_id,
)
from vgpu.isolation.settings import Step
from vgpu.reasons import ReasonCode

# The leader ends a job at its time limit; a node does it by itself only when nobody did for this long.
TIME_LIMIT_SLACK_MS = 15_000
HIGHEST_SIGNAL = 64
# An engine may tell a long story; a transaction holds many records.
DETAIL_CHARACTERS = 2000
# Its grant, which knew the grace the user asked for, is gone.
UNGRANTED_GRACE_SECONDS = 10


def reconcile(view: View) -> tuple[Action, ...]:
    """In the order of keys; steps first, so that a daemon is there before its first client."""
    observed = {task.key: task for task in view.observed}
    actions: list[Action] = list(_steps(view, observed))
    granted: set[TaskKey] = set()
    for seen in sorted(view.grants, key=lambda seen: (seen.grant.job, seen.grant.attempt)):
        for container in sorted(seen.grant.containers, key=lambda container: container.task):
            key = TaskKey(seen.grant.job, seen.grant.attempt, container.task)
            granted.add(key)
            if seen.grant.engine != "agent":
                actions.extend(_steps_only(view, seen, container, key))
            else:
                actions.extend(_granted(view, seen, container, key, observed.get(key)))
    for task in sorted(view.observed, key=lambda task: task.key):
        is_left_alone = task.foreign or (task.key.job, task.key.attempt) in view.unreadable
        if task.key not in granted and task.key not in view.busy and not is_left_alone:
            actions.extend(_ungranted(view, task))
    return tuple(actions)


def sightings(view: View) -> dict[TaskKey, int]:
    """The first sighting of each task that is there without a grant; to be passed in as `orphans` from then on."""
    granted = {(seen.grant.job, seen.grant.attempt) for seen in view.grants}
    return {
        task.key: view.orphans.get(task.key, view.now_ms)
        for task in view.observed
        if (task.key.job, task.key.attempt) not in granted and not task.foreign
    }


def held(view: View) -> dict[TaskKey, ObservedTask]:
    """What keeps its GPUs from everyone else: all that exists, less what has ended and left no process on them."""
    return {
        task.key: task
        for task in sorted(view.observed, key=lambda task: task.key)
        if task.state is not Observed.EXITED or not _is_clean(view, task.key, bool(task.slices))
    }


def quarantined(view: View) -> dict[str, str]:
    """GPU -> why: what was told to stop on it could not be seen to end in time (GH-8), or has ended and left processes
    on it (GH-9). Such a GPU is neither free nor healthy."""
    found: dict[str, str] = {}
    for key, task in held(view).items():
        since_ms = task.ended_at_ms if task.state is Observed.EXITED else view.stops.get(key)
        if since_ms is None or view.now_ms - since_ms < view.limits.stop_deadline_ms:
            continue
        for gpu in task.gpus:
            found[gpu] = _unconfirmed(view, key, since_ms)
    return found


# --- tasks that are granted -----------------------------------------------------------------------------------------


def _granted(
    view: View, seen: SeenGrant, container: ContainerSettings, key: TaskKey, task: ObservedTask | None
) -> Iterator[Action]:
    record = view.records.get(key)
    if record is not None and record.state is TaskState.EXITED and record.released:
        yield from _after_release(view, key, container, task)
    elif task is None:
        yield from _missing(view, seen, container, key, record)
    elif task.state is Observed.CREATED:
        yield from _created(view, seen, container, key, record)
    elif task.state is Observed.RUNNING:
        yield from _running(view, seen, container, key, task)
    else:
        yield from _write(view, seen, _ended(view, seen, key, task))


def _after_release(
    view: View, key: TaskKey, container: ContainerSettings, task: ObservedTask | None
) -> Iterator[Action]:
    if task is None or key in view.busy:
        return
    if task.state is Observed.EXITED:
        yield from _expired(view, task)
    elif task.state is Observed.CREATED:
        yield Remove(key)
    else:
        # Its slices are given away already: an ended attempt never comes back.
        yield Stop(key, container.stop_grace_seconds)


def _missing(
    view: View, seen: SeenGrant, container: ContainerSettings, key: TaskKey, record: Task | None
) -> Iterator[Action]:
    if key in view.starting:
        if seen.grant.stopping or _has_run(record):
            yield Stop(key, container.stop_grace_seconds)
        else:
            yield from _write(view, seen, _task(view, key, TaskState.STARTING))
        return
    if key in view.busy:
        return
    if record is not None and _has_run(record):
        yield from _write(view, seen, _vanished(view, key, container, record))
        return
    failure = view.failures.get(key)
    if failure is not None:
        yield from _write(view, seen, _never_started(view, key, failure))
        return
    if seen.grant.stopping:
        failure = Failure("", "stopped before it was started", view.now_ms)
        yield from _write(view, seen, _never_started(view, key, failure))
        return
    failure = _cannot_start(view, container)
    if failure is not None:
        yield from _write(view, seen, _never_started(view, key, failure))
    elif _may_start(view, container):
        yield from _start(view, seen, container, key)


def _has_run(record: Task | None) -> bool:
    return record is not None and record.state in (TaskState.RUNNING, TaskState.EXITED)


def _created(
    view: View, seen: SeenGrant, container: ContainerSettings, key: TaskKey, record: Task | None
) -> Iterator[Action]:
    """It exists and never ran: the launch is under way, or an agent died in the middle of it (EX-5). If the record says
    that it has run, that was on a machine which has lost it since."""
    if key in view.starting:
        yield from _missing(view, seen, container, key, record)
    elif key in view.busy:
        return
    elif (
        seen.grant.stopping
        or _has_run(record)
        or key in view.failures
        or _cannot_start(view, container) is not None
    ):
        yield Remove(key)
    elif _may_start(view, container):
        yield from _start(view, seen, container, key)


def _start(view: View, seen: SeenGrant, container: ContainerSettings, key: TaskKey) -> Iterator[Action]:
    """What may yet be told to run, or to have ended and so to be free, is not started before its record is written once
    more: from then on that can no longer land."""
    starting = _task(view, key, TaskState.STARTING)
    if key in view.in_doubt:
        yield WriteTask(starting, seen.create_revision)
    else:
        yield from _write(view, seen, starting)
        yield Start(seen, container, key)


def _running(
    view: View, seen: SeenGrant, container: ContainerSettings, key: TaskKey, task: ObservedTask
) -> Iterator[Action]:
    since_ms = view.stops.get(key)
    written = replace(
        _task(view, key, TaskState.RUNNING), started_at_ms=task.started_at_ms, container=task.container
    )
    if since_ms is not None and view.now_ms - since_ms >= view.limits.stop_deadline_ms:
        written = replace(
            written, fault=ReasonCode.STOP_UNCONFIRMED.value, detail=_unconfirmed(view, key, since_ms)
        )
    yield from _write(view, seen, written)
    must_end = seen.grant.stopping or key in view.condemned or _is_overdue(view, seen.grant, task)
    if must_end and key not in view.busy:
        yield Stop(key, container.stop_grace_seconds)


def _cannot_start(view: View, container: ContainerSettings) -> Failure | None:
    """Why it will not start here as things are, so that the leader places it anew; None if it may, now or soon."""
    for step in container.steps:
        detail = view.steps_failed.get(step_id(step))
        if detail is not None:
            return Failure(ReasonCode.ISOLATION_STEPS_FAILED.value, detail, view.now_ms)
    for piece in container.slices:
        if view.gpus is None:
            return None
        if piece.gpu not in view.gpus:
            # Never run with other devices, or fewer, than were granted (RR-4).
            return Failure(ReasonCode.LAUNCH_FAILED.value, f"{piece.gpu} is not on this node", view.now_ms)
        if view.gpus[piece.gpu]:
            return Failure(
                ReasonCode.LAUNCH_FAILED.value, f"{piece.gpu}: {view.gpus[piece.gpu]}", view.now_ms
            )
    return None


def _may_start(view: View, container: ContainerSettings) -> bool:
    if container.slices and view.gpus is None:
        return False
    return all(step_id(step) in view.steps_done for step in container.steps)


# --- what is written about them -------------------------------------------------------------------------------------


def _write(view: View, seen: SeenGrant, task: Task) -> Iterator[Action]:
    task = replace(task, detail=task.detail[:DETAIL_CHARACTERS])
    if view.records.get(TaskKey(task.job, task.attempt, task.task)) != task:
        yield WriteTask(task, seen.create_revision)


def _task(view: View, key: TaskKey, state: TaskState) -> Task:
    return Task(key.job, key.attempt, key.task, view.node, state, container=key.name)


def _never_started(view: View, key: TaskKey, failure: Failure) -> Task:
    record = view.records.get(key)
    if record is not None and record.state is TaskState.EXITED:
        return record
    return replace(
        _task(view, key, TaskState.EXITED),
        ended_at_ms=failure.at_ms,
        exit_code=failure.exit_code,
        fault=failure.fault,
        detail=failure.detail,
        released=True,
    )


def _ended(view: View, seen: SeenGrant, key: TaskKey, task: ObservedTask) -> Task:
    """EX-2: the facts as they are; what they mean after a stop is for the leader, who knows why it asked."""
    fault, detail = "", task.detail
    if key in view.condemned:
        fault, detail = view.condemned[key].fault, view.condemned[key].detail
    elif task.oom_killed and task.exit_code != 0:
        fault = ReasonCode.OUT_OF_MEMORY.value
    elif task.exit_code is None:
        fault = ReasonCode.TASK_VANISHED.value
    elif task.exit_code != 0 and _ran_to_limit(seen.grant, task):
        fault = ReasonCode.TIME_LIMIT.value
    left = view.on_gpu.get(key, ())
    if task.exit_code != 0:
        detail = detail or view.notes.get(key, "")
    if left and not detail:
        detail = f"process {', '.join(map(str, left))} is still on its GPU"
    return Task(
        job=key.job,
        attempt=key.attempt,
        task=key.task,
        node=view.node,
        state=TaskState.EXITED,
        started_at_ms=task.started_at_ms,
        ended_at_ms=task.ended_at_ms,
        exit_code=task.exit_code,
        signal=signal_of(task.exit_code),
        oom_killed=task.oom_killed,
        fault=fault,
        detail=detail,
        released=_is_clean(view, key, bool(task.slices)),
        container=task.container or key.name,
    )


def _vanished(view: View, key: TaskKey, container: ContainerSettings, record: Task) -> Task:
    """It has run and is not there any more, so somebody else removed it. It is over, and does not run twice."""
    released = _is_clean(view, key, bool(container.slices))
    if record.state is TaskState.EXITED:
        return replace(record, released=released)
    return replace(
        record,
        state=TaskState.EXITED,
        ended_at_ms=view.now_ms,
        fault=ReasonCode.TASK_VANISHED.value,
        detail="it was removed from the node by something other than Serai, so its exit code is not known",
        released=released,
    )


def signal_of(exit_code: int | None) -> int | None:
    """A shell and Docker both write 128 + n for a death by signal n."""
    if exit_code is None or not 128 < exit_code <= 128 + HIGHEST_SIGNAL:
        return None
    return exit_code - 128


def _is_clean(view: View, key: TaskKey, has_gpus: bool) -> bool:
    """No process of it is left on a GPU. What cannot be read is not clean."""
    return not has_gpus or (view.gpus is not None and not view.on_gpu.get(key))


def _unconfirmed(view: View, key: TaskKey, since_ms: int) -> str:
    seconds = (view.now_ms - since_ms) // 60_000 * 60
    left = view.on_gpu.get(key, ())
    what = f"process {', '.join(map(str, left))} is still there" if left else "its end is not confirmed"
    return (
        f"{key} was stopped more than {max(seconds, view.limits.stop_deadline_ms // 1000)} s ago and {what}"
    )


def _ran_ms(task: ObservedTask, until_ms: int | None) -> int:
    if task.started_at_ms is None or until_ms is None:
        return 0
    return until_ms - task.started_at_ms


def _is_overdue(view: View, grant: Grant, task: ObservedTask) -> bool:
    limit_ms = grant.max_runtime_ms
    return limit_ms is not None and _ran_ms(task, view.now_ms) >= limit_ms + TIME_LIMIT_SLACK_MS


def _ran_to_limit(grant: Grant, task: ObservedTask) -> bool:
    limit_ms = grant.max_runtime_ms
    return limit_ms is not None and _ran_ms(task, task.ended_at_ms) >= limit_ms + TIME_LIMIT_SLACK_MS


# --- tasks without a grant, and steps -------------------------------------------------------------------------------


def _ungranted(view: View, task: ObservedTask) -> Iterator[Action]:
    if task.state is Observed.EXITED:
        yield from _expired(view, task)
        return
    first_ms = view.orphans.get(task.key)
    withdrawn = (task.key.job, task.key.attempt) in view.withdrawn
    seen_twice = first_ms is not None and view.now_ms - first_ms >= view.limits.orphan_grace_ms
    if withdrawn or seen_twice:
        if task.state is Observed.CREATED:
            yield Remove(task.key)
        else:
            yield Stop(task.key, grace_seconds=UNGRANTED_GRACE_SECONDS, ungranted=True)


def _expired(view: View, task: ObservedTask) -> Iterator[Action]:
    """Its output was kept for its time. A task whose end is not dated goes by when this agent first saw it ended."""
    if not _is_clean(view, task.key, bool(task.slices)):
        return
    ended_ms = task.ended_at_ms if task.ended_at_ms is not None else view.orphans.get(task.key)
    if ended_ms is not None and view.now_ms - ended_ms >= view.limits.log_retention_ms:
        yield Remove(task.key)


def _steps_only(view: View, seen: SeenGrant, container: ContainerSettings, key: TaskKey) -> Iterator[Action]:
    """Another engine starts the container once the steps are reported done; its observer writes the record then."""
    if view.records.get(key) is not None or not container.steps:
        return
    failure = _cannot_start(view, container)
    if seen.grant.stopping:
        # Not launched: the leader waits for PREPARED, which was never written.
        failure = Failure("", "stopped before it was started", view.now_ms)
    if failure is not None:
        yield from _write(view, seen, _never_started(view, key, failure))
    elif _may_start(view, container):
        yield from _write(view, seen, _task(view, key, TaskState.PREPARED))


def _steps(view: View, observed: Mapping[TaskKey, ObservedTask]) -> Iterator[Action]:
    """Which steps are wanted follows from the grants each time, so nothing is counted and no count can drift."""
    wanted: dict[StepId, Step] = {}
    for seen in view.grants:
        for container in seen.grant.containers:
            key = TaskKey(seen.grant.job, seen.grant.attempt, container.task)
            if not _is_over(view, key):
                wanted.update((step_id(step), step) for step in container.steps)
    for id, step in sorted(wanted.items()):
        if id not in view.steps_done and id not in view.steps_busy and id not in view.steps_failed:
            yield PerformStep(step)
    in_use = {gpu for task in held(view).values() for gpu in task.gpus}
    for id, step in sorted(view.steps_done.items()):
        if id not in wanted and id not in view.steps_busy and step.gpu not in in_use:
            yield UndoStep(step)


def _is_over(view: View, key: TaskKey) -> bool:
    record = view.records.get(key)
    return record is not None and record.state is TaskState.EXITED and record.released
