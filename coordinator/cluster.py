"""The state of the cluster: a fold over events, and snapshots of it.

`apply` is the only way it changes, and it never raises on odd input: one bad record must not stop a cluster. Free
capacity is derived from the allocations of live jobs (`coordinator.nodes`), anew for a node whenever something about
it changed. A snapshot shares its mappings with the state (`coordinator.shared`).

What is applied before the first snapshot is the initial listing: only then do stored usage hours count. Its records
come in any order, and of two of one job the newer one counts (LK-7). After it events come in the order of revisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from coordinator import model
from coordinator.lifecycle import HELD_RESERVATION, REFUSED_SECONDS, due_ms, is_restless
from coordinator.lines import WaitingLines
from coordinator.machines import Machines
from coordinator.mix import JobMix
from coordinator.model import Job, Task, Tenant, UsageHour
from coordinator.moments import Moments
from coordinator.shared import Shared
from coordinator.shares import EntitledShares
from coordinator.snapshot import ClusterSettings, Shape, Snapshot, shape_of
from coordinator.usage import NO_USE, UsageLedger, Use
from coordinator.worth import Worth
from vgpu.inventory import NodeInventory

__all__ = ["Cluster", "Snapshot"]


class Cluster:
    """`revision` is set by whoever folds. With `keep_done` ended jobs are kept too, for readers."""

    def __init__(self, settings: ClusterSettings, keep_done: bool = False) -> None:
        self.revision = 0
        self._settings = settings
        self._max_wait_ms = 1000 * settings.fairness.max_wait_seconds
        self._keep_done = keep_done
        self._is_listing = True
        self._jobs: Shared[str, Job] = Shared()
        self._waiting: Shared[str, Job] = Shared()
        self._done: Shared[str, Job] = Shared()
        self._lines = WaitingLines()
        self._listed: dict[str, int] = {}  # revisions of the records of the listing
        self._tasks: Shared[tuple[str, int], Mapping[int, Task]] = Shared()
        self._tenants: Shared[str, Tenant] = Shared()
        self._held: Shared[str, Use] = Shared()
        self._machines = Machines(settings)
        self._ledger = UsageLedger(1000 * settings.fairness.window_seconds)
        self._shares = EntitledShares(1000 * settings.fairness.window_seconds)
        self._withdrawn: Shared[str, int] = Shared()
        self._past: list[UsageHour] = []
        self._restless: set[str] = set()
        self._waits = Moments(self._waiting.now, self._is_wait)
        self._dues = Moments(self._jobs.now, self._is_due)
        self._now_ms: int | None = None
        self._news = 0
        # What tenants submit, and the prices made of it, which whoever plans sets between two cycles.
        self.mix = JobMix()
        self.worth: Worth | None = None

    # --- reading -------------------------------------------------------------------------------------------------

    @property
    def live_jobs(self) -> Mapping[str, Job]:
        """Jobs that hold slices. A view of now, for whoever reads at once."""
        return MappingProxyType(self._jobs.now)

    @property
    def waiting_jobs(self) -> Mapping[str, Job]:
        return MappingProxyType(self._waiting.now)

    @property
    def held(self) -> Mapping[str, Use]:
        """What each tenant holds now."""
        return MappingProxyType(self._held.now)

    @property
    def done_jobs(self) -> Mapping[str, Job]:
        """Ended jobs, where they are kept."""
        return MappingProxyType(self._done.now)

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        return MappingProxyType(self._tenants.now)

    def tasks_of(self, job: str, attempt: int) -> Mapping[int, Task]:
        return self._tasks.now.get((job, attempt), {})

    def inventory_of(self, node: str) -> NodeInventory | None:
        return self._machines.inventory_of(node)

    @property
    def news(self) -> int:
        """Grows with everything that may let a cycle decide otherwise: a job that waits or ends, a tenant, a node. What
        only changes the picture (a newer report, a task that came to run) leaves it alone."""
        return self._news + self._machines.news

    @property
    def due_ms(self) -> int | None:
        """When to look again though nothing came: at the latest when time alone changes something about a job."""
        return _earliest(self._waits.next_ms, self._dues.next_ms)

    def usage_hours(self, now_ms: int) -> tuple[UsageHour, ...]:
        """The usage records that have changed since the last call, for the leader to write."""
        self._end_listing()
        return self._shares.hours(self._ledger.hours(now_ms), self._ledger, now_ms)

    def snapshot(self, now_ms: int) -> Snapshot:
        self._end_listing()
        node_log, lost_jobs, node_due_ms = self._machines.views(now_ms)
        next_due_ms = self._next_due(now_ms)
        self._share(now_ms)
        return Snapshot(
            revision=self.revision,
            news=self.news,
            worth=self.worth,
            cluster_memory_mib=self._machines.totals.memory_mib,
            cluster_compute_milli=self._machines.totals.compute_milli,
            kinds=self._machines.totals.kinds,
            now_ms=now_ms,
            settings=self._settings,
            nodes=node_log.views,
            node_log=node_log,
            jobs=self._jobs.lend(),
            waiting_jobs=self._waiting.lend(),
            lines=self._lines.lend(),
            done=self._done.lend(),
            tenants=self._tenants.lend(),
            tasks=self._tasks.lend(),
            held=self._held.lend(),
            usage=self._ledger.window(now_ms),
            entitled=self._shares.window(now_ms),
            withdrawn=self._withdrawn.lend(),
            restless=frozenset(self._restless | lost_jobs),
            unreadable=self._machines.unreadable_keys,
            silent_together=self._machines.silent_together,
            clocks_off=self._machines.clocks.off,
            next_due_ms=_earliest(next_due_ms, node_due_ms),
        )

    # --- changing ------------------------------------------------------------------------------------------------

    def apply(self, event: model.Event, now_ms: int) -> None:
        """Takes in one event. `now_ms` is the time of the coordinator, never one from a record."""
        fold = _FOLDS.get(type(event))
        if now_ms != self._now_ms:
            self._now_ms = now_ms
            if not self._is_listing and self._shares.is_due(now_ms):
                self._share(now_ms)
        if fold is not None:
            fold(self, event, now_ms)

    def lead(self, now_ms: int) -> None:
        """A term of leadership begins: every silent node gets its full grace from now on."""
        self._machines.renew_grace(now_ms)

    def _job_seen(self, event: model.JobSeen, now_ms: int) -> None:
        job = event.job
        id, is_final = job.id, job.state.is_final
        if self._is_listing:
            if event.revision < self._listed.get(id, 0):
                return
            self._listed[id] = event.revision
        if self._machines.unreadable:
            self._machines.job_readable(id)
        before = self._jobs.now.get(id)
        if before is not None and job.allocation == before.allocation:
            self._keep(job)
            return
        is_new = not self._is_listing
        if before is not None or id in self._waiting.now or id in self._done.now:
            self._forget_job(id, now_ms, is_placed=job.allocation is not None)
            is_new = False
        if is_final:
            self._note_withdrawal(job)
            if self._keep_done:
                self._done[id] = job
        elif job.allocation is not None:
            self._hold(job, now_ms)
            if is_new:
                self.mix.add(shape_of(job.spec))
        else:
            shape = self._queue(job, now_ms)
            if is_new:
                self.mix.add(shape)

    def _keep(self, job: Job) -> None:
        """It holds what it held: nothing is charged twice."""
        self._restless.discard(job.id)
        self._news += 1
        self._jobs[job.id] = job
        self._machines.hold(job)
        self._look_at(job)

    def _job_gone(self, event: model.JobGone, now_ms: int) -> None:
        self._machines.readable((event.folder, event.id))
        folder = {"queue": self._waiting, "jobs": self._jobs, "done": self._done}.get(event.folder)
        if folder is not None and event.id in folder.now:
            self._forget_job(event.id, now_ms)

    def _forget_job(self, id: str, now_ms: int, is_placed: bool = False) -> None:
        """That a job was placed is no news: it was this leader's own decision, and leaves less for others."""
        waited = self._waiting.pop(id)
        if waited is not None:
            key = self._lines.remove(waited)
            self._shares.want(waited.tenant, -key.shape.compute_milli, now_ms)
            self._news += not is_placed
            return
        self._restless.discard(id)
        self._done.pop(id)
        lived = self._jobs.pop(id)
        if lived is not None:
            self._news += 1
            self._machines.free(lived)
            self._charge(lived, now_ms, -1)

    def _queue(self, job: Job, now_ms: int) -> Shape:
        self._news += 1
        self._waiting[job.id] = job
        shape = self._lines.add(job).shape
        self._shares.want(job.tenant, shape.compute_milli, now_ms)
        self._waits.add(job.id, job.queued_at_ms + self._max_wait_ms)
        for at_ms in self._may_start_ms(job):
            self._waits.add(job.id, at_ms)
        return shape

    def _may_start_ms(self, job: Job) -> list[int]:
        """When a cycle may decide otherwise about a waiting job, but for the bounded wait."""
        moments = [job.not_before_ms] if job.not_before_ms else []
        if job.refused_by:
            moments.append(job.queued_at_ms + 1000 * REFUSED_SECONDS)
        return moments

    def _is_wait(self, id: str, at_ms: int) -> bool:
        job = self._waiting.now.get(id)
        if job is None:
            return False
        return at_ms == job.queued_at_ms + self._max_wait_ms or at_ms in self._may_start_ms(job)

    def _is_due(self, id: str, at_ms: int) -> bool:
        """By then at the latest: a task whose record goes may bring it forward."""
        job = self._jobs.now.get(id)
        due = due_ms(job, self.tasks_of(id, job.attempt), self._settings) if job is not None else None
        return due is not None and due <= at_ms

    def _hold(self, job: Job, now_ms: int) -> None:
        assert job.allocation is not None
        self._jobs[job.id] = job
        self._machines.hold(job)
        self._charge(job, min(now_ms, job.allocation.allocated_at_ms), 1)
        self._look_at(job)

    def _charge(self, job: Job, at_ms: int, times: int) -> None:
        allocation = job.allocation
        if allocation is None:
            return
        self._shares.changed(at_ms)
        tenant = job.tenant
        use = Use(times * allocation.compute_milli, times * allocation.memory_mib)
        before = self._held.now.get(tenant, NO_USE)
        held = Use(before.compute + use.compute, before.memory + use.memory)
        if held.compute or held.memory:
            self._held[tenant] = held
        else:
            self._held.pop(tenant)
        if not self._is_listing:
            self._ledger.change(tenant, at_ms, use)

    def _share(self, now_ms: int) -> None:
        self._shares.update(now_ms, self._machines.totals.compute_milli, self._held.now, self._tenants.now)

    def _note_withdrawal(self, job: Job) -> None:
        """A job for which slices were reserved was taken back (`lifecycle.cancelled` says so in its record)."""
        if (
            job.reason is not None
            and job.reason.numbers.get(HELD_RESERVATION)
            and job.ended_at_ms is not None
        ):
            latest_ms = max(job.ended_at_ms, self._withdrawn.now.get(job.tenant, 0))
            self._withdrawn[job.tenant] = latest_ms

    def _look_at(self, job: Job) -> None:
        tasks = self.tasks_of(job.id, job.attempt)
        if is_restless(job, tasks):
            self._restless.add(job.id)
            self._news += 1
        at_ms = due_ms(job, tasks, self._settings)
        if at_ms is not None:
            self._dues.add(job.id, at_ms)

    def _task_seen(self, event: model.TaskSeen, now_ms: int) -> None:
        task = event.task
        key = (task.job, task.attempt)
        self._tasks[key] = {**self._tasks.now.get(key, {}), task.task: task}
        self._machines.task_seen(task, now_ms)
        job = self._jobs.now.get(task.job)
        if job is not None and job.attempt == task.attempt:
            self._look_at(job)

    def _task_gone(self, event: model.TaskGone, now_ms: int) -> None:
        key = (event.job, event.attempt)
        left = {n: task for n, task in self._tasks.now.get(key, {}).items() if n != event.task}
        if left:
            self._tasks[key] = left
        else:
            self._tasks.pop(key)

    def _tenant_seen(self, event: model.TenantSeen, now_ms: int) -> None:
        self._news += 1
        self._shares.changed(now_ms)
        self._tenants[event.tenant.name] = event.tenant

    def _tenant_gone(self, event: model.TenantGone, now_ms: int) -> None:
        self._news += 1
        self._shares.changed(now_ms)
        self._tenants.pop(event.name)

    def _grant_seen(self, event: model.GrantSeen, now_ms: int) -> None:
        self._machines.grant_seen(event.node, event.job, event.attempt)

    def _grant_gone(self, event: model.GrantGone, now_ms: int) -> None:
        self._machines.grant_gone(event.node, event.job, event.attempt)

    def _usage_seen(self, event: model.UsageSeen, now_ms: int) -> None:
        if self._is_listing:
            self._past.append(event.usage)

    def _mix_seen(self, event: model.MixSeen, now_ms: int) -> None:
        if self._is_listing:
            self.mix.past(event.mix)

    def _machine_event(self, event: model.Event, now_ms: int) -> None:
        self._machines.apply(event, now_ms)

    def _end_listing(self) -> None:
        """Stored hours supply the past; live jobs count from where their tenant's hours end."""
        if not self._is_listing:
            return
        self._is_listing = False
        until: dict[str, int] = {}
        for hour in self._past:
            until[hour.tenant] = max(until.get(hour.tenant, 0), hour.until_ms)
            self._ledger.past(hour)
            self._shares.past(hour)
        self._past.clear()
        self._listed.clear()
        for job in (*self._jobs.now.values(), *self._waiting.now.values()):
            if job.submitted_at_ms > self.mix.until_ms:
                self.mix.add(shape_of(job.spec))
        for job in self._jobs.now.values():
            if job.allocation is not None:
                use = Use(job.allocation.compute_milli, job.allocation.memory_mib)
                start_ms = max(job.allocation.allocated_at_ms, until.get(job.tenant, 0))
                self._ledger.change(job.tenant, start_ms, use)

    def _next_due(self, now_ms: int) -> int | None:
        """The next moment that concerns a job. What is due now is looked at in this snapshot."""
        while self._waits.pop(now_ms) is not None:
            self._news += 1
        while (id := self._dues.pop(now_ms)) is not None:
            self._restless.add(id)
            self._news += 1
        return self.due_ms


