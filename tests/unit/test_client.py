"""The HTTP client: what it sends again and what it never does, pages, resumed streams, and waiting for an end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from random import Random

import pytest
from aiohttp import web

from coordinator.client import AnswerUnreadable, ApiError, Client, Unreachable, WaitedTooLong
from coordinator.client.events import parse
from tests.fakeapi import DROP, Answer, FakeApi, ended, job, page, problem

SPEC = {"name": "train", "image": "busybox:1.36"}


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as fake:
        yield fake


@pytest.fixture
async def client(api: FakeApi) -> AsyncIterator[Client]:
    async with Client(api.address, "secret", retry_seconds=5, poll_seconds=0.05, random=Random(1)) as made:
        yield made


async def test_a_submit_whose_answer_is_lost_is_sent_again_with_the_same_key(
    api: FakeApi, client: Client
) -> None:
    """AP-8: the client's half; the coordinator answers the same key with the same job."""
    api.on("POST", "/v1/jobs", DROP, DROP, (201, job()))
    assert (await client.submit(SPEC))["id"] == job()["id"]
    keys = [call.headers["Idempotency-Key"] for call in api.asked("POST", "/v1/jobs")]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert len(keys[0]) >= 16


async def test_two_submits_have_two_keys(api: FakeApi, client: Client) -> None:
    api.on("POST", "/v1/jobs", (201, job()))
    await client.submit(SPEC)
    await client.submit(SPEC)
    first, second = api.asked("POST", "/v1/jobs")
    assert first.headers["Idempotency-Key"] != second.headers["Idempotency-Key"]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_not_now_is_asked_again(api: FakeApi, client: Client, status: int) -> None:
    api.on("POST", "/v1/jobs", problem(status, "not now"), (201, job()))
    assert (await client.submit(SPEC))["state"] == "RUNNING"


async def test_retry_after_is_kept(api: FakeApi, client: Client) -> None:
    api.on("GET", "/v1/cluster", problem(503, "no leader", {"Retry-After": "1"}), {"version": "1"})
    begin = asyncio.get_running_loop().time()
    await client.cluster()
    assert asyncio.get_running_loop().time() - begin >= 1


async def test_it_gives_up_when_the_retry_time_is_over(api: FakeApi) -> None:
    api.on("GET", "/v1/cluster", problem(503, "no leader"))
    async with Client(api.address, retry_seconds=0.5, random=Random(1)) as client:
        with pytest.raises(ApiError) as caught:
            await client.cluster()
    assert caught.value.status == 503
    assert len(api.calls) > 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 422, 500])
async def test_no_is_not_asked_again(api: FakeApi, client: Client, status: int) -> None:
    api.on("GET", "/v1/jobs/x", problem(status, "no"))
    with pytest.raises(ApiError):
        await client.job("x")
    assert len(api.calls) == 1


async def test_what_may_not_arrive_twice_is_not_sent_again_when_its_answer_was_lost(
    api: FakeApi, client: Client
) -> None:
    api.on("POST", "/v1/tokens", DROP, (201, {"token": "t"}))
    with pytest.raises(Unreachable):
        await client.create_token("admin")
    assert len(api.calls) == 1


async def test_nobody_there_is_unreachable() -> None:
    async with Client("http://127.0.0.1:1", retry_seconds=0) as client:
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
            await client.cluster()


async def test_a_problem_keeps_its_fields(api: FakeApi, client: Client) -> None:
    faults = [
        {"field": "gpus.memory", "limit": "80GiB", "value": "200GiB", "message": "too large"},
        {"field": "name", "limit": 128, "value": 300, "message": "too long"},
    ]
    api.on(
        "POST", "/v1/jobs", problem(422, "two faults", code="bad_value", errors=faults, hint="ask for less")
    )
    with pytest.raises(ApiError) as caught:
        await client.submit(SPEC)
    error = caught.value
    assert (error.status, error.code, error.field, error.limit, error.value, error.hint) == (
        422, "bad_value", "gpus.memory", "80GiB", "200GiB", "ask for less"
    )  # fmt: skip
    assert [fault["field"] for fault in error.errors] == ["gpus.memory", "name"]


async def test_something_that_is_not_serai_is_told_apart(api: FakeApi, client: Client) -> None:
    api.on("GET", "/v1/cluster", Answer(200, "<html>welcome</html>"))
    with pytest.raises(AnswerUnreadable):
        await client.cluster()
    api.on("GET", "/v1/whoami", Answer(403, "<html>proxy says no</html>"))
    with pytest.raises(ApiError, match="403"):
        await client.whoami()


