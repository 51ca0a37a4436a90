"""What must always hold (section 9 of the design, items 1 to 3), recomputed from scratch and not from any index.

Each function raises AssertionError with what is wrong. They take the frozen values that the core hands out, so every
test that touches state can end with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from coordinator.cycle import Plan
from coordinator.lifecycle import settle, settle_job
from coordinator.model import Job, JobState, TaskPlacement
from coordinator.nodes import NodeStatus
from coordinator.snapshot import Snapshot, shape_of
from vgpu.reasons import Reason

MAY_HOLD = (JobState.ALLOCATED, JobState.EVICTING, JobState.CANCELLING, JobState.LOST)


def check_snapshot(snapshot: Snapshot) -> None:
    """No GPU is over-committed, gangs are whole, states are legal, and every index says what the jobs say."""
    _check_states(snapshot)
    _check_capacity(snapshot, [(job, p) for job in snapshot.jobs.values() for p in _placed(job)])
    _check_free(snapshot)
    _check_indexes(snapshot)


def check_plan(snapshot: Snapshot, plan: Plan) -> None:
    """With the plan carried out the same still holds, and nobody got what he may not have."""
    ids = [placement.job.id for placement in plan.placements]
    assert len(ids) == len(set(ids)), "a job is placed twice"
    uses = [(job, placed) for job in snapshot.jobs.values() for placed in _placed(job)]
    for placement in plan.placements:
        job, allocation = placement.job, placement.allocation
        assert snapshot.waiting_jobs.get(job.id) == job, f"{job.id} does not wait"
        assert job.id not in snapshot.jobs, f"{job.id} lives already"
        assert allocation.attempt == job.attempt
        assert allocation.standing is not None, "no reason is given why it is next"
        assert allocation.placed is not None, "no reason is given why there"
        uses += [(job, placed) for placed in allocation.tasks]
        _check_gang(job, allocation.tasks)
        for placed in allocation.tasks:
            _check_may_hold(snapshot, job, placed)
    _check_capacity(snapshot, uses)
    _check_limits(snapshot, plan)
    assert set(plan.waiting) == set(snapshot.waiting_jobs) - set(ids), "a waiting job has no reason"
    for id in list(plan.waiting)[:50]:
        check_reason(plan.waiting[id])


def check_reason(reason: Reason) -> None:
    """QT-6: no count is negative."""
    assert all(value >= 0 for value in reason.numbers.values()), f"negative number in {reason}"


def _placed(job: Job) -> Iterable[TaskPlacement]:
    return job.allocation.tasks if job.allocation is not None else ()


def _check_states(snapshot: Snapshot) -> None:
    for job in snapshot.jobs.values():
        assert job.state in MAY_HOLD, f"{job.id} holds slices in state {job.state.value}"
        assert job.allocation is not None
        assert job.allocation.attempt == job.attempt, f"{job.id} holds slices of another attempt"
        _check_gang(job, job.allocation.tasks)
    for job in snapshot.waiting_jobs.values():
        assert job.state is JobState.PENDING, f"{job.id} waits in state {job.state.value}"
        assert job.allocation is None, f"{job.id} waits and holds"
    for job in snapshot.done.values():
        assert job.state.is_final, f"{job.id} has ended in state {job.state.value}"
        assert job.allocation is None, f"{job.id} has ended and holds"
    folders = [set(snapshot.jobs), set(snapshot.waiting_jobs), set(snapshot.done)]
    assert len(set().union(*folders)) == sum(map(len, folders)), "a job stands in two folders"


def _check_gang(job: Job, tasks: Iterable[TaskPlacement]) -> None:
    """All its tasks, each with all its slices on distinct GPUs, each slice at least what was asked for."""
    tasks = list(tasks)
    assert [placed.task for placed in tasks] == list(range(job.spec.task_count)), f"{job.id} is not whole"
    for placed in tasks:
        wanted = job.spec.task(placed.task).gpus
        assert len({piece.gpu for piece in placed.slices}) == len(placed.slices) == wanted.count
        for piece in placed.slices:
            assert piece.memory_mib >= (wanted.memory_mib or 1)
            assert piece.compute_milli >= wanted.compute_milli


def _check_capacity(snapshot: Snapshot, uses: Iterable[tuple[Job, TaskPlacement]]) -> None:
    memory: dict[tuple[str, str], int] = defaultdict(int)
    compute: dict[tuple[str, str], int] = defaultdict(int)
    owners: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    cpu: dict[str, int] = defaultdict(int)
    node_memory: dict[str, int] = defaultdict(int)
    for job, placed in uses:
        cpu[placed.node] += placed.cpu_milli
        node_memory[placed.node] += placed.memory_mib
        for piece in placed.slices:
            key = (placed.node, piece.gpu)
            assert min(piece.memory_mib, piece.compute_milli) > 0, f"{job.id} holds an empty slice"
            memory[key] += piece.memory_mib
            compute[key] += piece.compute_milli
            owners[key].append((job.id, piece.isolation))
    for view in snapshot.nodes.values():
        if view.inventory is None:
            continue
        assert cpu[view.name] <= view.inventory.cpu_milli, f"CPU of {view.name} is over-committed"
        assert node_memory[view.name] <= view.inventory.memory_mib, f"memory of {view.name} is over-committed"
        for gpu in view.inventory.gpus:
            key = (view.name, gpu.uuid)
            assert memory[key] <= gpu.memory_mib, f"memory of {gpu.uuid} is over-committed"
            assert compute[key] <= gpu.compute_milli, f"compute of {gpu.uuid} is over-committed"
            exclusive = [id for id, isolation in owners[key] if isolation == "exclusive"]
            assert not exclusive or len(owners[key]) == 1, f"{gpu.uuid} is exclusive and shared"


def _check_free(snapshot: Snapshot) -> None:
    """Free is what no live job holds, or less; never negative."""
    for view in snapshot.nodes.values():
        uses = [p for job in snapshot.jobs.values() for p in _placed(job) if p.node == view.name]
        assert len(view.uses) == len(uses), f"{view.name} forgot a use"
        assert view.cpu_free_milli == max(0, view.cpu_milli - sum(use.cpu_milli for use in uses))
        for gpu in view.gpus:
            held = [piece for use in uses for piece in use.slices if piece.gpu == gpu.gpu.uuid]
            left_mib = gpu.gpu.memory_mib - sum(piece.memory_mib for piece in held)
            left_milli = gpu.gpu.compute_milli - sum(piece.compute_milli for piece in held)
            assert 0 <= gpu.memory_free_mib <= max(0, left_mib)
            assert 0 <= gpu.compute_free_milli <= max(0, left_milli)
            if gpu.closed is not None:
                assert gpu.memory_free_mib == gpu.compute_free_milli == 0


def _check_indexes(snapshot: Snapshot) -> None:
    lines: dict[tuple[str, int, object], set[str]] = defaultdict(set)
    for job in snapshot.waiting_jobs.values():
        lines[job.tenant, job.spec.priority, shape_of(job.spec)].add(job.id)
    seen: dict[tuple[str, int, object], set[str]] = {}
    for tenant, own in snapshot.lines.items():
        for key, jobs in own.items():
            seen[tenant, key.priority, key.shape] = {job.id for job in jobs}
            ages = [(job.submitted_at_ms, job.id) for job in jobs]
            assert ages == sorted(ages), "a line is out of order"
            assert all(snapshot.waiting_jobs[job.id] == job for job in jobs), "a line holds an old record"
    assert seen == dict(lines), "the lines are not the waiting jobs"
    held: dict[str, tuple[int, int]] = {}
    for job in snapshot.jobs.values():
        compute, memory = held.get(job.tenant, (0, 0))
        assert job.allocation is not None
        held[job.tenant] = (compute + job.allocation.compute_milli, memory + job.allocation.memory_mib)
    have = {tenant: (use.compute, use.memory) for tenant, use in snapshot.held.items()}
    assert {t: use for t, use in held.items() if use != (0, 0)} == have, "what tenants hold was counted wrong"
    full = [t for id in sorted(snapshot.jobs) if (t := settle_job(snapshot.jobs[id], snapshot)) is not None]
    assert list(settle(snapshot)) == full, "a live job that must be settled was not looked at"


def _check_may_hold(snapshot: Snapshot, job: Job, placed: TaskPlacement) -> None:
    view = snapshot.nodes[placed.node]
    assert view.status is NodeStatus.READY, f"{view.name} takes no work"
    assert not view.is_cordoned, f"{view.name} is cordoned"
    assert all(view.labels.get(label) == value for label, value in job.spec.constraints.items())
    gpus = {gpu.gpu.uuid: gpu for gpu in view.gpus}
    for piece in placed.slices:
        assert gpus[piece.gpu].closed is None, f"{piece.gpu} may not be given out"


def _check_limits(snapshot: Snapshot, plan: Plan) -> None:
    memory: dict[str, int] = defaultdict(int)
    compute: dict[str, int] = defaultdict(int)
    for placement in plan.placements:
        memory[placement.job.tenant] += placement.allocation.memory_mib
        compute[placement.job.tenant] += placement.allocation.compute_milli
    for tenant in memory:
        record = snapshot.tenant(tenant)
        now = [job.allocation for job in snapshot.jobs.values() if job.tenant == tenant and job.allocation]
        if record.limit_memory_mib is not None and memory[tenant]:
            assert sum(a.memory_mib for a in now) + memory[tenant] <= record.limit_memory_mib
        if record.limit_compute_milli is not None and compute[tenant]:
            assert sum(a.compute_milli for a in now) + compute[tenant] <= record.limit_compute_milli
