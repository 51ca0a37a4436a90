"""What the engine is told of the attempts that etcd says must run, and what it tells of them.

An attempt is handed over once its isolation steps are done, and once more when its record asks for a stop; a new
leader so repeats all of them, which is safe since both are idempotent. Each look is at one job that something happened
to, so that the cost does not grow with how many jobs run.

An attempt that the engine cannot start yet says so in the record of its job, until it can.

What was given up with its node is withdrawn from the engine at once, and again until the engine has heard it: it must
not start, nor go on, when the node is back with slices that others hold by then (RR-11).

An engine whose launch is the committed grant itself (`by_grants`) is told nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from attrs import define

from coordinator.commit import Committer, LeadershipLost, holds
from coordinator.config import Settings
from coordinator.engines import Engine, EngineRefused, EngineUnavailable
from coordinator.intents import grants_of, reason_intent
from coordinator.lifecycle import waits_for_engine
from coordinator.model import Event, Job, JobGone, JobSeen, JobState, Task, TaskSeen, TaskState
from coordinator.records import encode, grant_key, task_key
from coordinator.replica import Replica
from coordinator.store import Change, Put, StoreUnavailable, created_at
from vgpu.reasons import Reason, ReasonCode

log = logging.getLogger("serai.launches")

LAUNCHES_IN_FLIGHT = 16
STORE_RETRY_SECONDS = 1.0


@define
class _Attempt:
    number: int
    tenant: str
    is_to_stop: bool = False
    is_launched: bool = False
    is_stopped: bool = False
    call: asyncio.Task[None] | None = None


class Launches:
    """Of one term, which goes on while `is_held`. `run` ends with `LeadershipLost`, or when it is cancelled."""

    def __init__(
        self,
        replica: Replica,
        engine: Engine,
        committer: Committer,
        settings: Settings,
        clock_ms: Callable[[], int],
        is_held: Callable[[], bool],
    ) -> None:
        self._replica = replica
        self._engine = engine
        self._committer = committer
        self._settings = settings
        self._clock_ms = clock_ms
        self._is_held = is_held
        self._attempts: dict[str, _Attempt] = {}
        self._withdrawn: set[tuple[str, int]] = set()
        self._withdrawing: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Semaphore(LAUNCHES_IN_FLIGHT)
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        if self._engine.by_grants:
            return
        stop_listening = self._replica.listen(self._on_change, self._on_resync)
        try:
            self._on_resync(self._replica.revision)
            await self._lost
        finally:
            stop_listening()
            calls = [attempt.call for attempt in self._attempts.values() if attempt.call is not None]
            calls += self._withdrawing
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _on_change(self, change: Change, event: Event | None) -> None:
        if isinstance(event, JobSeen):
            self._look(event.job.id)
            over = event.job.attempt if event.job.state.is_final else event.job.attempt - 1
            if any(h.attempt == over and h.state is JobState.LOST for h in event.job.history):
                self._withdraw(event.job.id, over, event.job.tenant)
        elif isinstance(event, JobGone):
            self._look(event.id)
        elif isinstance(event, TaskSeen):
            self._look(event.task.job)  # its isolation steps may be done now

    def _on_resync(self, revision: int) -> None:
        for id in {*self._replica.cluster.live_jobs, *self._attempts}:
            self._look(id)

    def _look(self, id: str) -> None:
        """Calls the engine for this job if there is something to say, and no call about it under way."""
        job = self._replica.cluster.live_jobs.get(id)
        attempt = self._attempts.get(id)
        is_over = attempt is not None and (job is None or job.attempt != attempt.number)
        if attempt is not None and job is not None and not is_over:
            attempt.is_to_stop |= job.stop is not None
        if attempt is not None and attempt.call is not None:
            return  # looked at again when it ends
        if attempt is not None and is_over:
            del self._attempts[id]
            if attempt.is_to_stop and not attempt.is_stopped:
                self._withdraw(id, attempt.number, attempt.tenant)
            attempt = None
        if job is None:
            return
        if attempt is None:
            attempt = self._attempts[id] = _Attempt(job.attempt, job.tenant, job.stop is not None)
        if self._is_due(job, attempt):
            attempt.call = asyncio.create_task(self._call(id, attempt))

    def _is_due(self, job: Job, attempt: _Attempt) -> bool:
        if job.stop is not None:
            return not attempt.is_stopped
        return not attempt.is_launched and self._is_prepared(job)

    def _withdraw(self, id: str, number: int, tenant: str) -> None:
        """An attempt that is over for the store and perhaps not for the engine. Once in a term."""
        if (id, number) not in self._withdrawn:
            self._withdrawn.add((id, number))
            call = asyncio.create_task(self._until_stopped(id, number, tenant))
            self._withdrawing.add(call)
            call.add_done_callback(self._withdrawing.discard)

    async def _until_stopped(self, id: str, number: int, tenant: str) -> None:
        while True:
            try:
                async with self._gate:
                    return await self._engine.stop(id, number, tenant)
            except EngineUnavailable as error:
                log.warning("job=%s attempt=%d is not withdrawn yet: %s", id, number, error)
            await asyncio.sleep(self._settings.back_off_seconds)

    async def _call(self, id: str, attempt: _Attempt) -> None:
        """One call of the engine. An engine that cannot be reached is asked again later; one that refuses ends the
        attempt."""
        waits_for: Reason | None = None
        try:
            async with self._gate:
                # Read again after the wait: a cancel may have come in between (LK-4).
                job = self._live(id, attempt.number)
                if job is not None and self._is_due(job, attempt):
                    waits_for = await self._tell(job, attempt)
                    await self._explain(id, attempt.number, waits_for)
            if waits_for is not None:
                await asyncio.sleep(self._settings.back_off_seconds)
        except LeadershipLost as lost:
            if not self._lost.done():
                self._lost.set_exception(lost)
        finally:
            attempt.call = None
        self._look(id)

    async def _tell(self, job: Job, attempt: _Attempt) -> Reason | None:
        """What it waits for, where the engine must be asked again."""
        try:
            if job.stop is not None:
                await self._engine.stop(job.id, job.attempt, job.tenant)
                attempt.is_stopped = True
            else:
                await self._engine.launch(job, grants_of(job, self._replica.key_values), self._is_held)
                attempt.is_launched = True
        except EngineRefused as refused:
            log.warning("job=%s attempt=%d engine refused: %s", job.id, job.attempt, refused)
            attempt.is_launched = attempt.is_stopped = True
            await self._refuse(job, refused)
        except EngineUnavailable as error:
            log.warning("job=%s attempt=%d engine unavailable: %s", job.id, job.attempt, error)
            return Reason(ReasonCode.ENGINE_UNAVAILABLE, detail=str(error))
        return None

    async def _refuse(self, job: Job, refused: EngineRefused) -> None:
        for placement in job.allocation.tasks if job.allocation else ():
            task = Task(
                job.id,
                job.attempt,
                placement.task,
                placement.node,
                TaskState.EXITED,
                fault=refused.reason.code.value,
                detail=refused.reason.detail,
                released=True,
                ended_at_ms=self._clock_ms(),
            )
            await self.observed(task)

    async def _explain(self, id: str, attempt: int, waits_for: Reason | None) -> None:
        """Writes into the record what the attempt waits for; where it is nothing any more, why it was placed. Raises
        `LeadershipLost`."""
        while self._is_held():
            job = self._live(id, attempt)
            if job is None or job.allocation is None or job.state is not JobState.ALLOCATED or job.stop:
                return
            reason = waits_for or (job.allocation.placed if waits_for_engine(job) else job.reason)
            intent = reason_intent(job, reason, self._replica.key_values) if reason != job.reason else None
            if intent is None:
                return
            try:
                result = await self._committer.write(intent.compares, intent.writes)
            except StoreUnavailable as error:
                log.warning("job=%s: what it waits for is not written yet: %s", id, error)
                await asyncio.sleep(STORE_RETRY_SECONDS)
                continue
            if result.succeeded:
                await self._replica.wait_for(result.revision)
            return  # a record that has changed meanwhile is one of a stop or an end

    def _live(self, id: str, attempt: int) -> Job | None:
        job = self._replica.cluster.live_jobs.get(id)
        return job if job is not None and job.attempt == attempt else None

    def _is_prepared(self, job: Job) -> bool:
        """Every task whose isolation has steps was reported ready by its node."""
        tasks = self._replica.cluster.tasks_of(job.id, job.attempt)
        prepared = {number for number, task in tasks.items() if task.state is not TaskState.EXITED}
        return all(
            not container.steps or container.task in prepared
            for grant in grants_of(job, self._replica.key_values)
            for container in grant.containers
        )

    async def observed(self, task: Task) -> None:
        """The sink of `Engine.observe`: writes what was seen of a task of a live attempt, once. An engine may not say
        it again, so this comes back only when it is written, or nobody needs it any more. Raises `LeadershipLost`."""
        key = task_key(task.node, task.job, task.attempt, task.task)
        grant = grant_key(task.node, task.job, task.attempt)
        while True:
            before = self._replica.cluster.tasks_of(task.job, task.attempt).get(task.task)
            is_over = before is not None and before.state is TaskState.EXITED and before.released
            seen = self._replica.key_values.get(grant)
            if self._live(task.job, task.attempt) is None or before == task or is_over or seen is None:
                return  # an ended attempt never comes back, however late its events are
            condition = created_at(grant, seen.create_revision)
            try:
                result = await self._committer.write([condition], [Put(key, encode(task))])
            except StoreUnavailable as error:
                log.warning("%s: not written yet: %s", task.attempt_key, error)
                await asyncio.sleep(STORE_RETRY_SECONDS)
                continue
            if result.succeeded or not holds(condition, result):
                return
