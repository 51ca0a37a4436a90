"""The agent's loop against a store in memory, simulated GPUs and real processes."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from attrs import evolve

from coordinator.config import Settings
from coordinator.model import Task, TaskState
from coordinator.records import (
    LEADER,
    Endpoint,
    Leadership,
    decode,
    encode,
    endpoint_key,
    grant_key,
    inventory_key,
    report_key,
    task_key,
    task_prefix,
)
from coordinator.store import Delete, MemoryStore, Put, Store
from jobspecs.container import ContainerSettings, Grant
from nodeagent.agent import Agent, NodeIdentity
from nodeagent.endpoint import ExpiredOutput
from nodeagent.gpu_source import GpuReader, GpusNotReady, WhyNotReady
from nodeagent.isolation_steps import IsolationSteps
from nodeagent.machine import Machine
from nodeagent.presence import NodeNameTaken, Presence
from nodeagent.process_cleanup import stop_all
from nodeagent.processes import ProcessRunner
from nodeagent.runner import Observed, ObservedTask, RunnerUnavailable, StopUnconfirmed, TaskKey
from nodeagent.simulated import SimulatedSource
from tests.fakes import FlakyStore
from vgpu.inventory import GpuProcess, NodeInventory, NodeReport
from vgpu.isolation.settings import GpuSettings
from vgpu.slices import Slice

T = TypeVar("T")
JOB = "0000000000000001"
SETTINGS = Settings(
    report_seconds=1,
    node_lease_seconds=3,
    orphan_grace_seconds=1,
    stop_deadline_seconds=2,
    log_retention_seconds=60,
)
MACHINE = Machine("machine-1", 4000, 8192)


def clock_ms() -> int:
    return time.time_ns() // 1_000_000


class World:
    """One node: a store, a source of GPUs, a state folder, and agents that come and go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memory = MemoryStore(time.monotonic)
        self.store = FlakyStore(self.memory)
        self.source = SimulatedSource("n1", "2x16GiB:T4")
        self.gpu = self.source.read_inventory().gpus[0].uuid
        self.settings = SETTINGS
        self.make_runner: Callable[[], ProcessRunner] = lambda: ProcessRunner(
            "n1", "serai", self.folder / "tasks"
        )

    @asynccontextmanager
    async def agent(self, machine: Machine = MACHINE) -> AsyncIterator[Agent]:
        store: Store = self.store
        presence = Presence(
            store, "n1", machine.id, self.settings.node_lease_seconds, Endpoint("n1", "http://n1", "t")
        )
        known = await presence.claim()
        runner = self.make_runner()
        agent = Agent(
            NodeIdentity("n1", {"zone": "a"}, ("exclusive", "timeslice"), "1", _no_engine),
            machine,
            presence,
            store,
            runner,
            GpuReader(self.source),
            self.settings,
            ExpiredOutput(self.folder / "expired"),
            clock_ms,
            known=known.gpus if known is not None else (),
            make_steps=lambda has: IsolationSteps(has, self.folder),
        )
        running = asyncio.create_task(agent.run())
        try:
            yield agent
            assert not running.done(), running.exception()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await runner.close()

    def container(self, *command: str, task: int = 0, slices: int = 1) -> ContainerSettings:
        labels = {"serai.job": JOB, "serai.attempt": "1", "serai.task": str(task), "serai.cluster": "serai"}
        held = (Slice(self.gpu, 4096, 500, "timeslice"),) * slices
        return ContainerSettings(
            task,
            "none",
            command,
            {},
            GpuSettings(),
            500,
            64,
            16,
            stop_grace_seconds=1,
            labels=labels,
            slices=held,
        )

    async def grant(self, *containers: ContainerSettings, attempt: int = 1, **changes: object) -> Grant:
        grant = evolve(Grant("n1", JOB, attempt, "a", containers, granted_at_ms=clock_ms()), **changes)
        await self.memory.txn([], [Put(grant_key("n1", JOB, attempt), encode(grant))])
        return grant

    async def lead(self) -> None:
        """A coordinator leads: what it does not list may be stopped."""
        lease = await self.memory.grant_lease(3600)
        await self.memory.txn([], [Put(LEADER, encode(Leadership("c1", "", 1)), lease)])

    async def end_grant(self, attempt: int = 1) -> None:
        listing = await self.memory.list(task_prefix("n1"))
        writes = [Delete(item.key) for item in listing.items]
        await self.memory.txn([], [Delete(grant_key("n1", JOB, attempt)), *writes])

    async def task(self, number: int = 0, attempt: int = 1) -> Task | None:
        item = await self.memory.get(task_key("n1", JOB, attempt, number))
        return decode(Task, item.value) if item else None

    async def report(self) -> NodeReport | None:
        item = await self.memory.get(report_key("n1"))
        return decode(NodeReport, item.value) if item else None

    async def inventory(self) -> NodeInventory | None:
        item = await self.memory.get(inventory_key("n1"))
        return decode(NodeInventory, item.value) if item else None

    async def until_task(self, state: TaskState, number: int = 0, released: bool | None = None) -> Task:
        async def reached() -> Task | None:
            task = await self.task(number)
            fits = task is not None and task.state is state and released in (None, task.released)
            return task if fits else None

        return await until(reached)

    async def until_report(self, condition: Callable[[NodeReport], object]) -> NodeReport:
        async def reached() -> NodeReport | None:
            report = await self.report()
            return report if report is not None and condition(report) else None

        return await until(reached)


