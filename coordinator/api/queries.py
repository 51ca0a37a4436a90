"""Reading query parameters and JSON bodies, with errors that name field, limit and value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

from aiohttp import web

from coordinator.api.problems import Fault, Problem, bad_parameter
from jobspecs.documents import DocumentInvalid, parse_json

MAX_LIMIT = 1000
DEFAULT_LIMIT = 100
_MOST_DIGITS = 19


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
    is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    if not is_number or not low <= int(text) <= high:
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


def header(request: web.Request, name: str) -> str:
    """Empty where it is not there. Bytes that are no UTF-8 are refused: they could not be written out again."""
    text = request.headers.get(name, "")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise bad_parameter(name, "text in UTF-8", None, f"{name} is not UTF-8")
    return text


async def body_bytes(request: web.Request) -> bytes:
    """The body, which is UTF-8 or nothing: other names of encodings are codecs that cost or do odd things."""
    charset = (request.charset or "utf-8").lower()
    if charset not in ("utf-8", "utf8", "us-ascii"):
        text = f"send UTF-8, not {charset}"
        raise Problem(415, "media_type", text, (Fault("Content-Type", text, "utf-8", charset),))
    return await request.read()


async def body_object(
    request: web.Request, kinds: Mapping[str, type | tuple[type, ...]], required: Sequence[str] = ()
) -> dict[str, object]:
    """The JSON object of the body, with only these fields, of these types. All faults are reported at once."""
    raw = await body_bytes(request)
    try:
        body = parse_json(raw) if raw.strip() else {}
    except DocumentInvalid as error:
        raise Problem(400, "bad_json", f"the body cannot be read: {error}") from error
    if not isinstance(body, dict):
        raise Problem(400, "bad_json", "the body must be a JSON object")
    body = {name: float(value) if isinstance(value, Decimal) else value for name, value in body.items()}
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
