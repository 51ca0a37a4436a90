"""Exit codes, and the one line (or one JSON object) that every error becomes. No stack trace reaches a user."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import click

DONE = 0
FAILED = 1  # or: the answer is no
USAGE = 2
NOT_FOUND = 3  # or not yours
REFUSED = 4  # can never run, quota, policy, bad spec
LOGIN = 5
NO_COORDINATOR = 6  # not reached, or no leader
TIMEOUT = 7  # --timeout is over while the job goes on
VERSIONS = 8

# Codes that stand for the end of a job, beside its own.
NOT_STARTED = 125  # Serai could not start it, or lost it
DETACHED = 130

_BY_STATUS = {
    400: USAGE,
    401: LOGIN,
    403: LOGIN,
    404: NOT_FOUND,
    409: FAILED,
    410: NOT_FOUND,
    413: REFUSED,
    415: VERSIONS,
    422: REFUSED,
    426: VERSIONS,
    429: NO_COORDINATOR,
    502: NO_COORDINATOR,
    503: NO_COORDINATOR,
    504: NO_COORDINATOR,
}


class Stop(Exception):
    """Ends the command with `code` after saying why. `errors` are further faults of the same request."""

    def __init__(
        self,
        code: int,
        text: str,
        *,
        field: str | None = None,
        limit: Any = None,
        value: Any = None,
        hint: str | None = None,
        errors: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.field = field
        self.limit = limit
        self.value = value
        self.hint = hint
        self.errors = errors


def as_stop(error: BaseException) -> Stop:
    """What the user is told about an error, whatever it was."""
    if isinstance(error, Stop):
        return error
    if isinstance(error, click.UsageError):
        return _usage(error)
    if isinstance(error, click.ClickException):
        return Stop(FAILED, error.format_message())
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return Stop(DETACHED, "interrupted")
    known = _from_client(error)
    if known is not None:
        return known
    if isinstance(error, OSError):
        return Stop(FAILED, f"{error.filename or ''}: {error.strerror or error}".lstrip(": "))
    where = traceback.extract_tb(error.__traceback__)[-1]
    return Stop(
        FAILED,
        f"{type(error).__name__}: {error} (a fault of Serai, at {os.path.basename(where.filename)}:{where.lineno})",
        hint="SERAI_DEBUG=1 shows the whole trace",
    )


def show(stop: Stop, *, as_json: bool) -> None:
    """One line on stderr; faults of the same request that it does not name follow, indented."""
    if as_json:
        found = {
            "error": stop.text,
            "field": stop.field,
            "limit": stop.limit,
            "value": stop.value,
            "hint": stop.hint,
        }
        if len(stop.errors) > 1:
            found["errors"] = list(stop.errors)
        print(json.dumps(found, default=str), file=sys.stderr)
        return
    print(_line(stop), file=sys.stderr)
    for fault in stop.errors if len(stop.errors) > 1 else ():
        field, message = str(fault.get("field") or "-"), str(fault.get("message") or fault)
        if message not in stop.text:
            print(f"  {message}" if message.startswith(field) else f"  {field}: {message}", file=sys.stderr)


def _line(stop: Stop) -> str:
    # What the sentence says already is not said again.
    facts = [
        f"{name} {value}"
        for name, value in (("field", stop.field), ("limit", stop.limit), ("value", stop.value))
        if isinstance(value, str | int | float) and value != "" and str(value) not in stop.text
    ]
    text = f"serai: {stop.text}"
    if facts:
        text += f" ({', '.join(facts)})"
    if stop.hint:
        text += f"; {stop.hint}"
    return " ".join(text.split())


def _usage(error: click.UsageError) -> Stop:
    name = error.ctx.command_path if error.ctx is not None else "serai"
    field = None
    if isinstance(error, click.BadParameter) and error.param is not None:
        field = error.param.opts[0] if error.param.opts else error.param.name
    return Stop(USAGE, error.format_message().rstrip("."), field=field, hint=f"see {name} --help")


def _from_client(error: BaseException) -> Stop | None:
    # The client library is only there when it was used; without it there is nothing to translate.
    if "coordinator.client" not in sys.modules:
        return None
    from coordinator.client import AnswerUnreadable, ApiError, Unreachable, WaitedTooLong

    if isinstance(error, ApiError):
        code = _BY_STATUS.get(error.status, FAILED)
        hint = error.hint
        if code == LOGIN and not hint:
            hint = "set SERAI_TOKEN or SERAI_TOKEN_FILE"
        return Stop(
            code,
            error.detail,
            field=error.field,
            limit=error.limit,
            value=error.value,
            hint=hint,
            errors=error.errors,
        )
    if isinstance(error, Unreachable):
        return Stop(NO_COORDINATOR, str(error), hint="is SERAI_ADDRESS right? `serai dev` starts a trial")
    if isinstance(error, AnswerUnreadable):
        return Stop(VERSIONS, str(error), hint="`serai version` compares the versions")
    if isinstance(error, WaitedTooLong):
        return Stop(TIMEOUT, str(error))
    return None
