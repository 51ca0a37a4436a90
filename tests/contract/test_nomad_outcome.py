"""How the engine judges what a real Nomad 1.6.3 showed, and the tables of EX-1, EX-2 and EX-4. Pure."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import msgspec
import pytest

from coordinator.engines.nomad_outcome import AttemptSeen, has_copies, observed, placement_sentence
from coordinator.engines.nomad_records import (
    AllocationSeen,
    EvaluationSeen,
    JobSeen,
    NodeSeen,
    PlacementMetric,
    StreamLine,
    time_ms,
)
from coordinator.model import Task, TaskState

RECORDED = {
    entry["tag"]: entry["body"]
    for entry in json.loads((pathlib.Path(__file__).parents[1] / "fakenomad" / "recorded.json").read_text())
}


def recorded(tag: str, *, stopped: bool = False) -> Task:
    """What the engine makes of the recorded allocations of one task (there named rank-0)."""
    text = json.dumps(RECORDED[f"allocs.{tag}"]).replace("rank-", "task-")
    allocations = msgspec.json.decode(text, type=tuple[AllocationSeen, ...])
    return observed(AttemptSeen("j", 1, {0: "n1"}, stopped, {}), allocations)[0]


@pytest.mark.parametrize(
    ("tag", "code", "signal", "oom", "fault", "words"),
    [
        ("exit3", 3, None, False, "", "non-zero exit code: 3"),
        ("oom", 137, 9, True, "out_of_memory", "OOM Killed"),
        ("sig", 0, None, False, "", ""),
        ("badimg", None, None, False, "launch_failed", "no such host"),
        ("badcmd", None, None, False, "launch_failed", "/nope"),
        ("gone", None, None, False, "launch_failed", "/dev/nvidia9"),
        ("deregistered", 137, 9, False, "", "137"),
        ("deregdown", None, None, False, "node_lost", "lost its node"),
        ("maxdisc-dereg", 9, None, False, "", ""),
    ],
)
def test_recorded_ends(
    tag: str, code: int | None, signal: int | None, oom: bool, fault: str, words: str
) -> None:
    task = recorded(tag, stopped=True)
    assert task.state is TaskState.EXITED
    assert (task.exit_code, task.signal, task.oom_killed, task.fault, task.released) == (
        code,
        signal,
        oom,
        fault,
        True,
    )
    assert words in task.detail
    assert (task.ended_at_ms or 0) >= (task.started_at_ms or 0) > 0 or code is None


def test_recorded_second_copy_holds_the_slices_until_it_is_dead_too() -> None:
    """RR-11: the first allocation is dead, the second one runs."""
    allocations = msgspec.convert(RECORDED["allocs.node_lost"], tuple[AllocationSeen, ...])
    assert has_copies(allocations)
    task = recorded("node_lost", stopped=True)
    assert (task.state, task.fault, task.released) == (TaskState.EXITED, "node_lost", False)
    # As long as the job is not stopped, even two dead ones may get a third.
    assert not recorded("stopafter").released
    assert recorded("stopafter", stopped=True).released


def test_recorded_return_from_a_disconnect_runs_on() -> None:
    task = recorded("maxdisc")
    assert (task.state, task.released, task.detail) == (TaskState.RUNNING, False, "")


def test_recorded_placement_failures_name_the_node_or_what_it_lacks() -> None:
    sentences = []
    for tag in ("eval.placement_failed", "eval.exhausted", "eval.node_down"):
        evaluation = msgspec.convert(RECORDED[tag], EvaluationSeen)
        assert evaluation.is_settled
        assert evaluation.failed_groups
        sentences += [placement_sentence(metric) for metric in evaluation.failed_groups.values()]
    assert "node 00000000-0000-0000-0000-000000000000 is not among its 2 ready nodes" in sentences[0]
    assert "not enough memory" in sentences[1]
    assert "is not among its 1 ready nodes" in sentences[2]
    assert (
        placement_sentence(PlacementMetric())
        == "Nomad found no place: the node is not among its 0 ready nodes"
    )


def test_recorded_jobs_nodes_and_events_can_be_read() -> None:
    job = msgspec.convert(RECORDED["job.dead"], JobSeen)
    assert (job.status, job.stop, job.attempt, len(job.task_groups or ())) == ("dead", False, None, 1)
    assert [node.version for node in msgspec.convert(RECORDED["nodes"], tuple[NodeSeen, ...])] == [
        "1.6.3",
        "1.6.3",
    ]
    lines = msgspec.convert(RECORDED["event.stream"], tuple[StreamLine, ...])
    assert {job for line in lines for job in line.job_ids} >= {"t.ev-1795977562"}
    assert msgspec.json.decode(b"{}", type=StreamLine).job_ids == frozenset()


def allocation(status: str, *events: dict[str, Any], **given: Any) -> AllocationSeen:
    state = {"State": "dead", "StartedAt": "2026-11-29T18:37:43.00587232Z", "FinishedAt": "2026-11-29T18:37:44Z",
             "Events": list(events), **given.pop("state", {})}  # fmt: skip
    body = {"ID": "a", "JobID": "j", "NodeID": "n", "TaskGroup": "task-0", "ClientStatus": status,
            "TaskStates": {"main": state}, "ModifyTime": 5_000_000, **given}  # fmt: skip
    return msgspec.convert(body, AllocationSeen)


def judged(seen: AllocationSeen, *, stopped: bool = False) -> Task:
    return observed(AttemptSeen("j", 1, {0: "n1"}, stopped, {}), [seen])[0]


def terminated(code: str, oom: str = "false", signal: str = "0") -> dict[str, Any]:
    return {"Type": "Terminated", "Details": {"exit_code": code, "signal": signal, "oom_killed": oom}}


@pytest.mark.parametrize("status", ["complete", "failed"])
@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize(
    ("details", "code", "signal", "oom", "fault"),
    [
        (terminated("137", "true"), 137, 9, True, "out_of_memory"),
        (terminated("137"), 137, 9, False, ""),
        (terminated("143"), 143, 15, False, ""),
        (terminated("0"), 0, None, False, ""),
        (terminated("0", "true"), 0, None, True, ""),
        (terminated("0", signal="11"), 0, 11, False, ""),
        (terminated("255"), 255, None, False, ""),
    ],
)
def test_the_terminated_event_decides_and_not_nomads_status(
    status: str, killed: bool, details: dict[str, Any], code: int, signal: int | None, oom: bool, fault: str
) -> None:
    """EX-1, EX-2: whether the stop was asked is the leader's knowledge; here only what happened is told."""
    events = [{"Type": "Killing"}, details, {"Type": "Killed"}] if killed else [details]
    task = judged(allocation(status, *events))
    assert (task.exit_code, task.signal, task.oom_killed, task.fault, task.released) == (
        code,
        signal,
        oom,
        fault,
        True,
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "Failed to pull `a/b:1`: API error (404): manifest for a/b:1 not found: manifest unknown",
            "image_unavailable",
        ),
        (
            "Failed to pull `a/b:1`: API error (404): pull access denied for a/b, repository does not exist",
            "image_unavailable",
        ),
        (
            "Failed to pull `a/b:1`: API error (500): unauthorized: authentication required",
            "image_unavailable",
        ),
        (
            "Failed to pull `a/b:1`: API error (500): denied: requested access to the resource is denied",
            "image_unavailable",
        ),
        (
            "Failed to pull `a/b:1`: API error (500): received unexpected HTTP status: 502 Bad Gateway",
            "launch_failed",
        ),
        (
            "Failed to pull `a/b:1`: API error (500): Get https://r/v2/: net/http: request canceled (Client.Timeout exceeded)",
            "launch_failed",
        ),
        ("Failed to pull `a/b:1`: API error (500): dial tcp: lookup r: no such host", "launch_failed"),
        ("Failed to pull `a/b:1`: API error (500): toomanyrequests: retry later", "launch_failed"),
        (
            "Failed to start container 1: API error (500): no such image after 503 from the registry",
            "launch_failed",
        ),
        (
            "Failed to start container 1: OCI runtime create failed: permission denied: unknown",
            "launch_failed",
        ),
    ],
)
def test_images_that_may_come_later_are_told_apart_from_those_that_never_will(text: str, fault: str) -> None:
    """EX-4."""
    event = {"Type": "Driver Failure", "DisplayMessage": text, "Details": {"driver_error": text}}
    task = judged(allocation("failed", event, state={"StartedAt": None}))
    assert (task.exit_code, task.fault, task.detail) == (None, fault, text)


