"""POST /v1/jobs: read the specs, refuse what can never run, hand the rest to the group commit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from aiohttp import web
from attrs import frozen

from coordinator import records
from coordinator.api.answers import answer
from coordinator.api.auth import Caller
from coordinator.api.context import Api, api_of, caller_of
from coordinator.api.problems import Fault, Problem, conflict, refused, unavailable
from coordinator.api.queries import body_bytes, header, known_only
from coordinator.api.submit import (
    IdempotencyConflict,
    IdTaken,
    QueueFull,
    Receipt,
    Submission,
    TenantUnknown,
)
from coordinator.api.views import View, job_view, reason_view
from coordinator.model import Happening, Job, JobState
from coordinator.store import RequestTooLarge
from jobspecs.reading import DocumentInvalid, SpecInvalid, parse_json, parse_yaml, read_spec
from jobspecs.reading import Fault as SpecFault
from jobspecs.spec import JobSpec
from vgpu.reasons import Reason, ReasonCode
from vgpu.sentences import sentence

IDEMPOTENCY_HEADER = "Idempotency-Key"
_MAX_KEY = 255
_YAML = ("application/yaml", "application/x-yaml", "text/yaml")
_ID_ROUNDS = 3


@frozen
class Wish:
    """The specs of one request, whether it was a list, and the digest of what was sent."""

    specs: tuple[JobSpec, ...]
    is_list: bool
    body_sha256: str


async def submit_jobs(request: web.Request) -> web.Response:
    known_only(request, ())
    api, caller = api_of(request), caller_of(request)
    key = header(request, IDEMPOTENCY_HEADER)
    if len(key) > _MAX_KEY:
        text = f"{IDEMPOTENCY_HEADER} is longer than {_MAX_KEY} characters"
        raise Problem(400, "bad_parameter", text, (Fault(IDEMPOTENCY_HEADER, text, _MAX_KEY, len(key)),))
    wish = _read(await body_bytes(request), request.content_type, caller, _list_limit(api))
    # A retry gets the answer of the first time, even if the cluster would refuse the job by now.
    is_replay = bool(key) and await _replayed(api, wish, key)
    if not is_replay:
        await _refuse_impossible(api, wish)
    receipt, jobs = await _submit(api, wish, key)
    revision = receipt.revision
    if receipt.replayed is not None:
        jobs = [
            _job(spec, id, receipt.replayed.at_ms)
            for spec, id in zip(wish.specs, receipt.replayed.jobs, strict=True)
        ]
    views = [submitted_view(job, revision) for job in jobs]
    return answer({"items": views} if wish.is_list else views[0], status=201, revision=revision)


def submitted_view(job: Job, revision: int) -> View:
    """The answer to a submit shows the job as it was taken in, so that a repeated answer equals the first."""
    return job_view(job, job.state, {}, {}, job.submitted_at_ms, revision)


def _list_limit(api: Api) -> int:
    """A list is all or nothing, so it is one transaction: room is kept for fence, idempotency key and tenant."""
    return max(1, api.settings.max_writes_per_transaction - 3)


def _read(raw: bytes, content_type: str, caller: Caller, limit: int) -> Wish:
    if content_type not in (*_YAML, "application/json", "application/octet-stream", "text/plain"):
        limits = "application/json or application/yaml"
        raise Problem(
            415,
            "media_type",
            f"send {limits}, not {content_type}",
            (Fault("Content-Type", limits, limits, content_type),),
        )
    try:
        data = parse_yaml(raw) if content_type in _YAML else parse_json(raw)
    except DocumentInvalid as error:
        raise Problem(400, "bad_body", f"the body cannot be read: {error}") from error
    is_list = isinstance(data, list)
    documents: Sequence[object] = data if isinstance(data, list) else [data]
    if not 1 <= len(documents) <= limit:
        text = f"a list holds 1 to {limit} jobs, not {len(documents)}"
        raise refused(
            "list_length", "", text, limit=limit, value=len(documents), hint="send it in several requests"
        )
    specs, faults = [], []
    for number, document in enumerate(documents):
        prefix = f"[{number}]." if is_list else ""
        try:
            specs.append(_read_one(document, caller))
        except SpecInvalid as error:
            faults += [_fault(fault, prefix) for fault in error.faults]
    if faults:
        raise Problem(422, "bad_spec", "; ".join(fault.message for fault in faults), faults)
    digest = hashlib.sha256(msgspec.json.encode(data, order="deterministic")).hexdigest()
    return Wish(tuple(specs), is_list, digest)


def _read_one(document: object, caller: Caller) -> JobSpec:
    """A tenant's token decides the tenant; naming another is a fault of the spec."""
    return read_spec(document, tenant=None if caller.is_admin else caller.tenant)


