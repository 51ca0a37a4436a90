"""GET /v1/jobs/{id}/logs: the output of one task of one attempt, streamed from the engine's log source."""

from __future__ import annotations

import logging
from contextlib import suppress

from aiohttp import web

from coordinator.api.context import Found, api_of, caller_of
from coordinator.api.problems import Problem, bad_parameter, conflict, not_found, unavailable
from coordinator.api.queries import flag, known_only, one_of, whole
from coordinator.engines import EngineUnavailable, LogsExpired
from coordinator.model import Task

logger = logging.getLogger(__name__)

PARAMETERS = ("task", "attempt", "stream", "follow", "tail_bytes")
_MAX_TAIL_BYTES = 1 << 30


async def get_logs(request: web.Request) -> web.StreamResponse:
    known_only(request, PARAMETERS)
    api = api_of(request)
    found = await api.find(request.match_info["id"], caller_of(request))
    job = found.job
    number = whole(request, "task", 0, 0, 1_000_000) or 0
    if number >= job.spec.task_count:
        raise bad_parameter("task", f"below {job.spec.task_count}, the tasks of this job", number)
    newest = job.past[-1].allocation.attempt if job.past and job.allocation is None else job.attempt
    attempt = whole(request, "attempt", newest, 1, 1_000_000) or newest
    source = api.engine.logs(
        _task(found, attempt, number),
        stream=one_of(request, "stream", "stdout", ("stdout", "stderr")),
        follow=flag(request, "follow"),
        tail_bytes=whole(request, "tail_bytes", None, 0, _MAX_TAIL_BYTES),
    )
    chunks = aiter(source)
    try:
        first = await anext(chunks, b"")  # its errors must come before the status is sent
    except LogsExpired as error:
        raise Problem(
            410, "logs_expired", f"the output of attempt {attempt} was kept for its time and is gone"
        ) from error
    except EngineUnavailable as error:
        raise unavailable(
            "engine_unavailable", f"the node that has the output cannot be reached: {error}"
        ) from error
    response = web.StreamResponse(
        headers={"Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff"}
    )
    await response.prepare(request)
    try:
        await response.write(first)
        async for chunk in chunks:
            await response.write(chunk)
    except (LogsExpired, EngineUnavailable) as error:
        # The status is out: a broken connection is the only way left to say that this is not all of it.
        logger.warning("logs of %s ended early: %s", job.id, error)
        if request.transport is not None:
            request.transport.abort()
    finally:
        with suppress(Exception):
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()
    return response


def _task(found: Found, attempt: int, number: int) -> Task:
    job = found.job
    if attempt > job.attempt:
        raise not_found("attempt", str(attempt))
    if attempt == job.attempt and number in found.tasks:
        return found.tasks[number]
    for past in reversed(job.past):
        if past.allocation.attempt == attempt:
            for task in past.tasks:
                if task.task == number:
                    return task
    if attempt < job.attempt or job.state.is_final:
        raise Problem(
            410, "logs_expired", f"there is no output of attempt {attempt}: it never started, or is gone"
        )
    raise conflict(
        "not_started",
        f"attempt {attempt} has not started yet",
        field_name="state",
        value=found.shown.value,
        hint="ask again once the job is RUNNING",
    )
