"""Why something is not so: a code, the numbers and the names it is about, and the one sentence made from them.

Every "no" of Serai is a `Reason`, so that API, CLI, page, event and log say the same. Codes are only ever added to;
scripts match on them. Numbers carry their unit in the key, as everywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from functools import lru_cache

from msgspec import Struct, field


class ReasonCode(enum.Enum):
    # a spec that is refused
    UNKNOWN_FIELD = "unknown_field"
    MISSING_FIELD = "missing_field"
    BAD_VALUE = "bad_value"
    # can never run (NEVER)
    NO_SUCH_GPU = "no_such_gpu"
    TASK_LARGER_THAN_ANY_NODE = "task_larger_than_any_node"
    SLICE_LARGER_THAN_ANY_GPU = "slice_larger_than_any_gpu"
    JOB_LARGER_THAN_CLUSTER = "job_larger_than_cluster"
    JOB_LARGER_THAN_LIMIT = "job_larger_than_limit"
    # does not fit now (WAIT); the filters of placement, in their order
    NODE_NOT_READY = "node_not_ready"
    NODE_CORDONED = "node_cordoned"
    NODE_CLOSED = "node_closed"
    LABELS_DIFFER = "labels_differ"
    GPU_MODEL_DIFFERS = "gpu_model_differs"
    NO_ISOLATION = "no_isolation"
    NOT_ENOUGH_IDLE_GPUS = "not_enough_idle_gpus"
    NOT_ENOUGH_TOTAL_MEMORY = "not_enough_total_memory"
    NOT_ENOUGH_DISTINCT_GPUS = "not_enough_distinct_gpus"
    NOT_ENOUGH_GPU_MEMORY = "not_enough_gpu_memory"
    NOT_ENOUGH_GPU_COMPUTE = "not_enough_gpu_compute"
    NOT_ENOUGH_CPU = "not_enough_cpu"
    NOT_ENOUGH_NODE_MEMORY = "not_enough_node_memory"
    GANG_DOES_NOT_FIT = "gang_does_not_fit"
    # the tenant's turn and limits
    OVER_LIMIT = "over_limit"
    BEHIND_OTHER_TENANTS = "behind_other_tenants"
    BEHIND_OWN_JOBS = "behind_own_jobs"
    HELD_FOR_LONG_WAIT = "held_for_long_wait"
    RESERVED = "reserved"
    RESERVED_FOR_OTHER = "reserved_for_other"
    BORROWING_STOPPED = "borrowing_stopped"
    NO_NODES = "no_nodes"
    BACK_OFF = "back_off"
    NODES_REFUSED = "nodes_refused"
    INTERNAL_ERROR = "internal_error"
    # what happened to a job
    SUBMITTED = "submitted"
    CHOSEN = "chosen"
    EVICTED = "evicted"
    PLACED = "placed"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    STARTED = "started"
    ENDED = "ended"
    EXIT_CODE = "exit_code"
    SIGNALLED = "signalled"
    OUT_OF_MEMORY = "out_of_memory"
    IMAGE_UNAVAILABLE = "image_unavailable"
    LAUNCH_FAILED = "launch_failed"
    LAUNCH_DEADLINE = "launch_deadline"
    TIME_LIMIT = "time_limit"
    CANCELLED_BY_USER = "cancelled_by_user"
    NODE_LOST = "node_lost"
    GPU_LOST = "gpu_lost"
    SIBLING_FAILED = "sibling_failed"
    ISOLATION_STEPS_FAILED = "isolation_steps_failed"
    ENGINE_REFUSED = "engine_refused"
    STOP_UNCONFIRMED = "stop_unconfirmed"
    TASK_VANISHED = "task_vanished"
    # what keeps a GPU or a node from work
    GPU_UNHEALTHY = "gpu_unhealthy"
    GPU_IN_MIG_MODE = "gpu_in_mig_mode"
    GPU_OCCUPIED = "gpu_occupied"
    GPU_CLAIMED_TWICE = "gpu_claimed_twice"
    ALLOCATION_UNREADABLE = "allocation_unreadable"


class Reason(Struct, frozen=True, gc=False):
    """`numbers` are whole numbers with units in their names; `subjects` are names (of nodes, GPUs, fields);
    `detail` is text from elsewhere (Docker, Nomad), shown as it came."""

    code: ReasonCode
    numbers: Mapping[str, int] = field(default_factory=dict)
    subjects: tuple[str, ...] = ()
    detail: str = ""


@lru_cache(maxsize=1 << 16)
def only(name: str) -> tuple[str, ...]:
    """The subjects of a reason about one thing: the same tuple each time, since every job has a few of them."""
    return (name,)


@lru_cache(maxsize=1 << 14)
def few(*numbers: tuple[str, int]) -> Mapping[str, int]:
    """Numbers of which most reasons have one of a few sets: the same mapping each time, for nobody to change."""
    return dict(numbers)
