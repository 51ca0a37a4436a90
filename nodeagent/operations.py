"""What is under way on this machine: starts, stops, removals and isolation steps, each in a task of its own, so that one
that hangs delays nothing else (GH-8). At most one for each task of a job; its outcome is kept until it is forgotten."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from attrs import define, field

from coordinator.store import StoreUnavailable
from nodeagent.isolation_steps import IsolationSteps, StepFailed
from nodeagent.runner import LaunchFailed, Runner, RunnerUnavailable, StopUnconfirmed, TaskKey
from nodeagent.view import Failure, Start, StepId, step_id
from vgpu.isolation.settings import Step

K = TypeVar("K", TaskKey, StepId)

log = logging.getLogger("serai.agent")

# Image pulls and container starts side by side; stops are never made to wait.
STARTS_IN_FLIGHT = 16
RETRY_SECONDS = 1.0
STEP_RETRY_MS = 10_000


@define
class Operations:
    """`finished` is called after each end."""

    runner: Runner
    steps: IsolationSteps
    clock_ms: Callable[[], int]
    finished: Callable[[], None]
    failures: dict[TaskKey, Failure] = field(factory=dict)
    stops: dict[TaskKey, int] = field(factory=dict)
    _steps_failed: dict[StepId, tuple[str, int]] = field(factory=dict)
    _starts: dict[TaskKey, asyncio.Task[None]] = field(factory=dict)
    _gpus: dict[TaskKey, tuple[str, ...]] = field(factory=dict)  # of what is being started, and maybe of more
    _others: dict[TaskKey, asyncio.Task[None]] = field(factory=dict)
    _step_tasks: dict[StepId, asyncio.Task[None]] = field(factory=dict)
    _gate: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(STARTS_IN_FLIGHT))

    @property
    def starting(self) -> frozenset[TaskKey]:
        return frozenset(self._starts)

    @property
    def starting_on(self) -> dict[TaskKey, tuple[str, ...]]:
        """The GPUs that what is being started will have."""
        return {key: self._gpus[key] for key in self._starts}

    @property
    def busy(self) -> frozenset[TaskKey]:
        return frozenset(self._starts) | frozenset(self._others)

    @property
    def steps_busy(self) -> frozenset[StepId]:
        return frozenset(self._step_tasks)

    def steps_failed(self) -> dict[StepId, str]:
        """For a while: then the step is tried again for whoever wants it then."""
        now_ms = self.clock_ms()
        self._steps_failed = {
            id: (text, at_ms)
            for id, (text, at_ms) in self._steps_failed.items()
            if now_ms - at_ms < STEP_RETRY_MS
        }
        return {id: text for id, (text, _) in self._steps_failed.items()}

    def start(self, action: Start) -> None:
        async def launch() -> None:
            async with self._gate:
                await self.runner.start(action.seen.grant, action.container)

        if action.key not in self.busy:
            self._gpus = self.starting_on
            self._gpus[action.key] = tuple(piece.gpu for piece in action.container.slices)
            self._run(self._starts, action.key, launch())

    def stop(self, key: TaskKey, grace_seconds: int, allowed: Callable[[], Awaitable[bool]]) -> None:
        """A start that is under way is called off. `allowed` is asked first, and may say no."""

        async def end() -> None:
            if await allowed():
                self.stops.setdefault(key, self.clock_ms())
                await self.runner.stop(key, grace_seconds)

        if key in self._starts:
            self._starts[key].cancel()
        elif key not in self._others:
            self._run(self._others, key, end())

    def remove(self, key: TaskKey, removed: Callable[[TaskKey], None]) -> None:
        async def take_away() -> None:
            await self.runner.remove(key)
            removed(key)

        if key not in self.busy:
            self._run(self._others, key, take_away())

    def perform(self, step: Step) -> None:
        self._run(self._step_tasks, step_id(step), self.steps.perform(step))

    def undo(self, step: Step) -> None:
        self._run(self._step_tasks, step_id(step), self.steps.undo(step))

    def forget(self, wanted: set[TaskKey]) -> None:
        """Keeps the outcomes of these tasks only."""
        self.failures = {key: failure for key, failure in self.failures.items() if key in wanted}
        self.stops = {key: at_ms for key, at_ms in self.stops.items() if key in wanted or key in self._others}

    async def close(self) -> None:
        """Calls off what is under way; the next agent finds the machine as it is, and asks again."""
        running = [*self._starts.values(), *self._others.values(), *self._step_tasks.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _run(self, table: dict[K, asyncio.Task[None]], id: K, work: Coroutine[object, object, None]) -> None:
        async def until_known() -> None:
            try:
                await work
            except (RunnerUnavailable, StoreUnavailable, StopUnconfirmed) as error:
                log.warning("%s: %s", id, error)
                await asyncio.sleep(
                    RETRY_SECONDS
                )  # it counts as busy for so long, and is asked for again then
            except LaunchFailed as error:
                log.warning("%s was not started: %s", id, error.detail)
                assert isinstance(id, TaskKey)
                self.failures[id] = Failure(error.fault, error.detail, self.clock_ms(), error.exit_code)
            except StepFailed as error:
                log.warning("isolation step %s: %s", id, error)
                assert isinstance(id, tuple)
                self._steps_failed[id] = (str(error), self.clock_ms())
            except Exception:
                log.exception("%s", id)
                await asyncio.sleep(RETRY_SECONDS)

        def done(_: asyncio.Task[None]) -> None:
            work.close()  # it never began when it was called off at once
            table.pop(id, None)
            self.finished()

        task = asyncio.create_task(until_known())
        table[id] = task
        task.add_done_callback(done)
