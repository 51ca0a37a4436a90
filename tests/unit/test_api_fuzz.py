"""Requests that nobody should send, drawn from the OpenAPI document and from what breaks parsers: never a 5xx, never a
record that cannot be read, and every "no" is a problem document."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from typing import Any
from urllib.parse import quote_from_bytes

import jsonschema
import pytest
from aiohttp.test_utils import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from coordinator import records
from coordinator.api.openapi import document
from coordinator.api.routes import ROUTES
from coordinator.model import RecordUnreadable
from coordinator.store import Change
from tests.api_world import SPEC, World

DOCUMENT: dict[str, Any] = json.loads(document(ROUTES, "0"))
OPERATIONS = [
    (method.upper(), path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]
KNOWN = (
    "team-a",
    "team-b",
    "n1",
    "0000000000000001",
    "train",
    "1",
    "0",
    "-submitted_at",
    "stderr",
    "PENDING",
)
NASTY = (
    "", " ", ".", "..", "../../etc", "%00", "\0", "\n", "\r\nX: y", "a/b", "é", "\u202e", "\ufeff", "💥", "'", '"', "{}",
    "null", "NaN", "Infinity", "-1", "1e999999", "9" * 400, "0x10", "٣", "1_000", "²", "x" * 5000, "W10", "WzEsMiwzXQ",
    "WyJhIl0", "W251bGwsbnVsbF0", "1e5GiB", "9" * 30 + "GiB", "-5GiB", "1e-9", "150%", "1e999999%", "9e999999", "***",
)  # fmt: skip
words = st.sampled_from((*KNOWN, *NASTY)) | st.text(max_size=20)
numbers = st.sampled_from(
    (0, 1, -1, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, 5e-324)
)
RAW = (
    b"NaN", b"[Infinity]", b'{"image":"a","image":"b"}', b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{", b"", b"\0", b'"\\ud800"',
    b'{"name":"\\ud800","image":"\\udfff","tenant":"\\ud800","reason":"\\ud800","label":"\\ud800","role":"\\ud800"}',
    b'{"quota_memory":"\\ud800","weight":1e400,"limit_compute":9e999999,"text":"\\ud800","\\ud800":1}',
    b'{"a":' * 5000 + b"1" + b"}" * 5000, b"[" * 100_000, b'{"priority":' + b"9" * 5000 + b"}", b"a: &a [*a]", b"--- 1\n--- 2",
    b"a: !!python/object:os.system x", b"? {a: b}\n: c", b"2001-01-01: 2001-01-01", b"{image: a, image: b}", b"<<: {image: a}",
    '{"image":"é"}'.encode("latin-1"), '{"image":"é"}'.encode("utf-16"), b"a: \x07", b"k: " + b"x" * 5_000_000,
)  # fmt: skip
MEDIA = (
    "application/json", "application/yaml", "application/json; charset=utf-16", "application/json; charset=no-such",
    "application/json; charset=idna", "application/json; charset=base64", "text/plain; charset=unicode_escape",
    "application/xml", "nonsense", "", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded",
)  # fmt: skip
Sent = tuple[str, str, str, dict[str, str], bytes | None, str]
anything = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


def like(schema: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Values as the schema wants them, and now and then others in their place."""
    if "$ref" in schema:
        return like(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]], depth)
    if "anyOf" in schema:
        return st.one_of([like(one, depth) for one in schema["anyOf"]])
    good: st.SearchStrategy[Any] = words
    if "enum" in schema:
        good = st.sampled_from(schema["enum"])
    elif schema.get("type") == "integer":
        good = st.integers(min_value=schema.get("minimum", -5), max_value=schema.get("maximum", 100_000))
    elif schema.get("type") == "array" and depth < 4:
        good = st.lists(like(schema["items"], depth + 1), max_size=3)
    elif schema.get("type") == "object" and depth < 4:
        fields = {name: like(one, depth + 1) for name, one in schema.get("properties", {}).items()}
        required = {name: fields.pop(name) for name in schema.get("required", ())}
        good = (
            st.fixed_dictionaries(required, optional=fields)
            if fields or required
            else st.dictionaries(words, words)
        )
    elif schema.get("examples"):
        good = st.sampled_from(schema["examples"])
    return st.one_of(good, good, good, anything)


