"""One engine against one Nomad, the fake or a real one, and the store that stands behind the engine's sink."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, evolve, field
from msgspec.structs import replace

from coordinator.config import Settings
from coordinator.engines.nomad import NomadEngine, NomadSettings
from coordinator.model import Allocation, Job, JobState, Task, TaskPlacement, TaskState
from jobspecs.container import ContainerSettings, Grant
from jobspecs.nomad_job import nomad_job_id
from jobspecs.spec import JobSpec, TaskSpec
from tests.fakenomad import Container, FakeNomad, NomadServer
from vgpu.isolation.settings import Device, GpuSettings
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import Slice

IMAGE = "serai-test:1"
PATIENCE_SECONDS = 30.0


def sh(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


@define
class Records:
    """The store: live jobs and the task records that the sink wrote, as `Scheduler.observed` writes them: an end that
    is confirmed is never overwritten."""

    live_jobs: dict[str, Job] = field(factory=dict)
    waiting_jobs: dict[str, Job] = field(factory=dict)
    tasks: dict[str, Task] = field(factory=dict)
    history: list[Task] = field(factory=list)
    changed: asyncio.Event = field(factory=asyncio.Event)
    refuse: Exception | None = None

    async def observed(self, task: Task) -> None:
        if self.refuse is not None:
            raise self.refuse
        before = self.tasks.get(task.attempt_key)
        if before == task or (before is not None and before.released):
            return
        self.tasks[task.attempt_key] = task
        self.history.append(task)
        self.changed.set()

    def tasks_of(self, job: str, attempt: int) -> Mapping[int, Task]:
        return {task.task: task for task in self.tasks.values() if (task.job, task.attempt) == (job, attempt)}

    def story(self, key: str) -> list[str]:
        """The states that a task went through, without repetitions."""
        states: list[str] = []
        for task in self.history:
            if task.attempt_key == key and states[-1:] != [task.state.value]:
                states.append(task.state.value)
        return states


@define
class World:
    """`nodes` maps Serai's node names to Nomad's ids. `nomad` and `server` are None with a real Nomad."""

    settings: NomadSettings
    nodes: dict[str, str]
    nomad: FakeNomad | None = None
    server: NomadServer | None = None
    records: Records = field(factory=Records)
    now_ms: int = 1_795_977_461_000
    log_retention_seconds: int = 3600
    _engines: list[NomadEngine] = field(factory=list)
    _observing: list[asyncio.Task[None]] = field(factory=list)
    _count: int = 0

    @property
    def fake(self) -> FakeNomad:
        assert self.nomad is not None
        return self.nomad

    @property
    def web(self) -> NomadServer:
        assert self.server is not None
        return self.server

    # --- engines ------------------------------------------------------------------------------------------------------

    def engine(self, **changes: Any) -> NomadEngine:
        """Another coordinator's engine on the same Nomad and the same store."""
        engine = NomadEngine(
            evolve(self.settings, **changes),
            Settings(engine="nomad", log_retention_seconds=self.log_retention_seconds),
            self.nodes.get,
            lambda: self.now_ms,
            lambda: self.records,
        )
        self._engines.append(engine)
        return engine

    def observe(self, engine: NomadEngine) -> asyncio.Task[None]:
        task = asyncio.create_task(engine.observe(self.records.observed))
        self._observing.append(task)
        return task

    async def close(self) -> None:
        for task in self._observing:
            task.cancel()
        await asyncio.gather(*self._observing, return_exceptions=True)
        for engine in self._engines:
            await engine.close()

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def job(
        self,
        *commands: tuple[str, ...],
        nodes: tuple[str, ...] = (),
        image: str = IMAGE,
        attempt: int = 1,
        gpu: str = "",
    ) -> Job:
        """A live job with one task for each command; on the first node unless told, and each on the GPU."""
        self._count += 1
        slices = (Slice(gpu, 16_384, 1000, "exclusive"),) if gpu else ()
        where = nodes or (next(iter(self.nodes)),) * len(commands)
        job = Job(
            id=f"01jd3x8k{self._count:08d}",
            spec=JobSpec(
                name=f"train {self._count}",
                tenant="team-a",
                tasks=tuple(TaskSpec(image=image, command=command, memory_mib=64) for command in commands),
                stop_grace_seconds=1,
            ),
            state=JobState.ALLOCATED,
            submitted_at_ms=self.now_ms,
            queued_at_ms=self.now_ms,
            attempt=attempt,
            allocation=Allocation(
                attempt,
                tuple(TaskPlacement(n, node, slices, 100, 64) for n, node in enumerate(where)),
                self.now_ms,
            ),
        )
        self.records.live_jobs[job.id] = job
        return job

    def next_attempt(self, job: Job) -> Job:
        assert job.allocation is not None
        job = replace(
            job, attempt=job.attempt + 1, allocation=replace(job.allocation, attempt=job.attempt + 1)
        )
        self.records.live_jobs[job.id] = job
        return job

    def ask_stop(self, job: Job) -> Job:
        """The leader has written that this attempt is to stop."""
        job = replace(job, state=JobState.CANCELLING, stop=Reason(ReasonCode.CANCELLED_BY_USER))
        self.records.live_jobs[job.id] = job
        return job

    def grants(
        self, job: Job, *, memory_mib: int = 64, env: Mapping[str, str] | None = None, device: str = ""
    ) -> list[Grant]:
        assert job.allocation is not None
        by_node: dict[str, list[ContainerSettings]] = {}
        for placed in job.allocation.tasks:
            spec = job.spec.task(placed.task)
            devices = (Device(device, "/dev/nvidia0"),) if device else ()
            seen = {
                "NVIDIA_VISIBLE_DEVICES": ",".join(piece.gpu for piece in placed.slices),
                "SERAI_GPU_MEMORY_MIB": ",".join(str(piece.memory_mib) for piece in placed.slices),
            }
            container = ContainerSettings(
                task=placed.task,
                image=spec.image,
                command=spec.command,
                env={**(env or {}), **(seen if placed.slices else {}), "SERAI_NODE": placed.node},
                gpu=GpuSettings(devices=devices),
                cpu_milli=100,
                memory_mib=memory_mib,
                shm_mib=16,
                stop_grace_seconds=1,
                labels={"serai.job": job.id, "serai.attempt": str(job.attempt)},
                slices=placed.slices,
            )
            by_node.setdefault(placed.node, []).append(container)
        return [
            Grant(node, job.id, job.attempt, job.tenant, tuple(containers), self.now_ms, engine="nomad")
            for node, containers in sorted(by_node.items())
        ]

    async def launch(self, engine: NomadEngine, job: Job, **given: Any) -> None:
        await engine.launch(job, self.grants(job, **given))

    async def stop(self, engine: NomadEngine, job: Job) -> None:
        self.ask_stop(job)
        await engine.stop(job.id, job.attempt, job.tenant)

    def nomad_id(self, job: Job) -> str:
        return nomad_job_id(job.tenant, job.spec.name, job.id, job.attempt)

    def nomad_job(self, job: Job) -> dict[str, Any]:
        body: dict[str, Any] = self.fake.jobs["default", self.nomad_id(job)]
        return body

    def containers(self, job: Job) -> list[Container]:
        return self.fake.clients.of_job(self.nomad_id(job))

    # --- waiting ------------------------------------------------------------------------------------------------------

    def task(self, job: Job, number: int = 0) -> Task | None:
        return self.records.tasks.get(f"{job.id}.{job.attempt}.{number}")

    async def until(self, check: Callable[[], Any]) -> None:
        """Until the condition holds: looked at again whenever the store or the fake has changed."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not check():
                    self.records.changed.clear()
                    waiting = [asyncio.ensure_future(self.records.changed.wait())]
                    if self.nomad is not None:
                        waiting.append(asyncio.ensure_future(self.nomad.changed()))
                    # The server's own state (its requests) changes without either.
                    await asyncio.wait(waiting, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                    for one in waiting:
                        one.cancel()
        except TimeoutError:
            raise AssertionError(f"did not come true; tasks: {list(self.records.tasks.values())}") from None

    async def until_state(self, job: Job, state: TaskState, number: int = 0) -> Task:
        await self.until(lambda: (task := self.task(job, number)) is not None and task.state is state)
        task = self.task(job, number)
        assert task is not None
        return task

    async def until_released(self, job: Job, number: int = 0) -> Task:
        await self.until(lambda: (task := self.task(job, number)) is not None and task.released)
        task = self.task(job, number)
        assert task is not None
        return task

    async def listed(self, times: int = 1) -> None:
        """Until the observer has read its lists so many times more."""
        before = self.lists()
        await self.until(lambda: self.lists() >= before + times)

    def looks(self, job: Job) -> int:
        """How often the allocations of the job were read, which is the last step of a look."""
        return sum(f"/v1/job/{self.nomad_id(job)}/allocations" in path for _, path in self.web.requests)

    def lists(self) -> int:
        return sum(method == "GET" and path.startswith("/v1/jobs") for method, path in self.web.requests)


@contextlib.asynccontextmanager
async def fake_world() -> Any:
    nomad = FakeNomad()
    nodes = {"n1": nomad.add_node("gpu-node-1").id, "n2": nomad.add_node("gpu-node-2").id}
    server = NomadServer(nomad, heartbeat_seconds=0.5)
    await server.start()
    world = World(
        NomadSettings(
            address=server.address,
            request_seconds=5,
            evaluation_seconds=0.2,
            relist_seconds=60,
            poll_seconds=0.05,
            longest_back_off_seconds=0.1,
            missing_grace_seconds=10,
            log_retry_seconds=0.02,
        ),
        nodes,
        nomad,
        server,
    )
    try:
        yield world
    finally:
        await world.close()
        await server.stop()
