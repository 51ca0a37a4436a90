"""Metrics for Prometheus: of this process (requests, group commit) and of the cluster as this replica sees it.

What the cluster is like is counted when it is asked for and not with each change; a series of a tenant or a state
that has gone is gone with the next answer. Rendering happens in a thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Iterable, Iterator

from aiohttp import web
from attrs import frozen
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_JOBS = (1, 2, 4, 8, 16, 32, 64, 126)


@frozen
class Gauges:
    """One family: its name, help, label names, and a value for each set of label values."""

    name: str
    help: str
    labels: tuple[str, ...]
    values: tuple[tuple[tuple[str, ...], float], ...]


class _ClusterCollector(Collector):
    def __init__(self) -> None:
        self.gauges: tuple[Gauges, ...] = ()

    def collect(self) -> Iterator[Metric]:
        for gauges in self.gauges:
            family = GaugeMetricFamily(gauges.name, gauges.help, labels=gauges.labels)
            for labels, value in gauges.values:
                family.add_metric(labels, value)
            yield family


class Metrics:
    """One registry for each application, so that several may live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._cluster = _ClusterCollector()
        self._registry.register(self._cluster)
        self._requests = Histogram(
            "serai_http_request_seconds",
            "Time to answer a request, by route",
            ("method", "route", "status"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._batches = Histogram(
            "serai_submit_transaction_jobs",
            "Jobs that shared one transaction of the group commit",
            buckets=_JOBS,
            registry=self._registry,
        )
        self._submitted = Counter(
            "serai_jobs_submitted", "Jobs that this process has made durable", registry=self._registry
        )
        self._rendering = asyncio.Lock()

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, f"{status // 100}xx").observe(seconds)

    def observe_batch(self, jobs: int) -> None:
        self._batches.observe(jobs)
        self._submitted.inc(jobs)

    async def render(self, gauges: Iterable[Gauges], accept: str) -> tuple[bytes, str]:
        """The exposition with `gauges` beside what this process has counted, and its content type."""
        async with self._rendering:
            self._cluster.gauges = tuple(gauges)
            encode, content_type = choose_encoder(accept)
            return await asyncio.to_thread(encode, self._registry), content_type


def counted(name: str, help: str, label: str, values: Iterable[str]) -> Gauges:
    tally = Tally(values)
    return Gauges(name, help, (label,), tuple(((value,), count) for value, count in sorted(tally.items())))


def single(name: str, help: str, value: float) -> Gauges:
    return Gauges(name, help, (), (((), value),))


def text_answer(body: bytes, content_type: str) -> web.Response:
    return web.Response(body=body, headers={"Content-Type": content_type})
