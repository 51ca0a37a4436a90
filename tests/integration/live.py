"""A cluster of real processes on loopback: etcd, coordinators, node agents. For tests only what a user can do too:
command lines, HTTP, etcdctl, signals."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from coordinator.client import ApiError, Client, Unreachable
from coordinator.cluster import Cluster
from coordinator.config import Settings
from coordinator.dev.parts import Part, PartFailed, ready_line, start
from coordinator.etcd_store import EtcdSettings, EtcdStore
from coordinator.records import (
    LEADER,
    ROOT,
    Leadership,
    Token,
    decode,
    encode,
    event,
    report_key,
    token_key,
)
from coordinator.store import Change, Put
from tests.etcd_server import EtcdServer
from tests.invariants import check_snapshot

ADMIN = "admin-token-of-the-tests"
SETTINGS = {"report_seconds": 1, "node_lease_seconds": 4, "lost_seconds": 30, "orphan_grace_seconds": 2}
PATIENCE_SECONDS = 40
START_SECONDS = 90  # a process that has to import everything on a machine that is busy with ten others


class LiveCluster:
    """`folder` holds logs and data. Every part that was started is stopped by `stop`."""

    def __init__(self, folder: Path, etcd: EtcdServer, **settings: object) -> None:
        self.folder = folder
        self.etcd = etcd
        self.store = EtcdStore(EtcdSettings.from_url(etcd.url))
        self.parts: dict[str, Part] = {}
        self.address = ""
        self._clients: list[Client] = []
        self._starts = 0
        self._settings = folder / "settings.yaml"
        self._settings.write_text(yaml.safe_dump(SETTINGS | settings))
        self.name = str(settings.get("cluster", "serai"))

    async def bootstrap(self) -> Client:
        await self.store.txn([], [Put(token_key(ADMIN), encode(Token("admin")))])
        return self.client(ADMIN)

    def client(self, token: str, address: str = "", **options: Any) -> Client:
        client = Client(address or self.address, token, **options)
        self._clients.append(client)
        return client

    async def start_coordinator(self, name: str = "c1", role: str = "both", **options: str) -> Part:
        """Ready when it serves (api, both) or stands by (scheduler)."""
        command = [sys.executable, "-m", "coordinator", "--role", role, "--etcd", self.etcd.url, "--id", name]
        command += ["--listen", "127.0.0.1:0", "--config", str(self._settings)]
        for option, value in options.items():
            command += [f"--{option}", value]
        part = self.parts[name] = await self._start(name, command)
        if role == "scheduler":
            await self.until(lambda: said(part, '"scheduler"'), seconds=START_SECONDS)
        else:
            self.address = (await self._ready(part))["address"]
        return part

    async def start_agent(self, node: str, gpus: str, runner: str = "process", *options: str) -> Part:
        command = [sys.executable, "-m", "nodeagent", "--node", node, "--etcd", self.etcd.url]
        command += [
            "--gpus",
            gpus,
            "--runner",
            runner,
            "--config",
            str(self._settings),
            "--listen",
            "127.0.0.1:0",
        ]
        command += ["--data-folder", str(self.folder / node), *options]
        part = self.parts[node] = await self._start(node, command)
        await self._ready(part)
        await self.until(lambda: self._is_known(node))
        return part

    async def _start(self, name: str, command: list[str]) -> Part:
        """With a log of its own: what an earlier one said is no sign of this one."""
        self._starts += 1
        return await start(f"{name}.{self._starts}", command, self.folder, env={"PYTHONFAULTHANDLER": "1"})

    async def _ready(self, part: Part) -> dict[str, Any]:
        """What it says once it is ready. One that is not has its log shown, and where each of its processes is."""
        try:
            return await ready_line(part, seconds=START_SECONDS)
        except PartFailed as failed:
            raise AssertionError(f"{failed}\n{await self.last_words(part)}\n{self.logs()}") from None

    async def last_words(self, part: Part) -> str:
        """Ends it, and answers its log. Its processes are asked first, since only then they tell their tasks too; then
        by a signal that they cannot leave without an answer."""
        if part.process.returncode is None:
            for pid in _processes(part):
                if _catches(pid, signal.SIGUSR1):
                    os.kill(pid, signal.SIGUSR1)
            await asyncio.sleep(1)
            os.killpg(part.process.pid, signal.SIGABRT)
            await part.process.wait()
        return part.last_lines(400)

    async def _is_known(self, node: str) -> bool:
        """Its report comes last: before it nothing starts there, and who cuts the node off may be quicker."""
        return await self.store.get(report_key(node)) is not None

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """To the part and whatever it started."""
        for process in self.processes(name):
            os.kill(process, number)

    def processes(self, name: str) -> list[int]:
        return _processes(self.parts[name])

    async def until(
        self, holds: Callable[[], bool | Awaitable[bool]], seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Waits for a condition of the world outside; fails with the ends of the logs."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    answer = holds()
                    if answer if isinstance(answer, bool) else await answer:
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"did not come true in {seconds} s\n{self.logs()}") from None

    async def leader(self) -> str:
        """The coordinator that leads; empty when none does."""
        item = await self.store.get(LEADER)
        return decode(Leadership, item.value).id.rpartition(".")[0] if item is not None else ""

    async def leader_is(self, name: str) -> bool:
        return await self.leader() == name

    async def address_of(self, name: str) -> str:
        """Of a coordinator that has said that it is ready."""
        return str((await ready_line(self.parts[name], seconds=PATIENCE_SECONDS))["address"])

    def logs(self) -> str:
        ends = {name: part.last_lines(25) for name, part in self.parts.items()} | {
            "etcd": self.etcd.last_lines(15)
        }
        return "\n".join(f"--- {name}\n{end}" for name, end in ends.items())

    async def check(self) -> None:
        """The invariants of the design, on what stands in etcd now."""
        cluster = Cluster(Settings())
        listing = await self.store.list(ROOT)
        for item in listing.items:
            seen = event(Change(item))
            if seen is not None:
                cluster.apply(seen, 0)
        check_snapshot(cluster.snapshot(0))

    async def keys(self, folder: str) -> list[str]:
        return [item.key for item in (await self.store.list(ROOT + folder)).items]

    async def stop(self, parts: Collection[str] | None = None) -> None:
        """All of them, or those of `parts` that were started."""
        names = [name for name in self.parts if parts is None or name in parts]
        await asyncio.gather(*(self.parts[name].stop() for name in names))
        if parts is None:
            for client in self._clients:
                await client.close()
            await self.store.close()


def _processes(part: Part) -> list[int]:
    root = psutil.Process(part.process.pid)
    return [process.pid for process in (root, *root.children(recursive=True))]


def _catches(pid: int, number: signal.Signals) -> bool:
    """A process that is not so far yet would only end by it."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def said(part: Part, text: str) -> bool:
    return text in part.log.read_text(errors="replace")


