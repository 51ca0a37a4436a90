"""One seed: the world it makes, the faults that strike it, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

from attrs import frozen

from coordinator.engines import Engine
from coordinator.engines.agent import AgentEngine
from coordinator.model import NodeAdmin, Tenant
from coordinator.records import Endpoint, admin_key, encode, tenant_key
from coordinator.replica import Replica
from coordinator.store import Put, Write
from nodeagent.runner import TaskKey
from tests.simulation.checks import Checks, Violation
from tests.simulation.controls import Control, controlled
from tests.simulation.faults import strike
from tests.simulation.loop import Life, Process, VirtualLoop
from tests.simulation.machine import Machine
from tests.simulation.nomad import NomadServer, nomad_engine
from tests.simulation.parts import Api, coordinate, run_agent
from tests.simulation.scenario import FAULTS_UNTIL_SECONDS, Scenario
from tests.simulation.store import Client, Server, forget_dead
from tests.simulation.users import Users
from vgpu.slices import Slice

START_MS = 1_700_000_000_000
SETTLED_WITHIN_SECONDS = 500.0


@frozen
class Result:
    """How one seed went. `failure` is empty when every promise was kept."""

    seed: int
    failure: str
    steps: int
    faults: dict[str, int]
    jobs: int
    virtual_seconds: float
    story: tuple[str, ...]


class World:
    def __init__(self, scenario: Scenario, control: Control | None = None) -> None:
        self.scenario = scenario
        self.control = control
        self.random = Random(f"{scenario.seed}/world")
        self.loop = VirtualLoop(START_MS)
        self.server = Server(self.loop, Random(f"{scenario.seed}/network"))
        self.machines: dict[str, Machine] = {}
        self.checks = Checks(self.loop, scenario.settings, self.machines)
        self.server.on_applied = self.checks.applied
        for number, gpus in enumerate(scenario.nodes):
            name = f"n{number + 1}"
            self.machines[name] = Machine(
                name, gpus, self.loop, Random(f"{scenario.seed}/{name}"), self.checks
            )
            self.machines[name].adopts = control is not Control.LAUNCH_TWICE
        self.nomad = NomadServer(self.loop, Random(f"{scenario.seed}/nomad"), self.machines, self)
        self.checks.on_end = self.nomad.box_ended
        self.nomad.is_idempotent = control is not Control.LAUNCH_TWICE
        self.faults: Counter[str] = Counter()
        self.calm = False
        self.processes: dict[str, Process] = {}
        self.api: Api | None = None
        self.users = Users(self.loop, self.checks, self._serving, len(scenario.wishes))
        skews_ms = (0, 0, 400, -1500) if self.random.random() < 0.7 else (0, 60_000, -60_000)
        self.skews_ms: dict[str, int] = {}
        for name in ("api", *(f"c{number + 1}" for number in range(scenario.coordinators)), *self.machines):
            self.skews_ms[name] = self.random.choice(skews_ms)
        steps = any(fault.kind == "clock_step" for fault in scenario.faults)
        self.checks.clocks_agree = not steps and all(abs(ms) < 2_000 for ms in self.skews_ms.values())
        for name, machine in self.machines.items():
            machine.skew_ms = self.skews_ms[name]
        self._incarnations: Counter[str] = Counter()

    # --- what happens to a call ------------------------------------------------------------------------------------

    def of_write(self, process: Process, writes: Sequence[Write]) -> str:
        kinds = ("crash_before", "crash_after", "lost", "late", "dropped", "dropped_slowly")
        fate = self._drawn(kinds)
        if fate.startswith("crash"):
            self._restart_later(process.name, self.random.uniform(0.05, 4.0))
        return fate

    def of_read(self, process: Process) -> str:
        return self._drawn(("dropped", "dropped_slowly"))

    def of_call(self, machine: Machine, what: str) -> str:
        if what == "step":
            return self._drawn(("step",))
        return self._drawn(("runner_no_effect", "runner_no_answer", "runner_hangs")).removeprefix("runner_")

    def of_nomad(self) -> str:
        kinds = ("nomad_no_effect", "nomad_no_answer", "nomad_hangs", "nomad_late")
        return self._drawn(kinds).removeprefix("nomad_")

    def of_nomad_event(self) -> str:
        return self._drawn(("nomad_event_late", "nomad_event_again")).removeprefix("nomad_event_")

    def slices_of(self, key: TaskKey) -> tuple[Slice, ...]:
        allocation = self.checks.allocations[key.job, key.attempt]
        return next(placed.slices for placed in allocation.tasks if placed.task == key.task)

    def _drawn(self, kinds: Sequence[str]) -> str:
        odds, drawn = self.scenario.odds, self.random.random()
        if self.calm:
            return ""
        for kind in kinds:
            drawn -= odds.get(kind, 0.0)
            if drawn < 0:
                self.faults[kind] += 1
                return kind
        return ""

    # --- processes -------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        old = self.processes.get(name)
        if old is not None and old.life is not Life.DEAD:
            return
        forget_dead(self.server)
        self._incarnations[name] += 1
        process = Process(self.loop, name, lambda: self.skews_ms[name])
        self.processes[name] = process
        store = controlled(Client(self.server, process, self), name, self.control)
        if name.startswith("c"):
            identity = f"{name}-{self._incarnations[name]}"
            self.checks.coordinators[process] = identity
            work = coordinate(
                process, store, self.scenario.settings, identity, self._engine_maker(process, store)
            )
        elif name == "api":
            self.api = Api(
                process, store, self.scenario.settings, Random(f"{self.scenario.seed}/{self._incarnations}")
            )
            work = self.api.serve()
        else:
            machine = self.machines[name]
            if not machine.is_up:
                process.kill()
                return
            work = run_agent(process, store, self.scenario.settings, machine, self)
        self.checks.tell(f"{name} starts")
        task = process.run(work)
        task.add_done_callback(lambda task: self._ended(process, task))

    def _engine_maker(self, process: Process, store: Client) -> Callable[[Replica], Engine]:
        if self.scenario.engine == "nomad":
            return lambda replica: nomad_engine(self.nomad, process, replica, self.scenario.settings)

        async def endpoint(node: str) -> Endpoint | None:
            return None

        return lambda replica: AgentEngine(endpoint)

    def _ended(self, process: Process, task: asyncio.Task[None]) -> None:
        if (
            process.life is Life.DEAD
            or process.is_stopping
            or (process.name == "api" and not task.exception())
        ):
            return
        error = None if task.cancelled() else task.exception()
        self.checks.fail(Violation(f"{process.name} ended by itself: {error!r}"))

    def kill(self, name: str, seconds: float) -> None:
        process = self.processes[name]
        if process.life is not Life.DEAD:
            self.checks.tell(f"{name} is killed")
            process.kill()
        self._restart_later(name, seconds)

    def _restart_later(self, name: str, seconds: float) -> None:
        if name in self.processes:
            self.loop.later(seconds, self.start, name)

    def _serving(self) -> tuple[Api, Process] | None:
        """The API, where it answers."""
        process = self.processes.get("api")
        if self.api is None or process is None or process.life is Life.DEAD or process.is_cut:
            return None
        return self.api, process

    def leader(self) -> str:
        """The name of the process that holds the key, or of the first coordinator."""
        holder = self.checks._holder
        return holder.split("-")[0] if holder else "c1"

    # --- a seed ----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        try:
            with _errors_told(self.checks):
                self.loop.run_until_complete(self._live())
        except AssertionError as violation:
            self.checks.fail(violation)
        except RuntimeError:
            if self.checks.failure is None:  # it was not stopped by a violation
                raise
        for error in self.loop.errors:
            if self.checks.failure is None:
                self.checks.fail(Violation(f"an error that nobody took: {error}"))
        failure = self.checks.failure
        return Result(
            self.scenario.seed,
            str(failure) if failure is not None else "",
            self.loop.steps,
            dict(self.faults),
            len(self.checks.jobs),
            self.loop.time(),
            tuple(self.checks.story),
        )

    async def _live(self) -> None:
        scenario, loop = self.scenario, self.loop
        tenants = [Tenant(name, quota_memory_mib=40 * 1024) for name in ("team-a", "team-b", "team-c")]
        self.server.execute(None, b"", (), [Put(tenant_key(t.name), encode(t)) for t in tenants])
        for number in range(scenario.coordinators):
            loop.later(self.random.uniform(0, 0.3), self.start, f"c{number + 1}")
        for name in (*self.machines, "api"):
            loop.later(self.random.uniform(0, 0.3), self.start, name)
        for wish in scenario.wishes:
            loop.later(wish.at, self.users.wants, wish)
        for fault in scenario.faults:
            loop.later(fault.at, strike, self, fault)
        await asyncio.sleep(FAULTS_UNTIL_SECONDS)
        self._heal()
        await self._settle()

    async def _settle(self) -> None:
        ends_at = self.loop.time() + SETTLED_WITHIN_SECONDS
        while True:
            await asyncio.sleep(1.0)
            left = self.checks.unsettled(self.server)
            if not left and not self.users.open:
                self.checks.settled()
                return
            if self.loop.time() > ends_at:
                text = "; ".join(left[:6]) or "a user got no answer"
                raise Violation(f"not settled {SETTLED_WITHIN_SECONDS:g} s after the last fault: {text}")

    def _heal(self) -> None:
        """No more faults: what is down comes up, and users end what would run for ever."""
        self.calm = True
        self.checks.tell("the faults end")
        server = self.server
        server.is_down = server.is_full = False
        server.slow_seconds = 0.0
        for watch in server.watches:
            watch.mend()
        for machine in self.machines.values():
            machine.engine_is_down = False
            machine.power_on()
            machine.source.set_not_ready(None)
            for uuid in list(machine.lost_gpus):
                machine.restore_gpu(uuid)
            server.execute(None, b"", (), [Put(admin_key(machine.name), encode(NodeAdmin(machine.name)))])
        for name, process in list(self.processes.items()):
            process.is_cut = False
            process.resume()
            self.start(name)
        self.nomad.heal()


class _Told(logging.Handler):
    """Serai logs an error where it goes on after a fault of its own, and no fault of the world is one."""

    def __init__(self, checks: Checks) -> None:
        super().__init__(logging.ERROR)
        self._checks = checks

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._checks.fail(Violation(f"an error was logged: {record.getMessage()} {error!r}"))


@contextmanager
def _errors_told(checks: Checks) -> Iterator[None]:
    log, told, disabled = logging.getLogger("serai"), _Told(checks), logging.root.manager.disable
    log.addHandler(told)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
        log.removeHandler(told)


def play(scenario: Scenario, control: Control | None = None) -> Result:
    """One seed from its beginning to its end; nothing of it is left."""
    was_enabled = gc.isenabled()
    gc.disable()
    hook = sys.unraisablehook
    try:
        world = World(scenario, control)
        result = world.run()
    finally:
        # Where a `finally` wants a loop it must not get a fresh one, which would keep it.
        asyncio.set_event_loop(None)
        # Coroutines of killed processes run their `finally` when they are thrown away: nobody is there any more.
        sys.unraisablehook = lambda raised: None
        try:
            del world
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gc.collect()
        finally:
            sys.unraisablehook = hook
            if was_enabled:
                gc.enable()
    return result


def timed(scenario: Scenario, control: Control | None = None) -> tuple[Result, float]:
    began = time.perf_counter()
    return play(scenario, control), time.perf_counter() - began