async def _no_engine() -> str:
    return ""


async def until(condition: Callable[[], Awaitable[T]], seconds: float = 20) -> T:
    async with asyncio.timeout(seconds):
        while not (value := await condition()):
            await asyncio.sleep(0.02)
        return value


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.lead()
    yield made
    stop_all(tmp_path / "tasks", grace_seconds=0.1)


SLEEP = ("sh", "-c", "sleep 100")


async def test_a_granted_task_runs_and_its_end_is_written_down(world: World) -> None:
    async with world.agent():
        await world.grant(world.container("sh", "-c", "sleep 0.3; exit 3"))
        await world.until_task(TaskState.RUNNING)
        task = await world.until_task(TaskState.EXITED)
    assert (task.exit_code, task.released, task.node) == (3, True, "n1")
    assert task.started_at_ms is not None


async def test_the_inventory_and_the_report_say_what_there_is(world: World) -> None:
    async with world.agent():
        await world.grant(world.container(*SLEEP))
        report = await world.until_report(lambda report: report.held)
    assert report.held == {f"{JOB}.1.0": (world.gpu,)}
    assert [gpu.uuid for gpu in report.gpus] == [gpu.uuid for gpu in world.source.read_inventory().gpus]
    inventory = await world.inventory()
    assert inventory is not None
    assert (inventory.machine_id, inventory.cpu_milli, inventory.labels) == ("machine-1", 4000, {"zone": "a"})
    assert inventory.simulated


async def test_what_is_being_started_is_held_in_the_report(world: World) -> None:
    """Seed 714586 of the simulation: an agent that had been paused said that nothing was there, and started it."""
    world.make_runner = lambda: SlowRunner("n1", "serai", world.folder / "tasks")
    async with world.agent():
        await world.grant(world.container(*SLEEP))
        report = await world.until_report(lambda report: report.held)
        assert report.held == {f"{JOB}.1.0": (world.gpu,)}
        await world.until_report(lambda later: later.sequence > report.sequence)
        task = await world.task()
        assert task is not None
        assert task.state is TaskState.STARTING


async def test_what_has_ended_is_not_held_in_the_next_report_lk_10(world: World) -> None:
    async with world.agent():
        await world.grant(world.container("sh", "-c", "sleep 0.5"))
        await world.until_report(lambda report: report.held)
        await world.until_task(TaskState.EXITED)
        began = time.monotonic()
        await world.until_report(lambda report: not report.held)
        assert time.monotonic() - began < 0.9  # at once, not at the next period


async def test_a_stopping_grant_is_stopped_and_confirmed(world: World) -> None:
    async with world.agent():
        grant = await world.grant(world.container(*SLEEP), world.container(*SLEEP, task=1))
        await world.until_task(TaskState.RUNNING)
        await world.until_task(TaskState.RUNNING, 1)
        await world.grant(*grant.containers, stopping=True)
        ends = [await world.until_task(TaskState.EXITED, number) for number in (0, 1)]
    assert [(task.exit_code, task.signal, task.released) for task in ends] == [(143, 15, True)] * 2


