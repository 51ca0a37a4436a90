"""One machine with GPUs and containers, as it is whether or not anybody looks; and a `Runner` that an agent asks.

What a container does stands in its command: `sim run_ms=4000 exit=0 term=obey ghost_ms=0 stuck_ms=0 launch=ok`.
`ghost_ms`: for so long a process of it stays on its GPUs after its end (GH-9). `stuck_ms`: for so long the kernel keeps
it after SIGKILL (GH-8).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from random import Random
from typing import Any, Protocol, TypeVar

from attrs import define, evolve, field

from jobspecs.container import ContainerSettings, Grant
from nodeagent.blocking import to_end
from nodeagent.isolation_steps import StepFailed
from nodeagent.runner import (
    KILL_CONFIRM_SECONDS,
    LaunchFailed,
    Observed,
    ObservedTask,
    RunnerFacts,
    RunnerUnavailable,
    StopUnconfirmed,
    TaskKey,
)
from nodeagent.simulated import SimulatedSource
from nodeagent.view import StepId, step_id
from tests.simulation.loop import VirtualLoop
from vgpu.inventory import GpuProcess
from vgpu.isolation.settings import Step
from vgpu.reasons import ReasonCode
from vgpu.slices import Slice

T = TypeVar("T")
CALL_SECONDS = 5.0


@define(eq=False)
class Box:
    """One container. `id` tells a second one of the same key apart."""

    id: str
    key: TaskKey
    slices: tuple[Slice, ...]
    behaviour: Mapping[str, str]
    foreign: bool
    state: Observed = Observed.CREATED
    started_ms: int | None = None
    ended_ms: int | None = None
    exit_code: int | None = None
    is_dying: bool = False
    ends: list[asyncio.Future[None]] = field(factory=list)

    def number(self, name: str, default: int = 0) -> int:
        return int(self.behaviour.get(name, default))


class Onlooker(Protocol):
    """Told of what really happens on a machine."""

    def box_started(self, machine: Machine, box: Box) -> None: ...
    def box_ended(self, machine: Machine, box: Box) -> None: ...


class Machine:
    """`hang` makes its container engine silent. `adopts` off is the control: a launch makes another container."""

    def __init__(self, name: str, gpus: str, loop: VirtualLoop, random: Random, onlooker: Onlooker) -> None:
        self.name = name
        self.description = gpus
        self.loop = loop
        self.random = random
        self.onlooker = onlooker
        self.boxes: dict[str, Box] = {}
        self.ghosts: dict[int, tuple[TaskKey, str, int]] = {}
        self.lost_gpus: set[str] = set()
        self.unseen: set[int] = set()  # ghosts on a GPU that could not be read meanwhile
        self.daemons: dict[StepId, Step] = {}
        self.is_up = True
        self.adopts = True
        self.engine_is_down = False
        self.skew_ms = 0
        self.boots = 0
        self.wipes = 0
        self.source = SimulatedSource(name, gpus)
        self.gpus = {gpu.uuid: gpu for gpu in self.source.read_inventory().gpus}
        self._next = 1000
        self._hints: list[asyncio.Event] = []

    # --- containers ------------------------------------------------------------------------------------------------

    def find(self, key: TaskKey) -> Box | None:
        found = [box for box in self.boxes.values() if box.key == key]
        running = [box for box in found if box.state is Observed.RUNNING]
        return (running or found or [None])[0]

    def running(self) -> list[Box]:
        return [box for box in self.boxes.values() if box.state is Observed.RUNNING]

    def create(self, key: TaskKey, container: ContainerSettings, foreign: bool = False) -> Box:
        self._next += 1
        parts = (word.partition("=") for word in container.command[1:])
        behaviour = {name: value for name, _, value in parts}
        box = Box(f"c{self._next}", key, container.slices, behaviour, foreign)
        self.boxes[box.id] = box
        self.hint()
        return box

    def start(self, box: Box) -> None:
        if box.state is not Observed.CREATED or box.id not in self.boxes or not self.is_up:
            return
        box.state, box.started_ms = Observed.RUNNING, self.wall_ms()
        if any(piece.gpu in self.lost_gpus for piece in box.slices):
            self.loop.later(0.5, self.end, box, 1)
        if box.number("run_ms", 1000) >= 0:
            self.loop.later(box.number("run_ms", 1000) / 1000, self.end, box, box.number("exit"))
        self.onlooker.box_started(self, box)
        self.hint()

    def end(self, box: Box, exit_code: int, ghosts: bool = True) -> None:
        if box.state is not Observed.RUNNING:
            return
        box.state, box.exit_code, box.ended_ms = Observed.EXITED, exit_code, self.wall_ms()
        seconds = box.number("ghost_ms") / 1000
        for piece in box.slices if seconds and ghosts else ():
            self._next += 1
            self.ghosts[self._next] = (box.key, piece.gpu, piece.memory_mib)
            if piece.gpu in self.lost_gpus:
                self.unseen.add(self._next)
            self.loop.later(seconds, self._lay_ghost, self._next)
        self.show()
        self.onlooker.box_ended(self, box)
        for waiting in box.ends:
            if not waiting.done():
                waiting.set_result(None)
        self.hint()

    def terminate(self, box: Box, grace_seconds: float) -> None:
        if box.state is not Observed.RUNNING:
            return
        how = box.behaviour.get("term", "obey")
        if how == "obey":
            self.loop.later(self.random.uniform(0.01, 0.3), self.end, box, 143)
        elif how == "clean":
            self.loop.later(self.random.uniform(0.01, 0.3), self.end, box, 0)
        seconds = grace_seconds + box.number("stuck_ms") / 1000
        self.loop.later(seconds, self.end, box, 137)

    def remove(self, box: Box) -> None:
        if box.state is not Observed.RUNNING:
            self.boxes.pop(box.id, None)
            self.hint()

    def _lay_ghost(self, pid: int) -> None:
        if self.ghosts.pop(pid, None) is not None:
            self.show()

    # --- the machine -----------------------------------------------------------------------------------------------

    def wall_ms(self) -> int:
        return self.loop.wall_ms() + self.skew_ms

    def power_off(self, wiped: bool) -> None:
        self.is_up = False
        self.boots += 1
        for box in self.running():
            self.end(box, 137, ghosts=False)
        self.ghosts.clear()
        self.daemons.clear()
        if wiped:
            self.wipes += 1
            self.boxes.clear()

    def power_on(self) -> None:
        self.is_up = True

    def lose_gpu(self, uuid: str) -> None:
        self.lost_gpus.add(uuid)
        self.unseen |= {pid for pid, (_, gpu, _) in self.ghosts.items() if gpu == uuid}
        self.show()
        for box in self.running():
            if any(piece.gpu == uuid for piece in box.slices):
                self.loop.later(self.random.uniform(0.1, 3.0), self.end, box, 1)

    def restore_gpu(self, uuid: str) -> None:
        self.lost_gpus.discard(uuid)
        self.show()

    def fresh_source(self) -> SimulatedSource:
        """The driver as a new agent finds it."""
        self.source = SimulatedSource(self.name, self.description)
        self.show()
        return self.source

    def show(self) -> None:
        for uuid in self.gpus:
            if uuid in self.lost_gpus:
                self.source.lose(uuid)
            else:
                self.source.restore(uuid)
            self.source.occupy(
                uuid, [GpuProcess(p, mib) for p, (_, gpu, mib) in self.ghosts.items() if gpu == uuid]
            )

    def hint(self) -> None:
        for event in self._hints:
            self.loop.later(self.random.uniform(0.001, 0.01), event.set)

    def listen(self, event: asyncio.Event) -> None:
        self._hints.append(event)


class RunnerFates(Protocol):
    def of_call(self, machine: Machine, what: str) -> str:
        """ "" | no_effect | no_answer | hangs"""
        ...


class SimulatedRunner:
    """A `Runner` of one agent process, asking one machine over a socket that may fail."""

    name = "simulated"

    def __init__(self, machine: Machine, fates: RunnerFates) -> None:
        self._machine = machine
        self._fates = fates

    async def list(self) -> tuple[ObservedTask, ...]:
        return await self._call("list", lambda: _listed(self._machine))

    async def start(self, grant: Grant, container: ContainerSettings) -> None:
        machine, key = self._machine, TaskKey(grant.job, grant.attempt, container.task)
        if await self._call("inspect", lambda: self._adopt(key)):
            return
        launch = container.command[1:] and dict(w.split("=") for w in container.command[1:]).get(
            "launch", "ok"
        )
        await asyncio.sleep(machine.random.uniform(0.0, 0.2) if launch != "slow" else 6.0)
        if launch == "image":
            raise LaunchFailed(ReasonCode.IMAGE_UNAVAILABLE.value, "no such image")
        if launch == "refused":
            raise LaunchFailed(ReasonCode.LAUNCH_FAILED.value, "the engine says no")
        await to_end(self._create_and_start(key, container))

    async def _create_and_start(self, key: TaskKey, container: ContainerSettings) -> None:
        machine = self._machine

        def create() -> Box:
            found = machine.find(key) if machine.adopts else None
            return found or machine.create(key, container)

        box = await self._call("create", create)
        await self._call("start", lambda: machine.start(box))

    def _adopt(self, key: TaskKey) -> bool:
        found = self._machine.find(key) if self._machine.adopts else None
        if found is not None and found.state is Observed.CREATED:
            self._machine.start(found)
        return found is not None

    async def stop(self, key: TaskKey, grace_seconds: int) -> None:
        machine = self._machine
        box = await self._call("inspect", lambda: machine.find(key))
        if box is None or box.state is not Observed.RUNNING:
            return
        ended: asyncio.Future[None] = machine.loop.create_future()
        box.ends.append(ended)
        await self._call("stop", lambda: machine.terminate(box, grace_seconds))
        try:
            async with asyncio.timeout(grace_seconds + KILL_CONFIRM_SECONDS):
                if box.state is Observed.RUNNING:
                    await ended
        except TimeoutError:
            raise StopUnconfirmed(f"{key} may still run") from None

    async def remove(self, key: TaskKey) -> None:
        def remove() -> None:
            for box in [box for box in self._machine.boxes.values() if box.key == key]:
                self._machine.remove(box)

        await self._call("remove", remove)

    async def events(self) -> AsyncIterator[None]:
        event = asyncio.Event()
        self._machine.listen(event)
        while True:
            await event.wait()
            event.clear()
            if self._machine.random.random() > 0.05:
                yield

    def logs(
        self, key: TaskKey, *, stream: str, follow: bool, tail_bytes: int | None
    ) -> AsyncIterator[bytes]:
        raise AssertionError("nobody reads output here")

    def attempt_of(self, pid: int) -> str:
        ghost = self._machine.ghosts.get(pid)
        return str(ghost[0]) if ghost is not None else ""

    async def probe(self) -> RunnerFacts:
        return await self._call("probe", RunnerFacts)

    async def close(self) -> None:
        """Nothing is open."""

    async def _call(self, what: str, effect: Callable[[], T]) -> T:
        machine = self._machine
        loop, random, boot = machine.loop, machine.random, machine.boots
        fate = "no_effect" if machine.engine_is_down else self._fates.of_call(machine, what)
        if fate == "no_effect":
            await asyncio.sleep(0.001)
            raise RunnerUnavailable(f"{what}: no effect")
        answer: asyncio.Future[T] = loop.create_future()

        def arrive() -> None:
            if machine.is_up and machine.boots == boot:
                result = effect()
                if fate == "":
                    loop.later(random.uniform(0.0005, 0.004), _succeed, answer, result)

        late = random.uniform(0.0, 2 * CALL_SECONDS) if fate == "hangs" else random.uniform(0.0005, 0.01)
        loop.later(late, arrive)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await answer
        except TimeoutError:
            raise RunnerUnavailable(f"{what}: no answer") from None


def _succeed(answer: asyncio.Future[Any], result: object) -> None:
    if not answer.done():
        answer.set_result(result)


def _listed(machine: Machine) -> tuple[ObservedTask, ...]:
    tasks = {}
    for box in machine.boxes.values():
        tasks[box.key] = ObservedTask(
            box.key,
            box.state,
            exit_code=box.exit_code,
            started_at_ms=box.started_ms,
            ended_at_ms=box.ended_ms,
            slices=box.slices,
            container=box.id,
            foreign=box.foreign,
        )
    return tuple(tasks[key] for key in sorted(tasks))


class SimulatedSteps:
    """Isolation steps of a machine: daemons that run on when the agent dies. Some fail."""

    def __init__(self, machine: Machine, fates: RunnerFates) -> None:
        self._machine = machine
        self._fates = fates

    def done(self) -> Mapping[StepId, Step]:
        return dict(self._machine.daemons)

    async def perform(self, step: Step) -> None:
        fate = self._fates.of_call(self._machine, "step")
        await asyncio.sleep(self._machine.random.uniform(0.01, 0.2))
        if fate:
            raise StepFailed("the daemon did not come up")
        self._machine.daemons[step_id(step)] = step

    async def undo(self, step: Step) -> None:
        await asyncio.sleep(self._machine.random.uniform(0.01, 0.1))
        self._machine.daemons.pop(step_id(step), None)


def renamed(container: ContainerSettings, **changes: object) -> ContainerSettings:
    return evolve(container, **changes)  # type: ignore[arg-type]
