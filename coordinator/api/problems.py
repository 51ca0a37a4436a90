"""Every "no" of the API as an RFC 9457 problem document; nothing else in the package knows its form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiohttp import web
from attrs import field, frozen

from coordinator.api.answers import dump

PROBLEM_JSON = "application/problem+json"
RETRY_AFTER_SECONDS = 2

_TITLES = {
    400: "The request cannot be read",
    401: "Login missing or denied",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    409: "The state does not allow it",
    410: "Expired",
    413: "Too large",
    415: "Media type not supported",
    422: "Refused",
    429: "Too many requests",
    500: "Internal error",
    502: "A part behind the API failed",
    503: "Not available now",
}


@frozen
class Fault:
    """One thing wrong with a request: which field, what it may be, what it was."""

    field: str
    message: str
    limit: object = None
    value: object = None

    def view(self) -> dict[str, object]:
        return {"field": self.field, "limit": self.limit, "value": self.value, "message": self.message}


@frozen
class Problem(Exception):
    """Ends a request with this answer. `code` is for scripts and only ever added to; `detail` is the sentence a user
    sees; `hint` the next thing to try. The first of `faults` is repeated as field, limit and value of the whole."""

    status: int
    code: str
    detail: str
    faults: Sequence[Fault] = ()
    hint: str = ""
    headers: Mapping[str, str] = field(factory=dict)
    extra: Mapping[str, object] = field(factory=dict)

    def answer(self) -> web.Response:
        first = self.faults[0] if self.faults else None
        body = {
            "type": f"urn:serai:problem:{self.code}",
            "title": _TITLES.get(self.status, "Refused"),
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            "field": first.field if first else None,
            "limit": first.limit if first else None,
            "value": first.value if first else None,
            "hint": self.hint,
            "errors": [fault.view() for fault in self.faults],
            **self.extra,
        }
        headers = dict(self.headers)
        if self.status in (429, 503):
            headers.setdefault("Retry-After", str(RETRY_AFTER_SECONDS))
        if self.status == 401:
            headers.setdefault("WWW-Authenticate", 'Bearer realm="serai"')
        return web.Response(status=self.status, body=dump(body), headers=headers, content_type=PROBLEM_JSON)


def not_found(kind: str, name: str) -> Problem:
    """Also the answer for what belongs to another tenant: whether it exists is not told."""
    return Problem(
        404,
        "not_found",
        f"there is no {kind} {name!r}, or it is not yours",
        (Fault("id", "not found", None, name),),
    )


def bad_parameter(name: str, limit: object, value: object, message: str = "") -> Problem:
    text = message or f"{name} must be {limit}, not {value!r}"
    return Problem(400, "bad_parameter", text, (Fault(name, text, limit, value),))


def refused(
    code: str, field_name: str, message: str, *, limit: object = None, value: object = None, hint: str = ""
) -> Problem:
    return Problem(422, code, message, (Fault(field_name, message, limit, value),), hint)


def conflict(
    code: str, message: str, *, field_name: str = "", value: object = None, hint: str = ""
) -> Problem:
    faults = (Fault(field_name, message, None, value),) if field_name else ()
    return Problem(409, code, message, faults, hint)


def unavailable(
    code: str, message: str, *, hint: str = "", retry_after_seconds: int = RETRY_AFTER_SECONDS
) -> Problem:
    return Problem(503, code, message, hint=hint, headers={"Retry-After": str(retry_after_seconds)})
