"""The OpenAPI 3.1 document, made from the table of routes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coordinator.api.answers import REVISION_HEADER, dump
from coordinator.api.schemas import COMPONENTS, PARAMETERS, TEXT, Schema, ref

if TYPE_CHECKING:
    from coordinator.api.routes import Answer, Route

_PLACE = re.compile(r"{(\w+)}")


def document(routes: Sequence[Route], version: str) -> bytes:
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return dump(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Serai",
                "version": version,
                "description": "A fair scheduler for GPU clusters.",
            },
            "paths": paths,
            "components": {
                "schemas": dict(COMPONENTS),
                "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"bearer": []}],
        }
    )


def _operation(route: Route) -> dict[str, object]:
    parameters = [_parameter(name, "path", "", TEXT) for name in _PLACE.findall(route.path)]
    parameters += [_parameter(name, "query", *PARAMETERS[name]) for name in route.query]
    if route.name == "submitJobs":
        text = "Same key and body give the same answer for 24 hours; another body is a 409"
        parameters.append(_parameter("Idempotency-Key", "header", text, {"type": "string", "maxLength": 255}))
    if route.name == "followEvents":
        parameters.append(_parameter("Last-Event-ID", "header", "The last event seen: go on after it", TEXT))
    operation: dict[str, object] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": parameters,
        "responses": {
            **{str(answer.status): _response(answer) for answer in route.answers},
            "default": {
                "description": "A problem (RFC 9457)",
                "content": {"application/problem+json": {"schema": ref("Problem")}},
            },
        },
    }
    if route.role == "anyone":
        operation["security"] = []
    if route.body:
        kinds = ("application/json", "application/yaml") if route.yaml else ("application/json",)
        operation["requestBody"] = {
            "required": route.name == "submitJobs",
            "content": {kind: {"schema": ref(route.body)} for kind in kinds},
        }
    return operation


def _parameter(name: str, place: str, description: str, schema: Schema) -> dict[str, object]:
    return {
        "name": name,
        "in": place,
        "description": description,
        "required": place == "path",
        "schema": schema,
    }


def _response(answer: Answer) -> dict[str, object]:
    response: dict[str, object] = {
        "description": "Success",
        "headers": {
            REVISION_HEADER: {"description": "Store revision that the answer reflects", "schema": TEXT}
        },
    }
    if answer.schema:
        response["content"] = {answer.media: {"schema": ref(answer.schema)}}
    return response
