"""The agent of one machine: tells the truth about it, and makes it match what was granted.

    1. The node's name is claimed. List the grants: until they are known nothing is touched.
    2. Look at what the machine has (`Runner.list`) and, where an end has to be confirmed, at its GPUs.
    3. Ask `reconcile` what has to be done; begin it; write down in one transaction what was seen.
    4. Wait for a changed grant, a hint of the runner, the end of something begun, or a tick; then go to 2.

Beside the loop it reports each period. When the store cannot be reached, what runs goes on running and what ends is
written down later (EX-7); when the runner cannot be asked, nothing is concluded from that. Nothing here has to survive a
restart: the store says what is wanted, the machine says what there is (RR-2, RR-5).

On SIGTERM the agent leaves every task running and gives its lease back: the node shows as unknown at once and gets
no new work, and its jobs keep their slices for as long as any silent node's do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from attrs import evolve, frozen
from msgspec.structs import replace

from coordinator.config import Settings
from coordinator.store import Store, StoreUnavailable
from nodeagent.assignments import Assignments
from nodeagent.endpoint import ExpiredOutput
from nodeagent.gpu_source import GpuReader
from nodeagent.isolation_steps import IsolationSteps
from nodeagent.machine import Load, Machine
from nodeagent.monitoring import GpuMonitor
from nodeagent.operations import Operations
from nodeagent.presence import NodeNameTaken, Presence
from nodeagent.reconcile import held, quarantined, reconcile, sightings
from nodeagent.runner import Observed, ObservedTask, Runner, RunnerFacts, RunnerUnavailable, TaskKey
from nodeagent.view import (
    Action,
    Limits,
    PerformStep,
    Remove,
    Start,
    Stop,
    UndoStep,
    View,
    WriteTask,
)
from vgpu.inventory import Gpu, GpuReport, NodeInventory, NodeReport

log = logging.getLogger("serai.agent")

# Retention, orphans and unconfirmed stops become due by time alone.
TICK_SECONDS = 2.0
# Several ends at once make one pass and one transaction.
DEBOUNCE_SECONDS = 0.01
RETRY_SECONDS = 1.0


@frozen
class NodeIdentity:
    """What an operator says about a node. `engine_node_id` answers with the node's id in Nomad, "" without one."""

    name: str
    labels: dict[str, str]
    isolations: tuple[str, ...]
    version: str
    engine_node_id: Callable[[], Awaitable[str]]


