"""What a node must do: one test for each branch of the table at the top of nodeagent/reconcile.py."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.model import Task, TaskState
from jobspecs.container import ContainerSettings, Grant
from nodeagent.reconcile import held, quarantined, reconcile, sightings
from nodeagent.runner import Observed, ObservedTask, TaskKey
from nodeagent.view import (
    Action,
    Failure,
    Limits,
    PerformStep,
    Remove,
    SeenGrant,
    Start,
    Stop,
    UndoStep,
    View,
    WriteTask,
    step_id,
)
from vgpu.isolation.settings import GpuSettings, Step
from vgpu.slices import Slice

NOW = 1_000_000_000
KEY = TaskKey("job1", 1, 0)
GPU = "GPU-a"
SLICE = Slice(GPU, 1024, 500, "mps")
STEP = Step("start_mps_daemon", GPU, {"pipe_directory": "/run/x"})
LIMITS = Limits(orphan_grace_ms=30_000, log_retention_ms=600_000, stop_deadline_ms=60_000)


def container(task: int = 0, **changes: object) -> ContainerSettings:
    made = ContainerSettings(
        task,
        "image:1",
        ("true",),
        {},
        GpuSettings(),
        1000,
        64,
        16,
        stop_grace_seconds=7,
        labels={},
        slices=(SLICE,),
    )
    return evolve(made, **changes)


def granted(*containers: ContainerSettings, **changes: object) -> SeenGrant:
    grant = Grant("n1", KEY.job, KEY.attempt, "t", containers or (container(),), granted_at_ms=NOW)
    return SeenGrant(evolve(grant, **changes), create_revision=42)


def observed(state: Observed = Observed.RUNNING, key: TaskKey = KEY, **changes: object) -> ObservedTask:
    ended = {"exit_code": 0, "ended_at_ms": NOW - 1000} if state is Observed.EXITED else {}
    task = ObservedTask(key, state, started_at_ms=NOW - 5000, slices=(SLICE,), container=key.name)
    return evolve(task, **{**ended, **changes})


def record(state: TaskState, **changes: object) -> Task:
    return replace(Task(KEY.job, KEY.attempt, 0, "n1", state, container=KEY.name), **changes)


RELEASED = record(TaskState.EXITED, exit_code=0, released=True)


def view(**changes: object) -> View:
    defaults = {"grants": (granted(),), "gpus": {GPU: ""}}
    return View("n1", NOW, LIMITS, **{**defaults, **changes})  # type: ignore[arg-type]


def written(actions: tuple[Action, ...]) -> Task:
    """The one record that is written; its fence is the grant's create revision."""
    writes = [action for action in actions if isinstance(action, WriteTask)]
    assert len(writes) == 1
    assert writes[0].grant_revision == 42
    return writes[0].task


def kinds(actions: tuple[Action, ...]) -> list[str]:
    return [type(action).__name__ for action in actions]


# --- granted and not there -------------------------------------------------------------------------------------------


def test_a_grant_is_started_and_said_to_be_starting() -> None:
    actions = reconcile(view())
    assert kinds(actions) == ["WriteTask", "Start"]
    assert written(actions).state is TaskState.STARTING


def test_what_is_being_started_is_not_started_twice() -> None:
    under_way = {"busy": frozenset({KEY}), "starting": frozenset({KEY})}
    assert kinds(reconcile(view(**under_way))) == ["WriteTask"]
    assert reconcile(view(**under_way, records={KEY: record(TaskState.STARTING)})) == ()


def test_a_start_that_was_cut_off_by_a_restart_is_made_again() -> None:
    assert kinds(reconcile(view(records={KEY: record(TaskState.STARTING)}))) == ["Start"]


def test_a_stop_during_the_start_calls_it_off() -> None:
    under_way = view(grants=(granted(stopping=True),), busy=frozenset({KEY}), starting=frozenset({KEY}))
    assert reconcile(under_way) == (Stop(KEY, 7),)


