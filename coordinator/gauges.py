"""Figures for Prometheus: counters of one process, and gauges that are found when somebody asks.

What the cluster is like is counted when it is asked for and not with each change; a series of a tenant or a state
that has gone is gone with the next answer. Rendering happens in a thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator

from attrs import frozen
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from coordinator.replica import Replica

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
JOBS = (1, 2, 4, 8, 16, 32, 64, 126)


@frozen
class Gauges:
    """One family: its name, help, label names, and a value for each set of label values."""

    name: str
    help: str
    labels: tuple[str, ...]
    values: tuple[tuple[tuple[str, ...], float], ...]


def counted(name: str, help: str, label: str, values: Iterable[str]) -> Gauges:
    tally = Tally(values)
    return Gauges(name, help, (label,), tuple(((value,), count) for value, count in sorted(tally.items())))


def single(name: str, help: str, value: float) -> Gauges:
    return Gauges(name, help, (), (((), value),))


class _Asked(Collector):
    def __init__(self) -> None:
        self.gauges: tuple[Gauges, ...] = ()

    def collect(self) -> Iterator[Metric]:
        for gauges in self.gauges:
            family = GaugeMetricFamily(gauges.name, gauges.help, labels=gauges.labels)
            for labels, value in gauges.values:
                family.add_metric(labels, value)
            yield family


class Exposition:
    """One registry for each part, so that several may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._asked = _Asked()
        self.registry.register(self._asked)
        self._rendering = asyncio.Lock()

    async def render(self, gauges: Iterable[Gauges], accept: str) -> tuple[bytes, str]:
        """Everything in the registry with `gauges` beside it, and the content type."""
        async with self._rendering:
            self._asked.gauges = tuple(gauges)
            encode, content_type = choose_encoder(accept)
            return await asyncio.to_thread(encode, self.registry), content_type


def replica_gauges(replica: Replica, newest_revision: int) -> Iterator[Gauges]:
    """How well this process follows the store. `newest_revision` is the newest that it knows to be written."""
    numbers = replica.numbers
    yield single("serai_replica_revision", "Store revision that this replica has seen", numbers.revision)
    yield single(
        "serai_store_revision_behind",
        "Revisions by which this replica is behind the newest it knows of",
        max(0, newest_revision - numbers.revision),
    )
    yield single("serai_replica_connected", "1 while the watch of the store stands", int(numbers.connected))
    yield single(
        "serai_replica_listings",
        "How often everything was read: more than 1 means that a watch was lost to a compaction or a long break",
        numbers.listings,
    )
    yield single("serai_replica_batches", "Messages of the watch since the start", numbers.batches)
    yield single("serai_replica_changes", "Changed keys that were taken in since the start", numbers.changes)
    yield single("serai_replica_unreadable", "Records that cannot be read", numbers.unreadable)
    yield single(
        "serai_replica_fold_seconds", "Time spent on taking in changes since the start", numbers.fold_seconds
    )
    yield single("serai_replica_quiet_seconds", "Since something came from the store", numbers.quiet_seconds)


class WatchLag:
    """How long after the answer to a write the watch shows it. One write at a time is followed: under load that is
    every few milliseconds, and costs nothing to speak of."""

    def __init__(self, replica: Replica, observe: Callable[[float], None]) -> None:
        self._replica = replica
        self._observe = observe
        self._sample: asyncio.Task[None] | None = None

    def written(self, revision: int) -> None:
        """A write of this process was answered just now."""
        if self._sample is None or self._sample.done():
            self._sample = asyncio.create_task(self._follow(revision), name="watch-lag")

    async def close(self) -> None:
        if self._sample is not None:
            self._sample.cancel()
            await asyncio.gather(self._sample, return_exceptions=True)

    async def _follow(self, revision: int) -> None:
        loop = asyncio.get_running_loop()
        answered_at = loop.time()
        await self._replica.wait_for(revision)
        self._observe(loop.time() - answered_at)
