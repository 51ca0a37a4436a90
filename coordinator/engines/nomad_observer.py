"""Watches Nomad for a term: what it shows of each attempt goes to the sink, and what must not stay is withdrawn.

1. Hear of a job: from the event stream, from a launch or a stop, from a list.
2. Look at it: the job, then its evaluations, then its allocations, in this order, so that what the scheduler is done
   with is seen placed or not placed.
3. Withdraw (deregister, and wait for the scheduler to agree) what Nomad must not try again by itself: a failed
   placement, whose blocked evaluation would start the job at any time later; a lost allocation, which would get a
   second copy beside the first; a job that is to stop.
4. Tell the sink each task's state, and only then deregister a job that has ended. Purge it when its logs have expired.

The stream is a hint only: it forgets, repeats and lies idle, so everything is listed again on each connect and each
`relist_seconds`; where the token may not read it, a blocking query on the allocations takes its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing

from attrs import frozen
from msgspec.structs import replace

from coordinator.engines import EngineUnavailable, TaskSink
from coordinator.engines.nomad_api import NomadApi
from coordinator.engines.nomad_outcome import AttemptSeen, has_copies, observed
from coordinator.engines.nomad_records import AllocationSeen, EvaluationSeen, JobSeen, PlacementMetric
from coordinator.engines.nomad_wishes import Attempt, Wishes, nomad_id_of
from coordinator.model import Task, TaskState
from jobspecs.nomad_job import group_name, parse_nomad_job_id
from vgpu.reasons import ReasonCode

log = logging.getLogger("serai.nomad")

LOOKS_AT_ONCE = 8
# Events of one job come in bursts of four or five within some milliseconds.
DEBOUNCE_SECONDS = 0.02


@frozen
class _Before:
    """What was known of an attempt before Nomad was asked for it: a launch may come in between. `tried`: a register
    may have been sent; `registered`: it was, and answered."""

    id: str
    attempt: Attempt
    nodes: Mapping[int, str]
    records: Mapping[int, Task]
    tried: bool
    registered: bool


class NomadObserver:
    """`log_retention_seconds`: for so long after its end a job is kept in Nomad, since its logs go with it."""

    def __init__(
        self,
        api: NomadApi,
        wishes: Wishes,
        sink: TaskSink,
        clock_ms: Callable[[], int],
        log_retention_seconds: int,
    ) -> None:
        self._api = api
        self._wishes = wishes
        self._sink = sink
        self._clock_ms = clock_ms
        self._log_retention_ms = log_retention_seconds * 1000
        self._nodes: dict[str, Mapping[int, str]] = {}
        self._sent: dict[str, Task] = {}
        self._ended: dict[str, int] = {}
        self._missing_since_ms: dict[str, int] = {}
        self._relist = True
        self._gate = asyncio.Semaphore(LOOKS_AT_ONCE)

    async def run(self) -> None:
        """Until cancelled; raises what the sink raises."""
        stream = asyncio.create_task(self._listen())
        back_off_seconds = 0.0
        try:
            while True:
                try:
                    if self._relist:
                        self._relist = False
                        await self._list()
                    await self._look_at_hints()
                    back_off_seconds = 0.0
                except EngineUnavailable as error:
                    self._relist = True
                    back_off_seconds = self._longer(back_off_seconds)
                    log.warning("nomad unavailable, tried again in %.1f s: %s", back_off_seconds, error)
                    await asyncio.sleep(back_off_seconds)
                    continue
                if not await self._wishes.wait(self._api.settings.relist_seconds):
                    self._relist = True
                else:
                    await asyncio.sleep(DEBOUNCE_SECONDS)
        finally:
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)

    def _longer(self, seconds: float) -> float:
        return min(max(2 * seconds, 0.25), self._api.settings.longest_back_off_seconds)

    # --- hearing ----------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        index, back_off_seconds = 0, 0.0
        while True:
            try:
                async with aclosing(self._api.events()) as events:
                    async for jobs in events:
                        if jobs is None:
                            back_off_seconds = 0.0
                            self._list_again()
                        for job in jobs or ():
                            if parse_nomad_job_id(job) is not None:
                                self._wishes.hint(job)
                reason = "it ended"
            except EngineUnavailable as error:
                reason = str(error)
            back_off_seconds = self._longer(back_off_seconds)
            log.warning("nomad event stream: %s; polling instead", reason)
            try:
                wait = self._api.settings.poll_seconds
                _, index = await self._api.allocations(after=index, wait_seconds=wait)
                self._list_again()
            except EngineUnavailable:
                index = 0
            await asyncio.sleep(back_off_seconds)

    def _list_again(self) -> None:
        self._relist = True
        self._wishes.wake()

    async def _list(self) -> None:
        """Reads everything; jobs of which the lists do not tell enough are looked at one by one."""
        live = (
            self._wishes.live_jobs()
        )  # before the lists: what is live by then was launched before, or not at all
        jobs, (allocations, _) = await asyncio.gather(self._api.jobs(), self._api.allocations())
        of_job: dict[str, list[AllocationSeen]] = {}
        for allocation in allocations:
            of_job.setdefault(allocation.job_id, []).append(allocation)
        self._sent.clear()
        ours = {job.id: job for job in jobs if job.attempt is not None}
        for job in ours.values():
            await self._consider(job, of_job.get(job.id, []))
        for job_record in live:
            if nomad_id_of(job_record) not in ours:
                self._wishes.hint(nomad_id_of(job_record))
        for gone in (self._nodes.keys() | self._ended.keys()) - ours.keys():
            self._nodes.pop(gone, None)
            if self._ended.pop(gone, None) is None:
                self._wishes.hint(gone)

    async def _consider(self, job: JobSeen, allocations: Sequence[AllocationSeen]) -> None:
        if job.id in self._ended:
            await self._purge_when_due(job.id)
        elif job.id not in self._nodes or self._is_odd(job, allocations):
            self._wishes.hint(job.id)
        else:
            await self._conclude(job, (), allocations)

    def _is_odd(self, job: JobSeen, allocations: Sequence[AllocationSeen]) -> bool:
        assert job.attempt is not None
        placed = {allocation.task_group for allocation in allocations}
        unplaced = any(group_name(number) not in placed for number in self._nodes[job.id])
        lost = any(allocation.was_lost for allocation in allocations)
        return (
            unplaced
            or lost
            or has_copies(allocations)
            or (not job.stop and self._wishes.is_to_stop(job.attempt))
        )

    async def _purge_when_due(self, id: str) -> None:
        if self._clock_ms() - self._ended[id] >= self._log_retention_ms:
            await self._api.deregister(id, purge=True)
            del self._ended[id]
            self._nodes.pop(id, None)

    # --- looking ----------------------------------------------------------------------------------------------------

    async def _look_at_hints(self) -> None:
        ids = sorted(id for id in self._wishes.take() if id not in self._ended)
        results = await asyncio.gather(*(self._look_gated(id) for id in ids), return_exceptions=True)
        for id, result in zip(ids, results, strict=True):
            if isinstance(result, EngineUnavailable):
                log.warning("nomad job=%s cannot be read now: %s", id, result)
                self._wishes.hint_later(id, self._api.settings.poll_seconds)
            elif isinstance(result, BaseException):
                raise result

    async def _look_gated(self, id: str) -> None:
        async with self._gate:
            await self._look(id)

    async def _look(self, id: str) -> None:
        before = self._before(id)
        job = await self._api.job(id)
        if job is None:
            if before is not None:
                await self._gone(id, before)
            return
        if job.attempt is None:
            return
        self._nodes[id] = _nodes_of(job)
        evaluations = await self._api.job_evaluations(id)
        if any(not evaluation.is_settled for evaluation in evaluations):
            for evaluation in evaluations:
                if not evaluation.is_settled:
                    await self._api.settled(evaluation.id)
            evaluations = await self._api.job_evaluations(id)
            if any(not evaluation.is_settled for evaluation in evaluations):
                self._wishes.hint_later(id, self._api.settings.poll_seconds)
        allocations = await self._api.job_allocations(id)
        if not job.stop and self._must_withdraw(job, evaluations, allocations):
            await self._withdraw(job)
            await self._look(id)  # it is stopped now, so this ends here
            return
        await self._conclude(job, evaluations, allocations)

    def _must_withdraw(
        self, job: JobSeen, evaluations: Sequence[EvaluationSeen], allocations: Sequence[AllocationSeen]
    ) -> bool:
        assert job.attempt is not None
        lost = any(allocation.was_lost for allocation in allocations) or has_copies(allocations)
        return lost or bool(_failed(evaluations, allocations)) or self._wishes.is_to_stop(job.attempt)

    async def _withdraw(self, job: JobSeen) -> None:
        log.info("nomad job=%s deregistered: it was lost, found no place, or is to stop", job.id)
        registered = await self._api.deregister(job.id)
        if registered.evaluation_id:
            await self._api.settled(registered.evaluation_id)

    async def _conclude(
        self, job: JobSeen, evaluations: Sequence[EvaluationSeen], allocations: Sequence[AllocationSeen]
    ) -> None:
        assert job.attempt is not None
        nodes = self._nodes[job.id]
        done = all(evaluation.is_settled and evaluation.status != "blocked" for evaluation in evaluations)
        failed = _failed(evaluations, allocations)
        at_ms = max((e.modify_time // 1_000_000 for e in evaluations if e.failed_groups), default=None)
        tasks = observed(AttemptSeen(*job.attempt, nodes, job.stop and done, failed, at_ms), allocations)
        for task in tasks:
            await self._tell(task)
        if len(tasks) == len(nodes) and all(
            task.state is TaskState.EXITED and task.released for task in tasks
        ):
            if not job.stop:
                # Only now: it changes what Nomad shows of the allocations. A stopped job is never run again.
                await self._api.deregister(job.id)
            # By this clock and from now on, though it may have ended long ago: a purge by a node's clock that is behind
            # comes so early that a register which is still on its way would make the job anew, and run it twice.
            self._ended.setdefault(job.id, self._clock_ms())
            self._wishes.forget(job.attempt)

    async def _tell(self, task: Task) -> None:
        if self._sent.get(task.attempt_key) != task:
            await self._sink(task)
            self._sent[task.attempt_key] = task

    # --- what Nomad does not know -----------------------------------------------------------------------------------

    def _before(self, id: str) -> _Before | None:
        """None for a job that is not live: nobody asks for it."""
        parsed = parse_nomad_job_id(id)
        job = self._wishes.job(parsed[1:]) if parsed is not None else None
        if parsed is None or job is None or job.allocation is None:
            return None
        attempt = parsed[1:]
        return _Before(
            id,
            attempt,
            {placed.task: placed.node for placed in job.allocation.tasks},
            dict(self._wishes.tasks(attempt)),
            self._wishes.may_be_registered(attempt),
            attempt in self._wishes.registered,
        )

    async def _gone(self, id: str, before: _Before) -> None:
        """A job that Nomad does not have: not launched yet, stopped before it was launched, or forgotten by Nomad
        (purged, collected). Serai's own record decides which (EX-8); an end that was recorded stays."""
        allocations = await self._api.job_allocations(id)
        if not allocations:
            for number, node in before.nodes.items():
                await self._tell_missing(before, Task(*before.attempt, number, node, TaskState.PREPARED))
        elif await self._api.job(id) is not None:
            self._wishes.hint(id)  # launched in between
        else:
            for task in observed(AttemptSeen(*before.attempt, before.nodes, True, {}), allocations):
                await self._tell(task)
                if not task.released:
                    self._wishes.hint_later(id, self._api.settings.poll_seconds)

    async def _tell_missing(self, before: _Before, never: Task) -> None:
        task = before.records.get(never.task, never)
        if task.state is TaskState.EXITED and task.released:
            return
        if task.state is TaskState.PREPARED and not before.registered:
            stop = self._wishes.is_to_stop(before.attempt)
            # A register without an answer may still be carried out for a while.
            if stop and (not before.tried or await self._is_surely_gone(before.id, task.node)):
                ended = replace(task, state=TaskState.EXITED, released=True, ended_at_ms=self._clock_ms())
                await self._tell(self._sent.get(ended.attempt_key) or ended)
            return
        released = await self._is_surely_gone(before.id, task.node)
        if task.state is not TaskState.EXITED:
            detail = "Nomad does not know this job any more"
            task = replace(task, state=TaskState.EXITED, fault=ReasonCode.NODE_LOST.value, detail=detail)
            task = replace(task, ended_at_ms=self._missing_since_ms[before.id])
        await self._tell(replace(task, released=released))

    async def _is_surely_gone(self, id: str, node: str) -> bool:
        """A client that is in touch with its server ends what the server has forgotten: seen missing for the time of
        grace with its node ready, nothing of it is left."""
        now_ms = self._clock_ms()
        since_ms = self._missing_since_ms.setdefault(id, now_ms)
        ready = {one.id for one in await self._api.nodes() if one.status == "ready"}
        if (
            now_ms - since_ms >= self._api.settings.missing_grace_seconds * 1000
            and self._wishes.nomad_node(node) in ready
        ):
            return True
        self._wishes.hint_later(id, self._api.settings.poll_seconds)
        return False


def _nodes_of(job: JobSeen) -> Mapping[int, str]:
    """Serai's node of each task: it stands in the task's own environment, so it outlives a node's registration."""
    nodes = {}
    for group in job.task_groups or ():
        env = next((task.env for task in group.tasks or ()), None) or {}
        number = group.name.rpartition("-")[2]
        if number.isdecimal():
            nodes[int(number)] = env.get("SERAI_NODE", "")
    return nodes


def _failed(
    evaluations: Sequence[EvaluationSeen], allocations: Sequence[AllocationSeen]
) -> Mapping[str, PlacementMetric]:
    """The groups that found no place and have none now."""
    placed = {allocation.task_group for allocation in allocations}
    return {
        group: metric
        for evaluation in evaluations
        for group, metric in (evaluation.failed_groups or {}).items()
        if group not in placed
    }