@pytest.mark.parametrize("state", [TaskState.RUNNING, TaskState.EXITED])
def test_what_turns_out_to_have_run_before_is_not_started_again(state: TaskState) -> None:
    """Seed 710539: the record of it landed while the machine, which had lost its containers, was starting it anew."""
    has_run = {"records": {KEY: record(state)}}
    under_way = {"busy": frozenset({KEY}), "starting": frozenset({KEY})}
    created = {"observed": (observed(Observed.CREATED),)}
    assert reconcile(view(**has_run, **under_way)) == (Stop(KEY, 7),)
    assert reconcile(view(**has_run, **under_way, **created)) == (Stop(KEY, 7),)
    assert reconcile(view(**has_run, **created)) == (Remove(KEY),)
    assert written(reconcile(view(**has_run))).state is TaskState.EXITED


def test_a_failed_launch_ends_the_task_and_frees_its_slices_lk_2() -> None:
    failure = Failure("launch_failed", "no such device", NOW - 5)
    task = written(reconcile(view(failures={KEY: failure})))
    assert (task.state, task.fault, task.detail) == (TaskState.EXITED, "launch_failed", "no such device")
    assert (task.exit_code, task.released, task.ended_at_ms) == (None, True, NOW - 5)


def test_a_long_story_of_the_engine_is_cut() -> None:
    failed = view(failures={KEY: Failure("launch_failed", "x" * 10_000, NOW)})
    task = written(reconcile(failed))
    assert len(task.detail) == 2000
    assert reconcile(evolve(failed, records={KEY: task})) == ()


def test_a_command_that_cannot_run_is_the_jobs_own_end() -> None:
    task = written(reconcile(view(failures={KEY: Failure("", "not found", NOW, exit_code=127)})))
    assert (task.exit_code, task.fault, task.released) == (127, "", True)


def test_a_failed_launch_is_not_tried_again_by_the_node() -> None:
    failed = view(failures={KEY: Failure("launch_failed", "x", NOW)})
    task = written(reconcile(failed))
    assert reconcile(evolve(failed, records={KEY: task})) == ()


def test_a_stopping_grant_that_never_started_is_over_at_once() -> None:
    task = written(reconcile(view(grants=(granted(stopping=True),))))
    assert (task.state, task.exit_code, task.released) == (TaskState.EXITED, None, True)


def test_a_stop_does_not_hide_why_the_launch_failed() -> None:
    stopping = view(grants=(granted(stopping=True),), failures={KEY: Failure("image_unavailable", "x", NOW)})
    assert written(reconcile(stopping)).fault == "image_unavailable"


def test_a_task_that_ran_and_is_gone_does_not_run_twice_ex_8() -> None:
    task = written(reconcile(view(records={KEY: record(TaskState.RUNNING, started_at_ms=5)})))
    assert (task.state, task.fault, task.exit_code) == (TaskState.EXITED, "task_vanished", None)
    assert (task.released, task.started_at_ms) == (True, 5)


def test_an_ended_task_whose_container_was_removed_keeps_its_end() -> None:
    ended = record(TaskState.EXITED, exit_code=3, released=False)
    still_on = view(records={KEY: ended}, on_gpu={KEY: (7,)})
    assert reconcile(still_on) == ()
    assert written(reconcile(evolve(still_on, on_gpu={}))) == replace(ended, released=True)


@pytest.mark.parametrize(
    "gpus", [{"GPU-other": ""}, {GPU: "lost"}], ids=["another card", "a card that cannot be used"]
)
def test_a_task_never_starts_without_the_very_gpus_it_was_granted_rr_4(gpus: dict[str, str]) -> None:
    task = written(reconcile(view(gpus=gpus)))
    assert (task.fault, task.released) == ("launch_failed", True)
    assert GPU in task.detail


# --- while the GPUs cannot be read -----------------------------------------------------------------------------------


def test_nothing_is_started_or_ended_because_gpus_cannot_be_read_rr_2() -> None:
    assert reconcile(view(gpus=None)) == ()
    running = view(gpus=None, observed=(observed(),), records={})
    assert kinds(reconcile(running)) == ["WriteTask"]
    assert written(reconcile(running)).state is TaskState.RUNNING


