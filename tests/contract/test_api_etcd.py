"""The API on a real etcd: what depends on the store being a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator import records
from coordinator.etcd_store import EtcdSettings, EtcdStore
from coordinator.model import TaskState
from tests.api_world import SPEC, Caller, Stream, World
from tests.etcd_server import EtcdServer

pytestmark = pytest.mark.etcd


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A server of its own, since the API's keys are the same for every test."""
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    store = EtcdStore(EtcdSettings.from_url(server.url))
    try:
        world = await World.make(store)
        await world.put_node()
        yield world
        await world.close()
    finally:
        await store.close()
        server.stop()


async def test_a_job_is_submitted_found_placed_told_and_cancelled(world: World) -> None:
    _, a, b = await world.callers()
    other = Caller(await world.instance(), "a-token")
    async with Stream(a) as stream:
        job = await a.post("/v1/jobs", SPEC)
        assert (await other.get(f"/v1/jobs/{job['id']}"))["state"] == "PENDING"
        assert (await b.refused("GET", f"/v1/jobs/{job['id']}"))["status"] == 404
        live = await world.place(job["id"])
        await world.task(live, TaskState.RUNNING)
        assert (await other.post(f"/v1/jobs/{job['id']}/cancel"))["state"] == "CANCELLING"
        states = [event.data["state"] for event in await stream.take(4)]
    assert states == ["PENDING", "ALLOCATED", "RUNNING", "CANCELLING"]


async def test_one_idempotency_key_on_two_instances_is_one_job_in_spite_of_lost_answers(world: World) -> None:
    """AP-8"""
    _, first, _ = await world.callers()
    second = Caller(await world.instance(), "a-token")
    world.store.only, world.store.lost_replies = records.QUEUE, 2
    answers = await asyncio.gather(
        *((first, second)[n % 2].post("/v1/jobs", SPEC, **{"Idempotency-Key": "k"}) for n in range(20))
    )
    assert all(answer == answers[0] for answer in answers)
    assert len((await world.store.list(records.QUEUE)).items) == 1


async def test_a_full_list_is_one_transaction(world: World) -> None:
    """The bound of a list and etcd's --max-txn-ops are the same number."""
    _, a, _ = await world.callers()
    jobs = await a.post("/v1/jobs", [SPEC] * 125, **{"Idempotency-Key": "k"})
    assert len({job["id"] for job in jobs["items"]}) == 125
    items = (await world.store.list(records.QUEUE)).items
    assert {item.create_revision for item in items} == {jobs["items"][0]["revision"]}


async def test_a_stream_resumes_from_history_and_resyncs_where_it_was_compacted(world: World) -> None:
    _, a, _ = await world.callers()
    first = await a.post("/v1/jobs", SPEC)
    ids = [(await a.post("/v1/jobs", SPEC))["id"] for _ in range(5)]
    late = Caller(await world.instance(), "a-token")
    async with Stream(late, str(first["revision"])) as stream:
        assert [event.data["id"] for event in await stream.take(5)] == ids
    newest = (await world.store.list(records.QUEUE)).revision
    await world.store.compact(newest)
    async with Stream(late, str(first["revision"])) as stream:
        assert (await stream.next()).kind == "resync"
