"""Clients that take their time, go away without a word, or hold on to everything: others are served meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from aiohttp import web

from coordinator.api.app import make_runner
from coordinator.api.context import Limits
from tests.api_world import SPEC, Caller, World

HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-token\r\nContent-Type: application/json\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = await World.make()
    await made.put_node()
    yield made
    await made.close()


async def _open(caller: Caller, *lines: bytes) -> Connection:
    reader, writer = await asyncio.open_connection(caller.client.host, caller.client.port)
    writer.writelines(lines)
    await writer.drain()
    return reader, writer


async def test_slow_and_half_open_requests_hold_nobody_up(world: World) -> None:
    """A hundred that send half a head or half a body, and never another byte; and as many that close in the middle. No
    job comes of them, and everybody else is served at once."""
    _, a, b = await world.callers()
    halves = [
        (HEAD[:60],),
        (HEAD, b"Content-Length: 500\r\n\r\n", b'{"image": "'),
        (b"",),
        (HEAD, b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"),
    ]
    left = [await _open(a, *halves[number % 4]) for number in range(100)]
    for number in range(100):
        _, writer = await _open(a, *halves[number % 4])
        writer.transport.abort()
    began = time.monotonic()
    for _ in range(20):
        assert (await b.post("/v1/jobs", SPEC))["state"] == "PENDING"
        await b.get("/v1/jobs")
    assert time.monotonic() - began < 20
    assert (await a.get("/v1/jobs"))["items"] == []
    for _, writer in left:
        writer.transport.abort()


async def test_a_body_that_never_comes_ends_with_the_time_of_a_request(world: World) -> None:
    _, a, _ = await world.callers(limits=Limits(request_seconds=0.5))
    reader, writer = await _open(a, HEAD, b"Content-Length: 500\r\n\r\n{")
    answer = await asyncio.wait_for(reader.read(2000), 20)
    assert answer.startswith(b"HTTP/1.1 503"), answer
    writer.transport.abort()


async def test_half_a_head_has_a_time_limit(world: World) -> None:
    """A client that says a little of its head from time to time, for ever (slow loris): its connection is closed on time,
    whatever it goes on saying, and the time of a request that is under way is not cut."""
    _, a, _ = await world.callers(limits=Limits(request_seconds=3))
    runner = make_runner(a.client.app, Limits(head_seconds=1))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    dribbling, dribbler = await asyncio.open_connection(host, port)
    silent, silent_writer = await asyncio.open_connection(host, port)
    slow, slow_writer = await asyncio.open_connection(host, port)
    slow_writer.write(HEAD + b"Content-Length: 500\r\n\r\n{")
    dribbler.write(HEAD)

    async def dribble() -> None:
        while True:
            dribbler.write(b"X-More: 1\r\n")
            await asyncio.sleep(0.05)

    saying = asyncio.create_task(dribble())
    async with asyncio.timeout(20):
        with suppress(ConnectionError):
            assert await dribbling.read() == b""
        assert await silent.read() == b""
        assert (await slow.readline()).startswith(b"HTTP/1.1 503"), "it had the time of a request"
    saying.cancel()
    for writer in (dribbler, silent_writer, slow_writer):
        writer.transport.abort()
    await site.stop()


async def test_a_thousand_idle_streams_are_bounded_and_others_are_served(world: World) -> None:
    """As many streams as the limit allows stand, the others are told so (429); submits and lists go on, an event
    reaches all that stand, and a place is free again once a client is gone."""
    _, a, b = await world.callers(limits=Limits(streams=200))
    head = b"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-token\r\n\r\n"
    streams, refused = [], 0
    for _ in range(1000):
        reader, writer = await _open(a, head)
        line = await asyncio.wait_for(reader.readline(), 20)
        if b" 200 " in line:
            streams.append((reader, writer))
        else:
            assert b" 429 " in line, line
            refused += 1
            writer.transport.abort()
    assert (len(streams), refused) == (200, 800)
    assert (await b.post("/v1/jobs", SPEC))["state"] == "PENDING"
    job = await a.post("/v1/jobs", SPEC)
    for reader, _ in streams:
        await asyncio.wait_for(reader.readuntil(job["id"].encode()), 20)
    for _, writer in streams:
        writer.transport.abort()
    async with asyncio.timeout(20):
        while True:  # the server notices at its next write, at the latest
            await b.post("/v1/jobs", SPEC)
            _, writer = again = await _open(a, head)
            line = await again[0].readline()
            with suppress(OSError):
                writer.transport.abort()
            if b" 200 " in line:
                return


async def test_a_stream_that_is_not_read_costs_no_memory_and_holds_nobody_up(world: World) -> None:
    """Nothing is queued for it: it is told the newest once it reads on, or to read its lists again."""
    _, a, b = await world.callers()
    head = b"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer b-token\r\n\r\n"
    reader, writer = await _open(a, head)
    await reader.readline()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    for _ in range(30):
        await b.post("/v1/jobs", [SPEC] * 100)
    assert len((await b.get("/v1/jobs", limit=1000))["items"]) == 1000
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    last = (await b.get("/v1/jobs", sort="-submitted_at", limit=1))["items"][0]["id"]
    async with asyncio.timeout(30):
        while last.encode() not in await reader.readline():
            pass
    writer.transport.abort()
