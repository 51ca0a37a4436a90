"""What the agent asks of whatever runs tasks on this machine: the Docker Engine (`containers`) or plain processes.

A runner owns the tasks that carry its cluster's and its node's labels, and touches no others. It keeps no list of its
own that the machine does not also hold, so an agent that lost its memory finds everything again with `list`.
`tests/contract/test_runner.py` holds both runners to what is promised here.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec
from attrs import field, frozen

from jobspecs.container import ContainerSettings, Grant
from vgpu.slices import Slice

LABEL_NODE = "serai.node"
LABEL_SLICES = "serai.slices"

# What one stream of a task's output keeps on disk at most; older output goes first, and a reader is told so (OB-2).
OUTPUT_KEPT_BYTES = 64 * 1024 * 1024
OUTPUT_DROPPED = b"[serai: earlier output may be missing, only the last part is kept]\n"

# After SIGKILL a process is gone at once, unless the kernel holds it (GH-8).
KILL_CONFIRM_SECONDS = 10


@frozen(cache_hash=True)
class TaskKey:
    """One task of one attempt; as text `<job>.<attempt>.<task>`, as in the store."""

    job: str
    attempt: int
    task: int

    def __str__(self) -> str:
        return f"{self.job}.{self.attempt}.{self.task}"

    def __lt__(self, other: TaskKey) -> bool:
        return (self.job, self.attempt, self.task) < (other.job, other.attempt, other.task)

    @classmethod
    def parse(cls, text: str) -> TaskKey:
        """ValueError for anything that is not a key."""
        job, attempt, task = text.rsplit(".", 2)
        if not job:
            raise ValueError(f"{text!r} names no job")
        return cls(job, int(attempt), int(task))

    @property
    def name(self) -> str:
        """The name of its container."""
        return f"serai-{self.job}-{self.attempt}-{self.task}"


class Observed(enum.Enum):
    """CREATED: it exists and was never started (the agent died in between)."""

    CREATED = "created"
    RUNNING = "running"
    EXITED = "exited"


@frozen
class ObservedTask:
    """One task as the machine has it now. `foreign` marks a container that another engine (Nomad) runs for Serai: it
    is seen, never touched. `exit_code` None after the end means that nobody can know it any more."""

    key: TaskKey
    state: Observed
    exit_code: int | None = None
    oom_killed: bool = False
    started_at_ms: int | None = None
    ended_at_ms: int | None = None
    slices: tuple[Slice, ...] = ()
    detail: str = ""
    container: str = ""
    foreign: bool = False

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(piece.gpu for piece in self.slices)


@frozen
class RunnerFacts:
    """What the execution backend can do here. `container_gpus` as in `NodeInventory`; `warnings` are for the report."""

    container_gpus: str = "devices"
    warnings: tuple[str, ...] = field(factory=tuple)


class RunnerUnavailable(Exception):
    """The backend cannot be asked now. Nothing is known about what it did; ask again."""


class LaunchFailed(Exception):
    """The task was not started and nothing of it is left. `fault` is a reason code: image_unavailable when trying again
    cannot help (EX-4), launch_failed otherwise; empty with an `exit_code` when the user's command cannot be run
    (126, 127 as in a shell), which is the job's own end and no fault of the node."""

    def __init__(self, fault: str, detail: str, exit_code: int | None = None) -> None:
        super().__init__(detail)
        self.fault = fault
        self.detail = detail
        self.exit_code = exit_code


class StopUnconfirmed(Exception):
    """It was told to stop and killed, and it is still there (GH-8)."""


class LogsUnknown(Exception):
    """No task of that key has output here."""


class Runner(Protocol):
    """Every call comes back in bounded time, whatever the backend does."""

    name: str

    async def list(self) -> tuple[ObservedTask, ...]:
        """Everything of ours that exists, in the order of keys. RunnerUnavailable."""
        ...

    async def start(self, grant: Grant, container: ContainerSettings) -> None:
        """Starts the task, unless this very attempt exists: then it is adopted as it is, also when it has ended (EX-5).
        LaunchFailed, RunnerUnavailable."""
        ...

    async def stop(self, key: TaskKey, grace_seconds: int) -> None:
        """SIGTERM, and SIGKILL to what is left after the grace. Comes back when the task has ended or is not there;
        raises StopUnconfirmed or RunnerUnavailable when that could not be seen in the grace plus some seconds."""
        ...

    async def remove(self, key: TaskKey) -> None:
        """Deletes an ended (or never started) task with its output; no error when it is gone. RunnerUnavailable."""
        ...

    def events(self) -> AsyncIterator[None]:
        """A hint each time something may have changed, for ever; hints may be lost, `list` tells the truth."""
        ...

    def logs(
        self, key: TaskKey, *, stream: str, follow: bool, tail_bytes: int | None
    ) -> AsyncIterator[bytes]:
        """The output on `stdout` or `stderr`; with `follow` until the task ends. Begins with OUTPUT_DROPPED when the
        beginning is no longer there. LogsUnknown, RunnerUnavailable."""
        ...

    def attempt_of(self, pid: int) -> str:
        """The text of the key that a process of this machine belongs to, "" for none of ours. From any thread."""
        ...

    async def probe(self) -> RunnerFacts:
        """RunnerUnavailable."""
        ...

    async def close(self) -> None:
        """Gives up connections. What runs goes on running."""
        ...


def grant_labels(grant: Grant, container: ContainerSettings) -> Mapping[str, str]:
    """The labels by which a task is found again: those of its settings, the node, and what it holds."""
    return {
        **container.labels,
        LABEL_NODE: grant.node,
        LABEL_SLICES: msgspec.json.encode(container.slices).decode(),
    }


def slices_of(labels: Mapping[str, str]) -> tuple[Slice, ...]:
    """The slices that a label names; none when there is no such label or nobody can read it."""
    try:
        return msgspec.json.decode(labels.get(LABEL_SLICES, "[]"), type=tuple[Slice, ...])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return ()
