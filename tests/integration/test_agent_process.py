"""The agent as operators run it: a process of its own against a real etcd."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from coordinator.etcd_store import EtcdSettings, EtcdStore
from coordinator.model import Task, TaskState
from coordinator.records import (
    NODES,
    Endpoint,
    decode,
    encode,
    endpoint_key,
    grant_key,
    grant_prefix,
    inventory_key,
    report_key,
    task_key,
    task_prefix,
)
from coordinator.store import Delete, Put
from nodeagent.process_cleanup import stop_all
from nodeagent.process_table import live_processes, marked_key
from tests.contract.test_runner import KEY, container, grant
from tests.etcd_server import EtcdServer
from vgpu.inventory import NodeInventory

pytestmark = pytest.mark.etcd


class AgentProcess:
    def __init__(self, etcd: EtcdServer, folder: Path) -> None:
        self.etcd, self.folder = etcd, folder
        self.arguments = [
            *("-m", "nodeagent", "--node", "n1", "--etcd", etcd.url, "--gpus", "simulated:1x16GiB:T4"),
            *("--runner", "process", "--data-folder", str(folder), "--listen", "127.0.0.1:0"),
        ]
        self.child: asyncio.subprocess.Process | None = None

    async def start(self) -> dict[str, str]:
        """What it says when it is ready."""
        self.child = await asyncio.create_subprocess_exec(
            sys.executable, *self.arguments, stdout=asyncio.subprocess.PIPE
        )
        assert self.child.stdout is not None
        async with asyncio.timeout(20):
            said: dict[str, str] = json.loads(await self.child.stdout.readline())
        return said

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.child is not None
        if self.child.returncode is None:
            self.child.send_signal(number)
        async with asyncio.timeout(20):
            return await self.child.wait()


@pytest.fixture
async def store(etcd_server: EtcdServer) -> AsyncIterator[EtcdStore]:
    made = EtcdStore(EtcdSettings.from_url(etcd_server.url))
    for prefix in (grant_prefix("n1"), task_prefix("n1"), f"{NODES}n1/"):
        for item in (await made.list(prefix)).items:
            await made.txn([], [Delete(item.key)])
    yield made
    await made.close()


@pytest.fixture
async def agent(etcd_server: EtcdServer, tmp_path: Path) -> AsyncIterator[AgentProcess]:
    made = AgentProcess(etcd_server, tmp_path)
    yield made
    await made.end(signal.SIGKILL)
    stop_all(tmp_path / "tasks", 0.1)


async def task_in(store: EtcdStore, state: TaskState) -> Task:
    async with asyncio.timeout(20):
        while True:
            item = await store.get(task_key("n1", KEY.job, KEY.attempt, 0))
            if item is not None and (task := decode(Task, item.value)).state is state:
                return task
            await asyncio.sleep(0.05)


async def test_tasks_outlive_their_agent_and_are_adopted_by_the_next_rr_1(
    store: EtcdStore, agent: AgentProcess
) -> None:
    said = await agent.start()
    assert (said["event"], said["node"]) == ("ready", "n1")
    settings = container("sh", "-c", "echo out; sleep 3; exit 8", slices=())
    await store.txn([], [Put(grant_key("n1", KEY.job, KEY.attempt), encode(grant(settings)))])
    before = await task_in(store, TaskState.RUNNING)
    item = await store.get(inventory_key("n1"))
    assert item is not None
    assert decode(NodeInventory, item.value).gpus[0].memory_mib == 16 * 1024
    item = await store.get(endpoint_key("n1"))
    assert item is not None
    endpoint = decode(Endpoint, item.value)
    assert endpoint.address == said["address"]

    assert await agent.end() == 0
    assert await store.get(report_key("n1")) is None  # it has given its lease back
    assert await store.get(endpoint_key("n1")) is None
    assert await task_in(store, TaskState.RUNNING) == before

    await agent.start()
    assert (await task_in(store, TaskState.EXITED)).exit_code == 8
    item = await store.get(endpoint_key("n1"))
    assert item is not None
    endpoint = decode(Endpoint, item.value)
    url = f"{endpoint.address}/v1/logs/{KEY}"
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.token}"}) as session:
        async with session.get(url) as answer:
            assert await answer.read() == b"out\n"
        async with session.get(f"{endpoint.address}/v1/logs/never.1.0") as answer:
            assert answer.status == 404


async def test_a_second_agent_with_the_same_data_folder_is_refused(agent: AgentProcess) -> None:
    await agent.start()
    second = await asyncio.create_subprocess_exec(
        sys.executable, *agent.arguments, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(20):
        _, said = await second.communicate()
    assert second.returncode == 2
    assert b"--data-folder" in said


async def test_what_agents_left_running_can_be_ended_without_one(
    store: EtcdStore, agent: AgentProcess
) -> None:
    await agent.start()
    settings = container("sleep", "1000", slices=())
    await store.txn([], [Put(grant_key("n1", KEY.job, KEY.attempt), encode(grant(settings)))])
    await task_in(store, TaskState.RUNNING)
    await agent.end()
    cleaner = AgentProcess(agent.etcd, agent.folder)
    cleaner.arguments.append("--stop-tasks")
    child = await asyncio.create_subprocess_exec(sys.executable, *cleaner.arguments)
    async with asyncio.timeout(20):
        assert await child.wait() == 0
    assert not (agent.folder / "tasks").exists()
    assert not any(marked_key(agent.folder / "tasks", process.pid) for process in live_processes())
