"""What the engine's launches and stops leave for its observer, and what the store says beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from attrs import frozen

from coordinator.model import Job, Task
from jobspecs.nomad_job import nomad_job_id

Attempt = tuple[str, int]


class LiveJobs(Protocol):
    """What the store says of the jobs that hold slices (`coordinator.cluster.Cluster` is one)."""

    @property
    def live_jobs(self) -> Mapping[str, Job]: ...
    def tasks_of(self, job: str, attempt: int) -> Mapping[int, Task]: ...


@frozen
class NothingLive:
    """For whoever only reads logs."""

    @property
    def live_jobs(self) -> Mapping[str, Job]:
        return {}

    def tasks_of(self, job: str, attempt: int) -> Mapping[int, Task]:
        return {}


class Wishes:
    """What the engine was told: jobs to look at, attempts to stop, attempts that it registered itself. `inherited` are
    those that were live when the term began: whoever led before may have registered them, and its request may still be
    on its way (seeds 201524, 201538)."""

    def __init__(self, live: Callable[[], LiveJobs], nomad_node: Callable[[str], str | None]) -> None:
        self._live = live
        self.nomad_node = nomad_node
        self._hints: set[str] = set()
        self._wake = asyncio.Event()
        self.inherited: frozenset[Attempt] = frozenset()
        self.launched: dict[Attempt, Job] = {}
        self.registered: set[Attempt] = set()
        self.stopping: set[Attempt] = set()

    def begin(self) -> None:
        """A term begins: nothing was launched in it yet."""
        self.inherited = frozenset((job.id, job.attempt) for job in self._live().live_jobs.values())

    def may_be_registered(self, attempt: Attempt) -> bool:
        """Whether a register of it may have been sent, by anybody. That Nomad does not have it says nothing then."""
        return attempt in self.launched or attempt in self.inherited

    def hint(self, nomad_id: str) -> None:
        self._hints.add(nomad_id)
        self._wake.set()

    def hint_later(self, nomad_id: str, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self.hint, nomad_id)

    def wake(self) -> None:
        self._wake.set()

    def take(self) -> set[str]:
        taken, self._hints = self._hints, set()
        self._wake.clear()
        return taken

    async def wait(self, seconds: float) -> bool:
        """True when there is something to do, False when the time is over."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    def job(self, attempt: Attempt) -> Job | None:
        """The record of an attempt that is live, or that was launched here."""
        live = self._live().live_jobs.get(attempt[0])
        return live if live is not None and live.attempt == attempt[1] else self.launched.get(attempt)

    def live_jobs(self) -> Sequence[Job]:
        return tuple(self._live().live_jobs.values())

    def tasks(self, attempt: Attempt) -> Mapping[int, Task]:
        return self._live().tasks_of(*attempt)

    def is_to_stop(self, attempt: Attempt) -> bool:
        job = self._live().live_jobs.get(attempt[0])
        newer = job is not None and job.attempt > attempt[1]
        asked = job is not None and job.attempt == attempt[1] and job.stop is not None
        return newer or asked or attempt in self.stopping

    def forget(self, attempt: Attempt) -> None:
        self.launched.pop(attempt, None)
        self.registered.discard(attempt)
        self.stopping.discard(attempt)


def nomad_id_of(job: Job) -> str:
    return nomad_job_id(job.tenant, job.spec.name, job.id, job.attempt)