def test_an_end_is_not_released_while_gpus_cannot_be_read() -> None:
    unread = view(gpus=None, observed=(observed(Observed.EXITED),))
    assert not written(reconcile(unread)).released
    assert written(reconcile(evolve(unread, gpus={GPU: ""}))).released


def test_a_task_without_gpus_does_not_wait_for_them_gh_7() -> None:
    blind = view(gpus=None, grants=(granted(container(slices=())),))
    assert "Start" in kinds(reconcile(blind))
    ended = evolve(blind, observed=(observed(Observed.EXITED, slices=()),))
    assert written(reconcile(ended)).released


# --- granted and there -----------------------------------------------------------------------------------------------


def test_what_runs_is_adopted_da_9() -> None:
    task = written(reconcile(view(observed=(observed(),))))
    assert (task.state, task.started_at_ms, task.container) == (TaskState.RUNNING, NOW - 5000, KEY.name)
    assert reconcile(view(observed=(observed(),), records={KEY: task})) == ()


def test_a_container_that_was_made_and_never_started_is_started_ex_5() -> None:
    created = view(observed=(observed(Observed.CREATED),))
    assert kinds(reconcile(created)) == ["WriteTask", "Start"]
    for changes in (
        {"grants": (granted(stopping=True),)},
        {"failures": {KEY: Failure("x", "", NOW)}},
        {"gpus": {}},
    ):
        assert kinds(reconcile(evolve(created, **changes))) == ["Remove"]
    assert reconcile(evolve(created, busy=frozenset({KEY}))) == ()


def test_a_stopping_grant_stops_what_runs_with_its_grace() -> None:
    stopping = view(grants=(granted(stopping=True),), observed=(observed(),))
    assert Stop(KEY, 7) in reconcile(stopping)
    assert "Stop" not in kinds(reconcile(evolve(stopping, busy=frozenset({KEY}))))


def test_a_member_of_a_gang_is_stopped_alone_only_if_it_runs() -> None:
    second = TaskKey(KEY.job, 1, 1)
    gang = view(
        grants=(granted(container(0), container(1), stopping=True),),
        observed=(observed(Observed.EXITED, exit_code=1), observed(key=second)),
    )
    assert [action for action in reconcile(gang) if isinstance(action, Stop)] == [Stop(second, 7)]


def test_a_stop_that_is_never_confirmed_keeps_the_slices_and_quarantines_the_gpu_gh_8() -> None:
    asked = view(grants=(granted(stopping=True),), observed=(observed(),), stops={KEY: NOW - 59_999})
    assert written(reconcile(asked)).fault == ""
    assert quarantined(asked) == {}
    late = evolve(asked, now_ms=NOW + 1)
    task = written(reconcile(late))
    assert (task.state, task.fault, task.released) == (TaskState.RUNNING, "stop_unconfirmed", False)
    assert str(KEY) in task.detail
    assert Stop(KEY, 7) in reconcile(late)  # it is tried for ever
    assert list(quarantined(late)) == [GPU]


@pytest.mark.parametrize(
    ("exit_code", "oom", "signal", "fault"),
    [
        (137, True, 9, "out_of_memory"),
        (137, False, 9, ""),
        (143, False, 15, ""),
        (139, False, 11, ""),
        (0, False, None, ""),
        (0, True, None, ""),
        (3, False, None, ""),
        (255, False, None, ""),
        (None, False, None, "task_vanished"),
    ],
)
@pytest.mark.parametrize("stopping", [False, True])
def test_an_end_is_told_as_it_is_whether_or_not_it_was_asked_for_ex_2(
    exit_code: int | None, oom: bool, signal: int | None, fault: str, stopping: bool
) -> None:
    ended = view(
        grants=(granted(stopping=stopping),),
        observed=(observed(Observed.EXITED, exit_code=exit_code, oom_killed=oom),),
    )
    task = written(reconcile(ended))
    assert (task.exit_code, task.oom_killed, task.signal, task.fault) == (exit_code, oom, signal, fault)
    assert (task.state, task.released) == (TaskState.EXITED, True)


