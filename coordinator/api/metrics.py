"""What one process of the API counts: requests, group commit, watch lag."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from prometheus_client import Counter, Histogram

from coordinator.gauges import JOBS, SECONDS, Exposition, Gauges


class Metrics:
    """One for each application."""

    def __init__(self) -> None:
        self._exposition = Exposition()
        registry = self._exposition.registry
        self._requests = Histogram(
            "serai_http_request_seconds",
            "Time to answer a request, by route",
            ("method", "route", "status"),
            buckets=SECONDS,
            registry=registry,
        )
        self._batches = Histogram(
            "serai_submit_transaction_jobs",
            "Jobs that shared one transaction of the group commit",
            buckets=JOBS,
            registry=registry,
        )
        self._submitted = Counter(
            "serai_jobs_submitted", "Jobs that this process has made durable", registry=registry
        )
        self._lag = Histogram(
            "serai_watch_lag_seconds",
            "From the answer to a write until the watch shows it",
            buckets=SECONDS,
            registry=registry,
        )

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, f"{status // 100}xx").observe(seconds)

    def observe_batch(self, jobs: int) -> None:
        self._batches.observe(jobs)
        self._submitted.inc(jobs)

    def observe_lag(self, seconds: float) -> None:
        self._lag.observe(seconds)

    async def render(self, gauges: Iterable[Gauges], accept: str) -> tuple[bytes, str]:
        """The exposition with `gauges` beside what this process has counted, and its content type."""
        return await self._exposition.render(gauges, accept)


def text_answer(body: bytes, content_type: str) -> web.Response:
    return web.Response(body=body, headers={"Content-Type": content_type})
