"""Agents, their data and their Docker Engine go away and come back under load, with real containers: what runs is not
touched, each end is told as it was, and what ran on a node that was given up does not run on beside its new attempt."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.client import Client
from tests.docker_engine import DockerEngine, own_engine
from tests.integration.live import LiveCluster, live_cluster, spec

pytestmark = [pytest.mark.etcd, pytest.mark.docker]

# Ends by itself with 5 once a test has made /end in its container, and with 9 when it is asked to stop.
WAITS = ("sh", "-c", "trap 'exit 9' TERM; until test -e /end; do sleep 0.1; done; exit 5")


class Containers:
    """Those of one trial cluster, as the Docker Engine itself shows them."""

    def __init__(self, engine: DockerEngine, live: LiveCluster) -> None:
        self._engine = engine
        self._live = live

    async def of(self, job: str, attempt: int | None = None) -> list[dict[str, Any]]:
        """All that were ever made for it, inspected."""

        def look() -> list[dict[str, Any]]:
            labels = [f"serai.job={job}", *([f"serai.attempt={attempt}"] if attempt else [])]
            client = self._engine.client()
            try:
                found = client.api.containers(all=True, filters={"label": labels})
                return [client.api.inspect_container(one["Id"]) for one in found]
            finally:
                client.close()

        return await asyncio.to_thread(look)

    async def lives(self, jobs: Sequence[str]) -> list[tuple[str, int, str]]:
        """Which container runs for each job, as what process, and since when."""
        found = []
        for job in jobs:
            (one,) = await self.of(job)
            assert one["State"]["Running"], one["State"]
            found.append((one["Id"], one["State"]["Pid"], one["State"]["StartedAt"]))
        return found

    async def end(self, job: str) -> None:
        def touch() -> None:
            client = self._engine.client()
            try:
                (one,) = client.containers.list(filters={"label": f"serai.job={job}"})
                assert one.exec_run(["touch", "/end"]).exit_code == 0
                one.wait(timeout=30)
            finally:
                client.close()

        await asyncio.to_thread(touch)

    async def have_ended(self, job: str, attempt: int) -> bool:
        return not any(one["State"]["Running"] for one in await self.of(job, attempt))

    async def remove(self) -> None:
        def remove() -> None:
            client = self._engine.client()
            try:
                mine = {"label": f"serai.cluster={self._live.name}"}
                for one in client.api.containers(all=True, filters=mine):
                    client.api.remove_container(one["Id"], force=True)
            finally:
                client.close()

        await asyncio.to_thread(remove)


async def _start_agent(live: LiveCluster, node: str, engine: DockerEngine) -> None:
    await live.start_agent(node, "simulated:8x16GiB:T4", "docker", "--docker-socket", str(engine.socket))


async def _submit(admin: Client, count: int, command: Sequence[str] = WAITS, **fields: Any) -> list[str]:
    specs = [spec(f"job{n}", *command, tenant="a", gpus=1, stop_grace="2s", **fields) for n in range(count)]
    return [job["id"] for job in await admin.submit(specs)]


async def _are(client: Client, jobs: Sequence[str], state: str, attempt: int = 1) -> bool:
    views = [await client.job(id) for id in jobs]
    return {(view["state"], view["attempt"]) for view in views} == {(state, attempt)}


async def _end(client: Client, job: str) -> tuple[str, int, int | None]:
    view = await client.wait_for(job, timeout_seconds=40)
    return view["state"], view["attempt"], view["exit_code"]


@pytest.mark.timeout(240)
async def test_agents_die_lose_their_data_and_their_node(tmp_path: Path, docker_engine: DockerEngine) -> None:
    """RR-1, RR-5, RR-11, EX-6: killed with jobs running, queued and ending; killed and its data folder lost; stopped for
    longer than `lost_seconds` while what it started runs on. Then one retry is used, the second attempt has another
    number and another node; the first is stopped once the agent looks again, and never comes back in the history."""
    times = {"lease_seconds": 3, "node_lease_seconds": 3, "lost_seconds": 5, "back_off_seconds": 1}
    async with live_cluster(tmp_path, cluster="docker-faults", **times) as live:
        containers = Containers(docker_engine, live)
        try:
            await live.start_coordinator()
            admin = await live.bootstrap()
            await _start_agent(live, "n1", docker_engine)
            await admin.create_tenant("a", quota_memory="512GiB")
            stay = await _submit(admin, 2, retries=1)
            once, first, second = await _submit(admin, 3)
            short = await _submit(admin, 9, ("sleep", "1"))
            await live.until(lambda: _are(admin, [*stay, once, first, second], "RUNNING"))
            untouched = await containers.lives([*stay, once])

            live.kill("n1")
            await containers.end(first)
            await _start_agent(live, "n1", docker_engine)
            assert await _end(admin, first) == ("FAILED", 1, 5)

            live.kill("n1")
            shutil.rmtree(tmp_path / "n1")
            await containers.end(second)
            await _start_agent(live, "n1", docker_engine)
            assert await _end(admin, second) == ("FAILED", 1, 5)
            for id in short:
                assert await _end(admin, id) == ("SUCCEEDED", 1, 0)
                assert len(await containers.of(id)) == 1
            assert await containers.lives([*stay, once]) == untouched
            assert await _are(admin, [*stay, once], "RUNNING")

            live.kill("n1", signal.SIGSTOP)
            await _start_agent(live, "n2", docker_engine)
            assert await _end(admin, once) == ("FAILED", 1, 125)
            await live.until(lambda: _are(admin, stay, "RUNNING", 2))
            assert {node["name"]: node["status"] for node in await admin.nodes()} == {
                "n1": "lost",
                "n2": "ready",
            }
            assert not await containers.have_ended(stay[0], 1)
            live.kill("n1", signal.SIGCONT)
            for id in (*stay, once):
                await live.until(lambda id=id: containers.have_ended(id, 1))  # type: ignore[misc]
            await live.until(lambda: _node_is(admin, "ready"))
            assert await _are(admin, stay, "RUNNING", 2)
            for id in stay:
                (view,) = (await admin.job(id))["tasks"]
                assert view["node"] == "n2"
                await containers.end(id)
                assert await _end(admin, id) == ("FAILED", 2, 5)
                history = (await admin.job(id))["history"]
                assert "LOST" in [entry["state"] for entry in history]
                assert [entry["attempt"] for entry in history] == sorted(
                    entry["attempt"] for entry in history
                )
            assert await live.keys("grants/") == []
            assert await live.keys("tasks/") == []
        finally:
            await live.stop(["n1", "n2"])
            await containers.remove()


@pytest.mark.timeout(240)
async def test_the_docker_daemon_is_restarted_under_a_running_agent(tmp_path: Path) -> None:
    """With live-restore its containers run on, and nothing of them changes; without, they have ended when it is back:
    a job with a retry runs again, the other has failed, and no slice is kept. Meanwhile the node takes no work."""
    with own_engine("--live-restore") as engine:
        async with live_cluster(tmp_path, cluster="docker-restarts", back_off_seconds=1) as live:
            containers = Containers(engine, live)
            await live.start_coordinator()
            admin = await live.bootstrap()
            await _start_agent(live, "n1", engine)
            await admin.create_tenant("a", quota_memory="512GiB")
            (retried,), (once,) = await _submit(admin, 1, retries=1), await _submit(admin, 1)
            await live.until(lambda: _are(admin, [retried, once], "RUNNING"))
            untouched = await containers.lives([retried, once])

            await asyncio.to_thread(engine.stop)
            await live.until(lambda: _node_is(admin, "closed"))
            (waits,) = await _submit(admin, 1, ("true",))
            assert (await admin.job(waits))["state"] == "PENDING"
            await asyncio.to_thread(engine.start)
            assert await _end(admin, waits) == ("SUCCEEDED", 1, 0)
            assert await containers.lives([retried, once]) == untouched
            assert await _are(admin, [retried, once], "RUNNING")

            engine.options = ()
            await asyncio.to_thread(engine.restart)
            state, attempt, exit_code = await _end(admin, once)
            assert (state, attempt) == ("FAILED", 1)
            assert exit_code not in (0, None)
            await live.until(lambda: _are(admin, [retried], "RUNNING", 2))
            assert [one["State"]["Running"] for one in await containers.of(retried, 2)] == [True]
            assert await containers.have_ended(retried, 1)
            await containers.end(retried)
            assert await _end(admin, retried) == ("FAILED", 2, 5)
            assert await live.keys("grants/") == []
            await live.stop(["n1"])


async def _node_is(client: Client, status: str) -> bool:
    return bool((await client.node("n1"))["status"] == status)
