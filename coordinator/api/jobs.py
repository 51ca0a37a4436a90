"""The job routes: list, get, cancel, history. Submitting is `coordinator.api.submitting`'s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aiohttp import web

from coordinator import records
from coordinator.api.answers import CursorInvalid, answer, page
from coordinator.api.context import Api, Found, api_of, caller_of, looked_through
from coordinator.api.problems import bad_parameter, unavailable
from coordinator.api.queries import known_only, one_of, page_limit
from coordinator.api.views import View, job_view
from coordinator.lifecycle import cancelled
from coordinator.model import Job, JobState
from coordinator.store import Delete, Put, StoreUncertain, Write, unchanged
from vgpu.reasons import Reason

LIST_PARAMETERS = ("tenant", "state", "name", "id_prefix", "limit", "cursor", "sort")
_STATES = tuple(state.value for state in JobState)
_CANCEL_ROUNDS = 10


def view_of(api: Api, found: Found, reason: Reason | None = None) -> View:
    gpus = {
        gpu.uuid: gpu
        for node in _nodes(found.job)
        if (inventory := api.inventory(node)) is not None
        for gpu in inventory.gpus
    }
    return job_view(found.job, found.shown, found.tasks, gpus, api.clock_ms(), found.revision, reason)


def _nodes(job: Job) -> Iterable[str]:
    allocation = job.allocation or (job.past[-1].allocation if job.past else None)
    return allocation.nodes if allocation else ()


async def list_jobs(request: web.Request) -> web.Response:
    known_only(request, LIST_PARAMETERS)
    api, caller, query = api_of(request), caller_of(request), request.query
    states = [text.strip().upper() for text in query.get("state", "").split(",") if text.strip()]
    for state in states:
        if state not in _STATES:
            raise bad_parameter("state", f"one or more of {', '.join(_STATES)}", state)
    newest_first = one_of(request, "sort", "submitted_at", ("submitted_at", "-submitted_at")).startswith("-")
    limit = page_limit(request)
    tenant, name, prefix = query.get("tenant"), query.get("name"), query.get("id_prefix", "")

    def matching(jobs: Iterable[Job]) -> Iterator[Job]:
        for job in jobs:
            if not caller.owns(job) or (tenant is not None and job.tenant != tenant):
                continue
            if (name is not None and job.spec.name != name) or not job.id.startswith(prefix):
                continue
            if states and api.shown(job).value not in states:
                continue
            yield job

    def chosen() -> tuple[list[Job], str | None]:
        return page(
            matching(jobs),
            key=_submit_order,
            limit=limit,
            cursor=query.get("cursor", ""),
            newest_first=newest_first,
        )

    revision = api.revision
    jobs = list(api.jobs())
    try:
        found, next_cursor = await looked_through(len(jobs), chosen)
    except CursorInvalid as error:
        raise bad_parameter(
            "cursor", "the next_cursor of this list", query.get("cursor"), str(error)
        ) from error
    items = [view_of(api, known) for job in found if (known := api.known(job.id)) is not None]
    return answer({"items": items, "next_cursor": next_cursor, "revision": revision}, revision=revision)


def _submit_order(job: Job) -> tuple[str, ...]:
    return (f"{job.submitted_at_ms:015d}", job.id)


async def get_job(request: web.Request) -> web.Response:
    known_only(request, ())
    api = api_of(request)
    found = await api.find(request.match_info["id"], caller_of(request))
    reason = api.reasons.last(found.job) if found.job.state is JobState.PENDING else None
    return answer(view_of(api, found, reason), revision=api.revision)


async def get_history(request: web.Request) -> web.Response:
    known_only(request, ())
    api = api_of(request)
    found = await api.find(request.match_info["id"], caller_of(request))
    items = view_of(api, found)["history"]
    return answer({"items": items, "next_cursor": None, "revision": api.revision})


async def cancel_job(request: web.Request) -> web.Response:
    """Idempotent: what is over stays as it is. Answers once the wish is durable and this replica shows it."""
    known_only(request, ())
    api, caller = api_of(request), caller_of(request)
    id = request.match_info["id"]
    for _ in range(_CANCEL_ROUNDS):
        found = await api.find(id, caller)
        if found.job.state.is_final:
            return answer(view_of(api, found), revision=api.revision)
        item = await api.store.get(records.folder_key(found.job))
        if item is None:  # it has moved to another folder, or another instance was faster
            await api.catch_up()
            continue
        job = records.decode(Job, item.value)
        if job.state is JobState.CANCELLING:
            await api.passed(item.mod_revision)
            return answer(view_of(api, await api.find(id, caller)), status=202, revision=api.revision)
        try:
            result = await api.store.txn(
                (unchanged(item.key, item.mod_revision),), _cancel_writes(job, item.key, api.clock_ms())
            )
        except StoreUncertain:
            await (
                api.catch_up()
            )  # whether it landed shows in the record; if it lands later it is what was wished
            continue
        await api.passed(result.revision)
        if result.succeeded:
            return answer(view_of(api, await api.find(id, caller)), status=202, revision=api.revision)
    raise unavailable(
        "busy", f"job {id} changed {_CANCEL_ROUNDS} times while it was to be cancelled; try again"
    )


def _cancel_writes(job: Job, key: str, now_ms: int) -> tuple[Write, ...]:
    """A waiting job holds nothing, so it is over at once and moves. A live one is stopped by the leader."""
    after = cancelled(job, now_ms)
    put = Put(records.folder_key(after), records.encode(after))
    return (put,) if put.key == key else (Delete(key), put)
