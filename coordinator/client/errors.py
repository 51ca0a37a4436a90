"""What can go wrong when the coordinator is asked something, as errors that keep every field of the problem document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ClientError(Exception):
    """Base of everything that the client raises on purpose."""


class Unreachable(ClientError):
    """No coordinator answered, or the connection broke and could not be made again in time."""


class AnswerUnreadable(ClientError):
    """Something answered that does not speak this version of Serai's API."""


class WaitedTooLong(ClientError):
    """The time limit of a wait is over; the job goes on."""


class ApiError(ClientError):
    """The coordinator answered with a problem document (RFC 9457).

    `errors` holds all faults at once, each with field, limit, value and message; `field`, `limit` and `value` are
    those of the first. `code` is made for scripts, `detail` for people.
    """

    def __init__(
        self,
        status: int,
        *,
        code: str = "",
        detail: str = "",
        field: str | None = None,
        limit: Any = None,
        value: Any = None,
        hint: str | None = None,
        errors: Sequence[Mapping[str, Any]] = (),
        retry_after_seconds: float = 0.0,
    ) -> None:
        super().__init__(detail or f"HTTP {status}")
        self.status = status
        self.code = code
        self.detail = detail or f"HTTP {status}"
        self.field = field
        self.limit = limit
        self.value = value
        self.hint = hint
        self.errors = tuple(errors)
        self.retry_after_seconds = retry_after_seconds

    @classmethod
    def from_problem(
        cls, status: int, problem: Mapping[str, Any], retry_after_seconds: float = 0.0
    ) -> ApiError:
        errors = [fault for fault in problem.get("errors") or () if isinstance(fault, Mapping)]
        first = errors[0] if errors else {}
        return cls(
            status,
            code=str(problem.get("code") or ""),
            detail=str(problem.get("detail") or problem.get("title") or ""),
            field=problem.get("field", first.get("field")),
            limit=problem.get("limit", first.get("limit")),
            value=problem.get("value", first.get("value")),
            hint=problem.get("hint") or first.get("hint") or None,
            errors=errors,
            retry_after_seconds=retry_after_seconds,
        )
