"""From records to the JSON that users see: pure functions. Values of environment variables never pass through here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import asdict, replace

from coordinator import records
from coordinator.api.answers import time_text
from coordinator.model import (
    Allocation,
    Happening,
    Job,
    JobState,
    Standing,
    Task,
    TaskPlacement,
    Tenant,
)
from jobspecs.reading import spec_view
from jobspecs.spec import JobSpec
from vgpu.inventory import Gpu, NodeInventory
from vgpu.isolation import holder
from vgpu.reasons import Reason, ReasonCode
from vgpu.sentences import sentence
from vgpu.slices import Slice

View = dict[str, object]
HIDDEN = "***"


def reason_view(reason: Reason | None) -> View | None:
    if reason is None:
        return None
    return {
        "code": reason.code.value,
        "numbers": dict(reason.numbers),
        "subjects": list(reason.subjects),
        "detail": reason.detail,
        "sentence": sentence(reason),
    }


def hidden_spec_view(spec: JobSpec) -> View:
    """The spec in the form in which it is submitted, with every value of env hidden."""
    hidden = [replace(task, env=dict.fromkeys(task.env, HIDDEN)) for task in spec.tasks]
    return dict(spec_view(replace(spec, tasks=tuple(hidden))))


def job_view(
    job: Job,
    shown: JobState,
    tasks: Mapping[int, Task],
    gpus: Mapping[str, Gpu],
    now_ms: int,
    revision: int,
    reason: Reason | None = None,
) -> View:
    """`shown` is its state with the task records in mind; `tasks` those of its attempt by number; `gpus` by UUID.
    `reason` overrides the record's: why it waits, computed now."""
    allocation = job.allocation or (job.past[-1].allocation if job.past and job.state.is_final else None)
    if job.allocation is None and job.past and job.state.is_final:
        tasks = {task.task: task for task in job.past[-1].tasks}
    starts = [task.started_at_ms for task in tasks.values() if task.started_at_ms is not None]
    running_since = min(starts, default=None)
    started = job.started_at_ms if job.started_at_ms is not None else running_since
    return {
        "id": job.id,
        "name": job.spec.name,
        "tenant": job.tenant,
        "state": shown.value,
        "attempt": job.attempt,
        "priority": job.spec.priority,
        "spec": hidden_spec_view(job.spec),
        "submitted_at": time_text(job.submitted_at_ms),
        "started_at": time_text(started),
        "ended_at": time_text(job.ended_at_ms),
        "waited_seconds": waited_seconds(job, started, now_ms),
        "ran_seconds": _ran_seconds(job, running_since, now_ms),
        "exit_code": job.exit_code,
        "failures": job.failures,
        "reason": reason_view(reason or job.reason),
        "chosen": reason_view(_why_chosen(job.tenant, allocation.standing) if allocation else None),
        "placed": reason_view(allocation.placed if allocation else None),
        "tasks": [
            _task_view(job, number, allocation, tasks.get(number), gpus)
            for number in range(job.spec.task_count)
        ],
        "history": [happening_view(line) for line in _history(job, shown, starts)],
        "revision": revision,
    }


def _why_chosen(tenant: str, standing: Standing | None) -> Reason | None:
    return Reason(ReasonCode.CHOSEN, asdict(standing), (tenant,)) if standing is not None else None


def waited_seconds(job: Job, started_at_ms: int | None, now_ms: int) -> float:
    """From the submit to the first start, to the end of what never started, or to now."""
    until = (
        started_at_ms
        if started_at_ms is not None
        else job.ended_at_ms
        if job.ended_at_ms is not None
        else now_ms
    )
    return max(0, until - job.submitted_at_ms) / 1000


def _ran_seconds(job: Job, running_since_ms: int | None, now_ms: int) -> float | None:
    if job.state.is_final or running_since_ms is None or job.allocation is None:
        return job.ran_ms / 1000 if job.ran_ms or job.started_at_ms is not None else None
    return (job.ran_ms + max(0, now_ms - running_since_ms)) / 1000


def _history(job: Job, shown: JobState, starts: Iterable[int]) -> tuple[Happening, ...]:
    """STARTING and RUNNING are not written a second time: they are read from the task records. A stop came after them,
    whatever the clocks of nodes say."""
    if shown is job.state:
        return job.history
    is_stopped = job.stop is not None and bool(job.history) and job.history[-1].reason == job.stop
    until = len(job.history) - is_stopped
    before, after = job.history[:until], job.history[until:]
    at_ms = max(starts, default=before[-1].at_ms if before else job.submitted_at_ms)
    return (*before, Happening(shown, at_ms, job.attempt), *after)


