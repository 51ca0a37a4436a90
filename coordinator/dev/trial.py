"""The trial itself: starts the parts, makes tenants and tokens, submits the example jobs, and watches them end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from attrs import evolve, field, frozen

from coordinator.cli.picture import Frame
from coordinator.cli.tokens import write_token
from coordinator.client import ApiError, Client, Unreachable
from coordinator.client.views import is_final
from coordinator.dev import scenario
from coordinator.dev.etcd import EtcdProgram
from coordinator.dev.leftovers import docker_socket, remove_containers
from coordinator.dev.outcome import Outcome
from coordinator.dev.parts import Part, PartFailed, ready_line, start, start_etcd
from coordinator.dev.scenario import TrialJob, TrialNode
from coordinator.dev.show import Show

if TYPE_CHECKING:
    from coordinator.client.views import JobView

T = TypeVar("T")

_READY_SECONDS = 45.0
_JOBS_SECONDS = 75.0
_STOP_JOBS_SECONDS = 15.0
_LOOK_SECONDS = 0.4
# What each trial node may give out beside its GPUs, whatever this machine has: the jobs hardly use any.
_NODE_CPU_MILLI = 16_000
_NODE_MEMORY_MIB = 64 * 1024


@frozen
class Options:
    """`nodes` get an agent each, all on this machine; `engine_ids` are Nomad's ids of them, by name."""

    folder: Path
    etcd: EtcdProgram
    engine: str = "agent"
    runner: str = "process"
    nodes: Sequence[TrialNode] = scenario.NODES
    engine_ids: dict[str, str] = field(factory=dict)
    nomad_address: str = ""


