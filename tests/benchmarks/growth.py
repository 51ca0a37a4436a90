"""How etcd's file grows under a steady load of jobs that come, run and end, while the leader compacts and prunes.

Bounded means: what stands in the file at half time is about what stands in it at the end, though twice as many jobs
have gone through; and nobody who watches was cut off by a compaction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tests.benchmarks.load import bodies
from tests.benchmarks.record import Row
from tests.benchmarks.world import TENANTS, World, world

RATE = 400  # jobs a second, in batches
BATCH = 100
SECONDS = 60
MIB = 1 << 20
# Everything that bounds growth, scaled down to the minute that this takes.
SETTINGS = {
    "compact_every_seconds": 2,
    "compact_keep_seconds": 4,
    "compact_keep_revisions": 5_000,
    "done_retention_jobs": 2_000,
}


async def run(nodes: int, agents: Sequence[str], seconds: int) -> Row:
    jobs = RATE * seconds
    async with world(nodes) as here:
        await here.begin(jobs, "end", agents, SETTINGS)
        load = here.load(8)
        began = time.monotonic()
        sending = asyncio.create_task(load.steadily(bodies(jobs, BATCH, TENANTS), RATE / BATCH))
        await asyncio.sleep(seconds / 2)
        half = await here.store.status()
        await sending
        seen = await here.agents_done(120)
        took = time.monotonic() - began
        status, listings = await here.store.status(), await _listings(here)
        done = await here.keys("done/")
    if load.result.refused or len(seen["ended"]) < jobs:
        raise AssertionError(
            f"{load.result.refused} submits refused, {len(seen['ended'])} of {jobs} jobs ended"
        )
    return {
        "load": "batches, to the end",
        "jobs": jobs,
        "nodes": nodes,
        "jobs_per_second": round(jobs / took, 1),
        "half_file_mib": round(half.file_bytes / MIB, 1),
        "end_file_mib": round(status.file_bytes / MIB, 1),
        "end_used_mib": round(status.used_bytes / MIB, 1),
        "revisions": status.revision,
        "done_left": done,
        "watches_lost": seen["lost_watches"] + listings - 2,
    }


async def _listings(here: World) -> int:
    """How often leader and API have read everything; once each is what the start takes."""
    return int(sum([(await here.metrics(name))["serai_replica_listings"] for name in ("leader", "api")]))


def best(rounds: Sequence[Row]) -> Row:
    return min(rounds, key=lambda row: float(row["end_file_mib"] or 0))
