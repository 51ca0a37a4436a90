"""How an attempt ended: from what the nodes saw of its tasks to the end of the job, its exit code and its reason.

The exit code of a job is the highest over its tasks, 128 + n for signal n, 124 for the time limit, 125 where Serai
could not start it or lost it. A task that was stopped since a sibling failed does not hide the sibling's code.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from coordinator.model import Job, JobState, Task, TaskState
from coordinator.snapshot import ClusterSettings
from vgpu.reasons import Reason, ReasonCode

TIME_LIMIT_CODE = 124
NOT_RUN_CODE = 125
# A back-off doubles with each attempt, up to this.
LONGEST_BACK_OFF_MS = 5 * 60 * 1000
# Of the nodes that would not start a job so many are remembered.
REFUSING_NODES = 8
SIGKILL, SIGTERM = 9, 15

# Serai's or the cluster's doing: tried again without using up a retry of the user.
INFRASTRUCTURE = frozenset(
    {
        ReasonCode.LAUNCH_FAILED,
        ReasonCode.LAUNCH_DEADLINE,
        ReasonCode.ENGINE_REFUSED,
        ReasonCode.ISOLATION_STEPS_FAILED,
    }
)
# Trying again would end the same way (EX-4).
HOPELESS = frozenset({ReasonCode.IMAGE_UNAVAILABLE})
# Faults by which a node says that it was asked to end the task.
STOPS = frozenset({ReasonCode.CANCELLED_BY_USER, ReasonCode.SIBLING_FAILED, ReasonCode.EVICTED})


@frozen
class Ending:
    """The state to go to. `used_retry` is 1 where it counts against the user's retries."""

    state: JobState
    reason: Reason | None = None
    exit_code: int | None = None
    used_retry: int = 0
    back_off_ms: int = field(default=0)


def is_good_end(task: Task) -> bool:
    return task.state is TaskState.EXITED and task.exit_code == 0 and not task.oom_killed and not task.fault


def is_bad_end(task: Task) -> bool:
    return task.state is TaskState.EXITED and not is_good_end(task)


def ran_ms(job: Job, tasks: Mapping[int, Task], now_ms: int) -> int:
    """Running time of the present attempt: that of its longest task. One that has ended is measured by its node's
    clock alone, since those of two nodes differ, and the difference would count anew with each attempt; one that runs,
    by `now_ms`, and from no earlier than its allocation."""
    if job.allocation is None:
        return 0
    ran = [0]
    for placed in job.allocation.tasks:
        task = tasks.get(placed.task)
        if task is None or task.started_at_ms is None:
            continue
        if task.ended_at_ms is not None:
            ran.append(task.ended_at_ms - task.started_at_ms)
        else:
            ran.append(now_ms - max(task.started_at_ms, job.allocation.allocated_at_ms))
    return max(ran)


def ending(
    job: Job, tasks: Mapping[int, Task], lost: set[str], stop_asked_ms: int, settings: ClusterSettings
) -> Ending:
    """The end of an attempt of which nothing is left, in the order of what counts most."""
    ended = [task for _, task in sorted(tasks.items()) if task.state is TaskState.EXITED]
    code = _exit_code(job, ended)
    is_lost = bool(lost) or job.state is JobState.LOST
    if not is_lost and _all_succeeded(job, ended, stop_asked_ms):
        return Ending(JobState.SUCCEEDED, Reason(ReasonCode.EXIT_CODE, {"exit_code": 0}), 0)
    if job.state is JobState.CANCELLING:
        return Ending(JobState.CANCELLED, job.stop or Reason(ReasonCode.CANCELLED_BY_USER), code)
    if is_lost:
        reason = Reason(ReasonCode.NODE_LOST, subjects=tuple(sorted(lost)))
        return _retried(job, reason, NOT_RUN_CODE, settings)
    if job.state is JobState.EVICTING:
        return Ending(JobState.PENDING, job.stop or job.reason)
    reason = _reason(job, ended, stop_asked_ms)
    if reason.code is ReasonCode.TIME_LIMIT:
        return Ending(JobState.FAILED, reason, TIME_LIMIT_CODE)
    if reason.code in INFRASTRUCTURE:
        return _started_again(job, reason, settings)
    if reason.code in HOPELESS:
        return Ending(JobState.FAILED, reason, NOT_RUN_CODE)
    return _retried(job, reason, NOT_RUN_CODE if code in (None, 0) else code, settings)


def _all_succeeded(job: Job, ended: list[Task], stop_asked_ms: int) -> bool:
    """EX-2: exit code 0 after a stop was asked for is a stop that was obeyed, unless it came before."""
    if job.allocation is None or len(ended) < len(job.allocation.tasks):
        return False
    return all(
        is_good_end(task) and (job.stop is None or (task.ended_at_ms or 0) <= stop_asked_ms) for task in ended
    )


