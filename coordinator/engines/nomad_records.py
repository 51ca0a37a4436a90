"""What the engine reads of Nomad's answers, by the field names of its API (1.6 to 2.0). Unknown fields are ignored."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

import msgspec
from msgspec import field

from jobspecs.nomad_job import META_ATTEMPT, META_JOB, META_TASKS, META_TENANT

COMPLETE, FAILED, LOST, UNKNOWN = "complete", "failed", "lost", "unknown"


class TaskEvent(msgspec.Struct, frozen=True, rename="pascal"):
    """`Details` holds all values as text. `Time` is in nanoseconds."""

    type: str
    time: int = 0
    display_message: str = ""
    details: dict[str, str] | None = None


class TaskStateSeen(msgspec.Struct, frozen=True, rename="pascal"):
    """Only the last ten events are kept."""

    state: str = "pending"
    failed: bool = False
    started_at: str | None = None
    finished_at: str | None = None
    events: tuple[TaskEvent, ...] | None = None

    def last(self, *types: str) -> TaskEvent | None:
        return next((event for event in reversed(self.events or ()) if event.type in types), None)


class AllocationSeen(msgspec.Struct, frozen=True, rename="pascal"):
    id: str = field(name="ID")
    job_id: str = field(name="JobID")
    node_id: str = field(name="NodeID")
    task_group: str = ""
    client_status: str = "pending"
    client_description: str = ""
    desired_status: str = "run"
    desired_description: str = ""
    create_index: int = 0
    modify_time: int = 0
    task_states: dict[str, TaskStateSeen] | None = None

    @property
    def is_wanted(self) -> bool:
        """Nobody has asked for its end: neither we nor anybody else."""
        return self.desired_status == "run"

    @property
    def is_ended(self) -> bool:
        """Its client has said that nothing of it is left. `lost` is only the server's opinion."""
        return self.client_status in (COMPLETE, FAILED)

    @property
    def was_lost(self) -> bool:
        """The server gave it up with its node; it says so also after the node came back and ended it."""
        return self.client_status == LOST or "lost since its node" in self.desired_description

    @property
    def task(self) -> TaskStateSeen:
        return next(iter((self.task_states or {}).values()), TaskStateSeen())


class PlacementMetric(msgspec.Struct, frozen=True, rename="pascal"):
    """Why the scheduler took no node for a group."""

    nodes_evaluated: int = 0
    nodes_filtered: int = 0
    nodes_exhausted: int = 0
    constraint_filtered: dict[str, int] | None = None
    dimension_exhausted: dict[str, int] | None = None


class EvaluationSeen(msgspec.Struct, frozen=True, rename="pascal"):
    id: str = field(name="ID")
    job_id: str = field(name="JobID")
    status: str = ""
    modify_index: int = 0
    modify_time: int = 0
    failed_groups: dict[str, PlacementMetric] | None = field(name="FailedTGAllocs", default=None)

    @property
    def is_settled(self) -> bool:
        """The scheduler is done with it. A blocked one waits for capacity and may place at any time."""
        return self.status in ("complete", "failed", "canceled", "blocked")


class TaskOfGroup(msgspec.Struct, frozen=True, rename="pascal"):
    env: dict[str, str] | None = None


class GroupSeen(msgspec.Struct, frozen=True, rename="pascal"):
    name: str
    tasks: tuple[TaskOfGroup, ...] | None = None


class JobSeen(msgspec.Struct, frozen=True, rename="pascal"):
    """A job, or its line in a list (then without groups)."""

    id: str = field(name="ID")
    name: str = ""
    stop: bool = False
    status: str = ""
    submit_time: int = 0
    meta: dict[str, str] | None = None
    task_groups: tuple[GroupSeen, ...] | None = None

    @property
    def attempt(self) -> tuple[str, int] | None:
        """(job, attempt) of Serai, by the job's own Meta; None for anybody else's job."""
        meta: Mapping[str, str] = self.meta or {}
        number = meta.get(META_ATTEMPT, "")
        return (meta[META_JOB], int(number)) if META_JOB in meta and number.isdecimal() else None

    @property
    def tenant(self) -> str:
        return (self.meta or {}).get(META_TENANT, "")

    @property
    def task_count(self) -> int:
        count = (self.meta or {}).get(META_TASKS, "")
        return int(count) if count.isdecimal() else len(self.task_groups or ())


class NodeSeen(msgspec.Struct, frozen=True, rename="pascal"):
    id: str = field(name="ID")
    status: str = ""
    version: str = ""


class Registered(msgspec.Struct, frozen=True, rename="pascal"):
    """The answer to a register or a deregister; no evaluation where nothing was to be done."""

    evaluation_id: str = field(name="EvalID", default="")


class EventObject(msgspec.Struct, frozen=True, rename="pascal"):
    job_id: str = field(name="JobID", default="")


class EventPayload(msgspec.Struct, frozen=True, rename="pascal"):
    allocation: EventObject | None = None
    evaluation: EventObject | None = None


class StreamEvent(msgspec.Struct, frozen=True, rename="pascal"):
    payload: EventPayload | None = None


class StreamLine(msgspec.Struct, frozen=True, rename="pascal"):
    """One line of the event stream; `{}` is a heartbeat."""

    events: tuple[StreamEvent, ...] | None = None

    @property
    def job_ids(self) -> frozenset[str]:
        payloads = [event.payload for event in self.events or () if event.payload is not None]
        objects = [one for payload in payloads for one in (payload.allocation, payload.evaluation)]
        return frozenset(one.job_id for one in objects if one is not None and one.job_id)


class AgentVersion(msgspec.Struct, frozen=True, rename="pascal"):
    version: str = ""


class AgentConfig(msgspec.Struct, frozen=True, rename="pascal"):
    version: AgentVersion


class AgentSelf(msgspec.Struct, frozen=True):
    config: AgentConfig


def time_ms(text: str | None) -> int | None:
    """Milliseconds of an RFC 3339 time with up to nine digits; None where Nomad shows none, or Go's zero time."""
    if not text or text.startswith("0001-"):
        return None
    whole, _, fraction = text.removesuffix("Z").partition(".")
    moment = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
    return int(moment.timestamp()) * 1000 + int((fraction + "000")[:3])
