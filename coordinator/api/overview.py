"""The queue, the cluster in figures, whether this process is alive and ready, and the snapshot for debugging."""

from __future__ import annotations

import asyncio
from collections import Counter

from aiohttp import web

from coordinator import records
from coordinator.api.answers import CursorInvalid, answer, decode_cursor, encode_cursor, time_text
from coordinator.api.context import Api, api_of, caller_of
from coordinator.api.problems import bad_parameter, unavailable
from coordinator.api.queries import known_only, page_limit
from coordinator.api.views import View, asked_view, reason_view, waited_seconds
from coordinator.model import JobState
from coordinator.nodes import NodeStatus
from coordinator.store import StoreError

_READY_SECONDS = 2.0


async def get_queue(request: web.Request) -> web.Response:
    """Waiting jobs in the order of the plan: by the turn of their tenants, then as each tenant's own order has them.
    `position` counts all waiting jobs, also those the caller may not see."""
    known_only(request, ("tenant", "limit", "cursor"))
    api, caller = api_of(request), caller_of(request)
    limit, cursor, tenant = page_limit(request), request.query.get("cursor", ""), request.query.get("tenant")
    planned = await api.reasons.now()
    order = queue_order(planned)
    start = 0
    if cursor:
        try:
            last_id, last_position = decode_cursor(cursor, tuple[str, int])
        except CursorInvalid as error:
            raise bad_parameter("cursor", "the next_cursor of this list", cursor, str(error)) from error
        ids = [job.id for job in order]
        # The order moves with the shares: after the job it stood at, or at its place where that job has gone.
        start = ids.index(last_id) + 1 if last_id in ids else min(last_position - 1, len(ids))
    items: list[View] = []
    following = None
    for position, job in enumerate(order[start:], start + 1):
        if not caller.owns(job) or (tenant is not None and job.tenant != tenant):
            continue
        if len(items) == limit:
            following = encode_cursor([str(items[-1]["id"]), int(str(items[-1]["position"]))])
            break
        items.append(
            {
                "position": position,
                "id": job.id,
                "name": job.spec.name,
                "tenant": job.tenant,
                "priority": job.spec.priority,
                "waited_seconds": waited_seconds(job, None, api.clock_ms()),
                "asked": asked_view(job.spec),
                "reason": reason_view(planned.reasons.get(job.id) or job.reason),
            }
        )
    turns = [turn for turn in tenant_turns(planned) if caller.may_see(str(turn["tenant"]))]
    body = {"items": items, "tenants": turns, "next_cursor": following, "revision": planned.revision}
    return answer(body, revision=planned.revision)


async def get_cluster(request: web.Request) -> web.Response:
    known_only(request, ())
    api = api_of(request)
    snapshot = api.snapshot()
    gpus = [view for node in snapshot.nodes.values() for view in node.gpus]
    item = await api.store.get(records.LEADER)
    leader = records.decode(records.Leadership, item.value) if item else None
    body = {
        "nodes": _counted(
            (node.status.value for node in snapshot.nodes.values()), [status.value for status in NodeStatus]
        ),
        "gpus": len(gpus),
        "memory_mib": sum(view.gpu.memory_mib for view in gpus),
        "memory_granted_mib": sum(holding.piece.memory_mib for view in gpus for holding in view.holdings),
        "compute_milli": sum(view.gpu.compute_milli for view in gpus),
        "compute_granted_milli": sum(
            holding.piece.compute_milli for view in gpus for holding in view.holdings
        ),
        "jobs": job_counts(api),
        "leader": {"id": leader.id, "address": leader.address, "since": time_text(leader.since_ms)}
        if leader
        else None,
        "revision": snapshot.revision,
        "engine": api.settings.engine,
        "version": api.version,
    }
    return answer(body, revision=snapshot.revision)


def job_counts(api: Api) -> dict[str, int]:
    """Jobs by the state that is shown, in lower case."""
    return _counted(
        (api.shown(job).value.lower() for job in api.jobs()), [state.value.lower() for state in JobState]
    )


def _counted(values: Iterable[str], names: list[str]) -> dict[str, int]:
    counts = Counter(values)
    return {name: counts[name] for name in names}


async def healthz(request: web.Request) -> web.Response:
    """This process answers; nothing else is asked."""
    return answer({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """The store answers and the replica has read it: requests can be served."""
    api = api_of(request)
    if api.revision == 0:
        raise unavailable("starting", "the state of the cluster is being read")
    try:
        await asyncio.wait_for(api.store.get(records.LEADER), _READY_SECONDS)
    except (StoreError, TimeoutError) as error:
        raise unavailable("store_unavailable", f"the store does not answer: {error}") from error
    return answer({"status": "ready", "revision": api.revision})
