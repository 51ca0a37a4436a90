"""Whether one task fits on what is left of one node, on which GPUs, and how good that is.

The filters, in this order; the first that refuses is the reason (the node's own state and its labels come before
them, in `coordinator.placement`):

    GPU model -> idle GPUs and total free memory -> distinct GPUs -> each GPU's free memory -> each GPU's free compute
    -> isolation -> CPU -> memory of the node

Scores are tuples of whole numbers, lower is better. A MIG instance counts as a card of its own size that is given
out whole (MG-1, MG-2); a whole-card job needs a whole card, so it never gets one (MG-5).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve, frozen

from coordinator.gpus import Piece
from coordinator.nodes import NodeView, Row
from coordinator.snapshot import TaskShape
from coordinator.usage import NO_USE, Use
from coordinator.worth import Worth
from vgpu import isolation
from vgpu.inventory import Gpu
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import SliceRequest
from vgpu.topology import Location, TopologyCosts, least_cost_set, node_cost

Score = tuple[int, ...]


@frozen
class Fit:
    """The GPUs of the node that the task would get, by their place in its inventory, in what isolation, and the
    score. `cost` is the communication cost of the set, `use` what all its slices hold together."""

    gpus: tuple[int, ...]
    isolations: tuple[str, ...]
    score: Score
    cost: int = 0
    use: Use = NO_USE


def fit(task: TaskShape, row: Row, worth: Worth | None = None) -> Fit | ReasonCode:
    """A function of its arguments alone, so that nodes alike share the answer. With `worth` the preference for what
    is broken already gives way to the least loss of worth."""
    names: dict[int, str] | ReasonCode = _gpu_fit(task.gpus, row) if task.gpus.count else {}
    if isinstance(names, ReasonCode):
        return names
    if row.cpu_milli < task.cpu_milli:
        return ReasonCode.NOT_ENOUGH_CPU
    if row.memory_mib < task.memory_mib:
        return ReasonCode.NOT_ENOUGH_NODE_MEMORY
    return _choice(task, row, names, worth)


def memory_need_mib(request: SliceRequest, gpu: Gpu) -> int:
    """What a slice takes of this GPU: all of it where the request names no size."""
    return gpu.memory_mib if request.memory_mib is None else request.memory_mib


def matches_model(request: SliceRequest, gpu: Gpu) -> bool:
    return request.model.lower() in gpu.model.lower()


def use_of(request: SliceRequest, kinds: Sequence[Gpu], gpus: Sequence[int], names: Sequence[str]) -> Use:
    """What slices on these GPUs hold together (QT-1)."""
    cut = [isolation.cut(request, kinds[gpu], name) for gpu, name in zip(gpus, names, strict=True)]
    return Use(sum(piece.compute_milli for piece in cut), sum(piece.memory_mib for piece in cut))


def after(task: TaskShape, row: Row, found: Fit) -> Row:
    """The row once the task is there."""
    pieces = list(row.pieces)
    for gpu, name in zip(found.gpus, found.isolations, strict=True):
        taken, piece = isolation.cut(task.gpus, row.build.gpus[gpu], name), pieces[gpu]
        pieces[gpu] = Piece(
            piece.memory_mib - taken.memory_mib,
            piece.compute_milli - taken.compute_milli,
            tuple(sorted({*piece.sharing, name})),
        )
    return Row(row.build, row.cpu_milli - task.cpu_milli, row.memory_mib - task.memory_mib, tuple(pieces))


def _gpu_fit(request: SliceRequest, row: Row) -> dict[int, str] | ReasonCode:
    """The GPUs that can take a slice, each with the isolation that it would have."""
    kinds, pieces = row.build.gpus, row.pieces
    matching = [n for n, kind in enumerate(kinds) if matches_model(request, kind)]
    if not matching:
        return ReasonCode.GPU_MODEL_DIFFERS
    if request.is_whole:
        idle = [n for n in matching if row.is_idle(n) and kinds[n].compute_milli >= request.compute_milli]
        if len(idle) < request.count:
            return ReasonCode.NOT_ENOUGH_IDLE_GPUS
    else:
        wanted_mib = request.count * min(memory_need_mib(request, kinds[n]) for n in matching)
        if sum(pieces[n].memory_mib for n in matching) < wanted_mib:
            return ReasonCode.NOT_ENOUGH_TOTAL_MEMORY
    free = [n for n in matching if pieces[n].is_open]
    if len(free) < request.count:
        return ReasonCode.NOT_ENOUGH_DISTINCT_GPUS
    free = [n for n in free if _has_memory(request, row, n)]
    if len(free) < request.count:
        return ReasonCode.NOT_ENOUGH_GPU_MEMORY
    free = [n for n in free if pieces[n].compute_milli >= request.compute_milli]
    if len(free) < request.count:
        return ReasonCode.NOT_ENOUGH_GPU_COMPUTE
    names: dict[int, str] = {}
    for n in free:
        name = isolation.choose(request, kinds[n], row.build.isolations, pieces[n].sharing)
        if not isinstance(name, Reason):
            names[n] = name
    if len(names) < request.count:
        return ReasonCode.NO_ISOLATION
    return names


def _has_memory(request: SliceRequest, row: Row, gpu: int) -> bool:
    kind, piece = row.build.gpus[gpu], row.pieces[gpu]
    if kind.is_mig_instance and not row.is_idle(gpu):
        return False
    return piece.memory_mib >= memory_need_mib(request, kind)


def _choice(task: TaskShape, row: Row, names: Mapping[int, str], worth: Worth | None) -> Fit:
    """The GPUs and the score, by what the task needs in all. Several slices talk to each other however small they
    are, so they are placed like several GPUs. A node without domains below itself counts as domain 0: which of such
    nodes is broken is not a question of communication."""
    request, free, cost = task.gpus, list(names), 0
    gpus: tuple[int, ...] = ()
    score: Score = ()
    if request.count > 1:
        best = least_cost_set(row.build.topology, free, request.count)
        assert best is not None
        gpus, cost, size = best
        score = (cost, 0 if row.build.topology.is_flat else size)
    elif request.is_whole and request.count:
        gpus = (_worst_connected(row, free),)
        mean = row.build.topology.mean_cost_milli
        # A GPU with no other beside it is the worst connected of all.
        score = (0 if mean < 0 else 1, -mean, 0 if _has_broken_group(row) else 1)
    elif request.count:
        return _fraction(task, row, names, worth)
    found = _found(task, row, gpus, names, (), cost)
    if worth is not None:
        loss = worth.loss(row, after(task, row, found))
        score += (loss,) if request.count else (loss, 1 if row.pieces else 0)
    elif request.count:
        score += (row.idle_gpus, row.gpu_memory_mib)
    else:
        # A task without GPUs goes where the fewest are, then where it leaves the least CPU over.
        score = (len(row.pieces), row.cpu_milli - task.cpu_milli, row.memory_mib - task.memory_mib)
    return evolve(found, score=score)


def _found(
    task: TaskShape, row: Row, gpus: tuple[int, ...], names: Mapping[int, str], score: Score, cost: int = 0
) -> Fit:
    isolations = tuple(names[n] for n in gpus)
    return Fit(gpus, isolations, score, cost, use_of(task.gpus, row.build.gpus, gpus, isolations))


def _fraction(task: TaskShape, row: Row, names: Mapping[int, str], worth: Worth | None) -> Fit:
    """The GPU on which a part of it leaves the least fragmentation. Of GPUs that lose as little worth, one that is
    broken already: a size that fits beside the large ones of the mix loses nothing on an idle GPU either, and jobs
    leave, so that an idle one stays idle for whoever needs it whole."""
    answers: list[tuple[Score, int]] = []
    for gpu in names:
        if worth is None:
            left = _left_over(task.gpus, row, gpu)
            opens = left[0] == 2
            answers.append(((*left, row.idle_gpus - opens, row.gpu_memory_mib), gpu))
        elif row.build.gpus[gpu].is_mig_instance:
            # Nobody else can have the rest of it, so it costs what is wasted.
            answers.append(((row.pieces[gpu].compute_milli - task.gpus.compute_milli, 0), gpu))
        else:
            loss = worth.loss(row, after(task, row, _found(task, row, (gpu,), names, ())))
            answers.append(((loss, int(row.is_idle(gpu))), gpu))
    score, gpu = min(answers)
    return _found(task, row, (gpu,), names, score)


def _worst_connected(row: Row, free: Sequence[int]) -> int:
    """The idle GPU that is farthest from the other idle ones, so that taking it breaks the worst set; then the one
    farthest from all GPUs of the node; then the first."""
    topology, everything = row.build.topology, range(len(row.pieces))
    idle = [n for n in everything if row.is_idle(n)]
    return min(free, key=lambda n: (-topology.cost_to(n, idle), -topology.cost_to(n, everything), n))


def _has_broken_group(row: Row) -> bool:
    """An idle GPU stands nearest to one that is not: taking it breaks no NVLink group, no pair behind a switch."""
    topology = row.build.topology
    return not topology.is_flat and any(
        row.is_idle(gpu) and not all(row.is_idle(other) for other in topology.nearest(gpu))
        for gpu in range(len(row.pieces))
    )


def _left_over(request: SliceRequest, row: Row, gpu: int) -> tuple[int, int]:
    """How much fragmentation a fraction leaves on a GPU: (kind of break, thousandths left over or wasted).

    0: the rest of a GPU that is broken already; 1: a MIG instance, of which nobody can have the rest; 2: a GPU that
    was whole until now."""
    kind, piece = row.build.gpus[gpu], row.pieces[gpu]
    memory_mib = piece.memory_mib - memory_need_mib(request, kind)
    left = 1000 * memory_mib // kind.memory_mib + piece.compute_milli - request.compute_milli
    if kind.is_mig_instance:
        return 1, left
    return (2 if row.is_idle(gpu) else 0), left


def remoteness(views: Iterable[NodeView], costs: TopologyCosts) -> dict[Location, int]:
    """Sum of the costs from a node at each place to all other nodes; by place, not by node, since there are few."""
    nodes_at: dict[Location, int] = {}
    for view in views:
        nodes_at[view.location] = nodes_at.get(view.location, 0) + 1
    zones: dict[str, int] = {}
    for place, count in nodes_at.items():
        zones[place.zone] = zones.get(place.zone, 0) + count
    total = sum(zones.values())
    other = Location("-", "-"), Location("--", "--")
    far = node_cost(*other, costs)
    near = node_cost(Location("-", "-"), Location("-", "--"), costs)
    return {
        place: (count - 1) * costs.rack
        + (zones[place.zone] - count) * near
        + (total - zones[place.zone]) * far
        for place, count in nodes_at.items()
    }
