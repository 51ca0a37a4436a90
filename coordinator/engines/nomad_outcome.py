"""From what Nomad shows of an attempt to the task records of Serai. Pure.

Nomad's own words are not taken for the outcome: `complete` covers a task that was killed, `failed` one that could not
be started, and an allocation that the server calls `lost` may still be running. What counts is the Terminated event
(EX-1, EX-2), and an end is confirmed only when the client itself reports it.

    pending -> STARTING    running -> RUNNING    complete, failed -> EXITED, released
    unknown -> as it was (its node is out of touch)            lost -> EXITED, not released
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from attrs import frozen
from msgspec.structs import replace

from coordinator.engines.nomad_records import (
    UNKNOWN,
    AllocationSeen,
    EvaluationSeen,
    PlacementMetric,
    TaskStateSeen,
    time_ms,
)
from coordinator.model import Task, TaskState
from jobspecs.nomad_job import group_name
from vgpu.reasons import ReasonCode

# Docker's words for an image that trying again will not bring (EX-4). A registry that times out, refuses the
# connection or answers 5xx may do better next time.
_NO_SUCH_IMAGE = re.compile(
    r"manifest (for .* )?(unknown|not found)|repository does not exist|not found: manifest|no such image"
    r"|pull access denied|unauthorized|access (to the resource )?is? ?denied|denied: requested access|invalid reference format",
    re.IGNORECASE,
)
_PASSING = re.compile(
    r"\b50[234]\b|bad gateway|timeout|timed out|no such host|connection refused|toomanyrequests",
    re.IGNORECASE,
)
_FAILURES = ("Driver Failure", "Setup Failure", "Failed Validation", "Failed Artifact Download")
_LONGEST_DETAIL = 1000
LARGEST_SIGNAL = 64


@frozen
class AttemptSeen:
    """One attempt as Nomad has it. `stopped`: the job is deregistered and the scheduler is done with it, so that
    nothing of it can be placed any more. `nodes` are Serai's node names by task number. `failed` are the groups that
    found no place, and when that was known."""

    job: str
    attempt: int
    nodes: Mapping[int, str]
    stopped: bool
    failed: Mapping[str, PlacementMetric]
    failed_at_ms: int | None = None


def observed(seen: AttemptSeen, allocations: Sequence[AllocationSeen]) -> tuple[Task, ...]:
    """The task records, by task number; none for a task that Nomad has not placed yet."""
    groups: dict[str, list[AllocationSeen]] = {}
    for allocation in sorted(allocations, key=lambda one: one.create_index):
        groups.setdefault(allocation.task_group, []).append(allocation)
    was_lost = any(allocation.was_lost for allocation in allocations)
    tasks = []
    for number in sorted(seen.nodes):
        copies = groups.get(group_name(number), [])
        task = _of_copies(seen, number, copies) if copies else _unplaced(seen, number)
        if task is not None:
            tasks.append(_as_sibling(task, copies, seen, was_lost))
    return tuple(tasks)


def unplaced(
    evaluations: Sequence[EvaluationSeen], allocations: Sequence[AllocationSeen]
) -> Mapping[str, PlacementMetric]:
    """The groups that found no place and have none now."""
    placed = {allocation.task_group for allocation in allocations}
    return {
        group: metric
        for evaluation in evaluations
        for group, metric in (evaluation.failed_groups or {}).items()
        if group not in placed
    }


def has_copies(allocations: Sequence[AllocationSeen]) -> bool:
    """Nomad made a second allocation of a group: beside a lost one, or for whatever reason."""
    return len({allocation.task_group for allocation in allocations}) < len(allocations)


def _unplaced(seen: AttemptSeen, number: int) -> Task | None:
    if not seen.stopped:
        return None
    task = Task(seen.job, seen.attempt, number, seen.nodes[number], TaskState.EXITED, released=True)
    if not seen.failed:
        return task  # stopped before it was placed
    metric = seen.failed.get(group_name(number))
    detail = placement_sentence(metric) if metric else "another task of the job found no place"
    return replace(task, fault=ReasonCode.LAUNCH_FAILED.value, detail=detail, ended_at_ms=seen.failed_at_ms)


def _of_copies(seen: AttemptSeen, number: int, copies: Sequence[AllocationSeen]) -> Task:
    """The first allocation is the attempt; later copies only delay the release, until all of them are dead."""
    first = copies[0]
    task = Task(
        seen.job,
        seen.attempt,
        number,
        seen.nodes[number],
        TaskState.STARTING,
        started_at_ms=time_ms(first.task.started_at),
        container=first.id,
    )
    if first.was_lost or first.is_ended:
        all_dead = all(copy.is_ended for copy in copies)
        may_come_again = not seen.stopped and any(copy.was_lost for copy in copies)
        return replace(_ended(task, first), released=all_dead and not may_come_again)
    if first.client_status == "running" or (
        first.client_status == UNKNOWN and task.started_at_ms is not None
    ):
        task = replace(task, state=TaskState.RUNNING)
    if first.client_status == UNKNOWN:
        return replace(task, detail="Nomad is out of touch with its node")
    if task.state is TaskState.STARTING and first.task.events:
        return replace(task, detail=first.task.events[-1].display_message[:_LONGEST_DETAIL])
    return task


def _ended(task: Task, allocation: AllocationSeen) -> Task:
    state = allocation.task
    terminated, killed = state.last("Terminated"), state.last("Killing", "Killed")
    ended_at_ms = time_ms(state.finished_at) or allocation.modify_time // 1_000_000
    task = replace(task, state=TaskState.EXITED, ended_at_ms=ended_at_ms)
    if allocation.was_lost and (killed is not None or terminated is None):
        detail = (
            "Nomad lost its node"
            if not allocation.is_ended
            else "Nomad lost its node, and ended it on its return"
        )
        return replace(task, fault=ReasonCode.NODE_LOST.value, detail=detail)
    if terminated is not None:
        return _terminated(task, terminated.details or {})
    failure = state.last(*_FAILURES)
    if failure is not None:
        return _not_started(task, failure.type, failure.details or {}, failure.display_message)
    if killed is not None or state.started_at is None:
        return _stopped_early(task, state, allocation.is_wanted)
    return replace(task, fault=ReasonCode.NODE_LOST.value, detail="Nomad kept no record of how it ended")


def _terminated(task: Task, details: Mapping[str, str]) -> Task:
    """Docker reports a signal as 128 + n and leaves `signal` at 0."""
    code = int(details.get("exit_code") or 0)
    signal = int(details.get("signal") or 0) or (code - 128 if 128 < code <= 128 + LARGEST_SIGNAL else 0)
    oom_killed = details.get("oom_killed") == "true"
    return replace(
        task,
        exit_code=code,
        signal=signal or None,
        oom_killed=oom_killed,
        fault=ReasonCode.OUT_OF_MEMORY.value if oom_killed and code else "",
        detail=details.get("exit_message", "")[:_LONGEST_DETAIL],
    )


def _not_started(task: Task, kind: str, details: Mapping[str, str], shown: str) -> Task:
    text = (
        details.get("driver_error")
        or details.get("validation_error")
        or details.get("setup_error")
        or shown
        or kind
    )
    hopeless = bool(_NO_SUCH_IMAGE.search(text)) and not _PASSING.search(text)
    fault = (
        ReasonCode.IMAGE_UNAVAILABLE if kind == "Driver Failure" and hopeless else ReasonCode.LAUNCH_FAILED
    )
    return replace(task, fault=fault.value, detail=text[:_LONGEST_DETAIL])


def _stopped_early(task: Task, state: TaskStateSeen, is_wanted: bool) -> Task:
    """Killed before it ran, or without a word about how it went. Where it is still wanted its node is at fault."""
    last = state.events[-1].display_message if state.events else ""
    if not is_wanted:
        return replace(task, detail=last[:_LONGEST_DETAIL])
    fault = ReasonCode.LAUNCH_FAILED if state.started_at is None else ReasonCode.TASK_VANISHED
    return replace(task, fault=fault.value, detail=(last or "Nomad ended it by itself")[:_LONGEST_DETAIL])


def _as_sibling(task: Task, copies: Sequence[AllocationSeen], seen: AttemptSeen, was_lost: bool) -> Task:
    """A task that we ended since another one of its gang was lost, or found no place, did not fail by itself."""
    if not copies or task.state is not TaskState.EXITED or task.fault or not (was_lost or seen.failed):
        return task
    if copies[0].task.last("Killing", "Killed") is None:
        return task
    return replace(task, fault=ReasonCode.SIBLING_FAILED.value)


def placement_sentence(metric: PlacementMetric) -> str:
    """Why Nomad had no place for a group that is pinned to one node, for a person to read."""
    if metric.nodes_exhausted:
        lacking = ", ".join(sorted(metric.dimension_exhausted or {})) or "resources"
        return f"Nomad found no place: by its own count the node has not enough {lacking} left"
    node = next(iter(metric.constraint_filtered or {}), "").partition(" = ")[2]
    which = f"node {node}" if node else "the node"
    return f"Nomad found no place: {which} is not among its {metric.nodes_evaluated} ready nodes"
