"""A node that does not report for longer than its time: its jobs go elsewhere, and what it still runs ends when it is back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from coordinator.client import Client
from tests.integration.live import live_cluster, spec

pytestmark = pytest.mark.etcd


async def test_a_lost_job_runs_elsewhere_and_its_old_attempt_ends_when_the_node_is_back(
    tmp_path: Path,
) -> None:
    """RR-11, EX-6: the agent is stopped for longer than `lost_seconds` while what it started runs on. One retry is
    used, the second attempt has another number and another node; the first is stopped once the agent looks again, and
    never comes back in the job's history."""
    beats = tmp_path / "beats"
    script = (
        f'trap "exit 1" TERM; while [ ! -e {tmp_path}/end ]; do '
        f'echo "$SERAI_ATTEMPT $$" >> {beats}; sleep 0.1; done'
    )
    async with live_cluster(
        tmp_path, lease_seconds=3, node_lease_seconds=3, lost_seconds=5, back_off_seconds=1
    ) as live:
        await live.start_coordinator()
        admin = await live.bootstrap()
        await live.start_agent("n1", "simulated:1x16GiB:T4")
        await admin.create_tenant("a", quota_memory="64GiB")
        job = await admin.submit(
            spec("job", "sh", "-c", script, tenant="a", gpus=1, retries=1, stop_grace="1s")
        )
        await live.until(lambda: _runs(admin, job["id"], 1, "n1"))
        await live.start_agent("n2", "simulated:1x16GiB:T4")
        await live.until(lambda: _attempts(beats) == {"1"})

        os.kill(live.parts["n1"].process.pid, signal.SIGSTOP)
        await live.until(lambda: _runs(admin, job["id"], 2, "n2"))
        view = await admin.job(job["id"])
        assert "LOST" in [entry["state"] for entry in view["history"]]
        assert {node["name"]: node["status"] for node in await admin.nodes()} == {"n1": "lost", "n2": "ready"}

        old = {line.split()[1] for line in beats.read_text().splitlines() if line.startswith("1 ")}
        os.kill(live.parts["n1"].process.pid, signal.SIGCONT)
        await live.until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in old))
        await live.until(lambda: _status(admin, "n1", "ready"))
        assert await _runs(admin, job["id"], 2, "n2")
        (tmp_path / "end").touch()
        end = await admin.wait_for(job["id"], timeout_seconds=40)
        assert (end["state"], end["attempt"], end["exit_code"]) == ("SUCCEEDED", 2, 0)
        assert [entry["attempt"] for entry in end["history"]] == sorted(
            entry["attempt"] for entry in end["history"]
        )
        assert await live.keys("grants/") == []
        assert await live.keys("tasks/") == []


def _attempts(beats: Path) -> set[str]:
    return {line.split()[0] for line in beats.read_text().splitlines()} if beats.exists() else set()


async def _runs(client: Client, id: str, attempt: int, node: str) -> bool:
    view = await client.job(id)
    there = [task["node"] for task in view["tasks"]]
    return (view["state"], view["attempt"], there) == ("RUNNING", attempt, [node])


async def _status(client: Client, node: str, status: str) -> bool:
    return bool((await client.node(node))["status"] == status)
