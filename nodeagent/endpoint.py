"""Where a node serves the output of its tasks: GET /v1/logs/<job>.<attempt>.<task>?stream=&follow=&tail_bytes=

Only who knows the token that the agent wrote into the store is answered. 404: no such task was ever here; 410: its
output was kept for its time and is gone (OB-1).
"""

from __future__ import annotations

import hmac
from pathlib import Path

from aiohttp import web

from nodeagent.runner import LogsUnknown, Runner, RunnerUnavailable, TaskKey

# So many keys of removed tasks are remembered, to tell "expired" from "unknown"; 30 bytes each.
REMEMBERED_KEYS = 20_000


class ExpiredOutput:
    """The keys of tasks whose output was removed, in a file of the data folder. Losing it costs a nicer error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(errors="replace").split() if path.exists() else []
        self._keys = dict.fromkeys(lines[-REMEMBERED_KEYS:])
        path.write_text("".join(f"{key}\n" for key in self._keys))

    def __contains__(self, key: TaskKey) -> bool:
        return str(key) in self._keys

    def add(self, key: TaskKey) -> None:
        self._keys[str(key)] = None
        if len(self._keys) > REMEMBERED_KEYS:
            del self._keys[next(iter(self._keys))]
        with self._path.open("a") as file:
            file.write(f"{key}\n")


def make_log_app(runner: Runner, token: str, expired: ExpiredOutput) -> web.Application:
    async def logs(request: web.Request) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), token.encode()):
            return _problem(401, "the token of this node is needed")
        try:
            key = TaskKey.parse(request.match_info["key"])
            stream, follow, tail_bytes = _options(request)
        except ValueError as error:
            return _problem(400, str(error))
        return await _send(request, runner, expired, key, (stream, follow, tail_bytes))

    app = web.Application()
    app.router.add_get("/v1/logs/{key}", logs)
    return app


def _options(request: web.Request) -> tuple[str, bool, int | None]:
    stream = request.query.get("stream", "stdout")
    if stream not in ("stdout", "stderr"):
        raise ValueError(f"stream must be stdout or stderr, not {stream!r}")
    follow = request.query.get("follow", "0")
    if follow not in ("0", "1"):
        raise ValueError(f"follow must be 0 or 1, not {follow!r}")
    tail = request.query.get("tail_bytes")
    if tail is not None and not (tail.isascii() and tail.isdigit()):
        raise ValueError(f"tail_bytes must be a whole number of bytes, not {tail!r}")
    return stream, follow == "1", None if tail is None else int(tail)


async def _send(
    request: web.Request,
    runner: Runner,
    expired: ExpiredOutput,
    key: TaskKey,
    options: tuple[str, bool, int | None],
) -> web.StreamResponse:
    stream, follow, tail_bytes = options
    output = runner.logs(key, stream=stream, follow=follow, tail_bytes=tail_bytes)
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    try:
        async for chunk in output:
            if not response.prepared:
                await response.prepare(request)
            await response.write(chunk)
    except LogsUnknown:
        if key in expired:
            return _problem(410, f"the output of {key} was kept for its time and is gone")
        return _problem(404, f"there is no task {key} on this node")
    except RunnerUnavailable as error:
        if response.prepared:
            raise  # breaks the connection off: the reader must not take this for the end
        return _problem(503, str(error))
    except ConnectionResetError:
        return response  # the reader went away
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof()
    return response


def _problem(status: int, detail: str) -> web.Response:
    return web.json_response({"status": status, "detail": detail}, status=status)
