"""The tenant routes: quota, limits and weight are set here; use and shares are read."""

from __future__ import annotations

from decimal import Decimal

from aiohttp import web
from msgspec.structs import replace

from coordinator import records
from coordinator.api.answers import CursorInvalid, answer, page
from coordinator.api.auth import Caller
from coordinator.api.context import Api, api_of, caller_of
from coordinator.api.overview import tenant_shares
from coordinator.api.problems import Fault, Problem, bad_parameter, conflict, not_found, refused, unavailable
from coordinator.api.queries import body_object, known_only, page_limit
from coordinator.api.views import View, tenant_view
from coordinator.model import Tenant
from coordinator.store import Delete, KeyValue, Put, absent, unchanged
from jobspecs.fields import tenant_fault
from jobspecs.units import MAX_SIZE_MIB, ValueInvalid, parse_size

_MAX_WEIGHT = 1_000_000
_MAX_COMPUTE_MILLI = 10**9
_MOST_EXPONENT = 12
_ROUNDS = 10
FIELDS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "quota_memory": str,
    "quota_memory_mib": int,
    "limit_memory": str,
    "limit_memory_mib": int,
    "limit_compute": (str, int, float),
    "limit_compute_milli": int,
    "weight": int,
}


async def list_tenants(request: web.Request) -> web.Response:
    """Everyone's for an admin, one's own for a tenant."""
    known_only(request, ("limit", "cursor"))
    api, caller = api_of(request), caller_of(request)
    mine = [tenant for tenant in api.cluster.tenants.values() if caller.may_see(tenant.name)]
    try:
        found, cursor = page(
            mine,
            key=lambda tenant: (tenant.name,),
            limit=page_limit(request),
            cursor=request.query.get("cursor", ""),
        )
    except CursorInvalid as error:
        raise bad_parameter(
            "cursor", "the next_cursor of this list", request.query.get("cursor"), str(error)
        ) from error
    views = tenant_views(api, found)
    return answer({"items": views, "next_cursor": cursor, "revision": api.revision})


async def get_tenant(request: web.Request) -> web.Response:
    known_only(request, ())
    api = api_of(request)
    return answer(await _view(api, _allowed(request)))


async def create_tenant(request: web.Request) -> web.Response:
    api = api_of(request)
    body = await body_object(request, FIELDS, required=("name",))
    name = str(body["name"])
    fault = tenant_fault(name)
    if fault is not None:
        raise refused("bad_name", "name", f"name {fault.message}", limit=fault.limit, value=fault.value)
    tenant = _changed(Tenant(name, created_at_ms=api.clock_ms()), body)
    key = records.tenant_key(name)
    result = await api.store.txn((absent(key),), (Put(key, records.encode(tenant)),))
    if not result.succeeded:
        raise conflict(
            "tenant_exists",
            f"tenant {name!r} exists already",
            field_name="name",
            value=name,
            hint=f"change it with PATCH /v1/tenants/{name}",
        )
    await api.passed(result.revision)
    return answer(await _view(api, name), status=201, revision=result.revision)


async def change_tenant(request: web.Request) -> web.Response:
    """A quota below what is used is accepted and shown: nothing is killed for it, nothing new is started."""
    api, name = api_of(request), request.match_info["tenant"]
    body = await body_object(request, {field: kind for field, kind in FIELDS.items() if field != "name"})
    revision = await change(api, name, body)
    return answer(await _view(api, name), revision=revision)


async def change(api: Api, name: str, body: dict[str, object]) -> int:
    """Writes the fields of `body` over the tenant's; the revision, which the replica has passed."""
    for _ in range(_ROUNDS):
        tenant, item = await _read(api, name)
        after = _changed(replace(tenant, closing=False), body)
        result = await api.store.txn(
            (unchanged(item.key, item.mod_revision),), (Put(item.key, records.encode(after)),)
        )
        if result.succeeded:
            await api.passed(result.revision)
            return result.revision
    raise unavailable("busy", f"tenant {name!r} is being changed by others; try again")


async def delete_tenant(request: web.Request) -> web.Response:
    """Goes to its end even if the client goes away, so that no tenant stays closed half-way."""
    api = api_of(request)
    return await api.to_the_end(_delete(api, request.match_info["tenant"]))


async def _delete(api: Api, name: str) -> web.Response:
    """First the tenant is closed to new jobs, so that none can slip in while it is looked for jobs."""
    tenant, item = await _read(api, name)
    closed = replace(tenant, closing=True)
    result = await api.store.txn(
        (unchanged(item.key, item.mod_revision),), (Put(item.key, records.encode(closed)),)
    )
    if not result.succeeded:
        raise conflict("changed", f"tenant {name!r} was changed by another request; try again")
    jobs = await _held(api, name, result.revision)
    if jobs:
        await api.store.txn((unchanged(item.key, result.revision),), (Put(item.key, records.encode(tenant)),))
        text = f"tenant {name!r} has {jobs} live or waiting jobs"
        raise conflict(
            "tenant_has_jobs", text, field_name="jobs", value=jobs, hint="cancel them, or wait for their end"
        )
    done = await api.store.txn((unchanged(item.key, result.revision),), (Delete(item.key),))
    if not done.succeeded:
        raise conflict("changed", f"tenant {name!r} was changed by another request; try again")
    await api.passed(done.revision)
    return web.Response(status=204, headers={"X-Serai-Revision": str(done.revision)})


