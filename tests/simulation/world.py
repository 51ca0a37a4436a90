"""One seed: the world it makes, the faults that strike it, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from attrs import frozen

from coordinator.engines import Engine
from coordinator.engines.agent import AgentEngine
from coordinator.model import NodeAdmin, Tenant
from coordinator.records import LEADER, Endpoint, admin_key, encode, tenant_key
from coordinator.replica import Replica
from coordinator.store import Delete, Put, StoreUnavailable, StoreUncertain, Write
from nodeagent.gpu_source import GpusNotReady, WhyNotReady
from nodeagent.runner import TaskKey
from tests.simulation.checks import Checks, Violation
from tests.simulation.controls import Control, controlled
from tests.simulation.loop import Life, Process, VirtualLoop
from tests.simulation.machine import Machine
from tests.simulation.nomad import NomadServer, nomad_engine
from tests.simulation.parts import Api, coordinate, run_agent
from tests.simulation.scenario import FAULTS_UNTIL_SECONDS, Fault, Scenario, Wish
from tests.simulation.store import Client, Server, cut_watches, forget_dead
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
        self.submitted: dict[str, str] = {}  # job -> tenant
        self.open_wishes = len(scenario.wishes)
        skews_ms = (0, 0, 400, -1500) if self.random.random() < 0.7 else (0, 300_000, -300_000)
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

    def leader(self) -> str:
        """The name of the process that holds the key, or of the first coordinator."""
        holder = self.checks._holder
        return holder.split("-")[0] if holder else "c1"

    # --- a seed ----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        logging.disable(logging.CRITICAL)
        try:
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
            loop.later(wish.at, self._wish, wish)
        for fault in scenario.faults:
            loop.later(fault.at, self._strike, fault)
        await asyncio.sleep(FAULTS_UNTIL_SECONDS)
        self._heal()
        await self._settle()

    async def _settle(self) -> None:
        ends_at = self.loop.time() + SETTLED_WITHIN_SECONDS
        while True:
            await asyncio.sleep(1.0)
            left = self.checks.unsettled(self.server)
            if not left and not self.open_wishes:
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

    # --- users -----------------------------------------------------------------------------------------------------

    def _wish(self, wish: Wish) -> None:
        key = f"key-{wish.at}" if wish.has_key else ""
        self._submit(wish, key, 0)

    def _submit(self, wish: Wish, key: str, tries: int) -> None:
        """A user sends it; with an idempotency key he sends it again until he knows."""
        state = {"is_open": True}

        def again() -> None:
            if not state["is_open"]:
                return
            state["is_open"] = False
            if key:
                self._submit(wish, key, tries + 1)
            else:
                self.open_wishes -= 1

        api, process = self.api, self.processes.get("api")
        if api is None or process is None or process.life is Life.DEAD or process.is_cut:
            self.loop.later(1.0, again)
            return
        sent: list[str] = []

        async def request() -> None:
            try:
                id = await api.submit(wish.spec, key, sent.append)
            except StoreUncertain:
                self.loop.later(1.0, again)
            except StoreUnavailable:
                self.loop.later(0.001, refused)
                self.loop.later(1.0, again)
            else:
                self.loop.later(0.001, acknowledged, id)

        def refused() -> None:
            self.checks.never.update(sent)
            for id in sent:
                if id in self.checks.jobs:
                    self.checks.fail(Violation(f"{id} was refused for certain and is there"))

        def acknowledged(id: str) -> None:
            if not state["is_open"]:
                return
            state["is_open"] = False
            self.open_wishes -= 1
            self.checks.acknowledged.setdefault(id, "submit")
            self.checks.tell(f"{id} is acknowledged")
            if wish.cancel_after is not None:
                self.open_wishes += 1
                self.loop.later(wish.cancel_after, self._cancel, wish.spec.tenant, id)

        process.spawn(request())
        self.loop.later(90.0, again)  # a server that died with it answers nothing

    def _cancel(self, tenant: str, id: str) -> None:
        state = {"is_open": True}

        def again() -> None:
            if state["is_open"]:
                state["is_open"] = False
                self._cancel(tenant, id)

        api, process = self.api, self.processes.get("api")
        if api is None or process is None or process.life is Life.DEAD:
            self.loop.later(1.0, again)
            return

        async def request() -> None:
            try:
                what = await api.cancel(tenant, id)
            except StoreUnavailable:
                self.loop.later(1.0, again)
            else:
                self.loop.later(0.001, done, what)

        def done(what: str) -> None:
            if not state["is_open"]:
                return
            state["is_open"] = False
            self.open_wishes -= 1
            self.checks.tell(f"the cancel of {id} is acknowledged: {what or 'it has ended'}")
            if what:
                self.checks.acknowledged[id] = what

        process.spawn(request())
        self.loop.later(30.0, again)

    # --- faults ----------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        if self.calm or self.checks.failure is not None:
            return
        self.faults[fault.kind] += 1
        self.checks.tell(
            f"FAULT {fault.kind} seconds={fault.seconds} target={fault.target} value={fault.value}"
        )
        getattr(self, f"_{fault.kind}")(fault)

    def _of(self, names: Sequence[str], fault: Fault) -> str:
        return names[fault.target % len(names)]

    def _coordinator(self, fault: Fault) -> str:
        return f"c{fault.target % self.scenario.coordinators + 1}"

    def _node(self, fault: Fault) -> Machine:
        return self.machines[self._of(sorted(self.machines), fault)]

    def _pause(self, name: str, seconds: float) -> None:
        process = self.processes[name]
        process.pause()
        self.loop.later(seconds, process.resume)

    def _cut(self, name: str, seconds: float) -> None:
        process = self.processes[name]
        process.is_cut = True
        cut_watches(self.server, process, seconds)

        def mend() -> None:
            process.is_cut = False

        self.loop.later(seconds, mend)

    def _coordinator_crash(self, fault: Fault) -> None:
        self.kill(self._coordinator(fault), fault.seconds)

    def _coordinator_pause(self, fault: Fault) -> None:
        self._pause(self._coordinator(fault), fault.seconds)

    def _coordinator_cut(self, fault: Fault) -> None:
        self._cut(self._coordinator(fault), fault.seconds)

    def _leader_crash(self, fault: Fault) -> None:
        self.kill(self.leader(), fault.seconds)

    def _leader_pause(self, fault: Fault) -> None:
        self._pause(self.leader(), fault.seconds)

    def _leader_lease_revoked(self, fault: Fault) -> None:
        for item in self.server.items(LEADER):
            self.server.drop_lease(item.lease)

    def _leader_key_deleted(self, fault: Fault) -> None:
        self.server.execute(None, b"", (), [Delete(LEADER)])

    def _leader_resigns(self, fault: Fault) -> None:
        """As in a planned stop; the process ends when it has handed over."""
        name = self.leader()
        self.processes[name].terminate()
        self.loop.later(1.5, self.kill, name, fault.seconds)

    def _api_crash(self, fault: Fault) -> None:
        self.kill("api", fault.seconds)

    def _agent_crash(self, fault: Fault) -> None:
        self.kill(self._node(fault).name, fault.seconds)

    def _agent_crash_wiped(self, fault: Fault) -> None:
        """What it keeps on disk is gone; its containers are not."""
        self.kill(self._node(fault).name, fault.seconds)
        self._node(fault).daemons.clear()

    def _agent_pause(self, fault: Fault) -> None:
        self._pause(self._node(fault).name, fault.seconds)

    def _agent_cut(self, fault: Fault) -> None:
        self._cut(self._node(fault).name, fault.seconds)
        if self.scenario.engine == "nomad":
            self.nomad.cut(self._node(fault).name, fault.seconds)

    def _machine_off(self, fault: Fault, wiped: bool = False) -> None:
        machine = self._node(fault)
        machine.power_off(wiped)
        self.processes[machine.name].kill()

        def on() -> None:
            machine.power_on()
            self.start(machine.name)

        self.loop.later(fault.seconds, on)

    def _machine_wiped(self, fault: Fault) -> None:
        self._machine_off(fault, wiped=True)

    def _gpu_lost(self, fault: Fault) -> None:
        machine = self._node(fault)
        uuid = self._of(sorted(machine.gpus), fault)
        machine.lose_gpu(uuid)
        self.loop.later(fault.seconds, machine.restore_gpu, uuid)

    def _gpus_unreadable(self, fault: Fault) -> None:
        machine = self._node(fault)
        machine.source.set_not_ready(GpusNotReady(WhyNotReady.DRIVER_NOT_LOADED, "by the simulation"))
        self.loop.later(fault.seconds, lambda: machine.source.set_not_ready(None))

    def _runner_down(self, fault: Fault) -> None:
        machine = self._node(fault)
        machine.engine_is_down = True

        def up() -> None:
            machine.engine_is_down = False

        self.loop.later(fault.seconds, up)

    def _store(self, name: str, value: object, calm: object, seconds: float) -> None:
        setattr(self.server, name, value)
        self.loop.later(seconds, setattr, self.server, name, calm)

    def _store_full(self, fault: Fault) -> None:
        self._store("is_full", True, False, fault.seconds)

    def _store_down(self, fault: Fault) -> None:
        self._store("is_down", True, False, fault.seconds)
        cut_watches(self.server, None, fault.seconds)

    def _store_slow(self, fault: Fault) -> None:
        self._store("slow_seconds", 0.1 + abs(fault.value % 25) / 10, 0.0, fault.seconds)

    def _compaction(self, fault: Fault) -> None:
        self.server.compact_to(self.server.revision - fault.target % 3)

    def _watch_cut(self, fault: Fault) -> None:
        cut_watches(self.server, self.processes[self._of(sorted(self.processes), fault)], fault.seconds)

    def _clock_step(self, fault: Fault) -> None:
        name = self._of(sorted(self.skews_ms), fault)
        self.skews_ms[name] += fault.value
        if name in self.machines:
            self.machines[name].skew_ms = self.skews_ms[name]

    def _cordon(self, fault: Fault) -> None:
        name = self._node(fault).name
        put = Put(admin_key(name), encode(NodeAdmin(name, cordoned=True)))
        self.server.execute(None, b"", (), [put])
        calm = Put(admin_key(name), encode(NodeAdmin(name)))
        self.loop.later(fault.seconds, self.server.execute, None, b"", (), [calm])

    def _nomad_down(self, fault: Fault) -> None:
        self.nomad.is_down = True
        self.loop.later(fault.seconds, setattr, self.nomad, "is_down", False)

    def _nomad_events_lost(self, fault: Fault) -> None:
        self.nomad.loses_events = True
        self.loop.later(fault.seconds, setattr, self.nomad, "loses_events", False)


def play(scenario: Scenario, control: Control | None = None) -> Result:
    """One seed from its beginning to its end; nothing of it is left."""
    was_enabled = gc.isenabled()
    gc.disable()
    hook = sys.unraisablehook
    try:
        world = World(scenario, control)
        result = world.run()
    finally:
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
