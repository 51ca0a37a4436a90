"""Every etcd key and the JSON that stands under it; no other module knows a path.

    /serai/leader/holder                            Leadership    leased by the leading coordinator
    /serai/tenants/<tenant>                         Tenant        API
    /serai/applications/<tenant>/<id>               Application   API (a tenant's wish for another quota)
    /serai/tokens/<sha256>                          Token         API; never the token itself
    /serai/idempotency/<tenant>/<sha256>            Idempotency   API, in the transaction of the submit
    /serai/queue/<tenant>/<job>                     Job           API on submit, leader afterwards
    /serai/jobs/<job>                               Job           leader; API asks for a cancel
    /serai/done/<job>                               Job           leader; API (cancelled while waiting)
    /serai/grants/<node>/<job>.<attempt>            Grant         leader
    /serai/tasks/<node>/<job>.<attempt>.<task>      Task          agent, or the leader's observer of Nomad
    /serai/nodes/<node>/inventory                   NodeInventory agent, on change
    /serai/nodes/<node>/report                      NodeReport    agent, leased, each period
    /serai/nodes/<node>/endpoint                    Endpoint      agent, leased: where its logs are served
    /serai/nodes/<node>/admin                       NodeAdmin     API
    /serai/usage/<tenant>/<hour>                    UsageHour     leader
    /serai/mix/submitted                            Mix           leader: what the prices of placement are made of
    /serai/fences/<random>                          {}            API, leased: shuts out a submit whose answer was lost

A reader ignores fields it does not know, so that an older coordinator survives a newer record. What cannot be read
becomes a `RecordUnreadable` event and never an exception: one bad record must not stop a cluster.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any, TypeVar

import msgspec
from attrs import frozen
from msgspec.structs import replace

from coordinator.model import (
    AdminGone,
    AdminSeen,
    Event,
    GrantGone,
    GrantSeen,
    InventoryGone,
    InventorySeen,
    Job,
    JobGone,
    JobSeen,
    Mix,
    MixSeen,
    NodeAdmin,
    RecordGone,
    RecordUnreadable,
    ReportGone,
    ReportSeen,
    Task,
    TaskGone,
    TaskSeen,
    Tenant,
    TenantGone,
    TenantSeen,
    UsageHour,
    UsageSeen,
)
from coordinator.store import Change, KeyValue
from jobspecs.container import Grant
from vgpu.inventory import NodeInventory, NodeReport
from vgpu.reasons import few

log = logging.getLogger("serai.records")

ROOT = "/serai/"
LEADER = ROOT + "leader/holder"
TENANTS = ROOT + "tenants/"
APPLICATIONS = ROOT + "applications/"
TOKENS = ROOT + "tokens/"
IDEMPOTENCY = ROOT + "idempotency/"
QUEUE = ROOT + "queue/"
JOBS = ROOT + "jobs/"
DONE = ROOT + "done/"
GRANTS = ROOT + "grants/"
TASKS = ROOT + "tasks/"
NODES = ROOT + "nodes/"
USAGE = ROOT + "usage/"
MIX = ROOT + "mix/submitted"
FENCES = ROOT + "fences/"

# Crockford's base 32 in lower case: sorts like the numbers, and has no letters that are read as digits.
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


@frozen
class Leadership:
    """Who leads. `id` is new in each term. The fence is the revision of this key: `renewals` counts how often the
    holder wrote it again to shut out its own transactions whose answer was lost (`coordinator.commit`)."""

    id: str
    address: str
    since_ms: int
    renewals: int = 0
    version: int = 1


@frozen
class Token:
    """What a bearer token may do. `role` is admin, or tenant (then `tenant` names whose jobs)."""

    role: str
    tenant: str = ""
    label: str = ""
    created_at_ms: int = 0
    version: int = 1


@frozen
class Idempotency:
    """The answer that a submit with this key got: same key and body, same jobs, for 24 hours."""

    body_sha256: str
    jobs: tuple[str, ...]
    at_ms: int
    version: int = 1


@frozen
class Application:
    """A tenant asks for another quota; an admin grants or refuses it with a reason."""

    id: str
    tenant: str
    quota_memory_mib: int
    text: str
    at_ms: int
    state: str = "OPEN"  # OPEN | GRANTED | REFUSED
    answer: str = ""
    answered_at_ms: int | None = None
    version: int = 1


@frozen
class Endpoint:
    """Where an agent serves the output of its tasks, and the bearer token it wants (known to whoever reads etcd)."""

    node: str
    address: str
    token: str
    version: int = 1


class Unreadable(ValueError):
    """The bytes are not the record they should be."""


R = TypeVar("R")
_decoders: dict[object, msgspec.json.Decoder[Any]] = {}


def encode(record: object) -> bytes:
    """JSON that a person can read with etcdctl."""
    return msgspec.json.encode(record)


def decode(kind: type[R], value: bytes) -> R:
    """Strict about types, lenient about unknown fields. Raises `Unreadable`."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        record: R = decoder.decode(value)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise Unreadable(f"not a {kind.__name__}: {error}") from error
    return record


def readable(kind: type[R], items: Iterable[KeyValue]) -> Iterator[tuple[str, R]]:
    """The records that can be read, each with the last part of its key: one bad one must not hide the others."""
    for item in items:
        try:
            yield item.key.rpartition("/")[2], decode(kind, item.value)
        except Unreadable as error:
            log.warning("record=%s unreadable=%s", item.key, error)


def new_job_id(now_ms: int, random: Random) -> str:
    """16 letters and digits that sort by time: 45 bits of milliseconds, then 35 random bits."""
    number = ((now_ms & (1 << 45) - 1) << 35) | random.getrandbits(35)
    return "".join(_ALPHABET[(number >> shift) & 31] for shift in range(75, -1, -5))


