"""Prices of placement while a term lasts."""

from __future__ import annotations

import asyncio

import pytest

from coordinator import model
from coordinator.cluster import Cluster
from coordinator.index import Index
from coordinator.market import FIRST_PRICES_SECONDS, PRICES_EVERY_SECONDS, keep_prices
from coordinator.model import MixLine
from coordinator.worth import Worth
from tests.builders import GIB, World, job, node


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


@pytest.mark.looptime
async def test_a_takeover_keeps_the_prices(looptime):
    """The jobs that they were learned from have long ended; the new leader has the record alone, and has the same
    prices before a second has passed."""
    jobs = [job(f"j{n:03}", memory=38 * GIB, compute=470) for n in range(40)]
    first, second = World(node("n1"), node("n2")), World(node("n1"), node("n2"))
    first.submit(*jobs)
    first.snapshot()
    record = first.cluster.mix.record(first.now_ms)
    assert record.lines == (MixLine(40, 1, 470, 38 * GIB, "", 1000),)
    worths = []
    second.see(model.MixSeen(record))
    for w in (first, second):
        memo = Index()
        memo.sync(w.snapshot())
        keeping = asyncio.create_task(keep_prices(Shown(w.cluster), memo))  # type: ignore[arg-type]
        await asyncio.sleep(FIRST_PRICES_SECONDS / 2)
        keeping.cancel()
        worths.append(w.cluster.worth)
    learned, kept = worths
    assert learned is not None
    assert kept is not None
    assert (kept.cpu, kept.values, kept.whole) == (learned.cpu, learned.values, learned.whole)


@pytest.mark.looptime
async def test_prices_that_cannot_be_made_end_nothing(looptime, caplog):
    """The leader goes on with those it has: they only choose among nodes that all have room."""

    class Odd(Index):
        def market(self, worth: Worth) -> tuple[dict[str, int], dict[int, int], int]:
            raise ZeroDivisionError

    w = World(node("n1"))
    w.submit(*(job(f"j{n:03}", memory=38 * GIB, compute=470) for n in range(40)))
    memo = Odd()
    memo.sync(w.snapshot())
    keeping = asyncio.create_task(keep_prices(Shown(w.cluster), memo))  # type: ignore[arg-type]
    await asyncio.sleep(3 * PRICES_EVERY_SECONDS)
    assert not keeping.done()
    assert w.cluster.worth is None
    assert "the old ones stay" in caplog.text
    keeping.cancel()