def refusing(job: Job, tasks: Mapping[int, Task], reason: Reason | None) -> tuple[str, ...]:
    """The nodes that would not start an attempt of the job, the newest last, once it has ended for `reason` (TP-6). What
    all nodes of a gang refused at once says nothing about one of them."""
    if job.allocation is None or reason is None or reason.code not in INFRASTRUCTURE:
        return job.refused_by
    late = reason.code is ReasonCode.LAUNCH_DEADLINE
    found = {
        task.node
        for task in tasks.values()
        if (late and task.started_at_ms is None)
        or (is_bad_end(task) and _task_reason(task).code in INFRASTRUCTURE)
    }
    if len(job.allocation.nodes) > 1 and len(found) == len(job.allocation.nodes):
        return job.refused_by
    return (*(node for node in job.refused_by if node not in found), *sorted(found))[-REFUSING_NODES:]


def _code_of(task: Task) -> int | None:
    if task.oom_killed:
        return 128 + SIGKILL
    if task.signal is not None:
        return 128 + task.signal
    return task.exit_code


def _was_stopped(job: Job, task: Task) -> bool:
    """Ended by our own stop and not by itself."""
    if task.fault in {code.value for code in STOPS}:
        return True
    ended_by_signal = _code_of(task) in (None, 128 + SIGKILL, 128 + SIGTERM)
    return job.stop is not None and not task.oom_killed and not task.fault and ended_by_signal


def _exit_code(job: Job, ended: list[Task]) -> int | None:
    own = [task for task in ended if not _was_stopped(job, task)]
    codes = [code for task in own or ended if (code := _code_of(task)) is not None]
    if not any(codes):
        codes += [code for task in ended if (code := _code_of(task)) is not None]
    return max(codes, default=None)


def _reason(job: Job, ended: list[Task], stop_asked_ms: int) -> Reason:
    """Why the attempt ended badly: the first task that ended by itself says so, before what we stopped it for. What
    ended badly before the stop was asked for did not end because of it, however late its node said so."""
    own = [task for task in ended if is_bad_end(task) and not _was_stopped(job, task)]
    if job.stop is not None and job.stop.code is not ReasonCode.SIBLING_FAILED:
        own = [task for task in own if task.ended_at_ms is not None and task.ended_at_ms <= stop_asked_ms]
        if not own:
            return job.stop
    bad = [task for task in ended if is_bad_end(task)]
    task = min(own or bad or ended, key=lambda task: (task.ended_at_ms or 0, task.task), default=None)
    if task is None:
        return job.stop or Reason(ReasonCode.LAUNCH_FAILED, detail="the nodes say nothing of it")
    return _task_reason(task)


def _task_reason(task: Task) -> Reason:
    subjects = (task.node,)
    if task.oom_killed and task.exit_code != 0:
        return Reason(ReasonCode.OUT_OF_MEMORY, {"task": task.task}, subjects, task.detail)
    if task.fault:
        known = {code.value: code for code in ReasonCode}
        code = known.get(task.fault, ReasonCode.LAUNCH_FAILED if task.exit_code is None else None)
        if code is not None:
            return Reason(code, {"task": task.task}, subjects, task.detail)
    signal = task.signal
    if signal is None and task.exit_code is not None and task.exit_code > 128:
        signal = task.exit_code - 128
    if signal is not None:
        return Reason(ReasonCode.SIGNALLED, {"task": task.task, "signal": signal}, subjects, task.detail)
    if task.exit_code is None:
        return Reason(ReasonCode.LAUNCH_FAILED, {"task": task.task}, subjects, task.detail)
    numbers = {"task": task.task, "exit_code": task.exit_code}
    return Reason(ReasonCode.EXIT_CODE, numbers, subjects, task.detail)


def _retried(job: Job, reason: Reason, code: int | None, settings: ClusterSettings) -> Ending:
    """Once more at the user's expense, where the user allowed it."""
    if job.failures < job.spec.retries:
        return Ending(
            JobState.PENDING, reason, used_retry=1, back_off_ms=_back_off_ms(job.failures, settings)
        )
    return Ending(JobState.FAILED, reason, code, used_retry=1)


def _started_again(job: Job, reason: Reason, settings: ClusterSettings) -> Ending:
    """Once more at Serai's expense, a few times."""
    before = sum(
        1
        for happening in job.history
        if happening.state is JobState.PENDING
        and happening.reason
        and happening.reason.code in INFRASTRUCTURE
    )
    if before < settings.launch_retries:
        return Ending(JobState.PENDING, reason, back_off_ms=_back_off_ms(before, settings))
    return Ending(JobState.FAILED, reason, NOT_RUN_CODE)


def _back_off_ms(times: int, settings: ClusterSettings) -> int:
    return min(LONGEST_BACK_OFF_MS, 1000 * settings.back_off_seconds << min(times, 16))
