"""Keeps the prices of placement true while a process leads or stands by: made beside the cycles, in steps between
which they go on, and swapped in between two of them. New prices change every answer of the memo, so they come rarely.

They are made of what tenants submit (`coordinator.mix`), which a new leader knows from the record of the last one.
"""

from __future__ import annotations

import asyncio
import logging

from coordinator.index import Index
from coordinator.prices import Pricing
from coordinator.replica import Replica

log = logging.getLogger("serai.market")

FIRST_PRICES_SECONDS = 1.0
PRICES_EVERY_SECONDS = 10.0
PRICES_EVERY_JOBS = 250


async def keep_prices(replica: Replica, memo: Index) -> None:
    """Until it is cancelled. A replica that lists anew has a new cluster, which gets the prices that are known. Without
    prices jobs are placed too, only less well, so a fault here ends nothing."""
    pricing = Pricing(PRICES_EVERY_JOBS)
    while True:
        mix = replica.cluster.mix
        if memo.is_ready and pricing.is_due(mix.seen):
            try:
                for _ in pricing.refreshing(dict(mix.counts), mix.seen, memo.market, memo.card_mib):
                    await asyncio.sleep(0)
            except Exception:
                log.exception("prices could not be made, the old ones stay")
        if pricing.worth is not None:
            replica.cluster.worth = pricing.worth
        await asyncio.sleep(FIRST_PRICES_SECONDS if pricing.worth is None else PRICES_EVERY_SECONDS)
