"""What is on the GPUs of a node, and what is left of them: derived from the node's records and the tasks there.

Placement only needs `pieces`. Everything else about a GPU is what people look at, and is derived when they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct

from coordinator.model import Job, NodeAdmin, TaskPlacement
from vgpu.inventory import Gpu, GpuReport, NodeInventory, NodeReport
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import Slice

# What a driver and its persistence daemon keep on an idle GPU whose processes cannot be listed.
DRIVER_CONTEXT_MIB = 512


class Use(Struct, frozen=True, order=True, gc=False):
    """One task of a live job on a node, the `number`th of its allocation. Uses are in the order of their first fields,
    which stand here too, since to look them up in the job costs a node of many jobs more than everything else."""

    id: str
    task: int
    number: int
    job: Job
    placement: TaskPlacement

    @property
    def attempt_key(self) -> str:
        return f"{self.id}.{self.job.attempt}.{self.task}"


class Piece(NamedTuple):
    """What is left of one GPU, and the isolations of the slices that are on it. Nothing is left of a closed one."""

    memory_mib: int
    compute_milli: int
    sharing: tuple[str, ...] = ()
    is_open: bool = True


class NodeFacts(Struct, frozen=True, gc=False):
    """The records of a node as they were last seen, and what the cluster knows about it beside them. `claimed_twice` are
    GPUs that another node has too; `released` attempts whose end is confirmed, and since when. `silent_together`: so many
    nodes fell silent with it that it is not given up (`coordinator.silence`); 0 for a node of its own."""

    name: str
    inventory: NodeInventory | None = None
    report: NodeReport | None = None
    admin: NodeAdmin | None = None
    missing_since_ms: int | None = None
    unreadable: tuple[str, ...] = ()
    claimed_twice: frozenset[str] = frozenset()
    released: Mapping[str, int] = {}
    silent_together: int = 0

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.inventory.gpus if self.inventory is not None else ()


class GpuView(Struct, frozen=True, gc=False):
    """One GPU with what is on it. Free figures are 0 and never negative; `closed` says why nothing may be placed.
    `slices` are those of it, each with its task; `foreign_memory_mib` is used by processes that are none of ours."""

    gpu: Gpu
    memory_free_mib: int
    compute_free_milli: int
    slices: tuple[tuple[Use, Slice], ...] = ()
    foreign_memory_mib: int = 0
    closed: Reason | None = None
    report: GpuReport | None = None

    @property
    def is_idle(self) -> bool:
        """Open, with nobody on it: a whole-card job may have it."""
        return self.closed is None and not self.slices and self.foreign_memory_mib == 0


def gpu_views(facts: NodeFacts, uses: Sequence[Use]) -> tuple[GpuView, ...]:
    return tuple(
        GpuView(gpu, free_mib, free_milli, tuple(there), foreign_mib, closed, report)
        for gpu, there, report, (free_mib, free_milli, foreign_mib, closed) in _looked_at(
            facts, uses, facts.gpus
        )
    )


def pieces(facts: NodeFacts, uses: Sequence[Use], gpus: Sequence[Gpu]) -> list[Piece]:
    """Of these GPUs of the node."""
    found = []
    for _, there, _, (free_mib, free_milli, _, closed) in _looked_at(facts, uses, gpus):
        sharing = _sharing(frozenset([piece.isolation for _, piece in there])) if there else ()
        found.append(_piece(free_mib, free_milli, sharing, closed is None))
    return found


# Of GPUs with as much left one object: a large cluster has ten times more of them than there are kinds of rest.
_piece = lru_cache(maxsize=1 << 14)(Piece)


@lru_cache(maxsize=1 << 10)
def _sharing(isolations: frozenset[str]) -> tuple[str, ...]:
    """The same tuple for all GPUs that are shared alike."""
    return tuple(sorted(isolations))


_Slices = list[tuple[Use, Slice]]
# Free memory and compute; memory of processes that are none of ours; why it is closed.
_Left = tuple[int, int, int, Reason | None]


def _looked_at(
    facts: NodeFacts, uses: Sequence[Use], gpus: Sequence[Gpu]
) -> Iterator[tuple[Gpu, _Slices, GpuReport | None, _Left]]:
    """Each of the GPUs, the slices of it, what it reported, and what is left."""
    on: dict[str, _Slices] = {gpu.uuid: [] for gpu in gpus}
    for use in uses:
        for piece in use.placement.slices:
            if piece.gpu in on:
                on[piece.gpu].append((use, piece))
    reports = {report.uuid: report for report in facts.report.gpus} if facts.report else {}
    held = _held_elsewhere(facts, on)
    for gpu in gpus:
        there = on[gpu.uuid]
        yield gpu, there, reports.get(gpu.uuid), _left(gpu, there, reports, held, facts.claimed_twice)


def _left(
    gpu: Gpu,
    slices: _Slices,
    reports: Mapping[str, GpuReport],
    held: Mapping[str, tuple[str, ...]],
    claimed_twice: frozenset[str],
) -> _Left:
    foreign_mib, is_unknown = _foreign(reports.get(gpu.uuid), bool(slices) or gpu.uuid in held)
    closed = _why_closed(gpu, reports, held, claimed_twice)
    if closed is None and is_unknown:
        closed = Reason(ReasonCode.GPU_OCCUPIED, subjects=(gpu.uuid,), detail="a process of unknown size")
    if closed is not None:
        return 0, 0, foreign_mib, closed
    used_mib, used_milli = foreign_mib, 0
    for _, piece in slices:
        used_mib += piece.memory_mib
        used_milli += piece.compute_milli
    return max(0, gpu.memory_mib - used_mib), max(0, gpu.compute_milli - used_milli), foreign_mib, None


def _why_closed(
    gpu: Gpu,
    reports: Mapping[str, GpuReport],
    held: Mapping[str, tuple[str, ...]],
    claimed_twice: frozenset[str],
) -> Reason | None:
    if gpu.unavailable:
        return Reason(ReasonCode.GPU_UNHEALTHY, subjects=(gpu.uuid,), detail=gpu.unavailable)
    if gpu.uuid in claimed_twice:
        return Reason(ReasonCode.GPU_CLAIMED_TWICE, subjects=(gpu.uuid,))
    # A fault of a card is one of each MIG instance on it.
    for uuid in {gpu.uuid, gpu.card} if reports else ():
        if uuid in reports and reports[uuid].fault:
            return Reason(ReasonCode.GPU_UNHEALTHY, subjects=(gpu.uuid,), detail=reports[uuid].fault)
    if gpu.uuid in held:
        return Reason(ReasonCode.GPU_OCCUPIED, subjects=(gpu.uuid, *held[gpu.uuid]))
    return None


def _held_elsewhere(facts: NodeFacts, on: Mapping[str, _Slices]) -> dict[str, tuple[str, ...]]:
    """GPU -> attempts that exist on it by the node's account, as a container or as a process, though no live job holds
    it for them (DA-9). Of the GPUs in `on`, with what is held of each.

    A report that is older than the confirmed end of an attempt says nothing about it any more, so that slices are
    free at once and not only after the next report (LK-10)."""
    if facts.report is None:
        return {}
    held: dict[str, set[str]] = {}
    granted: dict[str, set[str]] = {}
    for attempt_key, uuid in present(facts.report):
        if uuid not in on or facts.released.get(attempt_key, -1) >= facts.report.at_ms:
            continue
        if uuid not in granted:
            granted[uuid] = {use.attempt_key for use, _ in on[uuid]}
        if attempt_key not in granted[uuid]:
            held.setdefault(uuid, set()).add(attempt_key)
    return {uuid: tuple(sorted(keys)) for uuid, keys in held.items()}


def present(report: NodeReport) -> Iterator[tuple[str, str]]:
    """(attempt, GPU) of everything of ours that the node saw."""
    for attempt_key, uuids in report.held.items():
        yield from ((attempt_key, uuid) for uuid in uuids)
    for gpu in report.gpus:
        yield from ((process.attempt, gpu.uuid) for process in gpu.processes or () if process.attempt)


def _foreign(report: GpuReport | None, is_ours: bool) -> tuple[int, bool]:
    """(memory used by processes that are none of ours, whether there is one of unknown size)."""
    if report is None:
        return 0, False
    if report.processes is None:
        # Without a list of processes, use of a GPU where we have nobody must be somebody else's.
        used_mib = report.memory_used_mib or 0
        return (used_mib if not is_ours and used_mib > DRIVER_CONTEXT_MIB else 0), False
    foreign = [process for process in report.processes if not process.attempt]
    known = sum(process.memory_mib for process in foreign if process.memory_mib is not None)
    return known, any(process.memory_mib is None for process in foreign)
