"""Coordinators that die: the other one goes on within the lease time, no job is lost and none runs twice."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.live import ADMIN, LiveCluster, live_cluster, spec

pytestmark = pytest.mark.etcd


def _counting(path: Path) -> list[str]:
    """A command that writes down that it ran: the jobs themselves count."""
    return ["sh", "-c", f'echo "$SERAI_JOB_ID" >> {path}; sleep 0.2']


async def _ran(path: Path) -> Counter[str]:
    return Counter(path.read_text().split()) if path.exists() else Counter()


async def _leader(cluster: LiveCluster) -> str:
    item = await cluster.store.get("/serai/leader/holder")
    if item is None:
        return ""
    text = item.value.decode()
    return next(name for name in ("c1", "c2") if f'"{name}.' in text)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
async def test_the_other_coordinator_goes_on(tmp_path: Path, blow: signal.Signals) -> None:
    """RR-10, LE-4: leader killed, asked to end, or paused for longer than its lease and woken again, under load."""
    ran = tmp_path / "ran"
    async with live_cluster(tmp_path, lease_seconds=3) as cluster:
        await cluster.start_coordinator("c1")
        await cluster.until(lambda: _leads(cluster))
        await cluster.start_coordinator("c2")
        admin = await cluster.bootstrap()
        await cluster.start_agent("n1", "simulated:8x80GiB:A100")
        await admin.create_tenant("a", quota_memory="640GiB")
        command = _counting(ran)
        jobs = await admin.submit([spec(f"j{n}", *command, tenant="a", gpus=1) for n in range(24)])
        await cluster.until(lambda: _some_ran(ran))
        first = await _leader(cluster)
        cluster.kill(first, blow)
        started = asyncio.get_running_loop().time()
        await cluster.until(lambda: _other_leads(cluster, first))
        took = asyncio.get_running_loop().time() - started
        print(f"failover after {blow.name}: {took:.2f} s")
        if blow is signal.SIGSTOP:
            cluster.kill(first, signal.SIGCONT)
        survivor = cluster.client(ADMIN, await _address(cluster, "c2" if first == "c1" else "c1"))
        for job in jobs:
            assert (await survivor.wait_for(job["id"], timeout_seconds=40))["state"] == "SUCCEEDED"
        counts = await _ran(ran)
        assert counts == Counter({job["id"]: 1 for job in jobs})
        assert await cluster.keys("jobs/") == []
        assert await cluster.keys("grants/") == []


async def _leads(cluster: LiveCluster) -> bool:
    return bool(await _leader(cluster))


async def _other_leads(cluster: LiveCluster, first: str) -> bool:
    return await _leader(cluster) not in ("", first)


async def _some_ran(path: Path) -> bool:
    return len(await _ran(path)) >= 2


async def _address(cluster: LiveCluster, name: str) -> str:
    from coordinator.dev.parts import ready_line

    return str((await ready_line(cluster.parts[name], seconds=10))["address"])
