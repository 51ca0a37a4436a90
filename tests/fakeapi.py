"""A small HTTP server in a thread that answers as it was told, and remembers what it was asked.

with FakeApi() as api:
    api.on("GET", "/v1/cluster", {"version": "0.1.0"})
    api.on("POST", "/v1/jobs", DROP, problem(503, "no leader"), (201, {"id": "..."}))   one after the other; the last stays
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from attrs import define, field, frozen

DROP = "drop"  # the connection is cut before there is an answer


@frozen
class Call:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any


@frozen
class Answer:
    status: int
    body: Any
    headers: Mapping[str, str] = field(factory=dict)


Stream = Callable[[web.Request], Awaitable[web.StreamResponse]]


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Answer:
    body = {"type": "about:blank", "title": "x", "status": status, "detail": detail, "code": "c", **fields}
    return Answer(status, body, headers or {})


@define
class FakeApi:
    calls: list[Call] = field(factory=list)
    _answers: dict[tuple[str, str], list[Any]] = field(factory=dict)
    _loop: asyncio.AbstractEventLoop = field(factory=asyncio.new_event_loop)
    _thread: threading.Thread | None = None
    _runner: web.AppRunner | None = None
    address: str = ""

    def on(self, method: str, path: str, *answers: Any) -> None:
        """Answers in turn: a dict or list (200), (status, body), an `Answer`, a coroutine function, or DROP."""
        self._answers[(method, path)] = list(answers)

    def asked(self, method: str, path: str) -> list[Call]:
        return [call for call in self.calls if (call.method, call.path) == (method, path)]

    def __enter__(self) -> FakeApi:
        started = threading.Event()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._start())
            started.set()
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._thread is not None
        assert self._runner is not None
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else None
        self.calls.append(
            Call(request.method, request.path, dict(request.query), dict(request.headers), body)
        )
        waiting = self._answers.get((request.method, request.path))
        if waiting is None:
            return _json(problem(404, f"there is no {request.path}"))
        answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        if answer == DROP:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if callable(answer):
            return await answer(request)  # type: ignore[no-any-return]
        if isinstance(answer, tuple):
            answer = Answer(*answer)
        return _json(answer if isinstance(answer, Answer) else Answer(200, answer))


def _json(answer: Answer) -> web.Response:
    text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
    return web.Response(
        status=answer.status, text=text, content_type="application/json", headers=dict(answer.headers)
    )


def reason(code: str = "not_enough_idle_gpus", sentence: str = "no node has 4 idle GPUs") -> dict[str, Any]:
    return {"code": code, "numbers": {}, "subjects": [], "detail": "", "sentence": sentence}


def job(id: str = "0mt7h2kqvx3c9a1b", **fields: Any) -> dict[str, Any]:
    """A job view as the API gives it; a running job with one slice unless told otherwise."""
    task = {
        "task": 0, "name": "main", "node": "n1", "state": "RUNNING", "exit_code": None, "signal": None,
        "oom_killed": False, "fault": "", "detail": "", "started_at": "2026-01-02T03:04:05.000Z", "ended_at": None,
        "slices": [
            {"gpu": "GPU-1", "index": 0, "model": "A100", "memory_mib": 20480, "compute_milli": 500,
             "isolation": "mps", "memory_by": "driver", "compute_by": "driver"}
        ],
    }  # fmt: skip
    view = {
        "id": id, "name": "train", "tenant": "vision", "state": "RUNNING", "attempt": 1, "priority": 0,
        "spec": {"name": "train", "gpus": {"count": 1, "memory": "20GiB", "compute": "50%"}},
        "submitted_at": "2026-01-02T03:04:00.000Z", "started_at": "2026-01-02T03:04:05.000Z", "ended_at": None,
        "waited_seconds": 5.0, "ran_seconds": 61.0, "exit_code": None, "failures": 0, "reason": None,
        "chosen": reason("placed", "vision had the highest priority"), "placed": reason("placed", "fullest GPU"),
        "tasks": [task], "history": [], "revision": 7,
    }  # fmt: skip
    return {**view, **fields}


def ended(
    id: str = "0mt7h2kqvx3c9a1b", state: str = "SUCCEEDED", exit_code: int | None = 0, **fields: Any
) -> dict[str, Any]:
    return job(id, state=state, exit_code=exit_code, ended_at="2026-01-02T03:05:00.000Z", **fields)


def page(*items: Any, cursor: str | None = None) -> dict[str, Any]:
    return {"items": list(items), "next_cursor": cursor, "revision": 7}
