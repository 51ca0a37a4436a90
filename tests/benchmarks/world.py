"""Everything that a run of the end-to-end bench needs, as processes of its own: etcd on disk, the leader, the API, the
simulated nodes. What each of them used of the machine is read from /proc."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from coordinator.dev.parts import Part, start
from coordinator.etcd_store import EtcdSettings, EtcdStore
from coordinator.model import Tenant
from coordinator.records import ROOT, Token, encode, tenant_key, token_key
from coordinator.store import Put, StoreUnavailable
from tests.benchmarks.load import Load
from tests.etcd_server import EtcdServer, make_members

TOKEN = "admin-token-of-the-bench"
TENANTS = tuple(f"team-{letter}" for letter in "abcdefgh")
CLUSTER_MEMORY_MIB = 1_000 * 8 * 80 * 1024
START_SECONDS = 60.0
PUTS_AT_ONCE = 120


class World:
    """`cpu` names the processes whose use is told; `etcd` is all of its members."""

    def __init__(self, folder: Path, members: Sequence[EtcdServer], nodes: int) -> None:
        self.folder = folder
        self.members = members
        self.nodes = nodes
        self.store = EtcdStore(EtcdSettings.from_url(",".join(member.url for member in members)))
        self.parts: dict[str, Part] = {}
        self.api = ("127.0.0.1", 0)
        self._addresses: dict[str, str] = {}
        self._out = folder / "agents.json"

    async def begin(
        self, expected: int, until: str, agents: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        """Tenants, leader, API and nodes, in a state in which the first submit finds everything warm."""
        quota = CLUSTER_MEMORY_MIB // len(TENANTS)
        tenants = [Put(tenant_key(name), encode(Tenant(name, quota))) for name in TENANTS]
        await self.store.txn([], [Put(token_key(TOKEN), encode(Token("admin"))), *tenants])
        config = self.folder / "settings.yaml"
        config.write_text(yaml.safe_dump(dict(settings)))
        fleet = ["-m", "tests.benchmarks.agents", "--etcd", self.members[0].host, "--nodes", str(self.nodes)]
        fleet += ["--expect", str(expected), "--until", until, "--out", str(self._out)]
        await self._start("agents", [*fleet, *agents])
        await self.said("agents", "ready")
        urls = ",".join(member.url for member in self.members)
        common = ["-m", "coordinator", "--etcd", urls, "--config", str(config), "--log-level", "warning"]
        leader = ["--role", "scheduler", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
        await self._start("leader", [*common, *leader])
        self._addresses["leader"] = (await self.said("leader", "ready"))["metrics"]
        await self._start("api", [*common, "--role", "api", "--listen", "127.0.0.1:0"])
        address = self._addresses["api"] = (await self.said("api", "ready"))["address"]
        host, _, port = address.removeprefix("http://").partition(":")
        self.api = (host, int(port))
        while await self.store.get(ROOT + "leader/holder") is None:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # the first plans, and whatever the interpreters still load

    def load(self, connections: int) -> Load:
        return Load(*self.api, TOKEN, connections)

    async def agents_done(self, seconds: float) -> dict[str, Any]:
        """What the nodes saw, once as much has happened as was expected."""
        await self.said("agents", "done", seconds)
        result: dict[str, Any] = json.loads(self._out.read_text())
        return result

    async def said(self, name: str, event: str, seconds: float = START_SECONDS) -> dict[str, Any]:
        """The first JSON line of this event that the part prints."""
        part = self.parts[name]
        try:
            async with asyncio.timeout(seconds):
                while True:
                    for line in part.log.read_text(errors="replace").splitlines():
                        if line.startswith("{") and (said := json.loads(line)).get("event") == event:
                            return dict(said)
                    if part.process.returncode is not None:
                        raise await part.failure()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            logs = "\n".join(f"--- {other.name}\n{other.last_lines(20)}" for other in self.parts.values())
            raise AssertionError(f"{name} did not say {event!r} in {seconds:g} s\n{logs}") from None

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time of each part since it started."""
        used = {name: _cpu_seconds(part.process.pid) for name, part in self.parts.items()}
        used["etcd"] = sum(_cpu_seconds(member.pid) for member in self.members)
        used["load"] = _cpu_seconds(psutil.Process().pid)
        machine = psutil.cpu_times()
        used["all"] = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
        return used

    async def metrics(self, name: str) -> dict[str, float]:
        """What the leader or the API exposes, by the name of the series with its labels."""
        url = f"{self._addresses[name]}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            lines = (await answer.text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {series: float(value) for series, value in pairs}

    async def keys(self, folder: str) -> int:
        return len((await self.store.list(ROOT + folder)).items)

    async def _start(self, name: str, arguments: Sequence[str]) -> None:
        self.parts[name] = await start(name, [sys.executable, *arguments], self.folder)

    async def stop(self) -> None:
        await asyncio.gather(*(part.stop() for part in self.parts.values()))
        await self.store.close()


@asynccontextmanager
async def world(nodes: int, members: int = 1, options: Sequence[str] = ()) -> AsyncIterator[World]:
    """An etcd of one or more members of its own on this disk. Ends with nothing left running, and the folder gone."""
    build = Path("build/bench")
    build.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="e2e-", dir=build))
    servers = await asyncio.to_thread(make_members, folder, members, *options, on_disk=True)
    here = World(folder, servers, nodes)
    try:
        yield here
    finally:
        await here.stop()
        for server in servers:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def write_all(store: EtcdStore, puts: Iterable[Put]) -> None:
    """In transactions of many, each again until it is durable: before a bench begins a slow disk is no fault."""
    rest = iter(puts)
    while batch := list(islice(rest, PUTS_AT_ONCE)):
        while True:
            try:
                await store.txn([], batch)
                break
            except StoreUnavailable:
                await asyncio.sleep(1)


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
