"""GET /metrics: the cluster's figures from the replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from aiohttp import web

from coordinator.api.context import Api, api_of
from coordinator.api.metrics import text_answer
from coordinator.api.overview import job_counts
from coordinator.cluster import Snapshot
from coordinator.gauges import Gauges, counted, replica_gauges, single


async def get_metrics(request: web.Request) -> web.Response:
    api = api_of(request)
    snapshot = api.snapshot()
    gauges = _gauges(api, snapshot, await job_counts(snapshot))
    body, content_type = await api.metrics.render(gauges, request.headers.get("Accept", ""))
    return text_answer(body, content_type)


def _gauges(api: Api, snapshot: Snapshot, states: Mapping[str, int]) -> Iterator[Gauges]:
    yield Gauges(
        "serai_jobs",
        "Jobs by the state that is shown",
        ("state",),
        tuple(((state.upper(),), count) for state, count in states.items()),
    )
    yield counted(
        "serai_jobs_waiting", "Waiting jobs by the code of the reason", "reason", _reason_codes(api, snapshot)
    )
    yield counted(
        "serai_nodes", "Nodes by status", "status", (node.status.value for node in snapshot.nodes.values())
    )
    yield single(
        "serai_nodes_silent_together",
        "Nodes that fell silent at once and are not given up for it: trouble of etcd or the network",
        snapshot.silent_together,
    )
    yield single(
        "serai_nodes_clock_off",
        "Nodes whose clock differs from this machine's by seconds",
        len(snapshot.clocks_off),
    )
    tenants = sorted(snapshot.tenants.values(), key=lambda tenant: tenant.name)
    held = snapshot.held
    for name, help, values in (
        (
            "serai_tenant_quota_memory_mib",
            "GPU memory that a tenant is entitled to",
            [t.quota_memory_mib for t in tenants],
        ),
        (
            "serai_tenant_granted_memory_mib",
            "GPU memory that a tenant holds",
            [held[t.name].memory if t.name in held else 0 for t in tenants],
        ),
        (
            "serai_tenant_granted_compute_milli",
            "Thousandths of GPUs that a tenant holds",
            [held[t.name].compute if t.name in held else 0 for t in tenants],
        ),
    ):
        yield Gauges(
            name,
            help,
            ("tenant",),
            tuple(((t.name,), value) for t, value in zip(tenants, values, strict=True)),
        )
    yield from replica_gauges(api.replica, api.pump.newest_revision)
    yield single(
        "serai_submit_waiting_jobs", "Jobs that wait to be written by this process", api.pump.waiting_jobs
    )


def _reason_codes(api: Api, snapshot: Snapshot) -> Iterator[str]:
    """One for each waiting job. Those of one line (one tenant, priority, shape) are answered alike, so one is asked."""
    for lines in snapshot.lines.values():
        for line in lines.values():
            reason = api.reasons.last(line[0]) or line[0].reason
            code = reason.code.value if reason else "unknown"
            yield from (code for _ in line)