class Trial:
    """`start`, then `play`; `stop` in any case."""

    def __init__(self, options: Options, show: Show) -> None:
        self._options = options
        self._show = show
        self._parts: list[Part] = []
        self._admin: Client | None = None
        self._tenants: dict[str, Client] = {}
        self.cluster = f"trial-{secrets.token_hex(4)}"
        self.address = self.etcd_address = ""
        self.tokens: dict[str, str] = {}  # tenant ("" for the admin) -> token

    async def start(self) -> None:
        """All parts run, and the nodes are ready. Raises `PartFailed`."""
        logs = self._options.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        etcd, self.etcd_address = await start_etcd(self._options.etcd, self._options.folder, logs)
        self._parts.append(etcd)
        token = await write_token(
            self.etcd_address, tenant="", label="trial", at_ms=time.time_ns() // 1_000_000
        )
        self.tokens[""] = token
        settings = self._settings_file()
        nomad = ["--nomad", self._options.nomad_address] if self._options.nomad_address else []
        command = [sys.executable, "-m", "coordinator", "--role", "both", "--etcd", self.etcd_address]
        command += [
            "--listen",
            "127.0.0.1:0",
            "--engine",
            self._options.engine,
            *nomad,
            "--config",
            str(settings),
        ]
        coordinator = await start("coordinator", command, logs)
        self._parts.append(coordinator)
        for node in self._options.nodes:
            self._parts.append(await start(node.name, self._agent_command(node, settings), logs))
        ready = await self._alive(ready_line(coordinator, seconds=_READY_SECONDS))
        self.address = f"http://{ready['address']}" if "://" not in ready["address"] else ready["address"]
        self._admin = Client(self.address, token)
        await self._alive(self._wait_for_nodes(self._admin))
        await self._alive(self._make_tenants(self._admin))

    async def play(self, jobs: Sequence[TrialJob]) -> list[Outcome]:
        """Submits the jobs in their rounds, and stays until all have ended, or time is over."""
        return await self._alive(self._play(jobs))

    def last_log_lines(self) -> str:
        """The end of the coordinator's log, for when it answered with a fault of its own."""
        return "\n".join(part.last_lines(40) for part in self._parts if part.name == "coordinator")

    async def stay(self) -> None:
        """For ever, unless a part ends. Raises `PartFailed`."""
        await self._alive(asyncio.Event().wait())

    async def stop(self) -> None:
        """Ends what runs, then the parts, agents first. Never raises."""
        with contextlib.suppress(
            ApiError, Unreachable, TimeoutError
        ):  # the processes are ended below all the same
            async with asyncio.timeout(_STOP_JOBS_SECONDS):
                await self._stop_jobs()
        clients = [*self._tenants.values(), *([self._admin] if self._admin is not None else [])]
        await asyncio.gather(*(client.close() for client in clients))
        # Agents and coordinator need etcd to end in order, so it goes last.
        await asyncio.gather(*(part.stop() for part in self._parts[1:]))
        for part in self._parts[:1]:
            await part.stop()
        if self._options.runner == "docker":
            await remove_containers(self.cluster)

    async def _alive(self, work: Awaitable[T]) -> T:
        """Does `work` as long as every part is alive. Raises `PartFailed` as soon as one has ended."""
        task = asyncio.ensure_future(work)
        deaths = {asyncio.ensure_future(part.process.wait()): part for part in self._parts}
        try:
            await asyncio.wait([task, *deaths], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            part = next(part for death, part in deaths.items() if death.done())
            raise await part.failure()
        finally:
            for each in (task, *deaths):
                each.cancel()
            await asyncio.gather(task, *deaths, return_exceptions=True)

    def _settings_file(self) -> Path:
        """Settings with short periods, so that a trial shows quickly what a cluster shows in minutes."""
        path = self._options.folder / "settings.yaml"
        values = {
            "cluster": self.cluster,
            "engine": self._options.engine,
            "report_seconds": 1,
            "node_lease_seconds": 10,
        }
        path.write_text(yaml.safe_dump(values))
        return path

    def _agent_command(self, node: TrialNode, settings: Path) -> list[str]:
        command = [sys.executable, "-m", "nodeagent", "--node", node.name, "--etcd", self.etcd_address]
        command += [
            "--gpus",
            f"simulated:{node.gpus}",
            "--runner",
            self._options.runner,
            "--config",
            str(settings),
        ]
        command += ["--cpu-milli", str(_NODE_CPU_MILLI), "--memory-mib", str(_NODE_MEMORY_MIB)]
        command += ["--listen", "127.0.0.1:0"]
        command += ["--data-folder", str(self._options.folder / "agents" / node.name)]
        for name, value in node.labels.items():
            command += ["--label", f"{name}={value}"]
        socket = docker_socket()
        if self._options.runner == "docker" and socket:
            command += ["--docker-socket", socket]
        engine_id = self._options.engine_ids.get(node.name)
        return command + (["--engine-node-id", engine_id] if engine_id else [])

    async def _wait_for_nodes(self, admin: Client) -> None:
        wanted = {node.name for node in self._options.nodes}
        deadline = asyncio.get_running_loop().time() + _READY_SECONDS
        missing = wanted
        while asyncio.get_running_loop().time() < deadline:
            try:
                nodes, cluster = await asyncio.gather(admin.nodes(), admin.cluster())
            except ApiError as error:
                if error.status not in (401, 503):  # the replica has not read everything yet
                    raise
            else:
                missing = wanted - {node["name"] for node in nodes if node["status"] == "ready"}
                if not missing and cluster["leader"] is not None:
                    return
            await asyncio.sleep(0.1)
        raise PartFailed(f"not ready in {_READY_SECONDS:g} s: {', '.join(sorted(missing)) or 'no leader'}")

    async def _make_tenants(self, admin: Client) -> None:
        for tenant in scenario.TENANTS:
            await admin.create_tenant(tenant.name, quota_memory=tenant.quota_memory, weight=tenant.weight)
            made = await admin.create_token("tenant", tenant=tenant.name, label="trial")
            self.tokens[tenant.name] = made["token"]
            self._tenants[tenant.name] = Client(self.address, made["token"])
            self._show.note(f"tenant {tenant.name} with a quota of {tenant.quota_memory} of GPU memory")

    async def _play(self, jobs: Sequence[TrialJob]) -> list[Outcome]:
        admin = self._admin
        if admin is None:
            raise AssertionError("start comes first")
        outcomes: dict[str, Outcome] = {job.name: Outcome(job) for job in jobs}
        deadline = asyncio.get_running_loop().time() + _JOBS_SECONDS
        for round in scenario.rounds(jobs):
            for outcome in await self._submit(round):
                outcomes[outcome.trial.name] = outcome
            # The first round has to hold its cards before the others come.
            if round is not jobs and round[0].round == 1:
                await self._watch(admin, outcomes, deadline, until_placed=True)
        await self._watch(admin, outcomes, deadline)
        return [outcomes[job.name] for job in jobs]

    async def _submit(self, jobs: Sequence[TrialJob]) -> list[Outcome]:
        """One request for each tenant, as a user would; what should be refused is asked on its own."""
        outcomes = []
        for tenant in sorted({job.tenant for job in jobs}):
            client = self._tenants[tenant]
            mine = [job for job in jobs if job.tenant == tenant]
            together = [job for job in mine if job.wanted.state != "REFUSED"]
            if together:
                views = await client.submit([scenario.spec_of(job) for job in together])
                outcomes += [Outcome(job, view) for job, view in zip(together, views, strict=True)]
                self._show.note(f"{tenant} submits {', '.join(job.name for job in together)}")
            for job in mine:
                if job.wanted.state == "REFUSED":
                    outcomes.append(await self._submit_alone(client, job))
        return outcomes

    async def _submit_alone(self, client: Client, job: TrialJob) -> Outcome:
        try:
            return Outcome(job, await client.submit(scenario.spec_of(job)))
        except ApiError as error:
            self._show.note(f"{job.tenant} submits {job.name}: refused, {error.detail}")
            return Outcome(job, refusal={"code": error.code, "detail": error.detail, "status": error.status})

    async def _watch(
        self, admin: Client, outcomes: dict[str, Outcome], deadline: float, *, until_placed: bool = False
    ) -> None:
        """Shows how things stand until every job has ended (or is placed), or time is over."""
        while True:
            frame = await look_at_all(admin)
            self._show.frame(frame)
            views: dict[str, JobView] = {job["id"]: job for job in frame.jobs}
            waiting = False
            for name, outcome in list(outcomes.items()):
                if outcome.job is None:
                    continue
                view = views.get(outcome.job["id"], outcome.job)
                outcomes[name] = evolve(outcome, job=view)
                # What was to be refused and was not would wait for ever.
                enough = outcome.trial.wanted.state == "REFUSED" or (
                    until_placed and view["state"] != "PENDING"
                )
                waiting = waiting or not (enough or is_final(view))  # type: ignore[arg-type]
            if not waiting or asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def _stop_jobs(self) -> None:
        """Cancels what lives, and waits for it where its containers would go on by themselves."""
        if self._admin is None or (self._options.runner, self._options.engine) == ("process", "agent"):
            return
        live = [job["id"] async for job in self._admin.jobs() if not is_final(job)]
        await asyncio.gather(*(self._admin.cancel(id) for id in live))
        await asyncio.gather(*(self._admin.wait_for(id) for id in live))


async def look_at_all(client: Client) -> Frame:
    """One frame with every job, ended ones too: a trial has few."""

    async def jobs() -> list[Any]:
        return [job async for job in client.jobs(limit=1000)]

    nodes, queue, tenants, found = await asyncio.gather(
        client.nodes(), client.queue(), client.tenants(), jobs()
    )
    return Frame(nodes=nodes, queue=queue, tenants=tenants, jobs=found)
