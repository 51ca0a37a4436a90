"""Replays: traces as they are read, the pool against the core, measures by hand, and the command."""

from __future__ import annotations

import gzip
import json
from random import Random
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from coordinator.cli.simulate import simulate
from coordinator.config import FairnessSettings
from coordinator.simulate.drawing import BINS, binned, picture
from coordinator.simulate.hardware import Group, HardwareInvalid, hardware
from coordinator.simulate.measures import percentile
from coordinator.simulate.study import Study, StudyInvalid, quotas_of, study
from coordinator.simulate.trace import UNLIMITED_MS, Trace, TraceInvalid, TraceJob, from_rows, read

HOUR_MS = 3_600_000


def jobs_of(*rows: tuple[str, float, int, float]) -> Trace:
    """(tenant, submit in hours, GPUs, hours)."""
    columns = ("tenant", "submit_s", "gpus", "duration_s")
    return from_rows(
        "hand",
        [
            dict(zip(columns, (tenant, str(3600 * submit), str(gpus), str(3600 * hours)), strict=True))
            for tenant, submit, gpus, hours in rows
        ],
    )


def replayed(trace: Trace, spec: str, policy: str = "serai", exact: bool = False, **fairness: int) -> Study:
    return study(
        trace, hardware(spec), quotas_of(trace, "equal"), FairnessSettings(policy=policy, **fairness), exact
    )


def started(found: Study) -> list[float | None]:
    """Hours at which the jobs started, in the order of the trace."""
    return [None if at is None else at / HOUR_MS for at in found.outcome.starts_ms]


# --- traces and clusters ---


def test_our_own_format():
    rows = [
        {"tenant": "b", "submit_s": "7.5", "duration_s": "60", "gpus": "2", "tasks": "3", "memory_mib": "1024",
         "compute_milli": "250", "max_runtime_s": "90", "priority": "2", "job_id": "x", "withdrawn_s": "99"},
        {"tenant": "a", "submit_s": "0", "duration_s": "60", "gpus": "1", "max_runtime_s": ""},
        {"tenant": "a", "submit_s": "1", "duration_s": "60", "gpus": "1", "max_runtime_s": "10"},
    ]  # fmt: skip
    trace = from_rows("own", rows)
    assert trace.tenants == ["a", "b"]
    assert trace.jobs == [
        TraceJob("job-000001", 0, 0, 1, 60_000, UNLIMITED_MS),
        TraceJob("job-000002", 0, 1000, 1, 10_000, 10_000),  # its limit ends it
        TraceJob("x", 1, 7500, 6, 60_000, 90_000, 99_000, 3, 1024, 250, 2),
    ]
    assert (trace.jobs[2].size, trace.is_whole) == (1.5, False)


def test_the_original_philly_columns(tmp_path):
    path = tmp_path / "philly.csv.gz"
    text = "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-03 09:00:10,20,4,80,vc\n2017-10-03 09:00:00,5,1,5,vc\n"
    path.write_bytes(gzip.compress(text.encode()))
    trace = read(path)
    assert [(job.submit_ms, job.gpus, job.duration_ms) for job in trace.jobs] == [
        (0, 1, 5000),
        (10_000, 4, 20_000),
    ]
    assert trace.name == "philly"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"submit_s": "0", "duration_s": "1", "gpus": "1"}, "tenant"),
        ({"tenant": "a", "submit_s": "0", "duration_s": "1"}, "gpus"),
        ({"tenant": "a", "submit_s": "x", "duration_s": "1", "gpus": "1"}, "x"),
        ({"tenant": "a", "submit_s": "-1", "duration_s": "1", "gpus": "1"}, "submit_s"),
        ({"tenant": "a", "submit_s": "0", "duration_s": "1", "gpus": "-1"}, "gpus"),
        ({"tenant": "a", "submit_s": "0", "duration_s": "1", "gpus": "1", "compute_milli": "1500"}, "1000"),
    ],
)
def test_a_bad_line_is_named(row, named):
    with pytest.raises(TraceInvalid, match="line 2 of hand") as error:
        from_rows("hand", [row])
    assert named in str(error.value)


def test_clusters_from_a_short_text():
    assert hardware("64").is_counted
    assert hardware("64").gpus == 64
    mixed = hardware("8x8, 4x2@24")
    assert mixed.groups == [Group(8, 8, 81920), Group(4, 2, 24 * 1024)]
    assert (mixed.gpus, mixed.per_node, mixed.is_even) == (72, 8, False)
    assert len(mixed.inventories()) == 12
    for text in ("", "8x", "0", "x8", "8x8@", "8*8", "0x8"):
        with pytest.raises(HardwareInvalid):
            hardware(text)


def test_quotas_from_a_short_text():
    trace = jobs_of(("a", 0, 1, 1), ("b", 0, 3, 1), ("c", 0, 4, 1))
    assert quotas_of(trace, "equal") == [1 / 3] * 3
    assert quotas_of(trace, "gpu-hours") == [1 / 8, 3 / 8, 4 / 8]
    assert quotas_of(trace, "a=1,c=3") == [0.25, 0, 0.75]
    for text in ("nobody=1", "a=x", "a=0", "half"):
        with pytest.raises(StudyInvalid):
            quotas_of(trace, text)


# --- the pool is the core ---