async def test_a_grant_that_is_stopping_from_the_start_never_runs(world: World) -> None:
    async with world.agent():
        await world.grant(world.container(*SLEEP), stopping=True)
        task = await world.until_task(TaskState.EXITED)
    assert (task.exit_code, task.started_at_ms, task.released) == (None, None, True)


async def test_a_launch_that_fails_is_told_and_frees_its_slices_lk_2(world: World) -> None:
    async with world.agent():
        await world.grant(world.container("no-such-program"), world.container(*SLEEP, task=1))
        failed = await world.until_task(TaskState.EXITED)
        await world.until_task(TaskState.RUNNING, 1)
        await world.until_report(lambda report: list(report.held) == [f"{JOB}.1.1"])
    assert (failed.exit_code, failed.released) == (127, True)


async def test_a_restarted_agent_adopts_what_runs_rr_1_rr_2(world: World) -> None:
    async with world.agent():
        await world.grant(world.container("sh", "-c", "echo x >> runs; sleep 3; exit 6"))
        before = await world.until_task(TaskState.RUNNING)
    assert await world.report() is None  # its lease was given back: nobody watches the node
    async with world.agent():
        await world.until_report(lambda report: report.held)
        assert await world.task() == before
        task = await world.until_task(TaskState.EXITED)
    assert task.exit_code == 6
    assert (world.folder / "tasks" / f"{JOB}.1.0" / "work" / "runs").read_text() == "x\n"


async def test_an_end_while_no_agent_ran_is_written_down_by_the_next(world: World) -> None:
    async with world.agent():
        await world.grant(world.container("sh", "-c", "sleep 0.5; exit 9"))
        await world.until_task(TaskState.RUNNING)
    exit_file = world.folder / "tasks" / f"{JOB}.1.0" / "exit"
    await until(lambda: _exists(exit_file))
    async with world.agent():
        assert (await world.until_task(TaskState.EXITED)).exit_code == 9


async def test_a_restarted_agent_waits_for_gpus_and_touches_nothing_rr_2_gh_10(world: World) -> None:
    async with world.agent():
        await world.grant(world.container(*SLEEP))
        before = await world.until_task(TaskState.RUNNING)
    inventory = await world.inventory()
    world.source.set_not_ready(GpusNotReady(WhyNotReady.DRIVER_NOT_LOADED, "no driver yet"))
    async with world.agent():
        report = await world.until_report(lambda report: report.held)
        assert any("not ready" in warning for warning in report.warnings)
        assert {gpu.uuid for gpu in report.gpus if gpu.fault} == {gpu.uuid for gpu in inventory.gpus}
        await world.grant(world.container(*SLEEP), attempt=2)  # may not start yet
        await world.until_report(lambda later: later.sequence > report.sequence + 1)
        assert await world.task() == before
        assert await world.task(attempt=2) is None
        assert await world.inventory() == inventory
        world.source.set_not_ready(None)
        await until(lambda: world.task(attempt=2))
        await world.until_report(lambda report: not any(gpu.fault for gpu in report.gpus))
        assert await world.task() == before


async def test_a_lost_state_folder_is_rebuilt_from_what_runs_rr_5(world: World) -> None:
    async with world.agent():
        await world.grant(world.container(*SLEEP))
        before = await world.until_task(TaskState.RUNNING)
    shutil.rmtree(world.folder / "tasks")
    async with world.agent():
        report = await world.until_report(lambda report: report.held)
        assert list(report.held) == [f"{JOB}.1.0"]
        assert (await world.task()).state is TaskState.RUNNING
        await world.grant(world.container(*SLEEP), stopping=True)
        task = await world.until_task(TaskState.EXITED)
    assert (task.fault, task.released) == ("task_vanished", True)  # nobody can know its exit code any more
    assert before.attempt == task.attempt


async def test_a_task_without_a_grant_is_stopped_after_the_grace_rr_5_rr_6(world: World) -> None:
    runner = world.make_runner()
    orphan = world.container(*SLEEP)
    await runner.start(Grant("n1", JOB, 1, "a", (orphan,), 0), orphan)
    began = time.monotonic()
    async with world.agent():
        await world.until_report(lambda report: report.held)
        await world.until_report(lambda report: not report.held)
    assert time.monotonic() - began > 1
    assert [task.state for task in await runner.list()] == [Observed.EXITED]


