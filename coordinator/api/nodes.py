"""The node routes: what each node has, what is given out of it and to whom, and the cordon."""

from __future__ import annotations

from aiohttp import web
from msgspec.structs import replace

from coordinator import records
from coordinator.api.answers import CursorInvalid, answer, page
from coordinator.api.auth import Caller
from coordinator.api.context import Api, api_of, caller_of
from coordinator.api.problems import bad_parameter, not_found, refused, unavailable
from coordinator.api.queries import body_object, known_only, page_limit
from coordinator.api.views import View, link_views
from coordinator.gpus import GpuView
from coordinator.model import NodeAdmin
from coordinator.nodes import NodeView
from coordinator.store import KeyValue, Put, unchanged
from vgpu.sentences import sentence

_MAX_REASON = 500
_ROUNDS = 10


def node_view(node: NodeView, caller: Caller) -> View:
    """Sizes and free figures are for everyone; whose slices they are, only for the owner and admins."""
    inventory = node.inventory
    reason = node.admin.cordon_reason if node.is_cordoned and node.admin else ""
    return {
        "name": node.name,
        "status": node.status.value,
        "status_reason": sentence(node.status_reason) if node.status_reason else reason,
        "cordoned": node.is_cordoned,
        "labels": dict(node.labels),
        "cpu_milli": node.cpu_milli,
        "cpu_free_milli": node.cpu_free_milli,
        "memory_mib": node.memory_mib,
        "memory_free_mib": node.memory_free_mib,
        "simulated": inventory.simulated if inventory else False,
        "engine_node_id": inventory.engine_node_id if inventory else "",
        "gpus": [gpu_view(view, caller) for view in node.gpus],
        "links": link_views(inventory) if inventory else [],
    }


def gpu_view(view: GpuView, caller: Caller) -> View:
    gpu, report = view.gpu, view.report
    return {
        "uuid": gpu.uuid,
        "index": gpu.index,
        "model": gpu.model,
        "numa_node": gpu.numa_node,
        "memory_mib": gpu.memory_mib,
        "memory_free_mib": view.memory_free_mib,
        "compute_milli": gpu.compute_milli,
        "compute_free_milli": view.compute_free_milli,
        "unavailable": sentence(view.closed) if view.closed else gpu.unavailable,
        "memory_used_mib": report.memory_used_mib if report else None,
        "utilization_percent": report.utilization_percent if report else None,
        "slices": [
            {
                "job": use.id if caller.may_see(use.job.tenant) else None,
                "tenant": use.job.tenant if caller.may_see(use.job.tenant) else None,
                "task": use.task if caller.may_see(use.job.tenant) else None,
                "memory_mib": piece.memory_mib,
                "compute_milli": piece.compute_milli,
                "isolation": piece.isolation,
            }
            for use, piece in view.slices
        ],
    }


async def list_nodes(request: web.Request) -> web.Response:
    known_only(request, ("limit", "cursor"))
    api, cursor = api_of(request), request.query.get("cursor", "")
    snapshot = api.snapshot()
    try:
        found, following = page(
            snapshot.nodes.values(), key=lambda node: (node.name,), limit=page_limit(request), cursor=cursor
        )
    except CursorInvalid as error:
        raise bad_parameter("cursor", "the next_cursor of this list", cursor, str(error)) from error
    items = [node_view(node, caller_of(request)) for node in found]
    return answer(
        {"items": items, "next_cursor": following, "revision": snapshot.revision}, revision=snapshot.revision
    )


async def get_node(request: web.Request) -> web.Response:
    known_only(request, ())
    return await _answer(api_of(request), request)


async def _answer(api: Api, request: web.Request) -> web.Response:
    snapshot = api.snapshot()
    node = snapshot.nodes.get(request.match_info["node"])
    if node is None:
        raise not_found("node", request.match_info["node"])
    return answer(node_view(node, caller_of(request)), revision=snapshot.revision)


async def cordon(request: web.Request) -> web.Response:
    """No new work goes there; what runs stays."""
    body = await body_object(request, {"reason": str})
    reason = str(body.get("reason") or "")
    if len(reason) > _MAX_REASON:
        raise refused(
            "bad_fields",
            "reason",
            f"reason is longer than {_MAX_REASON} characters",
            limit=_MAX_REASON,
            value=len(reason),
        )
    return await _set_cordon(request, True, reason)


async def uncordon(request: web.Request) -> web.Response:
    return await _set_cordon(request, False, "")


async def _set_cordon(request: web.Request, cordoned: bool, reason: str) -> web.Response:
    api, name = api_of(request), request.match_info["node"]
    if name not in api.snapshot().nodes:
        raise not_found("node", name)
    key = records.admin_key(name)
    for _ in range(_ROUNDS):
        item = await api.store.get(key)
        before = _admin(item, name)
        after = replace(before, cordoned=cordoned, cordon_reason=reason)
        compare = unchanged(key, item.mod_revision if item else 0)
        result = await api.store.txn((compare,), (Put(key, records.encode(after)),))
        if result.succeeded:
            await api.passed(result.revision)
            return await _answer(api, request)
    raise unavailable("busy", f"node {name!r} is being changed by others; try again")


def _admin(item: KeyValue | None, name: str) -> NodeAdmin:
    """One that cannot be read is written anew: closing a node must not fail."""
    try:
        return records.decode(NodeAdmin, item.value) if item else NodeAdmin(name)
    except records.Unreadable:
        return NodeAdmin(name)