async def test_pages_are_read_to_the_end_and_no_further_than_asked(api: FakeApi, client: Client) -> None:
    """AP-9: the cursor of the answer is handed back, and the end is where there is none."""
    pages = [page(job("a"), job("b"), cursor="c1"), page(job("c"), cursor=None)]
    api.on("GET", "/v1/jobs", *pages)
    assert [each["id"] async for each in client.jobs(tenant="vision")] == ["a", "b", "c"]
    assert [call.query.get("cursor") for call in api.calls] == [None, "c1"]
    assert all(call.query["tenant"] == "vision" for call in api.calls)
    api.calls.clear()
    api.on("GET", "/v1/jobs", *pages)
    assert [each["id"] async for each in client.jobs(limit=2)] == ["a", "b"]
    assert len(api.calls) == 1


async def test_names_in_paths_are_quoted(api: FakeApi, client: Client) -> None:
    """AP-1: an odd name is one path segment."""
    with pytest.raises(ApiError):
        await client.tenant("a/b?c#d ü")
    assert (
        api.calls[0].path == "/v1/tenants/a/b?c#d ü"
    )  # as the server decodes it, query and fragment included
    assert api.calls[0].query == {}


async def test_events_resume_after_the_last_one_seen(api: FakeApi, client: Client) -> None:
    def streams(text: str):  # type: ignore[no-untyped-def]
        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(text.encode())
            return response

        return answer

    api.on(
        "GET",
        "/v1/events",
        streams(': hello\n\nid: 5\nevent: job\ndata: {"id": "a"}\n\nid: 6\nevent: node\ndata: {"name"'),
        streams('id: 6\nevent: node\ndata: {"name": "n1"}\n\n'),
    )
    seen = []
    async for event in client.events("4"):
        seen.append((event.id, event.kind, event.data))
        if len(seen) == 2:
            break
    assert seen == [("5", "job", {"id": "a"}), ("6", "node", {"name": "n1"})]
    assert [call.headers.get("Last-Event-ID") for call in api.calls] == ["4", "5"]


async def test_event_lines() -> None:
    async def lines() -> AsyncIterator[bytes]:
        for line in [b": c\r\n", b"\r\n", b"id: 9\n", b"event:job\n", b"data: {\n", b'data: "id": "a"}\n', b"\n",
                     b"data: no json\n", b"\n"]:  # fmt: skip
            yield line

    events = [event async for event in parse(lines())]
    assert [(event.id, event.kind, event.data) for event in events] == [
        ("9", "job", {"id": "a"}),
        ("9", "message", {"text": "no json"}),
    ]


async def test_logs_go_on_where_a_broken_stream_ended(api: FakeApi, client: Client) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b"one\ntwo")
        assert request.transport is not None
        request.transport.close()
        return response

    async def whole(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"one\ntwo\nthree\n")

    api.on("GET", "/v1/jobs/x/logs", broken, whole)
    text = b"".join([chunk async for chunk in client.logs("x", follow=True)])
    assert text == b"one\ntwo\nthree\n"
    assert [call.query["follow"] for call in api.calls] == ["1", "1"]


async def test_waiting_ends_with_the_job_though_no_event_comes(api: FakeApi, client: Client) -> None:
    api.on("GET", "/v1/jobs/x", job("x", state="PENDING"), job("x"), ended("x", "FAILED", 3))
    end = await client.wait_for("x")
    assert (end["state"], end["exit_code"]) == ("FAILED", 3)


async def test_an_event_wakes_the_wait_at_once(api: FakeApi) -> None:
    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        # Only once the client has looked and sleeps; so nothing but this event can end its wait in time.
        while len(api.asked("GET", "/v1/jobs/x")) < 1:
            await asyncio.sleep(0.01)
        await response.write(b'id: 1\nevent: job\ndata: {"id": "x"}\n\n')
        await asyncio.sleep(30)
        return response

    api.on("GET", "/v1/events", events)
    api.on("GET", "/v1/jobs/x", job("x"), ended("x"))
    async with Client(api.address, poll_seconds=30) as client:
        end = await asyncio.wait_for(client.wait_for("x"), 10)
    assert end["state"] == "SUCCEEDED"


async def test_a_wait_that_takes_too_long_says_so(api: FakeApi, client: Client) -> None:
    api.on("GET", "/v1/jobs/x", job("x"))
    with pytest.raises(WaitedTooLong):
        await client.wait_for("x", timeout_seconds=0.2)


async def test_the_token_is_sent(api: FakeApi, client: Client) -> None:
    api.on("GET", "/v1/whoami", {"role": "admin"})
    await client.whoami()
    assert api.calls[0].headers["Authorization"] == "Bearer secret"