async def test_a_withdrawn_attempt_is_ended_and_its_records_are_left_alone_rr_11(world: World) -> None:
    async with world.agent():
        await world.grant(world.container(*SLEEP))
        await world.until_task(TaskState.RUNNING)
        await world.end_grant()
        await world.grant(world.container(*SLEEP), attempt=2)
        await until(lambda: world.task(attempt=2))
        await world.until_report(lambda report: list(report.held) == [f"{JOB}.2.0"])
        assert await world.task() is None


async def test_an_outage_of_the_store_leaves_tasks_alone_and_loses_no_end_ex_7(world: World) -> None:
    async with world.agent():
        await world.grant(world.container("sh", "-c", "sleep 0.5; exit 4"), world.container(*SLEEP, task=1))
        await world.until_task(TaskState.RUNNING, 1)
        await world.until_task(TaskState.RUNNING)
        world.store.is_down = True
        await until(lambda: _exists(world.folder / "tasks" / f"{JOB}.1.0" / "exit"))
        await until(lambda: report_is_gone(world))  # the lease runs out meanwhile
        assert (await world.task()).state is TaskState.RUNNING
        world.store.is_down = False
        assert (await world.until_task(TaskState.EXITED)).exit_code == 4
        report = await world.until_report(lambda report: report.held)
        assert list(report.held) == [f"{JOB}.1.1"]
        assert await world.memory.get(endpoint_key("n1")) is not None
        assert (await world.task(1)).state is TaskState.RUNNING


async def test_a_lost_answer_and_a_late_write_do_not_undo_a_newer_record(world: World) -> None:
    world.store.only = task_prefix("n1")
    world.store.late_requests = 1  # STARTING is under way
    async with world.agent():
        await world.grant(world.container("sh", "-c", "exit 5"))
        ended = await world.until_task(TaskState.EXITED)
        late = await world.store.deliver()
        assert [result.succeeded for result in late] == [False]
        assert await world.task() == ended
        world.store.lost_replies = 1
        await world.grant(world.container("sh", "-c", "exit 5"), attempt=2)

        async def second_ended() -> bool:
            task = await world.task(attempt=2)
            return task is not None and task.state is TaskState.EXITED

        await until(second_ended)
    assert world.store.lost_replies == 0


async def test_a_second_machine_of_the_same_name_is_refused_id_1(world: World) -> None:
    async with world.agent():
        await world.grant(world.container(*SLEEP))
        await world.until_task(TaskState.RUNNING)
        await world.until_report(lambda report: report.held)
        inventory = await world.inventory()
        with pytest.raises(NodeNameTaken, match="n1"):
            async with world.agent(Machine("machine-2", 1, 1)):
                pass
        assert await world.inventory() == inventory
        assert (await world.task()).state is TaskState.RUNNING


async def test_a_new_machine_takes_over_the_name_of_a_silent_one_id_2(world: World) -> None:
    async with world.agent():
        await world.until_report(lambda report: True)
    async with world.agent(Machine("machine-2", 2000, 1)):
        await world.until_report(lambda report: True)
        assert (await world.inventory()).machine_id == "machine-2"


async def test_processes_left_on_a_gpu_hold_its_slices_gh_9(world: World) -> None:
    runner = LeftoverRunner("n1", "serai", world.folder / "tasks")
    world.make_runner = lambda: runner
    world.source.occupy(world.gpu, [GpuProcess(LEFT_PID, 40_000)])
    async with world.agent():
        await world.grant(world.container("sh", "-c", "exit 0"))
        task = await world.until_task(TaskState.EXITED, released=False)
        assert str(LEFT_PID) in task.detail
        report = await world.until_report(
            lambda report: any("still there" in gpu.fault for gpu in report.gpus)
        )
        assert list(report.held) == [f"{JOB}.1.0"]
        world.source.occupy(world.gpu, [])
        task = await world.until_task(TaskState.EXITED, released=True)
        assert task.exit_code == 0
        await world.until_report(lambda report: not any(gpu.fault for gpu in report.gpus))