async def _replayed(api: Api, wish: Wish, key: str) -> bool:
    """Whether this key was used: the transaction then finds it again, and decides."""
    return await api.store.get(records.idempotency_key(wish.specs[0].tenant, key)) is not None


async def _refuse_impossible(api: Api, wish: Wish) -> None:
    """Raises a 422 `Problem` where a tenant is unknown or a job can never run on this cluster."""
    for tenant in sorted({spec.tenant for spec in wish.specs}):
        if tenant not in api.cluster.tenants:
            item = await api.store.get(records.tenant_key(tenant))
            if item is None:
                raise _unknown_tenant(tenant)
            await api.passed(item.mod_revision)
    snapshot = api.recent_snapshot()
    if not any(api.why_never(spec, snapshot) for spec in wish.specs):
        return
    # Before a "no" it is looked again at what the store holds now: a node may have come, a limit may be higher.
    await api.catch_up()
    snapshot = api.snapshot()
    nevers = [
        (number, reason)
        for number, spec in enumerate(wish.specs)
        if (reason := api.why_never(spec, snapshot))
    ]
    if nevers:
        faults = [_reason_fault(f"[{number}]" if wish.is_list else "", reason) for number, reason in nevers]
        raise Problem(
            422,
            nevers[0][1].code.value,
            "; ".join(fault.message for fault in faults),
            faults,
            extra={"reasons": [reason_view(reason) for _, reason in nevers]},
        )


async def _submit(api: Api, wish: Wish, key: str) -> tuple[Receipt, list[Job]]:
    now_ms = api.clock_ms()
    for _ in range(_ID_ROUNDS):
        jobs = [_job(spec, records.new_job_id(now_ms, api.random), now_ms) for spec in wish.specs]
        etcd_key = records.idempotency_key(wish.specs[0].tenant, key) if key else ""
        try:
            return await api.pump.submit(Submission(jobs, etcd_key, wish.body_sha256)), jobs
        except IdTaken:
            continue
        except QueueFull as error:
            text = f"too much waits to be written: {error.value} {error.unit}, at most {error.limit}"
            raise Problem(
                429, "queue_full", text, (Fault("queue", text, error.limit, error.value),)
            ) from error
        except TenantUnknown as error:
            if error.closing:
                raise conflict(
                    "tenant_closing",
                    f"tenant {error.tenant!r} is being deleted and takes no new jobs",
                    field_name="tenant",
                    value=error.tenant,
                ) from error
            raise _unknown_tenant(error.tenant) from error
        except IdempotencyConflict as error:
            raise conflict(
                "idempotency_conflict",
                "this Idempotency-Key was used with another body",
                field_name=IDEMPOTENCY_HEADER,
                value=key,
                hint="use a new key for a new job",
            ) from error
        except RequestTooLarge as error:
            raise Problem(
                413,
                "too_large",
                f"the jobs are too large for one request: {error}",
                hint="send them in several requests",
            ) from error
    raise unavailable("id_taken", "no free job id was found; try again")


def _job(spec: JobSpec, id: str, now_ms: int) -> Job:
    happening = Happening(JobState.PENDING, now_ms, 1, Reason(ReasonCode.SUBMITTED))
    return Job(id, spec, JobState.PENDING, now_ms, now_ms, history=(happening,))


def _unknown_tenant(tenant: str) -> Problem:
    return refused(
        "unknown_tenant",
        "tenant",
        f"there is no tenant {tenant!r}",
        value=tenant,
        hint="an administrator creates tenants",
    )


def _fault(fault: SpecFault, prefix: str) -> Fault:
    return Fault(prefix + fault.field, prefix + fault.sentence, fault.limit, fault.value)


def _reason_fault(name: str, reason: Reason) -> Fault:
    return Fault(name, sentence(reason), dict(reason.numbers), list(reason.subjects))
