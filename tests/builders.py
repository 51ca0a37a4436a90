"""Clusters and jobs in the words of the domain, with defaults for everything a test does not care about.

`World` is the small hand of a scheduler: it feeds events to a `Cluster`, plans, commits plans and ends jobs, and
checks the invariants after every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from coordinator import lifecycle, model
from coordinator.cluster import Cluster
from coordinator.config import FairnessSettings, Settings
from coordinator.cycle import Plan, plan_cycle
from coordinator.fairness import Policy, policy_from
from coordinator.model import Allocation, Job, JobState, Task, TaskPlacement, TaskState, Tenant
from coordinator.snapshot import Snapshot
from jobspecs.spec import JobSpec, TaskSpec
from tests.invariants import check_plan, check_snapshot
from vgpu.inventory import Gpu, GpuProcess, GpuReport, Link, LinkLevel, NodeInventory, NodeReport
from vgpu.slices import Slice, SliceRequest

START_MS = 1_700_000_000_000
GIB = 1024
ALL_ISOLATIONS = ("exclusive", "mps", "mig", "timeslice")


def settings(**changes: object) -> Settings:
    """Settings; those of fairness by their own names."""
    fairness = {name: changes.pop(name) for name in list(changes) if hasattr(FairnessSettings(), name)}
    return Settings(fairness=FairnessSettings(**fairness), **changes)  # type: ignore[arg-type]


def gpu(
    node: str, index: int, memory: int = 80 * GIB, model: str = "NVIDIA A100-SXM4-80GB", **changes: object
) -> Gpu:
    base = Gpu(
        uuid=f"GPU-{node}-{index}",
        index=index,
        model=model,
        memory_mib=memory,
        memory_total_mib=memory,
        device_paths=("/dev/null",),
        numa_node=0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def mig(node: str, card: int, index: int, memory: int, compute: int) -> Gpu:
    """An instance on `card`."""
    return gpu(
        node,
        index,
        memory,
        uuid=f"MIG-{node}-{card}-{index}",
        compute_milli=compute,
        parent=f"GPU-{node}-{card}",
        mig_profile="from-nvml",
    )


def links(gpus: Sequence[Gpu], groups: Sequence[Sequence[int]] = ()) -> tuple[Link, ...]:
    """NVLink inside each group, the socket link between them."""
    joined = {(a, b) for group in groups for a in group for b in group}
    return tuple(
        Link(first.uuid, second.uuid, LinkLevel.SYSTEM, 4 if (first.index, second.index) in joined else 0)
        for place, first in enumerate(gpus)
        for second in gpus[place + 1 :]
    )


def node(
    name: str,
    gpus: int | Sequence[Gpu] = 8,
    memory: int = 80 * GIB,
    model: str = "NVIDIA A100-SXM4-80GB",
    groups: Sequence[Sequence[int]] | None = None,
    cpu: int = 128_000,
    node_memory: int = 1024 * GIB,
    labels: Mapping[str, str] | None = None,
    isolations: Sequence[str] = ALL_ISOLATIONS,
    **changes: object,
) -> NodeInventory:
    """A node; eight GPUs stand in two NVLink groups of four unless `groups` says otherwise."""
    cards = [gpu(name, n, memory, model) for n in range(gpus)] if isinstance(gpus, int) else list(gpus)
    if groups is None:
        groups = ((0, 1, 2, 3), (4, 5, 6, 7))
    base = NodeInventory(
        node=name,
        machine_id=f"machine-{name}",
        agent_version="1",
        gpus=tuple(cards),
        links=links(cards, groups),
        cpu_milli=cpu,
        memory_mib=node_memory,
        labels=dict(labels or {}),
        isolations=tuple(isolations),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def report(
    name: str,
    at_ms: int = START_MS,
    held: Mapping[str, tuple[str, ...]] | None = None,
    foreign: Mapping[str, int] | None = None,
    faults: Mapping[str, str] | None = None,
) -> NodeReport:
    """`foreign`: MiB that somebody else uses, by UUID; `faults`: what is wrong with a GPU, by UUID."""
    foreign, faults = foreign or {}, faults or {}
    gpus = tuple(
        GpuReport(
            uuid,
            processes=(GpuProcess(1, foreign[uuid]),) if uuid in foreign else (),
            fault=faults.get(uuid, ""),
        )
        for uuid in sorted({*foreign, *faults})
    )
    return NodeReport(name, 1, at_ms, gpus, held=dict(held or {}))


def wants(
    gpus: int = 1, memory: int | None = None, compute: int | None = None, model: str = "", isolation: str = ""
) -> SliceRequest:
    """Whole cards unless `memory` or `compute` is given; a part of the memory alone takes that part of the compute
    of an 80 GiB card."""
    if compute is None:
        compute = 1000 if memory is None else max(1, min(1000, 1000 * memory // (80 * GIB)))
    return SliceRequest(gpus, memory, compute, model, isolation)


def spec(
    name: str = "job",
    tenant: str = "a",
    gpus: int = 1,
    memory: int | None = None,
    compute: int | None = None,
    model: str = "",
    isolation: str = "",
    count: int = 1,
    cpu: int = 1000,
    node_memory: int = 1024,
    tasks: Sequence[TaskSpec] | None = None,
    **changes: object,
) -> JobSpec:
    if tasks is None:
        request = wants(gpus, memory, compute, model, isolation)
        tasks = [TaskSpec(count=count, image="busybox", gpus=request, cpu_milli=cpu, memory_mib=node_memory)]
    base = JobSpec(name, tenant, tuple(tasks))
    return replace(base, **changes)  # type: ignore[arg-type]


def job(id: str, submitted: int = 0, **changes: object) -> Job:
    """A waiting job, submitted so many seconds after the start; other words as in `spec`."""
    at_ms = START_MS + 1000 * submitted
    fields = {name: changes.pop(name) for name in list(changes) if name in set(Job.__struct_fields__)}
    base = Job(id, spec(name=id, **changes), JobState.PENDING, at_ms, at_ms)  # type: ignore[arg-type]
    return replace(base, **fields)  # type: ignore[arg-type]


def piece(uuid: str, memory: int = 80 * GIB, compute: int = 1000, isolation: str = "exclusive") -> Slice:
    return Slice(uuid, memory, compute, isolation)


def running(
    id: str,
    node: str,
    pieces: Iterable[Slice],
    since: int = 0,
    cpu: int = 1000,
    node_memory: int = 1024,
    **changes: object,
) -> Job:
    """A job that has held these slices of one node since so many seconds after the start; it asked for just them."""
    slices = tuple(pieces)
    placed = TaskPlacement(0, node, slices, cpu, node_memory)
    allocation = Allocation(1, (placed,), START_MS + 1000 * since)
    sizes = {"gpus": len(slices)}
    if slices and slices[0].isolation != "exclusive":
        sizes |= {"memory": slices[0].memory_mib, "compute": slices[0].compute_milli}
    return job(id, state=JobState.ALLOCATED, allocation=allocation, **{**sizes, **changes})


def task(of: Job, number: int = 0, state: TaskState = TaskState.RUNNING, **changes: object) -> Task:
    """What a node saw of one task of a live job. An end is confirmed (`released`) unless it says otherwise."""
    assert of.allocation is not None
    node_name = next(placed.node for placed in of.allocation.tasks if placed.task == number)
    base = Task(of.id, of.attempt, number, node_name, state, released=state is TaskState.EXITED)
    return replace(base, **changes)  # type: ignore[arg-type]


class World:
    """A cluster under one coordinator with a clock that the test moves. `now` is in seconds after the start."""

    def __init__(self, *nodes: NodeInventory, policy: Policy | str | None = None, **changes: object) -> None:
        if isinstance(policy, str):
            changes["policy"] = policy
        self.settings = settings(**changes)
        self.policy = policy if isinstance(policy, Policy) else policy_from(self.settings)
        self.cluster = Cluster(self.settings)
        self.now = 0
        self._revision = 0
        for inventory in nodes:
            self.add(inventory)

    @property
    def now_ms(self) -> int:
        return START_MS + 1000 * self.now

    def see(self, *events: model.Event) -> None:
        for event in events:
            self._revision += 1
            self.cluster.apply(event, self.now_ms)
        self.cluster.revision = self._revision

    def add(self, inventory: NodeInventory) -> None:
        """A node with a first report that finds nothing on it."""
        self.see(model.InventorySeen(inventory), model.ReportSeen(report(inventory.node, self.now_ms)))

    def tenant(self, name: str, quota: int = 0, **changes: object) -> None:
        self.see(model.TenantSeen(replace(Tenant(name, quota), **changes)))  # type: ignore[arg-type]

    def submit(self, *jobs: Job) -> None:
        for one in jobs:
            self.put(one)

    def put(self, one: Job) -> None:
        self._revision += 1
        self.cluster.apply(model.JobSeen(one, self._revision), self.now_ms)
        self.cluster.revision = self._revision

    def snapshot(self) -> Snapshot:
        snapshot = self.cluster.snapshot(self.now_ms)
        check_snapshot(snapshot)
        return snapshot

    def plan(self) -> Plan:
        snapshot = self.snapshot()
        plan = plan_cycle(snapshot, self.policy)
        check_plan(snapshot, plan)
        return plan

    def cycle(self) -> list[str]:
        """Plans and commits; ids in the order in which they were placed."""
        plan = self.plan()
        for placement in plan.placements:
            self.put(lifecycle.allocated(placement.job, placement.allocation))
        self.snapshot()
        return [placement.job.id for placement in plan.placements]

    def settle(self) -> tuple[lifecycle.Transition, ...]:
        """Writes what `settle` asks for; task records of an attempt that is over go with it."""
        transitions = lifecycle.settle(self.snapshot())
        for transition in transitions:
            before, after = transition.before, transition.after
            if after.allocation is None:
                for number in self.cluster.tasks_of(before.id, before.attempt):
                    self.see(model.TaskGone(before.id, before.attempt, number))
            if after.state.is_final:
                self.see(model.JobGone(before.id, "jobs"))
            else:
                self.put(after)
        self.snapshot()
        return transitions

    def live(self, id: str) -> Job:
        return self.cluster.live_jobs[id]

    def run(self, id: str) -> None:
        """All its tasks run from now on."""
        one = self.live(id)
        for placed in one.allocation.tasks if one.allocation else ():
            self.see(model.TaskSeen(task(one, placed.task, started_at_ms=self.now_ms)))

    def end(self, id: str, exit_code: int = 0) -> Job:
        """All its tasks end now, confirmed; the record that was written for it."""
        one = self.live(id)
        for placed in one.allocation.tasks if one.allocation else ():
            seen = self.cluster.tasks_of(one.id, one.attempt).get(placed.task)
            ended = task(
                one,
                placed.task,
                TaskState.EXITED,
                exit_code=exit_code,
                ended_at_ms=self.now_ms,
                started_at_ms=seen.started_at_ms if seen else self.now_ms,
            )
            self.see(model.TaskSeen(ended))
        return next(t.after for t in self.settle() if t.before.id == id)

    def where(self, id: str) -> list[str]:
        """UUIDs of the GPUs that it holds."""
        allocation = self.live(id).allocation
        return [piece.gpu for placed in allocation.tasks for piece in placed.slices] if allocation else []
