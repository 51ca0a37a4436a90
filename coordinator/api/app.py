"""The application: routes of the one table, and what holds for all of them.

From the outside in: time and count the request, turn every error into a problem document, know the caller and what
the role may do, end what takes too long. Nothing here decides about jobs; every write is a record in the store, every
read a view of the replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from random import Random

from aiohttp import web
from aiohttp.typedefs import Middleware

from coordinator.api.answers import REVISION_HEADER
from coordinator.api.auth import ADMIN, TokenBook
from coordinator.api.context import API, CALLER, Api, Limits, LogSource, api_of
from coordinator.api.dashboard import load_page
from coordinator.api.events import EventHub
from coordinator.api.metrics import Metrics
from coordinator.api.openapi import document
from coordinator.api.problems import Fault, Problem, conflict, unavailable
from coordinator.api.queries import header
from coordinator.api.routes import ANYONE, ROUTES, Handler, Route
from coordinator.api.submit import SubmitPump
from coordinator.api.waiting import WaitingReasons
from coordinator.config import Settings
from coordinator.fairness import policy_from
from coordinator.gauges import WatchLag
from coordinator.records import Unreadable
from coordinator.replica import Replica
from coordinator.store import Store, StoreError, StoreFull, StoreUncertain

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 1024 * 1024


def make_app(
    store: Store,
    replica: Replica,
    settings: Settings,
    engine: LogSource,
    clock_ms: Callable[[], int],
    random: Random,
    version: str,
    *,
    limits: Limits | None = None,
) -> web.Application:
    """The HTTP API on a replica that the caller runs. Its own tasks live from the start of the application to its
    clean-up; streams that are still open then are ended."""
    limits = limits or Limits()
    metrics = Metrics()
    lag = WatchLag(replica, metrics.observe_lag)
    routes = {(route.method, route.path): route for route in ROUTES}
    app = web.Application(
        client_max_size=MAX_BODY_BYTES,
        middlewares=[_timing(metrics), _errors, _access(routes, limits.request_seconds)],
    )
    pump = SubmitPump(
        store,
        max_operations=settings.max_writes_per_transaction,
        queue_jobs=settings.submit_queue_jobs,
        idempotency_seconds=settings.idempotency_seconds,
        clock_ms=clock_ms,
        random=random,
        observe_batch=metrics.observe_batch,
        observe_revision=lag.written,
    )
    reasons = WaitingReasons(
        lambda: replica.cluster.snapshot(clock_ms()),
        lambda: replica.cluster.revision,
        policy_from(settings),
        clock_ms,
    )
    app[API] = Api(
        store=store,
        replica=replica,
        settings=settings,
        engine=engine,
        clock_ms=clock_ms,
        random=random,
        version=version,
        tokens=TokenBook(store),
        pump=pump,
        reasons=reasons,
        hub=EventHub(store, replica, limits.kept_events),
        metrics=metrics,
        lag=lag,
        openapi=document(ROUTES, version),
        limits=limits,
    )
    for route in ROUTES:
        app.router.add_route(route.method, route.path, route.handler, name=route.name)
    app.router.add_get("/", load_page().get, name="dashboard")
    app.cleanup_ctx.append(_running)
    app.on_response_prepare.append(_say_revision)
    app.on_shutdown.append(_end_streams)
    return app


def make_runner(app: web.Application, limits: Limits | None = None) -> web.AppRunner:
    """What serves the app: a handler ends with its client, and half a head does not hold a connection for ever. aiohttp
    counts the time for a head and the idle time between requests as one, from the last answer or the start."""
    head_seconds = (limits or Limits()).head_seconds
    return web.AppRunner(app, access_log=None, handler_cancellation=True, keepalive_timeout=head_seconds)


async def _running(app: web.Application) -> AsyncIterator[None]:
    api = app[API]
    api.pump.start()
    api.hub.start()
    tokens = asyncio.create_task(api.tokens.follow(), name="tokens")
    yield
    api.hub.close()
    await api.pump.close()
    await api.lag.close()
    await api.reasons.close()
    left = (tokens, *api.unfinished)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _end_streams(app: web.Application) -> None:
    for task in tuple(app[API].streams):
        task.cancel()


async def _say_revision(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.setdefault(REVISION_HEADER, str(api_of(request).revision))


def _timing(metrics: Metrics) -> Middleware:
    @web.middleware
    async def timing(request: web.Request, handler: Handler) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        began, status = loop.time(), 500
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            # By the route's own path, never by the one that was asked for: that would be a series for each job.
            metrics.observe_request(
                request.method, resource.canonical if resource else "none", status, loop.time() - began
            )

    return timing


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Problem as problem:
        return problem.answer()
    except web.HTTPException as error:
        return _from_aiohttp(error).answer()
    except StoreError as error:
        return _from_store(error).answer()
    except Unreadable as error:
        logger.warning("%s %s: %s", request.method, request.match_info.route.resource, error)
        text = f"a record that this needs cannot be read: {error}"
        return conflict("record_unreadable", text, hint="an operator must mend or delete it in etcd").answer()
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        logger.exception("%s %s failed", request.method, request.match_info.route.resource)
        return Problem(500, "internal", "the coordinator made a mistake; its log says which").answer()


def _from_aiohttp(error: web.HTTPException) -> Problem:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        text = f"the body is larger than {MAX_BODY_BYTES} bytes"
        return Problem(
            413, "too_large", text, (Fault("body", text, MAX_BODY_BYTES),), "send it in several requests"
        )
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return Problem(405, "method_not_allowed", f"allowed here: {allowed}", headers={"Allow": allowed})
    if isinstance(error, web.HTTPNotFound):
        return Problem(
            404, "no_such_path", "there is nothing at this path", hint="GET /openapi.json lists the paths"
        )
    return Problem(error.status, "refused", error.reason or "refused")


def _from_store(error: StoreError) -> Problem:
    if isinstance(error, StoreFull):
        return unavailable(
            "store_full",
            "the store's space quota is used up; it takes no writes",
            hint="an operator must compact and defragment etcd, then disarm its NOSPACE alarm",
        )
    if isinstance(error, StoreUncertain):
        return unavailable(
            "store_uncertain",
            "the store's answer was lost: the change may have been made, or not",
            hint="look before you try again, or repeat a submit with the same Idempotency-Key",
        )
    logger.warning("the store refused or is not there: %s", error)
    return unavailable(
        "store_unavailable", "the store is not available; nothing was changed", hint="try again later"
    )


def _access(routes: dict[tuple[str, str], Route], request_seconds: float) -> Middleware:
    @web.middleware
    async def access(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        method = "GET" if request.method == "HEAD" else request.method
        route = routes.get((method, resource.canonical)) if resource else None
        if route is None:
            return await handler(request)
        try:
            async with asyncio.timeout(request_seconds) as limit:
                if route.role != ANYONE:
                    await _authenticate(request, route)
                if route.is_stream:
                    limit.reschedule(None)
                return await handler(request)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise unavailable(
                "timeout",
                f"there was no answer within {request_seconds:g} s; a change may still be made",
                hint="look before you try again, or repeat a submit with the same Idempotency-Key",
            ) from error

    return access


async def _authenticate(request: web.Request, route: Route) -> None:
    caller = await api_of(request).tokens.caller(header(request, "Authorization"))
    request[CALLER] = caller
    if route.role == ADMIN and not caller.is_admin:
        raise Problem(
            403, "admin_only", "only an administrator may do this", hint="ask for it with an admin token"
        )
