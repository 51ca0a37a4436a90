"""One trace on one cluster under one policy: runs the replay that suits it, and gathers what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import evolve, frozen

from coordinator.config import FairnessSettings, Settings
from coordinator.fairness import policy_from
from coordinator.simulate.hardware import Hardware
from coordinator.simulate.measures import alone, by_tenant, measure
from coordinator.simulate.meter import Outcome
from coordinator.simulate.pool import GPU_MIB, PolicyRules, Pool
from coordinator.simulate.replay import Replay
from coordinator.simulate.rooms import CountRoom, NodeRoom
from coordinator.simulate.trace import Trace

Figure = float | int | str


class StudyInvalid(ValueError):
    """The trace and the quotas do not belong together."""


@frozen
class Study:
    """`quotas`: part of the cluster that each tenant of the trace is entitled to, by its number."""

    trace: Trace
    hardware: Hardware
    quotas: Sequence[float]
    policy: str
    core: str
    outcome: Outcome
    figures: Mapping[str, float | int]
    tenants: Sequence[Mapping[str, Figure]]


def quotas_of(trace: Trace, text: str) -> list[float]:
    """`equal`, `gpu-hours` (in proportion to each tenant's work), or NAME=PART,... (any unit; others have none).
    Raises StudyInvalid."""
    if text == "equal":
        parts = [1.0] * len(trace.tenants)
    elif text == "gpu-hours":
        parts = trace.gpu_ms()
    else:
        given = {}
        for pair in text.split(","):
            name, _, part = pair.partition("=")
            if name not in trace.tenants or not part.replace(".", "", 1).isdecimal():
                raise StudyInvalid(f"{pair!r} is no quota: write TENANT=PART, with a tenant of the trace")
            given[name] = float(part)
        parts = [given.get(name, 0.0) for name in trace.tenants]
    if not sum(parts):
        raise StudyInvalid("no tenant has a quota")
    return [part / sum(parts) for part in parts]


def study(
    trace: Trace,
    hardware: Hardware,
    quotas: Sequence[float],
    fairness: FairnessSettings,
    is_exact: bool = False,
    tick: Callable[[int], None] | None = None,
) -> Study:
    """Whole GPUs on equal nodes go through the fast pool; everything else, and `is_exact`, through the core itself. The
    pool has no topology, and under `space-time` no reservation for jobs beyond the bounded wait; on GPUs that are only
    counted it is else the same to the second."""
    settings = evolve(Settings(), fairness=fairness)
    is_pool = (
        not is_exact and trace.is_whole and hardware.is_even and all(job.tasks == 1 for job in trace.jobs)
    )
    if is_pool:
        room = CountRoom(hardware.gpus) if hardware.is_counted else NodeRoom(hardware.gpus, hardware.per_node)
        quotas_mib = [int(GPU_MIB * hardware.gpus * quota) for quota in quotas]
        rules = PolicyRules(policy_from(settings))
        outcome = Pool(trace, room, quotas_mib, rules, 1000 * fairness.window_seconds).run(tick)
    else:
        quotas_mib = [int(hardware.memory_mib * quota) for quota in quotas]
        outcome = Replay(trace, hardware, quotas_mib, settings).run(tick)
    private = alone(trace, quotas, hardware.gpus)
    return Study(
        trace,
        hardware,
        quotas,
        fairness.policy,
        "pool" if is_pool else "cycle",
        outcome,
        measure(trace, outcome, private),
        by_tenant(trace, outcome, quotas, hardware.gpus, private),
    )
