"""A cluster whose etcd is gone for good, made again from a backup, while the agents and what they run go on."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.client import ApiError, Client
from tests.integration.live import ADMIN, LiveCluster, live_cluster, spec

pytestmark = pytest.mark.etcd


def _until(folder: Path, name: str) -> list[str]:
    """A command that writes down that it began, and ends when the file `name` is there."""
    return ["sh", "-c", f"echo {name} >> {folder}/began; until [ -e {folder}/{name} ]; do sleep 0.1; done"]


def _serai(cluster: LiveCluster, command: str, file: Path) -> None:
    program = [sys.executable, "-c", "from coordinator.cli import main; main()"]
    subprocess.run([*program, command, str(file), "--etcd", cluster.etcd.url], check=True, timeout=60)


async def test_etcd_is_lost_and_restored_while_jobs_run(tmp_path: Path) -> None:
    """RR-10: what the backup shows as running runs on, or has ended meanwhile and ends as it did; nothing is started
    twice; the waiting job gets its turn, tokens and quotas are there; a job younger than the backup is gone, and said so."""
    async with live_cluster(tmp_path, lease_seconds=3) as live:
        await live.start_coordinator()
        admin = await live.bootstrap()
        await live.start_agent("n1", "simulated:4x16GiB:T4")
        await admin.create_tenant("a", quota_memory="64GiB")
        done = await admin.submit(spec("done", "sh", "-c", "exit 3", tenant="a"))
        await admin.wait_for(done["id"], timeout_seconds=40)
        runs, ends = await admin.submit(
            [spec(name, *_until(tmp_path, name), tenant="a", gpus=2) for name in ("runs", "ends")]
        )
        for job in (runs, ends):
            await live.until(lambda job=job: _is(admin, job["id"], "RUNNING"))
        waits = await admin.submit(spec("waits", *_until(tmp_path, "waits"), tenant="a", gpus=4))

        file = tmp_path / "backup.jsonl"
        await asyncio.to_thread(_serai, live, "backup", file)
        later = await admin.submit(spec("later", "true", tenant="a", gpus=4))
        (tmp_path / "ends").touch()
        assert (await admin.wait_for(ends["id"], timeout_seconds=40))["state"] == "SUCCEEDED"

        live.kill("c1", signal.SIGKILL)
        await asyncio.to_thread(live.etcd.kill)
        live.etcd.forget()
        await asyncio.to_thread(live.etcd.start)
        await asyncio.to_thread(_serai, live, "restore", file)
        await live.start_coordinator("c2")
        again = live.client(ADMIN)

        assert (await again.job(done["id"]))["exit_code"] == 3
        assert (await again.tenant("a"))["quota_memory_mib"] == 64 * 1024
        ended = await again.wait_for(ends["id"], timeout_seconds=40)
        assert (ended["state"], ended["exit_code"], ended["attempt"]) == ("SUCCEEDED", 0, 1)
        with pytest.raises(ApiError) as gone:
            await again.job(later["id"])
        assert gone.value.status == 404
        await live.until(lambda: _is(again, runs["id"], "RUNNING"))
        (tmp_path / "runs").touch()
        (tmp_path / "waits").touch()
        for job in (runs, waits):
            view = await again.wait_for(job["id"], timeout_seconds=40)
            assert (view["state"], view["attempt"]) == ("SUCCEEDED", 1), live.logs()
        assert sorted((tmp_path / "began").read_text().split()) == ["ends", "runs", "waits"]
        assert await live.keys("grants/") == []


async def _is(client: Client, id: str, state: str) -> bool:
    return bool((await client.job(id))["state"] == state)
