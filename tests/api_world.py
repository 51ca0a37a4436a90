"""A small world around the HTTP API: one store, instances of the API on replicas of it, and callers with tokens.

`close` ends everything and proves that nothing was left running.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping
from random import Random
from typing import Any, cast

from aiohttp.test_utils import TestClient, TestServer
from attrs import define, evolve, field
from msgspec.structs import replace

from coordinator import records
from coordinator.api.app import make_app
from coordinator.client.events import Event, parse
from coordinator.cluster import Cluster
from coordinator.config import Settings
from coordinator.engines import EngineUnavailable, LogsExpired
from coordinator.model import (
    Allocation,
    Job,
    JobState,
    Standing,
    Task,
    TaskPlacement,
    TaskState,
    Tenant,
)
from coordinator.replica import Replica
from coordinator.store import Delete, MemoryStore, Put, Store, Write
from jobspecs.spec import JobSpec, TaskSpec
from tests.fakes import FakeClock, FlakyStore
from vgpu.inventory import Gpu, NodeInventory, NodeReport
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import Slice

GIB = 1024
CARD_MIB = 80 * GIB


class FakeLogs:
    """Gives `chunks`, or fails as told: before the first chunk, or after all of them."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = [b"hello\n"]
        self.fails_at_start: Exception | None = None
        self.fails_at_end: Exception | None = None
        self.asked: list[tuple[str, str, bool, int | None]] = []

    async def logs(
        self, task: Task, *, stream: str, follow: bool, tail_bytes: int | None
    ) -> AsyncIterator[bytes]:
        self.asked.append((task.attempt_key, stream, follow, tail_bytes))
        if self.fails_at_start is not None:
            raise self.fails_at_start
        for chunk in self.chunks:
            yield chunk
        if self.fails_at_end is not None:
            raise self.fails_at_end


@define(eq=False)
class Caller:
    """One token at one instance. Answers come as (status, JSON body, headers)."""

    client: TestClient[Any, Any]
    token: str = ""

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        **query: Any,
    ) -> tuple[int, Any, Mapping[str, str]]:
        all_headers = dict(headers or {})
        if self.token:
            all_headers["Authorization"] = f"Bearer {self.token}"
        if body is not None and not isinstance(body, str):
            all_headers.setdefault("Content-Type", "application/json")
            body = body if isinstance(body, io.BytesIO) else io.BytesIO(json.dumps(body).encode())
        answer = await self.client.request(method, path, headers=all_headers, params=query, data=body)
        async with answer:
            is_json = "json" in answer.content_type
            return answer.status, await (answer.json() if is_json else answer.text()), answer.headers

    async def get(self, path: str, **query: Any) -> Any:
        return await self.ok("GET", path, **query)

    async def post(self, path: str, body: object = None, **headers: str) -> Any:
        return await self.ok("POST", path, body, headers=headers)

    async def ok(self, method: str, path: str, body: object = None, **more: Any) -> Any:
        status, answer, _ = await self.call(method, path, body, **more)
        assert status < 300, (status, answer)
        return answer

    async def refused(self, method: str, path: str, body: object = None, **more: Any) -> Any:
        """The problem document of a call that must fail."""
        status, answer, headers = await self.call(method, path, body, **more)
        assert status >= 400, (status, answer)
        assert headers["Content-Type"].startswith("application/problem+json")
        assert answer["status"] == status
        return answer


class Stream:
    """An open stream of one caller; `next` waits for the next event."""

    def __init__(self, caller: Caller, last_event_id: str = "") -> None:
        self._caller = caller
        self._last_event_id = last_event_id

    async def __aenter__(self) -> Stream:
        headers = {"Authorization": f"Bearer {self._caller.token}"}
        if self._last_event_id:
            headers["Last-Event-ID"] = self._last_event_id
        self.answer = await self._caller.client.get("/v1/events", headers=headers)
        assert self.answer.status == 200
        assert self.answer.content_type == "text/event-stream"
        await self.answer.content.readline()  # the retry line says that the stream has begun
        self._events = parse(self.answer.content)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.answer.close()

    async def next(self) -> Event:
        return await asyncio.wait_for(anext(self._events), 5)

    async def take(self, count: int) -> list[Event]:
        return [await self.next() for _ in range(count)]


