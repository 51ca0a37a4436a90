"""A tenant applies for another quota; an administrator grants or refuses it with a reason."""

from __future__ import annotations

from aiohttp import web
from attrs import evolve
from msgspec.structs import replace

from coordinator import records
from coordinator.api.answers import CursorInvalid, answer, page
from coordinator.api.context import api_of, caller_of
from coordinator.api.problems import bad_parameter, conflict, not_found, refused
from coordinator.api.queries import body_object, known_only, page_limit
from coordinator.api.tenants import allowed
from coordinator.api.views import application_view
from coordinator.model import Tenant
from coordinator.store import Put, absent, unchanged
from jobspecs.units import ValueInvalid, parse_size

_MAX_TEXT = 2000


async def list_applications(request: web.Request) -> web.Response:
    known_only(request, ("limit", "cursor"))
    api = api_of(request)
    tenant = allowed(caller_of(request), request.match_info["tenant"])
    listing = await api.store.list(f"{records.APPLICATIONS}{tenant}/")
    applications = [one for _, one in records.readable(records.Application, listing.items)]
    cursor = request.query.get("cursor", "")
    try:
        found, following = page(
            applications, key=lambda one: (one.id,), limit=page_limit(request), cursor=cursor
        )
    except CursorInvalid as error:
        raise bad_parameter("cursor", "the next_cursor of this list", cursor, str(error)) from error
    items = [application_view(one) for one in found]
    return answer(
        {"items": items, "next_cursor": following, "revision": listing.revision}, revision=listing.revision
    )


async def apply(request: web.Request) -> web.Response:
    api = api_of(request)
    tenant = allowed(caller_of(request), request.match_info["tenant"])
    body = await body_object(request, {"quota_memory": str, "text": str}, required=("quota_memory",))
    try:
        quota_mib = parse_size(body["quota_memory"], least_mib=0)
    except ValueInvalid as error:
        raise refused(
            "bad_fields", "quota_memory", error.message, limit=error.limit, value=body["quota_memory"]
        ) from error
    text = _short_text(body, "text")
    key = records.tenant_key(tenant)
    item = await api.store.get(key)
    if item is None:
        raise not_found("tenant", tenant)
    now_ms = api.clock_ms()
    application = records.Application(records.new_job_id(now_ms, api.random), tenant, quota_mib, text, now_ms)
    own_key = records.application_key(tenant, application.id)
    result = await api.store.txn(
        (unchanged(key, item.mod_revision), absent(own_key)), (Put(own_key, records.encode(application)),)
    )
    if not result.succeeded:
        raise conflict("changed", f"tenant {tenant!r} was changed meanwhile; try again")
    return answer(application_view(application), status=201, revision=result.revision)


async def grant(request: web.Request) -> web.Response:
    return await _decide(request, "GRANTED")


async def refuse(request: web.Request) -> web.Response:
    return await _decide(request, "REFUSED")


async def _decide(request: web.Request, state: str) -> web.Response:
    """The answer and the new quota are one transaction. Asking for the same answer again changes nothing."""
    api = api_of(request)
    tenant_name, id = request.match_info["tenant"], request.match_info["id"]
    body = await body_object(request, {"answer": str})
    own_key, tenant_key = records.application_key(tenant_name, id), records.tenant_key(tenant_name)
    item, tenant_item = await api.store.get(own_key), await api.store.get(tenant_key)
    if item is None or tenant_item is None:
        raise not_found("application", id)
    application = records.decode(records.Application, item.value)
    if application.state == state:
        return answer(application_view(application))
    if application.state != "OPEN":
        raise conflict(
            "already_answered",
            f"application {id} is {application.state} already",
            field_name="state",
            value=application.state,
        )
    after = evolve(
        application, state=state, answer=_short_text(body, "answer"), answered_at_ms=api.clock_ms()
    )
    compares = [unchanged(own_key, item.mod_revision), unchanged(tenant_key, tenant_item.mod_revision)]
    writes = [Put(own_key, records.encode(after))]
    if state == "GRANTED":
        tenant = replace(
            records.decode(Tenant, tenant_item.value), quota_memory_mib=application.quota_memory_mib
        )
        writes.append(Put(tenant_key, records.encode(tenant)))
    result = await api.store.txn(compares, writes)
    if not result.succeeded:
        raise conflict("changed", f"application {id} or its tenant was changed meanwhile; try again")
    await api.passed(result.revision)
    return answer(application_view(after), revision=result.revision)


def _short_text(body: dict[str, object], field: str) -> str:
    text = str(body.get(field) or "")
    if len(text) > _MAX_TEXT:
        raise refused(
            "bad_fields",
            field,
            f"{field} is longer than {_MAX_TEXT} characters",
            limit=_MAX_TEXT,
            value=len(text),
        )
    return text
