"""A few rounds of `make kill-rounds`: the leader killed and paused, an agent killed, under load."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.kill_rounds import rounds

pytestmark = pytest.mark.etcd


async def test_nothing_is_lost_and_nothing_runs_twice(tmp_path: Path) -> None:
    """RR-10, LE-4, RR-2: one SIGKILL and one SIGSTOP of the leader. The times are for the benchmark to judge."""
    row = await rounds(tmp_path, 2, jobs_a_round=12)
    assert (row["rounds"], row["jobs"]) == (2, 32)
    assert (row["lost"], row["doubled"]) == (0, 0)
    print(row)
