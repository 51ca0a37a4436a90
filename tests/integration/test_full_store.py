"""ET-3: etcd has no space left while jobs run. New work is refused with the way out, what runs goes on, and when there is
space again its end is recorded; nothing that was acknowledged is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.client import ApiError, Client
from coordinator.store import Put, StoreFull
from tests.integration.live import ADMIN, Flow, LiveCluster, live_cluster, spec

pytestmark = pytest.mark.etcd

QUOTA_BYTES = 4 << 20


async def _fill(live: LiveCluster) -> None:
    """Until etcd raises its alarm. Nothing is written over: a compaction at that moment would make room. etcd sees how
    large it is only when it commits, ten times a second, so a quick one takes more than its quota before that."""
    try:
        for number in range(1_000):
            await live.store.txn([], [Put(f"/other/{number}", b"x" * 200_000)])
    except StoreFull:
        return
    raise AssertionError("etcd took more than its quota")


def _mend(live: LiveCluster, revision: int) -> None:
    """As deploy/README.md says. What is deleted frees nothing before the compaction."""
    live.etcd.etcdctl("compact", str(revision))
    live.etcd.etcdctl("defrag")
    live.etcd.etcdctl("alarm", "disarm")


async def test_a_full_etcd_refuses_new_work_and_loses_none(tmp_path: Path) -> None:
    options = ("--quota-backend-bytes", str(QUOTA_BYTES))
    async with live_cluster(tmp_path, options, lease_seconds=3, node_lease_seconds=3) as live:
        await live.start_coordinator()
        admin = await live.bootstrap()
        await live.start_agent("n1", "simulated:8x16GiB:T4")
        await admin.create_tenant("a", quota_memory="256GiB")
        script = f"while [ ! -e {tmp_path}/end ]; do sleep 0.1; done"
        ends, stays = [
            await admin.submit(spec(name, "sh", "-c", command, tenant="a", gpus=1))
            for name, command in (("ends", script + "; exit 3"), ("stays", "sleep 600"))
        ]
        for job in (ends, stays):
            await live.until(lambda id=job["id"]: _is(admin, id, "RUNNING"))  # type: ignore[misc]
        hasty = live.client(ADMIN, retry_seconds=0)
        flow = Flow(hasty, tmp_path / "ran")
        await flow.goes_on(live, jobs=2)

        await _fill(live)
        with pytest.raises(ApiError) as refused:
            await hasty.submit(spec("late", "true", tenant="a"), idempotency_key="late")
        assert (refused.value.status, refused.value.code) == (503, "store_full")
        assert "NOSPACE" in (refused.value.hint or "")
        with pytest.raises(ApiError, match="takes no writes"):
            await hasty.cancel(stays["id"])
        (tmp_path / "end").touch()
        # For longer than a node may be silent: its reports are refused, its lease is kept alive all the same.
        await live.until(lambda: live.parts["n1"].log.read_text().count("report was not written") >= 5)
        assert {(await admin.job(job["id"]))["state"] for job in (ends, stays)} == {"RUNNING"}
        assert (await admin.node("n1"))["status"] == "ready"

        await asyncio.to_thread(live.etcd.etcdctl, "del", "--prefix", "/other/")
        await asyncio.to_thread(_mend, live, (await live.store.list("/other/")).revision)
        ended = await admin.wait_for(ends["id"], timeout_seconds=40)
        assert (ended["state"], ended["exit_code"], ended["attempt"]) == ("FAILED", 3, 1)
        late = await admin.submit(spec("late", "true", tenant="a"), idempotency_key="late")
        assert (await admin.wait_for(late["id"], timeout_seconds=40))["state"] == "SUCCEEDED"
        await flow.goes_on(live, jobs=2)
        await flow.end()
        await flow.check(live, admin)
        going = await admin.job(stays["id"])
        assert (going["state"], going["attempt"]) == ("RUNNING", 1)
        await admin.cancel(stays["id"])
        assert (await admin.wait_for(stays["id"], timeout_seconds=40))["state"] == "CANCELLED"
        assert len([job async for job in admin.jobs(name="late")]) == 1
        assert isinstance(flow.refusal, ApiError)
        assert flow.refusal.code == "store_full"


async def _is(client: Client, id: str, state: str) -> bool:
    return bool((await client.job(id))["state"] == state)
