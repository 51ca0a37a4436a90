"""The Nomad engine: one batch job of Nomad for each attempt, pinned to the nodes that Serai chose.

Nomad is told what to run where, and decides nothing: a create-only register, no restarts, no reschedules, and what it
would try again by itself is deregistered (`nomad_observer`). A register is not atomic in Nomad (two at once may both
pass its check), so both write an equal job: what it says depends on the attempt alone, not on who leads.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from coordinator.config import Settings
from coordinator.engines import (
    EngineRefused,
    EngineUnavailable,
    LogsExpired,
    Occupied,
    RunningAttempt,
    TaskSink,
)
from coordinator.engines.nomad_api import CONFLICT, NomadApi, NomadError, NomadSettings, NomadUnreachable
from coordinator.engines.nomad_logs import read_logs
from coordinator.engines.nomad_observer import NomadObserver
from coordinator.engines.nomad_remains import Attempt, seats_granted
from coordinator.engines.nomad_wishes import LiveJobs, NothingLive, Wishes, nomad_id_of
from coordinator.model import Job, Task, TaskState
from jobspecs.container import Grant
from jobspecs.nomad_job import NomadRefused, nomad_job, nomad_job_id, parse_nomad_job_id
from vgpu.reasons import Reason, ReasonCode

__all__ = ["NomadEngine", "NomadSettings"]

# A job that Nomad will never take; every other error of a register may pass.
_INVALID = re.compile(
    r"errors? occurred:|log storage|cannot be configured|validation failed|invalid", re.IGNORECASE
)


class NomadEngine:
    """`nomad_id` looks up the Nomad node of a node of ours (None = it has none). `live` is the leader's view of the
    store, read at each use: with it an attempt that had started is never registered again after Nomad forgot it, and
    a stop that Nomad did not hear is repeated."""

    name = "nomad"
    by_grants = False

    def __init__(
        self,
        nomad: NomadSettings,
        settings: Settings,
        nomad_id: Callable[[str], str | None],
        clock_ms: Callable[[], int],
        live: Callable[[], LiveJobs] = NothingLive,
    ) -> None:
        self._api = NomadApi(nomad)
        self._nomad = nomad
        self._settings = settings
        self._nomad_id = nomad_id
        self._clock_ms = clock_ms
        self._wishes = Wishes(live, nomad_id)
        self._version = ""
        self._locks: WeakValueDictionary[Attempt, asyncio.Lock] = WeakValueDictionary()

    async def launch(
        self, job: Job, grants: Sequence[Grant], is_held: Callable[[], bool] = lambda: True
    ) -> None:
        """Registers the attempt. One that Nomad has already, running or stopped, is left as it is: it is never
        started twice, and `observe` tells how it is or how it ended."""
        attempt = (job.id, job.attempt)
        async with self._lock(attempt):
            if self._was_started(attempt):
                self._wishes.hint(nomad_id_of(job))
                return
            if attempt in self._wishes.stopping:
                raise EngineRefused(_refusal(f"attempt {job.attempt} was stopped before it was launched"))
            try:
                rendered = await self._render(job, grants)
                await self._end_previous(job)
                await self._until_free(grants)
                if not is_held():
                    raise EngineUnavailable("the term is over")  # Nomad has no fence of ours (LE-4)
                self._wishes.launched[attempt] = job
                self._wishes.remains.put(attempt, nomad_id_of(job), seats_granted(grants))
                await self._register(rendered, attempt)
            except EngineRefused:
                self._wishes.remains.drop(attempt)
                raise
            self._wishes.registered.add(attempt)
            self._wishes.hint(nomad_id_of(job))

    async def stop(self, job: str, attempt: int, tenant: str) -> None:
        """Deregisters the attempt and keeps it in Nomad, so that its end can still be read. Purged later."""
        key = (job, attempt)
        self._wishes.stopping.add(key)
        self._wishes.remains.look_at(key)
        async with self._lock(key):
            known = self._wishes.job(key)
            nomad_id = nomad_id_of(known) if known is not None else await self._find(key, tenant)
            if nomad_id is None:
                return
            self._wishes.hint(nomad_id)
            found = await self._api.job(nomad_id)
            if found is not None and not found.stop and found.attempt == key:
                await self._api.deregister(nomad_id)
                self._wishes.hint(nomad_id)

    async def list(self) -> Sequence[RunningAttempt]:
        """What may still hold something: jobs that Nomad does not call dead."""
        return [
            RunningAttempt(*job.attempt, job.submit_time // 1_000_000)
            for job in await self._api.jobs()
            if job.attempt is not None and job.status != "dead"
        ]

    def occupied(self) -> Occupied:
        return self._wishes.remains.occupied()

    async def observe(self, sink: TaskSink) -> None:
        self._wishes.begin()
        observer = NomadObserver(
            self._api, self._wishes, sink, self._clock_ms, self._settings.log_retention_seconds
        )
        await observer.run()

    async def logs(
        self, task: Task, *, stream: str, follow: bool, tail_bytes: int | None
    ) -> AsyncIterator[bytes]:
        """Nomad keeps them until the job is purged, `log_retention_seconds` after its end."""
        nomad_id: str | None = ""  # a record that names its allocation needs none
        if not task.container:
            known = self._wishes.job((task.job, task.attempt))
            nomad_id = (
                nomad_id_of(known) if known is not None else await self._find((task.job, task.attempt), "")
            )
        if nomad_id is None:
            raise LogsExpired("Nomad does not know this job any more")
        async for chunk in read_logs(
            self._api, nomad_id, task, stream=stream, follow=follow, tail_bytes=tail_bytes
        ):
            yield chunk

    async def close(self) -> None:
        await self._api.close()

    # --- the steps of a launch --------------------------------------------------------------------------------------

    def _lock(self, attempt: Attempt) -> asyncio.Lock:
        """A launch and a stop of one attempt never cross."""
        return self._locks.setdefault(attempt, asyncio.Lock())

    def _was_started(self, attempt: Attempt) -> bool:
        """By our own record (EX-8): what had started and is not in Nomad any more is lost, not to be started."""
        return any(task.state is not TaskState.PREPARED for task in self._wishes.tasks(attempt).values())

    async def _render(self, job: Job, grants: Sequence[Grant]) -> dict[str, Any]:
        node_ids = {}
        for grant in grants:
            node_id = self._nomad_id(grant.node)
            if not node_id and self._wishes.may_be_registered((job.id, job.attempt)):
                # A refusal would end the attempt at once, and it may start yet.
                raise EngineUnavailable(f"no Nomad client is known on node {grant.node} any more")
            if not node_id:
                raise EngineRefused(_refusal("no Nomad client is known on this node", grant.node))
            node_ids[grant.node] = node_id
        if not self._version:
            self._version = await self._api.version()
            if not self._version:
                raise EngineUnavailable("Nomad does not tell its version, and has no nodes that would")
        # The fence in the job is the commit that granted the attempt: equal for every leader that launches it, since
        # a job that differs would make Nomad replace the running allocation.
        fence = job.allocation.allocated_at_ms if job.allocation is not None else 0
        try:
            return nomad_job(
                job.id,
                job.spec,
                grants,
                node_ids,
                version=self._version,
                fence=fence,
                namespace=self._nomad.namespace,
                region=self._nomad.region,
            )
        except NomadRefused as refused:
            raise EngineRefused(refused.reason) from None

    async def _end_previous(self, job: Job) -> None:
        """The attempt before this one must not come back with its node (RR-11)."""
        if job.attempt < 2:
            return
        previous = nomad_job_id(job.tenant, job.spec.name, job.id, job.attempt - 1)
        found = await self._api.job(previous)
        if found is not None and not found.stop and found.attempt == (job.id, job.attempt - 1):
            await self._api.deregister(previous)

    async def _until_free(self, grants: Sequence[Grant]) -> None:
        """Not beside an attempt that is over and perhaps not for Nomad: its client would start both (RR-11)."""
        try:
            async with asyncio.timeout(self._nomad.request_seconds):
                await self._wishes.is_listed.wait()
        except TimeoutError:
            raise EngineUnavailable("Nomad has not told yet what it runs") from None
        other = self._wishes.remains.in_the_way(seats_granted(grants))
        if other:
            raise EngineUnavailable(f"{other} may still use a GPU of it: Nomad has not confirmed its end")

    async def _register(self, rendered: dict[str, Any], attempt: Attempt) -> None:
        try:
            await self._api.register(rendered)
        except NomadUnreachable:
            # The answer is lost, the job perhaps not: it decides.
            if not await self._is_ours(str(rendered["ID"]), attempt):
                raise
        except NomadError as error:
            if CONFLICT in error.text:
                if not await self._is_ours(str(rendered["ID"]), attempt):
                    raise EngineUnavailable(
                        "Nomad had this job and has it no more; asked again later"
                    ) from error
            elif error.status == 400 or _INVALID.search(error.text):
                raise EngineRefused(_refusal(f"Nomad refused the job: {error.text.strip()}")) from error
            else:
                raise

    async def _is_ours(self, nomad_id: str, attempt: Attempt) -> bool:
        """Whether Nomad has the job. Raises `EngineRefused` when it is somebody else's."""
        found = await self._api.job(nomad_id)
        if found is None:
            return False
        if found.attempt != attempt:
            detail = f"Nomad has a job {nomad_id} that this Serai did not make"
            raise EngineRefused(_refusal(detail, nomad_id))
        return True

    async def _find(self, attempt: Attempt, tenant: str) -> str | None:
        """The Nomad job of an attempt of which no record is at hand (a job's name is part of its id)."""
        for job in await self._api.jobs(f"{tenant}." if tenant else ""):
            parsed = parse_nomad_job_id(job.id)
            if job.attempt == attempt and parsed is not None and parsed[1:] == attempt:
                return job.id
        return None


def _refusal(detail: str, *subjects: str) -> Reason:
    return Reason(ReasonCode.ENGINE_REFUSED, subjects=subjects, detail=detail)
