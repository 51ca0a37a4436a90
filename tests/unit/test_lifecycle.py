"""The state table, the shown state, and every rule of `settle`, each with its exit code and reason."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coordinator import model
from coordinator.lifecycle import (
    EDGES,
    IllegalTransition,
    allocated,
    cancelled,
    check,
    settle,
    shown_state,
)
from coordinator.model import Allocation, Job, JobState, TaskPlacement, TaskState
from tests.builders import START_MS, World, job, node, piece, running, task
from vgpu.reasons import Reason, ReasonCode

S, T = JobState, TaskState


def gang(id: str = "g", nodes: tuple[str, ...] = ("n1", "n2"), **changes: object) -> Job:
    """A live job with one task on each node."""
    tasks = tuple(
        TaskPlacement(n, name, (piece(f"GPU-{name}-0"),), 1000, 1024) for n, name in enumerate(nodes)
    )
    fields = {"state": S.ALLOCATED, "allocation": Allocation(1, tasks, START_MS), **changes}
    return job(id, count=len(nodes), **fields)


def world(*jobs: Job, **changes: object) -> World:
    one = World(node("n1"), node("n2"), **changes)
    one.submit(*jobs)
    return one


def ends(world: World, one: Job, *tasks: dict[str, object]) -> Job:
    """The tasks end as given; the record that is written then."""
    for number, facts in enumerate(tasks):
        seen = task(one, number, T.EXITED, ended_at_ms=world.now_ms, **facts)
        world.see(model.TaskSeen(seen))
    [transition] = world.settle()
    return transition.after


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_state_has_a_row_and_every_edge_says_what_happened():
    assert set(EDGES) == set(S)
    assert all(len(why) > 10 for edges in EDGES.values() for why in edges.values())
    assert all(not EDGES[state] for state in S if state.is_final)


def test_every_state_can_be_reached_and_left_for_an_end():
    def reachable(state: JobState, seen: frozenset[JobState] = frozenset()) -> set[JobState]:
        return {state}.union(*(reachable(n, seen | {state}) for n in EDGES[state] if n not in seen))

    assert reachable(S.PENDING) == set(S)
    assert all(any(end.is_final for end in reachable(state)) for state in S)


def test_cancel_is_legal_in_every_state_that_is_not_final():
    """CT-1."""
    for state in S:
        if not state.is_final and state is not S.CANCELLING:
            assert EDGES[state].keys() & {S.CANCELLING, S.CANCELLED}


@pytest.mark.parametrize(
    ("before", "after"), [(S.SUCCEEDED, S.PENDING), (S.CANCELLED, S.ALLOCATED), (S.PENDING, S.RUNNING)]
)
def test_an_edge_that_is_not_in_the_table_is_refused(before, after):
    with pytest.raises(IllegalTransition, match=f"{before.value} to {after.value}"):
        check(before, after)


def test_an_ended_job_takes_no_allocation():
    """LK-7."""
    ended = job("j", state=S.SUCCEEDED)
    with pytest.raises(IllegalTransition):
        allocated(ended, Allocation(1, (), START_MS))


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        ([None, None], S.ALLOCATED),
        ([T.PREPARED, T.PREPARED], S.ALLOCATED),
        ([T.STARTING, None], S.STARTING),
        ([T.RUNNING, None], S.STARTING),
        ([T.RUNNING, T.PREPARED], S.STARTING),
        ([T.RUNNING, T.STARTING], S.STARTING),
        ([T.RUNNING, T.RUNNING], S.RUNNING),
        ([T.RUNNING, T.EXITED], S.RUNNING),
        ([T.EXITED, None], S.STARTING),
    ],
)
def test_shown_state(states, shown):
    one = gang()
    tasks = [task(one, n, state) for n, state in enumerate(states) if state is not None]
    assert shown_state(one, tasks) is shown
    assert shown_state(replace(one, attempt=2), tasks) is S.ALLOCATED, "tasks of another attempt say nothing"


def test_written_states_are_shown_as_they_are():
    for state in (S.PENDING, S.CANCELLING, S.EVICTING, S.SUCCEEDED):
        assert shown_state(job("j", state=state), []) is state


# --- cancel ----------------------------------------------------------------------------------------------------------


def test_cancel_of_a_waiting_job_is_final_at_once():
    after = cancelled(job("j"), START_MS + 5)
    assert (after.state, after.ended_at_ms, after.reason) == (
        S.CANCELLED,
        START_MS + 5,
        Reason(ReasonCode.CANCELLED_BY_USER),
    )


def test_cancel_of_a_live_job_waits_for_its_end_and_twice_is_once():
    """CT-1."""
    after = cancelled(gang(), START_MS)
    assert after.state is S.CANCELLING
    assert after.allocation is not None
    assert cancelled(after, START_MS + 1) is after
    ended = job("j", state=S.FAILED)
    assert cancelled(ended, START_MS) is ended


def test_cancelling_asks_for_a_stop_then_ends_when_it_is_confirmed():
    w = world(cancelled(gang(), START_MS))
    [stop] = w.settle()
    assert stop.stop
    assert stop.after.stop == Reason(ReasonCode.CANCELLED_BY_USER)
    assert w.settle() == (), "asked once"
    one = w.live("g")
    w.see(model.TaskSeen(task(one, 0, T.EXITED, exit_code=143)))
    assert w.settle() == (), "the other task lives"
    w.see(model.TaskSeen(task(one, 1, T.EXITED, exit_code=143, released=False)))
    assert w.settle() == (), "a process of it is left on the GPU"
    w.see(model.TaskSeen(task(one, 1, T.EXITED, exit_code=143)))
    [end] = w.settle()
    assert (end.after.state, end.after.allocation, end.after.exit_code) == (S.CANCELLED, None, 143)


@pytest.mark.parametrize(
    ("facts", "stop_asked", "state", "code", "reason"),
    [
        ({"exit_code": 137, "oom_killed": True}, False, S.FAILED, 137, ReasonCode.OUT_OF_MEMORY),
        ({"exit_code": 137, "oom_killed": True}, True, S.CANCELLED, 137, ReasonCode.CANCELLED_BY_USER),
        ({"exit_code": 137}, True, S.CANCELLED, 137, ReasonCode.CANCELLED_BY_USER),
        ({"exit_code": 137}, False, S.FAILED, 137, ReasonCode.SIGNALLED),
        ({"exit_code": 143}, True, S.CANCELLED, 143, ReasonCode.CANCELLED_BY_USER),
        ({"exit_code": 0}, False, S.SUCCEEDED, 0, ReasonCode.EXIT_CODE),
        ({"exit_code": 3}, False, S.FAILED, 3, ReasonCode.EXIT_CODE),
        ({"exit_code": None, "signal": 11}, False, S.FAILED, 139, ReasonCode.SIGNALLED),
    ],
)
def test_ex2_what_an_end_means(facts, stop_asked, state, code, reason):
    one = running("j", "n1", [piece("GPU-n1-0")])
    w = world(cancelled(one, START_MS) if stop_asked else one)
    w.settle()
    after = ends(w, w.live("j"), facts)
    assert (after.state, after.exit_code) == (state, code)
    assert after.reason is not None
    assert after.reason.code is reason


@pytest.mark.parametrize(("ended_after_seconds", "state"), [(-5, S.SUCCEEDED), (5, S.CANCELLED)])
def test_ex2_exit_code_0_counts_only_before_the_stop(ended_after_seconds, state):
    w = world(cancelled(running("j", "n1", [piece("GPU-n1-0")]), START_MS + 9000))
    w.now = 10
    w.settle()
    w.now += ended_after_seconds
    after = ends(w, w.live("j"), {"exit_code": 0})
    assert after.state is state


# --- failures and retries ----------------------------------------------------------------------------------------------


def test_a_failure_with_a_retry_left_waits_again_as_the_next_attempt():
    w = world(replace(running("j", "n1", [piece("GPU-n1-0")], retries=2), started_at_ms=None))
    w.now = 40
    after = ends(w, w.live("j"), {"exit_code": 1, "started_at_ms": START_MS + 10_000})
    assert (after.state, after.attempt, after.failures, after.allocation) == (S.PENDING, 2, 1, None)
    assert (after.ran_ms, after.queued_at_ms) == (30_000, START_MS + 40_000)
    assert after.not_before_ms == START_MS + 45_000, "back-off of 5 s"
    assert after.submitted_at_ms == START_MS, "it keeps its age"


def test_back_off_doubles_and_is_bounded():
    seen = []
    for failures in (0, 1, 2, 30):
        w = world(running("j", "n1", [piece("GPU-n1-0")], retries=100, failures=failures))
        seen.append(ends(w, w.live("j"), {"exit_code": 1}).not_before_ms - START_MS)
    assert seen == [5000, 10_000, 20_000, 300_000]


def test_the_last_retry_is_the_last():
    w = world(running("j", "n1", [piece("GPU-n1-0")], retries=1, failures=1))
    after = ends(w, w.live("j"), {"exit_code": 1})
    assert (after.state, after.exit_code, after.failures) == (S.FAILED, 1, 2)


def test_what_serai_could_not_start_is_tried_again_without_the_users_retries():
    w = world(running("j", "n1", [piece("GPU-n1-0")]), launch_retries=2)
    for attempt in (2, 3):
        after = ends(w, w.live("j"), {"exit_code": None, "fault": "launch_failed", "detail": "502"})
        assert (after.state, after.attempt, after.failures) == (S.PENDING, attempt, 0)
        w.now += 60
        w.cycle()
    after = ends(w, w.live("j"), {"exit_code": None, "fault": "launch_failed", "detail": "502"})
    assert (after.state, after.exit_code) == (S.FAILED, 125)
    assert after.reason == Reason(ReasonCode.LAUNCH_FAILED, {"task": 0}, ("n1",), "502")


def test_ex4_an_image_that_is_not_there_is_not_tried_again():
    w = world(running("j", "n1", [piece("GPU-n1-0")], retries=5))
    after = ends(
        w, w.live("j"), {"exit_code": None, "fault": "image_unavailable", "detail": "manifest unknown"}
    )
    assert (after.state, after.exit_code) == (S.FAILED, 125)
    assert after.reason is not None
    assert after.reason.detail == "manifest unknown"


def test_a_failed_task_stops_its_siblings_and_its_own_code_is_told():
    w = world(gang())
    one = w.live("g")
    w.see(model.TaskSeen(task(one, 0)), model.TaskSeen(task(one, 1, T.EXITED, exit_code=3)))
    [stop] = w.settle()
    assert stop.stop
    assert stop.after.stop == Reason(ReasonCode.SIBLING_FAILED, {"task": 1})
    w.see(model.TaskSeen(task(one, 0, T.EXITED, exit_code=143)))
    [end] = w.settle()
    assert (end.after.state, end.after.exit_code) == (S.FAILED, 3)
    assert end.after.reason == Reason(ReasonCode.EXIT_CODE, {"task": 1, "exit_code": 3}, ("n2",))


def test_a_task_that_ended_well_is_never_why_a_job_ended_badly():
    """Seed 714539 of the simulation: the engine had ended one of the gang without a word; the other one's exit code 0
    was told as the reason, and the job was not started again."""
    w = world(gang())
    one = w.live("g")
    w.see(model.TaskSeen(task(one, 1, T.EXITED, exit_code=None, ended_at_ms=START_MS + 1000)))
    [stop] = w.settle()
    assert stop.after.stop == Reason(ReasonCode.SIBLING_FAILED, {"task": 1})
    w.see(model.TaskSeen(task(one, 0, T.EXITED, exit_code=0, started_at_ms=START_MS, ended_at_ms=START_MS)))
    [end] = w.settle()
    assert end.after.state is S.PENDING
    assert end.after.reason == Reason(ReasonCode.LAUNCH_FAILED, {"task": 1}, ("n2",))


def test_a_task_alone_has_no_siblings_to_stop():
    w = world(running("j", "n1", [piece("GPU-n1-0")]))
    w.see(model.TaskSeen(task(w.live("j"), 0, T.EXITED, exit_code=3, released=False)))
    assert w.settle() == ()


def test_a_task_that_ended_well_stops_nobody():
    w = world(gang())
    w.see(model.TaskSeen(task(w.live("g"), 0, T.EXITED, exit_code=0)))
    assert w.settle() == ()


# --- time ------------------------------------------------------------------------------------------------------------


def test_ct3_what_has_ended_does_not_run_into_its_limit_while_its_gpu_is_cleaned():
    """Seed 0 of the simulation: it had ended with code 3, a process of it stayed on the GPU, and its limit came."""
    w = world(running("j", "n1", [piece("GPU-n1-0")], max_runtime_seconds=60))
    times = {"started_at_ms": START_MS, "ended_at_ms": START_MS + 1000}
    ended = task(w.live("j"), 0, T.EXITED, exit_code=3, released=False, **times)
    w.see(model.TaskSeen(ended))
    w.now = 90
    assert w.settle() == ()
    w.see(model.TaskSeen(replace(ended, released=True)))
    [end] = w.settle()
    assert (end.after.state, end.after.exit_code) == (S.FAILED, 3)
    assert end.after.reason is not None
    assert end.after.reason.code is ReasonCode.EXIT_CODE


def test_ex2_what_had_failed_before_the_stop_was_asked_for_did_not_end_because_of_it():
    """Seed 78 of the simulation: its node was slow to say that it had ended with code 3, and its limit came."""
    w = world(running("j", "n1", [piece("GPU-n1-0")], max_runtime_seconds=60, retries=1))
    w.see(model.TaskSeen(task(w.live("j"), started_at_ms=START_MS)))
    w.now = 60
    [stop] = w.settle()
    assert stop.after.stop is not None
    times = {"started_at_ms": START_MS, "ended_at_ms": START_MS + 58_000}
    w.see(model.TaskSeen(task(w.live("j"), 0, T.EXITED, exit_code=3, **times)))
    [end] = w.settle()
    assert (end.after.state, end.after.failures) == (S.PENDING, 1)
    assert end.after.reason is not None
    assert end.after.reason.code is ReasonCode.EXIT_CODE


def test_ct3_waiting_for_one_of_the_gang_to_start_is_not_running():
    """Seed 5412 of the simulation: two of three had ended well, and the third was still to start at the limit."""
    w = world(gang(max_runtime_seconds=60))
    times = {"started_at_ms": START_MS, "ended_at_ms": START_MS + 5_000}
    w.see(model.TaskSeen(task(w.live("g"), 0, T.EXITED, exit_code=0, **times)))
    w.now = 90
    assert w.settle() == ()


def test_ct3_a_new_attempt_that_has_not_started_is_not_at_its_limit():
    """Seed 3 of the simulation: the first attempt had run for longer than the limit, unseen."""
    w = world(gang(max_runtime_seconds=60, ran_ms=70_000))
    w.now = 5
    assert w.settle() == ()


def test_ct3_the_clocks_of_two_nodes_may_differ_le_1():
    """Seed 140 of the simulation: a gang was charged the difference of its nodes' clocks with each attempt."""
    w = world(gang(max_runtime_seconds=60, retries=1))
    ahead_ms = 30_000
    for number, start_ms in enumerate((START_MS, START_MS + ahead_ms)):
        times = {"started_at_ms": start_ms, "ended_at_ms": start_ms + 5_000}
        w.see(model.TaskSeen(task(w.live("g"), number, T.EXITED, exit_code=1, **times)))
    w.now = 6
    [end] = w.settle()
    assert (end.after.state, end.after.ran_ms) == (S.PENDING, 5_000)