def bodies(operation: dict[str, Any]) -> st.SearchStrategy[bytes]:
    media = operation.get("requestBody", {}).get("content", {}).get("application/json")
    values = like(media["schema"]) if media else anything
    encoded = values.map(lambda value: json.dumps(value).encode())
    return st.one_of(encoded, encoded, encoded, st.sampled_from(RAW), st.binary(max_size=40))


@st.composite
def requests(draw: st.DrawFn) -> Sent:
    """Method, path of the document, path with values and query, headers, body, token."""
    method, path, operation = draw(st.sampled_from(OPERATIONS))
    filled, query = path, []
    for parameter in operation["parameters"]:
        value = draw(
            st.one_of(words.map(lambda word: word.encode("utf-8", "replace")), st.binary(max_size=4))
        )
        if parameter["in"] == "path":
            filled = filled.replace(f"{{{parameter['name']}}}", quote_from_bytes(value, safe="") or "x")
        elif parameter["in"] == "query" and draw(st.booleans()):
            query.append(f"{parameter['name']}={quote_from_bytes(value, safe='')}")
    if draw(st.integers(0, 9)) == 0:
        query.append(f"{quote_from_bytes(draw(words).encode('utf-8', 'replace'))}=1")
    headers = {"Content-Type": draw(st.sampled_from((*MEDIA[:1] * 12, *MEDIA)))}
    for name in ("Idempotency-Key", "Last-Event-ID"):
        value = draw(words).encode("ascii", "ignore").decode()
        if value.isprintable() and draw(st.integers(0, 4)) == 0:
            headers[name] = value[:300]
    body = draw(bodies(operation)) if method in ("POST", "PATCH") else None
    token = draw(st.sampled_from(("admin-token", "admin-token", "a-token", "b-token", "", "x")))
    return method, path, filled + ("?" + "&".join(query) if query else ""), headers, body, token


def test_no_request_breaks_the_api() -> None:
    statuses: Counter[int] = Counter()

    @settings(max_examples=80)
    @given(st.lists(requests(), min_size=5, max_size=25))
    def sent_to_it(sent: list[Sent]) -> None:
        statuses.update(asyncio.run(_send_all(sent)))

    sent_to_it()
    assert {200, 400, 401, 403, 404, 422} <= statuses.keys(), "it was hardly asked anything"
    assert sum(statuses.values()) > 400


@pytest.mark.parametrize("media", MEDIA)
def test_each_broken_body_in_each_encoding(media: str) -> None:
    """FR-12, AP: wrong encodings, duplicate keys, lone surrogates, huge numbers, deep nesting, 5 MB, on every route
    that takes a body."""
    sent = [
        (method, path, path.replace("{tenant}", "team-a").replace("{node}", "n1").replace("{id}", "1"), {"Content-Type": media}, raw, "admin-token")
        for method, path, operation in OPERATIONS
        if method in ("POST", "PATCH")
        for raw in RAW
        if len(raw) < 1_000_000 or path == "/v1/jobs"
    ]  # fmt: skip
    asyncio.run(_send_all(sent))


async def _send_all(sent: list[Sent]) -> list[int]:
    """The status of each answer; what was stored is looked through at the end."""
    world = await World.make()
    try:
        await world.put_node()
        client = await world.instance()
        statuses = [await _send(client, *request) for request in sent]
        await _check_store(world)
        status = (await client.get("/readyz")).status
        assert status == 200
        answer = await client.post("/v1/jobs", json=SPEC, headers={"Authorization": "Bearer b-token"})
        assert answer.status in (201, 401, 422), await answer.text()
        return statuses
    finally:
        await world.close()


async def _send(
    client: TestClient[Any, Any], method: str, path: str, target: str, headers: dict[str, str], body: bytes | None, token: str
) -> int:  # fmt: skip
    what = (method, target[:200], headers, (body or b"")[:200], token)
    if token:
        headers = headers | {"Authorization": f"Bearer {token}"}
    url = URL(f"http://{client.host}:{client.port}{target}", encoded=True)
    async with client.session.request(
        method, url, headers=headers, data=io.BytesIO(body) if body else None, allow_redirects=False
    ) as answer:
        assert answer.status < 500, (what, answer.status, await answer.text())
        declared = DOCUMENT["paths"][path][method.lower()]["responses"]
        if answer.status == 400 and len(target) + sum(map(len, headers.values())) > 4000:
            return 400  # aiohttp itself refuses a line that is too long, before there is a request
        if answer.status >= 400:
            assert answer.content_type == "application/problem+json", (what, answer.status)
            problem = await answer.json(content_type=None)
            assert problem["status"] == answer.status
            jsonschema.validate(problem, _schema({"$ref": "#/components/schemas/Problem"}))
        elif answer.content_type == "application/json" and str(answer.status) in declared:
            schema = declared[str(answer.status)]["content"]["application/json"]["schema"]
            jsonschema.validate(await answer.json(), _schema(schema))
        return answer.status


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "components": DOCUMENT["components"]}