def random_trace(seed: int, count: int = 120) -> Trace:
    random = Random(seed)
    rows = [
        (
            random.choice("aabc"),
            random.uniform(0, 40),
            random.choice((1, 1, 1, 2, 4, 8)),
            random.uniform(0.1, 9),
        )
        for _ in range(count)
    ]
    return jobs_of(*((t, round(at * 3600) / 3600, g, round(h * 3600) / 3600) for t, at, g, h in rows))


@pytest.mark.parametrize("policy", ["space-time", "serai"])
@pytest.mark.parametrize("seed", range(4))
def test_the_pool_starts_every_job_when_the_core_does(seed, policy):
    """Counting only: the same policy functions on the same figures, and reservations that come to the same though one
    keeps GPUs and the other their number; so the same to the second. (The core counts nodes of one GPU, and jobs as
    gangs of them. Under `space-time` only the core reserves, beyond the bounded wait.)"""
    trace, wait = random_trace(seed), 72 * 3600 if policy == "serai" else 10**7
    fast, exact = (
        replayed(trace, "12", policy, is_exact, max_wait_seconds=wait) for is_exact in (False, True)
    )
    assert (fast.core, exact.core) == ("pool", "cycle")
    assert started(fast) == started(exact)
    waits = [
        start - job.submit_ms / HOUR_MS for start, job in zip(started(fast), trace.jobs, strict=True) if start
    ]
    assert max(waits) > 24
    assert fast.figures == pytest.approx(exact.figures)


def test_slices_and_uneven_nodes_go_through_the_core():
    rows = [
        {
            "tenant": "a",
            "submit_s": "0",
            "duration_s": "60",
            "gpus": "1",
            "memory_mib": "4096",
            "compute_milli": "500",
        }
    ] * 3
    found = replayed(from_rows("slices", rows), "1x1")
    assert found.core == "cycle"
    assert started(found) == [0.0, 0.0, 60 / 3600]
    assert replayed(jobs_of(("a", 0, 1, 1)), "1x8,1x4").core == "cycle"


# --- measures, by hand ---


def test_the_measures_of_a_small_case():
    """Two GPUs; a fills both for 2 h, b wants one from the first hour on and gets it when a has ended."""
    found = replayed(jobs_of(("a", 0, 2, 2), ("b", 1, 1, 1), ("b", 2, 1, 1)), "2")
    assert started(found) == [0, 2, 2]
    figures = found.figures
    # entitled: a 2 then 1, b 0 then 1, then 2: 2 + 2 + 2 GPU-hours, of which b is short of 1
    assert figures["share_error"] == pytest.approx(100 * 1 / 6)
    assert figures["max_lag_gpu_hours"] == pytest.approx(1)
    assert figures["jct_mean_hours"] == pytest.approx((2 + 2 + 1) / 3)
    assert figures["wait_mean_hours"] == pytest.approx(1 / 3)
    assert figures["makespan_hours"] == pytest.approx(3)
    assert figures["utilisation"] == pytest.approx(100)
    # b's first job: 2 h for 1 h of work; demand over its life 3 and 2 GPUs... of 2: a mean of 1.25
    contention = ((2 + 1) + (1 + 1)) / 2 / 2
    assert figures["rho_worst"] == pytest.approx(2 / contention)
    a, b = found.tenants
    assert (a["received_share"], b["wait_mean_hours"]) == (pytest.approx(100 * 4 / 3), pytest.approx(0.5))


def test_percentiles_lie_between_neighbours():
    assert [percentile([0.0, 10.0], p) for p in (0, 50, 99, 100)] == [0, 5, pytest.approx(9.9), 10]
    assert percentile([], 50) == 0


# --- the picture and the command ---


def test_the_picture_shows_what_was_held():
    timeline = [(0, (2.0, 0.0)), (HOUR_MS, (1.0, 1.0)), (2 * HOUR_MS, (0.0, 0.0))]
    means = binned(timeline, 2)
    assert len(means) == BINS
    assert (means[0], means[-1]) == ([pytest.approx(2), 0], [pytest.approx(1), pytest.approx(1)])
    root = ElementTree.fromstring(picture("<a> & b", ["x<y", "b"], timeline, 2))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "x<y" in texts
    assert ElementTree.fromstring(picture("nothing", [], [], 2)) is not None


def test_the_command_prints_and_writes(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("tenant,submit_s,duration_s,gpus\na,0,3600,2\nb,0,3600,1\nb,10,3600,1\n")
    arguments = [
        str(path),
        "--nodes",
        "1x2",
        "--policy",
        "serai",
        "--policy",
        "space-time",
        "--out",
        str(tmp_path / "out"),
    ]
    done = CliRunner().invoke(simulate, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "share error E" in done.output
    for policy in ("serai", "space-time"):
        document = json.loads((tmp_path / "out" / f"{policy}.json").read_text())
        assert (document["policy"], document["gpus"], document["jobs"]) == (policy, 2, 3)
        assert [row["tenant"] for row in document["tenants"]] == ["a", "b"]
        lines = (tmp_path / "out" / f"{policy}.csv").read_text().splitlines()
        assert lines[0].startswith("job_id,tenant,gpus,submit_s,start_s,end_s,wait_s")
        assert len(lines) == 4
        ElementTree.fromstring((tmp_path / "out" / f"{policy}.svg").read_text())
    printed = CliRunner().invoke(simulate, [*arguments, "-o", "json"], catch_exceptions=False)
    assert [one["policy"] for one in json.loads(printed.stdout)] == ["serai", "space-time"]
