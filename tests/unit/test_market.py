"""Prices of placement while a term lasts."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.cluster import Cluster
from coordinator.index import Index
from coordinator.market import PRICES_EVERY_SECONDS, keep_prices
from tests.builders import World, job, node


class Shown:
    """The part of a replica that is looked at."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster


@pytest.mark.looptime
async def test_prices_come_with_what_was_learned_and_outlive_a_new_listing(looptime):
    w = World(node("n1"), node("n2"))
    memo = Index()
    replica = Shown(w.cluster)
    keeping = asyncio.create_task(keep_prices(replica, memo))  # type: ignore[arg-type]
    await asyncio.sleep(1)
    assert w.cluster.worth is None
    w.submit(*(job(f"j{n:03}", memory=38 * 1024, compute=470) for n in range(120)))
    await asyncio.sleep(2 * PRICES_EVERY_SECONDS)
    assert w.cluster.worth is None, "nothing is known of the nodes before the first cycle"
    memo.sync(w.snapshot())
    await asyncio.sleep(2 * PRICES_EVERY_SECONDS)
    worth = w.cluster.worth
    assert worth is not None
    assert w.snapshot().worth is worth
    await asyncio.sleep(2 * PRICES_EVERY_SECONDS)
    assert w.cluster.worth is worth, "nothing moved"
    replica.cluster = World(node("n1")).cluster
    await asyncio.sleep(2 * PRICES_EVERY_SECONDS)
    assert replica.cluster.worth is worth
    keeping.cancel()
