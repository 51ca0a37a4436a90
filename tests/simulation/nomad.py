"""A Nomad server with a client on each machine, as far as the real engine asks it, behind a network that fails as told.

The engine and its observer are the real ones; only `NomadApi` is replaced, below which there is HTTP. A client that is
cut off runs what it has on, and hears what is wanted when it is back (`MaxClientDisconnect`).
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from random import Random
from typing import Any, Protocol, TypeVar

from attrs import define, field
from msgspec.structs import replace

from coordinator.config import Settings
from coordinator.engines.nomad import NomadEngine, NomadSettings
from coordinator.engines.nomad_api import CONFLICT, NomadError, NomadUnreachable
from coordinator.engines.nomad_records import (
    AllocationSeen,
    EvaluationSeen,
    GroupSeen,
    JobSeen,
    NodeSeen,
    Registered,
    TaskEvent,
    TaskOfGroup,
    TaskStateSeen,
)
from coordinator.replica import Replica
from jobspecs.container import ContainerSettings
from jobspecs.nomad_job import META_ATTEMPT, META_JOB
from nodeagent.runner import Observed, TaskKey
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.machine import Box, Machine
from vgpu.isolation.settings import GpuSettings
from vgpu.slices import Slice

T = TypeVar("T")
REQUEST_SECONDS = 5.0
UNKNOWN_AFTER_SECONDS = 10.0
EVENTS_AGAIN = 100


class NomadFates(Protocol):
    def of_nomad(self) -> str:
        """ "" | no_effect | no_answer | hangs | late"""
        ...

    def of_nomad_event(self) -> str:
        """ "" | late | again"""
        ...

    def slices_of(self, key: TaskKey) -> tuple[Slice, ...]:
        """What was granted to it, ever."""
        ...


@define(eq=False)
class Copy:
    """An allocation: as the server knows it (`seen`), and the container on the machine. `is_wanted` is the server's
    wish; a client that is cut off has not heard that it is over (`is_told_to_end`)."""

    id: str
    job_id: str
    group: str
    machine: Machine
    key: TaskKey
    container: ContainerSettings
    index: int
    seen: AllocationSeen
    box: Box | None = None
    is_wanted: bool = True
    is_told_to_end: bool = False
    boot: int | None = None  # of the machine when its client took it
    failure: str = ""
    was_killed: bool = False
    is_over: bool = False


@define
class Registration:
    payload: Mapping[str, Any]
    stop: bool = False
    copies: list[Copy] = field(factory=list)

    def shown(self) -> JobSeen:
        over = self.copies and all(copy.seen.is_ended for copy in self.copies)
        groups = tuple(
            GroupSeen(group["Name"], (TaskOfGroup(dict(group["Tasks"][0]["Env"])),))
            for group in self.payload["TaskGroups"]
        )
        status = "dead" if over or (self.stop and not self.copies) else "running"
        return JobSeen(
            self.payload["ID"], self.payload["Name"], self.stop, status, 0, dict(self.payload["Meta"]), groups
        )


class NomadServer:
    """`is_idempotent` off is the control: a register of what is there makes another one."""

    def __init__(
        self, loop: VirtualLoop, random: Random, machines: Mapping[str, Machine], fates: NomadFates
    ) -> None:
        self.loop = loop
        self.random = random
        self.machines = machines
        self.fates = fates
        self.is_down = False
        self.loses_events = False
        self.is_idempotent = True
        self.registrations: dict[str, Registration] = {}
        self.copies: list[Copy] = []
        self.index = 1
        self.cut_since: dict[str, float] = {}
        self.cut_until: dict[str, float] = {}
        self.listeners: list[asyncio.Queue[frozenset[str]]] = []
        self.past: list[str] = []  # events that a server which was started again tells once more
        self.starts = 0
        self.changed: list[asyncio.Event] = []

    # --- what the API does -----------------------------------------------------------------------------------------

    def register(self, payload: Mapping[str, Any]) -> Registered:
        id = payload["ID"]
        known = self.registrations.get(id)
        if known is not None and self.is_idempotent:
            raise NomadError(500, f"{CONFLICT}: job already exists")
        registration = known or Registration(payload)
        self.registrations[id] = registration
        self.loop.later(self.random.uniform(0.005, 0.1), self._place, registration)
        return Registered("evaluation")

    def deregister(self, id: str, purge: bool) -> Registered:
        registration = self.registrations.get(id)
        if registration is None:
            raise NomadError(404, "job not found")
        registration.stop = True
        for copy in registration.copies:
            copy.is_wanted = False
            self.loop.later(self.random.uniform(0.005, 0.05), self._tell_client, copy)
        if purge:
            del self.registrations[id]
        self.announce(id)
        return Registered("evaluation")

    def node_is_ready(self, name: str) -> bool:
        machine = self.machines[name]
        since = self.cut_since.get(name)
        away = since is not None and self.loop.time() - since >= UNKNOWN_AFTER_SECONDS
        return machine.is_up and not away

    def announce(self, job_id: str) -> None:
        self.index += 1
        for event in self.changed:
            event.set()
        self.past.append(job_id)
        for queue in self.listeners:
            fate = self.fates.of_nomad_event()
            if fate:
                self.loop.later(self.random.uniform(0.0, 5.0), self._tell_listener, queue, job_id)
            if fate != "late":
                self._tell_listener(queue, job_id)

    def _tell_listener(self, queue: asyncio.Queue[frozenset[str]], job_id: str) -> None:
        if not self.loses_events:
            queue.put_nowait(frozenset({job_id}))

    def shown(self, copy: Copy) -> AllocationSeen:
        registration = self.registrations.get(copy.job_id)
        is_wanted = registration is not None and not registration.stop and copy in registration.copies
        return copy.seen if is_wanted else replace(copy.seen, desired_status="stop")

    def restart(self) -> None:
        """Streams break, and whoever listens anew hears old events again."""
        self.starts += 1
        for queue in self.listeners:
            queue.put_nowait(frozenset())

    # --- placing, and the clients ----------------------------------------------------------------------------------

    def _place(self, registration: Registration) -> None:
        payload = registration.payload
        if registration.stop:
            return
        for group in payload["TaskGroups"]:
            task = group["Tasks"][0]
            number = int(group["Name"].rpartition("-")[2])
            key = TaskKey(payload["Meta"][META_JOB], int(payload["Meta"][META_ATTEMPT]), number)
            machine = self.machines[group["Constraints"][0]["RTarget"].removeprefix("nomad-")]
            words = (task["Config"].get("command", ""), *task["Config"].get("args", ()))
            grace = task["KillTimeout"] // 1_000_000_000
            container = ContainerSettings(
                number, "", words, {}, GpuSettings(), 0, 0, 0, grace, {}, self.fates.slices_of(key)
            )
            self.index += 1
            id = f"alloc-{self.index}"
            seen = AllocationSeen(
                id, payload["ID"], f"nomad-{machine.name}", group["Name"], create_index=self.index
            )
            copy = Copy(id, payload["ID"], group["Name"], machine, key, container, self.index, seen)
            registration.copies.append(copy)
            self.copies.append(copy)
            self.loop.later(self.random.uniform(0.01, 0.1), self._tell_client, copy)
        self.announce(payload["ID"])

    def _is_reached(self, machine: Machine) -> bool:
        return machine.is_up and machine.name not in self.cut_since

    def _tell_client(self, copy: Copy) -> None:
        """The client hears what is wanted of it, when it can."""
        if not self._is_reached(copy.machine):
            return
        if copy.is_wanted and copy.boot is None:
            copy.boot = copy.machine.boots
            words = dict(word.split("=") for word in copy.container.command[1:])
            launch = words.get("launch", "ok")
            seconds = 6.0 if launch == "slow" else self.random.uniform(0.05, 0.4)
            seconds += int(words.get("pull_ms", 0)) / 1000
            self.loop.later(seconds, self._run, copy, launch)
        elif not copy.is_wanted:
            copy.is_told_to_end = True
            if copy.box is not None and copy.box.state is Observed.RUNNING:
                copy.was_killed = True
                copy.machine.terminate(copy.box, copy.container.stop_grace_seconds)
            elif copy.box is None:
                copy.is_over = True
                self._push(copy)

    def _run(self, copy: Copy, launch: str) -> None:
        machine = copy.machine
        if copy.is_over or not machine.is_up or machine.boots != copy.boot:
            return
        if launch in ("image", "refused"):
            text = "manifest unknown" if launch == "image" else "the engine says no"
            copy.failure, copy.is_over = text, True
        elif copy.is_told_to_end:
            copy.is_over = True
        else:
            copy.box = machine.create(copy.key, copy.container, foreign=True)
            machine.start(copy.box)
        self._push(copy)

    def box_ended(self, box: Box) -> None:
        for copy in self.copies:
            if copy.box is box:
                self.loop.later(self.random.uniform(0.005, 0.1), self._push, copy)

    def _push(self, copy: Copy) -> None:
        """What the client knows goes to the server."""
        if not self._is_reached(copy.machine):
            return
        self.loop.later(self.random.uniform(0.001, 0.05), self._record, copy, _actual(copy))

    def _record(self, copy: Copy, state: tuple[str, TaskStateSeen]) -> None:
        if copy.seen.is_ended or not self._is_reached(copy.machine):
            return
        status, task = state
        copy.seen = AllocationSeen(
            copy.id,
            copy.job_id,
            f"nomad-{copy.machine.name}",
            copy.group,
            status,
            create_index=copy.index,
            modify_time=self.loop.wall_ms() * 1_000_000,
            task_states={"main": task},
        )
        self.announce(copy.job_id)

    def cut(self, name: str, seconds: float) -> None:
        """The client of the machine is out of touch with the server, at least for so long."""
        self.cut_since.setdefault(name, self.loop.time())
        until = self.cut_until[name] = max(self.cut_until.get(name, 0.0), self.loop.time() + seconds)
        self.loop.later(UNKNOWN_AFTER_SECONDS, self._miss, name)
        self.loop.later(seconds, self._mend_if_over, name, until)

    def _miss(self, name: str) -> None:
        if self.node_is_ready(name):
            return
        for copy in self.copies:
            if copy.machine.name == name and not copy.seen.is_ended and copy.seen.client_status != "unknown":
                states = copy.seen.task_states
                copy.seen = AllocationSeen(
                    copy.id,
                    copy.job_id,
                    copy.seen.node_id,
                    copy.group,
                    "unknown",
                    create_index=copy.index,
                    modify_time=self.loop.wall_ms() * 1_000_000,
                    task_states=states,
                )
                self.announce(copy.job_id)

    def _mend_if_over(self, name: str, until: float) -> None:
        if self.cut_until.get(name, 0.0) <= until:
            self.mend(name)

    def mend(self, name: str) -> None:
        """The client is back: it says what there is, and hears what is wanted."""
        self.cut_since.pop(name, None)
        self.cut_until.pop(name, None)
        for copy in self.copies:
            if copy.machine.name == name and not copy.seen.is_ended:
                was_restarted = copy.boot is not None and copy.boot != copy.machine.boots
                if was_restarted and copy.box is None and not copy.failure:
                    copy.is_over = True
                self._push(copy)
                self.loop.later(0.1, self._tell_client, copy)

    def heal(self) -> None:
        self.is_down = self.loses_events = False
        for name in self.machines:
            self.mend(name)


def _actual(copy: Copy) -> tuple[str, TaskStateSeen]:
    box = copy.box
    if box is None:
        if copy.failure:
            event = TaskEvent("Driver Failure", details={"driver_error": copy.failure})
            return "failed", TaskStateSeen("dead", True, None, None, (event,))
        if copy.is_over:
            return "complete", TaskStateSeen("dead", False, None, None, (TaskEvent("Killing"),))
        return "pending", TaskStateSeen()
    started = _text(box.started_ms)
    if box.state is Observed.RUNNING:
        return "running", TaskStateSeen("running", False, started, None, (TaskEvent("Started"),))
    events = [TaskEvent("Started")]
    if copy.was_killed:
        events.append(TaskEvent("Killing"))
    if box.id in copy.machine.boxes:
        events.append(TaskEvent("Terminated", details={"exit_code": str(box.exit_code)}))
    status = "complete" if box.exit_code == 0 or copy.was_killed else "failed"
    return status, TaskStateSeen("dead", box.exit_code != 0, started, _text(box.ended_ms), tuple(events))


def _text(at_ms: int | None) -> str | None:
    if at_ms is None:
        return None
    moment = datetime.datetime.fromtimestamp(at_ms // 1000, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{at_ms % 1000:03d}Z"


class SimulatedNomadApi:
    """What `coordinator.engines.nomad_api.NomadApi` is to the engine, for one coordinator."""

    def __init__(self, settings: NomadSettings, server: NomadServer) -> None:
        self.settings = settings
        self._server = server

    async def register(self, job: Mapping[str, Any]) -> Registered:
        return await self._call(lambda: self._server.register(job))

    async def deregister(self, id: str, *, purge: bool = False) -> Registered:
        try:
            return await self._call(lambda: self._server.deregister(id, purge))
        except NomadError as error:
            if error.status == 404:
                return Registered()
            raise

    async def jobs(self, prefix: str = "") -> Sequence[JobSeen]:
        server = self._server
        return await self._call(
            lambda: tuple(
                r.shown() for id, r in sorted(server.registrations.items()) if id.startswith(prefix)
            )
        )

    async def job(self, id: str) -> JobSeen | None:
        def look() -> JobSeen | None:
            found = self._server.registrations.get(id)
            return found.shown() if found is not None else None

        return await self._call(look)

    async def job_allocations(self, id: str) -> Sequence[AllocationSeen]:
        server = self._server
        return await self._call(
            lambda: tuple(server.shown(copy) for copy in server.copies if copy.job_id == id)
        )

    async def job_evaluations(self, id: str) -> Sequence[EvaluationSeen]:
        def look() -> tuple[EvaluationSeen, ...]:
            found = self._server.registrations.get(id)
            waits = found is not None and not found.copies and not found.stop
            return (EvaluationSeen(f"e-{id}", id, "pending" if waits else "complete"),) if found else ()

        return await self._call(look)

    async def allocations(
        self, after: int = 0, wait_seconds: float = 0
    ) -> tuple[Sequence[AllocationSeen], int]:
        server = self._server
        if after and server.index <= after:
            changed = asyncio.Event()
            server.changed.append(changed)
            try:
                async with asyncio.timeout(wait_seconds):
                    await changed.wait()
            except TimeoutError:
                pass
            finally:
                server.changed.remove(changed)
        return await self._call(lambda: (tuple(map(server.shown, server.copies)), server.index))

    async def settled(self, evaluation: str) -> EvaluationSeen | None:
        await asyncio.sleep(0.2)
        return None

    async def nodes(self) -> Sequence[NodeSeen]:
        server = self._server
        return await self._call(
            lambda: tuple(
                NodeSeen(f"nomad-{name}", "ready" if server.node_is_ready(name) else "disconnected", "1.6.3")
                for name in sorted(server.machines)
            )
        )

    async def version(self) -> str:
        return await self._call(lambda: "1.6.3")

    async def events(self) -> AsyncGenerator[frozenset[str] | None, None]:
        server = self._server
        await self._call(lambda: None)
        queue: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        server.listeners.append(queue)
        starts = server.starts
        try:
            yield None
            for job_id in server.past[-EVENTS_AGAIN:] if starts else ():
                yield frozenset({job_id})
            while not server.is_down and server.starts == starts:
                try:
                    async with asyncio.timeout(10):
                        yield await queue.get()
                except TimeoutError:
                    yield frozenset()
            raise NomadUnreachable("the stream broke")
        finally:
            if queue in server.listeners:
                server.listeners.remove(queue)

    async def close(self) -> None:
        """Nothing is open."""

    async def _call(self, effect: Callable[[], T]) -> T:
        server, loop = self._server, self._server.loop
        fate = "no_effect" if server.is_down else server.fates.of_nomad()
        answer: asyncio.Future[T] = loop.create_future()

        def arrive() -> None:
            try:
                result = effect()
            except NomadError as error:
                if not fate and not answer.done():
                    loop.later(0.001, _set, answer, None, error)
                return
            if not fate:
                loop.later(server.random.uniform(0.001, 0.01), _set, answer, result, None)

        if fate == "no_effect":
            loop.later(0.002, _set, answer, None, NomadUnreachable("connection refused"))
        else:
            late = server.random.uniform(0.001, 0.01)
            if fate == "late":
                late = REQUEST_SECONDS + server.random.uniform(0.0, 4.0)
            if fate != "hangs":
                loop.later(late, arrive)
            loop.later(REQUEST_SECONDS, _set, answer, None, NomadUnreachable("no answer in time"))
        return await answer


def _set(answer: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def nomad_engine(server: NomadServer, process: Process, replica: Replica, settings: Settings) -> NomadEngine:
    nomad = NomadSettings(
        request_seconds=REQUEST_SECONDS,
        evaluation_seconds=1,
        relist_seconds=15,
        poll_seconds=2,
        longest_back_off_seconds=4,
        missing_grace_seconds=10,
    )

    def nomad_id(node: str) -> str | None:
        inventory = replica.cluster.inventory_of(node)
        return inventory.engine_node_id or None if inventory else None

    engine = NomadEngine(nomad, settings, nomad_id, process.clock_ms, lambda: replica.cluster)
    engine._api = SimulatedNomadApi(nomad, server)  # type: ignore[assignment]
    return engine
