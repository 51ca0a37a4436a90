"""How etcd's file grows over a day of 1,000 nodes and 50,000 jobs, while the leader compacts and prunes as it always does.

    make bench-day                          a day in some minutes
    make bench-day HOURS=2 JOBS_A_DAY=5000  a look

The clock is made faster, and nothing else: on a real etcd on disk the coordinator's own replica, cycles and sweep work
with the settings that Serai has by default. Users submit (with an idempotency key), nodes report and their tasks start,
run and end, each in a transaction of its own as agents write them. The store begins with as many ended jobs as are kept,
so that from the first hour one goes for each that comes. Two things differ from a real day. Each node writes one in ten of
its reports: that does not make the file smaller, since history is kept for a number of revisions, and a revision that is
no report is larger than one. And etcd is asked to compact every half hour: it walks through all keys for it, some
seconds, which it can do every minute of a real day but not of this one; so more history stands here than there.
Writes build/bench/day.json, a row an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from random import Random
from typing import Any, TypeVar

from attrs import field, frozen, mutable
from msgspec.structs import replace

from coordinator.cluster import Cluster
from coordinator.commit import Committer
from coordinator.config import Settings
from coordinator.cycle_metrics import CycleMetrics
from coordinator.engines.agent import AgentEngine
from coordinator.etcd_store import EtcdSettings, EtcdStatus, EtcdStore
from coordinator.fairness import policy_from
from coordinator.index import Index
from coordinator.leader import campaign
from coordinator.model import (
    Allocation,
    Event,
    GrantSeen,
    Happening,
    Job,
    JobState,
    PastAttempt,
    Task,
    TaskPlacement,
    TaskState,
    Tenant,
)
from coordinator.records import (
    DONE,
    Endpoint,
    Idempotency,
    done_key,
    encode,
    grant_key,
    idempotency_key,
    inventory_key,
    new_job_id,
    queue_key,
    report_key,
    task_key,
    tenant_key,
)
from coordinator.replica import Replica
from coordinator.scheduler import Scheduler
from coordinator.store import Change, Compare, Put, StoreUnavailable, created_at
from coordinator.sweep import Sweep
from jobspecs.reading import read_spec
from tests.benchmarks import record
from tests.benchmarks.agents import Fleet, Rpc
from tests.benchmarks.load import spec
from tests.benchmarks.world import CLUSTER_MEMORY_MIB, TENANTS, world, write_all
from tests.etcd_server import find_etcd
from vgpu.inventory import GpuReport, NodeInventory, NodeReport
from vgpu.slices import Slice

T = TypeVar("T")
MIB = 1 << 20
DAY_SECONDS = 24 * 3600
STEP_SECONDS = 60
STEPS_AN_HOUR = 3600 // STEP_SECONDS
MEAN_RUN_SECONDS = 3600
BEGIN_MS = 1_764_547_200_000
TRANSACTIONS_IN_FLIGHT = 32
LEASE_SECONDS = 24 * 3600
# A day is over when the file has stopped growing: the last quarter may add this much to the most before it.
MOST_GROWTH = 1.1
# The event loop is busy for longer than a leader's should be.
SETTINGS = Settings(lease_seconds=120, keep_alive_seconds=10, compact_every_seconds=1800)


@frozen(order=True)
class Moment:
    """What a node does at a time: a task comes into a state."""

    at_ms: int
    task: Task = field(order=False)
    created: int = field(order=False)


@mutable
class Day:
    """One simulated day. `now_ms` is the clock of everything in it."""

    store: EtcdStore
    inventories: list[NodeInventory]
    lease: int
    jobs: int
    reports_of: int
    now_ms: int = BEGIN_MS
    submitted: int = 0
    refused: int = 0
    reports: int = 0
    random: Random = field(factory=lambda: Random(1))
    moments: list[Moment] = field(factory=list)
    gate: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(TRANSACTIONS_IN_FLIGHT))

    def clock_ms(self) -> int:
        return self.now_ms

    def granted(self, change: Change, event: Event | None) -> None:
        """The node's part: it starts what it is granted, which runs, and ends."""
        item = change.item
        if not isinstance(event, GrantSeen) or item.create_revision != item.mod_revision:
            return
        task = Task(event.job, event.attempt, 0, event.node, TaskState.STARTING, container="c" * 64)
        at_ms = self.now_ms + 1_000
        self._will_be(at_ms, task, item)
        at_ms += 2_000
        task = replace(task, state=TaskState.RUNNING, started_at_ms=at_ms)
        self._will_be(at_ms, task, item)
        at_ms += int(1000 * self.random.expovariate(1 / MEAN_RUN_SECONDS))
        ended = replace(task, state=TaskState.EXITED, ended_at_ms=at_ms, exit_code=0, released=True)
        self._will_be(at_ms, ended, item)

    def _will_be(self, at_ms: int, task: Task, grant: Any) -> None:
        heapq.heappush(self.moments, Moment(at_ms, task, grant.create_revision))

    async def nodes_act(self) -> None:
        """Every task record that is due by now, then some of the nodes' reports, each in its own transaction."""
        while self.moments and self.moments[0].at_ms <= self.now_ms:
            due: dict[str, Moment] = {}
            while (
                self.moments and self.moments[0].at_ms <= self.now_ms and self.moments[0].task.job not in due
            ):
                moment = heapq.heappop(self.moments)
                due[moment.task.job] = moment
            await asyncio.gather(*map(self._tell, due.values()))
        count = len(self.inventories) * STEP_SECONDS // SETTINGS.report_seconds // self.reports_of
        await asyncio.gather(*(self._report(self.reports + n) for n in range(count)))
        self.reports += count

    async def _tell(self, moment: Moment) -> None:
        task = moment.task
        key = task_key(task.node, task.job, task.attempt, task.task)
        grant = grant_key(task.node, task.job, task.attempt)
        self.refused += not await self._write([created_at(grant, moment.created)], Put(key, encode(task)))

    async def _report(self, number: int) -> None:
        inventory = self.inventories[number % len(self.inventories)]
        gpus = tuple(
            GpuReport(gpu.uuid, number % gpu.memory_mib, number % 101, 30 + number % 50, 300_000 + number, ())
            for gpu in inventory.gpus
        )
        report = NodeReport(inventory.node, number, self.now_ms, gpus, {}, number % 192_000, number % 999_999)
        await self._write([], Put(report_key(inventory.node), encode(report), self.lease))

    async def users_submit(self) -> None:
        due = self.jobs * (self.now_ms - BEGIN_MS) // (1000 * DAY_SECONDS)
        await asyncio.gather(*(self._submit(number) for number in range(self.submitted, due)))
        self.submitted = due

    async def _submit(self, number: int) -> None:
        job = waiting_job(number, self.now_ms, self.random)
        seen = Idempotency("0" * 64, (job.id,), self.now_ms)
        known = Put(idempotency_key(job.tenant, f"{number}"), encode(seen))
        await self._write([], known, Put(queue_key(job.tenant, job.id), encode(job)))

    async def _write(self, compares: Sequence[Compare], *puts: Put) -> bool:
        async with self.gate:
            return (await _again(lambda: self.store.txn(compares, puts))).succeeded


