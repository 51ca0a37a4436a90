"""Live events and log streams over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from coordinator import records
from coordinator.api.context import Limits
from coordinator.client.events import Event
from coordinator.model import JobState, PastAttempt, TaskState, Tenant
from coordinator.store import Delete, Put
from tests.api_world import GIB, SPEC, Caller, EngineUnavailable, LogsExpired, Stream, World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = await World.make()
    await world.put_node()
    yield world
    await world.close()


def told(events: list[Event]) -> list[tuple[str, Any]]:
    return [(event.kind, event.data.get("state", event.data.get("name"))) for event in events]


class TestEvents:
    async def test_a_job_is_told_in_all_its_states_with_the_revision_as_id(self, world: World) -> None:
        _, a, _ = await world.callers()
        async with Stream(a) as stream:
            job = await a.post("/v1/jobs", SPEC)
            live = await world.place(job["id"])
            await world.task(live, TaskState.STARTING, started_at_ms=None)
            await world.task(live, TaskState.RUNNING)
            await a.post(f"/v1/jobs/{job['id']}/cancel")
            events = await stream.take(5)
        assert [event.data["state"] for event in events] == [
            "PENDING",
            "ALLOCATED",
            "STARTING",
            "RUNNING",
            "CANCELLING",
        ]
        assert {event.data["id"] for event in events} == {job["id"]}
        assert [int(event.id) for event in events] == [event.data["revision"] for event in events]
        assert [int(event.id) for event in events] == sorted({int(event.id) for event in events})
        assert int(events[0].id) == job["revision"]

    async def test_a_tenant_is_told_only_its_own(self, world: World) -> None:
        """AP-7"""
        admin, a, b = await world.callers()
        async with Stream(a) as mine, Stream(b) as other, Stream(admin) as all_of_it:
            await a.post("/v1/jobs", SPEC)
            await world.put_tenant(Tenant("team-a", 5 * GIB))
            job = await b.post("/v1/jobs", {**SPEC, "name": "of b"})
            await admin.post("/v1/nodes/n1/cordon")
            assert told(await other.take(2)) == [("job", "PENDING"), ("node", "n1")]
            assert told(await mine.take(3)) == [("job", "PENDING"), ("tenant", "team-a"), ("node", "n1")]
            assert len(await all_of_it.take(4)) == 4
            assert job["tenant"] == "team-b"

    async def test_it_resumes_after_the_last_event_from_the_hub_and_from_the_history_of_the_store(
        self, world: World
    ) -> None:
        """On the same instance, and on one that was started later and so knows nothing of it but the store's history."""
        _, a, _ = await world.callers()
        async with Stream(a) as stream:
            first = await a.post("/v1/jobs", SPEC)
            seen = await stream.next()
            assert seen.data["id"] == first["id"]
        missed = [(await a.post("/v1/jobs", SPEC))["id"] for _ in range(3)]
        late = Caller(await world.instance(), "a-token")
        for caller in (a, late):
            async with Stream(caller, seen.id) as stream:
                assert [event.data["id"] for event in await stream.take(len(missed))] == missed
                after = await caller.post("/v1/jobs", SPEC)
                assert (await stream.next()).data["id"] == after["id"], "and goes on with what is new"
                missed.append(after["id"])

    async def test_all_events_of_one_revision_come_again_where_the_stream_broke_between_them(
        self, world: World
    ) -> None:
        _, a, _ = await world.callers()
        async with Stream(a) as stream:
            await a.post("/v1/jobs", SPEC)
            before = await stream.next()
            listed = await a.post("/v1/jobs", [SPEC] * 5)
            half = await stream.take(2)
            assert {event.id for event in half} == {before.id}, "the id comes with the last of a revision"
        ids = [job["id"] for job in listed["items"]]
        async with Stream(a, half[-1].id) as stream:
            again = await stream.take(5)
            assert sorted(event.data["id"] for event in again) == sorted(ids)
            assert int(again[-1].id) == listed["items"][0]["revision"]

    async def test_resync_where_the_history_was_compacted(self, world: World) -> None:
        _, a, _ = await world.callers()
        await a.post("/v1/jobs", SPEC)
        early = world.memory.revision - 1
        for _ in range(3):
            await a.post("/v1/jobs", SPEC)
        await world.memory.compact(world.memory.revision)
        late = Caller(await world.instance(), "a-token")
        async with Stream(late, str(early)) as stream:
            event = await stream.next()
            assert (event.kind, int(event.id)) == ("resync", world.memory.revision)
            job = await late.post("/v1/jobs", SPEC)
            assert (await stream.next()).data["id"] == job["id"]

    async def test_resync_where_the_last_event_is_of_a_future_that_never_was(self, world: World) -> None:
        """A store that was restored from a backup has gone back."""
        _, a, _ = await world.callers()
        async with Stream(a, str(world.memory.revision + 1000)) as stream:
            assert (await stream.next()).kind == "resync"

    async def test_the_hub_forgets_its_oldest_and_the_store_fills_in(self, world: World) -> None:
        _, a, _ = await world.callers(limits=Limits(kept_events=5))
        first = await a.post("/v1/jobs", SPEC)
        ids = [(await a.post("/v1/jobs", SPEC))["id"] for _ in range(30)]
        async with Stream(a, str(first["revision"])) as stream:
            assert [event.data["id"] for event in await stream.take(30)] == ids

    async def test_a_report_that_goes_on_is_no_news_and_one_that_stops_is(self, world: World) -> None:
        admin, _, _ = await world.callers()
        async with Stream(admin) as stream:
            item = await world.memory.get(records.report_key("n1"))
            assert item is not None
            for _ in range(3):
                await world.write(Put(item.key, item.value))
            await world.write(Delete(item.key))
            event = await stream.next()
            assert event.data["change"] == "silent"

    async def test_a_comment_keeps_proxies_awake(self, world: World) -> None:
        _, a, _ = await world.callers(limits=Limits(comment_seconds=0.01))
        async with Stream(a) as stream:
            await stream.answer.content.readline()
            assert (await asyncio.wait_for(stream.answer.content.readline(), 5)).startswith(b":")

    async def test_streams_are_bounded_and_end_with_the_application(self, world: World) -> None:
        _, a, _ = await world.callers(limits=Limits(streams=1))
        async with Stream(a) as stream:
            problem = await a.refused("GET", "/v1/events")
            assert (problem["status"], problem["limit"]) == (429, 1)
            await a.client.server.close()
            with pytest.raises((StopAsyncIteration, aiohttp.ClientError)):
                await stream.next()

    @pytest.mark.parametrize("last", ["x", "-1", "1.5", "9" * 30])
    async def test_a_bad_last_event_is_refused(self, world: World, last: str) -> None:
        _, a, _ = await world.callers()
        problem = await a.refused("GET", "/v1/events", headers={"Last-Event-ID": last})
        assert (problem["status"], problem["field"]) == (400, "Last-Event-ID")


