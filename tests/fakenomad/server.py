"""The fake's HTTP side: routes, blocking queries, ACLs, the event stream, logs; and faults of the network.

`lose_replies` counts down: that many of the next requests (of a method) are carried out and their answers lost.
`answers` are given instead of the real ones. `race` makes registers meet after their check and before their write.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from tests.fakenomad import shapes
from tests.fakenomad.shapes import Body
from tests.fakenomad.state import FakeNomad, Refused

_UUID_LENGTH = 36
_NO_TYPE = "x-none/x-none"
_DURATION = re.compile(r"(\d+)(ms|s|m)$")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0}

Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


def refused(status: int, text: str, content_type: str | None = None) -> web.Response:
    """Nomad's errors are bare text, most of them without a content type."""
    return web.Response(status=status, body=text.encode(), headers={"Content-Type": content_type or _NO_TYPE})


async def _drop_type(request: web.BaseRequest, response: web.StreamResponse) -> None:
    if response.headers.get("Content-Type") == _NO_TYPE:
        del response.headers["Content-Type"]


class NomadServer:
    def __init__(self, nomad: FakeNomad, *, heartbeat_seconds: float = 10.0) -> None:
        self.nomad = nomad
        self.heartbeat_seconds = heartbeat_seconds
        self.lose_replies: dict[str, int] = {}
        self.answers: list[tuple[str, str, int, str]] = []
        self.race: asyncio.Barrier | None = None
        self.mute_events = False
        self.empty_logs = 0
        self.requests: list[tuple[str, str]] = []
        self.streams = 0
        self._stream_tasks: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None
        self.address = ""
        self._port = 0

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        @web.middleware
        async def around(request: web.Request, handler: Route) -> web.StreamResponse:
            return await self._around(request, handler)

        app = web.Application(middlewares=[around])
        app.on_response_prepare.append(_drop_type)
        app.add_routes(
            [
                web.post("/v1/jobs", self._register),
                web.put("/v1/jobs", self._register),
                web.get("/v1/jobs", self._jobs),
                web.get("/v1/job/{id}", self._job),
                web.delete("/v1/job/{id}", self._deregister),
                web.get("/v1/job/{id}/allocations", self._job_allocations),
                web.get("/v1/job/{id}/evaluations", self._job_evaluations),
                web.get("/v1/allocations", self._allocations),
                web.get("/v1/allocation/{id}", self._allocation),
                web.get("/v1/evaluations", self._evaluations),
                web.get("/v1/evaluation/{id}", self._evaluation),
                web.get("/v1/nodes", self._nodes),
                web.get("/v1/node/{id}", self._node),
                web.get("/v1/agent/self", self._agent),
                web.get("/v1/status/leader", self._leader),
                web.get("/v1/quotas", self._quotas),
                web.get("/v1/event/stream", self._events),
                web.get("/v1/client/fs/logs/{id}", self._logs),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.address = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        self.drop_streams()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self) -> None:
        """Killed and started again on its address: same index, ring rebuilt from the raft log."""
        await self.stop()
        self.nomad.replay_events()
        await self.start()

    def drop_streams(self) -> None:
        for task in self._stream_tasks:
            task.cancel()

    # --- around every request -------------------------------------------------------------------------------------

    async def _around(self, request: web.Request, route: Route) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs))
        for given in self.answers:
            method, path, status, text = given
            if method == request.method and request.path.startswith(path):
                self.answers.remove(given)
                return refused(status, text)
        try:
            response = await route(request)
        except Refused as error:
            return refused(error.status, error.text)
        if self.lose_replies.get(request.method, 0) > 0 and "event/stream" not in request.path:
            self.lose_replies[request.method] -= 1
            assert request.transport is not None
            request.transport.abort()
        return response

    def _allow(self, request: web.Request, capability: str, denied: int = 403) -> None:
        if self.nomad.acl is None:
            return
        token = request.headers.get("X-Nomad-Token", "")
        capabilities = self.nomad.acl.get(token)
        if token and capabilities is None:
            raise Refused(403, "ACL token not found")
        if capability not in (capabilities or ()):
            raise Refused(denied, "Permission denied")

    def _in_namespace(self, request: web.Request, rows: list[Body]) -> list[Body]:
        wanted = request.query.get("namespace", "default")
        return [row for row in rows if wanted in ("*", row["Namespace"])]

    async def _wait(self, request: web.Request, read: Callable[[], int]) -> int:
        """Blocks while the index is not beyond the asked one, up to `wait`; what it returns proves no change."""
        asked = int(request.query.get("index", 0))
        number = _DURATION.match(request.query.get("wait", "5m"))
        seconds = int(number.group(1)) * _SECONDS[number.group(2)] if number else 300.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while asked and read() <= asked:
                    await self.nomad.changed()
        return read()

    def _json(self, body: Any, index: int | None = None) -> web.Response:
        response = web.Response(body=json.dumps(body).encode(), content_type="application/json")
        if index is not None:
            response.headers["X-Nomad-Index"] = str(index)
            response.headers["X-Nomad-KnownLeader"] = "true"
        return response

    async def _list(self, request: web.Request, table: str, rows: Callable[[], list[Body]]) -> web.Response:
        index = await self._wait(request, lambda: self.nomad.table_index[table])
        return self._json(rows(), index)

    # --- jobs -----------------------------------------------------------------------------------------------------

    async def _register(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
        except ValueError:
            return refused(400, "unexpected EOF")
        if isinstance(body, dict) and isinstance(body.get("Job"), dict):
            body["Job"].setdefault("Namespace", request.query.get("namespace", "default"))
        checked = self.nomad.check_register(body)
        self._allow(request, "submit-job")
        if self.race is not None:
            await self.race.wait()
        answer = self.nomad.register(checked)
        return self._json(answer, answer["Index"])

    async def _jobs(self, request: web.Request) -> web.Response:
        self._allow(request, "list-jobs")
        prefix, meta = request.query.get("prefix", ""), request.query.get("meta", "").lower() == "true"
        return await self._list(
            request, "jobs",
            lambda: [
                shapes.job_stub(job, meta=meta)
                for job in self._in_namespace(request, list(self.nomad.jobs.values()))
                if job["ID"].startswith(prefix)
            ],
        )  # fmt: skip

    async def _job(self, request: web.Request) -> web.Response:
        self._allow(request, "read-job")
        key = (request.query.get("namespace", "default"), request.match_info["id"])
        await self._wait(
            request,
            lambda: self.nomad.jobs[key]["ModifyIndex"] if key in self.nomad.jobs else self.nomad.index,
        )
        if key not in self.nomad.jobs:
            raise Refused(404, "job not found")
        return self._json(self.nomad.jobs[key], self.nomad.jobs[key]["ModifyIndex"])

    async def _deregister(self, request: web.Request) -> web.Response:
        self._allow(request, "submit-job")
        purge = request.query.get("purge", "").lower() == "true"
        answer = self.nomad.deregister(
            request.query.get("namespace", "default"), request.match_info["id"], purge=purge
        )
        return self._json(answer, answer["Index"])

    async def _job_allocations(self, request: web.Request) -> web.Response:
        self._allow(request, "read-job")

        def rows() -> list[Body]:
            namespace, id = request.query.get("namespace", "default"), request.match_info["id"]
            return [shapes.alloc_stub(alloc) for alloc in self.nomad.allocations_of(namespace, id)]

        index = await self._wait(
            request,
            lambda: max((row["ModifyIndex"] for row in rows()), default=self.nomad.table_index["allocs"]),
        )
        return self._json(rows(), index)

    async def _job_evaluations(self, request: web.Request) -> web.Response:
        self._allow(request, "read-job")
        rows = [e for e in self.nomad.evals.values() if e["JobID"] == request.match_info["id"]]
        return self._json(self._in_namespace(request, rows), self.nomad.table_index["evals"])

    # --- allocations, evaluations, nodes --------------------------------------------------------------------------

    async def _allocations(self, request: web.Request) -> web.Response:
        self._allow(request, "read-job")
        states = request.query.get("task_states", "true").lower() != "false"
        return await self._list(
            request, "allocs",
            lambda: [
                shapes.alloc_stub(alloc) if states else shapes.alloc_stub(alloc) | {"TaskStates": None}
                for alloc in self._in_namespace(request, list(self.nomad.allocs.values()))
            ],
        )  # fmt: skip

    async def _evaluations(self, request: web.Request) -> web.Response:
        self._allow(request, "read-job")
        status = request.query.get("status", "")
        return await self._list(
            request, "evals",
            lambda: [
                e for e in self._in_namespace(request, list(self.nomad.evals.values())) if status in ("", e["Status"])
            ],
        )  # fmt: skip

    async def _allocation(self, request: web.Request) -> web.Response:
        self._allow(request, "read-job")
        id = request.match_info["id"]
        if len(id) != _UUID_LENGTH:
            raise Refused(500, "alloc lookup failed: index error: UUID must be 36 characters")
        await self._wait(
            request, lambda: self.nomad.allocs.get(id, {"ModifyIndex": self.nomad.index})["ModifyIndex"]
        )
        if id not in self.nomad.allocs:
            raise Refused(404, "alloc not found")
        alloc = self.nomad.allocs[id]
        return self._json(shapes.full_allocation(alloc), alloc["ModifyIndex"])

    async def _evaluation(self, request: web.Request) -> web.Response:
        self._allow(request, "read-job")
        id = request.match_info["id"]
        if len(id) != _UUID_LENGTH:
            raise Refused(
                500, "failed to lookup eval: eval lookup failed: index error: UUID must be 36 characters"
            )
        await self._wait(
            request, lambda: self.nomad.evals.get(id, {"ModifyIndex": self.nomad.index})["ModifyIndex"]
        )
        if id not in self.nomad.evals:
            raise Refused(404, "eval not found")
        return self._json(self.nomad.evals[id], self.nomad.evals[id]["ModifyIndex"])

    async def _nodes(self, request: web.Request) -> web.Response:
        self._allow(request, "node:read")
        return await self._list(
            request, "nodes", lambda: [self.nomad.node_body(node) for node in self.nomad.nodes.values()]
        )

    async def _node(self, request: web.Request) -> web.Response:
        self._allow(request, "node:read")
        id = request.match_info["id"]
        if len(id) != _UUID_LENGTH:
            raise Refused(500, "node lookup failed: index error: UUID must be 36 characters")
        if id not in self.nomad.nodes:
            raise Refused(404, "node not found")
        return self._json(self.nomad.node_body(self.nomad.nodes[id]), self.nomad.table_index["nodes"])

    async def _agent(self, request: web.Request) -> web.Response:
        self._allow(request, "agent:read")
        version = {
            "BuildDate": None,
            "Revision": "",
            "Version": self.nomad.version,
            "VersionMetadata": "",
            "VersionPrerelease": "",
        }
        return self._json(
            {"config": {"Version": version, "Region": "global", "Datacenter": "dc1"},
             "member": {"Name": "srv1.global", "Status": "alive"}}
        )  # fmt: skip

    async def _leader(self, request: web.Request) -> web.Response:
        return self._json("127.0.0.1:14647")

    async def _quotas(self, request: web.Request) -> web.Response:
        return refused(501, "Nomad Enterprise only endpoint")

    # --- streams --------------------------------------------------------------------------------------------------

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Starts at the closest index that is left, without a word about what is gone."""
        self._allow(request, "read-job", denied=500)
        topics = {topic.partition(":")[0] for topic in request.query.getall("topic", ["*"])}
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._stream_tasks.add(task)
        self.streams += 1
        try:
            await response.write(b"{}\n")
            await self._feed(response, topics, int(request.query.get("index", 0)))
        except (asyncio.CancelledError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._stream_tasks.discard(task)
            self.streams -= 1
        return response

    async def _feed(self, response: web.StreamResponse, topics: set[str], start: int) -> None:
        sent: list[int] = []
        while True:
            for line in list(self.nomad.events):
                if self.mute_events or id(line) in sent or line["Index"] < start:
                    continue
                sent.append(id(line))
                events = [e for e in line["Events"] if "*" in topics or e["Topic"] in topics]
                if events:
                    await response.write(json.dumps(line | {"Events": events}).encode() + b"\n")
            try:
                async with asyncio.timeout(self.heartbeat_seconds):
                    await self.nomad.changed()
                await asyncio.sleep(0)  # a raft entry's events are emitted right after it
            except TimeoutError:
                await response.write(b"{}\n")

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        self._allow(request, "read-logs", denied=500)
        alloc = self.nomad.allocs.get(request.match_info["id"])
        if alloc is None:
            return refused(404, f'Unknown allocation "{request.match_info["id"]}"', "text/plain")
        container = self.nomad.clients.containers.get(alloc["ID"])
        if container is None:
            return refused(
                404, f'task "{request.query["task"]}" not started yet. No logs available', "text/plain"
            )
        offset, follow = (
            int(request.query.get("offset", 0)),
            request.query.get("follow", "").lower() == "true",
        )

        def output() -> bytes:
            return container.stderr if request.query.get("type") == "stderr" else container.stdout

        if request.query.get("origin") == "end":
            offset = max(0, len(output()) - offset)
        if self.empty_logs > 0:
            self.empty_logs -= 1
            return web.Response(body=b"", content_type="text/plain")
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        while True:
            if text := output()[offset:]:
                offset += len(text)
                await response.write(text)
            if not follow:
                return response
            await self.nomad.changed()