def test_slices_are_free_only_when_no_process_is_left_on_the_gpu_gh_9() -> None:
    ended = view(observed=(observed(Observed.EXITED),), on_gpu={KEY: (7, 8)})
    task = written(reconcile(ended))
    assert not task.released
    assert "7, 8" in task.detail
    assert list(held(ended)) == [KEY]
    assert quarantined(ended) == {}
    assert list(quarantined(evolve(ended, now_ms=NOW + 60_000))) == [GPU]
    clean = evolve(ended, on_gpu={}, records={KEY: task})
    assert written(reconcile(clean)).released
    assert held(clean) == {}


def test_processes_of_another_task_do_not_hold_the_end_back() -> None:
    other = TaskKey("other", 1, 0)
    assert written(reconcile(view(observed=(observed(Observed.EXITED),), on_gpu={other: (7,)}))).released


def test_an_xid_explains_a_bad_end_only_gh_2() -> None:
    noted = {"notes": {KEY: "Xid 31"}}
    bad = view(observed=(observed(Observed.EXITED, exit_code=1),), **noted)
    good = view(observed=(observed(Observed.EXITED, exit_code=0),), **noted)
    assert written(reconcile(bad)).detail == "Xid 31"
    assert written(reconcile(good)).detail == ""


def test_a_task_that_uses_more_than_its_slice_is_stopped_with_the_reason() -> None:
    over = view(observed=(observed(),), condemned={KEY: Failure("out_of_memory", "used 9 of 1", NOW)})
    assert Stop(KEY, 7) in reconcile(over)
    task = written(reconcile(evolve(over, observed=(observed(Observed.EXITED, exit_code=143),))))
    assert (task.fault, task.detail) == ("out_of_memory", "used 9 of 1")


def test_the_node_ends_a_task_at_its_time_limit_when_nobody_else_does_ct_3() -> None:
    limited = view(grants=(granted(max_runtime_ms=4000),), observed=(observed(),))
    assert "Stop" not in kinds(reconcile(limited))  # the leader's to do, for a while
    late = evolve(limited, now_ms=NOW + 15_000)
    assert Stop(KEY, 7) in reconcile(late)
    ended = evolve(late, observed=(observed(Observed.EXITED, exit_code=143, ended_at_ms=NOW + 16_000),))
    assert written(reconcile(ended)).fault == "time_limit"


# --- after the end ---------------------------------------------------------------------------------------------------


def test_output_is_kept_for_its_time_and_holds_no_device_lk_10() -> None:
    ended = view(observed=(observed(Observed.EXITED),), records={KEY: RELEASED})
    assert reconcile(ended) == ()
    assert held(ended) == {}
    assert reconcile(evolve(ended, now_ms=NOW + 599_000)) == (Remove(KEY),)


def test_the_output_of_an_attempt_is_kept_when_its_grant_is_gone_ob_1() -> None:
    ended = view(grants=(), observed=(observed(Observed.EXITED),), withdrawn=frozenset({(KEY.job, 1)}))
    assert reconcile(ended) == ()
    assert reconcile(evolve(ended, now_ms=NOW + 599_000)) == (Remove(KEY),)


@pytest.mark.parametrize(
    ("state", "action"), [(Observed.RUNNING, Stop(KEY, 7)), (Observed.CREATED, Remove(KEY))]
)
def test_an_ended_attempt_never_comes_back_rr_11(state: Observed, action: Action) -> None:
    assert reconcile(view(observed=(observed(state),), records={KEY: RELEASED})) == (action,)


# --- without a grant -------------------------------------------------------------------------------------------------


def test_a_withdrawn_grant_ends_its_task_at_once_rr_11() -> None:
    withdrawn = view(grants=(), observed=(observed(),), withdrawn=frozenset({(KEY.job, 1)}))
    assert reconcile(withdrawn) == (Stop(KEY, 10, ungranted=True),)