@define
class World:
    clock: FakeClock
    memory: MemoryStore
    store: FlakyStore
    settings: Settings
    logs: FakeLogs = field(factory=FakeLogs)
    replicas: list[Replica] = field(factory=list)
    _tasks: list[asyncio.Task[None]] = field(factory=list)
    _clients: list[TestClient[Any, Any]] = field(factory=list)
    _before: set[asyncio.Task[Any]] = field(factory=asyncio.all_tasks)

    @classmethod
    async def make(cls, real_store: Store | None = None, **settings: Any) -> World:
        """On a memory store; or on `real_store`, which the caller closes (then `memory` is that one)."""
        memory = cast(MemoryStore, real_store) or MemoryStore(asyncio.get_running_loop().time)
        world = cls(FakeClock(), memory, FlakyStore(memory), evolve(Settings(), **settings))
        for token, record in (
            ("admin-token", records.Token("admin", label="root")),
            ("a-token", records.Token("tenant", "team-a")),
            ("b-token", records.Token("tenant", "team-b")),
        ):
            await world.put(records.token_key(token), record)
        await world.put_tenant(Tenant("team-a", 100 * GIB))
        await world.put_tenant(Tenant("team-b", 100 * GIB))
        return world

    async def instance(self, store: Store | None = None, **options: Any) -> TestClient[Any, Any]:
        """One more coordinator's API on the same store."""
        replica = Replica(self.memory, lambda: Cluster(self.settings, keep_done=True), self.clock)
        self._tasks.append(asyncio.create_task(replica.run()))
        self.replicas.append(replica)
        app = make_app(
            store or self.store,
            replica,
            self.settings,
            self.logs,
            self.clock,
            Random(len(self.replicas)),
            "0.1.0",
            **options,
        )
        client = TestClient(TestServer(app))
        await client.start_server()
        self._clients.append(client)
        await replica.wait_for(1)
        return client

    async def callers(self, **options: Any) -> tuple[Caller, Caller, Caller]:
        """Admin, team-a and team-b at a new instance."""
        client = await self.instance(**options)
        return Caller(client, "admin-token"), Caller(client, "a-token"), Caller(client, "b-token")

    async def put(self, key: str, record: object) -> int:
        return await self.write(Put(key, records.encode(record)))

    async def write(self, *writes: Write) -> int:
        result = await self.memory.txn((), writes)
        for replica in self.replicas:
            await replica.wait_for(result.revision)
        return result.revision

    async def put_tenant(self, tenant: Tenant) -> int:
        return await self.put(records.tenant_key(tenant.name), tenant)

    async def put_node(self, name: str = "n1", gpus: int = 8, memory_mib: int = CARD_MIB) -> None:
        cards = tuple(
            Gpu(f"GPU-{name}-{n}", n, "NVIDIA A100", memory_mib, memory_mib, ("/dev/null",))
            for n in range(gpus)
        )
        inventory = NodeInventory(
            name, f"machine-{name}", "0.1.0", cards, (), 64_000, 1024 * GIB,
            isolations=("exclusive", "mps", "timeslice"), simulated=True,
        )  # fmt: skip
        await self.put(records.inventory_key(name), inventory)
        await self.put(records.report_key(name), NodeReport(name, 1, self.clock(), ()))

    async def put_waiting(self, id: str, tenant: str = "team-a", **changes: Any) -> Job:
        spec = JobSpec("n", tenant, (TaskSpec(image="i"),))
        job = Job(id, spec, JobState.PENDING, self.clock(), self.clock())
        job = replace(job, **changes)
        await self.put(records.queue_key(tenant, id), job)
        return job

    async def place(
        self, id: str, tenant: str = "team-a", node: str = "n1", gpu: int = 0, memory_mib: int = 8 * GIB
    ) -> Job:
        """As the leader does: the waiting job gets a slice."""
        key = records.queue_key(tenant, id)
        item = await self.memory.get(key)
        assert item is not None
        job = records.decode(Job, item.value)
        piece = Slice(f"GPU-{node}-{gpu}", memory_mib, 100, "mps")
        allocation = Allocation(
            job.attempt, (TaskPlacement(0, node, (piece,), 1000, GIB),), self.clock(),
            Standing(3, 2, 1), Reason(ReasonCode.PLACED, {"gpus": 1}, (node,)),
        )  # fmt: skip
        live = replace(job, state=JobState.ALLOCATED, allocation=allocation)
        await self.write(Delete(key), Put(records.job_key(id), records.encode(live)))
        return live

    async def task(self, job: Job, state: TaskState, **changes: Any) -> Task:
        assert job.allocation is not None
        node = job.allocation.tasks[0].node
        task = replace(Task(job.id, job.attempt, 0, node, state, started_at_ms=self.clock()), **changes)
        await self.put(records.task_key(node, job.id, job.attempt, 0), task)
        return task

    async def job_record(self, id: str) -> tuple[str, Job] | None:
        """The folder that the job stands in, and its record; there is at most one."""
        listing = await self.memory.list(records.ROOT)
        found = [
            (item.key.removeprefix(records.ROOT).split("/")[0], records.decode(Job, item.value))
            for item in listing.items
            if item.key.endswith(f"/{id}")
            and item.key.startswith((records.QUEUE, records.JOBS, records.DONE))
        ]
        assert len(found) <= 1, found
        return found[0] if found else None

    async def close(self) -> None:
        self.store.gate.set()
        for client in self._clients:
            await client.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        left = (
            {task for task in asyncio.all_tasks() if not task.done()}
            - self._before
            - {asyncio.current_task()}
        )
        if left:  # a client library may need some turns to end its calls
            _, left = await asyncio.wait(left, timeout=5)
        assert not left, left


SPEC = {"name": "train", "image": "pytorch:2", "gpus": {"count": 1, "memory": "8GiB", "compute": "10%"}}

__all__ = [
    "CARD_MIB",
    "GIB",
    "SPEC",
    "Caller",
    "EngineUnavailable",
    "FakeLogs",
    "LogsExpired",
    "Stream",
    "World",
]
