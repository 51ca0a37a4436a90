"""A job end to end through Nomad (the fake, held against recorded answers of a real one): submitted over HTTP, pinned
to the chosen node, followed to its end; its slices free, the next job starts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from coordinator.client import Client
from jobspecs.nomad_job import nomad_job_id
from tests.integration.live import ADMIN, spec
from tests.integration.live_nomad import Nomad, nomad_cluster

pytestmark = [pytest.mark.etcd, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nomad(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Nomad]:
    """One for all tests here, in their order: each leaves it empty, the later ones with other coordinators."""
    async with nomad_cluster(tmp_path_factory.mktemp("nomad"), lease_seconds=3) as nomad:
        yield nomad


async def test_jobs_run_pinned_and_the_next_one_starts(nomad: Nomad) -> None:
    sleeps = spec("sleeps", "sh", "-c", "sleep 100", tenant="a", gpus=2)
    first, second = [await nomad.admin.submit(sleeps) for _ in range(2)]
    third = await nomad.admin.submit(spec("third", "sh", "-c", "echo done; exit 3", tenant="a", gpus=2))
    for job in (first, second):
        await nomad.live.until(lambda id=job["id"]: _is(nomad.admin, id, "RUNNING"))  # type: ignore[misc]
    placed = {(await nomad.admin.job(job["id"]))["tasks"][0]["node"] for job in (first, second)}
    assert placed == {"n1", "n2"}
    assert (await nomad.admin.job(third["id"]))["state"] == "PENDING"
    running = {
        container.labels["serai.job"]: container for container in nomad.fake.clients.containers.values()
    }
    for job in (first, second):
        view = await nomad.admin.job(job["id"])
        assert running[job["id"]].node == nomad.nodes[view["tasks"][0]["node"]]
        assert len(running[job["id"]].devices) == 2
    await nomad.admin.cancel(first["id"])
    assert (await nomad.admin.wait_for(first["id"], timeout_seconds=30))["state"] == "CANCELLED"
    ended = await nomad.admin.wait_for(third["id"], timeout_seconds=30)
    assert (ended["state"], ended["exit_code"]) == ("FAILED", 3)
    logs = b"".join([chunk async for chunk in nomad.admin.logs(third["id"])])
    assert logs == b"done\n"
    await nomad.admin.cancel(second["id"])
    await nomad.admin.wait_for(second["id"], timeout_seconds=30)
    assert await nomad.live.keys("grants/") == []


async def test_a_coordinator_that_dies_after_registering_starts_nothing_twice(nomad: Nomad) -> None:
    """RR-1: the next leader finds the attempt in Nomad by its id, and the attempt number stays."""
    job = await nomad.admin.submit(spec("long", "sh", "-c", "sleep 100", tenant="a", gpus=1))
    await nomad.live.until(lambda: _is(nomad.admin, job["id"], "RUNNING"))
    nomad.live.kill("c1")
    await nomad.start_coordinator("c2")
    admin = nomad.live.client(ADMIN)
    await nomad.live.until(lambda: nomad.live.leader_is("c2"))
    await nomad.live.until(lambda: _is(admin, job["id"], "RUNNING"))
    assert len(nomad.containers(job["id"])) == 1
    assert (await admin.job(job["id"]))["attempt"] == 1
    await admin.cancel(job["id"])
    assert (await admin.wait_for(job["id"], timeout_seconds=30))["state"] == "CANCELLED"


@pytest.mark.timeout(240)
async def test_two_leaders_register_one_attempt(nomad: Nomad) -> None:
    """Nomad's check of a create-only register is not atomic. The first leader is paused when its register was checked
    and not yet written; the second finds the attempt granted and not started, and registers it too; both are written."""
    first = await nomad.live.leader()
    nomad.web.race = race = asyncio.Barrier(2)
    nomad.web.requests.clear()
    job = (await nomad.live.client(ADMIN).submit(spec("raced", "sleep", "100", tenant="a", gpus=1)))["id"]
    await nomad.live.until(lambda: race.n_waiting == 1)
    nomad.live.kill(first, signal.SIGSTOP)
    await nomad.start_coordinator("c3")
    admin = nomad.live.client(ADMIN)
    await nomad.live.until(lambda: _is(admin, job, "RUNNING"))
    nomad.web.race = None
    nomad.live.kill(first, signal.SIGCONT)
    assert [method for method, _ in nomad.web.requests].count("POST") == 2
    assert nomad.fake.jobs["default", nomad_job_id("a", "raced", job, 1)]["Version"] == 0
    nomad.finish(job, "raced", exit_code=3)
    ended = await admin.wait_for(job, timeout_seconds=40)
    assert (ended["state"], ended["attempt"], ended["exit_code"]) == ("FAILED", 1, 3)
    assert (len(nomad.containers(job)), nomad.fake.clients.overlaps) == (1, [])
    await nomad.live.until(lambda: _nothing_is_granted(nomad))


async def _nothing_is_granted(nomad: Nomad) -> bool:
    return not await nomad.live.keys("grants/")


async def _is(client: Client, id: str, state: str) -> bool:
    return bool((await client.job(id))["state"] == state)
