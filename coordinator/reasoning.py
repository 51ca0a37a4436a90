"""Why a waiting job waits, and whether it can ever run here. Found when asked for, once for each shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from msgspec.structs import replace

from coordinator import gangs
from coordinator.fairness import Entitlement, Standings, headroom, over_limit
from coordinator.fit import Fit, fit, matches_model, memory_need_mib
from coordinator.holds import Room, elsewhere, waits_for
from coordinator.lifecycle import REFUSED_SECONDS
from coordinator.lineup import Cards
from coordinator.model import Job, Tenant
from coordinator.nodes import NodeView, Row
from coordinator.placement import Draft, empty_draft, wait_reason
from coordinator.queues import is_ready
from coordinator.snapshot import Shape, Snapshot, TaskShape, shape_of
from coordinator.usage import Use
from jobspecs.spec import JobSpec
from vgpu.inventory import Gpu
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import SliceRequest


class Waiting(Mapping[str, Reason]):
    """A reason for every job that the plan leaves waiting. Reasons of a shape are of the end of the cycle."""

    def __init__(
        self,
        snapshot: Snapshot,
        room: Room,
        standings: Standings,
        entitlement: Entitlement,
        cards: Cards,
        placed: frozenset[str],
    ) -> None:
        self._snapshot = snapshot
        self._room = room
        self._standings = standings
        self._entitlement = entitlement
        self._cards = cards
        self._placed = placed
        self._by_shape: dict[Shape, Reason | None] = {}
        self._in_draft: dict[tuple[Shape, Draft], bool] = {}
        self._never: dict[Shape, Reason | None] = {}

    def __len__(self) -> int:
        return len(self._snapshot.waiting_jobs) - len(self._placed)

    def __iter__(self) -> Iterator[str]:
        return (id for id in self._snapshot.waiting_jobs if id not in self._placed)

    def __getitem__(self, id: str) -> Reason:
        if id in self._placed:
            raise KeyError(id)
        job = self._snapshot.waiting_jobs[id]
        shape = shape_of(job.spec)
        never = self._never_reason(job, shape)
        if never is not None:
            return never
        reservation = self._room.reservation
        if reservation is not None and id == reservation.job.id:
            numbers = {
                **wait_reason(shape, self._room.draft).numbers,
                **waits_for(reservation, self._snapshot),
            }
            return Reason(ReasonCode.RESERVED, numbers, tuple(sorted(reservation.nodes)))
        if not is_ready(job, self._snapshot.now_ms):
            left_ms = job.not_before_ms - self._snapshot.now_ms
            return Reason(ReasonCode.BACK_OFF, {"seconds": (left_ms + 999) // 1000})
        need, tenant = self._cards.needs(shape).use, job.tenant
        if not self._standings.headroom(tenant).allows(need):
            record = self._snapshot.tenant(tenant)
            return over_limit(record, self._standings.held(tenant), need)
        reason = self._shape_reason(shape)
        if reason is None and self._waits_for_others(job, shape):
            left_ms = job.queued_at_ms + 1000 * REFUSED_SECONDS - self._snapshot.now_ms
            return Reason(ReasonCode.NODES_REFUSED, {"seconds": (left_ms + 999) // 1000}, job.refused_by)
        return reason or self._kept_off(job, shape, need) or self._behind(job)

    def _waits_for_others(self, job: Job, shape: Shape) -> bool:
        """What has room are only nodes that would not start it."""
        return self._room.avoids(job, shape) and not self._fits(elsewhere(job, shape), self._room.draft)

    def _never_reason(self, job: Job, shape: Shape) -> Reason | None:
        if shape not in self._never:
            self._never[shape] = _fits_never(shape, self._snapshot)
        limited = _beyond_limit(shape, self._snapshot.tenant(job.tenant), self._cards)
        return limited or self._never[shape]

    def _shape_reason(self, shape: Shape) -> Reason | None:
        """Why the shape does not fit, whoever has it; None where it does."""
        if shape not in self._by_shape:
            draft = self._room.draft
            self._by_shape[shape] = None if self._fits(shape, draft) else wait_reason(shape, draft)
        return self._by_shape[shape]

    def _fits(self, shape: Shape, draft: Draft) -> bool:
        if (shape, draft) not in self._in_draft:
            self._in_draft[shape, draft] = self._room.spots(shape, gangs.NO_LIMIT, draft) is not None
        return self._in_draft[shape, draft]

    def _kept_off(self, job: Job, shape: Shape, need: Use) -> Reason | None:
        """Why what is free is not for this job; None where it is."""
        reservation = self._room.reservation
        if reservation is None:
            return None
        is_owed = self._entitlement.covers(
            job.tenant, self._standings.held_mib(job.tenant), need.memory, self._room.is_starved(job)
        )
        draft = self._room.open_to(job, is_owed)
        if draft is not None and self._fits(shape, draft):
            return None
        holder = reservation.job
        if self._room.stops_borrowing and not is_owed:
            return Reason(ReasonCode.BORROWING_STOPPED, subjects=(holder.id, job.tenant))
        if reservation.is_overdue:
            reason = wait_reason(shape, self._room.draft if draft is None else draft)
            return Reason(ReasonCode.HELD_FOR_LONG_WAIT, reason.numbers, (holder.id,))
        return Reason(ReasonCode.RESERVED_FOR_OTHER, waits_for(reservation, self._snapshot), (holder.id,))

    def _behind(self, job: Job) -> Reason:
        """It fits, and a tenant or a job before it is not done yet: the cycle was full."""
        own = self._placed_of[job.tenant]
        if own:
            return Reason(ReasonCode.BEHIND_OWN_JOBS, {"placed_before": own}, (job.tenant,))
        return Reason(ReasonCode.BEHIND_OTHER_TENANTS, {"placed_before": len(self._placed)})

    @cached_property
    def _placed_of(self) -> Counter[str]:
        """By tenant."""
        return Counter(self._snapshot.waiting_jobs[id].tenant for id in self._placed)


def why_never(spec: JobSpec, snapshot: Snapshot) -> Reason | None:
    """Why a job can never run on this cluster or within its tenant's limit, with everything on it idle and well.
    None if it can, or if no node is known yet. Nodes that are down count as there (QF-2): they may be repaired."""
    shape = shape_of(spec)
    limited = _beyond_limit(shape, snapshot.tenant(spec.tenant), Cards(snapshot.kinds))
    return limited or _fits_never(shape, snapshot)


def _fits_never(shape: Shape, snapshot: Snapshot) -> Reason | None:
    if shape.task_count == 0:
        return Reason(ReasonCode.MISSING_FIELD, subjects=("tasks",))
    known = [view for view in snapshot.nodes.values() if view.inventory is not None]
    if not known:
        return None
    allowed = [view for view in known if _has_labels(view, shape)]
    if not allowed:
        names = tuple(f"{label}={value}" for label, value in shape.constraints)
        return Reason(ReasonCode.LABELS_DIFFER, {"nodes": len(known)}, names)
    builds = {view.row.build: view for view in allowed}
    rows = [view.full_row for view in builds.values()]
    for task in shape.tasks:
        reason = _task_never(task, rows)
        if reason is not None:
            return reason
    return _gang_never(shape, snapshot, allowed) if shape.task_count > 1 else None


def _has_labels(view: NodeView, shape: Shape) -> bool:
    return all(view.labels.get(label) == value for label, value in shape.constraints)


def _beyond_limit(shape: Shape, tenant: Tenant, cards: Cards) -> Reason | None:
    need = cards.needs(shape).use
    if headroom(tenant, Use()).allows(need):
        return None
    return replace(over_limit(tenant, Use(), need), code=ReasonCode.JOB_LARGER_THAN_LIMIT)


def _task_never(task: TaskShape, rows: Sequence[Row]) -> Reason | None:
    """The rows are those of empty nodes, one for each build."""
    answers = [fit(task, row) for row in rows]
    if any(isinstance(answer, Fit) for answer in answers):
        return None
    request = task.gpus
    if request.count:
        kinds = {gpu for row in rows for gpu in row.build.gpus if not gpu.unavailable}
        matching = [gpu for gpu in kinds if matches_model(request, gpu)]
        if not matching:
            return Reason(ReasonCode.NO_SUCH_GPU, {"gpus": request.count}, (request.model,))
        if not any(_is_enough(task, gpu) for gpu in matching):
            return _larger_than_any_gpu(request, matching)
    if ReasonCode.NO_ISOLATION in answers:
        return Reason(ReasonCode.NO_ISOLATION, subjects=(request.isolation,) if request.isolation else ())
    return _larger_than_any_node(task, rows)


def _larger_than_any_gpu(request: SliceRequest, gpus: Sequence[Gpu]) -> Reason:
    figures = (
        ("memory_mib", request.memory_mib or 0, max(gpu.memory_mib for gpu in gpus)),
        ("compute_milli", request.compute_milli, max(gpu.compute_milli for gpu in gpus)),
    )
    subjects = (request.model,) if request.model else ()
    return Reason(ReasonCode.SLICE_LARGER_THAN_ANY_GPU, _at_fault(*figures), subjects)


def _larger_than_any_node(task: TaskShape, rows: Sequence[Row]) -> Reason:
    """The GPUs, or of the nodes with as many of them CPU and memory."""
    wanted = task.gpus.count
    have = [sum(_is_enough(task, gpu) for gpu in row.build.gpus) for row in rows]
    gpus = [("gpus", wanted, max(have))] if wanted else []
    if max(have) < wanted:
        return Reason(ReasonCode.TASK_LARGER_THAN_ANY_NODE, _at_fault(*gpus))
    able = [row for row, count in zip(rows, have, strict=True) if count >= wanted]
    figures = (
        *gpus,
        ("cpu_milli", task.cpu_milli, max(row.cpu_milli for row in able)),
        ("node_memory_mib", task.memory_mib, max(row.memory_mib for row in able)),
    )
    return Reason(ReasonCode.TASK_LARGER_THAN_ANY_NODE, _at_fault(*figures))


def _at_fault(*figures: tuple[str, int, int]) -> dict[str, int]:
    """Of (figure, how much is needed, the largest there is) those that are needed and not there, each beside the largest;
    where each of them would do alone, all."""
    beyond = [(name, need, largest) for name, need, largest in figures if need > largest]
    numbers: dict[str, int] = {}
    for name, need, largest in beyond or figures:
        numbers |= {name: need, f"largest_{name}": largest}
    return numbers


def _gang_never(shape: Shape, snapshot: Snapshot, allowed: Sequence[NodeView]) -> Reason | None:
    if gangs.place(empty_draft(snapshot), shape, gangs.NO_LIMIT) is not None:
        return None
    numbers = {
        "tasks": shape.task_count,
        "gpus": shape.gpu_count,
        "cluster_gpus": sum(1 for view in allowed for gpu in view.facts.gpus if not gpu.unavailable),
        "cpu_milli": shape.cpu_milli,
        "cluster_cpu_milli": sum(view.cpu_milli for view in allowed),
    }
    return Reason(ReasonCode.JOB_LARGER_THAN_CLUSTER, numbers)


def _is_enough(task: TaskShape, gpu: Gpu) -> bool:
    is_large = (
        gpu.memory_mib >= memory_need_mib(task.gpus, gpu) and gpu.compute_milli >= task.gpus.compute_milli
    )
    return matches_model(task.gpus, gpu) and not gpu.unavailable and is_large
