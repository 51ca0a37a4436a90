"""A node that is back before Nomad has ended what it was given up with (RR-11).

A job's image is pulled for long while its node falls silent, so that no container of it stands for it on the node. It
is given up, and withdrawn from Nomad; the node's agent is back long before its Nomad client, which still knows nothing
of the withdrawal and starts it.
"""

from __future__ import annotations

import pytest
from attrs import evolve

from coordinator.config import Settings
from jobspecs.spec import JobSpec, TaskSpec
from tests.simulation.scenario import Fault, Scenario, Wish
from tests.simulation.world import Result, play
from vgpu.slices import SliceRequest

WHOLE = SliceRequest(1, None, 1000)
CUT_AT, BACK_AT, CLIENT_BACK_AT = 2.0, 35.0, 58.0


def _wish(at: float, name: str, *words: str, cancel_after: float | None = None) -> Wish:
    task = TaskSpec(image="simulated", command=("sim", *words), gpus=WHOLE, cpu_milli=500, memory_mib=512)
    return Wish(at, JobSpec(name, "team-a", (task,), stop_grace_seconds=4), False, cancel_after)


def _scenario(*faults: Fault, cancel_after: float | None = None) -> Scenario:
    lost = _wish(1.0, "lost", "run_ms=25000", "term=ignore", "pull_ms=45000", cancel_after=cancel_after)
    cuts = (
        Fault(CUT_AT, "agent_cut", BACK_AT - CUT_AT),
        Fault(CUT_AT, "nomad_client_cut", CLIENT_BACK_AT - CUT_AT),
    )
    settings = Settings(
        engine="nomad",
        report_seconds=2,
        node_lease_seconds=10,
        lost_seconds=20,
        launch_deadline_seconds=25,
        stop_deadline_seconds=15,
        orphan_grace_seconds=6,
        back_off_seconds=1,
        log_retention_seconds=20,
    )
    next_one = _wish(33.5, "next", "run_ms=5000")
    return Scenario(7, "nomad", 2, ("1x16GiB:T4",), settings, (lost, next_one), cuts + faults)


def _starts(result: Result) -> list[tuple[float, str]]:
    """(time, job) of each start of a container."""
    lines = (line.split() for line in result.story if " n1 starts " in line)
    return [(float(words[0]), words[3]) for words in lines]


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(_scenario(), id="the same leader"),
        pytest.param(_scenario(Fault(33.0, "leader_crash", 1.0)), id="another leader"),
        pytest.param(_scenario(cancel_after=20.0), id="the job is over"),
        pytest.param(
            _scenario(Fault(33.0, "leader_crash", 1.0), cancel_after=20.0), id="over, and another leader"
        ),
        pytest.param(_scenario(Fault(31.0, "nomad_down", 20.0)), id="Nomad is down when it is given up"),
    ],
)
def test_its_gpus_are_not_free_before_its_end_is_confirmed(scenario: Scenario) -> None:
    result = play(scenario)
    print("\n".join(result.story))
    assert result.failure == ""
    assert evolve(result, story=()).faults["agent_cut"] == 1
