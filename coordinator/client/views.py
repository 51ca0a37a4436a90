"""The JSON that the API answers with, as types. Plain dictionaries at run time, so that fields of a newer coordinator
pass through unharmed. Times are RFC 3339 in UTC, sizes whole MiB, compute thousandths of a GPU."""

from __future__ import annotations

from typing import Any, TypedDict

Spec = dict[str, Any]


class ReasonView(TypedDict):
    code: str
    numbers: dict[str, int]
    subjects: list[str]
    detail: str
    sentence: str


class SliceView(TypedDict):
    gpu: str
    index: int | None
    model: str | None
    memory_mib: int
    compute_milli: int
    isolation: str
    memory_by: str | None
    compute_by: str | None


class TaskView(TypedDict):
    task: int
    name: str
    node: str | None
    state: str | None
    exit_code: int | None
    signal: int | None
    oom_killed: bool
    fault: str
    detail: str
    started_at: str | None
    ended_at: str | None
    slices: list[SliceView]


class HappeningView(TypedDict):
    state: str
    at: str
    attempt: int
    reason: ReasonView | None


class JobView(TypedDict):
    id: str
    name: str
    tenant: str
    state: str
    attempt: int
    priority: int
    spec: Spec
    submitted_at: str
    started_at: str | None
    ended_at: str | None
    waited_seconds: float | None
    ran_seconds: float | None
    exit_code: int | None
    failures: int
    reason: ReasonView | None
    chosen: ReasonView | None
    placed: ReasonView | None
    tasks: list[TaskView]
    history: list[HappeningView]
    revision: int


class WaitingView(TypedDict):
    position: int
    id: str
    name: str
    tenant: str
    priority: int
    waited_seconds: float
    asked: dict[str, Any]
    reason: ReasonView | None


class TurnView(TypedDict):
    tenant: str
    space_share: float
    time_share: float
    priority: float


class ReservedSliceView(TypedDict):
    task: int
    node: str
    gpu: str
    memory_mib: int
    compute_milli: int


class ReservationView(TypedDict):
    job: str
    tenant: str | None
    due_at: str | None
    nodes: list[str]
    slices: list[ReservedSliceView]


class QueueView(TypedDict):
    items: list[WaitingView]
    tenants: list[TurnView]
    reservation: ReservationView | None
    revision: int


class TenantView(TypedDict):
    name: str
    quota_memory_mib: int
    limit_memory_mib: int | None
    limit_compute_milli: int | None
    weight: int
    used_memory_mib: int
    used_compute_milli: int
    over_by_memory_mib: int
    headroom_memory_mib: int
    running: int
    waiting: int
    space_share: float
    time_share: float
    priority: float


class ApplicationView(TypedDict):
    id: str
    tenant: str
    quota_memory_mib: int
    text: str
    at: str
    state: str
    answer: str
    answered_at: str | None


class GpuSliceView(TypedDict):
    job: str | None
    tenant: str | None
    task: int | None
    memory_mib: int
    compute_milli: int
    isolation: str


class GpuView(TypedDict):
    uuid: str
    index: int
    model: str
    numa_node: int | None
    memory_mib: int
    memory_free_mib: int
    compute_milli: int
    compute_free_milli: int
    unavailable: str
    memory_used_mib: int | None
    utilization_percent: int | None
    slices: list[GpuSliceView]


class NodeView(TypedDict):
    name: str
    status: str
    status_reason: str
    cordoned: bool
    labels: dict[str, str]
    cpu_milli: int
    cpu_free_milli: int
    memory_mib: int
    memory_free_mib: int
    simulated: bool
    engine_node_id: str
    gpus: list[GpuView]
    links: list[dict[str, Any]]


class ClusterView(TypedDict):
    nodes: dict[str, int]
    gpus: int
    memory_mib: int
    memory_granted_mib: int
    compute_milli: int
    compute_granted_milli: int
    jobs: dict[str, int]
    leader: dict[str, Any] | None
    revision: int
    unreadable: int
    silent_together: int
    clocks_off: dict[str, int]
    engine: str
    version: str


class TokenView(TypedDict, total=False):
    token: str  # only in the answer to its creation
    sha256: str
    role: str
    tenant: str
    label: str
    created_at: str


class WhoView(TypedDict):
    role: str
    tenant: str
    label: str


FINAL_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})


def is_final(job: JobView) -> bool:
    return job["state"] in FINAL_STATES