def test_ct3_the_time_limit_counts_running_time_over_all_attempts():
    """limit 60 s; ran 40 s before; killed after 20 more seconds of running."""
    w = world(running("j", "n1", [piece("GPU-n1-0")], max_runtime_seconds=60, ran_ms=40_000))
    w.now = 100
    w.see(model.TaskSeen(task(w.live("j"), started_at_ms=START_MS + 100_000)))
    assert w.snapshot().next_due_ms == START_MS + 120_000
    w.now = 119
    assert w.settle() == ()
    w.now = 120
    [stop] = w.settle()
    assert stop.after.stop == Reason(ReasonCode.TIME_LIMIT, {"limit_seconds": 60})
    assert (stop.after.state, stop.after.history[-1].state) == (S.ALLOCATED, S.RUNNING), "as users saw it"
    after = ends(w, w.live("j"), {"exit_code": 137, "started_at_ms": START_MS + 100_000})
    assert (after.state, after.exit_code, after.ran_ms) == (S.FAILED, 124, 60_000)


def test_le1_a_clock_that_is_behind_does_not_shorten_the_limit():
    w = world(running("j", "n1", [piece("GPU-n1-0")], max_runtime_seconds=60))
    w.see(model.TaskSeen(task(w.live("j"), started_at_ms=START_MS - 300_000)))
    w.now = 59
    assert w.settle() == ()


