"""What an engine may still run for attempts that are over: the table of it, and the snapshot without it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.cycle import plan_cycle
from coordinator.engines.nomad_records import GroupSeen, JobSeen, TaskOfGroup
from coordinator.engines.nomad_remains import Attempt, Remains, Seat, seats_seen
from coordinator.engines.occupied import without_occupied
from tests.builders import World, job, node
from tests.invariants import check_snapshot
from vgpu.reasons import ReasonCode

A, B = ("a", 1), ("b", 1)
SEATS = {0: Seat("n1", ("g0", "g1")), 1: Seat("n2", ("g2",))}


def _table(*live: Attempt) -> tuple[Remains, set[Attempt]]:
    known = set(live)
    return Remains(lambda attempt: attempt in known), known


def test_a_live_attempt_occupies_nothing_and_one_that_is_over_what_has_not_ended() -> None:
    remains, live = _table(A)
    remains.put(A, "id-a", SEATS)
    assert (remains.occupied(), remains.in_the_way(SEATS)) == ({}, "")
    live.discard(A)
    assert remains.in_the_way({5: Seat("n1", ("g1",))}) == "a.1.0", "known at once"
    assert remains.in_the_way({5: Seat("n2", ("g1",)), 6: Seat("n3")}) == ""
    remains.look_at(A)
    assert remains.occupied() == {"n1": {"g0": ("a.1.0",), "g1": ("a.1.0",)}, "n2": {"g2": ("a.1.1",)}}
    remains.ended(A, 0)
    assert remains.occupied() == {"n2": {"g2": ("a.1.1",)}}
    remains.ended(A, 1)
    assert (remains.occupied(), remains.over(), remains.in_the_way(SEATS)) == ({}, {}, "")


def test_two_that_share_a_gpu_are_both_waited_for() -> None:
    remains, _ = _table()
    remains.put(A, "id-a", {0: Seat("n1", ("g0",))})
    remains.put(B, "id-b", {0: Seat("n1", ("g0",))})
    assert remains.occupied() == {"n1": {"g0": ("a.1.0", "b.1.0")}}
    remains.drop(A)
    assert remains.in_the_way({0: Seat("n1", ("g0",))}) == "b.1.0"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 3)), max_size=30))
def test_nothing_stays_of_what_has_ended(steps: list[tuple[str, int, int]]) -> None:
    remains, live = _table()
    for name, number, gpu in steps:
        if gpu:
            remains.put((name, 1), name, {n: Seat(f"n{n}", (f"g{gpu}",)) for n in range(number + 1)})
        else:
            remains.ended((name, 1), number)
        live ^= {(name, 1)}
    live.clear()
    remains.look_at_all()
    assert {
        key.split(".")[0] for gpus in remains.occupied().values() for k in gpus.values() for key in k
    } == {attempt[0] for attempt in remains.over()}
    for name in "abc":
        for number in range(3):
            remains.ended((name, 1), number)
    assert (remains.occupied(), remains.over(), remains._on, remains._ids) == ({}, {}, {}, {})


def test_where_a_job_of_nomad_was_sent_is_read_from_its_own_environment() -> None:
    with_gpus = {"SERAI_NODE": "n1", "NVIDIA_VISIBLE_DEVICES": "g0,g1", "SERAI_GPU_MEMORY_MIB": "1,1"}
    without = {"SERAI_NODE": "n2", "NVIDIA_VISIBLE_DEVICES": "void"}
    groups = (
        GroupSeen("task-0", (TaskOfGroup(with_gpus),)),
        GroupSeen("task-1", (TaskOfGroup(without),)),
        GroupSeen("task-2", None),
        GroupSeen("web", None),
    )
    seats = seats_seen(JobSeen("id", task_groups=groups))
    assert seats == {0: Seat("n1", ("g0", "g1")), 1: Seat("n2"), 2: Seat("")}


def test_a_gpu_with_something_left_on_it_is_closed_and_its_neighbour_is_not() -> None:
    w = World(node("n1", gpus=2), node("n2", gpus=1))
    snapshot = w.snapshot()
    reduced = without_occupied(snapshot, {"n1": {"GPU-n1-0": ("a.1.0",)}, "n7": {"g": ("b.1.0",)}})
    closed, open_ = reduced.nodes["n1"].gpus
    assert closed.closed is not None
    assert (closed.closed.code, closed.closed.subjects) == (ReasonCode.GPU_OCCUPIED, ("GPU-n1-0", "a.1.0"))
    assert (closed.memory_free_mib, closed.compute_free_milli, open_.is_idle) == (0, 0, True)
    assert reduced.nodes["n1"].row.idle_gpus == 1
    assert reduced.nodes["n2"] is snapshot.nodes["n2"]
    assert reduced.view_log.since(snapshot.view_log) is None, "all are looked at anew"


def test_nothing_is_placed_on_it() -> None:
    w = World(node("n1", gpus=1))
    w.submit(job("j1"))
    reduced = without_occupied(w.snapshot(), {"n1": {"GPU-n1-0": ("a.1.0",)}})
    check_snapshot(reduced)
    plan = plan_cycle(reduced, w.policy)
    assert (plan.placements, plan.waiting["j1"].code) == ((), ReasonCode.NOT_ENOUGH_IDLE_GPUS)
