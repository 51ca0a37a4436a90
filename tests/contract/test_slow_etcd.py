"""Submits while a real etcd is slow: they take longer, or are told to come back; none that was acknowledged is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attrs import frozen

from coordinator.etcd_store import EtcdSettings, EtcdStore
from coordinator.model import Job
from coordinator.records import QUEUE, decode
from tests.api_world import SPEC, Caller, World
from tests.etcd_server import EtcdServer

pytestmark = pytest.mark.etcd

QUEUE_JOBS = 40


@frozen
class Slow:
    world: World
    server: EtcdServer

    async def submit(self, caller: Caller, name: str) -> tuple[int, str, float]:
        """Status, id (empty unless acknowledged) and seconds."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        status, answer, headers = await caller.call(
            "POST", "/v1/jobs", {**SPEC, "name": name}, headers={"Idempotency-Key": name}
        )
        if status in (429, 503):
            assert int(headers["Retry-After"]) >= 1, answer
        return status, answer["id"] if status == 201 else "", loop.time() - began

    async def queued(self) -> list[Job]:
        listing = await self.world.store.list(QUEUE)
        return [decode(Job, item.value) for item in listing.items]


@pytest.fixture
async def slow(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Slow]:
    """The parameter is the deadline of a call in seconds."""
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    store = EtcdStore(EtcdSettings.from_url(server.url, timeout_seconds=request.param))
    try:
        world = await World.make(store, submit_queue_jobs=QUEUE_JOBS)
        await world.put_node()
        yield Slow(world, server)
        server.thaw()
        await world.close()
    finally:
        await store.close()
        server.stop()


@pytest.mark.parametrize("slow", [30.0], indirect=True)
async def test_a_slow_etcd_slows_submits_and_loses_none(slow: Slow) -> None:
    """Frozen and thawed all the time, within the deadline of a call."""
    _, a, _ = await slow.world.callers()
    await slow.submit(a, "first")

    async def stutter() -> None:
        while True:
            slow.server.freeze()
            await asyncio.sleep(0.6)
            slow.server.thaw()
            await asyncio.sleep(0.1)

    stuttering = asyncio.create_task(stutter())
    answers = [await asyncio.gather(*(slow.submit(a, f"{r}-{n}") for n in range(20))) for r in range(4)]
    stuttering.cancel()
    slow.server.thaw()
    told = [answer for round in answers for answer in round]
    assert {status for status, _, _ in told} == {201}
    assert max(seconds for _, _, seconds in told) > 0.3
    assert {job.id for job in await slow.queued()} >= {id for _, id, _ in told}
    assert len(await slow.queued()) == 81


@pytest.mark.parametrize("slow", [1.0], indirect=True)
async def test_beyond_the_queue_is_429_and_every_retry_ends_in_one_job(slow: Slow) -> None:
    """AP-8: etcd stands still longer than a call may take, so answers are lost, and more arrive than may wait."""
    _, a, _ = await slow.world.callers()
    await slow.submit(a, "warm")
    slow.server.freeze()
    names = [f"job-{n}" for n in range(3 * QUEUE_JOBS)]
    sending = [asyncio.create_task(slow.submit(a, name)) for name in names]
    await asyncio.sleep(2.5)
    slow.server.thaw()
    first = dict(zip(names, await asyncio.gather(*sending), strict=True))
    statuses = Counter(status for status, _, _ in first.values())
    assert statuses[429] > 0
    assert statuses[201] > 0
    assert set(statuses) <= {201, 429, 503}
    acknowledged = {id for _, id, _ in first.values() if id}
    assert {job.id for job in await slow.queued()} >= acknowledged
    for name in names:
        if not first[name][1]:
            assert (await slow.submit(a, name))[0] == 201
    held = Counter(job.spec.name for job in await slow.queued())
    assert held == Counter(["warm", *names]), "each of them once"