def test_ex3_the_launch_deadline_tells_what_the_attempt_waited_for():
    away = Reason(ReasonCode.ENGINE_UNAVAILABLE, detail="Nomad cannot be reached")
    w = world(running("j", "n1", [piece("GPU-n1-0")], reason=away), launch_deadline_seconds=100)
    w.now = 100
    [stop] = w.settle()
    expected = Reason(ReasonCode.LAUNCH_DEADLINE, {"limit_seconds": 100}, detail="Nomad cannot be reached")
    assert (stop.after.stop, stop.after.reason) == (expected, expected), (
        "users read why it is stopped, at once"
    )


def test_ex3_the_launch_deadline_stops_what_never_starts_and_it_is_tried_again():
    w = world(running("j", "n1", [piece("GPU-n1-0")]), launch_deadline_seconds=100)
    w.see(model.TaskSeen(task(w.live("j"), state=T.STARTING)))
    assert w.snapshot().next_due_ms == START_MS + 100_000
    w.now = 100
    [stop] = w.settle()
    assert stop.after.stop == Reason(ReasonCode.LAUNCH_DEADLINE, {"limit_seconds": 100})
    after = ends(w, w.live("j"), {"exit_code": None})
    assert (after.state, after.attempt, after.failures) == (S.PENDING, 2, 0)


