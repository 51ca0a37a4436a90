"""The end-to-end bench runs, checks itself and tells what was promised. How fast it is, is no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "build/bench/e2e-smoke.json"
RATES = {
    "submit", "rate", "jobs", "nodes", "until", "jobs_per_second", "p50_ms", "p99_ms",
    "etcd_cpu_us_per_job", "leader_cpu_us_per_job", "api_cpu_us_per_job",
}  # fmt: skip
TAKEOVER = {"waiting", "running", "cold_ms", "warm_ms"}


def test_a_small_run_of_every_kind() -> None:
    RESULT.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.benchmarks.e2e", "--name", RESULT.stem, "--runs", "1"]
    command += [
        "--jobs",
        "200",
        "--nodes",
        "30",
        "--waiting",
        "300",
        "--running",
        "60",
        "--growth-seconds",
        "4",
    ]
    command += ["--modes", "batch,single-end,takeover,growth"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "Slurm 22.05" in run.stdout
    result = json.loads(RESULT.read_text())
    batch, single, takeover, growth = result["rows"]
    assert batch.keys() >= RATES
    assert single.keys() >= RATES
    assert (batch["submit"], batch["until"], batch["jobs"], batch["nodes"]) == ("batch", "running", 200, 30)
    assert (single["submit"], single["until"], single["rate"]) == ("single", "end", 0)
    assert (
        min(row[f"{part}_cpu_us_per_job"] for row in (batch, single) for part in ("etcd", "leader", "api"))
        > 0
    )
    assert takeover.keys() >= TAKEOVER
    assert takeover["cold_ms"] > 0
    assert growth["watches_lost"] == 0
    assert {"cores", "python", "etcd", "grpcio"} <= result["machine"].keys()