def test_an_orphan_is_stopped_after_two_sightings_a_grace_apart_rr_6() -> None:
    first = view(grants=(), observed=(observed(),))
    assert reconcile(first) == ()
    seen = sightings(first)
    assert seen == {KEY: NOW}
    second = evolve(first, now_ms=NOW + 29_999, orphans=seen)
    assert reconcile(second) == ()
    assert sightings(second) == seen
    assert reconcile(evolve(second, now_ms=NOW + 30_000)) == (Stop(KEY, 10, ungranted=True),)


def test_an_orphan_whose_grant_turns_up_is_forgotten_rr_6() -> None:
    assert sightings(view(observed=(observed(),), orphans={KEY: 1})) == {}


def test_another_attempt_of_the_job_is_no_licence_rr_11() -> None:
    old = TaskKey(KEY.job, 0, 0)
    both = view(observed=(observed(key=old), observed()), orphans={old: 0})
    assert [a for a in reconcile(both) if isinstance(a, Stop)] == [Stop(old, 10, ungranted=True)]


def test_an_unreadable_grant_ends_nothing_da_7() -> None:
    unread = view(grants=(), observed=(observed(),), unreadable=frozenset({(KEY.job, 1)}), orphans={KEY: 0})
    assert reconcile(unread) == ()
    assert list(held(unread)) == [KEY]


def test_what_another_engine_runs_is_held_and_never_touched() -> None:
    nomads = view(grants=(), observed=(observed(foreign=True),), orphans={KEY: 0})
    assert reconcile(nomads) == ()
    assert sightings(nomads) == {}
    assert list(held(nomads)) == [KEY]


# --- isolation steps -------------------------------------------------------------------------------------------------


def with_steps(**changes: object) -> View:
    return view(grants=(granted(container(steps=(STEP,))),), **changes)


DONE = {step_id(STEP): STEP}


def test_a_task_starts_after_its_steps() -> None:
    assert reconcile(with_steps()) == (PerformStep(STEP),)
    assert reconcile(with_steps(steps_busy=frozenset(DONE))) == ()
    assert kinds(reconcile(with_steps(steps_done=DONE))) == ["WriteTask", "Start"]


def test_what_may_yet_be_told_to_have_ended_is_not_started_before_its_record_is_written_again() -> None:
    """Seed 611688: the steps failed, the answer to EXITED was lost, the steps came up; and it landed once the task ran."""
    started = reconcile(with_steps(steps_done=DONE))
    [starting, start] = started
    assert isinstance(starting, WriteTask)
    doubted = with_steps(steps_done=DONE, in_doubt=frozenset({start.key}))  # type: ignore[union-attr]
    assert reconcile(doubted) == (starting,)
    again = evolve(doubted, records={start.key: starting.task})  # type: ignore[union-attr]
    assert reconcile(again) == (starting,), "also where nothing changes but the revision"


def test_failed_steps_end_the_task_with_their_reason() -> None:
    task = written(reconcile(with_steps(steps_failed={step_id(STEP): "no daemon"})))
    assert (task.fault, task.detail, task.released) == ("isolation_steps_failed", "no daemon", True)


def test_an_equal_step_of_two_grants_is_done_once_and_undone_with_the_last() -> None:
    one, two = granted(container(steps=(STEP,))), granted(container(steps=(STEP,)), job="job2")
    both = view(grants=(one, two))
    assert [action for action in reconcile(both) if isinstance(action, PerformStep)] == [PerformStep(STEP)]
    assert "UndoStep" not in kinds(reconcile(evolve(both, grants=(two,), steps_done=DONE)))
    assert reconcile(evolve(both, grants=(), steps_done=DONE)) == (UndoStep(STEP),)


def test_a_step_is_undone_when_its_task_is_over_even_if_the_grant_stays() -> None:
    assert UndoStep(STEP) in reconcile(with_steps(steps_done=DONE, records={KEY: RELEASED}))


