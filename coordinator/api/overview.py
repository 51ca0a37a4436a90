"""The queue, the cluster in figures, whether this process is alive and ready, and the snapshot for debugging."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from functools import partial

import msgspec
from aiohttp import web

from coordinator import records
from coordinator.api.answers import CursorInvalid, answer, decode_cursor, dump, encode_cursor, time_text
from coordinator.api.auth import Caller
from coordinator.api.context import Api, api_of, caller_of, looked_through
from coordinator.api.nodes import node_view
from coordinator.api.problems import bad_parameter, unavailable
from coordinator.api.queries import known_only, page_limit
from coordinator.api.views import View, asked_view, hidden_spec_view, reason_view, waited_seconds
from coordinator.api.waiting import Planned
from coordinator.cluster import Snapshot
from coordinator.fairness import Policy
from coordinator.fairness import shares as fair_shares
from coordinator.holds import Reservation
from coordinator.lifecycle import shown_state
from coordinator.model import Job, JobState
from coordinator.nodes import NodeStatus
from coordinator.store import StoreError

_READY_SECONDS = 2.0


async def get_queue(request: web.Request) -> web.Response:
    """Waiting jobs in the order in which they would be served if all of them fitted, and the tenants in the order of
    their turns. `position` counts all waiting jobs, also those the caller may not see. The pages of one list show one
    revision, so that nothing is shown twice or left out while jobs come and go."""
    known_only(request, ("tenant", "limit", "cursor"))
    api, caller, limit = api_of(request), caller_of(request), page_limit(request)
    tenant, cursor = request.query.get("tenant"), request.query.get("cursor", "")
    planned, start = await _place(api, cursor)
    items: list[View] = []
    following = None
    for position, job in planned.from_position(start):
        if not caller.owns(job) or (tenant is not None and job.tenant != tenant):
            continue
        if len(items) == limit:
            following = encode_cursor([*api.reasons.keep(planned), position])
            break
        items.append(_waiting_view(planned, position, job))
    shares = tenant_shares(planned.snapshot, api.reasons.policy)
    turns = [{"tenant": name, **share} for name, share in shares.items() if caller.may_see(name)]
    body = {
        "items": items,
        "tenants": turns,
        "reservation": _reservation_view(planned.plan.reservation, caller),
        "next_cursor": following,
        "revision": planned.revision,
    }
    return answer(body, revision=planned.revision)


async def _place(api: Api, cursor: str) -> tuple[Planned, int]:
    """The plan that the page is of, and the position of its first item."""
    if not cursor:
        return await api.reasons.now(), 1
    try:
        revision, at_ms, position = decode_cursor(cursor, tuple[int, int, int])
    except CursorInvalid as error:
        raise bad_parameter("cursor", "the next_cursor of this list", cursor, str(error)) from error
    # One that was forgotten is gone on with at the same place of the order of now.
    planned = api.reasons.kept((revision, at_ms)) or await api.reasons.now()
    return planned, max(1, position)


def _waiting_view(planned: Planned, position: int, job: Job) -> View:
    return {
        "position": position,
        "id": job.id,
        "name": job.spec.name,
        "tenant": job.tenant,
        "priority": job.spec.priority,
        "waited_seconds": waited_seconds(job, None, planned.snapshot.now_ms),
        "asked": asked_view(job.spec),
        "reason": reason_view(planned.reason(job.id) or job.reason),
    }


def _reservation_view(reservation: Reservation | None, caller: Caller) -> View | None:
    """Whose tenant it is of is told to that tenant and to administrators; that there is one, to all who wait for it.
    `due_at` is null where nobody knows."""
    if reservation is None:
        return None
    return {
        "job": reservation.job.id,
        "tenant": reservation.job.tenant if caller.owns(reservation.job) else None,
        "due_at": time_text(reservation.due_ms),
        "nodes": sorted(reservation.nodes),
        "slices": [
            {
                "task": task.task,
                "node": task.node,
                "gpu": piece.gpu,
                "memory_mib": piece.memory_mib,
                "compute_milli": piece.compute_milli,
            }
            for task in reservation.tasks
            for piece in task.slices
        ],
    }


def tenant_shares(snapshot: Snapshot, policy: Policy) -> dict[str, View]:
    """Each tenant's standing, in the order of their turns. Only those that there are."""
    return {
        name: {
            "space_share": None if share.space is None else round(float(share.space), 6),
            "time_share": round(float(share.time), 6),
            "priority": None if share.priority is None else round(float(share.priority), 6),
        }
        for name, share in fair_shares(snapshot, policy).items()
        if name in snapshot.tenants
    }


