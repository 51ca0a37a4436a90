"""What the engine's launches and stops leave for its observer, and what the store says beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from attrs import frozen

from coordinator.engines.nomad_remains import Attempt, Remains, seats_of
from coordinator.model import Job, Task
from jobspecs.nomad_job import nomad_job_id


class LiveJobs(Protocol):
    """What the store says of the jobs that hold slices, and of those that wait (`coordinator.cluster.Cluster` is one)."""

    @property
    def live_jobs(self) -> Mapping[str, Job]: ...
    @property
    def waiting_jobs(self) -> Mapping[str, Job]: ...
    def tasks_of(self, job: str, attempt: int) -> Mapping[int, Task]: ...


@frozen
class NothingLive:
    """For whoever only reads logs."""

    @property
    def live_jobs(self) -> Mapping[str, Job]:
        return {}

    @property
    def waiting_jobs(self) -> Mapping[str, Job]:
        return {}

    def tasks_of(self, job: str, attempt: int) -> Mapping[int, Task]:
        return {}


class Wishes:
    """What the engine was told: jobs to look at, attempts to stop, attempts that it registered itself. `inherited` are
    those that were live when the term began: whoever led before may have registered them, and its request may still be
    on its way (seeds 201524, 201538). `is_listed` is set once Nomad's lists were read in the term."""

    def __init__(self, live: Callable[[], LiveJobs], nomad_node: Callable[[str], str | None]) -> None:
        self._live = live
        self.nomad_node = nomad_node
        self._hints: set[str] = set()
        self._wake = asyncio.Event()
        self.inherited: frozenset[Attempt] = frozenset()
        self.remains = Remains(self.is_live)
        self.is_listed = asyncio.Event()
        self.is_listed.set()  # whoever does not observe is asked for single attempts only
        self.launched: dict[Attempt, Job] = {}
        self.registered: set[Attempt] = set()
        self.stopping: set[Attempt] = set()

    def begin(self) -> None:
        """A term begins: nothing was launched in it yet."""
        self.is_listed.clear()
        self.inherited = frozenset((job.id, job.attempt) for job in self._live().live_jobs.values())
        for job in self._live().live_jobs.values():
            if job.allocation is not None:
                attempt = (job.id, job.attempt)
                over = {n for n, task in self.tasks(attempt).items() if task.released}
                seats = seats_of(job.allocation)
                self.remains.put(attempt, nomad_id_of(job), {n: s for n, s in seats.items() if n not in over})

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

    def is_live(self, attempt: Attempt) -> bool:
        job = self._live().live_jobs.get(attempt[0])
        return job is not None and job.attempt == attempt[1]

    def live_jobs(self) -> Sequence[Job]:
        return tuple(self._live().live_jobs.values())

    def tasks(self, attempt: Attempt) -> Mapping[int, Task]:
        return self._live().tasks_of(*attempt)

    def is_to_stop(self, attempt: Attempt) -> bool:
        store = self._live()
        job = store.live_jobs.get(attempt[0]) or store.waiting_jobs.get(attempt[0])
        newer = job is not None and job.attempt > attempt[1]
        asked = job is not None and job.attempt == attempt[1] and job.stop is not None
        return newer or asked or attempt in self.stopping

    def forget(self, attempt: Attempt) -> None:
        self.launched.pop(attempt, None)
        self.registered.discard(attempt)
        self.stopping.discard(attempt)


def nomad_id_of(job: Job) -> str:
    return nomad_job_id(job.tenant, job.spec.name, job.id, job.attempt)