def _earliest(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


_FOLDS: Mapping[type, Callable[[Cluster, model.Event, int], None]] = {
    model.JobSeen: Cluster._job_seen,  # type: ignore[dict-item]
    model.JobGone: Cluster._job_gone,  # type: ignore[dict-item]
    model.TaskSeen: Cluster._task_seen,  # type: ignore[dict-item]
    model.TaskGone: Cluster._task_gone,  # type: ignore[dict-item]
    model.TenantSeen: Cluster._tenant_seen,  # type: ignore[dict-item]
    model.TenantGone: Cluster._tenant_gone,  # type: ignore[dict-item]
    model.GrantSeen: Cluster._grant_seen,  # type: ignore[dict-item]
    model.GrantGone: Cluster._grant_gone,  # type: ignore[dict-item]
    model.UsageSeen: Cluster._usage_seen,  # type: ignore[dict-item]
    model.MixSeen: Cluster._mix_seen,  # type: ignore[dict-item]
    model.InventorySeen: Cluster._machine_event,
    model.InventoryGone: Cluster._machine_event,
    model.ReportSeen: Cluster._machine_event,
    model.ReportGone: Cluster._machine_event,
    model.AdminSeen: Cluster._machine_event,
    model.AdminGone: Cluster._machine_event,
    model.RecordUnreadable: Cluster._machine_event,
    model.RecordGone: Cluster._machine_event,
}
