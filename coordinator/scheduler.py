"""The loop of one term of leadership: snapshot, plan, commit, launch, sweep. Decides nothing itself.

    1. Wait until something changed, or until time alone changes something (`Snapshot.next_due_ms`).
    2. Take a snapshot, and write what has ended, must stop or must go back to the queue (`lifecycle.settle`).
    3. Plan on a snapshot that has seen those writes; commit the placements; tell waiting jobs why they wait.
    4. Wait until the replica has passed the commit, so that the next snapshot holds it: there is no assume cache.
    5. Hand each allocated job to the engine, beside the loop: the record in etcd says what was to be launched, so a
       crash between commit and launch is mended by whoever leads next.

Deviation from the ideal "one write at a time": step 2 and 3 send several transactions at once. That is equivalent,
since each job is in one of them and every one carries the fence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import islice

from coordinator.cluster import Snapshot
from coordinator.commit import Committer, Intent, LeadershipLost, Outcome
from coordinator.config import Settings
from coordinator.cycle import Plan, plan_cycle
from coordinator.engines import Engine, EngineRefused, EngineUnavailable
from coordinator.fairness import Policy, policy_from
from coordinator.intents import grants_of, placement_intent, reason_intent, transition_intent
from coordinator.leader import Term
from coordinator.lifecycle import settle
from coordinator.model import Job, Task, TaskState
from coordinator.records import encode, grant_key, task_key, usage_key
from coordinator.replica import Replica
from coordinator.store import Put, Store, StoreUnavailable, created_at
from coordinator.sweep import Sweep
from jobspecs.render import grants_for

log = logging.getLogger("serai.scheduler")

# Arrivals of one burst share a cycle. Short beside a commit (some 2 ms), so nobody notices it at low load.
DEBOUNCE_SECONDS = 0.002
# Waiting reasons are written for people who read etcd; the API computes them. So few at a time.
REASONS_LOOKED_AT = 64
REASONS_EVERY_MS = 1_000
LAUNCHES_IN_FLIGHT = 16


class Scheduler:
    """One term. `run` ends with `LeadershipLost`, or when it is cancelled."""

    def __init__(
        self,
        replica: Replica,
        engine: Engine,
        committer: Committer,
        settings: Settings,
        policy: Policy,
        clock_ms: Callable[[], int],
    ) -> None:
        self._replica = replica
        self._engine = engine
        self._committer = committer
        self._settings = settings
        self._policy = policy
        self._clock_ms = clock_ms
        self._launches: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._launched: set[tuple[str, int]] = set()
        self._launch_gate = asyncio.Semaphore(LAUNCHES_IN_FLIGHT)
        self._reasons_at_ms = 0
        self._reasons_from = 0
        self._due_ms: int | None = None

    async def run(self) -> None:
        """Raises `LeadershipLost`."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._loop())
                group.create_task(self._engine.observe(self.observed))
        except* LeadershipLost as lost:
            raise LeadershipLost(str(lost.exceptions[0])) from None
        finally:
            for launch in self._launches.values():
                launch.cancel()
            await asyncio.gather(*self._launches.values(), return_exceptions=True)

    async def turn(self) -> bool:
        """One pass of steps 2 to 5. True when it wrote something, so that another pass may find more to do."""
        outcome = await self._settle()
        if not outcome.written:
            outcome = await self._place()
        if outcome.revision:
            await self._replica.wait_for(outcome.revision)
        self._start_launches()
        return bool(outcome.written or outcome.refused)

    async def _loop(self) -> None:
        while True:
            changed = self._replica.changes  # read before the pass: what arrives meanwhile starts another
            try:
                again = await self.turn()
            except StoreUnavailable as error:
                log.warning("store unavailable, nothing is planned: %s", error)
                await asyncio.sleep(1)
                continue
            if not again:
                await self._wait_for_cause(changed)

    async def _wait_for_cause(self, changes_seen: int) -> None:
        """Until something changed, or time alone changes something."""
        timeout = None if self._due_ms is None else max(0.0, (self._due_ms - self._clock_ms()) / 1000)
        try:
            # Not wait_for: on Python 3.11 it can swallow a cancellation that comes as the change does.
            async with asyncio.timeout(timeout):
                await self._replica.wait_for_change(changes_seen)
        except TimeoutError:
            return
        await asyncio.sleep(DEBOUNCE_SECONDS)

    async def _settle(self) -> Outcome:
        now_ms = self._clock_ms()
        transitions = settle(self._replica.cluster.snapshot(now_ms))
        if not transitions:
            return Outcome()
        keys = self._replica.key_values
        intents = [intent for t in transitions if (intent := transition_intent(t, keys)) is not None]
        if any(t.after.allocation is None for t in transitions):
            intents.append(self._usage_intent(now_ms))
        outcome = await self._committer.commit(intents)
        for t in transitions:
            if t.before.id in outcome.written:
                reason = t.after.stop if t.stop else t.after.reason
                code = reason.code.value if reason else ""
                log.info(
                    "job=%s tenant=%s %s -> %s attempt=%d reason=%s",
                    t.before.id,
                    t.before.tenant,
                    t.before.state.value,
                    t.after.state.value,
                    t.after.attempt,
                    code,
                )
        return outcome

    def _usage_intent(self, now_ms: int) -> Intent:
        hours = self._replica.cluster.usage_hours(now_ms)
        return Intent(
            "", (), tuple(Put(usage_key(hour.tenant, hour.hour_ms), encode(hour)) for hour in hours)
        )

    async def _place(self) -> Outcome:
        now_ms = self._clock_ms()
        snapshot = self._replica.cluster.snapshot(now_ms)
        self._due_ms = snapshot.next_due_ms
        plan = plan_cycle(snapshot, self._policy)
        keys = self._replica.key_values
        intents = []
        for placement in plan.placements:
            grants = grants_for(
                placement.job.id,
                placement.job.spec,
                placement.allocation,
                snapshot.inventories_of(placement.allocation.nodes),
                engine=self._engine.name,
                cluster=self._settings.cluster,
                ran_ms=placement.job.ran_ms,
            )
            intent = placement_intent(placement.job, placement.allocation, grants, keys)
            if intent is not None:
                intents.append(intent)
        intents += self._reason_intents(snapshot, plan, now_ms)
        if not intents:
            return Outcome()
        outcome = await self._committer.commit(intents)
        log.info(
            "cycle revision=%d placed=%d waiting=%d refused=%d ms=%d",
            snapshot.revision,
            len(plan.placements),
            len(snapshot.waiting),
            len(outcome.refused),
            self._clock_ms() - now_ms,
        )
        return outcome

    def _reason_intents(self, snapshot: Snapshot, plan: Plan, now_ms: int) -> list[Intent]:
        """A few waiting jobs whose reason differs from the one in their record, going round among all that wait."""
        if now_ms - self._reasons_at_ms < REASONS_EVERY_MS:
            return []
        self._reasons_at_ms = now_ms
        jobs = list(islice(snapshot.waiting, self._reasons_from, self._reasons_from + REASONS_LOOKED_AT))
        self._reasons_from = self._reasons_from + len(jobs) if len(jobs) == REASONS_LOOKED_AT else 0
        keys = self._replica.key_values
        intents: list[Intent] = []
        for job in jobs:
            reason = plan.waiting.get(job.id)
            if reason is None or (job.reason is not None and job.reason.code is reason.code):
                continue
            intent = reason_intent(job, reason, keys)
            if intent is not None:
                intents.append(intent)
        return intents

    # --- launch and stop: what etcd says must run, told to the engine ------------------------------------------------

    def _start_launches(self) -> None:
        """Hands over each live attempt that this term has not handed over yet; a new leader so repeats them all,
        which is safe since `launch` is idempotent. A stop that is asked for replaces a launch under way."""
        live = self._replica.cluster.live_jobs
        for job in live.values():
            key = (job.id, job.attempt)
            if key not in self._launches and key not in self._launched:
                self._launched.add(key)
                self._launches[key] = asyncio.create_task(self._hand_over(job.id, job.attempt))
        self._launched = {key for key in self._launched if key[0] in live and live[key[0]].attempt == key[1]}

    async def _hand_over(self, id: str, attempt: int) -> None:
        """Launches the attempt once its isolation steps are done; when its record asks for a stop, stops it."""
        key = (id, attempt)
        try:
            launched = False
            while (job := self._live(id, attempt)) is not None:
                seen = self._replica.changes
                if job.stop is not None:
                    if await self._try(job, self._engine.stop(id, attempt, job.tenant)):
                        return
                    continue
                if not launched and self._is_prepared(job):
                    # Read again after each wait: a cancel may have come in between (LK-4).
                    launched = await self._try(
                        job, self._engine.launch(job, grants_of(job, self._replica.key_values))
                    )
                    continue
                await self._replica.wait_for_change(seen)
        finally:
            self._launches.pop(key, None)

    async def _try(self, job: Job, call: Awaitable[None]) -> bool:
        """One call of the engine. An engine that cannot be reached is asked again later; one that refuses ends the
        attempt."""
        try:
            async with self._launch_gate:
                await call
            return True
        except EngineUnavailable as error:
            log.warning("job=%s attempt=%d engine unavailable: %s", job.id, job.attempt, error)
            await asyncio.sleep(self._settings.back_off_seconds)
            return False
        except EngineRefused as refused:
            log.warning("job=%s attempt=%d engine refused: %s", job.id, job.attempt, refused)
            await self._refuse(job, refused)
            return True

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
        """The sink of `Engine.observe`: writes what was seen of a task of a live attempt, once."""
        job = self._live(task.job, task.attempt)
        key = task_key(task.node, task.job, task.attempt, task.task)
        before = self._replica.cluster.tasks_of(task.job, task.attempt).get(task.task)
        if (
            job is None
            or before == task
            or (before is not None and before.state is TaskState.EXITED and before.released)
        ):
            return  # an ended attempt never comes back, however late its events are
        grant = grant_key(task.node, task.job, task.attempt)
        seen = self._replica.key_values.get(grant)
        if seen is None:
            return
        await self._committer.write([created_at(grant, seen.create_revision)], [Put(key, encode(task))])


async def serve_term(
    term: Term,
    store: Store,
    replica: Replica,
    engine: Engine,
    settings: Settings,
    clock_ms: Callable[[], int],
) -> None:
    """Leads until the term is over. Raises `LeadershipLost`, `StoreUnavailable`; the caller resigns."""
    token = term.token
    committer = Committer(store, settings, token.leadership, token.lease, token.create_revision)
    scheduler = Scheduler(replica, engine, committer, settings, policy_from(settings), clock_ms)
    sweep = Sweep(store, replica, engine, committer, settings, clock_ms)

    async def until_lost() -> None:
        await term.lost.wait()
        raise LeadershipLost(term.reason)

    # The state must include everything that was written before this term: a commit of the last one, above all.
    await replica.wait_for(token.create_revision)
    replica.cluster.lead(clock_ms())
    try:
        async with asyncio.TaskGroup() as group:
            for part in (until_lost(), scheduler.run(), sweep.run()):
                group.create_task(part)
    except* (LeadershipLost, StoreUnavailable) as ended:
        raise ended.exceptions[0] from None