async def get_cluster(request: web.Request) -> web.Response:
    known_only(request, ())
    api = api_of(request)
    snapshot = api.snapshot()
    gpus = [gpu for node in snapshot.nodes.values() for gpu in node.facts.gpus]
    granted = [piece for node in snapshot.nodes.values() for piece in node.slices]
    item = await api.store.get(records.LEADER)
    try:
        leader = records.decode(records.Leadership, item.value) if item else None
    except records.Unreadable:
        leader = None
    body = {
        "nodes": _counted(
            (node.status.value for node in snapshot.nodes.values()), [status.value for status in NodeStatus]
        ),
        "gpus": len(gpus),
        "memory_mib": sum(gpu.memory_mib for gpu in gpus),
        "memory_granted_mib": sum(piece.memory_mib for piece in granted),
        "compute_milli": sum(gpu.compute_milli for gpu in gpus),
        "compute_granted_milli": sum(piece.compute_milli for piece in granted),
        "jobs": await job_counts(snapshot),
        "leader": {"id": leader.id, "address": leader.address, "since": time_text(leader.since_ms)}
        if leader
        else None,
        "revision": snapshot.revision,
        "unreadable": len(api.replica.unreadable),
        "silent_together": snapshot.silent_together,
        "clocks_off": dict(sorted(snapshot.clocks_off.items())),
        "engine": api.settings.engine,
        "version": api.version,
    }
    return answer(body, revision=snapshot.revision)


async def job_counts(snapshot: Snapshot) -> dict[str, int]:
    """Jobs by the state that is shown, in lower case."""
    jobs = len(snapshot.waiting_jobs) + len(snapshot.jobs) + len(snapshot.done)
    return await looked_through(jobs, partial(_job_counts, snapshot))


def _job_counts(snapshot: Snapshot) -> dict[str, int]:
    tasks = dict(snapshot.tasks.items())
    counts = Counter(job.state for jobs in (snapshot.waiting_jobs, snapshot.done) for job in jobs.values())
    counts.update(
        shown_state(job, tasks.get((job.id, job.attempt), {}).values()) for job in snapshot.jobs.values()
    )
    return {state.value.lower(): counts[state] for state in JobState}


def _counted(values: Iterable[str], names: list[str]) -> dict[str, int]:
    counts = Counter(values)
    return {name: counts[name] for name in names}


async def healthz(request: web.Request) -> web.Response:
    """This process answers; nothing else is asked."""
    return answer({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """The store answers and the replica has read it: requests can be served."""
    api = api_of(request)
    if api.revision == 0 or not api.replica.connected:
        raise unavailable("starting", "the state of the cluster is being read, or the watch of it is broken")
    try:
        async with asyncio.timeout(_READY_SECONDS):
            await api.store.get(records.LEADER)
    except (StoreError, TimeoutError) as error:
        raise unavailable("store_unavailable", f"the store does not answer: {error}") from error
    return answer({"status": "ready", "revision": api.revision})


async def get_snapshot(request: web.Request) -> web.Response:
    """What the next cycle would decide on, for debugging. Values of environment variables are hidden."""
    known_only(request, ())
    api = api_of(request)
    snapshot = api.snapshot()
    jobs = (*snapshot.jobs.values(), *snapshot.waiting_jobs.values())
    body = {
        "revision": snapshot.revision,
        "at": time_text(snapshot.now_ms),
        "next_due_at": time_text(snapshot.next_due_ms),
        "tenants": [msgspec.to_builtins(tenant) for tenant in snapshot.tenants.values()],
        "nodes": [node_view(node, caller_of(request)) for node in snapshot.nodes.values()],
        "jobs": [{**msgspec.to_builtins(job), "spec": hidden_spec_view(job.spec)} for job in jobs],
        "tasks": [msgspec.to_builtins(task) for tasks in snapshot.tasks.values() for task in tasks.values()],
        "unreadable": list(snapshot.unreadable),
    }
    return web.Response(body=await asyncio.to_thread(dump, body), content_type="application/json")


async def get_openapi(request: web.Request) -> web.Response:
    return web.Response(body=api_of(request).openapi, content_type="application/json")
