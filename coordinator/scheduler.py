"""The loop of one term of leadership: snapshot, plan, commit, launch, sweep. Decides nothing itself.

    1. Wait until something came that a cycle decides about (`Cluster.news`), or until time alone changes something. A
       report or a task that came to run is neither.
    2. Take a snapshot. Find what has ended, must stop or must go back to the queue (`lifecycle.settle_job`), and plan what
       is to start. Both look at the same snapshot: what ends still holds its slices in it, so that a placement never
       counts on an end that has yet to be written; the next turn does.
    3. Commit both, and tell a few waiting jobs why they wait.
    4. Wait until the replica has passed the commit, so that the next snapshot holds it: there is no assume cache.
    5. Each allocated job is handed to the engine beside the loop (`coordinator.launches`): the record in etcd says what
       was to be launched, so a crash between commit and launch is mended by whoever leads next.

A fault of the core about one job is contained in steps 2 and 3 (`coordinator.guard`): it is logged and counted, the job
stays as it is, and all others go on.

Deviation from the ideal "one write at a time": a commit is several transactions at once. That is equivalent, since
each job is in one of them and every one carries the fence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from coordinator.cluster import Cluster, Snapshot
from coordinator.commit import Committer, Intent, LeadershipLost, Outcome
from coordinator.config import Settings
from coordinator.cycle import Plan, plan_cycle
from coordinator.cycle_metrics import CycleMetrics
from coordinator.engines import Engine
from coordinator.engines.occupied import is_in_question, without_occupied
from coordinator.fairness import Policy, policy_from
from coordinator.guard import ASIDE_MS, Aside, is_marked, search, without
from coordinator.index import Index
from coordinator.intents import placement_intent, reason_intent, transition_intent, usage_intents
from coordinator.launches import Launches
from coordinator.leader import Term
from coordinator.lifecycle import Transition, given_up, settle_job
from coordinator.market import keep_prices
from coordinator.model import Job
from coordinator.replica import Replica
from coordinator.store import Store, StoreUnavailable
from coordinator.sweep import Sweep
from vgpu.reasons import Reason, ReasonCode

log = logging.getLogger("serai.scheduler")

# The first arrival after a pause is planned at once. Under load cycles begin no nearer than this to each other, so that
# what arrives meanwhile shares a plan and a transaction: a cycle has a price of its own, whatever it decides.
CYCLE_SECONDS = 0.015
# Waiting reasons are written for people who read etcd; the API computes them. So few at a time.
REASONS_LOOKED_AT = 64
REASONS_EVERY_MS = 1_000
OCCUPIED_EVERY_MS = 1_000
STORE_RETRY_SECONDS = 1.0
# Planning that fails whoever waits is tried again after this; what ends is settled meanwhile.
FAULT_SECONDS = 5
MOST_FAILED_CYCLES = 5


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
        metrics: CycleMetrics,
        memo: Index,
        planner: Callable[[Snapshot, Policy, Index], Plan] = plan_cycle,
        settle_one: Callable[[Job, Snapshot], Transition | None] = settle_job,
    ) -> None:
        self._planner = planner
        self._settle_job = settle_one
        self._metrics = metrics
        self._memo = memo
        self._replica = replica
        self._engine = engine
        self._committer = committer
        self._settings = settings
        self._policy = policy
        self._clock_ms = clock_ms
        self._seen: tuple[Cluster, int] | None = None  # whose news the last turn has taken in
        self._reasons_at_ms = 0
        self._reasons_from = 0
        self._reserved_for = ""
        self._due_ms: int | None = None
        self._occupied_due_ms: int | None = None
        self._aside = Aside()
        self._silent_together = 0
        self._clocks_off: frozenset[str] = frozenset()
        self._no_plan_until_ms = 0
        self._reported_at_ms: dict[tuple[str, str], int] = {}

    async def run(self) -> None:
        """Raises `LeadershipLost`. A fault of ours that no job can be blamed for is tried again a few times; then it ends
        the term, since a process that starts anew may do better."""
        loop = asyncio.get_running_loop()
        next_at, failed = 0.0, 0
        while True:
            await asyncio.sleep(max(0.0, next_at - loop.time()))
            next_at = loop.time() + CYCLE_SECONDS
            try:
                again, failed = await self.turn(), 0
            except StoreUnavailable as error:
                log.warning("store unavailable, nothing is planned: %s", error)
                self.look_again()
                await asyncio.sleep(STORE_RETRY_SECONDS)
                continue
            except LeadershipLost:
                raise
            except Exception:
                failed += 1
                log.exception("a cycle failed, %d in a row", failed)
                self._metrics.observe_failure("cycle")
                if failed >= MOST_FAILED_CYCLES:
                    raise
                self.look_again()
                await asyncio.sleep(FAULT_SECONDS)
                continue
            if not again:
                await self._wait_for_cause()

    async def turn(self) -> bool:
        """One pass of steps 2 to 4. True when another would find more to do at once."""
        now_ms = self._clock_ms()
        cluster, phase = self._replica.cluster, self._metrics.phase
        with phase("snapshot"):
            snapshot = self._aside.left_by(cluster.snapshot(now_ms))
            snapshot = self._without_occupied(snapshot)
        self._warn(snapshot)
        self._due_ms = snapshot.next_due_ms
        if self._has_seen(cluster, snapshot.news):
            return False
        with phase("settle"):
            transitions = self._settle(snapshot)
        try:
            with phase("plan"):
                plan = self._plan(snapshot)
        except Exception as error:
            # It takes a while, so what it finds is for the next turn: by then this snapshot is old.
            await self._find_fault(snapshot, error)
            return True
        self._metrics.observe_plan(snapshot, plan, len(self._aside.reasons))
        intents = self._settling(transitions, now_ms)
        if plan is not None:
            intents += self._placing(snapshot, plan)
            intents += self._reason_intents(snapshot, plan, now_ms)
        self._seen = cluster, snapshot.news
        intents += self._aside_intents(cluster)
        if intents:
            outcome = await self._commit(intents)
            self._tell(snapshot, transitions, plan, outcome)
            await self._give_up(snapshot, outcome.too_large)
            is_full = plan is not None and len(plan.placements) >= self._policy.placements_per_cycle
            if is_full or outcome.unavailable:
                self._seen = None
        return not self._has_seen(self._replica.cluster, self._replica.cluster.news)

    def _without_occupied(self, snapshot: Snapshot) -> Snapshot:
        """Less what the engine may still run for attempts that are over. Nothing tells when it is done with it, so that
        is looked at again soon."""
        occupied = self._engine.occupied()
        is_reduced = is_in_question(snapshot, occupied)
        self._occupied_due_ms = snapshot.now_ms + OCCUPIED_EVERY_MS if is_reduced else None
        return without_occupied(snapshot, occupied) if is_reduced else snapshot

    def _settle(self, snapshot: Snapshot) -> tuple[Transition, ...]:
        """As `lifecycle.settle`; a live job for which it fails stays as it is, and keeps what it holds."""
        transitions = []
        for id in sorted(snapshot.restless & snapshot.jobs.keys()):
            try:
                transition = self._settle_job(snapshot.jobs[id], snapshot)
            except Exception as error:
                self._report(id, "settle", error, snapshot.now_ms)
                continue
            if transition is not None:
                transitions.append(transition)
        return tuple(transitions)

    def _plan(self, snapshot: Snapshot) -> Plan | None:
        """Tried once more with a cold memo: what was kept from earlier cycles may be what is wrong."""
        if not snapshot.waiting_jobs or snapshot.now_ms < self._no_plan_until_ms:
            return None
        try:
            return self._planner(snapshot, self._policy, self._memo)
        except Exception:
            log.exception("a plan failed for revision=%d, once more from cold", snapshot.revision)
            self._metrics.observe_failure("plan")
            self._memo.forget()
            return self._planner(snapshot, self._policy, self._memo)

    async def _find_fault(self, snapshot: Snapshot, error: Exception) -> None:
        """Sets aside the jobs on which planning fails (`guard.search`). Between two tries others have their turn: the
        leader's key must be kept alive meanwhile."""
        log.error("planning fails from cold too, looking for the jobs at fault", exc_info=error)
        tries = search(snapshot)
        out = next(tries)
        while True:
            failure: Exception | None = None
            try:
                self._planner(without(snapshot, out), self._policy, self._memo)
            except Exception as failed:
                failure = failed
                self._memo.forget()
            await asyncio.sleep(0)
            try:
                out = tries.send(failure)
            except StopIteration as end:
                at_fault: Mapping[str, Exception] = end.value
                break
        for id, why in at_fault.items():
            self._set_aside(id, "plan", why, snapshot.now_ms)
        if not at_fault:
            log.error("planning fails with nobody waiting: nothing is placed for %d s", FAULT_SECONDS)
            self._no_plan_until_ms = snapshot.now_ms + 1000 * FAULT_SECONDS

    def _warn(self, snapshot: Snapshot) -> None:
        """Of what operators should look at, once when it begins."""
        if snapshot.silent_together and not self._silent_together:
            log.warning("nodes=%d fell silent together, none is given up for now", snapshot.silent_together)
        self._silent_together = snapshot.silent_together
        for node in sorted(snapshot.clocks_off.keys() - self._clocks_off):
            log.warning("node=%s clock is off by %+d s", node, snapshot.clocks_off[node])
        self._clocks_off = frozenset(snapshot.clocks_off)

    async def _commit(self, intents: Sequence[Intent]) -> Outcome:
        """Comes back once the replica shows what was written."""
        with self._metrics.phase("commit"):
            outcome = await self._committer.commit(intents)
        self._metrics.observe_commit(outcome.revision, len(outcome.refused))
        if outcome.revision:
            with self._metrics.phase("watch"):
                await self._replica.wait_for(outcome.revision)
        elif outcome.unavailable:
            raise StoreUnavailable("the commit was not taken")
        return outcome

    async def _give_up(self, snapshot: Snapshot, jobs: Sequence[str]) -> None:
        """Ends waiting jobs whose launch no transaction can hold: planned again, they would only keep others out."""
        detail = (
            "its grants do not fit into one transaction of the store: at most "
            f"{self._settings.max_writes_per_transaction} records (max_writes_per_transaction, and --max-txn-ops of etcd)"
        )
        reason = Reason(ReasonCode.ENGINE_REFUSED, detail=detail)
        keys, most = self._replica.key_values, self._settings.max_writes_per_transaction
        waiting = [job for id in jobs if (job := snapshot.waiting_jobs.get(id)) is not None]
        ends = [Transition(job, given_up(job, snapshot.now_ms, reason)) for job in waiting]
        intents = [i for end in ends if (i := transition_intent(end, keys, most)) is not None]
        if intents:
            await self._commit(intents)

    def look_again(self) -> None:
        """The next turn decides though nothing came."""
        self._seen = None

    def _has_seen(self, cluster: Cluster, news: int) -> bool:
        return self._seen is not None and self._seen[0] is cluster and self._seen[1] == news

    async def _wait_for_cause(self) -> None:
        """Until something came that a cycle would decide about, or time alone changes something."""
        while self._has_seen(cluster := self._replica.cluster, cluster.news):
            times = (
                self._due_ms,
                cluster.due_ms,
                self._reasons_due_ms,
                self._fault_due_ms,
                self._occupied_due_ms,
            )
            due_ms = min((at for at in times if at is not None), default=None)
            timeout = None if due_ms is None else max(0.0, (due_ms - self._clock_ms()) / 1000)
            try:
                # Not wait_for: on Python 3.11 it can swallow a cancellation that comes as the change does.
                async with asyncio.timeout(timeout):
                    await self._replica.wait_for_change(self._replica.changes)
            except TimeoutError:
                self._seen = None
                return

    @property
    def _reasons_due_ms(self) -> int | None:
        """A round among all that wait goes on though nothing happens."""
        return self._reasons_at_ms + REASONS_EVERY_MS if self._reasons_from else None

    @property
    def _fault_due_ms(self) -> int | None:
        """When what failed is tried again."""
        paused_ms = self._no_plan_until_ms if self._no_plan_until_ms > self._clock_ms() else None
        return min((at for at in (self._aside.due_ms, paused_ms) if at is not None), default=None)

    def _settling(self, transitions: Sequence[Transition], now_ms: int) -> list[Intent]:
        keys = self._replica.key_values
        most = self._settings.max_writes_per_transaction
        intents = [i for t in transitions if (i := transition_intent(t, keys, most)) is not None]
        if any(t.after.allocation is None for t in transitions):
            intents += usage_intents(self._replica.cluster.usage_hours(now_ms))
        return intents

    def _placing(self, snapshot: Snapshot, plan: Plan) -> list[Intent]:
        """A placement that is not whole is a fault of ours and must not reach a node: its job is set aside (TP-5)."""
        keys = self._replica.key_values
        intents = []
        for placement in plan.placements:
            job, allocation = placement.job, placement.allocation
            try:
                intent = placement_intent(
                    job,
                    allocation,
                    snapshot.inventories_of(allocation.nodes),
                    keys,
                    engine=self._engine.name,
                    cluster=self._settings.cluster,
                )
            except Exception as error:
                self._set_aside(job.id, "placement", error, snapshot.now_ms)
                continue
            if intent is not None:
                intents.append(intent)
        return intents

    def _set_aside(self, id: str, part: str, error: Exception, now_ms: int) -> None:
        self._report(id, part, error, now_ms)
        self._aside.add(id, error, now_ms)

    def _report(self, id: str, part: str, error: Exception, now_ms: int) -> None:
        """Counts a fault of ours about one job; the same one is logged only from time to time."""
        self._metrics.observe_failure(part)
        if now_ms - self._reported_at_ms.get((id, part), -ASIDE_MS) >= ASIDE_MS:
            self._reported_at_ms[id, part] = now_ms
            log.error("job=%s %s failed, the others go on without it", id, part, exc_info=error)

    def _tell(
        self, snapshot: Snapshot, transitions: Sequence[Transition], plan: Plan | None, outcome: Outcome
    ) -> None:
        written = set(outcome.written)
        for t in transitions:
            if t.before.id in written:
                reason = t.after.stop if t.stop else t.after.reason
                log.info(
                    "job=%s tenant=%s %s -> %s attempt=%d reason=%s",
                    t.before.id,
                    t.before.tenant,
                    t.before.state.value,
                    t.after.state.value,
                    t.after.attempt,
                    reason.code.value if reason else "",
                )
        log.info(
            "cycle revision=%d settled=%d placed=%d waiting=%d refused=%d ms=%d",
            snapshot.revision,
            len(transitions),
            len(plan.placements) if plan else 0,
            len(snapshot.waiting),
            len(outcome.refused),
            self._clock_ms() - snapshot.now_ms,
        )

    def _reason_intents(self, snapshot: Snapshot, plan: Plan, now_ms: int) -> list[Intent]:
        """A few waiting jobs whose reason differs from the one in their record, going round among all that wait; at once
        that of the job which has the reservation, since its withdrawal is judged by it."""
        ids = [id for id in sorted({plan.held_for, self._reserved_for}) if id in snapshot.waiting_jobs]
        jobs = [snapshot.waiting_jobs[id] for id in ids]
        self._reserved_for = plan.held_for
        if now_ms - self._reasons_at_ms >= REASONS_EVERY_MS:
            self._reasons_at_ms = now_ms
            some = list(islice(snapshot.waiting, self._reasons_from, self._reasons_from + REASONS_LOOKED_AT))
            self._reasons_from = self._reasons_from + len(some) if len(some) == REASONS_LOOKED_AT else 0
            jobs += [job for job in some if job.id not in ids]
        keys = self._replica.key_values
        intents: list[Intent] = []
        for job in jobs:
            try:
                reason = plan.waiting.get(job.id)
            except Exception as error:
                self._report(job.id, "reason", error, now_ms)
                continue
            if reason is None or (job.reason is not None and job.reason.code is reason.code):
                continue
            intent = reason_intent(job, reason, keys)
            if intent is not None:
                intents.append(intent)
        return intents

    def _aside_intents(self, cluster: Cluster) -> list[Intent]:
        """The records of jobs that were set aside say so, for every reader."""
        keys, waiting = self._replica.key_values, cluster.waiting_jobs
        told = [(job, why) for id, why in self._aside.reasons.items() if (job := waiting.get(id)) is not None]
        intents = (reason_intent(job, why, keys) for job, why in told if not is_marked(job))
        return [intent for intent in intents if intent is not None]


