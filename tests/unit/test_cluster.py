"""The fold of events: in any order, with records that are odd, late, gone or unreadable; and use over time."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator import model
from coordinator.cluster import Cluster
from coordinator.cycle import plan_cycle
from coordinator.fairness import policy_from
from coordinator.lifecycle import allocated, cancelled, settle
from coordinator.model import JobState, NodeAdmin, TaskState, Tenant, UsageHour
from coordinator.nodes import NodeStatus
from coordinator.snapshot import Snapshot
from coordinator.usage import BUCKET_MS, HOUR_MS, Use
from tests.builders import GIB, START_MS, World, gpu, job, node, piece, report, running, settings, task
from tests.invariants import check_snapshot
from vgpu.reasons import ReasonCode


def free(world: World, name: str = "n1", index: int = 0) -> tuple[int, int]:
    view = world.snapshot().nodes[name].gpus[index]
    return view.memory_free_mib, view.compute_free_milli


def closed(world: World, name: str = "n1", index: int = 0) -> ReasonCode | None:
    reason = world.snapshot().nodes[name].gpus[index].closed
    return reason.code if reason else None


# --- records that cannot be read ---


def test_da7_an_unreadable_grant_of_a_node_that_nobody_knows_is_harmless():
    w = World(node("n1"))
    w.see(model.RecordUnreadable("/serai/grants/n9/j.1", "garbage"))
    assert set(w.snapshot().nodes) == {"n1"}
    w.see(model.RecordGone("/serai/grants/n9/j.1"))
    assert set(w.snapshot().nodes) == {"n1"}
    w.see(model.RecordUnreadable("/serai/grants/n9/j.1", "garbage"))
    w.add(node("n9"))
    assert w.snapshot().nodes["n9"].status is NodeStatus.CLOSED


@pytest.mark.parametrize(
    ("key", "mend"),
    [
        ("/serai/jobs/j", model.JobGone("j", "jobs")),
        ("/serai/grants/n1/j.1", model.GrantGone("n1", "j", 1)),
        ("/serai/grants/n1/j.1", model.GrantSeen("n1", "j", 1, False)),
    ],
)
def test_da7_an_unreadable_allocation_closes_its_node_and_drops_no_use(key, mend):
    w = World(node("n1", gpus=2), node("n2", gpus=1))
    w.see(model.GrantSeen("n1", "j", 1, False), model.RecordUnreadable(key, "garbage"))
    view = w.snapshot().nodes["n1"]
    assert view.status is NodeStatus.CLOSED
    assert view.status_reason.code is ReasonCode.ALLOCATION_UNREADABLE
    assert view.status_reason.subjects == (key,)
    w.submit(job("a"), job("b", 1))
    assert w.cycle() == ["a"], "other nodes go on"
    assert w.where("a") == ["GPU-n2-0"]
    w.see(mend)
    assert w.snapshot().nodes["n1"].status is NodeStatus.READY
    assert w.cycle() == ["b"]


def test_da7_a_record_that_became_unreadable_keeps_what_it_holds():
    w = World(node("n1", gpus=1))
    w.submit(running("j", "n1", [piece("GPU-n1-0")]))
    w.see(model.RecordUnreadable("/serai/jobs/j", "garbage"))
    assert free(w) == (0, 0)
    assert w.snapshot().nodes["n1"].status is NodeStatus.CLOSED
    w.put(running("j", "n1", [piece("GPU-n1-0")]))
    assert w.snapshot().nodes["n1"].status is NodeStatus.READY
    assert free(w) == (0, 0)


def test_da7_the_grant_may_be_seen_after_the_record():
    w = World(node("n1"))
    w.see(model.RecordUnreadable("/serai/jobs/j", "garbage"), model.GrantSeen("n1", "j", 1, False))
    assert w.snapshot().nodes["n1"].status is NodeStatus.CLOSED


@pytest.mark.parametrize("key", ["", "/", "/serai/", "/serai/jobs", "/serai/tenants/x", "/other/jobs/x/y/z"])
def test_odd_keys_close_nothing_and_raise_nothing(key):
    w = World(node("n1"))
    w.see(model.RecordUnreadable(key, "?"))
    assert w.snapshot().nodes["n1"].status is NodeStatus.READY


# --- order of events ---


def test_lk7_a_record_older_than_the_newest_is_ignored():
    w = World(node("n1"))
    live = running("j", "n1", [piece("GPU-n1-0")])
    w.cluster.apply(model.JobSeen(replace(live, state=JobState.SUCCEEDED, allocation=None), 12), START_MS)
    w.cluster.apply(model.JobSeen(live, 10), START_MS)
    assert free(w) == (80 * GIB, 1000)


def test_a_job_stands_in_one_folder_whatever_the_order_of_the_listing():
    """LK-7: of two records the newer one counts; later ones are seen in their order, a new one before the old is gone."""
    w = World(node("n1"))
    waiting = job("j")
    live = running("j", "n1", [piece("GPU-n1-0")])
    w.cluster.apply(model.JobSeen(live, 10), START_MS)
    w.cluster.apply(model.JobSeen(waiting, 5), START_MS)
    w.cluster.apply(model.JobGone("j", "queue"), START_MS)
    assert list(w.snapshot().jobs) == ["j"]
    w.cluster.apply(model.JobSeen(replace(waiting, attempt=2), 20), START_MS)
    w.cluster.apply(model.JobGone("j", "jobs"), START_MS)
    assert list(w.snapshot().waiting_jobs) == ["j"]


def test_done_records_are_kept_for_readers_only():
    ended = job("j", state=JobState.FAILED)
    for keep in (False, True):
        cluster = Cluster(settings(), keep_done=keep)
        cluster.apply(model.JobSeen(ended, 3), START_MS)
        assert ("j" in cluster.snapshot(START_MS).done) is keep
        cluster.apply(model.JobGone("j", "done"), START_MS)
        snapshot = cluster.snapshot(START_MS)
        assert (dict(snapshot.done), cluster._listed) == ({}, {})


def test_events_about_what_is_not_there_are_harmless():
    w = World()
    w.see(
        model.JobGone("x", "jobs"),
        model.JobGone("x", "nowhere"),
        model.TaskGone("x", 1, 0),
        model.TenantGone("x"),
        model.InventoryGone("x"),
        model.ReportGone("x"),
        model.AdminGone("x"),
        model.GrantGone("x", "y", 1),
        model.TaskSeen(task(running("x", "n", []))),
    )
    w.now = 10_000
    assert w.snapshot().jobs == {}


ODD_JOBS = [
    running("odd", "nowhere", [piece("no such gpu", 1, 1, "none")]),
    replace(running("odd", "n1", [piece("GPU-n1-0", 10**9, 5000)]), state=JobState.PENDING),
    replace(running("odd", "n1", [piece("GPU-n1-0")]), state=JobState.RUNNING, attempt=7),
    replace(running("odd", "n1", []), state=JobState.LOST),
    job("odd", priority=10**9, tenant=""),
    replace(job("odd"), spec=replace(job("odd").spec, tasks=())),
    replace(job("odd"), state=JobState.CANCELLING),
    replace(job("odd"), state=JobState.SUCCEEDED),
]
ODD_EVENTS: list[model.Event] = [
    *(model.JobSeen(one, n) for n, one in enumerate(ODD_JOBS)),
    model.JobGone("odd", "jobs"),
    model.JobGone("odd", "queue"),
    *(
        model.TaskSeen(model.Task("odd", attempt, number, "n1", state, released=released, fault="?"))
        for attempt in (0, 1, 7)
        for number in (0, 9)
        for state in TaskState
        for released in (False, True)
    ),
    model.TaskGone("odd", 1, 0),
    model.InventorySeen(node("n1", gpus=0)),
    model.InventorySeen(node("n1", [gpu("n1", 0), gpu("n1", 0)], links=())),
    model.InventorySeen(node("n1", [gpu("n1", 0, memory=0, compute_milli=0)], cpu=0)),
    model.InventoryGone("n1"),
    model.ReportSeen(report("n1", -5, held={"": ("x",), "odd": ()}, foreign={"GPU-n1-0": 10**9})),
    model.ReportGone("n1"),
    model.TenantSeen(Tenant("", -5, -5, -5, weight=-1)),
    model.TenantGone(""),
    model.GrantSeen("n1", "odd", 1, True),
    model.GrantGone("n1", "odd", 1),
    model.RecordUnreadable("/serai/jobs/odd", "?"),
    model.UsageSeen(UsageHour("odd", 5, -7, (1,), ())),
]


@settings_of(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ODD_EVENTS), st.integers(-10, 5000)), max_size=25))
def test_no_event_however_odd_stops_the_cluster_property(events):
    cluster = Cluster(settings(lost_seconds=600))
    cluster.apply(model.InventorySeen(node("n1")), START_MS)
    now_ms = START_MS
    for event, seconds in events:
        now_ms += 1000 * seconds
        cluster.apply(event, now_ms)
        snapshot = cluster.snapshot(now_ms)
        settle(snapshot)
        plan = plan_cycle(snapshot, policy_from(settings()))
        dict(plan.waiting)
        cluster.usage_hours(now_ms)


def state_of(snapshot: Snapshot) -> object:
    return (
        {name: (v.row, v.status, v.gpus, v.uses, dict(v.labels)) for name, v in snapshot.nodes.items()},
        dict(snapshot.jobs),
        {t: {key: tuple(jobs) for key, jobs in lines.items()} for t, lines in snapshot.lines.items()},
        dict(snapshot.held),
        dict(snapshot.usage),
        dict(snapshot.tasks),
        snapshot.restless,
        snapshot.next_due_ms,
    )


@given(st.randoms(use_true_random=False))
def test_a_listing_gives_the_same_state_in_any_order(random: Random):
    live = [running(f"r{n}", "n1", [piece(f"GPU-n1-{n}")], tenant="ab"[n % 2]) for n in range(4)]
    events: list[model.Event] = [
        model.TenantSeen(Tenant("a", 10)),
        model.InventorySeen(node("n1")),
        model.InventorySeen(node("n2", [gpu("n1", 7)])),
        model.ReportSeen(report("n1", held={"old.1.0": ("GPU-n1-5",)})),
        model.AdminSeen(NodeAdmin("n1", labels={"rack": "r"})),
        model.GrantSeen("n1", "bad", 1, False),
        model.RecordUnreadable("/serai/jobs/bad", "?"),
        model.UsageSeen(UsageHour("a", START_MS - START_MS % HOUR_MS, START_MS, (5,) * 12, (5,) * 12)),
        model.TaskSeen(task(live[0], state=TaskState.EXITED, exit_code=0)),
        *(model.JobSeen(one, n + 1) for n, one in enumerate(live)),
        *(model.JobSeen(job(f"w{n}", n % 3), n + 10) for n in range(6)),
    ]
    shuffled = list(events)
    random.shuffle(shuffled)
    states = []
    for order in (events, shuffled):
        cluster = Cluster(settings())
        for event in order:
            cluster.apply(event, START_MS + 60_000)
        snapshot = cluster.snapshot(START_MS + 60_000)
        check_snapshot(snapshot)
        states.append(state_of(snapshot))
    assert states[0] == states[1]


def test_a_snapshot_does_not_change_after_it_was_taken():
    w = World(node("n1", gpus=2))
    w.submit(job("j"), running("r", "n1", [piece("GPU-n1-0")]))
    snapshot = w.snapshot()
    before = state_of(snapshot)
    w.see(model.TaskSeen(task(w.live("r"))), model.JobGone("j", "queue"), model.TenantSeen(Tenant("z")))
    w.end("r")
    w.add(node("n2"))
    w.snapshot()
    assert state_of(snapshot) == before


# --- use over time ---


def test_use_counts_from_the_allocation_to_the_confirmed_end():
    w = World(node("n1"))
    w.submit(job("j"))
    w.snapshot()
    w.now = 5
    w.cycle()
    w.now = 15
    w.put(cancelled(w.live("j"), w.now_ms))  # another record of the same allocation is not charged twice
    assert w.snapshot().usage == {"a": Use(10_000_000, 10_000 * 80 * GIB)}
    w.settle()
    w.now = 25
    w.end("j", 143)
    w.now = 100
    assert w.snapshot().usage == {"a": Use(20_000_000, 20_000 * 80 * GIB)}


def test_use_counts_from_the_allocation_though_it_is_seen_later():
    w = World(node("n1"))
    w.snapshot()
    w.now = 10
    w.submit(running("r", "n1", [piece("GPU-n1-0")]))
    assert w.snapshot().usage["a"].compute == 10_000_000


def test_stored_hours_supply_the_past_and_live_jobs_count_only_after_it():
    hour_ms = START_MS - START_MS % HOUR_MS
    until_ms = hour_ms + BUCKET_MS
    cluster = Cluster(settings())
    live = running("r", "n1", [piece("GPU-n1-0")])
    live = replace(live, allocation=replace(live.allocation, allocated_at_ms=hour_ms))
    hour = UsageHour("a", hour_ms, until_ms, (123,) + (0,) * 11, (0,) * 12)
    cluster.apply(model.JobSeen(live, 1), until_ms + 500)
    cluster.apply(model.UsageSeen(hour), until_ms + 500)
    assert cluster.snapshot(until_ms + 1000).usage["a"].compute == 123 + 1000 * 1000
    cluster.apply(model.UsageSeen(replace(hour, compute_milli_ms=(10**12,) * 12)), until_ms)
    assert cluster.snapshot(until_ms + 1000).usage["a"].compute == 123 + 1000 * 1000, (
        "watched hours are ignored"
    )


def test_usage_hours_are_those_that_changed():
    w = World(node("n1"))
    w.submit(job("j"))
    w.snapshot()
    w.cycle()
    w.now = 60
    [hour] = w.cluster.usage_hours(w.now_ms)
    assert (hour.tenant, sum(hour.compute_milli_ms)) == ("a", 60_000_000)
    w.end("j")
    assert w.cluster.usage_hours(w.now_ms) == ()


def test_next_due_is_the_next_moment_that_matters():
    w = World(node("n1", gpus=1), max_wait_seconds=1000, launch_deadline_seconds=300, lost_seconds=600)
    assert w.snapshot().next_due_ms is None
    w.submit(job("j"), job("late", not_before_ms=START_MS + 5000))
    assert w.snapshot().next_due_ms == START_MS + 5000
    w.now = 5
    assert w.snapshot().next_due_ms == START_MS + 1_000_000
    w.cycle()
    assert w.snapshot().next_due_ms == START_MS + 305_000
    w.run("j")
    w.now = 400
    assert w.snapshot().next_due_ms == START_MS + 1_000_000, "what runs has no deadline"


def test_a_committed_job_is_restless_only_when_something_must_be_done():
    w = World(node("n1"))
    w.submit(job("j"))
    w.cycle()
    w.run("j")
    assert w.snapshot().restless == frozenset()
    w.put(cancelled(w.live("j"), w.now_ms))
    assert w.snapshot().restless == {"j"}


def test_allocated_moves_the_record():
    w = World(node("n1"))
    w.submit(job("j"))
    plan = w.plan()
    record = allocated(plan.placements[0].job, plan.placements[0].allocation)
    assert record.state is JobState.ALLOCATED
    assert record.history[-1].state is JobState.ALLOCATED
    assert record.reason.code is ReasonCode.PLACED


def test_a_node_that_can_start_nothing_takes_no_work_until_it_says_otherwise():
    """Its agent reports, but its Docker Engine is down: no job is sent there to wait for its launch deadline."""
    w = World(node("n1"))
    w.see(model.ReportSeen(replace(report("n1", w.now_ms), closed="Docker does not answer")))
    w.submit(job("j"))
    assert w.cycle() == []
    assert w.snapshot().nodes["n1"].status is NodeStatus.CLOSED
    w.see(model.ReportSeen(report("n1", w.now_ms)))
    assert w.cycle() == ["j"]


def test_the_kinds_of_gpu_are_those_of_the_nodes_that_are_not_given_up():
    w = World(node("n1", gpus=2, model="big"), node("n2", gpus=1, memory=40 * GIB, model="small"))
    broken = gpu("n3", 0, 20 * GIB, "broken", unavailable="ecc")
    w.add(node("n3", gpus=[broken, gpu("n3", 1, model="big")]))
    names = lambda: [kind.model for kind in w.snapshot().kinds]  # noqa: E731
    assert names() == ["small", "big"], "each once, the smallest first, none that cannot be used"
    known = w.snapshot().kinds
    w.submit(running("a", "n2", [piece("GPU-n2-0", 40 * GIB)]))
    assert w.snapshot().kinds is known
    w.see(model.ReportGone("n2"))
    assert names() == ["small", "big"]
    w.now += w.settings.lost_seconds
    assert names() == ["big"]
    w.see(model.ReportSeen(report("n2", w.now_ms)), model.InventorySeen(node("n1", gpus=1, model="other")))
    assert names() == ["small", "big", "other"]
    w.see(model.InventoryGone("n3"), model.ReportGone("n3"))
    assert names() == ["small", "other"]
