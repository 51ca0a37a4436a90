"""Coordinators and agents that die under load, on a real etcd, with real processes as jobs.

    make kill-rounds             100 rounds
    make kill-rounds ROUNDS=10   a look, in a minute or two

Each round submits jobs, waits until some of them run, and strikes: SIGKILL of the leader and SIGSTOP of it for longer
than its lease, then SIGCONT, by turns; every fifth round kills an agent as well and starts it again. A job writes its
id into a file when it begins. At the end each acknowledged job must have ended well (else it is lost) and must stand
in the file once (else it is doubled). Failover is the time from the strike to the first transaction about a job that
the next leader has durable; a handover that from SIGTERM until another leads. Writes build/bench/failover.json.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from attrs import define, field

from coordinator.client import Client
from coordinator.dev.parts import start
from coordinator.records import DONE, JOBS, LEADER, QUEUE, ROOT, Leadership, decode
from coordinator.store import Change
from tests.benchmarks import record
from tests.benchmarks.takeover import _fill
from tests.benchmarks.world import world
from tests.etcd_server import find_etcd
from tests.integration.live import LiveCluster, live_cluster, spec

LEASE_SECONDS = 3
NODE_LOST_SECONDS = (
    300  # an agent that is slow to start again is no lost node, whose jobs would rightly have failed
)
JOBS_A_ROUND = 20
ALLOWED_BEYOND_LEASE_SECONDS = 2.0
DRAIN_SECONDS = 900  # a machine that others use too has hundreds of jobs left over
DECISION_SECONDS = 120
HANDOVERS = 2
LEADERS = ("s1", "s2")
NODES = ("n1", "n2")
GPUS = "simulated:8x80GiB:A100"
RESTART_NODES, RESTART_WAITING, RESTART_RUNNING = 1000, 10_000, 2_000


@define
class Tally:
    """What was acknowledged, and how long each strike left the cluster without decisions."""

    jobs: list[str] = field(factory=list)
    seconds: list[float] = field(factory=list)


async def rounds(folder: Path, count: int, *, jobs_a_round: int = JOBS_A_ROUND) -> dict[str, record.Value]:
    """Plays `count` rounds; the row of figures. `folder` is empty."""
    ran, tally = folder / "ran", Tally()
    async with live_cluster(folder, lease_seconds=LEASE_SECONDS, lost_seconds=NODE_LOST_SECONDS) as live:
        await live.start_coordinator("api", "api")
        admin = await live.bootstrap()
        for name in LEADERS:
            await live.start_coordinator(name, "scheduler")
        for node in NODES:
            await live.start_agent(node, GPUS)
        await admin.create_tenant("a", quota_memory="1280GiB")
        for number in range(count):
            await _round(live, admin, number, ran, jobs_a_round, tally)
        ended = await _drained(live, admin, tally.jobs)
        handovers = [await _handover(live) for _ in range(HANDOVERS)]
    runs = Counter(ran.read_text().split())
    lost = [job for job in tally.jobs if ended.get(job) != "SUCCEEDED" or not runs[job]]
    doubled = [job for job, times in runs.items() if times > 1]
    return {
        "rounds": count,
        "jobs": len(tally.jobs),
        "lost": len(lost),
        "doubled": len(doubled),
        "failover_p50_seconds": round(_quantile(tally.seconds, 0.5), 3),
        "failover_p99_seconds": round(_quantile(tally.seconds, 0.99), 3),
        "lease_seconds": LEASE_SECONDS,
        "handover_max_seconds": round(max(handovers), 3),
    }


async def _round(live: LiveCluster, admin: Client, number: int, ran: Path, jobs: int, tally: Tally) -> None:
    command = ["sh", "-c", f'echo "$SERAI_JOB_ID" >> {ran}; sleep 0.3']
    before = len(_lines(ran))
    wanted = [spec(f"r{number}-{n}", *command, tenant="a", gpus=1) for n in range(jobs)]
    tally.jobs += [job["id"] for job in await admin.submit(wanted)]
    await live.until(lambda: len(_lines(ran)) > before + 1, seconds=DRAIN_SECONDS)
    leader = await _leader(live)
    agent = NODES[number // 5 % len(NODES)] if number % 5 == 4 else ""
    if agent:
        os.kill(live.parts[agent].process.pid, signal.SIGKILL)
    blow = signal.SIGSTOP if number % 2 else signal.SIGKILL
    revision = (await live.store.list(LEADER)).revision
    live.kill(leader, blow)
    struck = time.monotonic()
    more = [spec(f"r{number}-late-{n}", *command, tenant="a", gpus=1) for n in range(4)]
    tally.jobs += [job["id"] for job in await admin.submit(more)]  # taken in while nobody leads
    try:
        async with asyncio.timeout(DECISION_SECONDS):
            await _decision_of_another(live, leader, revision)
    except TimeoutError:
        nodes = await admin.nodes()
        raise AssertionError(
            f"no decision {DECISION_SECONDS} s after {leader}\n{nodes}\n{live.logs()}"
        ) from None
    tally.seconds.append(time.monotonic() - struck)
    if blow is signal.SIGSTOP:
        live.kill(leader, signal.SIGCONT)
    else:
        await live.parts[leader].process.wait()
        await live.start_coordinator(leader, "scheduler")
    if agent:
        await live.parts[agent].process.wait()
        await live.start_agent(agent, GPUS)
    print(f"round {number + 1}: {blow.name} {leader} {agent}: {tally.seconds[-1]:.2f} s", flush=True)


async def _leader(live: LiveCluster) -> str:
    """Waits until somebody leads."""
    found = ""

    async def leads() -> bool:
        nonlocal found
        item = await live.store.get(LEADER)
        found = decode(Leadership, item.value).id.partition(".")[0] if item else ""
        return bool(found)

    await live.until(leads)
    return found


async def _decision_of_another(live: LiveCluster, old: str, revision: int) -> None:
    """Until a job's record was written after another than `old` had become leader: a start, an end, or why it waits.
    A submit is no decision; it makes a record."""
    is_new = False
    async with aclosing(live.store.watch(ROOT, revision)) as batches:
        async for batch in batches:
            for change in batch.changes:
                key = change.item.key
                if key == LEADER and not change.deleted:
                    is_new |= decode(Leadership, change.item.value).id.partition(".")[0] != old
                elif is_new and (key.startswith((JOBS, DONE)) or _is_told_why(change)):
                    return


def _is_told_why(change: Change) -> bool:
    item = change.item
    return item.key.startswith(QUEUE) and not change.deleted and item.create_revision != item.mod_revision


async def _handover(live: LiveCluster) -> float:
    """From SIGTERM to the leader until another one leads. Then the first one stands by again."""
    leader = await _leader(live)
    live.kill(leader, signal.SIGTERM)
    began = time.monotonic()
    await live.until(lambda: _leads_another(live, leader))
    took = time.monotonic() - began
    await live.parts[leader].process.wait()
    await live.start_coordinator(leader, "scheduler")
    return took


async def _leads_another(live: LiveCluster, old: str) -> bool:
    return await _leader(live) != old


async def _drained(live: LiveCluster, admin: Client, jobs: Sequence[str]) -> dict[str, str]:
    """The state of each job, once none is live or waiting any more."""

    async def is_empty() -> bool:
        return not any([(await live.store.list(folder, limit=1)).items for folder in (QUEUE, JOBS)])

    await live.until(is_empty, seconds=DRAIN_SECONDS)
    return {id: (await admin.job(id))["state"] for id in jobs}


def _lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of all does not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


async def restart_seconds(nodes: int, waiting: int, running: int) -> float:
    """From the start of a coordinator's process to its first placement, on a store that holds all these."""
    async with world(nodes) as here:
        await _fill(here.store, here.members[0].host, nodes, waiting, running)
        revision = (await here.store.list(LEADER)).revision
        folder = Path(tempfile.mkdtemp(prefix="restart-"))
        command = [sys.executable, "-m", "coordinator", "--role", "scheduler", "--etcd", here.members[0].url]
        began = time.monotonic()
        part = await start("c1", command, folder)
        try:
            async with asyncio.timeout(60), aclosing(here.store.watch(JOBS, revision)) as batches:
                async for batch in batches:
                    if batch.changes:
                        break
            took = time.monotonic() - began
        finally:
            await part.stop()
    return took


def _tell(row: dict[str, record.Value], restarts: int) -> None:
    about = record.machine("grpcio") | {
        "etcd": record.program_version(find_etcd() or "etcd"),
        "restarts_best_of": restarts,
        "load_1m": os.getloadavg()[0],
    }
    path = record.write("failover", [row], about)
    print(f"{record.table([row], tuple(row))}\nwritten to {path}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=os.environ.get("ROUNDS", "100"))
    parser.add_argument(
        "--restarts", type=int, default=3, help="the best of so many is told; 0 leaves it out"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serai-kill-") as folder:
        row = asyncio.run(rounds(Path(folder), options.rounds))
    _tell(row, options.restarts)
    restarts = [
        asyncio.run(restart_seconds(RESTART_NODES, RESTART_WAITING, RESTART_RUNNING))
        for _ in range(options.restarts)
    ]
    if restarts:
        _tell(row | {"restart_10000_seconds": round(min(restarts), 2)}, options.restarts)
    late = float(row["failover_p99_seconds"] or 0) > LEASE_SECONDS + ALLOWED_BEYOND_LEASE_SECONDS
    if row["lost"] or row["doubled"] or late:
        sys.exit(1)


if __name__ == "__main__":
    main()