async def test_a_stop_that_hangs_holds_up_nothing_else_gh_8(world: World) -> None:
    runner = StuckRunner("n1", "serai", world.folder / "tasks")
    world.make_runner = lambda: runner
    async with world.agent():
        grant = await world.grant(world.container(*SLEEP), world.container(*SLEEP, task=1, slices=0))
        await world.until_task(TaskState.RUNNING)
        await world.until_task(TaskState.RUNNING, 1)
        await world.grant(*grant.containers, stopping=True)
        await world.until_task(TaskState.EXITED, 1)

        async def unconfirmed() -> Task | None:
            task = await world.task()
            return task if task is not None and task.fault == "stop_unconfirmed" else None

        task = await until(unconfirmed)
        assert (task.state, task.released) == (TaskState.RUNNING, False)
        report = await world.until_report(lambda report: any(gpu.fault for gpu in report.gpus))
        assert [gpu.uuid for gpu in report.gpus if gpu.fault] == [world.gpu]
        assert list(report.held) == [f"{JOB}.1.0"]


async def test_a_runner_that_cannot_be_asked_closes_the_node_and_ends_nothing(world: World) -> None:
    runner = DownRunner("n1", "serai", world.folder / "tasks")
    world.make_runner = lambda: runner
    async with world.agent():
        await world.grant(world.container(*SLEEP))
        before = await world.until_task(TaskState.RUNNING)
        runner.is_down = True
        report = await world.until_report(lambda report: report.closed)
        assert "engine is down" in report.closed
        assert await world.task() == before
        runner.is_down = False
        await world.until_report(lambda report: not report.closed)
        assert await world.task() == before


async def test_an_unreadable_grant_is_shown_and_ends_nothing_da_7(world: World) -> None:
    async with world.agent():
        await world.grant(world.container(*SLEEP))
        before = await world.until_task(TaskState.RUNNING)
        await world.memory.txn([], [Put(grant_key("n1", JOB, 1), b"{")])
        report = await world.until_report(lambda report: any("grant" in line for line in report.warnings))
        assert list(report.held) == [f"{JOB}.1.0"]
        assert await world.task() == before
        await world.grant(world.container(*SLEEP), stopping=True)
        await world.until_task(TaskState.EXITED)


async def test_a_compacted_watch_lists_again_et_1(world: World) -> None:
    async with world.agent():
        await world.until_report(lambda report: True)
        for _ in range(3):
            await world.memory.txn([], [Put("/serai/other", b"")])
        await world.memory.compact(world.memory.revision)
        await world.grant(world.container("sh", "-c", "exit 0"))
        await world.until_task(TaskState.EXITED)


async def test_a_task_that_outgrows_its_time_slice_is_stopped(world: World) -> None:
    runner = LeftoverRunner("n1", "serai", world.folder / "tasks")
    world.make_runner = lambda: runner
    async with world.agent():
        await world.grant(world.container(*SLEEP))
        await world.until_task(TaskState.RUNNING)
        world.source.occupy(world.gpu, [GpuProcess(LEFT_PID, 5000)])  # 4096 were granted
        await until(lambda: _is_over(runner), 30)
        world.source.occupy(world.gpu, [])
        task = await world.until_task(TaskState.EXITED)
    assert task.fault == "out_of_memory"
    assert "5000 MiB" in task.detail


LEFT_PID = 999_999_999


class LeftoverRunner(ProcessRunner):
    """A process of the task is on the GPU, whatever the machine's own processes say."""

    def attempt_of(self, pid: int) -> str:
        return f"{JOB}.1.0" if pid == LEFT_PID else super().attempt_of(pid)


class StuckRunner(ProcessRunner):
    """Task 0 cannot be stopped: its process hangs in the kernel."""

    async def stop(self, key: TaskKey, grace_seconds: int) -> None:
        if key.task == 0:
            await asyncio.sleep(0.5)
            raise StopUnconfirmed("it is in state D")
        await super().stop(key, grace_seconds)


class SlowRunner(ProcessRunner):
    """A start takes for ever."""

    async def start(self, grant: Grant, container: ContainerSettings) -> None:
        await asyncio.Event().wait()


class DownRunner(ProcessRunner):
    is_down = False

    async def list(self) -> tuple[ObservedTask, ...]:
        if self.is_down:
            raise RunnerUnavailable("the engine is down")
        return await super().list()


async def _exists(path: Path) -> bool:
    return path.exists()


async def report_is_gone(world: World) -> bool:
    return await world.report() is None


async def _is_over(runner: ProcessRunner) -> bool:
    return all(task.state is Observed.EXITED for task in await runner.list())
