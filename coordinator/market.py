"""Keeps the prices of placement true while a term lasts: made beside the cycles, in steps between which they go on,
and swapped in between two of them. New prices change every answer of the memo, so they come rarely.

What tenants submit is learned from the records of their jobs, so a new leader knows what the last one did, less the
jobs that have ended since.
"""

from __future__ import annotations

import asyncio

from coordinator.index import Index
from coordinator.prices import Pricing
from coordinator.replica import Replica

PRICES_EVERY_SECONDS = 10.0
PRICES_EVERY_JOBS = 250


async def keep_prices(replica: Replica, memo: Index) -> None:
    """Until it is cancelled. A replica that lists anew has a new cluster, which gets the prices that are known."""
    pricing = Pricing(PRICES_EVERY_JOBS)
    while True:
        cluster = replica.cluster
        jobs = sum(cluster.mix.values())
        if memo.is_ready and pricing.is_due(jobs):
            for _ in pricing.refreshing(dict(cluster.mix), jobs, memo.market, memo.card_mib):
                await asyncio.sleep(0)
        replica.cluster.worth = pricing.worth
        await asyncio.sleep(PRICES_EVERY_SECONDS)
