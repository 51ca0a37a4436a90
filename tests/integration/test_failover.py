"""Coordinators that die: the other one goes on within the lease time, no job is lost and none runs twice."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.live import ADMIN, live_cluster, spec

pytestmark = pytest.mark.etcd


def _counting(path: Path) -> list[str]:
    """A command that writes down that it ran: the jobs themselves count."""
    return ["sh", "-c", f'echo "$SERAI_JOB_ID" >> {path}; sleep 0.2']


async def _ran(path: Path) -> Counter[str]:
    return Counter(path.read_text().split()) if path.exists() else Counter()


@pytest.mark.timeout(240)
async def test_the_other_coordinator_goes_on(tmp_path: Path) -> None:
    """RR-10, LE-4: leader asked to end, killed, or paused for longer than its lease and woken again, under load."""
    async with live_cluster(tmp_path, lease_seconds=3) as cluster:
        await cluster.start_coordinator("c1")
        await cluster.until(lambda: cluster.leader_is("c1"))
        await cluster.start_coordinator("c2")
        admin = await cluster.bootstrap()
        await cluster.start_agent("n1", "simulated:8x80GiB:A100")
        await admin.create_tenant("a", quota_memory="640GiB")
        for blow in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
            ran = tmp_path / f"ran-{blow.name}"
            command = _counting(ran)
            first = await cluster.leader()
            other = "c2" if first == "c1" else "c1"
            survivor = cluster.client(ADMIN, await cluster.address_of(other))
            jobs = await survivor.submit([spec(f"j{n}", *command, tenant="a", gpus=1) for n in range(24)])
            await cluster.until(lambda ran=ran: _some_ran(ran))  # type: ignore[misc]
            cluster.kill(first, blow)
            await cluster.until(lambda other=other: cluster.leader_is(other))  # type: ignore[misc]
            if blow is signal.SIGSTOP:
                cluster.kill(first, signal.SIGCONT)
            for job in jobs:
                view = await survivor.wait_for(job["id"], timeout_seconds=40)
                assert (view["state"], view["attempt"]) == ("SUCCEEDED", 1), blow
            assert await _ran(ran) == Counter({job["id"]: 1 for job in jobs}), blow
            assert await cluster.keys("jobs/") == []
            assert await cluster.keys("grants/") == []
            if blow is not signal.SIGSTOP:
                await cluster.start_coordinator(first)


async def _some_ran(path: Path) -> bool:
    return len(await _ran(path)) >= 2