def test_what_runs_is_not_held_to_the_launch_deadline():
    w = world(running("j", "n1", [piece("GPU-n1-0")]), launch_deadline_seconds=100)
    w.run("j")
    w.now = 1000
    assert w.settle() == ()


def test_a_stop_that_nobody_confirms_is_said_and_frees_nothing():
    w = world(cancelled(running("j", "n1", [piece("GPU-n1-0")]), START_MS), stop_deadline_seconds=60)
    w.settle()
    w.now = 60
    [said] = w.settle()
    assert not said.stop
    assert said.after.reason is not None
    assert said.after.reason.code is ReasonCode.STOP_UNCONFIRMED
    assert said.after.allocation is not None
    assert w.settle() == (), "said once"
    assert not w.snapshot().nodes["n1"].gpus[0].is_idle


# --- nodes that are silent ---------------------------------------------------------------------------------------------


def test_ex7_a_silent_node_keeps_its_jobs_until_it_is_lost():
    w = world(running("j", "n1", [piece("GPU-n1-0")], retries=1), lost_seconds=600)
    w.run("j")
    w.see(model.ReportGone("n1"))
    w.now = 599
    assert w.settle() == ()
    assert w.snapshot().next_due_ms == START_MS + 600_000
    w.now = 600
    [lost] = w.settle()
    after = lost.after
    assert (after.state, after.attempt, after.failures, after.allocation) == (S.PENDING, 2, 1, None)
    assert [h.state for h in after.history[-2:]] == [S.LOST, S.PENDING]
    assert after.reason == Reason(ReasonCode.NODE_LOST, subjects=("n1",))


