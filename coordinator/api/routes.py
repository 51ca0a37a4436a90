"""The one table of routes: the application is built from it, and so is the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from attrs import frozen

from coordinator.api import (
    applications,
    exposition,
    jobs,
    logs,
    nodes,
    overview,
    streaming,
    submitting,
    tenants,
    tokens,
)
from coordinator.api.auth import ADMIN, TENANT

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ANYONE = "anyone"
JSON = "application/json"


@frozen
class Answer:
    """`schema` names a component of the OpenAPI document; empty for an answer without a body."""

    status: int
    schema: str = ""
    media: str = JSON


@frozen
class Route:
    """`role`: anyone (no token), tenant (any token), admin. `is_stream`: it may last, so no time limit holds for it.
    `query` names parameters that are described in `coordinator.api.schemas`."""

    method: str
    path: str
    name: str
    handler: Handler
    summary: str
    answers: tuple[Answer, ...]
    role: str = TENANT
    query: tuple[str, ...] = ()
    body: str = ""
    is_stream: bool = False
    yaml: bool = False


def _ok(schema: str, *others: Answer) -> tuple[Answer, ...]:
    return (Answer(200, schema), *others)


_PAGE = ("limit", "cursor")

ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/jobs",
        "submitJobs",
        submitting.submit_jobs,
        "Submit a job, or a list of jobs all or none",
        (Answer(201, "Submitted"),),
        body="Submission",
        yaml=True,
    ),
    Route(
        "GET",
        "/v1/jobs",
        "listJobs",
        jobs.list_jobs,
        "List jobs, oldest first unless sorted otherwise",
        _ok("JobList"),
        query=jobs.LIST_PARAMETERS,
    ),
    Route("GET", "/v1/jobs/{id}", "getJob", jobs.get_job, "A job", _ok("Job")),
    Route(
        "POST",
        "/v1/jobs/{id}/cancel",
        "cancelJob",
        jobs.cancel_job,
        "Cancel a job; 200 where it is over already",
        (Answer(202, "Job"), Answer(200, "Job")),
    ),
    Route(
        "GET",
        "/v1/jobs/{id}/logs",
        "getLogs",
        logs.get_logs,
        "The output of a task of a job",
        (Answer(200, "Text", "text/plain"),),
        query=logs.PARAMETERS,
        is_stream=True,
    ),
    Route(
        "GET",
        "/v1/jobs/{id}/events",
        "getJobEvents",
        jobs.get_history,
        "What happened to a job",
        _ok("HappeningList"),
    ),
    Route(
        "GET",
        "/v1/events",
        "followEvents",
        streaming.follow_events,
        "Live events as server-sent events",
        (Answer(200, "Text", "text/event-stream"),),
        is_stream=True,
    ),
    Route(
        "GET",
        "/v1/queue",
        "getQueue",
        overview.get_queue,
        "Waiting jobs in their order, and why each waits",
        _ok("Queue"),
        query=("tenant", *_PAGE),
    ),
    Route(
        "GET",
        "/v1/tenants",
        "listTenants",
        tenants.list_tenants,
        "Tenants with use and shares",
        _ok("TenantList"),
        query=_PAGE,
    ),
    Route(
        "POST",
        "/v1/tenants",
        "createTenant",
        tenants.create_tenant,
        "Create a tenant",
        (Answer(201, "Tenant"),),
        ADMIN,
        body="NewTenant",
    ),
    Route("GET", "/v1/tenants/{tenant}", "getTenant", tenants.get_tenant, "A tenant", _ok("Tenant")),
    Route(
        "PATCH",
        "/v1/tenants/{tenant}",
        "changeTenant",
        tenants.change_tenant,
        "Change quota, limits or weight",
        _ok("Tenant"),
        ADMIN,
        body="TenantChange",
    ),
    Route(
        "DELETE",
        "/v1/tenants/{tenant}",
        "deleteTenant",
        tenants.delete_tenant,
        "Delete a tenant without jobs",
        (Answer(204),),
        ADMIN,
    ),
    Route(
        "GET",
        "/v1/tenants/{tenant}/applications",
        "listApplications",
        applications.list_applications,
        "Applications for another quota",
        _ok("ApplicationList"),
        query=_PAGE,
    ),
    Route(
        "POST",
        "/v1/tenants/{tenant}/applications",
        "apply",
        applications.apply,
        "Apply for another quota",
        (Answer(201, "Application"),),
        body="NewApplication",
    ),
    Route(
        "POST",
        "/v1/tenants/{tenant}/applications/{id}/grant",
        "grantApplication",
        applications.grant,
        "Grant an application: its quota holds from now on",
        _ok("Application"),
        ADMIN,
        body="Decision",
    ),
    Route(
        "POST",
        "/v1/tenants/{tenant}/applications/{id}/refuse",
        "refuseApplication",
        applications.refuse,
        "Refuse an application",
        _ok("Application"),
        ADMIN,
        body="Decision",
    ),
    Route(
        "GET",
        "/v1/nodes",
        "listNodes",
        nodes.list_nodes,
        "Nodes with GPUs and slices",
        _ok("NodeList"),
        query=_PAGE,
    ),
    Route("GET", "/v1/nodes/{node}", "getNode", nodes.get_node, "A node", _ok("Node")),
    Route(
        "POST",
        "/v1/nodes/{node}/cordon",
        "cordonNode",
        nodes.cordon,
        "Give a node no new work",
        _ok("Node"),
        ADMIN,
        body="Cordon",
    ),
    Route(
        "POST",
        "/v1/nodes/{node}/uncordon",
        "uncordonNode",
        nodes.uncordon,
        "Give a node work again",
        _ok("Node"),
        ADMIN,
    ),
    Route("GET", "/v1/cluster", "getCluster", overview.get_cluster, "The cluster in figures", _ok("Cluster")),
    Route(
        "POST",
        "/v1/tokens",
        "createToken",
        tokens.create_token,
        "Make a token; it is shown this once",
        (Answer(201, "NewToken"),),
        ADMIN,
        body="TokenWish",
    ),
    Route(
        "GET",
        "/v1/tokens",
        "listTokens",
        tokens.list_tokens,
        "Tokens by their hash",
        _ok("TokenList"),
        ADMIN,
        query=_PAGE,
    ),
    Route(
        "DELETE",
        "/v1/tokens/{sha256}",
        "deleteToken",
        tokens.delete_token,
        "Revoke a token",
        (Answer(204),),
        ADMIN,
    ),
    Route("GET", "/v1/whoami", "whoAmI", tokens.whoami, "Who this token is", _ok("Caller")),
    Route(
        "GET",
        "/v1/debug/snapshot",
        "getSnapshot",
        overview.get_snapshot,
        "The input of the next cycle, for debugging",
        _ok("Snapshot"),
        ADMIN,
    ),
    Route(
        "GET", "/healthz", "healthz", overview.healthz, "Whether this process answers", _ok("Health"), ANYONE
    ),
    Route(
        "GET", "/readyz", "readyz", overview.readyz, "Whether requests can be served", _ok("Health"), ANYONE
    ),
    Route(
        "GET",
        "/metrics",
        "getMetrics",
        exposition.get_metrics,
        "Metrics for Prometheus",
        (Answer(200, "Text", "text/plain"),),
        ANYONE,
    ),
    Route(
        "GET", "/openapi.json", "getOpenApi", overview.get_openapi, "This document", _ok("OpenApi"), ANYONE
    ),
)
