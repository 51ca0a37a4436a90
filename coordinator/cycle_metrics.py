"""What one coordinator that leads, or stands by, tells of its cycles: /metrics on a listener of its own.

serai_cycle_seconds{phase}    snapshot, settle, plan, commit (until etcd has answered), watch (until it is seen)
serai_cycle_placements        jobs placed by a cycle that placed any
serai_commit_transaction_jobs jobs that shared a transaction
serai_commit_refused_jobs     jobs whose record had changed between plan and commit
serai_cycle_failures{part}    faults of Serai itself that were contained: plan, settle, placement, reason, cycle
serai_jobs_set_aside          waiting jobs that are left out of planning since it failed on them
serai_jobs_waiting{reason}    as the newest plan answers
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web
from prometheus_client import Counter, Histogram

from coordinator.cycle import Plan
from coordinator.gauges import JOBS, SECONDS, Exposition, Gauges, replica_gauges, single
from coordinator.replica import Replica
from coordinator.snapshot import Snapshot, shape_of
from vgpu.reasons import ReasonCode

PATH = "/metrics"
PHASES = ("snapshot", "settle", "plan", "commit", "watch")


class CycleMetrics:
    """One for each process. `is_leading` is set by whoever leads."""

    def __init__(self) -> None:
        self.is_leading = False
        self.newest_revision = 0
        self._exposition = Exposition()
        self._planned: tuple[Snapshot, Plan] | None = None
        self.registry = registry = self._exposition.registry
        phases = Histogram(
            "serai_cycle_seconds", "Time of a cycle, by phase", ("phase",), buckets=SECONDS, registry=registry
        )
        self._phases = {name: phases.labels(name) for name in PHASES}
        self._placements = Histogram(
            "serai_cycle_placements",
            "Jobs placed by a cycle that placed any",
            buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
            registry=registry,
        )
        self._batches = Histogram(
            "serai_commit_transaction_jobs",
            "Jobs that shared one transaction of a commit",
            buckets=JOBS,
            registry=registry,
        )
        self._refused = Counter(
            "serai_commit_refused_jobs",
            "Jobs whose record had changed between plan and commit",
            registry=registry,
        )

        self._aside = 0
        self._failures = Counter(
            "serai_cycle_failures",
            "Faults of Serai itself that were contained, by part of the cycle",
            ("part",),
            registry=registry,
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        yield
        self._phases[name].observe(loop.time() - began)

    def observe_batch(self, jobs: int) -> None:
        self._batches.observe(jobs)

    def observe_failure(self, part: str) -> None:
        self._failures.labels(part).inc()

    def observe_plan(self, snapshot: Snapshot, plan: Plan | None, aside: int = 0) -> None:
        """None: nobody waits. `aside` jobs were left out of it."""
        self._aside = aside
        self._planned = (snapshot, plan) if plan is not None else None
        if plan is not None and plan.placements:
            self._placements.observe(len(plan.placements))

    def observe_commit(self, revision: int, refused: int) -> None:
        self.newest_revision = max(self.newest_revision, revision)
        self._refused.inc(refused)

    async def render(self, replica: Replica, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type."""
        return await self._exposition.render(self._gauges(replica), accept)

    def _gauges(self, replica: Replica) -> Iterator[Gauges]:
        yield single("serai_leading", "1 while this process leads", int(self.is_leading))
        yield single("serai_jobs_set_aside", "Jobs left out of planning since it failed on them", self._aside)
        yield from replica_gauges(replica, self.newest_revision)
        yield Gauges(
            "serai_jobs_waiting",
            "Waiting jobs by the code of the reason",
            ("reason",),
            tuple(((code,), count) for code, count in sorted(self._waiting().items())),
        )

    def _waiting(self) -> Tally[str]:
        """Those of one line (one tenant, priority, shape) are answered alike, so one is asked."""
        tally: Tally[str] = Tally()
        if self._aside:
            tally[ReasonCode.INTERNAL_ERROR.value] = self._aside
        if self._planned is None:
            return tally
        snapshot, plan = self._planned
        placed = {placement.job.id for placement in plan.placements}
        gone = Tally((p.job.tenant, p.job.spec.priority, shape_of(p.job.spec)) for p in plan.placements)
        for tenant, lines in snapshot.lines.items():
            for key, line in lines.items():
                first = next((job for job in line if job.id not in placed), None)
                if first is not None:
                    left = len(line) - gone[tenant, key.priority, key.shape]
                    tally[_code(plan, first.id).value] += left
        return tally


def _code(plan: Plan, id: str) -> ReasonCode:
    """Found by the core when asked for, so its faults come to light here too; they must not hide all other figures."""
    try:
        return plan.waiting[id].code
    except Exception:
        return ReasonCode.INTERNAL_ERROR


@asynccontextmanager
async def listener(listen: str, metrics: CycleMetrics, replica: Replica) -> AsyncIterator[str]:
    """Serves /metrics at host:port while it is open; answers its address. Nothing for an empty `listen`."""
    if not listen:
        yield ""
        return

    async def answer(request: web.Request) -> web.Response:
        body, content_type = await metrics.render(replica, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application()
    app.router.add_get(PATH, answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        host, _, port = listen.rpartition(":")
        await web.TCPSite(runner, host or "127.0.0.1", int(port), reuse_address=True).start()
        yield f"http://{host or '127.0.0.1'}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
