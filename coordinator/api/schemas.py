"""The schemas of the OpenAPI document: what each answer looks like, and what bodies may hold.

Answers may grow fields, so their schemas leave room for others; bodies may not, and say so.
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.model import JobState, TaskState
from coordinator.nodes import NodeStatus
from vgpu.reasons import ReasonCode

Schema = dict[str, object]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
YES_NO: Schema = {"type": "boolean"}
TIME: Schema = {"type": "string", "format": "date-time"}
SIZE: Schema = {"type": "string", "examples": ["20GiB", "512MiB"]}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def listed(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def answer(**fields: Schema) -> Schema:
    """Every field is always there; null where it is unknown."""
    return {"type": "object", "required": list(fields), "properties": fields}


def body(required: tuple[str, ...] = (), **fields: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": fields, "additionalProperties": False}


def pages(item: str) -> Schema:
    return answer(items=listed(ref(item)), next_cursor=nullable(TEXT), revision=COUNT)


def one_of(values: list[str]) -> Schema:
    return {"type": "string", "enum": values}


_STATES = [state.value for state in JobState]
_MAP_OF_TEXT: Schema = {"type": "object", "additionalProperties": TEXT}
_ANY: Schema = {}

_JOBS: Mapping[str, Schema] = {
    "Reason": answer(
        code=one_of([code.value for code in ReasonCode]),
        numbers={"type": "object", "additionalProperties": WHOLE},
        subjects=listed(TEXT),
        detail=TEXT,
        sentence=TEXT,
    ),
    "Slice": answer(
        gpu=TEXT,
        index=nullable(COUNT),
        model=nullable(TEXT),
        memory_mib=COUNT,
        compute_milli=COUNT,
        isolation=TEXT,
        memory_by=TEXT,
        compute_by=TEXT,
    ),
    "Task": answer(
        task=COUNT,
        name=TEXT,
        node=nullable(TEXT),
        state=nullable(one_of([state.value for state in TaskState])),
        exit_code=nullable(WHOLE),
        signal=nullable(WHOLE),
        oom_killed=YES_NO,
        fault=TEXT,
        detail=TEXT,
        started_at=nullable(TIME),
        ended_at=nullable(TIME),
        slices=listed(ref("Slice")),
    ),
    "Happening": answer(state=one_of(_STATES), at=TIME, attempt=COUNT, reason=nullable(ref("Reason"))),
    "HappeningList": pages("Happening"),
    "Job": answer(
        id=TEXT,
        name=TEXT,
        tenant=TEXT,
        state=one_of(_STATES),
        attempt=COUNT,
        priority=WHOLE,
        spec={"type": "object"},
        submitted_at=TIME,
        started_at=nullable(TIME),
        ended_at=nullable(TIME),
        waited_seconds=NUMBER,
        ran_seconds=nullable(NUMBER),
        exit_code=nullable(WHOLE),
        failures=COUNT,
        reason=nullable(ref("Reason")),
        chosen=nullable(ref("Reason")),
        placed=nullable(ref("Reason")),
        tasks=listed(ref("Task")),
        history=listed(ref("Happening")),
        revision=COUNT,
    ),
    "JobList": pages("Job"),
    "Submitted": {"anyOf": [ref("Job"), answer(items=listed(ref("Job")))]},
    "Gpus": body(
        count={"type": "integer", "minimum": 0},
        memory=nullable(SIZE),
        compute={"type": ["string", "number"]},
        model=TEXT,
        isolation=TEXT,
    ),
    "TaskGroup": {"type": "object", "properties": {"name": TEXT, "count": COUNT, "image": TEXT}},
    "Spec": {
        "type": "object",
        "required": ["image"],
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 128},
            "tenant": TEXT,
            "image": TEXT,
            "command": listed(TEXT),
            "tasks": {"anyOf": [{"type": "integer", "minimum": 1}, listed(ref("TaskGroup"))]},
            "gpus": {"anyOf": [COUNT, ref("Gpus")]},
            "cpu": {"type": ["string", "number"], "examples": [2, 0.5, "500m"]},
            "memory": SIZE,
            "shm": SIZE,
            "env": _MAP_OF_TEXT,
            "priority": {"type": "integer", "minimum": -1000, "maximum": 1000},
            "max_runtime": {"type": ["string", "null"], "examples": ["30m", "36h", "5-00:00:00"]},
            "retries": {"type": "integer", "minimum": 0, "maximum": 100},
            "constraints": _MAP_OF_TEXT,
            "stop_grace": {"type": "string", "examples": ["10s"]},
        },
    },
    "Submission": {"anyOf": [ref("Spec"), {**listed(ref("Spec")), "minItems": 1}]},
    "Asked": answer(
        tasks=COUNT,
        gpus=COUNT,
        gpu_memory_mib=nullable(COUNT),
        gpu_compute_milli=COUNT,
        cpu_milli=COUNT,
        memory_mib=COUNT,
    ),
    "Waiting": answer(
        position=COUNT,
        id=TEXT,
        name=TEXT,
        tenant=TEXT,
        priority=WHOLE,
        waited_seconds=NUMBER,
        asked=ref("Asked"),
        reason=nullable(ref("Reason")),
    ),
    "Turn": answer(
        tenant=TEXT, space_share=nullable(NUMBER), time_share=nullable(NUMBER), priority=nullable(NUMBER)
    ),
    "ReservedSlice": answer(task=COUNT, node=TEXT, gpu=TEXT, memory_mib=COUNT, compute_milli=COUNT),
    "Reservation": answer(
        job=TEXT,
        tenant=nullable(TEXT),
        due_at=nullable(TIME),
        nodes=listed(TEXT),
        slices=listed(ref("ReservedSlice")),
    ),
    "Queue": answer(
        items=listed(ref("Waiting")),
        tenants=listed(ref("Turn")),
        reservation=nullable(ref("Reservation")),
        next_cursor=nullable(TEXT),
        revision=COUNT,
    ),
}

_TENANTS: Mapping[str, Schema] = {
    "Tenant": answer(
        name=TEXT,
        quota_memory_mib=COUNT,
        limit_memory_mib=nullable(COUNT),
        limit_compute_milli=nullable(COUNT),
        weight=COUNT,
        closing=YES_NO,
        used_memory_mib=COUNT,
        used_compute_milli=COUNT,
        over_by_memory_mib=COUNT,
        headroom_memory_mib=COUNT,
        running=COUNT,
        waiting=COUNT,
        space_share=nullable(NUMBER),
        time_share=nullable(NUMBER),
        priority=nullable(NUMBER),
    ),
    "TenantList": pages("Tenant"),
    "TenantChange": body(
        quota_memory=SIZE,
        quota_memory_mib=COUNT,
        limit_memory=nullable(SIZE),
        limit_memory_mib=nullable(COUNT),
        limit_compute={"type": ["string", "number", "null"], "examples": [16, "150%"]},
        limit_compute_milli=nullable(COUNT),
        weight=COUNT,
    ),
    "Application": answer(
        id=TEXT,
        tenant=TEXT,
        quota_memory_mib=COUNT,
        text=TEXT,
        at=TIME,
        state=one_of(["OPEN", "GRANTED", "REFUSED"]),
        answer=TEXT,
        answered_at=nullable(TIME),
    ),
    "ApplicationList": pages("Application"),
    "NewApplication": body(("quota_memory",), quota_memory=SIZE, text=TEXT),
    "Decision": body(answer=TEXT),
    "Caller": answer(role=one_of(["admin", "tenant"]), tenant=TEXT, label=TEXT),
    "Token": answer(sha256=TEXT, role=one_of(["admin", "tenant"]), tenant=TEXT, label=TEXT, created_at=TIME),
    "NewToken": answer(
        token=TEXT, sha256=TEXT, role=one_of(["admin", "tenant"]), tenant=TEXT, label=TEXT, created_at=TIME
    ),
    "TokenList": pages("Token"),
    "TokenWish": body(
        ("role",), role=one_of(["admin", "tenant"]), tenant=TEXT, label={"type": "string", "maxLength": 128}
    ),
}

_CLUSTER: Mapping[str, Schema] = {
    "GpuSlice": answer(
        job=nullable(TEXT),
        tenant=nullable(TEXT),
        task=nullable(COUNT),
        memory_mib=COUNT,
        compute_milli=COUNT,
        isolation=TEXT,
    ),
    "Gpu": answer(
        uuid=TEXT,
        index=COUNT,
        model=TEXT,
        numa_node=nullable(WHOLE),
        memory_mib=COUNT,
        memory_free_mib=COUNT,
        compute_milli=COUNT,
        compute_free_milli=COUNT,
        unavailable=TEXT,
        memory_used_mib=nullable(COUNT),
        utilization_percent=nullable(COUNT),
        slices=listed(ref("GpuSlice")),
    ),
    "Link": answer(first=TEXT, second=TEXT, level=TEXT, nvlinks=COUNT),
    "Node": answer(
        name=TEXT,
        status=one_of([status.value for status in NodeStatus]),
        status_reason=TEXT,
        cordoned=YES_NO,
        labels=_MAP_OF_TEXT,
        cpu_milli=COUNT,
        cpu_free_milli=COUNT,
        memory_mib=COUNT,
        memory_free_mib=COUNT,
        simulated=YES_NO,
        engine_node_id=TEXT,
        gpus=listed(ref("Gpu")),
        links=listed(ref("Link")),
    ),
    "NodeList": pages("Node"),
    "Cordon": body(reason={"type": "string", "maxLength": 500}),
    "Leader": answer(id=TEXT, address=TEXT, since=TIME),
    "Cluster": answer(
        nodes=answer(**{status.value: COUNT for status in NodeStatus}),
        gpus=COUNT,
        memory_mib=COUNT,
        memory_granted_mib=COUNT,
        compute_milli=COUNT,
        compute_granted_milli=COUNT,
        jobs=answer(**{state.lower(): COUNT for state in _STATES}),
        leader=nullable(ref("Leader")),
        revision=COUNT,
        unreadable=COUNT,
        silent_together=COUNT,
        clocks_off={"type": "object", "additionalProperties": {"type": "integer"}},
        engine=TEXT,
        version=TEXT,
    ),
    "Health": {"type": "object", "required": ["status"], "properties": {"status": TEXT, "revision": COUNT}},
    "Snapshot": {"type": "object"},
    "OpenApi": {"type": "object"},
    "Text": {"type": "string"},
    "Fault": answer(field=TEXT, limit=_ANY, value=_ANY, message=TEXT),
    "Problem": answer(
        type=TEXT,
        title=TEXT,
        status=COUNT,
        code=TEXT,
        detail=TEXT,
        field=nullable(TEXT),
        limit=_ANY,
        value=_ANY,
        hint=TEXT,
        errors=listed(ref("Fault")),
    ),
}

COMPONENTS: Mapping[str, Schema] = {
    **_JOBS,
    **_TENANTS,
    "NewTenant": body(("name",), name=TEXT, **_TENANTS["TenantChange"]["properties"]),  # type: ignore[arg-type]
    **_CLUSTER,
}

PARAMETERS: Mapping[str, tuple[str, Schema]] = {
    "limit": ("At most this many items", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}),
    "cursor": ("The next_cursor of the page before", TEXT),
    "tenant": ("Only this tenant's", TEXT),
    "state": ("Only jobs in one of these states, separated by commas", TEXT),
    "name": ("Only jobs of exactly this name", TEXT),
    "id_prefix": ("Only jobs whose id begins so", TEXT),
    "sort": ("Order", one_of(["submitted_at", "-submitted_at"])),
    "task": ("Number of the task", {"type": "integer", "minimum": 0, "default": 0}),
    "attempt": ("Number of the attempt; the newest by default", {"type": "integer", "minimum": 1}),
    "stream": ("Which output", one_of(["stdout", "stderr"])),
    "follow": ("1 to go on until the task ends", one_of(["0", "1", "false", "true"])),
    "tail_bytes": ("Only the last bytes of what is there", {"type": "integer", "minimum": 0}),
}