def test_a_step_is_not_undone_under_a_running_task() -> None:
    orphaned = view(grants=(), observed=(observed(),), steps_done=DONE)
    assert reconcile(orphaned) == ()


def test_for_nomad_the_steps_are_performed_and_told_and_nothing_is_started() -> None:
    nomads = evolve(with_steps(), grants=(granted(container(steps=(STEP,)), engine="nomad"),))
    assert reconcile(nomads) == (PerformStep(STEP),)
    task = written(reconcile(evolve(nomads, steps_done=DONE)))
    assert task.state is TaskState.PREPARED
    assert reconcile(evolve(nomads, steps_done=DONE, records={KEY: task})) == ()
    failed = written(reconcile(evolve(nomads, steps_failed={step_id(STEP): "x"})))
    assert (failed.state, failed.fault) == (TaskState.EXITED, "isolation_steps_failed")


def test_a_nomad_task_that_was_never_prepared_is_over_when_it_is_stopped() -> None:
    stopping = granted(container(steps=(STEP,)), engine="nomad", stopping=True)
    task = written(reconcile(view(grants=(stopping,), steps_done=DONE)))
    assert (task.state, task.released) == (TaskState.EXITED, True)
    # Without steps Nomad may have it already, and only its observer can tell.
    bare = granted(container(), engine="nomad", stopping=True)
    assert reconcile(view(grants=(bare,))) == ()


# --- for every view --------------------------------------------------------------------------------------------------

VIEWS = st.builds(
    lambda stopping, has_grant, state, exit_code, kept, busy, starting, gpus, left, failure, withdrawn: view(
        grants=(granted(stopping=stopping),) if has_grant else (),
        observed=() if state is None else (observed(state, exit_code=exit_code),),
        records={} if kept is None else {KEY: kept},
        busy=frozenset({KEY} if busy or starting else ()),
        starting=frozenset({KEY} if starting else ()),
        gpus=gpus,
        on_gpu={KEY: (7,)} if left else {},
        failures={KEY: Failure("launch_failed", "", NOW)} if failure else {},
        withdrawn=frozenset({(KEY.job, 1)} if withdrawn else ()),
    ),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, *Observed]),
    st.sampled_from([0, 1, 137]),
    st.sampled_from([None, record(TaskState.STARTING), record(TaskState.RUNNING), RELEASED]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, {}, {GPU: ""}]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


def test_whatever_is_seen_nothing_unsafe_is_ordered_property() -> None:
    reached: set[str] = set()

    @given(VIEWS)
    @example(view(grants=(granted(),), gpus={GPU: ""}))  # a start needs nine draws to fall its way
    @settings(max_examples=600)
    def check(drawn: View) -> None:
        actions = reconcile(drawn)
        assert reconcile(drawn) == actions
        reached.update(kinds(actions))
        for action in actions:
            if isinstance(action, Start):
                check_start(drawn)
            if isinstance(action, Remove):
                assert all(task.state is not Observed.RUNNING for task in drawn.observed)
            if isinstance(action, WriteTask):
                check_write(drawn, action.task)
                reached.update({"a release"} if action.task.released else ())
        assert not {"Start", "Stop"} <= set(kinds(actions))

    check()
    assert {"Start", "Stop", "Remove", "WriteTask", "a release"} <= reached, "the property was vacuous"


def check_start(drawn: View) -> None:
    assert drawn.grants
    assert not drawn.grants[0].grant.stopping
    assert drawn.records.get(KEY) != RELEASED
    assert KEY not in drawn.busy
    assert KEY not in drawn.failures
    assert drawn.gpus == {GPU: ""}


def check_write(drawn: View, task: Task) -> None:
    assert drawn.grants
    assert drawn.records.get(KEY) != RELEASED
    if task.released:
        has_ended = any(task.state is Observed.EXITED for task in drawn.observed)
        assert not any(task.state is Observed.RUNNING for task in drawn.observed)
        assert has_ended or KEY not in drawn.starting
        assert not has_ended or (drawn.gpus is not None and not drawn.on_gpu)
