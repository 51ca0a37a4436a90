"""The OpenAPI document against the real routes and the real answers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from coordinator import records
from coordinator.api.routes import ROUTES
from coordinator.model import TaskState
from tests.api_world import SPEC, Caller, World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = await World.make()
    await world.put_node()
    yield world
    await world.close()


async def the_document(world: World) -> dict[str, Any]:
    client = await world.instance()
    document: dict[str, Any] = await Caller(client).get("/openapi.json")
    return document


async def test_the_document_is_valid(world: World) -> None:
    document = await the_document(world)
    OpenAPIV31SpecValidator(document).validate()


async def test_it_tells_every_route_and_no_other(world: World) -> None:
    client = await world.instance()
    document = await Caller(client).get("/openapi.json")
    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    real = {
        (route.method, route.resource.canonical)
        for route in client.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert told == real - {("GET", "/")}, "the page is for people"


async def test_every_schema_is_used_and_every_reference_leads_somewhere(world: World) -> None:
    document = await the_document(world)
    text = json.dumps(document)
    names = set(document["components"]["schemas"])
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used == names


class Checker:
    """Calls a route and holds its answer against the document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self.checked: set[str] = set()

    async def call(
        self, caller: Caller, method: str, path: str, route: str, body: object = None, **query: str
    ) -> Any:
        status, answer, headers = await caller.call(method, path, body, **query)
        operation = self._document["paths"][route][method.lower()]
        assert str(status) in operation["responses"] or status >= 400, (status, answer)
        response = operation["responses"].get(str(status), operation["responses"]["default"])
        self.checked.add(operation["operationId"])
        content = response.get("content")
        if content is None:
            assert not answer
            return answer
        media = headers["Content-Type"].split(";")[0]
        schema = {"components": self._document["components"], **content[media]["schema"]}
        jsonschema.Draft202012Validator(schema).validate(answer)
        if body is not None and status < 300:
            wanted = operation["requestBody"]["content"]["application/json"]["schema"]
            jsonschema.Draft202012Validator({"components": self._document["components"], **wanted}).validate(
                body
            )
        return answer


async def test_every_answer_has_the_form_that_the_document_says(world: World) -> None:
    admin, a, _ = await world.callers()
    check = Checker(await admin.get("/openapi.json"))
    job = await check.call(a, "POST", "/v1/jobs", "/v1/jobs", SPEC)
    await check.call(a, "POST", "/v1/jobs", "/v1/jobs", [SPEC, {**SPEC, "tasks": 2}])
    await check.call(a, "POST", "/v1/jobs", "/v1/jobs", {"image": 5, "gpu": 1})
    await check.call(a, "POST", "/v1/jobs", "/v1/jobs", {"image": "i", "gpus": 99})
    await check.call(a, "GET", "/v1/queue", "/v1/queue")
    live = await world.place(job["id"])
    await world.task(live, TaskState.RUNNING)
    await world.put(records.LEADER, records.Leadership("c1", "host:1", world.clock()))
    id = job["id"]
    await check.call(a, "GET", f"/v1/jobs/{id}", "/v1/jobs/{id}")
    await check.call(a, "GET", "/v1/jobs", "/v1/jobs", limit="2")
    await check.call(a, "GET", f"/v1/jobs/{id}/events", "/v1/jobs/{id}/events")
    await check.call(a, "GET", f"/v1/jobs/{id}/logs", "/v1/jobs/{id}/logs")
    await check.call(a, "POST", f"/v1/jobs/{id}/cancel", "/v1/jobs/{id}/cancel")
    await check.call(admin, "GET", "/v1/tenants", "/v1/tenants")
    await check.call(
        admin, "POST", "/v1/tenants", "/v1/tenants", {"name": "new", "quota_memory": "1GiB", "weight": 0}
    )
    await check.call(admin, "GET", "/v1/tenants/new", "/v1/tenants/{tenant}")
    await check.call(admin, "PATCH", "/v1/tenants/new", "/v1/tenants/{tenant}", {"limit_memory": None})
    await check.call(admin, "DELETE", "/v1/tenants/new", "/v1/tenants/{tenant}")
    base = "/v1/tenants/{tenant}/applications"
    ids = []
    for _ in range(2):
        wish = {"quota_memory": "2GiB", "text": "more"}
        ids.append((await check.call(a, "POST", "/v1/tenants/team-a/applications", base, wish))["id"])
    await check.call(a, "GET", "/v1/tenants/team-a/applications", base)
    answered = {"answer": "so be it"}
    await check.call(
        admin, "POST", f"/v1/tenants/team-a/applications/{ids[0]}/grant", base + "/{id}/grant", answered
    )
    await check.call(
        admin, "POST", f"/v1/tenants/team-a/applications/{ids[1]}/refuse", base + "/{id}/refuse", answered
    )
    await check.call(a, "GET", "/v1/nodes", "/v1/nodes")
    await check.call(a, "GET", "/v1/nodes/n1", "/v1/nodes/{node}")
    await check.call(admin, "POST", "/v1/nodes/n1/cordon", "/v1/nodes/{node}/cordon", {"reason": "r"})
    await check.call(admin, "POST", "/v1/nodes/n1/uncordon", "/v1/nodes/{node}/uncordon")
    await check.call(a, "GET", "/v1/cluster", "/v1/cluster")
    token = await check.call(
        admin, "POST", "/v1/tokens", "/v1/tokens", {"role": "tenant", "tenant": "team-a"}
    )
    await check.call(admin, "GET", "/v1/tokens", "/v1/tokens")
    await check.call(admin, "DELETE", f"/v1/tokens/{token['sha256']}", "/v1/tokens/{sha256}")
    await check.call(a, "GET", "/v1/whoami", "/v1/whoami")
    await check.call(admin, "GET", "/v1/debug/snapshot", "/v1/debug/snapshot")
    for path in ("/healthz", "/readyz", "/metrics", "/openapi.json"):
        await check.call(Caller(a.client), "GET", path, path)
    assert check.checked == {route.name for route in ROUTES} - {"followEvents"}, "that one has its own tests"


async def test_the_page_may_run_what_stands_in_it_and_loads_nothing_else(world: World) -> None:
    client = await world.instance()
    status, page, headers = await Caller(client).call("GET", "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    policy = headers["Content-Security-Policy"]
    for kind in ("script", "style"):
        sources = re.findall(f"<{kind}[^>]*>(.*?)</{kind}>", page, re.DOTALL)
        assert len(sources) == 1
        digest = base64.b64encode(hashlib.sha256(sources[0].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not re.search(r"(src|href)=|https?://|innerHTML|eval\(|\son\w+=|style=", page)
    paths = set(re.findall(r'"(/v1/\w+)', page))
    assert paths <= {route.path for route in ROUTES}
    assert len(paths) == 5
