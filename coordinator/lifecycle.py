"""The states of a job, the one table of transitions between them, and what has to be written now.

                      +-------------------- back off, try again ---------------------+
                      v                                                              |
    submit -> PENDING ---> ALLOCATED ---> STARTING ---> RUNNING ---> SUCCEEDED       |
                 |             |              |            +-------> FAILED <---+    |
                 |             +--------------+------------+                    |    |
                 |             v              v            v                    |    |
                 |         EVICTING ------- LOST ----------+--------------------+----+
                 |             |              |
                 |             v              v
                 +-----> CANCELLING ---> CANCELLED

STARTING and RUNNING are read from the task records (`shown_state`) and never written: in the store a job goes from
ALLOCATED to wherever its tasks ended. `settle` is a function of the snapshot alone, so every leader comes to the same
end, and doing it twice is harmless. Slices are freed only by an end that the nodes have confirmed, or with a node
that is given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import frozen
from msgspec.structs import replace

from coordinator.endings import NOT_RUN_CODE, Ending, ending, is_bad_end, ran_ms, refusing
from coordinator.model import Allocation, Happening, Job, JobState, PastAttempt, Task, TaskState
from coordinator.nodes import NodeStatus
from coordinator.snapshot import ClusterSettings, Snapshot
from vgpu.inventory import NodeInventory
from vgpu.reasons import Reason, ReasonCode

S = JobState
# The states in which a record may hold slices, less those that are only shown.
HOLDING = frozenset({S.ALLOCATED, S.EVICTING, S.CANCELLING, S.LOST})
PAST_ATTEMPTS = 3
# So long a job waits for another node than those that would not start it, before it is tried there again.
REFUSED_SECONDS = 600
# A number of the reason of a job that was cancelled while slices were reserved for it.
HELD_RESERVATION = "held_reservation"

EDGES: Mapping[JobState, Mapping[JobState, str]] = {
    S.PENDING: {
        S.ALLOCATED: "a plan that placed it was committed",
        S.CANCELLED: "cancelled while it waited: it holds nothing that would have to end first",
        S.FAILED: "it was ended by an administrator, or what it needs is gone for good",
    },
    S.ALLOCATED: {
        S.STARTING: "the first node began to start a task",
        S.RUNNING: "the nodes were first seen when all tasks ran already",
        S.SUCCEEDED: "the nodes were first seen when all tasks had ended well",
        S.FAILED: "it could not be started and may not be tried again",
        S.PENDING: "it could not be started and is tried again",
        S.EVICTING: "its slices are wanted back",
        S.CANCELLING: "its user asked for its end",
        S.LOST: "a node of it is given up",
    },
    S.STARTING: {
        S.RUNNING: "every task has started",
        S.SUCCEEDED: "every task ended well before it was seen running",
        S.FAILED: "a task ended badly, and no retry is left",
        S.PENDING: "a task ended badly or could not be started, and it is tried again",
        S.EVICTING: "its slices are wanted back",
        S.CANCELLING: "its user asked for its end",
        S.LOST: "a node of it is given up",
    },
    S.RUNNING: {
        S.SUCCEEDED: "every task ended with exit code 0",
        S.FAILED: "a task ended badly, or the time limit was reached, and no retry is left",
        S.PENDING: "a task ended badly, and a retry is left",
        S.EVICTING: "its slices are wanted back",
        S.CANCELLING: "its user asked for its end",
        S.LOST: "a node of it is given up",
    },
    S.EVICTING: {
        S.PENDING: "its end is confirmed, so it waits again as the next attempt",
        S.SUCCEEDED: "every task had ended well before the stop reached it",
        S.CANCELLING: "its user asked for its end meanwhile",
        S.LOST: "a node of it was given up meanwhile",
        S.FAILED: "a node of it was given up meanwhile, and no retry is left",
    },
    S.CANCELLING: {
        S.CANCELLED: "the end of every task is confirmed, or its node is given up",
        S.SUCCEEDED: "every task had ended well before the stop reached it",
    },
    S.LOST: {
        S.PENDING: "the rest of it has ended and a retry is left",
        S.FAILED: "the rest of it has ended and no retry is left",
        S.CANCELLING: "its user asked for its end meanwhile",
        S.CANCELLED: "cancelled, and nothing of it is left to end",
    },
    S.SUCCEEDED: {},
    S.FAILED: {},
    S.CANCELLED: {},
}


class IllegalTransition(Exception):
    """A job was about to take an edge that is not in the table: a fault of the coordinator."""

    def __init__(self, before: JobState, after: JobState) -> None:
        super().__init__(f"a job does not go from {before.value} to {after.value}")
        self.before = before
        self.after = after


class AllocationIncomplete(Exception):
    """A plan gave a job less than it asks for, or something that no node has: a fault of the coordinator. The text names
    the task, what it needs and what it was given."""


@frozen
class Transition:
    """What must be written now. `stop`: the grants of the attempt must ask the nodes to end it, for `after.stop`."""

    before: Job
    after: Job
    stop: bool = False


def check(before: JobState, after: JobState) -> None:
    """Raises `IllegalTransition`. Staying in a state is no transition."""
    if before is not after and after not in EDGES[before]:
        raise IllegalTransition(before, after)


def shown_state(job: Job, tasks: Iterable[Task]) -> JobState:
    """The state that users see: RUNNING once every task has started, STARTING from the first sign of one. Isolation
    steps alone (PREPARED) leave it ALLOCATED: nothing of the user runs yet."""
    if job.state is not S.ALLOCATED or job.allocation is None:
        return job.state
    seen = {task.task: task.state for task in tasks if task.job == job.id and task.attempt == job.attempt}
    begun = {n for n, state in seen.items() if state is not TaskState.PREPARED}
    if not begun:
        return S.ALLOCATED
    started = {n for n in begun if seen[n] is not TaskState.STARTING}
    return S.RUNNING if {placed.task for placed in job.allocation.tasks} <= started else S.STARTING


def check_complete(job: Job, allocation: Allocation, inventories: Mapping[str, NodeInventory]) -> None:
    """Raises `AllocationIncomplete` unless every task of the job has as many different GPUs of its node as it asks
    for, and something of each (TP-5). A task that asks for none has none."""
    placed = sorted(task.task for task in allocation.tasks)
    if placed != list(range(job.spec.task_count)):
        raise AllocationIncomplete(f"job {job.id} has {job.spec.task_count} tasks, placed are {placed}")
    for task in allocation.tasks:
        where = f"task {task.task} of job {job.id} on node {task.node!r}"
        inventory = inventories.get(task.node)
        if inventory is None:
            raise AllocationIncomplete(f"{where}: the node is not known")
        wanted, given = job.spec.task(task.task).gpus.count, {piece.gpu for piece in task.slices}
        if len(task.slices) != wanted or len(given) != wanted:
            raise AllocationIncomplete(f"{where}: asks for {wanted} GPUs, was given {sorted(given)}")
        unknown = given - {gpu.uuid for gpu in inventory.gpus}
        if unknown:
            raise AllocationIncomplete(f"{where}: the node has no GPU {sorted(unknown)}")
        if any(piece.memory_mib <= 0 or piece.compute_milli <= 0 for piece in task.slices):
            raise AllocationIncomplete(f"{where}: a slice of it is empty")


def allocated(job: Job, allocation: Allocation) -> Job:
    """The record of a waiting job once it holds `allocation`."""
    return _moved(job, S.ALLOCATED, allocation.allocated_at_ms, allocation.placed, allocation=allocation)


def cancelled(job: Job, now_ms: int, reason: Reason | None = None) -> Job:
    """The record of a job whose end was asked for: final at once where it holds nothing. A no-op in a final state,
    and where a cancel was asked for already (CT-1)."""
    if job.state.is_final or job.state is S.CANCELLING:
        return job
    reason = reason or Reason(ReasonCode.CANCELLED_BY_USER)
    if job.allocation is None:
        if job.reason is not None and job.reason.code is ReasonCode.RESERVED:
            reason = replace(reason, numbers={**reason.numbers, HELD_RESERVATION: 1})
        return _moved(job, S.CANCELLED, now_ms, reason, ended_at_ms=now_ms)
    return _moved(job, S.CANCELLING, now_ms, reason)


def given_up(job: Job, now_ms: int, reason: Reason) -> Job:
    """The record of a waiting job that will never be started, for `reason`."""
    return _moved(job, S.FAILED, now_ms, reason, exit_code=NOT_RUN_CODE, ended_at_ms=now_ms)


def settle(snapshot: Snapshot) -> tuple[Transition, ...]:
    """What must be written now, in the order of job ids: ends, requeues, stops, nodes given up, time limits."""
    jobs = (snapshot.jobs[id] for id in sorted(snapshot.restless) if id in snapshot.jobs)
    return tuple(t for job in jobs if (t := settle_job(job, snapshot)) is not None)


def settle_job(job: Job, snapshot: Snapshot) -> Transition | None:
    """What one live job needs now; None for most."""
    if job.allocation is None or job.state not in HOLDING:
        return None  # a record that somebody wrote by hand must not stop the others
    tasks = snapshot.tasks_of(job)
    lost = {node for node in job.allocation.nodes if _status(node, snapshot) is NodeStatus.LOST}
    if all(_is_over(tasks.get(placed.task)) or placed.node in lost for placed in job.allocation.tasks):
        return _ended(job, tasks, lost, snapshot)
    if job.stop is not None:
        return _unconfirmed(job, snapshot)
    reason = _why_stop(job, tasks, lost, snapshot)
    if reason is None:
        return None
    after = replace(
        job,
        stop=reason,
        reason=reason,
        history=(
            *job.history,
            Happening(shown_state(job, tasks.values()), snapshot.now_ms, job.attempt, reason),
        ),
    )
    return Transition(job, after, stop=True)


def is_restless(job: Job, tasks: Mapping[int, Task]) -> bool:
    """Whether a live job may have to be settled for another reason than time or a lost node."""
    ended = tasks and any(task.state is TaskState.EXITED for task in tasks.values())
    return bool(ended) or job.state is not S.ALLOCATED or job.stop is not None


def due_ms(job: Job, tasks: Mapping[int, Task], settings: ClusterSettings) -> int | None:
    """When time alone next changes something about a live job that nobody has asked to stop."""
    if job.allocation is None:
        return None
    if job.stop is not None:
        return _stop_asked_ms(job) + 1000 * settings.stop_deadline_seconds
    launched_by_ms = job.allocation.allocated_at_ms + 1000 * settings.launch_deadline_seconds
    if not tasks and job.allocation.tasks:  # nothing of it has begun
        return launched_by_ms
    due = []
    started_ms = _started_ms(job, tasks)
    if job.spec.max_runtime_seconds is not None and started_ms is not None:
        due.append(started_ms + 1000 * job.spec.max_runtime_seconds - job.ran_ms)
    if _starting(job, tasks):
        due.append(launched_by_ms)
    return min(due, default=None)


def _status(node: str, snapshot: Snapshot) -> NodeStatus:
    view = snapshot.nodes.get(node)
    return view.status if view is not None else NodeStatus.UNKNOWN


def _is_over(task: Task | None) -> bool:
    return task is not None and task.state is TaskState.EXITED and task.released


def _started_ms(job: Job, tasks: Mapping[int, Task]) -> int | None:
    """When the first task of the attempt began to run. A node's clock may be ahead or behind (LE-1): nothing can have
    started before it was allocated."""
    started = [task.started_at_ms for task in tasks.values() if task.started_at_ms is not None]
    if not started or job.allocation is None:
        return None
    return max(min(started), job.allocation.allocated_at_ms)


def _starting(job: Job, tasks: Mapping[int, Task]) -> list[str]:
    """Nodes of the tasks that have not come to run yet."""
    placed = job.allocation.tasks if job.allocation else ()
    begun = {n for n, task in tasks.items() if task.state in (TaskState.RUNNING, TaskState.EXITED)}
    return [placement.node for placement in placed if placement.task not in begun]


def _why_stop(job: Job, tasks: Mapping[int, Task], lost: set[str], snapshot: Snapshot) -> Reason | None:
    assert job.allocation is not None
    if job.state is S.CANCELLING:
        return job.reason or Reason(ReasonCode.CANCELLED_BY_USER)
    if job.state is S.EVICTING:
        return job.reason or Reason(ReasonCode.EVICTED)
    if lost:
        return Reason(ReasonCode.NODE_LOST, subjects=tuple(sorted(lost)))
    bad = [n for n, task in sorted(tasks.items()) if is_bad_end(task)]
    if bad and len(job.allocation.tasks) > 1:
        return Reason(ReasonCode.SIBLING_FAILED, {"task": bad[0]})
    limit, now_ms = job.spec.max_runtime_seconds, snapshot.now_ms
    ran = ran_ms(job, tasks, now_ms)
    if limit is not None and ran and job.ran_ms + ran >= 1000 * limit:
        return Reason(ReasonCode.TIME_LIMIT, {"limit_seconds": limit})
    waited_ms = now_ms - job.allocation.allocated_at_ms
    deadline_seconds = snapshot.settings.launch_deadline_seconds
    # A node that is silent may have started it long ago; it is given its time to come back (EX-7).
    silent = any(_status(node, snapshot) is not NodeStatus.READY for node in _starting(job, tasks))
    if _starting(job, tasks) and not silent and waited_ms >= 1000 * deadline_seconds:
        waits = waits_for_engine(job)
        why = waits.detail if waits is not None else ""
        return Reason(ReasonCode.LAUNCH_DEADLINE, {"limit_seconds": deadline_seconds}, detail=why)
    return None


def waits_for_engine(job: Job) -> Reason | None:
    """What its record says that the launch waits for (`coordinator.launches`)."""
    return job.reason if job.reason and job.reason.code is ReasonCode.ENGINE_UNAVAILABLE else None


def _stop_asked_ms(job: Job) -> int:
    """When the nodes were asked to end the present attempt."""
    for happening in reversed(job.history):
        if happening.attempt == job.attempt and happening.reason == job.stop:
            return happening.at_ms
    return job.allocation.allocated_at_ms if job.allocation else job.queued_at_ms


def _unconfirmed(job: Job, snapshot: Snapshot) -> Transition | None:
    """A stop that nobody confirms is said, and the slices stay with the job: what is not known to be free is not."""
    deadline_seconds = snapshot.settings.stop_deadline_seconds
    is_late = snapshot.now_ms - _stop_asked_ms(job) >= 1000 * deadline_seconds
    if not is_late or (job.reason is not None and job.reason.code is ReasonCode.STOP_UNCONFIRMED):
        return None
    assert job.allocation is not None
    reason = Reason(ReasonCode.STOP_UNCONFIRMED, {"limit_seconds": deadline_seconds}, job.allocation.nodes)
    return Transition(job, replace(job, reason=reason))


def _ended(job: Job, tasks: Mapping[int, Task], lost: set[str], snapshot: Snapshot) -> Transition:
    end = ending(job, tasks, lost, _stop_asked_ms(job), snapshot.settings)
    ran = job.ran_ms + ran_ms(job, tasks, snapshot.now_ms)
    happened = replace(job, past=_past(job, tasks))
    if lost and job.state not in (S.CANCELLING, S.LOST):
        happened = _moved(
            happened, S.LOST, snapshot.now_ms, Reason(ReasonCode.NODE_LOST, subjects=tuple(sorted(lost)))
        )
    if end.state is S.PENDING:
        refused_by = refusing(job, tasks, end.reason)
        return Transition(job, _queued_again(replace(happened, refused_by=refused_by), end, ran, snapshot))
    ended = [task.ended_at_ms for task in tasks.values() if task.ended_at_ms is not None]
    assert job.allocation is not None
    ended_ms = snapshot.now_ms
    if ended and not lost:
        ended_ms = min(snapshot.now_ms, max(*ended, job.allocation.allocated_at_ms))
    after = _moved(
        happened,
        end.state,
        snapshot.now_ms,
        end.reason,
        allocation=None,
        stop=None,
        exit_code=end.exit_code,
        started_at_ms=_started_ms(job, tasks) or job.started_at_ms,
        ended_at_ms=ended_ms,
        ran_ms=ran,
        failures=job.failures + end.used_retry,
    )
    return Transition(job, after)


def _past(job: Job, tasks: Mapping[int, Task]) -> tuple[PastAttempt, ...]:
    """What users may still ask about ended attempts; the newest few, so that retries do not grow the record."""
    assert job.allocation is not None
    ended = PastAttempt(job.allocation, tuple(task for _, task in sorted(tasks.items())))
    return (*job.past, ended)[-PAST_ATTEMPTS:]


def _queued_again(job: Job, end: Ending, ran: int, snapshot: Snapshot) -> Job:
    return _moved(
        job,
        S.PENDING,
        snapshot.now_ms,
        end.reason,
        attempt=job.attempt + 1,
        allocation=None,
        stop=None,
        exit_code=None,
        started_at_ms=None,
        ran_ms=ran,
        failures=job.failures + end.used_retry,
        queued_at_ms=snapshot.now_ms,
        not_before_ms=snapshot.now_ms + end.back_off_ms,
    )


def _moved(job: Job, state: JobState, at_ms: int, reason: Reason | None, **changes: object) -> Job:
    check(job.state, state)
    happening = Happening(state, at_ms, job.attempt, reason)
    return replace(job, state=state, reason=reason, history=(*job.history, happening), **changes)
