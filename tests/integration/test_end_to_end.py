"""A job end to end on a real etcd and a real Docker Engine, through HTTP only: submit, container with exactly its
devices and limits, exit, slices free, next job; and every way in which a job can end otherwise."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from coordinator.client import ApiError, Client
from tests.docker_engine import DockerEngine
from tests.integration.live import LiveCluster, live_cluster, spec

pytestmark = [pytest.mark.etcd, pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    tmp_path_factory: pytest.TempPathFactory, docker_engine: DockerEngine
) -> AsyncIterator[tuple[LiveCluster, Client]]:
    """One for all tests here: each leaves it empty."""
    folder = tmp_path_factory.mktemp("end-to-end")
    async with live_cluster(folder, cluster="end-to-end", launch_retries=1, back_off_seconds=1) as live:
        await live.start_coordinator()
        admin = await live.bootstrap()
        await live.start_agent(
            "n1", "simulated:2x16GiB:T4", "docker", "--docker-socket", str(docker_engine.socket)
        )
        await admin.create_tenant("a", quota_memory="32GiB")
        yield live, admin


async def _logs(client: Client, id: str) -> str:
    return b"".join([chunk async for chunk in client.logs(id)]).decode()


async def test_a_container_sees_exactly_its_slice(cluster: tuple[LiveCluster, Client]) -> None:
    """EX-9, EX-10, RR-9: device nodes, environment and limits are those of its own record."""
    live, admin = cluster
    script = 'ls /dev | grep nvidia; echo "$NVIDIA_VISIBLE_DEVICES|$SERAI_GPU_MEMORY_MIB|$SERAI_GPU_COMPUTE_MILLI"; cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null; true'
    one = spec(
        "one",
        "sh",
        "-c",
        script,
        tenant="a",
        gpus={"count": 1, "memory": "4GiB", "compute": "25%"},
        memory="96MiB",
    )
    none = spec("none", "sh", "-c", script, tenant="a")
    first = await admin.submit(one)
    second = await admin.submit(none)
    done = await admin.wait_for(first["id"], timeout_seconds=60)
    assert done["state"] == "SUCCEEDED", live.logs()
    devices, environment, limit = (await _logs(admin, first["id"])).split()
    piece = done["tasks"][0]["slices"][0]
    assert devices == "nvidia0"
    assert environment == f"{piece['gpu']}|4096|250"
    assert int(limit) == 96 << 20
    assert (await admin.wait_for(second["id"], timeout_seconds=60))["state"] == "SUCCEEDED"
    assert (await _logs(admin, second["id"])).split()[0].split("|")[0] == "void"


async def test_when_a_job_ends_the_next_one_starts(cluster: tuple[LiveCluster, Client]) -> None:
    live, admin = cluster
    whole = {"tenant": "a", "gpus": 2}
    first = await admin.submit(spec("first", "sleep", "2", **whole))
    second = await admin.submit(spec("second", "true", **whole))
    await live.until(lambda: _is(admin, first["id"], "RUNNING"))
    waiting = await admin.job(second["id"])
    assert waiting["state"] == "PENDING"
    queue = await admin.queue()
    assert queue["items"][0]["reason"]["code"] == "not_enough_idle_gpus"
    assert (await admin.wait_for(second["id"], timeout_seconds=60))["state"] == "SUCCEEDED"
    ended = (await admin.job(first["id"]))["ended_at"]
    assert ended <= (await admin.job(second["id"]))["started_at"]


async def test_cancel_while_pending_starting_and_running(cluster: tuple[LiveCluster, Client]) -> None:
    """CT-1: a cancel is legal in every state, ends in CANCELLED, and frees what was held."""
    live, admin = cluster
    whole: dict[str, Any] = {"tenant": "a", "gpus": 2, "stop_grace": "1s"}
    running = await admin.submit(spec("running", "sleep", "600", **whole))
    pending = await admin.submit(spec("pending", "sleep", "600", **whole))
    await live.until(lambda: _is(admin, running["id"], "RUNNING"))
    await admin.cancel(pending["id"])
    assert (await admin.wait_for(pending["id"], timeout_seconds=10))["state"] == "CANCELLED"
    await admin.cancel(running["id"])
    assert (await admin.wait_for(running["id"], timeout_seconds=30))["state"] == "CANCELLED"
    starting = await admin.submit(spec("starting", "sleep", "600", **whole))
    await admin.cancel(starting["id"])  # in whatever state it is a few milliseconds after its submit
    assert (await admin.wait_for(starting["id"], timeout_seconds=30))["state"] == "CANCELLED"
    assert await live.keys("grants/") == []
    assert await live.keys("jobs/") == []


async def test_failures_are_told_apart(cluster: tuple[LiveCluster, Client]) -> None:
    """EX-1, EX-2, EX-4: exit code, out of memory, an image that cannot be had, a command that is not there."""
    _live, admin = cluster
    exits = await admin.submit(spec("exits", "sh", "-c", "exit 3", tenant="a"))
    # dd holds one block of 200 MiB in memory, above the limit of 64 MiB
    hungry = await admin.submit(
        spec("hungry", "dd", "if=/dev/zero", "of=/dev/null", "bs=200M", "count=1", tenant="a")
    )
    image = await admin.submit(
        spec("image", "true", tenant="a") | {"image": "no.such.registry.invalid/none:1"}
    )
    command = await admin.submit(spec("command", "/no/such/program", tenant="a"))
    seen = {}
    for job in (exits, hungry, image, command):
        view = await admin.wait_for(job["id"], timeout_seconds=90)
        seen[view["name"]] = (view["state"], view["exit_code"], view["reason"]["code"])
    assert seen["exits"] == ("FAILED", 3, "exit_code")
    assert seen["hungry"] == ("FAILED", 137, "out_of_memory")
    # A registry that cannot be reached may be back soon, so it is tried again before it is given up (EX-3).
    assert seen["image"] == ("FAILED", 125, "launch_failed")
    assert seen["command"][0] == "FAILED"
    assert seen["command"][1] in (125, 127)


async def test_a_job_that_can_never_run_is_refused(cluster: tuple[LiveCluster, Client]) -> None:
    """QF-2: at submit, with the limit and the value."""
    _live, admin = cluster
    with pytest.raises(ApiError) as refused:
        await admin.submit(spec("huge", tenant="a", gpus=9))
    assert refused.value.status == 422
    assert refused.value.code == "task_larger_than_any_node"
    assert "2" in str(refused.value)


async def test_the_state_can_be_read_with_etcdctl(cluster: tuple[LiveCluster, Client]) -> None:
    """What stands in etcd is JSON under the documented keys, and never the token."""
    live, admin = cluster
    job = await admin.submit(spec("shown", "true", tenant="a", gpus=1))
    await admin.wait_for(job["id"], timeout_seconds=60)
    record = json.loads(live.etcd.etcdctl("get", f"/serai/done/{job['id']}", "--print-value-only").stdout)
    assert (record["id"], record["state"]) == (job["id"], "SUCCEEDED")
    everything = live.etcd.etcdctl("get", "--prefix", "/serai/").stdout
    assert "/serai/nodes/n1/inventory" in everything
    assert "admin-token-of-the-tests" not in everything


async def _is(client: Client, id: str, state: str) -> bool:
    return bool((await client.job(id))["state"] == state)