def test_a_lost_job_without_retries_fails_with_125():
    w = world(running("j", "n1", [piece("GPU-n1-0")]), lost_seconds=600)
    w.see(model.ReportGone("n1"))
    w.now = 600
    [lost] = w.settle()
    assert (lost.after.state, lost.after.exit_code) == (S.FAILED, 125)


def test_the_rest_of_a_gang_is_stopped_before_a_lost_job_is_queued_again():
    """Never two live attempts: what runs on a node that is well must end first."""
    w = world(gang(retries=1), lost_seconds=600)
    w.run("g")
    w.see(model.ReportGone("n2"))
    w.now = 600
    [stop] = w.settle()
    assert stop.stop
    assert stop.after.stop == Reason(ReasonCode.NODE_LOST, subjects=("n2",))
    assert stop.after.allocation is not None
    w.see(model.TaskSeen(task(w.live("g"), 0, T.EXITED, exit_code=143)))
    [end] = w.settle()
    assert (end.after.state, end.after.attempt) == (S.PENDING, 2)


def test_a_cancelled_job_on_a_lost_node_ends_cancelled():
    w = world(cancelled(running("j", "n1", [piece("GPU-n1-0")], retries=9), START_MS), lost_seconds=600)
    w.see(model.ReportGone("n1"))
    w.settle()
    w.now = 600
    [end] = w.settle()
    assert end.after.state is S.CANCELLED