def queue_key(tenant: str, job: str) -> str:
    return f"{QUEUE}{tenant}/{job}"


def job_key(job: str) -> str:
    return JOBS + job


def done_key(job: str) -> str:
    return DONE + job


def folder_key(job: Job) -> str:
    """Where the record of a job in its present state stands."""
    if job.state.is_final:
        return done_key(job.id)
    return job_key(job.id) if job.allocation is not None else queue_key(job.tenant, job.id)


def tenant_key(tenant: str) -> str:
    return TENANTS + tenant


def application_key(tenant: str, id: str) -> str:
    return f"{APPLICATIONS}{tenant}/{id}"


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def token_key(token: str) -> str:
    return TOKENS + token_hash(token)


def idempotency_key(tenant: str, key: str) -> str:
    return f"{IDEMPOTENCY}{tenant}/{hashlib.sha256(key.encode()).hexdigest()}"


def grant_prefix(node: str) -> str:
    return f"{GRANTS}{node}/"


def grant_key(node: str, job: str, attempt: int) -> str:
    return f"{GRANTS}{node}/{job}.{attempt}"


def task_prefix(node: str) -> str:
    return f"{TASKS}{node}/"


def task_key(node: str, job: str, attempt: int, task: int) -> str:
    return f"{TASKS}{node}/{job}.{attempt}.{task}"


def inventory_key(node: str) -> str:
    return f"{NODES}{node}/inventory"


def report_key(node: str) -> str:
    return f"{NODES}{node}/report"


def endpoint_key(node: str) -> str:
    return f"{NODES}{node}/endpoint"


def admin_key(node: str) -> str:
    return f"{NODES}{node}/admin"


def fence_key(name: str) -> str:
    return FENCES + name


def usage_key(tenant: str, hour_ms: int) -> str:
    return f"{USAGE}{tenant}/{hour_ms:014d}"


def event(change: Change) -> Event | None:
    """What a change of the store means to the coordinator's state; None for what is no part of it."""
    key = change.item.key
    folder, _, rest = key.removeprefix(ROOT).partition("/")
    parts = rest.split("/")
    if change.deleted:
        try:
            return _gone(folder, parts)
        except (ValueError, IndexError, TypeError):
            return RecordGone(key)  # its name was that of no record
    try:
        return _seen(folder, parts, change)
    except (ValueError, IndexError) as error:
        return RecordUnreadable(key, str(error))


def _gone(folder: str, parts: list[str]) -> Event | None:
    if folder in ("queue", "jobs", "done"):
        return JobGone(parts[-1], folder)
    if folder == "tenants":
        return TenantGone(parts[0])
    if folder == "grants":
        job, attempt = parts[1].rsplit(".", 1)
        return GrantGone(parts[0], job, int(attempt))
    if folder == "tasks":
        job, attempt, task = parts[1].rsplit(".", 2)
        return TaskGone(job, int(attempt), int(task))
    if folder == "nodes":
        return _node_gone(*parts)
    return None


def _node_gone(node: str, record: str) -> Event | None:
    if record == "inventory":
        return InventoryGone(node)
    if record == "report":
        return ReportGone(node)
    return AdminGone(node) if record == "admin" else None


def _seen(folder: str, parts: list[str], change: Change) -> Event | None:
    value = change.item.value
    if folder in ("queue", "jobs", "done"):
        job = decode(Job, value)
        if folder_key(job) != change.item.key:
            raise Unreadable(f"a record of {job.id} in state {job.state.value} does not belong here")
        return JobSeen(_told_once(job), change.item.mod_revision)
    if folder == "tenants":
        return TenantSeen(_named(decode(Tenant, value), "name", parts[0]))
    if folder == "grants":
        grant = decode(Grant, value)
        _check_place(change, grant_key(grant.node, grant.job, grant.attempt))
        return GrantSeen(parts[0], grant.job, grant.attempt, grant.stopping)
    if folder == "tasks":
        task = decode(Task, value)
        _check_place(change, task_key(task.node, task.job, task.attempt, task.task))
        return TaskSeen(task)
    if folder == "usage":
        usage = decode(UsageHour, value)
        _check_place(change, usage_key(usage.tenant, usage.hour_ms))
        return UsageSeen(usage)
    if folder == "mix":
        _check_place(change, MIX)
        return MixSeen(decode(Mix, value))
    if folder == "nodes":
        return _node_seen(parts, value)
    return None


def _told_once(job: Job) -> Job:
    """The record of a live job says thrice why it is where it is. In memory that is one reason, as it was when the job
    was placed: a fifth of what a live job takes."""
    if job.allocation is None or job.allocation.placed is None:
        return job
    placed = job.allocation.placed
    placed = replace(placed, numbers=few(*placed.numbers.items()))
    allocation = replace(job.allocation, placed=placed)
    history = [replace(one, reason=placed) if one.reason == placed else one for one in job.history]
    reason = placed if job.reason == placed else job.reason
    return replace(job, allocation=allocation, reason=reason, history=tuple(history))


def _check_place(change: Change, key: str) -> None:
    if change.item.key != key:
        raise Unreadable(f"a record of {key} does not belong here")


def _node_seen(parts: list[str], value: bytes) -> Event | None:
    node, record = parts
    if record == "inventory":
        return InventorySeen(_named(decode(NodeInventory, value), "node", node))
    if record == "report":
        return ReportSeen(_named(decode(NodeReport, value), "node", node))
    if record == "admin":
        return AdminSeen(_named(decode(NodeAdmin, value), "node", node))
    return None


def _named(record: R, field: str, expected: str) -> R:
    if getattr(record, field) != expected:
        raise Unreadable(f"{field} is {getattr(record, field)!r}, the key says {expected!r}")
    return record
