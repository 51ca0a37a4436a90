"""Reading query parameters and JSON bodies, with errors that name field, limit and value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from aiohttp import web

from coordinator.api.problems import Fault, Problem, bad_parameter

MAX_LIMIT = 1000
DEFAULT_LIMIT = 100


def known_only(request: web.Request, names: Sequence[str]) -> None:
    """A parameter that is not known is refused: a misspelled filter must not show everything."""
    for name in request.query:
        if name not in names:
            raise bad_parameter(
                name,
                f"one of {', '.join(names)}" if names else "left out",
                request.query[name],
                f"unknown query parameter {name!r}",
            )


def whole(request: web.Request, name: str, default: int | None, low: int, high: int) -> int | None:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        raise bad_parameter(name, f"a whole number from {low} to {high}", text)
    return int(text)


def page_limit(request: web.Request) -> int:
    return whole(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT) or DEFAULT_LIMIT


def one_of(request: web.Request, name: str, default: str, choices: Sequence[str]) -> str:
    text = request.query.get(name, default)
    if text not in choices:
        raise bad_parameter(name, f"one of {', '.join(choices)}", text)
    return text


def flag(request: web.Request, name: str) -> bool:
    return one_of(request, name, "0", ("0", "1", "false", "true")) in ("1", "true")


async def body_object(
    request: web.Request, kinds: Mapping[str, type | tuple[type, ...]], required: Sequence[str] = ()
) -> dict[str, object]:
    """The JSON object of the body, with only these fields, of these types. All faults are reported at once."""
    raw = await request.read()
    try:
        body = msgspec.json.decode(raw) if raw.strip() else {}
    except msgspec.DecodeError as error:
        raise Problem(400, "bad_json", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Problem(400, "bad_json", "the body must be a JSON object")
    faults = [
        Fault(name, f"unknown field {name!r}", sorted(kinds), None) for name in body if name not in kinds
    ]
    faults += [
        Fault(name, f"{name} is required", "required", None) for name in required if body.get(name) is None
    ]
    for name, kind in kinds.items():
        value = body.get(name)
        kinds_of = kind if isinstance(kind, tuple) else (kind,)
        if value is not None and (
            not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds_of)
        ):
            wanted = " or ".join(one.__name__ for one in kinds_of)
            faults.append(Fault(name, f"{name} must be {wanted}, not {value!r}", wanted, value))
    if faults:
        raise Problem(422, "bad_fields", "; ".join(fault.message for fault in faults), faults)
    return body
