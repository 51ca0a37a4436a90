"""With any mix, an entitled job that can fit an empty cluster starts within a bound that the test computes.

Entitled: its tenant holds less than its share, so nothing of its own is in front. Or its tenant is entitled, and keeps
its share filled with small jobs of its own that never end to come: then the large one goes first among them after the
bounded wait, and is owed at the tenant's share after twice that.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.cycle import why_never
from coordinator.fairness import STARVED_AFTER
from tests.builders import GIB, World, job, node

CARD = 80 * GIB
MINUTE = 60
STEP = 10 * MINUTE
MAX_WAIT = 2 * 3600
LONGEST = 3600
SMALL = ({"gpus": 1}, {"memory": 40 * GIB, "compute": 500}, {"memory": 10 * GIB, "compute": 100})
SEEN: Counter[str] = Counter()
NEEDED = ("reserved", "hold", "known", "waited", "flow went on", "behind its own", "starved", "alone")


class Flow:
    """Jobs of other tenants that come faster than they can be served; six in ten declare how long they run."""

    def __init__(self, random: Random, tenants: str) -> None:
        self.random = random
        self.tenants = tenants
        self.w = World(node("n1", gpus=4), node("n2", gpus=4), max_wait_seconds=MAX_WAIT)
        self.ends: dict[str, int] = {}
        self.durations: dict[str, int] = {}
        self.count = 0
        for tenant in tenants:
            self.w.tenant(tenant, random.choice((1, 2, 4)) * CARD)

    def submit(self, tenant: str, **size: object) -> str:
        id = f"{tenant}{self.count:05}"
        self.count += 1
        duration = self.random.randrange(STEP, LONGEST + 1, STEP)
        declared = duration if self.random.random() < 0.6 else None
        self.durations[id] = duration
        self.w.submit(job(id, self.w.now, tenant=tenant, max_runtime_seconds=declared, **size))
        return id

    def random_size(self) -> dict[str, object]:
        return self.random.choice(
            (
                {"gpus": self.random.randint(1, 4)},
                {"gpus": 1},
                {"memory": self.random.randint(1, 80) * GIB, "compute": self.random.randint(50, 1000)},
                {"gpus": 2, "count": 2},
            )
        )

    def waiting(self, tenant: str) -> int:
        return sum(job.tenant == tenant for job in self.w.cluster.waiting_jobs.values())

    def step(self, own: str = "") -> None:
        """Ten minutes: what is over ends, the queue is filled up, and a cycle runs. The tenant `own` always has small
        jobs waiting."""
        for id in [id for id, end in self.ends.items() if end <= self.w.now]:
            del self.ends[id]
            self.w.end(id)
        while self.tenants and len(self.w.cluster.waiting_jobs) < 10:
            self.submit(self.random.choice(self.tenants), **self.random_size())
        while own and self.waiting(own) < 4:
            self.submit(own, **self.random.choice(SMALL))
        for id in self.w.cycle():
            self.ends[id] = self.w.now + self.durations[id]
        self.w.now += STEP


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["ab", "abcd"]))
@example(20, "ab")  # others start meanwhile, which is rare
@example(20, "abcd")
def test_an_entitled_job_starts_within_a_bound_property(seed: int, tenants: str):
    """One tenant after the other may have the reservation before it, each until the bounded wait has passed and the
    longest job has ended; then it is its turn, since who holds nothing is owed most."""
    random = Random(seed)
    flow = Flow(random, tenants)
    for _ in range(6):
        flow.step()
    flow.w.tenant("t", random.choice((1, 2, 8)) * CARD)
    size = random.choice(({"gpus": 4}, {"gpus": 4, "count": 2}, {"gpus": 3}, {"gpus": 1, "count": 8}))
    target = flow.submit("t", **size)
    assert why_never(flow.w.cluster.waiting_jobs[target].spec, flow.w.snapshot()) is None
    bound = (len(tenants) + 1) * (MAX_WAIT + LONGEST)
    submitted = flow.w.now
    others_before = flow.count
    while target in flow.w.cluster.waiting_jobs:
        assert flow.w.now - submitted <= bound, f"waited {flow.w.now - submitted} of at most {bound} s"
        plan = flow.w.plan()
        SEEN["reserved"] += plan.held_for == target
        SEEN["hold"] += plan.reservation is not None and plan.reservation.due_ms is None
        SEEN["known"] += plan.reservation is not None and plan.reservation.due_ms is not None
        flow.step()
    SEEN["waited"] += flow.w.now - submitted > STEP
    SEEN["flow went on"] += flow.count > others_before


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["", "a", "ab"]))
@example(0, "")
@example(0, "ab")  # starved
@example(134217727, "ab")  # its tenant holds nothing just then, and has the reservation
def test_an_entitled_job_starts_within_a_bound_behind_its_tenants_own_small_jobs_property(
    seed: int, others: str
):
    """QF-3: its tenant's small jobs hold the tenant's share when it comes, and go on coming. It is starved after twice the
    bounded wait; what its tenant holds beyond the share ends; then it goes ahead of everybody who came later, and each job
    of others that was there before needs the time of the longest one at most until it has its room."""
    random = Random(seed)
    flow = Flow(random, others)
    flow.w.tenant("t", random.choice((1, 2, 8)) * CARD)
    for _ in range(12):
        flow.step(own="t")
    while "t" not in {job.tenant for job in flow.w.cluster.live_jobs.values()}:
        assert flow.w.now <= 12 * STEP + LONGEST, (
            "the others hold more than their share for a job's time at most"
        )
        flow.step(own="t")
    size = random.choice(({"gpus": 4}, {"gpus": 4, "count": 2}, {"gpus": 3}, {"gpus": 1, "count": 8}))
    target = flow.submit("t", **size)
    ahead = sum(job.tenant != "t" for job in flow.w.cluster.waiting_jobs.values())
    bound = STARVED_AFTER * MAX_WAIT + (ahead + 2) * (LONGEST + STEP)
    submitted, passed = flow.w.now, 0
    while target in flow.w.cluster.waiting_jobs:
        assert flow.w.now - submitted <= bound, f"waited {flow.w.now - submitted} of at most {bound} s"
        before = set(flow.w.cluster.live_jobs)
        flow.step(own="t")
        passed += sum(id.startswith("t") for id in flow.w.cluster.live_jobs.keys() - before)
    SEEN["behind its own"] += passed > 1
    SEEN["starved"] += flow.w.now - submitted > STARVED_AFTER * MAX_WAIT
    SEEN["alone"] += not others


def test_the_property_above_was_not_vacuous():
    if SEEN:
        assert all(SEEN[name] > 0 for name in NEEDED), SEEN