async def _held(api: Api, name: str, revision: int) -> int:
    """How many jobs of the tenant are not over, certainly as new as `revision`: read from the store itself."""
    waiting = await api.store.list(f"{records.QUEUE}{name}/", limit=1)
    await api.replica.wait_for(max(revision, waiting.revision))
    live = sum(job.tenant == name for job in api.cluster.live_jobs.values())
    requeued = sum(job.tenant == name for job in api.cluster.waiting_jobs.values())
    return live + requeued


def tenant_views(api: Api, tenants: list[Tenant]) -> list[View]:
    """Views of several tenants for one pass over the live jobs."""
    memory: dict[str, int] = {}
    compute: dict[str, int] = {}
    running: dict[str, int] = {}
    waiting: dict[str, int] = {}
    for job in api.cluster.live_jobs.values():
        running[job.tenant] = running.get(job.tenant, 0) + 1
        if job.allocation is not None:
            memory[job.tenant] = memory.get(job.tenant, 0) + job.allocation.memory_mib
            compute[job.tenant] = compute.get(job.tenant, 0) + job.allocation.compute_milli
    for job in api.cluster.waiting_jobs.values():
        waiting[job.tenant] = waiting.get(job.tenant, 0) + 1
    shares = tenant_shares(api.snapshot(), api.reasons.policy)
    return [
        tenant_view(
            tenant,
            used_memory_mib=memory.get(tenant.name, 0),
            used_compute_milli=compute.get(tenant.name, 0),
            running=running.get(tenant.name, 0),
            waiting=waiting.get(tenant.name, 0),
            shares=shares.get(tenant.name, {"space_share": None, "time_share": None, "priority": None}),
        )
        for tenant in tenants
    ]


async def _view(api: Api, name: str) -> View:
    tenant = api.cluster.tenants.get(name)
    if tenant is None:
        await api.catch_up()
        tenant = api.cluster.tenants.get(name)
    if tenant is None:
        raise not_found("tenant", name)
    return tenant_views(api, [tenant])[0]


def _allowed(request: web.Request) -> str:
    return allowed(caller_of(request), request.match_info["tenant"])


def allowed(caller: Caller, name: str) -> str:
    """The name, where the caller may see this tenant; else a 404 `Problem`."""
    if not caller.may_see(name):
        raise not_found("tenant", name)
    return name


async def _read(api: Api, name: str) -> tuple[Tenant, KeyValue]:
    item = await api.store.get(records.tenant_key(name))
    if item is None:
        raise not_found("tenant", name)
    return records.decode(Tenant, item.value), item


def _changed(tenant: Tenant, body: dict[str, object]) -> Tenant:
    """The tenant with the fields that `body` names; null takes a limit away. All faults at once."""
    faults: list[Fault] = []
    changes: dict[str, int | None] = {}
    for field, nullable in (("quota_memory", False), ("limit_memory", True)):
        _take_size(field, nullable, body, changes, faults)
    _take_compute(body, changes, faults)
    if "weight" in body:
        _take_whole("weight", "weight", body["weight"], _MAX_WEIGHT, changes, faults)
    if faults:
        raise Problem(422, "bad_fields", "; ".join(fault.message for fault in faults), faults)
    return replace(tenant, **changes)


def _take_size(
    field: str, nullable: bool, body: dict[str, object], changes: dict[str, int | None], faults: list[Fault]
) -> None:
    """`field` is a size with its unit, `field`_mib the same as a whole number."""
    target = f"{field}_mib"
    for name in (field, target):
        if name in body and body[name] is None:
            if nullable:
                changes[target] = None
            else:
                faults.append(Fault(name, f"{name} must be a size", "a size", None))
    if isinstance(body.get(field), str):
        try:
            changes[target] = parse_size(body[field], least_mib=0)
        except ValueInvalid as error:
            faults.append(Fault(field, f"{field}: {error.message}", error.limit, body[field]))
    if body.get(target) is not None:
        _take_whole(target, target, body[target], MAX_SIZE_MIB, changes, faults)


def _take_compute(body: dict[str, object], changes: dict[str, int | None], faults: list[Fault]) -> None:
    """`limit_compute` in GPUs: 16, "0.5", "150%" or "500m"; `limit_compute_milli` in thousandths."""
    for name in ("limit_compute", "limit_compute_milli"):
        if name in body and body[name] is None:
            changes["limit_compute_milli"] = None
    text = body.get("limit_compute")
    if text is not None:
        milli = _milli(str(text).strip())
        if milli is None or not 0 <= milli <= _MAX_COMPUTE_MILLI:
            limit = "GPUs with at most three digits after the point, such as 16, 0.5, 150% or 500m"
            faults.append(Fault("limit_compute", f"limit_compute must be {limit}, not {text!r}", limit, text))
        else:
            changes["limit_compute_milli"] = milli
    if body.get("limit_compute_milli") is not None:
        _take_whole(
            "limit_compute_milli",
            "limit_compute_milli",
            body["limit_compute_milli"],
            _MAX_COMPUTE_MILLI,
            changes,
            faults,
        )


def _milli(text: str) -> int | None:
    factor = Decimal(10) if text.endswith("%") else Decimal(1) if text.endswith("m") else Decimal(1000)
    try:
        number = Decimal(text.rstrip("%m"))
        if not number.is_finite() or number.adjusted() > _MOST_EXPONENT:
            return None  # a short text may stand for a number that takes minutes to write out
        milli = number * factor
        return int(milli) if milli == milli.to_integral_value() else None
    except (ArithmeticError, ValueError):
        return None


def _take_whole(
    field: str, target: str, value: object, most: int, changes: dict[str, int | None], faults: list[Fault]
) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most:
        changes[target] = value
    else:
        limit = f"a whole number from 0 to {most}"
        faults.append(Fault(field, f"{field} must be {limit}, not {value!r}", limit, value))
