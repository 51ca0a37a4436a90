"""A replay on the core itself: the same fold, the same cycle and the same snapshots as a coordinator's, with a virtual
clock. Slices, gangs and nodes are what they are there; only the machines and their tasks are left out, so a job ends
when the trace says."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from coordinator import lifecycle, model
from coordinator.cluster import Cluster
from coordinator.config import Settings
from coordinator.cycle import Plan, plan_cycle
from coordinator.fairness import policy_from
from coordinator.model import Job, JobState, Tenant
from coordinator.shares import share_weights, water_fill
from coordinator.simulate.hardware import Hardware
from coordinator.simulate.meter import Meter, Outcome
from coordinator.simulate.trace import UNLIMITED_MS, Trace, TraceJob
from jobspecs.spec import JobSpec, TaskSpec
from vgpu.inventory import NodeReport
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import SliceRequest

# Virtual time begins at a bound of the buckets of the ledgers.
START_MS = 4_000_000 * 300_000


class Replay:
    """`quotas_mib` by tenant number."""

    def __init__(
        self, trace: Trace, hardware: Hardware, quotas_mib: Sequence[int], settings: Settings
    ) -> None:
        self._trace = trace
        self._hardware = hardware
        self._policy = policy_from(settings)
        self._cluster = Cluster(settings)
        self._now_ms = START_MS
        self._revision = 0
        self._ends: list[tuple[int, int]] = []
        self._starts: list[int | None] = [None] * len(trace.jobs)
        self._meter = Meter(
            [job.size for job in trace.jobs], len(trace.tenants), hardware.gpus, trace.last_submit_ms
        )
        self._tenants = [Tenant(n, quota) for n, quota in zip(trace.tenants, quotas_mib, strict=True)]
        self._waiting = [0.0] * len(trace.tenants)
        self._used: dict[str, int] = {}
        self._whole = {inventory.node: len(inventory.gpus) for inventory in hardware.inventories()}
        for inventory in hardware.inventories():
            self._see(model.InventorySeen(inventory))
            self._see(model.ReportSeen(NodeReport(inventory.node, 1, START_MS, ())))
        for tenant in self._tenants:
            self._see(model.TenantSeen(tenant))
        self._cluster.snapshot(START_MS)

    def run(self, tick: Callable[[int], None] | None = None) -> Outcome:
        """`tick` is told how many jobs have come, now and then."""
        jobs, arrived = self._trace.jobs, 0
        leaves = sorted((job.withdrawn_ms, n) for n, job in enumerate(jobs) if job.withdrawn_ms is not None)
        while arrived < len(jobs) or self._ends:
            times = [jobs[arrived].submit_ms] if arrived < len(jobs) else []
            times += [end for end, _ in self._ends[:1]] + [at for at, _ in leaves[:1]]
            self._meter.advance(min(times))
            self._now_ms = START_MS + min(times)
            while self._ends and START_MS + self._ends[0][0] <= self._now_ms:
                self._end(heapq.heappop(self._ends)[1])
            while leaves and START_MS + leaves[0][0] <= self._now_ms:
                self._withdraw(leaves.pop(0)[1])
            while arrived < len(jobs) and START_MS + jobs[arrived].submit_ms <= self._now_ms:
                self._arrive(arrived)
                arrived += 1
            self._cycles()
            self._note()
            if tick is not None and arrived % 16 == 0:
                tick(arrived)
        return Outcome(self._starts, self._meter)

    # --- events ---

    def _see(self, event: model.Event) -> None:
        self._cluster.apply(event, self._now_ms)

    def _put(self, job: Job) -> None:
        self._revision += 1
        self._see(model.JobSeen(job, self._revision))

    def _arrive(self, n: int) -> None:
        one = self._trace.jobs[n]
        if one.withdrawn_ms is not None and START_MS + one.withdrawn_ms <= self._now_ms:
            return
        spec = _spec(one, self._trace.tenants[one.tenant], self._hardware.per_node)
        self._put(Job(_id(n), spec, JobState.PENDING, self._now_ms, self._now_ms))
        self._waiting[one.tenant] += one.size
        self._meter.arrive(n)

    def _end(self, n: int) -> None:
        self._use(self._cluster.live_jobs[_id(n)], -1)
        self._see(model.JobGone(_id(n), "jobs"))
        self._meter.finish(n)

    def _withdraw(self, n: int) -> None:
        job, one = self._cluster.waiting_jobs.get(_id(n)), self._trace.jobs[n]
        if job is not None:
            self._put(lifecycle.cancelled(job, self._now_ms))
            self._see(model.JobGone(job.id, "queue"))
            self._waiting[one.tenant] -= one.size
            self._meter.leave(n)

    def _cycles(self) -> None:
        while self._cluster.waiting_jobs:
            plan = plan_cycle(self._cluster.snapshot(self._now_ms), self._policy)
            for placement in plan.placements:
                self._start(lifecycle.allocated(placement.job, placement.allocation))
            if len(plan.placements) < self._policy.placements_per_cycle:
                self._say_reserved(plan)
                return

    def _start(self, job: Job) -> None:
        n = int(job.id)
        one = self._trace.jobs[n]
        self._put(job)
        self._use(job, 1)
        self._starts[n] = self._now_ms - START_MS
        heapq.heappush(self._ends, (self._now_ms - START_MS + one.duration_ms, n))
        self._waiting[one.tenant] -= one.size

    def _say_reserved(self, plan: Plan) -> None:
        """As the coordinator writes it into the record of the job."""
        job = self._cluster.waiting_jobs.get(plan.held_for)
        if job is not None and (job.reason is None or job.reason.code is not ReasonCode.RESERVED):
            self._put(replace(job, reason=Reason(ReasonCode.RESERVED)))

    # --- measures ---

    def _use(self, job: Job, times: int) -> None:
        for placed in job.allocation.tasks if job.allocation else ():
            milli = times * sum(piece.compute_milli for piece in placed.slices)
            self._used[placed.node] = self._used.get(placed.node, 0) + milli

    def _note(self) -> None:
        held_milli = dict.fromkeys(self._trace.tenants, 0)
        for tenant, use in self._cluster.held.items():
            held_milli[tenant] = use.compute
        demands = [
            milli + round(1000 * waiting)
            for milli, waiting in zip(held_milli.values(), self._waiting, strict=True)
        ]
        shares = water_fill(1000 * self._hardware.gpus, share_weights(self._tenants), demands)
        broken = sum(
            1000 * self._whole[node] - milli
            for node, milli in self._used.items()
            if 0 < milli < 1000 * self._whole[node]
        )
        self._meter.note([milli / 1000 for milli in held_milli.values()], shares, broken / 1000)


def _id(n: int) -> str:
    return f"{n:08}"


def _spec(job: TraceJob, tenant: str, per_node: int) -> JobSpec:
    """A job of one task that is larger than any node is a gang of whole nodes, or of single GPUs."""
    tasks, gpus = job.tasks, job.gpus // job.tasks
    if gpus > per_node:
        size = per_node if gpus % per_node == 0 else 1
        tasks, gpus = tasks * gpus // size, size
    request = SliceRequest(gpus, job.memory_mib, job.compute_milli)
    limit_seconds = None if job.limit_ms >= UNLIMITED_MS else -(-job.limit_ms // 1000)
    task = TaskSpec(count=tasks, gpus=request, cpu_milli=0, memory_mib=0)
    return JobSpec(job.id, tenant, (task,), priority=job.priority, max_runtime_seconds=limit_seconds)