class Agent:
    """`presence` has claimed the node's name; `known` are the GPUs it had when it was last seen. `make_steps` takes the
    question whether a MIG instance exists. `read_load` answers as `Load.read` does."""

    def __init__(
        self,
        identity: NodeIdentity,
        machine: Machine,
        presence: Presence,
        store: Store,
        runner: Runner,
        gpus: GpuReader,
        settings: Settings,
        expired: ExpiredOutput,
        clock_ms: Callable[[], int],
        *,
        known: tuple[Gpu, ...] = (),
        make_steps: Callable[[Callable[[str], bool]], IsolationSteps] = IsolationSteps,
        read_load: Callable[[], tuple[int | None, int | None]] | None = None,
    ) -> None:
        self._identity = identity
        self._machine = machine
        self._runner = runner
        self._settings = settings
        self._expired = expired
        self._clock_ms = clock_ms
        self._wake = asyncio.Event()
        self._report_now = asyncio.Event()
        self._presence = presence
        self._monitor = GpuMonitor(gpus, clock_ms, known)
        self._simulated = gpus.source.simulated
        self._assignments = Assignments(
            store, identity.name, settings.max_writes_per_transaction, self._wake.set
        )
        self._steps = make_steps(self._monitor.has_instance)
        self._operations = Operations(runner, self._steps, clock_ms, self._wake.set)
        self._read_load = read_load or Load().read
        self._facts: RunnerFacts | None = None
        self._runner_problem = ""
        self._orphans: dict[TaskKey, int] = {}
        self._view: View | None = None
        self._sequence = 0

    async def run(self) -> None:
        """Until cancelled. NodeNameTaken when another machine has this node's name."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._assignments.follow())
                group.create_task(self._follow_runner())
                group.create_task(self._report_periodically())
                group.create_task(self._reconcile_on_change())
        except* NodeNameTaken as taken:
            raise NodeNameTaken(str(taken.exceptions[0])) from None
        finally:
            await self._operations.close()
            await self._presence.leave()

    async def turn(self) -> None:
        """One pass of steps 2 and 3. StoreUnavailable when something could not be written; the rest was done."""
        if not self._assignments.is_known:
            return
        busy = self._operations.busy  # before the look: what ends during it may be missing from the list
        starting = self._operations.starting
        observed = await self._observe()
        if observed is None:
            return
        view = await self._look(observed, busy, starting)
        self._orphans = sightings(view)
        if self._view is None or held(view).keys() != held(self._view).keys():
            self._report_now.set()
        self._view = view
        actions = reconcile(view)
        for action in actions:
            self._begin(action)
        self._call_off_starts()
        self._forget(view)
        writes = [action for action in actions if isinstance(action, WriteTask)]
        await self._assignments.write(writes, view.records)

    # --- what there is ---------------------------------------------------------------------------------------------

    async def _observe(self) -> tuple[ObservedTask, ...] | None:
        try:
            if self._facts is None:
                self._facts = await self._runner.probe()
            observed = await self._runner.list()
        except RunnerUnavailable as error:
            if str(error) != self._runner_problem:
                log.warning("%s", error)
                self._report_now.set()
            self._runner_problem = str(error)
            return None
        if self._runner_problem:
            log.info("%s answers again", self._runner.name)
            self._facts, self._runner_problem = None, ""  # it may have come back as another version
            self._report_now.set()
        return observed

    async def _look(
        self, observed: tuple[ObservedTask, ...], busy: frozenset[TaskKey], starting: frozenset[TaskKey]
    ) -> View:
        tasks = {task.key: task for task in observed}
        if await self._monitor.refresh():
            self._report_now.set()
        if any(self._must_confirm(task) for task in observed):
            await self._monitor.measure(self._runner.attempt_of, tasks)
        settings = self._settings
        return View(
            node=self._identity.name,
            now_ms=self._clock_ms(),
            limits=Limits(
                settings.orphan_grace_seconds * 1000,
                settings.log_retention_seconds * 1000,
                settings.stop_deadline_seconds * 1000,
            ),
            grants=tuple(self._assignments.grants.values()),
            withdrawn=frozenset(self._assignments.withdrawn),
            unreadable=frozenset(self._assignments.unreadable),
            observed=observed,
            records=dict(self._assignments.records),
            in_doubt=frozenset(self._assignments.in_doubt),
            busy=busy | self._operations.busy,
            starting=starting | self._operations.starting,
            stops=dict(self._operations.stops),
            failures=dict(self._operations.failures),
            steps_done=self._steps.done(),
            steps_busy=self._operations.steps_busy,
            steps_failed=self._operations.steps_failed(),
            gpus=self._monitor.availability(),
            on_gpu=self._monitor.on_gpu(),
            orphans=self._orphans,
            condemned=dict(self._monitor.condemned),
            notes=dict(self._monitor.notes),
        )

    def _must_confirm(self, task: ObservedTask) -> bool:
        """It has ended, and whether its GPUs are clean has to be seen anew before they are given away (GH-9)."""
        record = self._assignments.records.get(task.key)
        has_grant = (task.key.job, task.key.attempt) in self._assignments.grants
        is_written = record is not None and record.released
        return bool(task.slices) and task.state is Observed.EXITED and has_grant and not is_written

    # --- what is done ----------------------------------------------------------------------------------------------

    def _begin(self, action: Action) -> None:
        operations = self._operations
        match action:
            case Start():
                operations.start(action)
            case Stop(key, grace_seconds, ungranted):

                async def allowed() -> bool:
                    return not ungranted or await self._assignments.is_unlisted(key)

                operations.stop(key, grace_seconds, allowed)
            case Remove(key):
                operations.remove(key, self._expired.add)
            case PerformStep(step):
                operations.perform(step)
            case UndoStep(step):
                operations.undo(step)

    def _call_off_starts(self) -> None:
        for key in self._operations.starting:
            if (key.job, key.attempt) in self._assignments.withdrawn:
                self._operations.stop(key, 0, self._always)

    @staticmethod
    async def _always() -> bool:
        return True

    def _forget(self, view: View) -> None:
        """Everything that is remembered belongs to a grant, or to a task that is still there."""
        granted = {
            TaskKey(seen.grant.job, seen.grant.attempt, container.task)
            for seen in view.grants
            for container in seen.grant.containers
        }
        there = {task.key for task in view.observed} | view.busy
        self._operations.forget(granted | {t.key for t in view.observed if t.state is not Observed.EXITED})
        self._monitor.forget({*self._monitor.notes, *self._monitor.condemned} - granted - there)
        self._assignments.forget_withdrawn((key.job, key.attempt) for key in there | self._operations.busy)

    # --- the loops -------------------------------------------------------------------------------------------------

    async def _reconcile_on_change(self) -> None:
        while True:
            await _wait(self._wake, TICK_SECONDS)
            await asyncio.sleep(DEBOUNCE_SECONDS)
            self._wake.clear()
            try:
                await self.turn()
            except StoreUnavailable as error:
                log.warning("not written yet, tasks run on: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
                self._wake.set()

    async def _follow_runner(self) -> None:
        while True:
            try:
                async for _ in self._runner.events():
                    self._wake.set()
            except RunnerUnavailable:
                await asyncio.sleep(RETRY_SECONDS)

    async def _report_periodically(self) -> None:
        """The first one as soon as the machine was looked at: before that nobody knows what it holds."""
        while True:
            wait_seconds = float(self._settings.report_seconds)
            if self._view is not None:
                try:
                    await self._report()
                except StoreUnavailable as error:
                    log.warning("the report was not written: %s", error)
                    wait_seconds = RETRY_SECONDS
            await _wait(self._report_now, wait_seconds)
            await asyncio.sleep(DEBOUNCE_SECONDS)
            self._report_now.clear()

    async def _report(self) -> None:
        """What is there now and not at the last pass, and what is being started: after a pause in which its attempts were
        given up, the node is open to others as soon as it says that nothing holds its GPUs."""
        assert self._view is not None
        starting = self._operations.starting_on  # before the look: what has started by then is in it
        observed = await self._observe()
        view = self._view if observed is None else evolve(self._view, observed=observed)
        tasks = {task.key: task for task in view.observed}
        await self._monitor.measure(self._runner.attempt_of, tasks)
        view = evolve(view, gpus=self._monitor.availability(), on_gpu=self._monitor.on_gpu())
        if self._monitor.condemned:
            self._wake.set()
        await self._write_inventory()
        self._sequence += 1
        cpu_milli, memory_mib = self._read_load()
        facts = self._facts.warnings if self._facts is not None else ()
        unreadable = tuple(
            f"grant {job}.{attempt}: {text}" for (job, attempt), text in self._assignments.unreadable.items()
        )
        failed = self._operations.failures
        there = {key: gpus for key, gpus in starting.items() if key not in failed}
        there |= {key: task.gpus for key, task in held(view).items()}
        await self._presence.report(
            NodeReport(
                node=self._identity.name,
                sequence=self._sequence,
                at_ms=self._clock_ms(),
                gpus=self._gpu_reports(view),
                held={str(key): gpus for key, gpus in there.items()},
                cpu_used_milli=cpu_milli,
                memory_used_mib=memory_mib,
                warnings=(*facts, *self._monitor.warnings, *unreadable),
                closed=self._runner_problem,
            )
        )

    def _gpu_reports(self, view: View) -> tuple[GpuReport, ...]:
        if not self._monitor.is_ready:
            return self._monitor.faulty_reports()
        out = quarantined(view)
        return tuple(
            replace(report, fault=out[report.uuid]) if report.uuid in out and not report.fault else report
            for report in self._monitor.reports
        )

    async def _write_inventory(self) -> None:
        """None is written before the GPUs were read once: no GPUs, and not knowing them, are two things (GH-7)."""
        found = self._monitor.inventory
        if found is None or self._facts is None:
            return
        isolations = self._identity.isolations
        if any(gpu.is_mig_instance for gpu in found.gpus):
            isolations = (*isolations, "mig")
        await self._presence.write_inventory(
            NodeInventory(
                node=self._identity.name,
                machine_id=self._machine.id,
                agent_version=self._identity.version,
                gpus=found.gpus,
                links=found.links,
                cpu_milli=self._machine.cpu_milli,
                memory_mib=self._machine.memory_mib,
                labels=self._identity.labels,
                isolations=isolations,
                engine_node_id=await self._identity.engine_node_id(),
                container_gpus=self._facts.container_gpus,
                simulated=self._simulated,
            )
        )


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """`asyncio.wait_for` of Python 3.11 loses a cancellation that comes together with the event."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