async def _check_store(world: World) -> None:
    """What was taken can be read, by the coordinator and by a person."""
    kinds = {"tokens": records.Token, "applications": records.Application, "idempotency": records.Idempotency}
    for item in (await world.memory.list(records.ROOT)).items:
        assert not isinstance(event := records.event(Change(item)), RecordUnreadable), (item, event)
        kind = kinds.get(item.key.removeprefix(records.ROOT).partition("/")[0])
        if kind is not None:
            records.decode(kind, item.value)
        assert item.key.isprintable(), item.key
    assert not world.replicas[0].unreadable


@pytest.mark.parametrize(
    "text", ["9e999999", "1e999999", "1e999999%", "-1e999999m", "nan", "inf", "1e-999999", "9" * 5000]
)
async def test_a_short_text_for_an_endless_number_costs_nothing(text: str) -> None:
    """FR-10: 1e999999 has a million digits once it is written out."""
    world = await World.make()
    try:
        admin, _, _ = await world.callers()
        problem = await admin.refused("PATCH", "/v1/tenants/team-a", {"limit_compute": text})
        assert (problem["status"], problem["field"]) == (422, "limit_compute")
        problem = await admin.refused("GET", "/v1/tenants", limit=text)
        assert (problem["status"], problem["field"]) == (400, "limit")
    finally:
        await world.close()


@pytest.mark.parametrize("name", ["Authorization", "Idempotency-Key", "Last-Event-ID"])
async def test_a_header_that_is_no_utf_8_is_refused(name: str) -> None:
    world = await World.make()
    try:
        client = await world.instance()
        reader, writer = await asyncio.open_connection(client.host, client.port)
        token = "" if name == "Authorization" else "Authorization: Bearer admin-token\r\n"
        method, path = ("GET", "/v1/events") if name == "Last-Event-ID" else ("POST", "/v1/jobs")
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n{token}{name}: "
        writer.write(head.encode() + b"\xff\xfe\r\n\r\n{}")
        answer = await asyncio.wait_for(reader.read(), 10)
        assert b" 400 " in answer.splitlines()[0], answer
        assert name.encode() in answer
        writer.close()
    finally:
        await world.close()


@pytest.mark.parametrize("media", ["application/json", "application/yaml"])
async def test_huge_specs_are_refused_with_the_limit_that_they_break(media: str) -> None:
    """ET-5, FR-12: 10,000 tasks, 1 MiB of environment, 5,000 jobs at once; nothing of them is stored, and the next job
    is taken in."""
    world = await World.make()
    try:
        await world.put_node()
        _, a, _ = await world.callers()
        one = {"name": "n", "image": "i", "command": ["x"]}
        for wanted, field in (
            (one | {"tasks": 10_000}, "tasks"),
            (one | {"tasks": [{"name": f"t{n}", "count": 1} for n in range(10_000)]}, "tasks"),
            (one | {"tasks": [{"name": f"t{n}", "count": 2000} for n in range(200)]}, "tasks"),
            (one | {"env": {"A": "x" * (1 << 20)}}, "env"),
            (one | {"command": ["x" * 1000] * 1100}, "command"),
            (one | {"name": "x" * (1 << 20)}, "name"),
            (one | {"constraints": {f"k{n}": "v" for n in range(1000)}}, "constraints"),
            (one | {"priority": 10**30}, "priority"),
            ([one] * 5000, ""),
        ):
            body = io.BytesIO(json.dumps(wanted).encode())
            problem = await a.refused("POST", "/v1/jobs", body, headers={"Content-Type": media})
            assert problem["status"] == 422, problem
            assert problem["errors"]
            fields = [fault["field"] for fault in problem["errors"]]
            assert any(name.startswith(field) for name in fields), (field, fields[:5])
            assert len(json.dumps(problem)) < 100_000
        assert not (await world.memory.list(records.QUEUE)).items
        assert (await a.post("/v1/jobs", one))["state"] == "PENDING"
    finally:
        await world.close()