async def serve_term(
    term: Term,
    store: Store,
    replica: Replica,
    engine: Engine,
    settings: Settings,
    clock_ms: Callable[[], int],
    metrics: CycleMetrics | None = None,
    memo: Index | None = None,
) -> None:
    """Leads until the term is over. Raises `LeadershipLost`, `StoreUnavailable`; the caller resigns. `memo` is what
    a standby has made ready (`rehearse`)."""
    token = term.token
    metrics, memo = metrics or CycleMetrics(), memo or Index()
    committer = Committer(
        store, settings, token.leadership, token.lease, token.create_revision, metrics.observe_batch
    )
    policy = policy_from(settings)
    scheduler = Scheduler(replica, engine, committer, settings, policy, clock_ms, metrics, memo)
    launches = Launches(replica, engine, committer, settings, clock_ms, lambda: term.is_held)
    sweep = Sweep(store, replica, engine, committer, settings, clock_ms)

    async def until_lost() -> None:
        await term.lost.wait()
        raise LeadershipLost(term.reason)

    # The state must include everything that was written before this term: a commit of the last one, above all.
    await replica.wait_for(token.create_revision)
    replica.cluster.lead(clock_ms())
    metrics.is_leading = True
    try:
        async with asyncio.TaskGroup() as group:
            parts = (
                until_lost(),
                scheduler.run(),
                launches.run(),
                engine.observe(launches.observed),
                sweep.run(),
                keep_prices(replica, memo),
            )
            for part in parts:
                group.create_task(part)
    except* (LeadershipLost, StoreUnavailable) as ended:
        raise ended.exceptions[0] from None
    finally:
        metrics.is_leading = False
