"""Nobody gains by the form of what he submits: 16 GPUs, two tenants with equal quotas; GPU-hours of each.

Each case compares honest play with the trick, under the default policy; where `space-time` can be gamed, that is shown
beside it, so that the test could fail. `hold`: nobody declares run times.
"""

from __future__ import annotations

import itertools
from random import Random

import pytest

from coordinator.fairness import POLICIES, Policy
from coordinator.simulate.meter import Outcome
from coordinator.simulate.pool import GPU_MIB, PolicyRules, Pool
from coordinator.simulate.rooms import CountRoom
from coordinator.simulate.trace import Trace, TraceJob

GPUS = 16
HOUR_MS = 3_600_000
DAY_HOURS = 24
A, B = 0, 1


def one(tenant: int, at_hours: float, gpus: int, hours: float, until_hours: float | None = None) -> TraceJob:
    duration_ms, submit_ms = round(hours * HOUR_MS), round(at_hours * HOUR_MS)
    withdrawn_ms = None if until_hours is None else round(until_hours * HOUR_MS)
    return TraceJob("", tenant, submit_ms, gpus, duration_ms, duration_ms, withdrawn_ms)


def about_an_hour(seed: int, count: int) -> list[float]:
    random = Random(seed)
    return [random.uniform(0.5, 1.5) for _ in range(count)]


def stream(tenant: int, count: int, at_hours: float = 0.0, seed: int = 1) -> list[TraceJob]:
    """Jobs of one GPU and about an hour, all at once."""
    return [one(tenant, at_hours, 1, hours) for hours in about_an_hour(seed, count)]


def received(
    jobs: list[TraceJob], hours: tuple[float, float], policy: str = "serai", hold: bool = False
) -> tuple[float, float]:
    """GPU-hours of a and b in that span."""
    outcome = play(jobs, policy, hold)
    sums, timeline = [0.0, 0.0], outcome.meter.timeline
    start_ms, end_ms = hours[0] * HOUR_MS, hours[1] * HOUR_MS
    for (at_ms, held), (until_ms, _) in itertools.pairwise(timeline):
        span_ms = min(until_ms, end_ms) - max(at_ms, start_ms)
        if span_ms > 0:
            sums = [total + gpus * span_ms / HOUR_MS for total, gpus in zip(sums, held, strict=True)]
    return sums[A], sums[B]


def play(jobs: list[TraceJob], policy: str, hold: bool) -> Outcome:
    trace = Trace("", ("a", "b"), sorted(jobs, key=lambda job: job.submit_ms))
    trace = trace.without_limits() if hold else trace
    rules = PolicyRules(Policy(policy, POLICIES[policy], owed_first=policy == "serai"))
    return Pool(trace, CountRoom(GPUS), [8 * GPU_MIB] * 2, rules, DAY_HOURS * HOUR_MS).run()


@pytest.mark.parametrize("hold", [False, True])
def test_splitting_a_large_job_gains_nothing(hold):
    """20 jobs of 8 GPUs come when 600 of one have filled the cluster; then the same work as 160 jobs of one."""
    b, hours = stream(B, 600), about_an_hour(2, 20)
    whole = received([*b, *(one(A, 0.1, 8, h) for h in hours)], (0, 12), hold=hold)
    split = received([*b, *(one(A, 0.1, 1, h) for h in hours for _ in range(8))], (0, 12), hold=hold)
    assert whole[A] > 85
    assert split[A] <= 1.08 * whole[A]
    seed_whole = received([*b, *(one(A, 0.1, 8, h) for h in hours)], (0, 12), "space-time")
    assert seed_whole[A] < 0.2 * split[A], "under space-time splitting gains everything"


@pytest.mark.parametrize("hold", [False, True])
def test_splitting_long_jobs_into_short_ones_gains_nothing(hold):
    """200 jobs of about an hour, each cut into six."""
    b, hours = stream(B, 600), about_an_hour(2, 200)
    whole = received([*b, *(one(A, 0, 1, h) for h in hours)], (0, 12), hold=hold)
    split = received([*b, *(one(A, 0, 1, h / 6) for h in hours for _ in range(6))], (0, 12), hold=hold)
    assert 90 < whole[A] < 102
    assert split[A] <= 1.03 * whole[A]


