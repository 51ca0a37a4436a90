"""The measures of one replay as flat figures; definitions beside each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from coordinator.simulate.meter import Outcome
from coordinator.simulate.trace import Trace, TraceJob

HOUR_MS = 3_600_000
# Finish-time fairness of a job that runs for seconds says nothing.
SHORTEST_FOR_RHO_MS = 60_000
FAIR_RHO = 1.05
ANOMALY_MS = 60_000.0


def measure(trace: Trace, outcome: Outcome, private: Sequence[tuple[float, float]]) -> dict[str, float | int]:
    """`private`: mean (completion time, wait) of each tenant alone on its quota (`alone`)."""
    meter = outcome.meter
    ended = [(n, job) for n, job in enumerate(trace.jobs) if meter.ends_ms[n] is not None]
    jcts = [(meter.ends_ms[n] or 0) - job.submit_ms for n, job in ended]
    waits = [jct - job.duration_ms for jct, (_, job) in zip(jcts, ended, strict=True)]
    rhos = sorted(
        _rho(meter.gpus, meter.demand_at[n], jct, job)
        for jct, (n, job) in zip(jcts, ended, strict=True)
        if job.duration_ms >= SHORTEST_FOR_RHO_MS
    )
    tenants = _means(trace, ended, jcts, waits)
    tenant_rhos = [
        jct / alone_jct for (jct, _), (alone_jct, _) in zip(tenants, private, strict=True) if alone_jct
    ]
    received = [x / owed for x, owed in zip(meter.received, meter.owed, strict=True) if owed]
    first_ms = trace.jobs[0].submit_ms
    return {
        "share_error": 100 * meter.short / (meter.entitled or 1),
        "max_lag_gpu_hours": meter.max_lag / HOUR_MS,
        "rho_worst": rhos[-1] if rhos else 0.0,
        "rho_p99": percentile(rhos, 99),
        "rho_unfair_share": 100 * sum(rho > FAIR_RHO for rho in rhos) / (len(rhos) or 1),
        "tenant_rho_worst": max(tenant_rhos, default=0.0),
        "anomalies": sum(
            wait - alone > ANOMALY_MS for (_, wait), (_, alone) in zip(tenants, private, strict=True)
        ),
        "jain": sum(received) ** 2 / (len(received) * sum(x * x for x in received)) if any(received) else 0.0,
        "jct_mean_hours": mean(jcts) / HOUR_MS,
        "jct_median_hours": percentile(sorted(jcts), 50) / HOUR_MS,
        "jct_p99_hours": percentile(sorted(jcts), 99) / HOUR_MS,
        "wait_mean_hours": mean(waits) / HOUR_MS,
        "wait_p99_hours": percentile(sorted(waits), 99) / HOUR_MS,
        "makespan_hours": (
            max((end for end in meter.ends_ms if end is not None), default=first_ms) - first_ms
        )
        / HOUR_MS,
        "utilisation": 100 * meter.used / (meter.gpus * (trace.last_submit_ms or 1)),
        "fragmentation": 100 * meter.broken / meter.free if meter.free else 0.0,
        "jobs": len(ended),
    }


def by_tenant(
    trace: Trace,
    outcome: Outcome,
    quotas: Sequence[float],
    gpus: float,
    private: Sequence[tuple[float, float]],
) -> list[dict[str, float | int | str]]:
    """A row for each tenant. `received_share`: what it received of what it was entitled to up to the last submit, in %."""
    meter = outcome.meter
    own: list[list[tuple[int, int]]] = [[] for _ in trace.tenants]
    for n, job in enumerate(trace.jobs):
        end_ms = meter.ends_ms[n]
        if end_ms is not None:
            own[job.tenant].append((end_ms - job.submit_ms, end_ms - job.submit_ms - job.duration_ms))
    work = trace.gpu_ms()
    rows: list[dict[str, float | int | str]] = []
    for n, name in enumerate(trace.tenants):
        jcts, waits = [jct for jct, _ in own[n]], sorted(wait for _, wait in own[n])
        rows.append(
            {
                "tenant": name,
                "quota_gpus": quotas[n] * gpus,
                "jobs": len(jcts),
                "gpu_hours": work[n] / HOUR_MS,
                "received_share": 100 * meter.received[n] / meter.owed[n] if meter.owed[n] else 0.0,
                "jct_mean_hours": mean(jcts) / HOUR_MS,
                "wait_mean_hours": mean(waits) / HOUR_MS,
                "wait_p99_hours": percentile(waits, 99) / HOUR_MS,
                "rho": mean(jcts) / private[n][0] if private[n][0] else 0.0,
                "wait_alone_hours": private[n][1] / HOUR_MS,
            }
        )
    return rows


def alone(trace: Trace, quotas: Sequence[float], gpus: int) -> list[tuple[float, float]]:
    """Mean (completion time, wait) of each tenant on max(1, round(quota x GPUs)) GPUs of its own: smallest first, what
    does not fit is passed over; a job wider than that takes all of it for as many GPU-seconds."""
    own: list[list[TraceJob]] = [[] for _ in trace.tenants]
    for job in trace.jobs:
        own[job.tenant].append(job)
    return [_alone(jobs, max(1, round(quota * gpus))) for jobs, quota in zip(own, quotas, strict=True)]


def _alone(jobs: Sequence[TraceJob], width: int) -> tuple[float, float]:
    free, ends, waiting = float(width), list[tuple[float, float]](), list[tuple[float, int]]()
    total_ms, waits_ms, arrived = 0.0, 0.0, 0
    while arrived < len(jobs) or ends:
        times = [jobs[arrived].submit_ms] if arrived < len(jobs) else []
        now = min([*times, *(end for end, _ in ends[:1])])
        while ends and ends[0][0] <= now:
            free += heapq.heappop(ends)[1]
        while arrived < len(jobs) and jobs[arrived].submit_ms <= now:
            heapq.heappush(waiting, (min(width, jobs[arrived].size), arrived))
            arrived += 1
        while waiting and waiting[0][0] <= free:
            size, n = heapq.heappop(waiting)
            job = jobs[n]
            end = now + job.duration_ms * job.size / size if size else now + job.duration_ms
            heapq.heappush(ends, (end, size))
            free -= size
            total_ms += end - job.submit_ms
            waits_ms += now - job.submit_ms
    count = len(jobs) or 1
    return total_ms / count, waits_ms / count


def _rho(gpus: float, demand: tuple[float, float], jct_ms: int, job: TraceJob) -> float:
    contention = (demand[1] - demand[0]) / (gpus * jct_ms) if jct_ms else 1.0
    return jct_ms / (job.duration_ms * max(1.0, contention))


def _means(
    trace: Trace, ended: Sequence[tuple[int, TraceJob]], jcts: Sequence[int], waits: Sequence[int]
) -> list[tuple[float, float]]:
    sums = [[0, 0, 0] for _ in trace.tenants]
    for (_, job), jct, wait in zip(ended, jcts, waits, strict=True):
        one = sums[job.tenant]
        one[0], one[1], one[2] = one[0] + jct, one[1] + wait, one[2] + 1
    return [(jct / (count or 1), wait / (count or 1)) for jct, wait, count in sums]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Of values in ascending order, between neighbours in proportion."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
