"""What the routes of one application share, under one app key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from random import Random
from typing import Any, Protocol, TypeVar

from aiohttp import web
from attrs import define, field, frozen

from coordinator import records
from coordinator.api.auth import Caller, TokenBook
from coordinator.api.events import EventHub
from coordinator.api.metrics import Metrics
from coordinator.api.problems import not_found
from coordinator.api.submit import SubmitPump
from coordinator.api.waiting import WaitingReasons
from coordinator.cluster import Cluster, Snapshot
from coordinator.config import Settings
from coordinator.cycle import why_never
from coordinator.gauges import WatchLag
from coordinator.lifecycle import shown_state
from coordinator.model import Job, JobState, Task
from coordinator.replica import Replica
from coordinator.snapshot import Shape, shape_of
from coordinator.store import Store
from jobspecs.nomad_job import nomad_refusal
from jobspecs.spec import JobSpec
from vgpu.inventory import NodeInventory
from vgpu.reasons import Reason

T = TypeVar("T")
CATCH_UP_SECONDS = 2.0
_MANY_JOBS = 5_000
# Nodes are silent or lost by the time that passes, so a snapshot ages even where nothing was written.
_SNAPSHOT_MS = 1000


class LogSource(Protocol):
    """The part of an engine that the API uses (`coordinator.engines.Engine`)."""

    def logs(
        self, task: Task, *, stream: str, follow: bool, tail_bytes: int | None
    ) -> AsyncIterator[bytes]: ...


@frozen
class Limits:
    """What an instance of the API bounds. `head_seconds`: a connection that has not sent a whole head of a request by then,
    be it the first or the next one, is closed; longer than clients and proxies keep an idle one. `kept_events` is how many of the newest events a stream can resume from
    without asking the store."""

    request_seconds: float = 30.0
    head_seconds: float = 75.0
    comment_seconds: float = 15.0
    streams: int = 512
    kept_events: int = 20_000


@frozen
class Found:
    """A job as the replica shows it now."""

    job: Job
    shown: JobState
    tasks: Mapping[int, Task]
    revision: int


@define
class Api:
    """One per application. Reads come from `replica`, writes go to `store`. `streams` are the open ones."""

    store: Store
    replica: Replica
    settings: Settings
    engine: LogSource
    clock_ms: Callable[[], int]
    random: Random
    version: str
    tokens: TokenBook
    pump: SubmitPump
    reasons: WaitingReasons
    hub: EventHub
    metrics: Metrics
    lag: WatchLag
    openapi: bytes
    limits: Limits
    streams: set[asyncio.Task[object]] = field(factory=set)
    unfinished: set[asyncio.Task[Any]] = field(factory=set)
    _snapshot: Snapshot | None = None
    _nevers: tuple[Snapshot | None, dict[tuple[str, Shape], Reason | None]] = (None, {})

    @property
    def cluster(self) -> Cluster:
        return self.replica.cluster

    @property
    def revision(self) -> int:
        return self.cluster.revision

    def snapshot(self) -> Snapshot:
        """The cluster at the replica's revision."""
        snapshot = self.recent_snapshot()
        if snapshot.revision != self.revision:
            snapshot = self._snapshot = self.cluster.snapshot(self.clock_ms())
        return snapshot

    def recent_snapshot(self) -> Snapshot:
        """One that is at most a second old: for what hardly changes, on paths that must cost little."""
        now_ms = self.clock_ms()
        snapshot = self._snapshot
        # One that knows no node yet would let every job in, also in the second after the first node came.
        knows_nodes = snapshot is not None and any(view.inventory for view in snapshot.nodes.values())
        if snapshot is None or not knows_nodes or not 0 <= now_ms - snapshot.now_ms < _SNAPSHOT_MS:
            snapshot = self._snapshot = self.cluster.snapshot(now_ms)
        return snapshot

    def inventory(self, node: str) -> NodeInventory | None:
        view = self.recent_snapshot().nodes.get(node) or self.snapshot().nodes.get(node)
        return view.inventory if view else None

    def why_never(self, spec: JobSpec, snapshot: Snapshot) -> Reason | None:
        """Why this cluster would never run it: `cycle.why_never`, asked once for each tenant and shape of a snapshot;
        and what its engine would not run as it is written."""
        if self.settings.engine == "nomad" and (refusal := nomad_refusal(spec)) is not None:
            return refusal
        if self._nevers[0] is not snapshot:
            self._nevers = (snapshot, {})
        known, key = self._nevers[1], (spec.tenant, shape_of(spec))
        if key not in known:
            known[key] = why_never(spec, snapshot)
        return known[key]

    def jobs(self) -> Iterator[Job]:
        """All jobs of all three folders, at this moment."""
        yield from self.cluster.waiting_jobs.values()
        yield from self.cluster.live_jobs.values()
        yield from self.cluster.done_jobs.values()

    def shown(self, job: Job) -> JobState:
        if job.state is not JobState.ALLOCATED:
            return job.state
        return shown_state(job, self.cluster.tasks_of(job.id, job.attempt).values())

    def known(self, id: str) -> Found | None:
        """The job as far as the replica has got."""
        cluster = self.cluster
        job = cluster.waiting_jobs.get(id) or cluster.live_jobs.get(id) or cluster.done_jobs.get(id)
        if job is None:
            return None
        tasks = cluster.tasks_of(job.id, job.attempt) if job.allocation else {}
        return Found(job, self.shown(job), tasks, self.revision_of(job))

    def revision_of(self, job: Job) -> int:
        item = self.replica.key_values.get(records.folder_key(job))
        return item.mod_revision if item else self.revision

    async def find(self, id: str, caller: Caller) -> Found:
        """The job, if the caller may know of it; else a 404 `Problem`. A job that the replica does not know yet is
        waited for until the replica is as new as the store, so that a GET right after a submit finds it."""
        found = self.known(id)
        if found is None:
            await self.catch_up()
            found = self.known(id)
        if found is None or not caller.owns(found.job):
            raise not_found("job", id)
        return found

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end, whatever becomes of the request; until the application closes."""
        task = asyncio.create_task(work)
        self.unfinished.add(task)
        task.add_done_callback(self.unfinished.discard)
        return await asyncio.shield(task)

    async def catch_up(self) -> None:
        """Waits until the replica has seen what the store holds now. Raises a `StoreError` where it cannot be asked."""
        listing = await self.store.list(records.TENANTS, limit=1)
        await self.passed(listing.revision)

    async def passed(self, revision: int) -> None:
        """Waits until the replica has passed `revision`, so that the next read shows it; not for ever."""
        try:
            async with asyncio.timeout(CATCH_UP_SECONDS):
                await self.replica.wait_for(revision)
        except TimeoutError:
            return  # the answer carries the revision that it reflects


API: web.AppKey[Api] = web.AppKey("api", Api)
CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)


async def looked_through(jobs: int, look: Callable[[], T]) -> T:
    """What `look` finds in so many jobs; in many of them in a thread, since other requests wait meanwhile."""
    return await asyncio.to_thread(look) if jobs > _MANY_JOBS else look()


def api_of(request: web.Request) -> Api:
    return request.app[API]


def caller_of(request: web.Request) -> Caller:
    return request[CALLER]