@pytest.mark.parametrize("hold", [False, True])
def test_a_burst_gains_nothing(hold):
    """150 at once, 1,500 at once, and 20 an hour."""
    b = stream(B, 600)
    few = received([*b, *stream(A, 150, seed=2)], (0, 12), hold=hold)
    many = received([*b, *stream(A, 1500, seed=2)], (0, 12), hold=hold)
    steady = [job for hour in range(12) for job in stream(A, 20, hour, seed=hour)]
    regular = received([*b, *steady], (0, 12), hold=hold)
    assert many[A] <= 1.03 * few[A]
    assert many[A] <= 1.05 * regular[A]


@pytest.mark.parametrize("hold", [False, True])
def test_sleeping_and_then_bursting_gains_nothing(hold):
    """a sleeps for a day while b works, then submits 600; had a worked all the time, both had half."""
    b = [*stream(B, 1000), *stream(B, 600, DAY_HOURS, seed=3)]
    late = stream(A, 600, DAY_HOURS, seed=4)
    worked = received([*b, *stream(A, 600, seed=5), *late], (DAY_HOURS, DAY_HOURS + 12), hold=hold)
    slept = received([*b, *late], (DAY_HOURS, DAY_HOURS + 12), hold=hold)
    assert slept[A] <= 1.03 * worked[A]
    assert received([*b, *late], (DAY_HOURS, DAY_HOURS + 12), "space-time")[A] > 1.3 * worked[A]


@pytest.mark.parametrize("hold", [False, True])
def test_cancelling_and_submitting_again_gains_nothing(hold):
    """a takes back what waits each hour and submits as much again."""
    b = stream(B, 600)
    patient = received([*b, *stream(A, 600, seed=2)], (0, 12), hold=hold)
    again = [one(A, hour, 1, hours, hour + 1) for hour in range(12) for hours in about_an_hour(hour, 40)]
    impatient = received([*b, *again], (0, 12), hold=hold)
    assert impatient[A] <= 1.03 * patient[A]


@pytest.mark.parametrize(("hold", "idle_at_most"), [(False, 8.0), (True, 12.0)])
def test_fake_demand_costs_others_little(hold, idle_at_most):
    """a keeps a job of all 16 GPUs waiting and takes it back each hour: what that idles, and what b loses to it beyond
    what a's job used when it ran. After the first withdrawal a has no reservation for a day."""
    b = stream(B, 1500)
    fakes = [one(A, hour, 16, 4, hour + 0.99) for hour in range(1, DAY_HOURS)]
    before = received(b, (0, DAY_HOURS), hold=hold)
    after = received([*b, *fakes], (0, DAY_HOURS), hold=hold)
    idle = sum(before) - sum(after)
    assert idle <= idle_at_most
    assert after[A] <= 64, "its job ran once at most"


def test_fake_demand_without_the_rule_idles_much_more():
    """The control: the same with no penalty for a withdrawal, where nobody declares run times."""
    b = stream(B, 1500)
    fakes = [one(A, hour, 16, 4, hour + 0.99) for hour in range(1, DAY_HOURS)]
    rules = PolicyRules(Policy("serai", POLICIES["serai"], owed_first=True, withdrawal_seconds=0))
    trace = Trace("", ("a", "b"), sorted([*b, *fakes], key=lambda job: job.submit_ms)).without_limits()
    outcome = Pool(trace, CountRoom(GPUS), [8 * GPU_MIB] * 2, rules, DAY_HOURS * HOUR_MS).run()
    timeline = outcome.meter.timeline
    used = sum(
        sum(held) * (min(until_ms, DAY_HOURS * HOUR_MS) - at_ms) / HOUR_MS
        for (at_ms, held), (until_ms, _) in itertools.pairwise(timeline)
        if at_ms < DAY_HOURS * HOUR_MS
    )
    assert sum(received(b, (0, DAY_HOURS), hold=True)) - used > 50
