"""What an engine is: the thing that runs the containers of a committed job.

Both engines render the same launch settings (`jobspecs.container`) and report through task records in the store, so
that everything after the launch is the same for them. The contract, which tests/contract holds both to:

1. `launch` is idempotent: the identity is job + attempt, and "already there" is success.
2. `stop` is idempotent, and returns once the stop was asked for; that it ended is seen in the task records.
3. `observe` hands what it sees of each task to a sink, which writes it into `tasks/` fenced by the leader's token.
   It may see an event twice or late; it lists everything again whenever it may have missed some.
4. `list` names the attempts that the engine still has, so that `sweep` can stop what has no live allocation.
5. `launch` does not start what would use a GPU beside an attempt that is over and whose end is not confirmed
   (`EngineUnavailable` until it is); `occupied` says which GPUs that are, so that none is offered to begin with.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from attrs import frozen

from coordinator.model import Job, Task
from jobspecs.container import Grant
from vgpu.reasons import Reason


class EngineUnavailable(Exception):
    """The engine could not be asked; try again later. Nothing is known about what it did."""


class EngineRefused(Exception):
    """The engine will never run this attempt. `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.detail or reason.code.value)
        self.reason = reason


@frozen
class RunningAttempt:
    """An attempt that the engine has, and since when (by the engine's own account)."""

    job: str
    attempt: int
    since_ms: int


# Node -> GPU -> tasks (`<job>.<attempt>.<task>`) of attempts that are over, and that the engine may still run there.
Occupied = Mapping[str, Mapping[str, tuple[str, ...]]]

TaskSink = Callable[[Task], Awaitable[None]]


class LogsExpired(Exception):
    """The output was kept for its time and is gone now."""


class Engine(Protocol):
    """`by_grants`: the committed grants are the launch and the stop, so that the engine is told neither."""

    name: str
    by_grants: bool

    async def launch(
        self, job: Job, grants: Sequence[Grant], is_held: Callable[[], bool] = lambda: True
    ) -> None:
        """Starts all tasks of the attempt. `is_held` is asked last of all, whether the term of whoever launches goes on:
        a process that was stopped in between must not start what others have ended since. Raises `EngineUnavailable`
        or `EngineRefused`."""

    async def stop(self, job: str, attempt: int, tenant: str) -> None:
        """Asks for the end of all tasks of the attempt."""

    async def list(self) -> Sequence[RunningAttempt]:
        """What the engine still has."""

    def occupied(self) -> Occupied:
        """GPUs with attempts that are over for the store, and whose end the engine has not confirmed."""

    async def observe(self, sink: TaskSink) -> None:
        """Runs until cancelled. The agent engine has nothing to do here: its agents write their task records."""

    def logs(self, task: Task, *, stream: str, follow: bool, tail_bytes: int | None) -> AsyncIterator[bytes]:
        """The output (`stdout` or `stderr`) of one task of one attempt, running or ended. Raises `LogsExpired`,
        `EngineUnavailable`."""

    async def close(self) -> None: ...