def happening_view(line: Happening) -> View:
    return {
        "state": line.state.value,
        "at": time_text(line.at_ms),
        "attempt": line.attempt,
        "reason": reason_view(line.reason),
    }


def _task_view(
    job: Job, number: int, allocation: Allocation | None, task: Task | None, gpus: Mapping[str, Gpu]
) -> View:
    placements = {piece.task: piece for piece in allocation.tasks} if allocation else {}
    placement: TaskPlacement | None = placements.get(number)
    return {
        "task": number,
        "name": job.spec.task(number).name,
        "node": placement.node if placement else None,
        "state": task.state.value if task else None,
        "exit_code": task.exit_code if task else None,
        "signal": task.signal if task else None,
        "oom_killed": task.oom_killed if task else False,
        "fault": task.fault if task else "",
        "detail": task.detail if task else "",
        "started_at": time_text(task.started_at_ms) if task else None,
        "ended_at": time_text(task.ended_at_ms) if task else None,
        "slices": [slice_view(piece, gpus.get(piece.gpu)) for piece in placement.slices] if placement else [],
    }


def slice_view(piece: Slice, gpu: Gpu | None) -> View:
    """What is granted of one GPU, and who holds the slice to it."""
    held = holder(piece.isolation)
    return {
        "gpu": piece.gpu,
        "index": gpu.index if gpu else None,
        "model": gpu.model if gpu else None,
        "memory_mib": piece.memory_mib,
        "compute_milli": piece.compute_milli,
        "isolation": piece.isolation,
        "memory_by": held.memory_by,
        "compute_by": held.compute_by,
    }


def asked_view(spec: JobSpec) -> View:
    """What a waiting job wants in all."""
    pieces = [(task.count * task.gpus.count, task.gpus, task) for task in spec.tasks]
    memory = [
        None if gpus.memory_mib is None else count * gpus.memory_mib for count, gpus, _ in pieces if count
    ]
    return {
        "tasks": spec.task_count,
        "gpus": spec.gpu_count,
        # Unknown until it is placed where any of it means "all the memory of the card it gets".
        "gpu_memory_mib": None if None in memory else sum(part for part in memory if part is not None),
        "gpu_compute_milli": sum(count * gpus.compute_milli for count, gpus, _ in pieces),
        "cpu_milli": sum(task.count * task.cpu_milli for _, _, task in pieces),
        "memory_mib": sum(task.count * task.memory_mib for _, _, task in pieces),
    }


def application_view(application: records.Application) -> View:
    return {
        "id": application.id,
        "tenant": application.tenant,
        "quota_memory_mib": application.quota_memory_mib,
        "text": application.text,
        "at": time_text(application.at_ms),
        "state": application.state,
        "answer": application.answer,
        "answered_at": time_text(application.answered_at_ms),
    }


def token_view(digest: str, token: records.Token) -> View:
    return {
        "sha256": digest,
        "role": token.role,
        "tenant": token.tenant,
        "label": token.label,
        "created_at": time_text(token.created_at_ms),
    }


def tenant_view(
    tenant: Tenant,
    *,
    used_memory_mib: int,
    used_compute_milli: int,
    running: int,
    waiting: int,
    shares: View,
) -> View:
    """A quota below its use is a fact to show, not an error: `over_by` says how far, `headroom` is never negative."""
    return {
        "name": tenant.name,
        "quota_memory_mib": tenant.quota_memory_mib,
        "limit_memory_mib": tenant.limit_memory_mib,
        "limit_compute_milli": tenant.limit_compute_milli,
        "weight": tenant.weight,
        "closing": tenant.closing,
        "used_memory_mib": used_memory_mib,
        "used_compute_milli": used_compute_milli,
        "over_by_memory_mib": max(0, used_memory_mib - tenant.quota_memory_mib),
        "headroom_memory_mib": max(0, tenant.quota_memory_mib - used_memory_mib),
        "running": running,
        "waiting": waiting,
        **shares,
    }


def link_views(inventory: NodeInventory) -> list[View]:
    return [
        {"first": link.first, "second": link.second, "level": link.level.value, "nvlinks": link.nvlinks}
        for link in inventory.links
    ]