class Flow:
    """Submits a job again and again, each with a key of its own, and keeps what was acknowledged. Each job writes its id
    to `ran`. `client` may be exchanged; `refusal` is the last answer that was no acknowledgement."""

    def __init__(self, client: Client, ran: Path) -> None:
        self.ran = ran
        self.ids: list[str] = []
        self.refusal: ApiError | Unreachable | None = None
        self.client = client
        self._task = asyncio.create_task(self._submit())

    async def _submit(self) -> None:
        number = 0
        command = ["sh", "-c", f'echo "$SERAI_JOB_ID" >> {self.ran}; sleep 0.1']
        while True:
            number += 1
            wanted = spec(f"j{number}", *command, tenant="a", gpus=1)
            while True:
                try:
                    job = await self.client.submit(wanted, idempotency_key=f"key-{number}")
                    break
                except (ApiError, Unreachable) as error:
                    if isinstance(error, ApiError) and error.status != 503:
                        raise
                    self.refusal = error
                    await asyncio.sleep(0.2)
            self.ids.append(job["id"])
            await asyncio.sleep(0.2)

    @property
    def runs(self) -> int:
        return len(self.ran.read_text().split()) if self.ran.exists() else 0

    async def goes_on(self, live: LiveCluster, jobs: int = 5) -> None:
        until = self.runs + jobs
        await live.until(lambda: self.runs >= until, seconds=60)
        assert not self._task.done(), self._task.exception()

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def check(self, live: LiveCluster, client: Client) -> None:
        """Everything that was acknowledged has run, once, and nothing else."""
        for id in self.ids:
            assert (await client.wait_for(id, timeout_seconds=60))["state"] == "SUCCEEDED", live.logs()
        assert Counter(self.ran.read_text().split()) == Counter(self.ids)


@asynccontextmanager
async def live_cluster(
    folder: Path, etcd_options: Sequence[str] = (), **settings: object
) -> AsyncIterator[LiveCluster]:
    """With an etcd of its own. Ends with the invariants checked and nothing left running."""
    data = folder / "etcd"
    data.mkdir()
    etcd = EtcdServer(data, *etcd_options)
    etcd.start()
    cluster = LiveCluster(folder, etcd, **settings)
    try:
        yield cluster
        await cluster.check()
    finally:
        await cluster.stop()
        etcd.stop()


def spec(name: str, *command: str, **fields: Any) -> dict[str, Any]:
    """A job spec that runs `command` in the tests' image, or as a process."""
    return {
        "name": name,
        "image": "serai-test:1",
        "command": list(command) or ["true"],
        "cpu": "100m",
        "memory": "64MiB",
    } | fields