class TestLogs:
    async def test_the_output_is_passed_on_as_it_comes(self, world: World) -> None:
        _, a, _ = await world.callers()
        live = await world.place((await a.post("/v1/jobs", SPEC))["id"])
        await world.task(live, TaskState.RUNNING)
        world.logs.chunks = [b"one\n", b"\xff\xfe raw \0 bytes\n", b"END\n"]
        answer = await a.client.get(
            f"/v1/jobs/{live.id}/logs",
            params={"stream": "stderr", "follow": "1", "tail_bytes": "100"},
            headers={"Authorization": "Bearer a-token"},
        )
        assert answer.status == 200
        assert answer.content_type == "text/plain"
        assert await answer.read() == b"".join(world.logs.chunks)
        assert world.logs.asked == [(f"{live.id}.1.0", "stderr", True, 100)]

    async def test_an_ended_attempt_has_its_output_until_it_expires(self, world: World) -> None:
        """OB-1: 410 and never 500 afterwards."""
        _, a, _ = await world.callers()
        live = await world.place((await a.post("/v1/jobs", SPEC))["id"])
        assert live.allocation is not None
        task = await world.task(live, TaskState.EXITED, exit_code=1)
        waiting = replace(
            live,
            state=JobState.PENDING,
            allocation=None,
            attempt=2,
            past=(PastAttempt(live.allocation, (task,)),),
        )
        await world.write(
            Delete(records.job_key(live.id)),
            Put(records.queue_key("team-a", live.id), records.encode(waiting)),
        )
        path = f"/v1/jobs/{live.id}/logs"
        assert await a.get(path) == "hello\n", "the newest attempt that has run"
        assert await a.get(path, attempt="1") == "hello\n"
        problem = await a.refused("GET", path, attempt="2")
        assert (problem["status"], problem["code"]) == (409, "not_started")
        assert (await a.refused("GET", path, attempt="3"))["status"] == 404
        world.logs.fails_at_start = LogsExpired()
        assert (await a.refused("GET", path, attempt="1"))["status"] == 410
        world.logs.fails_at_start = EngineUnavailable("node n1 is silent")
        assert (await a.refused("GET", path, attempt="1"))["status"] == 503

    async def test_a_job_that_never_started_has_none(self, world: World) -> None:
        _, a, _ = await world.callers()
        job = await a.post("/v1/jobs", SPEC)
        assert (await a.refused("GET", f"/v1/jobs/{job['id']}/logs"))["status"] == 409
        assert (await a.refused("GET", f"/v1/jobs/{job['id']}/logs", task="1"))["status"] == 400
        await a.post(f"/v1/jobs/{job['id']}/cancel")
        assert (await a.refused("GET", f"/v1/jobs/{job['id']}/logs"))["status"] == 410

    async def test_output_that_breaks_off_is_not_taken_for_all_of_it(self, world: World) -> None:
        _, a, _ = await world.callers()
        live = await world.place((await a.post("/v1/jobs", SPEC))["id"])
        await world.task(live, TaskState.RUNNING)
        world.logs.fails_at_end = EngineUnavailable("gone")
        answer = await a.client.get(f"/v1/jobs/{live.id}/logs", headers={"Authorization": "Bearer a-token"})
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
