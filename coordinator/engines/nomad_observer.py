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
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import aclosing

from attrs import frozen
from msgspec.structs import replace

from coordinator.engines import EngineUnavailable, TaskSink
from coordinator.engines.nomad_api import NomadApi
from coordinator.engines.nomad_outcome import AttemptSeen, has_copies, observed, unplaced
from coordinator.engines.nomad_records import (
    LOST,
    AllocationSeen,
    EvaluationSeen,
    JobSeen,
)
from coordinator.engines.nomad_remains import Attempt, Seat, Seats, seats_seen
from coordinator.engines.nomad_wishes import Wishes, nomad_id_of
from coordinator.model import Task, TaskState
from jobspecs.nomad_job import group_name, parse_nomad_job_id
from vgpu.reasons import ReasonCode

log = logging.getLogger("serai.nomad")

LOOKS_AT_ONCE = 8
MOST_STRAY_TRIES = 6
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
        self._seats: dict[str, Seats] = {}
        self._sent: dict[str, Task] = {}
        self._ended: dict[str, int] = {}
        self._missing_since_ms: dict[str, int] = {}
        self._missed_since_ms: dict[tuple[str, str], int] = {}  # (id, node), with the node ready
        self._ready: Set[str] = frozenset()  # Nomad's nodes, as of a list that had to do with them
        self._relist = True
        self._stray_tries = 0
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
        if await self._look_at_strays(ours.values(), of_job):
            self._wishes.is_listed.set()
        for job in ours.values():
            await self._consider(job, of_job.get(job.id, []))
        for job_record in live:
            if nomad_id_of(job_record) not in ours:
                self._wishes.hint(nomad_id_of(job_record))
        for gone in (self._seats.keys() | self._ended.keys()) - ours.keys():
            self._seats.pop(gone, None)
            if self._ended.pop(gone, None) is None:
                self._wishes.hint(gone)

    async def _look_at_strays(
        self, jobs: Collection[JobSeen], of_job: Mapping[str, Sequence[AllocationSeen]]
    ) -> bool:
        """First what is over for the store and not for Nomad: somebody may be given its GPUs. False where some of it
        could not be read; then it is tried again soon, and a few times only: one job must not hold up all launches."""
        remains = self._wishes.remains
        remains.look_at_all()
        if remains.over():
            self._ready = await self._ready_nodes()
        strays = {
            job.id
            for job in jobs
            if job.attempt is not None
            and not self._wishes.is_live(job.attempt)
            and job.id not in self._seats
            and not (job.status == "dead" and all(one.is_ended for one in of_job.get(job.id, ())))
        }
        for id in sorted(set(remains.over().values()) - {job.id for job in jobs}):
            self._wishes.hint(id)
        try:
            await asyncio.gather(*(self._look_gated(id) for id in sorted(strays)))
        except EngineUnavailable as error:
            log.warning("what is left of earlier attempts cannot be read now: %s", error)
            self._stray_tries += 1
            if self._stray_tries < MOST_STRAY_TRIES:
                poll_seconds = self._api.settings.poll_seconds
                asyncio.get_running_loop().call_later(poll_seconds, self._list_again)
                return False
        return True

    async def _consider(self, job: JobSeen, allocations: Sequence[AllocationSeen]) -> None:
        if job.id in self._ended:
            await self._purge_when_due(job.id)
        elif job.id not in self._seats or self._is_odd(job, allocations):
            self._wishes.hint(job.id)
        else:
            await self._conclude(job, (), allocations)

    def _is_odd(self, job: JobSeen, allocations: Sequence[AllocationSeen]) -> bool:
        assert job.attempt is not None
        placed = {allocation.task_group for allocation in allocations}
        unplaced = any(group_name(number) not in placed for number in self._seats[job.id])
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
            self._seats.pop(id, None)

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
            else:
                await self._gone_for_good(id)
            return
        if job.attempt is None:
            return
        self._seats[id] = seats_seen(job)
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
        return lost or bool(unplaced(evaluations, allocations)) or self._wishes.is_to_stop(job.attempt)

    async def _withdraw(self, job: JobSeen) -> None:
        log.info("nomad job=%s deregistered: it was lost, found no place, or is to stop", job.id)
        registered = await self._api.deregister(job.id)
        if registered.evaluation_id:
            await self._api.settled(registered.evaluation_id)

    async def _conclude(
        self, job: JobSeen, evaluations: Sequence[EvaluationSeen], allocations: Sequence[AllocationSeen]
    ) -> None:
        assert job.attempt is not None
        seats = self._seats[job.id]
        nodes = {number: seat.node for number, seat in seats.items()}
        done = all(evaluation.is_settled and evaluation.status != "blocked" for evaluation in evaluations)
        failed = unplaced(evaluations, allocations)
        at_ms = max((e.modify_time // 1_000_000 for e in evaluations if e.failed_groups), default=None)
        tasks = observed(AttemptSeen(*job.attempt, nodes, job.stop and done, failed, at_ms), allocations)
        over = {task.task for task in tasks if _is_over(task)}
        left = {n: seat for n, seat in seats.items() if n not in over}
        if not self._wishes.is_live(job.attempt):
            left = {n: s for n, s in left.items() if not self._is_out_of_reach(job.id, n, s, allocations)}
        self._wishes.remains.put(job.attempt, job.id, left)
        for task in tasks:
            await self._tell(task)
        if len(tasks) == len(nodes) == len(over):
            if not job.stop:
                # Only now: it changes what Nomad shows of the allocations. A stopped job is never run again.
                await self._api.deregister(job.id)
            # By this clock and from now on, though it may have ended long ago: a purge by a node's clock that is behind
            # comes so early that a register which is still on its way would make the job anew, and run it twice.
            self._ended.setdefault(job.id, self._clock_ms())
            self._wishes.forget(job.attempt)

    def _is_out_of_reach(
        self, id: str, number: int, seat: Seat, allocations: Sequence[AllocationSeen]
    ) -> bool:
        """Nobody will ever say how it ended: the node is another client of Nomad now, or its client has long been back
        and does not know the allocation that the server calls lost."""
        copies = [one for one in allocations if one.task_group == group_name(number) and not one.is_ended]
        client = self._wishes.nomad_node(seat.node)
        if copies and client and all(copy.node_id != client for copy in copies):
            return True
        are_lost = bool(copies) and all(copy.client_status == LOST for copy in copies)
        return are_lost and self._was_missed_for_long(id, seat.node, self._ready)

    async def _tell(self, task: Task) -> None:
        if _is_over(task):
            # Before anybody can give its slices to another.
            self._wishes.remains.ended((task.job, task.attempt), task.task)
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

    async def _gone_for_good(self, id: str) -> None:
        """Of an attempt that is over, and of which nobody will ask again."""
        parsed = parse_nomad_job_id(id)
        seats = self._wishes.remains.of(parsed[1:]) if parsed is not None else {}
        if parsed is None or not seats:
            return
        allocations = await self._api.job_allocations(id)
        ready = await self._ready_nodes()
        for number, seat in seats.items():
            copies = [one for one in allocations if one.task_group == group_name(number)]
            if all(copy.is_ended for copy in copies) and self._was_missed_for_long(id, seat.node, ready):
                self._wishes.remains.ended(parsed[1:], number)

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
        """Asked again until it is."""
        if self._was_missed_for_long(id, node, await self._ready_nodes()):
            return True
        self._wishes.hint_later(id, self._api.settings.poll_seconds)
        return False

    def _was_missed_for_long(self, id: str, node: str, ready: Set[str]) -> bool:
        """A client that is in touch with its server ends what the server has forgotten: seen missing for the time of
        grace with its node ready, nothing of it is left."""
        now_ms = self._clock_ms()
        self._missing_since_ms.setdefault(id, now_ms)
        if self._wishes.nomad_node(node) not in ready:
            self._missed_since_ms.pop((id, node), None)
            return False
        since_ms = self._missed_since_ms.setdefault((id, node), now_ms)
        return now_ms - since_ms >= self._api.settings.missing_grace_seconds * 1000

    async def _ready_nodes(self) -> Set[str]:
        return {one.id for one in await self._api.nodes() if one.status == "ready"}


def _is_over(task: Task) -> bool:
    return task.state is TaskState.EXITED and task.released
