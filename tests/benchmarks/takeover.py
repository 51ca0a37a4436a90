"""How long a new leader takes from winning the campaign to its first durable commit.

    cold   it has read nothing when it begins: listing, folding, campaign, plan, commit are all in the time
    warm   a standby that has followed the store all along; the time starts when the campaign is won

Each is a process of its own with the coordinator's own parts, on a store that holds the given jobs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from coordinator.cluster import Cluster
from coordinator.config import Settings
from coordinator.engines.agent import AgentEngine
from coordinator.etcd_store import EtcdSettings, EtcdStore
from coordinator.index import Index
from coordinator.leader import campaign
from coordinator.model import Allocation, Happening, Job, JobState, Task, TaskPlacement, TaskState
from coordinator.records import (
    DONE,
    JOBS,
    LEADER,
    Endpoint,
    encode,
    grant_key,
    inventory_key,
    job_key,
    queue_key,
    report_key,
    task_key,
)
from coordinator.rehearsal import load_compiled, rehearse
from coordinator.replica import Replica
from coordinator.roles import clock_ms, hold_the_collector, spare_the_collector
from coordinator.scheduler import serve_term
from coordinator.store import Compare, Put, TxnResult, Write
from jobspecs.reading import read_spec
from jobspecs.render import grants_for
from tests.benchmarks.agents import Fleet, Rpc
from tests.benchmarks.load import spec
from tests.benchmarks.record import Row
from tests.benchmarks.world import TENANTS, world, write_all
from vgpu.inventory import NodeReport
from vgpu.slices import Slice

LEASE_SECONDS = 600


class FirstCommit(EtcdStore):
    """Notes when the first transaction that placed a job was answered."""

    def __init__(self, settings: EtcdSettings) -> None:
        super().__init__(settings)
        self.at: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        result = await super().txn(compares, writes)
        placed = any(isinstance(write, Put) and write.key.startswith(JOBS) for write in writes)
        if result.succeeded and placed and not self.at.done():
            self.at.set_result(time.monotonic())
        return result


async def lead(url: str, warm: bool) -> dict[str, float]:
    """Milliseconds to the first commit of a new leader, and where they went."""
    load_compiled()
    hold_the_collector()
    store = FirstCommit(EtcdSettings.from_url(url))
    settings = Settings()
    await store.get(LEADER)  # the connection itself is not what is measured

    async def no_endpoint(node: str) -> Endpoint | None:
        return None

    began = time.monotonic()
    replica = Replica(store, lambda: Cluster(settings), clock_ms, unread=(DONE,))
    following = asyncio.create_task(replica.run())
    await replica.ready()
    listed_at = time.monotonic()
    memo = Index()
    if warm:
        standby = asyncio.create_task(rehearse(replica, settings, clock_ms, memo))
        await asyncio.sleep(1)
        standby.cancel()
    spare_the_collector()
    term = await campaign(store, settings, "bench", clock_ms)
    won_at = time.monotonic()
    leading = asyncio.create_task(
        serve_term(term, store, replica, AgentEngine(no_endpoint), settings, clock_ms, memo=memo)
    )
    await asyncio.wait({store.at, leading}, return_when=asyncio.FIRST_COMPLETED)
    committed_at = store.at.result()
    for task in (leading, following):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await term.resign()
    await store.close()
    return {
        "ms": 1000 * (committed_at - (won_at if warm else began)),
        "listing_ms": 1000 * (listed_at - began),
        "campaign_ms": 1000 * (won_at - listed_at),
        "first_commit_ms": 1000 * (committed_at - won_at),
    }


async def run(nodes: int, waiting: int, running: int) -> dict[str, int | float | str]:
    """A row: each of the two on a store of its own."""
    took = {}
    for kind in ("cold", "warm"):
        async with world(nodes) as here:
            await _fill(here.store, here.members[0].host, nodes, waiting, running)
            command = [sys.executable, "-m", "tests.benchmarks.takeover", "--etcd", here.members[0].url]
            answer = await asyncio.to_thread(
                subprocess.run, [*command, f"--{kind}"], check=True, stdout=subprocess.PIPE, text=True
            )
            took[kind] = json.loads(answer.stdout.splitlines()[-1])
    return {
        "waiting": waiting,
        "running": running,
        "nodes": nodes,
        "cold_ms": round(took["cold"]["ms"], 1),
        "warm_ms": round(took["warm"]["ms"], 1),
        "cold_listing_ms": round(took["cold"]["listing_ms"], 1),
        "cold_first_commit_ms": round(took["cold"]["first_commit_ms"], 1),
    }


def best(rounds: Sequence[Row]) -> Row:
    """The best of each of the two, which have nothing to do with each other."""
    return {
        **rounds[0],
        **{name: min(float(row[name] or 0) for row in rounds) for name in ("cold_ms", "warm_ms")},
    }


async def _fill(store: EtcdStore, host: str, nodes: int, waiting: int, running: int) -> None:
    fleet = Fleet(Rpc(host), nodes, 0)
    inventories = [node.inventory() for node in fleet.nodes]
    lease = await store.grant_lease(LEASE_SECONDS)
    now_ms = clock_ms()
    puts: list[Put] = []
    for inventory in inventories:
        report = NodeReport(inventory.node, 1, now_ms, ())
        puts.append(Put(inventory_key(inventory.node), encode(inventory)))
        puts.append(Put(report_key(inventory.node), encode(report), lease))
    for number in range(running + waiting):
        tenant = TENANTS[number % len(TENANTS)]
        wanted = read_spec(spec(number, tenant), tenant=None)
        history = (Happening(JobState.PENDING, now_ms, 1),)
        job = Job(f"0bench{number:010d}", wanted, JobState.PENDING, now_ms, now_ms, history=history)
        if number >= running:
            puts.append(Put(queue_key(tenant, job.id), encode(job)))
            continue
        inventory = inventories[number % nodes]
        piece = Slice(inventory.gpus[number // nodes % 8].uuid, 40 * 1024, 500, "timeslice")
        placement = TaskPlacement(0, inventory.node, (piece,), 4_000, 16 * 1024)
        allocation = Allocation(1, (placement,), now_ms)
        live = Job(job.id, wanted, JobState.ALLOCATED, now_ms, now_ms, allocation=allocation, history=history)
        grants = grants_for(
            job.id, wanted, allocation, {inventory.node: inventory}, engine="agent", cluster="serai"
        )
        task = Task(job.id, 1, 0, inventory.node, TaskState.RUNNING, started_at_ms=now_ms)
        puts.append(Put(job_key(job.id), encode(live)))
        puts += [Put(grant_key(grant.node, job.id, 1), encode(grant)) for grant in grants]
        puts.append(Put(task_key(inventory.node, job.id, 1, 0), encode(task)))
    await write_all(store, puts)
    await fleet.rpc.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--etcd", required=True)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--cold", action="store_true")
    kind.add_argument("--warm", action="store_true")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(lead(options.etcd, options.warm))))


if __name__ == "__main__":
    main()
