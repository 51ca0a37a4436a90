"""What a cluster remembers of jobs that have gone: nothing that piles up. And what is news to a cycle."""

from __future__ import annotations

from msgspec.structs import replace

from coordinator import model
from coordinator.cluster import Cluster
from coordinator.config import Settings
from coordinator.lifecycle import allocated
from coordinator.model import JobState, TaskState, Tenant
from tests.builders import START_MS, job, node, piece, report, running, task


def test_moments_of_jobs_that_have_gone_do_not_pile_up() -> None:
    """Each waits at most 72 h and starts within 10 minutes, so that its moments come long after it has gone."""
    cluster = Cluster(Settings())
    for number in range(20_000):
        now_ms = START_MS + number
        waiting = job(f"j{number}")
        live = running(f"j{number}", "n1", [piece("GPU-n1-0")])
        for event in (
            model.JobSeen(waiting, 3 * number + 1),
            model.JobSeen(live, 3 * number + 2),
            model.TaskSeen(task(live)),
            model.JobGone(live.id, "jobs"),
            model.TaskGone(live.id, 1, 0),
        ):
            cluster.apply(event, now_ms)
        if number % 100 == 0:
            cluster.snapshot(now_ms)
    assert len(cluster._waits) + len(cluster._dues) < 2_500
    cluster.apply(model.JobSeen(job("stays"), 100_000), START_MS)
    waits_ms = 1000 * Settings().fairness.max_wait_seconds
    assert cluster.snapshot(START_MS + 20_000).next_due_ms == START_MS + waits_ms


def test_news_is_what_a_cycle_may_decide_otherwise_for() -> None:
    cluster = Cluster(Settings())
    uuid = node("n1", gpus=1).gpus[0].uuid
    waiting = job("j1")
    placed = running("j1", "n1", [piece(uuid)])
    assert placed.allocation is not None
    live = allocated(waiting, placed.allocation)
    ended = replace(live, state=JobState.SUCCEEDED, allocation=None)
    steps: list[tuple[str, model.Event, bool]] = [
        ("inventory", model.InventorySeen(node("n1", gpus=1)), True),
        ("first report", model.ReportSeen(report("n1", START_MS)), True),
        ("same report, later", model.ReportSeen(report("n1", START_MS + 1)), False),
        ("a fault", model.ReportSeen(report("n1", START_MS + 2, faults={uuid: "xid"})), True),
        ("a stranger's memory", model.ReportSeen(report("n1", START_MS + 3, foreign={uuid: 900})), True),
        ("an attempt on a GPU", model.ReportSeen(report("n1", START_MS + 4, held={"x.1.0": (uuid,)})), True),
        ("well again", model.ReportSeen(report("n1", START_MS + 5)), True),
        ("tenant", model.TenantSeen(Tenant("a", 1)), True),
        ("submit", model.JobSeen(waiting, 1), True),
        ("reason written", model.JobSeen(replace(waiting, failures=1), 2), True),
        ("placed", model.JobSeen(live, 3), False),
        ("gone from the queue with it", model.JobGone("j1", "queue"), False),
        ("its grant", model.GrantSeen("n1", "j1", 1, False), False),
        ("starting", model.TaskSeen(task(live, state=TaskState.STARTING)), False),
        ("running", model.TaskSeen(task(live)), False),
        ("cancel asked for", model.JobSeen(replace(live, state=JobState.CANCELLING), 4), True),
        ("task ended", model.TaskSeen(task(live, state=TaskState.EXITED)), True),
        ("end written", model.JobSeen(ended, 5), True),
        ("record gone", model.JobGone("j1", "jobs"), False),
        ("node silent", model.ReportGone("n1"), True),
        ("cordon", model.AdminSeen(model.NodeAdmin("n1", cordoned=True)), True),
    ]
    for name, event, is_news in steps:
        before = cluster.news
        cluster.apply(event, START_MS + 10)
        assert (cluster.news > before) is is_news, name
    before = cluster.news
    lost_ms = START_MS + 10 + 1000 * Settings().lost_seconds
    assert cluster.snapshot(lost_ms - 1).news == before
    assert cluster.snapshot(lost_ms).news > before, "given up by the time that passed"


def test_a_report_that_only_brings_newer_figures_gives_the_view_that_a_whole_look_would() -> None:
    """The short way and the long way end in the same view; and placement sees the very same row."""
    uuid = node("n1", gpus=2).gpus[0].uuid
    first = report("n1", START_MS, foreign={uuid: 900})
    figures = tuple(replace(gpu, temperature_celsius=70, memory_used_mib=901) for gpu in first.gpus)
    newer = replace(first, at_ms=START_MS + 1, sequence=2, gpus=figures, cpu_used_milli=5)
    short, long = Cluster(Settings()), Cluster(Settings())
    for cluster in (short, long):
        cluster.apply(model.InventorySeen(node("n1", gpus=2)), START_MS)
        cluster.apply(model.ReportSeen(first), START_MS)
    row = short.snapshot(START_MS).nodes["n1"].row
    short.apply(model.ReportSeen(newer), START_MS)
    long.apply(model.ReportSeen(newer), START_MS)
    found, expected = (cluster.snapshot(START_MS + 1).nodes["n1"] for cluster in (short, long))
    assert found.report == newer
    assert found.row is row
    assert found.gpus == expected.gpus
    assert found.gpus[0].report == figures[0]
    assert (found.status, found.row) == (expected.status, expected.row)
