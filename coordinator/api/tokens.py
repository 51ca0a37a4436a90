"""Bearer tokens: made here and shown once; only their hash is kept."""

from __future__ import annotations

import secrets

from aiohttp import web

from coordinator import records
from coordinator.api.answers import CursorInvalid, answer, page
from coordinator.api.auth import ADMIN, TENANT
from coordinator.api.context import api_of, caller_of
from coordinator.api.problems import Fault, Problem, bad_parameter, not_found, refused
from coordinator.api.queries import body_object, known_only, page_limit
from coordinator.api.views import token_view
from coordinator.store import Delete, Put, absent, created_at

_MAX_LABEL = 128
TOKEN_PREFIX = "serai_"


async def create_token(request: web.Request) -> web.Response:
    api = api_of(request)
    body = await body_object(request, {"role": str, "tenant": str, "label": str}, required=("role",))
    role, tenant, label = str(body["role"]), str(body.get("tenant") or ""), str(body.get("label") or "")
    if role not in (ADMIN, TENANT):
        raise refused(
            "bad_fields",
            "role",
            f"role must be admin or tenant, not {role!r}",
            limit="admin, tenant",
            value=role,
        )
    if len(label) > _MAX_LABEL:
        raise refused(
            "bad_fields",
            "label",
            f"label is longer than {_MAX_LABEL} characters",
            limit=_MAX_LABEL,
            value=len(label),
        )
    compares = []
    if role == TENANT:
        item = await api.store.get(records.tenant_key(tenant)) if tenant else None
        if item is None:
            raise refused("unknown_tenant", "tenant", f"there is no tenant {tenant!r}", value=tenant)
        compares.append(created_at(item.key, item.create_revision))
    elif tenant:
        raise Problem(
            422,
            "bad_fields",
            "an admin token has no tenant",
            (Fault("tenant", "must be left out", "", tenant),),
        )
    # From the operating system's source, not from the injected Random: whoever guesses it is the tenant.
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    record = records.Token(role, tenant, label, api.clock_ms())
    key = records.token_key(token)
    result = await api.store.txn((*compares, absent(key)), (Put(key, records.encode(record)),))
    if not result.succeeded:
        raise refused("unknown_tenant", "tenant", f"tenant {tenant!r} has just gone", value=tenant)
    view = token_view(records.token_hash(token), record)
    return answer(
        {"token": token, **view}, status=201, revision=result.revision, headers={"Cache-Control": "no-store"}
    )


async def list_tokens(request: web.Request) -> web.Response:
    known_only(request, ("limit", "cursor"))
    api = api_of(request)
    listing = await api.store.list(records.TOKENS)
    tokens = list(records.readable(records.Token, listing.items))
    cursor = request.query.get("cursor", "")
    try:
        found, following = page(tokens, key=lambda pair: (pair[0],), limit=page_limit(request), cursor=cursor)
    except CursorInvalid as error:
        raise bad_parameter("cursor", "the next_cursor of this list", cursor, str(error)) from error
    items = [token_view(digest, token) for digest, token in found]
    return answer(
        {"items": items, "next_cursor": following, "revision": listing.revision}, revision=listing.revision
    )


async def delete_token(request: web.Request) -> web.Response:
    api, digest = api_of(request), request.match_info["sha256"]
    key = records.TOKENS + digest
    if await api.store.get(key) is None:
        raise not_found("token", digest)
    result = await api.store.txn((), (Delete(key),))
    api.tokens.forget(digest)
    return web.Response(status=204, headers={"X-Serai-Revision": str(result.revision)})


async def whoami(request: web.Request) -> web.Response:
    caller = caller_of(request)
    return answer({"role": caller.role, "tenant": caller.tenant, "label": caller.label})