def test_end_of_which_nomad_kept_no_record_is_not_taken_for_success() -> None:
    """Only the last ten events are kept."""
    task = judged(allocation("complete", {"Type": "Restart Signaled"}))
    assert (task.exit_code, task.fault, task.released) == (None, "node_lost", True)


@pytest.mark.parametrize("status", ["pending", "running", "unknown", "lost"])
def test_nothing_is_released_before_the_client_says_so(status: str) -> None:
    assert not judged(allocation(status, terminated("0")), stopped=True).released


def test_task_without_an_allocation_says_nothing_until_nothing_can_come() -> None:
    nodes = {0: "n1", 1: "n2"}
    assert observed(AttemptSeen("j", 1, nodes, False, {"task-0": PlacementMetric()}), ()) == ()
    tasks = observed(AttemptSeen("j", 1, nodes, True, {"task-0": PlacementMetric()}, 7), ())
    assert [(t.fault, t.released, t.ended_at_ms) for t in tasks] == [("launch_failed", True, 7)] * 2
    assert "another task" in tasks[1].detail


def test_times_with_and_without_digits_and_gos_zero() -> None:
    assert time_ms("1970-01-01T00:00:01.00587232Z") == 1005
    assert time_ms("1970-01-01T00:00:01Z") == 1000
    assert time_ms("1970-01-01T00:00:01.5Z") == 1500
    assert (time_ms(None), time_ms(""), time_ms("0001-01-01T00:00:00Z")) == (None, None, None)


def test_what_nomad_ends_though_it_is_wanted_did_not_end_by_itself() -> None:
    """Seed 714539 of the simulation: a machine came back, and what had yet to start there was over."""
    killing, never = {"Type": "Killing"}, {"StartedAt": None, "FinishedAt": None}
    judged_so = {
        (False, "run"): "launch_failed",
        (True, "run"): "task_vanished",
        (False, "stop"): "",
        (True, "stop"): "",
    }
    for (has_run, desired), fault in judged_so.items():
        state = {} if has_run else never
        task = judged(allocation("complete", killing, state=state, DesiredStatus=desired))
        assert (task.state, task.exit_code, task.fault) == (TaskState.EXITED, None, fault), (has_run, desired)
