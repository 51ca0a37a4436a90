"""A job with more tasks than one transaction of etcd takes writes (128 by default)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live import live_cluster, spec

pytestmark = pytest.mark.etcd


async def test_a_job_of_150_tasks_runs_and_ends(tmp_path: Path) -> None:
    """ET-5: what is written is cut to what the store takes, and no part of it is lost."""
    async with live_cluster(tmp_path) as live:
        await live.start_coordinator()
        admin = await live.bootstrap()
        await live.start_agent(
            "n1", "simulated:1x16GiB:T4", "process", "--cpu-milli", "64000", "--memory-mib", "64000"
        )
        await admin.create_tenant("a", quota_memory="16GiB")
        job = await admin.submit(spec("many", "true", tenant="a", tasks=150))
        ended = await admin.wait_for(job["id"], timeout_seconds=100)
        assert ended["state"] == "SUCCEEDED", live.logs()
        assert len(ended["tasks"]) == 150
        assert {task["exit_code"] for task in ended["tasks"]} == {0}
        assert await live.keys("grants/") == []
