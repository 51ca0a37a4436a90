"""What must hold after every write of the store and after every start of a container (section 9 of the design).

Two accounts are kept: of the records, folded into a `Cluster` of our own; and of the machines, as they really are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import inf

from coordinator import lifecycle
from coordinator.cluster import Cluster
from coordinator.config import Settings
from coordinator.endings import INFRASTRUCTURE
from coordinator.model import (
    Allocation,
    Happening,
    Job,
    JobSeen,
    JobState,
    RecordUnreadable,
    Task,
    TaskSeen,
    TaskState,
)
from coordinator.records import (
    GRANTS,
    LEADER,
    TASKS,
    Leadership,
    decode,
    event,
)
from coordinator.store import Change
from nodeagent.runner import TaskKey
from tests.invariants import check_snapshot
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.machine import Box, Machine
from tests.simulation.store import Applied, Server
from vgpu.inventory import NodeReport
from vgpu.reasons import ReasonCode

FULL_CHECK_EACH = 12
# Clocks may differ so much, and then limits of running time are off by as much.
CLOCK_SLACK_SECONDS = 2.5
# A write may have been sent so long ago, by a leader whose watch was cut for a while.
BEHIND_SECONDS = 10.0


class Violation(AssertionError):
    """A promise was broken."""


def hold(condition: object, text: str) -> None:
    if not condition:
        raise Violation(text)


class Checks:
    """`failure` is the first violation; the world stops at it."""

    def __init__(self, loop: VirtualLoop, settings: Settings, machines: Mapping[str, Machine]) -> None:
        self.loop = loop
        self.settings = settings
        self.machines = machines
        self.cluster = Cluster(settings, keep_done=True)
        self.failure: Violation | None = None
        self.clocks_agree = True
        self.acknowledged: dict[str, str] = {}  # job -> what was acknowledged last: submit or cancel
        self.never: set[str] = set()  # jobs whose submit was refused for certain
        self.jobs: dict[str, Job] = {}
        self.allocations: dict[tuple[str, int], Allocation] = {}
        self.on_end: Callable[[Box], None] = lambda box: None
        self.grants: set[tuple[str, str, int]] = set()
        self.exits: dict[TaskKey, int | None] = {}
        self.starts: dict[TaskKey, int] = defaultdict(int)
        self.ran_seconds: dict[tuple[str, int], float] = {}
        self._started_at: dict[tuple[str, int], float] = {}
        self.ran: set[TaskKey] = set()  # written down as running or ended
        self.ended_at: dict[TaskKey, float] = {}  # when it was written down as ended
        self._wipes: dict[TaskKey, int] = {}
        self.given_up: dict[tuple[str, int], set[str]] = {}
        self.coordinators: dict[Process, str] = {}
        self.last_heard: dict[str, float] = {}
        self.back_at: dict[str, float] = {}  # when a node was heard again that could be given up
        self.story: list[str] = []
        self._reported: dict[
            str, tuple[Process | None, int]
        ] = {}  # who wrote the last report of a node, and which
        self._replaced: set[Process | None] = set()
        self._folders: dict[str, set[str]] = defaultdict(set)
        self._writes = 0

    def tell(self, text: str) -> None:
        self.story.append(f"{self.loop.time():9.3f} {text}")

    def fail(self, violation: AssertionError) -> None:
        if self.failure is None:
            self.failure = Violation(str(violation) or repr(violation))
            self.tell(f"VIOLATION {violation}")
            self.loop.stop()

    # --- the records -----------------------------------------------------------------------------------------------

    def applied(self, applied: Applied) -> None:
        if self.failure is not None:
            return
        try:
            self._check_sender(applied)
            is_about_jobs = False
            for change in applied.changes:
                is_about_jobs |= self._fold(change, applied)
            self.cluster.revision = applied.revision
            if is_about_jobs:
                self._check_records()
                self._writes += 1
                if self._writes % FULL_CHECK_EACH == 0:
                    check_snapshot(self.cluster.snapshot(self.loop.wall_ms()))
        except AssertionError as violation:
            self.fail(violation)

    def _check_sender(self, applied: Applied) -> None:
        """Every write of a coordinator was sent and lands in the same term, which is its own (LE-4)."""
        sender = applied.sender
        identity = self.coordinators.get(sender) if sender is not None else None
        if identity is None or all(write.key == LEADER for write in applied.writes):
            return
        before = applied.sent_holder
        holder = self._holder
        keys = ", ".join(write.key for write in applied.writes)
        hold(
            holder is not None and holder.startswith(f"{identity}."),
            f"{identity} wrote {keys} while {holder or 'nobody'} led",
        )
        sent = decode(Leadership, before).id if before else ""
        hold(
            sent == holder,
            f"{identity} wrote {keys} in the term {holder}, sent in the term {sent or 'of nobody'}",
        )

    _holder: str | None = None

    def _fold(self, change: Change, applied: Applied) -> bool:
        key, loop = change.item.key, self.loop
        if key == LEADER:
            self._holder = None if change.deleted else decode(Leadership, change.item.value).id
            self.tell(f"leader is {self._holder}")
        seen = event(change)
        if seen is not None:
            if isinstance(seen, RecordUnreadable):
                raise Violation(f"{key} was written and cannot be read: {seen.detail}")
            self.cluster.apply(seen, loop.wall_ms())
        folder, _, rest = key.removeprefix("/serai/").partition("/")
        if folder in ("queue", "jobs", "done"):
            id = rest.rsplit("/", 1)[-1]
            if isinstance(seen, JobSeen):
                self._folders[id].add(folder)
                self._job(folder, seen.job)
            else:
                self._folders[id].discard(folder)
            return True
        if folder == "grants":
            node, name = rest.split("/")
            job, attempt = name.split(".")
            (self.grants.discard if change.deleted else self.grants.add)((node, job, int(attempt)))
            return True
        if isinstance(seen, TaskSeen):
            self._task(seen.task)
        if folder == "nodes" and key.endswith("/report") and not change.deleted:
            node = rest.split("/")[0]
            if self._silent(node) >= self.settings.lost_seconds:
                self.back_at[node] = loop.time()
            self.last_heard[node] = loop.time()
            self._check_report(node, applied.sender, decode(NodeReport, change.item.value).sequence)
        return folder == "tasks"

    def _check_report(self, node: str, sender: Process | None, sequence: int) -> None:
        """What a node says is never replaced by what it said before (seed 210220)."""
        before, number = self._reported.get(node, (None, 0))
        if before is sender:
            hold(sequence > number, f"report {sequence} of {node} landed on report {number}")
        else:
            hold(
                sender not in self._replaced,
                f"a report of an agent of {node} landed on one of the next agent",
            )
            self._replaced.add(before)
        self._reported[node] = (sender, sequence)

    def _job(self, folder: str, job: Job) -> None:
        id, before = job.id, self.jobs.get(job.id)
        self.tell(f"{id} {folder}/ {job.state.value} attempt={job.attempt} {_said(job)}")
        hold(id not in self.never, f"{id} was refused for certain and is there")
        if before is not None and before != job:
            hold(not before.state.is_final, f"{id} was {before.state.value} and is written again")
            hold(job.attempt >= before.attempt, f"{id} went back to attempt {job.attempt}")
            if before.attempt == job.attempt:
                lifecycle.check(before.state, job.state)
            else:
                self._check_attempt_over(before, job)
            hold(
                before.state is not JobState.CANCELLING
                or job.state.is_final
                or job.state is JobState.CANCELLING,
                f"{id} was cancelled and goes on as {job.state.value}",
            )
            if job.state.is_final and before.allocation is not None:
                self._check_attempt_over(before, job)
                self._check_end(before, job)
            if job.stop is not None and before.stop is None:
                self._check_time_limit(before, job)
        self.jobs[id] = job
        if job.allocation is not None:
            self.allocations[id, job.attempt] = job.allocation

    def _check_attempt_over(self, before: Job, after: Job) -> None:
        """Slices are freed only when nothing of the attempt is left, or with a node that is given up."""
        if before.allocation is None:
            return
        lost = _lost_nodes(after, before.attempt)
        if before.state is JobState.CANCELLING:  # its end says that it was cancelled, and not what was lost
            lost |= {node for node in before.allocation.nodes if self._may_be_given_up(node)}
        self.given_up[before.id, before.attempt] = lost
        for node in lost:
            text = f"{node} was given up after {self._silent(node):.1f} s, not {self.settings.lost_seconds}"
            hold(self._may_be_given_up(node), text)
        for placed in before.allocation.tasks:
            machine = self.machines[placed.node]
            if placed.node in lost:
                continue
            key = TaskKey(before.id, before.attempt, placed.task)
            alive = [box for box in machine.running() if box.key == key]
            hold(not alive, f"{key} runs on {placed.node} and its slices were freed")
            # Nothing can be seen of a GPU that has fallen off the bus; nobody gets it before it can be.
            ghosts = [
                pid
                for pid, (ghost, _, _) in machine.ghosts.items()
                if ghost == key and pid not in machine.unseen
            ]
            hold(
                not ghosts or self.settings.engine == "nomad",
                f"{key} is on its GPU and its slices were freed",
            )

    def _may_be_given_up(self, node: str) -> bool:
        """It has been silent for its time, or was until a moment ago: what the leader sent then lands now (seed 200219)."""
        back_at = self.back_at.get(node, -inf)
        return (
            self._silent(node) >= self.settings.lost_seconds - 0.5
            or self.loop.time() - back_at <= BEHIND_SECONDS
        )

    def _silent(self, node: str) -> float:
        return self.loop.time() - self.last_heard.get(node, 0.0)

    def _check_end(self, before: Job, after: Job) -> None:
        """RR-10: a job ends as its containers did."""
        assert before.allocation is not None
        keys = [TaskKey(before.id, before.attempt, placed.task) for placed in before.allocation.tasks]
        if after.state is JobState.SUCCEEDED:
            bad = [str(key) for key in keys if self.exits.get(key) != 0]
            hold(not bad, f"{after.id} SUCCEEDED, and {bad} did not end with 0")
        if after.state is JobState.FAILED and after.reason and after.reason.code is ReasonCode.EXIT_CODE:
            hold(
                any(self.exits.get(key) not in (0, None) for key in keys),
                f"{after.id} FAILED and no task of it did",
            )

    def _check_time_limit(self, before: Job, after: Job) -> None:
        """CT-3: the leader stops a job at its limit of running time and not before, by what the nodes have told it;
        waiting is not running, and neither is what comes after the end."""
        limit = before.spec.max_runtime_seconds
        if after.stop is None or after.stop.code is not ReasonCode.TIME_LIMIT or limit is None:
            return
        if not self.clocks_agree or any(_hides_its_end(happening) for happening in after.history):
            return
        attempts = [(after.id, attempt) for attempt in range(1, after.attempt + 1)]
        ran = sum(self.ran_seconds.get(attempt, 0.0) for attempt in attempts)
        started = [key for key in self.starts if (key.job, key.attempt) == attempts[-1]]
        known = self.loop.time() - BEHIND_SECONDS
        if any(
            self.ended_at.get(key, inf) > known for key in started
        ):  # for all that the leader knows it runs
            ran = sum(self.ran_seconds.get(attempt, 0.0) for attempt in attempts[:-1])
            ran += self.loop.time() - self._started_at[attempts[-1]]
        text = f"{after.id} ran {ran:.1f} s and was ended at its limit of {limit} s"
        hold(ran >= limit - CLOCK_SLACK_SECONDS, text)

    def _task(self, task: Task) -> None:
        self.tell(
            f"{task.attempt_key} on {task.node} {task.state.value} code={task.exit_code}"
            f" {'released ' if task.released else ''}{task.fault} {task.detail}"
        )
        key = TaskKey(task.job, task.attempt, task.task)
        if task.state in (TaskState.RUNNING, TaskState.EXITED):
            self.ran.add(key)
        if task.state is TaskState.EXITED:
            self.ended_at.setdefault(key, self.loop.time())
        if task.state is TaskState.EXITED and task.released:
            alive = [box for box in self.machines[task.node].running() if box.key == key]
            hold(not alive, f"{key} runs on {task.node} and was released")

    def _check_records(self) -> None:
        """After each write about jobs, so nothing is put into words before it is wrong."""
        for id, folders in self._folders.items():
            if len(folders) > 1:
                raise Violation(f"{id} stands in {sorted(folders)}")
        for id in self.acknowledged:
            if not self._folders.get(id):
                raise Violation(f"{id} was acknowledged and is lost")
        live = self.cluster.live_jobs
        for node, id, attempt in self.grants:
            job = live.get(id)
            if job is None or job.attempt != attempt:
                raise Violation(f"grant {id}.{attempt} on {node} without a live job")
        self._check_granted(live.values())

    def _check_granted(self, live: Iterable[Job]) -> None:
        memory: dict[str, int] = defaultdict(int)
        compute: dict[str, int] = defaultdict(int)
        for job in live:
            for placed in job.allocation.tasks if job.allocation else ():
                if (placed.node, job.id, job.attempt) not in self.grants:
                    raise Violation(f"{job.id} holds and has no grant")
                for piece in placed.slices:
                    memory[piece.gpu] += piece.memory_mib
                    compute[piece.gpu] += piece.compute_milli
        for machine in self.machines.values():
            for uuid, gpu in machine.gpus.items():
                if memory[uuid] > gpu.memory_mib:
                    raise Violation(f"memory of {uuid} on {machine.name} is granted twice")
                if compute[uuid] > gpu.compute_milli:
                    raise Violation(f"compute of {uuid} on {machine.name} is granted twice")

    # --- the machines ----------------------------------------------------------------------------------------------

    def box_started(self, machine: Machine, box: Box) -> None:
        if self.failure is not None:
            return
        self.tell(f"{machine.name} starts {box.key} ({box.id})")
        try:
            self.starts[box.key] += 1
            self._started_at.setdefault((box.key.job, box.key.attempt), self.loop.time())
            # A machine that lost its containers before anybody wrote down that one ran cannot know that it did.
            was_forgotten = (
                machine.wipes > self._wipes.get(box.key, machine.wipes) and box.key not in self.ran
            )
            hold(self.starts[box.key] == 1 or was_forgotten, f"{box.key} was started twice")
            self._wipes[box.key] = machine.wipes
            self._check_alone(machine, box)
            self._check_gpus(machine)
        except AssertionError as violation:
            self.fail(violation)

    def box_ended(self, machine: Machine, box: Box) -> None:
        self.tell(f"{machine.name} ends {box.key} ({box.id}) code={box.exit_code}")
        self.exits[box.key] = box.exit_code
        attempt = (box.key.job, box.key.attempt)
        self.ran_seconds[attempt] = self.loop.time() - self._started_at[attempt]
        self.on_end(box)

    def _check_alone(self, machine: Machine, box: Box) -> None:
        """Never two live attempts of one job, but where a node was given up."""
        for other in self.machines.values():
            for running in other.running():
                key = running.key
                if key.job != box.key.job or key.attempt == box.key.attempt:
                    continue
                old, node = (key, other) if key.attempt < box.key.attempt else (box.key, machine)
                given_up = node.name in self.given_up.get((old.job, old.attempt), set())
                hold(given_up, f"attempts {key} on {other.name} and {box.key} on {machine.name} run at once")

    def _check_gpus(self, machine: Machine) -> None:
        memory: dict[str, int] = defaultdict(int)
        compute: dict[str, int] = defaultdict(int)
        owners: dict[str, list[tuple[TaskKey, str]]] = defaultdict(list)
        for box in machine.running():
            for piece in box.slices:
                memory[piece.gpu] += piece.memory_mib
                compute[piece.gpu] += piece.compute_milli
                owners[piece.gpu].append((box.key, piece.isolation))
        for key, uuid, mib in machine.ghosts.values():
            if self.settings.engine == "agent":
                memory[uuid] += mib
                owners[uuid].append((key, "ghost"))
        for uuid, gpu in machine.gpus.items():
            who = ", ".join(str(key) for key, _ in owners[uuid])
            hold(memory[uuid] <= gpu.memory_mib, f"memory of {uuid} on {machine.name} is over-used by {who}")
            hold(
                compute[uuid] <= gpu.compute_milli,
                f"compute of {uuid} on {machine.name} is over-used by {who}",
            )
            exclusive = any(isolation == "exclusive" for _, isolation in owners[uuid])
            hold(not exclusive or len(owners[uuid]) == 1, f"{uuid} is exclusive and used by {who}")

    # --- the end ---------------------------------------------------------------------------------------------------

    def unsettled(self, server: Server) -> list[str]:
        """What is still to be done before the world may stop."""
        left = [f"job {job.id} waits: {_said(job)}" for job in self.cluster.waiting_jobs.values()]
        left += [f"job {job.id} {job.state.value}: {_said(job)}" for job in self.cluster.live_jobs.values()]
        left += [item.key for item in (*server.items(GRANTS), *server.items(TASKS))]
        left += [f"{box.key} runs on {m.name}" for m in self.machines.values() for box in m.running()]
        return left

    def settled(self) -> None:
        """At the end of a seed, when nothing is left to be done."""
        check_snapshot(self.cluster.snapshot(self.loop.wall_ms()))
        for id, what in self.acknowledged.items():
            job = self.jobs[id]
            if what == "cancel":
                ended = (JobState.CANCELLED, JobState.SUCCEEDED)
                hold(job.state in ended, f"{id} was cancelled and ended {job.state.value}")
        for job in self.jobs.values():
            self._check_attempts(job)

    def _check_attempts(self, job: Job) -> None:
        """No more attempts ran than the user allowed, beside those that Serai or the cluster spoilt."""
        started = {key.attempt for key in self.starts if key.job == job.id}
        free = {
            happening.attempt
            for happening in job.history
            if happening.state is JobState.PENDING
            and happening.reason is not None
            and happening.reason.code in INFRASTRUCTURE
        }
        ran = len(started - free)
        hold(ran <= 1 + job.spec.retries, f"{job.id} ran {ran} times and may {1 + job.spec.retries} times")


def _hides_its_end(happening: Happening) -> bool:
    """How long an attempt ran nobody knows when its node was given up, or had lost the container when it was back."""
    reason = happening.reason
    return happening.state is JobState.LOST or (
        reason is not None and reason.code is ReasonCode.TASK_VANISHED
    )


def _lost_nodes(job: Job, attempt: int) -> set[str]:
    return {
        node
        for happening in job.history
        if happening.attempt == attempt and happening.state is JobState.LOST and happening.reason is not None
        for node in happening.reason.subjects
    }


def _said(job: Job) -> str:
    stop = f" stop={job.stop.code.value}" if job.stop else ""
    return (job.reason.code.value if job.reason else "") + stop