async def _again(work: Callable[[], Awaitable[T]]) -> T:
    """Until etcd takes it: its disk may be slow, and all that is done here may be done twice."""
    while True:
        try:
            return await work()
        except StoreUnavailable:
            await asyncio.sleep(1)


def waiting_job(number: int, now_ms: int, random: Random) -> Job:
    tenant = TENANTS[number % len(TENANTS)]
    history = (Happening(JobState.PENDING, now_ms, 1),)
    wanted = read_spec(spec(number, tenant), tenant=None)
    return Job(
        new_job_id(now_ms, random),
        wanted,
        JobState.PENDING,
        now_ms,
        now_ms,
        history=history,
        idempotency="0" * 64,
    )


def ended_job(number: int, ended_ms: int, random: Random, inventory: NodeInventory) -> Job:
    """As an earlier day has left it."""
    job = waiting_job(number, ended_ms - 2_000 * MEAN_RUN_SECONDS, random)
    piece = Slice(inventory.gpus[number % len(inventory.gpus)].uuid, 40 * 1024, 500, "timeslice")
    placement = TaskPlacement(0, inventory.node, (piece,), 4_000, 16 * 1024)
    began_ms = ended_ms - 1_000 * MEAN_RUN_SECONDS
    task = Task(
        job.id,
        1,
        0,
        inventory.node,
        TaskState.EXITED,
        began_ms,
        ended_ms,
        0,
        released=True,
        container="c" * 64,
    )
    states = (JobState.PENDING, JobState.ALLOCATED, JobState.STARTING, JobState.RUNNING, JobState.SUCCEEDED)
    return replace(
        job,
        state=JobState.SUCCEEDED,
        exit_code=0,
        started_at_ms=began_ms,
        ended_at_ms=ended_ms,
        history=tuple(Happening(state, began_ms, 1) for state in states),
        past=(PastAttempt(Allocation(1, (placement,), began_ms), (task,)),),
    )


