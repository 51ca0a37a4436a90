"""The nodes of the cluster as they change: records, silence, claims on GPUs, and what live jobs hold on each.

Owned by one `Cluster`. A node's view is made anew only after something about it changed; a silent node's also as
time passes. A node is known as long as any record, grant or live job names it, so that use never vanishes with a
record of the node (DA-6).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable
from types import MappingProxyType

from attrs import define, field

from coordinator import model
from coordinator.gpus import NodeFacts, Use, present
from coordinator.model import Job, NodeAdmin, Task, TaskPlacement, TaskState
from coordinator.node_clocks import NodeClocks
from coordinator.nodes import (
    NodeBuild,
    NodeStatus,
    NodeView,
    ViewLog,
    build_of,
)
from coordinator.shared import Changes
from coordinator.silence import MassSilence
from coordinator.snapshot import ClusterSettings
from coordinator.totals import Totals
from coordinator.views import view_node, with_report, with_uses
from vgpu.inventory import Gpu, NodeInventory, NodeReport

# What a record that cannot be read was: (folder, name in it).
RecordId = tuple[str, str]
# The log of changed views begins anew once it is longer than this, for each node.
_LOG_PER_NODE = 8


@define
class _Machine:
    """`missing_since_ms` counts from when this coordinator first saw no report: a new leader gives every node its
    full grace (LE-3). `uses` are those of `jobs`, in their order."""

    name: str
    inventory: NodeInventory | None = None
    report: NodeReport | None = None
    admin: NodeAdmin | None = None
    build: NodeBuild = field(factory=NodeBuild)
    missing_since_ms: int | None = None
    jobs: dict[str, Job] = field(factory=dict)
    grants: set[tuple[str, int]] = field(factory=set)
    released: dict[str, int] = field(factory=dict)
    uses: list[Use] = field(factory=list)
    has_reported: bool = False

    def hold(self, use: Use) -> None:
        self.jobs[use.id] = use.job
        insort(self.uses, use)

    def free(self, job: str) -> None:
        if self.jobs.pop(job, None) is not None:
            self.uses = [use for use in self.uses if use.id != job]

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.inventory.gpus if self.inventory is not None else ()

    @property
    def is_missed(self) -> bool:
        """Its silence is news: it was heard, or is needed, and nobody has said that it is known to be down."""
        is_known_down = self.admin is not None and self.admin.cordoned
        return not is_known_down and (self.has_reported or bool(self.jobs) or bool(self.grants))

    @property
    def is_forgotten(self) -> bool:
        records = (self.inventory, self.report, self.admin)
        return not self.jobs and not self.grants and all(record is None for record in records)


class Machines:
    """See the module. Every method that changes something marks the nodes whose views it made stale. `unreadable` are
    records that cannot be read: their keys, and the nodes that those name."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._machines: dict[str, _Machine] = {}
        self._silent: dict[str, _Machine] = {}
        # Nodes whose views must be derived anew; of those with a set, only the jobs on these GPUs changed, or time.
        self._stale: dict[str, set[str] | None] = {}
        self._renewed: dict[str, None] = {}  # their views only lack the figures of the newest report
        self._views: dict[str, NodeView] = {}
        self._changed_views: list[str] = []  # that the log does not have yet
        self._log = ViewLog(MappingProxyType(self._views), Changes())
        self._claims: dict[str, tuple[str, ...]] = {}  # GPU -> the nodes that have it
        self._contested: set[str] = set()  # the GPUs that several have
        self._builds: dict[NodeBuild, NodeBuild] = {}
        self.unreadable: dict[RecordId, tuple[str, frozenset[str]]] = {}
        self.totals = Totals()  # as of the last views
        self._silence = MassSilence(settings.mass_silence_percent, settings.mass_silence_hold_seconds)
        self.clocks = NodeClocks()
        self.news = 0  # grows with what may let a cycle decide otherwise

    @property
    def silent_together(self) -> int:
        """Nodes that are not given up since so many fell silent at once."""
        return len(self._silence.held)

    @property
    def unreadable_keys(self) -> tuple[str, ...]:
        return tuple(sorted(key for key, _ in self.unreadable.values()))

    def views(self, now_ms: int) -> tuple[ViewLog, frozenset[str], int | None]:
        """All nodes, the live jobs on nodes that are given up, and when time alone next changes a node."""
        lost_ms = 1000 * self._settings.lost_seconds
        self._judge_silence(now_ms)
        self._mark_silent(now_ms, lost_ms)
        if self._stale or self._renewed:
            self._views = dict(self._views)
            for name in self._renewed:
                if self._stale.get(name, ()) is not None:
                    self._put(name, with_report(self._views[name], self._machines[name].report))
            for name, touched in self._stale.items():
                self._put(name, self._view(name, touched, now_ms, lost_ms))
            self._stale, self._renewed = {}, {}
            self._end_change()
        silent = [(machine, self._views[name].status) for name, machine in self._silent.items()]
        lost_jobs = frozenset(
            id for machine, status in silent if status is NodeStatus.LOST for id in machine.jobs
        )
        due = [(machine.missing_since_ms or 0) + lost_ms for machine, _ in silent]
        due.append(self._silence.due_ms or 0)
        return self._log, lost_jobs, min((at for at in due if at > now_ms), default=None)

    def renew_grace(self, now_ms: int) -> None:
        """Silence counts anew from now: what a standby saw before it led may have been its own deafness (LE-3)."""
        self.news += 1
        for machine in self._machines.values():
            if machine.missing_since_ms is not None:
                machine.missing_since_ms = now_ms
                self._stale[machine.name] = None

    def inventory_of(self, node: str) -> NodeInventory | None:
        machine = self._machines.get(node)
        return machine.inventory if machine else None

    def apply(self, event: model.Event, now_ms: int) -> None:
        if not isinstance(event, model.ReportSeen):
            self.news += 1
        if isinstance(event, model.InventorySeen):
            self._inventory(event.inventory.node, event.inventory, now_ms)
        elif isinstance(event, model.InventoryGone):
            self._inventory(event.node, None, now_ms)
        elif isinstance(event, model.ReportSeen):
            self._report(event.report, now_ms)
        elif isinstance(event, model.ReportGone):
            machine = self._machine(event.node)
            machine.report = None
            machine.missing_since_ms = now_ms
            self._silent[event.node] = machine
            self.clocks.gone(event.node)
        elif isinstance(event, model.AdminSeen):
            self._machine(event.admin.node).admin = event.admin
        elif isinstance(event, model.AdminGone):
            self._machine(event.node).admin = None
        elif isinstance(event, model.RecordUnreadable):
            self._record_unreadable(event)
        elif isinstance(event, model.RecordGone):
            self.readable(_record_id(event.key))

    def hold(self, job: Job) -> None:
        """It comes, or its record changed."""
        tasks = job.allocation.tasks if job.allocation else ()
        for placement in tasks:
            self._touched(placement).free(job.id)
        for number, placement in enumerate(tasks):
            self._machines[placement.node].hold(Use(job.id, placement.task, number, job, placement))

    def free(self, job: Job) -> None:
        for placement in job.allocation.tasks if job.allocation else ():
            self._touched(placement).free(job.id)

    def _touched(self, placement: TaskPlacement) -> _Machine:
        """The node of a task that comes or goes."""
        machine = self._machines.get(placement.node)
        if machine is None:
            return self._machine(placement.node)
        self._change(placement.node, [piece.gpu for piece in placement.slices])
        return machine

    def _change(self, node: str, gpus: Iterable[str]) -> None:
        """Something changed about these GPUs alone."""
        known = self._stale.setdefault(node, set())
        if known is not None:
            known.update(gpus)

    def task_seen(self, task: Task, now_ms: int) -> None:
        """Remembers confirmed ends, by the node's clock, to tell stale reports from true ones."""
        if task.state is TaskState.EXITED and task.released:
            ended_ms = now_ms if task.ended_at_ms is None else task.ended_at_ms
            machine = self._machines.get(task.node) or self._machine(task.node)
            machine.released = {**machine.released, task.attempt_key: ended_ms}  # views have the one before
            if gpus := [gpu for attempt, gpu in _present(machine) if attempt == task.attempt_key]:
                self._change(task.node, gpus)
            self.news += 1

    def grant_seen(self, node: str, job: str, attempt: int) -> None:
        if node not in self._machines or self.unreadable:
            self._machine(node)
        self._machines[node].grants.add((job, attempt))
        self.readable(("grants", f"{node}/{job}.{attempt}"))

    def grant_gone(self, node: str, job: str, attempt: int) -> None:
        machine = self._machines.get(node)
        if machine is not None:
            machine.grants.discard((job, attempt))
            if self.unreadable or machine.is_forgotten:
                self._stale[node] = None
        self.readable(("grants", f"{node}/{job}.{attempt}"))

    def job_readable(self, job: str) -> None:
        """Its record stands where it belongs, so that what stood elsewhere under its name says nothing any more."""
        for folder in ("queue", "jobs", "done"):
            self.readable((folder, job))

    def readable(self, record: RecordId) -> None:
        """The record can be read again, or is gone: the nodes that it closed open."""
        if record in self.unreadable:
            self.news += 1
            _, nodes = self.unreadable.pop(record)
            self._mark(nodes | self._granted(record))

    def _mark(self, names: Iterable[str]) -> None:
        """Their views are stale, if they are still known."""
        for name in names:
            if name in self._machines:
                self._stale[name] = None

    def _machine(self, name: str) -> _Machine:
        self._stale[name] = None
        machine = self._machines.get(name)
        if machine is None:
            machine = self._machines[name] = self._silent[name] = _Machine(name)
        return machine

    def _inventory(self, node: str, inventory: NodeInventory | None, now_ms: int) -> None:
        machine = self._machine(node)
        before = {gpu.uuid for gpu in machine.gpus}
        after = {gpu.uuid for gpu in inventory.gpus} if inventory else set()
        for uuid in before - after:
            self._claims[uuid] = tuple([name for name in self._claims[uuid] if name != node])
            self._mark(self._claims[uuid])
            if len(self._claims[uuid]) == 1:
                self._contested.discard(uuid)
            if not self._claims[uuid]:
                del self._claims[uuid]
        alone = (node,)
        for uuid in after - before:
            others = self._claims.get(uuid)
            self._claims[uuid] = (*others, node) if others else alone
            if others:
                self._contested.add(uuid)
                self._mark(others)
        machine.inventory = inventory
        machine.build = NodeBuild()
        if inventory is not None:
            build = build_of(inventory, self._settings.topology)
            # Nodes of one build share one object, so that placement compares them at no cost.
            machine.build = self._builds.setdefault(build, build)

    def _report(self, report: NodeReport, now_ms: int) -> None:
        machine = self._machines.get(report.node)
        before = machine.report if machine is not None else None
        if (
            machine is None
            or before is None
            or _decides(before) != _decides(report)
            # An end that was confirmed may be denied by a newer report.
            or (machine.released and any(attempt in machine.released for attempt, _ in present(report)))
        ):
            machine = self._machine(report.node)
            self.news += 1
            if before is None:
                self._mark_claims(machine)
        else:
            # Most reports only bring newer figures, and no cycle is run for them.
            self._renewed[report.node] = None
        machine.report = report
        machine.missing_since_ms = None
        machine.has_reported = True
        self.clocks.reported(report.node, report.at_ms, now_ms)
        self._silent.pop(report.node, None)
        machine.released = {k: at for k, at in machine.released.items() if at >= report.at_ms}

    def _record_unreadable(self, event: model.RecordUnreadable) -> None:
        """DA-7. Which nodes a record is about stands in its key, in the grants of its job (they are written in one
        transaction with it), and in what was read of it before. Its last readable form keeps what it holds."""
        record = folder, name = _record_id(event.key)
        if not name or folder not in ("queue", "jobs", "done", "grants"):
            return
        nodes = {name.partition("/")[0]} if folder == "grants" and "/" in name else set()
        if folder == "jobs":
            nodes |= {machine.name for machine in self._machines.values() if record[1] in machine.jobs}
        self.unreadable[record] = (event.key, frozenset(nodes))
        for node in nodes | self._granted(record):
            self._machine(node)

    def _granted(self, record: RecordId) -> set[str]:
        folder, name = record
        if folder != "jobs":
            return set()
        return {m.name for m in self._machines.values() if any(job == name for job, _ in m.grants)}

    def _closing(self, name: str) -> tuple[str, ...]:
        if not self.unreadable:
            return ()
        return tuple(
            sorted(
                key
                for record, (key, nodes) in self.unreadable.items()
                if name in nodes or name in self._granted(record)
            )
        )

    def _judge_silence(self, now_ms: int) -> None:
        """Which nodes are silent together, and so not given up (LE-11)."""
        lost = NodeStatus.LOST
        missed = [
            name
            for name, machine in self._silent.items()
            if machine.is_missed and not ((view := self._views.get(name)) and view.status is lost)
        ]
        before = self._silence.held
        spared = self._silence.look(missed, len(self._machines) - len(self._silent), now_ms)
        for name in spared & self._silent.keys():
            self._silent[name].missing_since_ms = now_ms
        if before != self._silence.held:
            self._mark(before | self._silence.held)

    def _mark_silent(self, now_ms: int, lost_ms: int) -> None:
        """Views of silent nodes age; when one is given up, its claim on GPUs ends too (ID-2)."""
        for name, machine in self._silent.items():
            if machine.missing_since_ms is None:
                machine.missing_since_ms = now_ms
            silent_ms = max(0, now_ms - machine.missing_since_ms)
            is_lost = silent_ms >= lost_ms and name not in self._silence.held
            view = self._views.get(name)
            was_lost = view is not None and view.status is NodeStatus.LOST
            if is_lost and view is not None and not was_lost:
                self.news += 1
            if view is None or is_lost != was_lost:
                self._mark_claims(machine)
            reason = view.status_reason if view is not None else None
            if (
                reason is None
                or reason.numbers.get("silent_seconds") != silent_ms // 1000
                or is_lost != was_lost
            ):
                self._stale.setdefault(name, set())

    def _mark_claims(self, machine: _Machine) -> None:
        """Whether the node is given up decides about its GPUs on all nodes that claim them."""
        for gpu in machine.gpus:
            self._mark(self._claims[gpu.uuid])

    def _put(self, name: str, view: NodeView | None) -> None:
        before = self._views.get(name)
        if view is not None:
            self._views[name] = view
        elif before is not None:
            del self._views[name]
        self.totals.change(before, view)
        self._changed_views.append(name)

    def _end_change(self) -> None:
        changes = self._log.changes.then(self._changed_views, _LOG_PER_NODE * (len(self._views) + 100))
        self._changed_views.clear()
        self._log = ViewLog(MappingProxyType(self._views), changes)

    def _view(self, name: str, touched: Collection[str] | None, now_ms: int, lost_ms: int) -> NodeView | None:
        machine, before = self._machines[name], self._views.get(name)
        if machine.is_forgotten:
            del self._machines[name]
            self._silent.pop(name, None)
            return None
        facts = NodeFacts(
            name=name,
            inventory=machine.inventory,
            report=machine.report,
            admin=machine.admin,
            missing_since_ms=machine.missing_since_ms,
            unreadable=self._closing(name),
            claimed_twice=self._claimed_twice(machine, now_ms, lost_ms) if self._contested else frozenset(),
            released=machine.released,
            silent_together=len(self._silence.held) if name in self._silence.held else 0,
        )
        if touched is None or before is None:
            return view_node(facts, machine.build, machine.uses, now_ms, lost_ms)
        return with_uses(before, facts, tuple(machine.uses), touched, now_ms, lost_ms)

    def _claimed_twice(self, machine: _Machine, now_ms: int, lost_ms: int) -> frozenset[str]:
        """The GPUs of this node that another one has too, which is not given up."""
        return frozenset(
            gpu.uuid
            for gpu in machine.gpus
            if gpu.uuid in self._contested
            and any(
                other != machine.name and not self._is_lost(other, now_ms, lost_ms)
                for other in self._claims[gpu.uuid]
            )
        )

    def _is_lost(self, name: str, now_ms: int, lost_ms: int) -> bool:
        machine = self._machines[name]
        if machine.report is not None or machine.missing_since_ms is None or name in self._silence.held:
            return False
        return now_ms - machine.missing_since_ms >= lost_ms


def _present(machine: _Machine) -> Iterable[tuple[str, str]]:
    return present(machine.report) if machine.report is not None else ()


def _record_id(key: str) -> RecordId:
    """Folder and name; a grant's name has its node in it, of other records the last part is enough."""
    folder, _, rest = key.strip("/").partition("/")[2].partition("/")
    return folder, rest if folder == "grants" else rest.rpartition("/")[2]


def _decides(report: NodeReport) -> tuple[object, ...]:
    """What a node's view takes from a report (`coordinator.nodes`), less the figures that are only shown."""
    gpus = [
        (
            gpu.uuid,
            gpu.fault,
            gpu.memory_used_mib if gpu.processes is None else None,
            [(p.attempt, None if p.attempt else p.memory_mib) for p in gpu.processes or ()],
        )
        for gpu in report.gpus
    ]
    return report.held, report.closed, gpus