def test_the_launch_deadline_waits_for_a_silent_node():
    """EX-7: it may have started the job long ago."""
    w = world(running("j", "n1", [piece("GPU-n1-0")]), launch_deadline_seconds=100, lost_seconds=600)
    w.see(model.ReportGone("n1"))
    w.now = 300
    assert w.settle() == ()


def test_settling_is_idempotent_and_in_the_order_of_ids():
    jobs = [running(f"j{n}", "n1", [piece(f"GPU-n1-{n}")]) for n in (2, 0, 1)]
    w = world(*jobs)
    for one in jobs:
        w.see(model.TaskSeen(task(one, state=T.EXITED, exit_code=0)))
    snapshot = w.snapshot()
    assert [t.before.id for t in settle(snapshot)] == ["j0", "j1", "j2"]
    assert settle(snapshot) == settle(snapshot)


def test_an_eviction_waits_again_without_using_a_retry():
    one = replace(running("j", "n1", [piece("GPU-n1-0")]), state=S.EVICTING)
    w = world(one)
    [stop] = w.settle()
    assert stop.after.stop == Reason(ReasonCode.EVICTED)
    after = ends(w, w.live("j"), {"exit_code": 143})
    assert (after.state, after.attempt, after.failures) == (S.PENDING, 2, 0)


def test_ended_attempts_are_remembered_and_only_the_newest():
    w = world(running("j", "n1", [piece("GPU-n1-0")], retries=10))
    for _ in range(5):
        after = ends(w, w.live("j"), {"exit_code": 1})
        w.now += 600
        w.cycle()
    assert [past.allocation.attempt for past in after.past] == [3, 4, 5]
    assert [past.tasks[0].exit_code for past in after.past] == [1, 1, 1]


def test_a_record_that_moves_keeps_every_field_that_is_not_about_the_move():
    fields = {name: f"<{name}>" for name in Job.__struct_fields__}
    before = Job(**{**fields, "state": JobState.PENDING, "attempt": 7, "history": ("earlier",)})
    [placed] = [TaskPlacement(0, "n1", (), 1, 1)]
    after = allocated(before, Allocation(7, (placed,), START_MS, placed=Reason(ReasonCode.PLACED)))
    assert len(after.history) == 2
    moved = {"state", "reason", "history", "allocation"}
    assert {name for name in fields if getattr(after, name) != getattr(before, name)} == moved