async def fill(store: EtcdStore, host: str, nodes: int, random: Random) -> tuple[list[NodeInventory], int]:
    """What stands at midnight: tenants, nodes, and the ended jobs that are kept."""
    fleet = Fleet(Rpc(host), nodes, 0)
    inventories = [node.inventory() for node in fleet.nodes]
    await fleet.rpc.close()
    lease = await store.grant_lease(LEASE_SECONDS)
    quota = CLUSTER_MEMORY_MIB // len(TENANTS)
    await write_all(store, (Put(tenant_key(name), encode(Tenant(name, quota))) for name in TENANTS))
    await write_all(store, (Put(inventory_key(one.node), encode(one)) for one in inventories))
    reports = (NodeReport(one.node, 0, BEGIN_MS, ()) for one in inventories)
    await write_all(store, (Put(report_key(report.node), encode(report), lease) for report in reports))
    kept = SETTINGS.done_retention_jobs
    ended_ms = (BEGIN_MS - 2_000 * DAY_SECONDS * (kept - n) // kept for n in range(kept))
    jobs = (ended_job(n, at, random, inventories[n % nodes]) for n, at in enumerate(ended_ms))
    await write_all(store, (Put(done_key(job.id), encode(job)) for job in jobs))
    return inventories, lease


class _Patient(EtcdStore):
    """Its writers are as many as a cluster has, on one machine with etcd: a slow disk is no fault here."""

    def __init__(self, url: str) -> None:
        super().__init__(EtcdSettings.from_url(url, timeout_seconds=60))

    async def aclose(self) -> None:
        await self.close()


async def run(nodes: int, jobs: int, hours: int, reports_of: int) -> list[dict[str, record.Value]]:
    async with world(nodes) as here, aclosing(_Patient(here.members[0].url)) as store:
        inventories, lease = await fill(store, here.members[0].host, nodes, Random(0))
        day = Day(store, inventories, lease, jobs, reports_of)
        replica = Replica(store, lambda: Cluster(SETTINGS), day.clock_ms, unread=(DONE,))
        following = asyncio.create_task(replica.run())
        try:
            await replica.ready()
            return await _lead(day, replica, hours)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _lead(day: Day, replica: Replica, hours: int) -> list[dict[str, record.Value]]:
    async def no_endpoint(node: str) -> Endpoint | None:
        return None

    term = await campaign(day.store, SETTINGS, "bench", day.clock_ms)
    token = term.token
    committer = Committer(day.store, SETTINGS, token.leadership, token.lease, token.create_revision)
    engine = AgentEngine(no_endpoint)
    policy, metrics = policy_from(SETTINGS), CycleMetrics()
    scheduler = Scheduler(replica, engine, committer, SETTINGS, policy, day.clock_ms, metrics, Index())
    sweep = Sweep(day.store, replica, engine, committer, SETTINGS, day.clock_ms)
    await replica.wait_for(token.create_revision)
    replica.listen(day.granted, lambda revision: None)

    async def turn() -> bool:
        scheduler.look_again()  # one before it may have failed
        return await scheduler.turn()

    rows: list[dict[str, record.Value]] = []
    most_bytes, began = 0, time.monotonic()
    with sweep.counting_done():
        for step in range(1, hours * STEPS_AN_HOUR + 1):
            day.now_ms += 1000 * STEP_SECONDS
            await day.users_submit()
            await day.nodes_act()
            while await _again(turn):
                pass
            for period_seconds, chore in sweep.chores:
                if step * STEP_SECONDS % max(period_seconds, STEP_SECONDS) == 0:
                    await _again(chore)
            status = await _again(day.store.status)
            most_bytes = max(most_bytes, status.file_bytes)
            if step % STEPS_AN_HOUR == 0:
                seconds = time.monotonic() - began
                rows.append(
                    {"hour": step // STEPS_AN_HOUR, **_row(day, replica, status, most_bytes, seconds)}
                )
                print(rows[-1], flush=True)
                most_bytes = 0
    await term.resign()
    return rows


def _row(
    day: Day, replica: Replica, status: EtcdStatus, most_bytes: int, seconds: float
) -> dict[str, record.Value]:
    return {
        "file_mib": round(most_bytes / MIB, 1),
        "used_mib": round(status.used_bytes / MIB, 1),
        "revision": status.revision,
        "jobs_submitted": day.submitted,
        "jobs_live": len(replica.cluster.live_jobs),
        "jobs_waiting": len(replica.cluster.waiting_jobs),
        "done": sum(key.startswith(DONE) for key in replica.key_values),
        "keys": len(replica.key_values),
        "reports": day.reports,
        "refused": day.refused,
        "listings": replica.numbers.listings,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=os.environ.get("NODES", "1000"))
    parser.add_argument("--jobs", type=int, default=os.environ.get("JOBS_A_DAY", "50000"), help="a day")
    parser.add_argument("--hours", type=int, default=os.environ.get("HOURS", "24"))
    parser.add_argument(
        "--reports-of", type=int, default=os.environ.get("REPORTS_OF", "10"), help="one in so many is written"
    )
    options = parser.parse_args()
    rows = asyncio.run(run(options.nodes, options.jobs, options.hours, options.reports_of))
    about = record.machine("grpcio") | {"etcd": record.program_version(find_etcd() or "etcd")}
    about |= {"nodes": options.nodes, "reports_written": f"1 in {options.reports_of}"}
    path = record.write("day", rows, about)
    print(f"{record.table(rows, list(rows[0]))}\nwritten to {path}")
    sizes = [float(row["file_mib"] or 0) for row in rows]
    last = max(1, len(sizes) // 4)
    if rows[-1]["refused"] or (len(sizes) > last and max(sizes[-last:]) > MOST_GROWTH * max(sizes[:-last])):
        sys.exit("the file still grows, or a node was refused")


if __name__ == "__main__":
    main()
