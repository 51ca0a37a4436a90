"""What a node can give, and what it cannot: foreign use, faults, leftovers, double claims, silence."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coordinator import model
from coordinator.lifecycle import cancelled
from coordinator.model import NodeAdmin, TaskState
from coordinator.nodes import NodeStatus
from tests.builders import GIB, START_MS, World, gpu, job, mig, node, piece, report, running, task
from vgpu.inventory import GpuProcess, GpuReport
from vgpu.reasons import ReasonCode


def free(world: World, name: str = "n1", index: int = 0) -> tuple[int, int]:
    view = world.snapshot().nodes[name].gpus[index]
    return view.memory_free_mib, view.compute_free_milli


def closed(world: World, name: str = "n1", index: int = 0) -> ReasonCode | None:
    reason = world.snapshot().nodes[name].gpus[index].closed
    return reason.code if reason else None


# --- free capacity ---


def test_free_is_derived_from_allocations_alone():
    w = World(node("n1", gpus=2))
    assert free(w) == (80 * GIB, 1000)
    w.submit(running("j", "n1", [piece("GPU-n1-0", 10 * GIB, 300, "mps")]))
    assert free(w) == (70 * GIB, 700)
    view = w.snapshot().nodes["n1"]
    assert (view.cpu_free_milli, view.memory_free_mib) == (127_000, 1023 * GIB)
    assert [(use.id, held.memory_mib) for use, held in view.gpus[0].slices] == [("j", 10 * GIB)]
    w.see(model.JobGone("j", "jobs"))
    assert free(w) == (80 * GIB, 1000)


def test_da6_use_outlives_the_records_of_its_node():
    w = World(node("n1", gpus=1))
    w.submit(running("j", "n1", [piece("GPU-n1-0")]))
    w.see(model.InventoryGone("n1"))
    assert w.snapshot().nodes["n1"].gpus == ()
    w.add(node("n1", gpus=1))
    assert free(w) == (0, 0)
    w.submit(job("j2"))
    assert w.cycle() == []


def test_fr7_only_what_the_driver_leaves_is_given_out():
    w = World(node("n1", [gpu("n1", 0, memory=15360 - 450, memory_total_mib=15360)]))
    w.submit(*(job(f"j{n:02}", memory=1024, compute=50) for n in range(15)))
    assert len(w.cycle()) == 14


def test_foreign_memory_is_not_free():
    w = World(node("n1", gpus=2))
    w.see(model.ReportSeen(report("n1", foreign={"GPU-n1-0": 3000})))
    assert free(w) == (80 * GIB - 3000, 1000)
    view = w.snapshot().nodes["n1"].gpus[0]
    assert (view.foreign_memory_mib, view.is_idle) == (3000, False)


def test_a_foreign_process_of_unknown_size_closes_the_gpu():
    w = World(node("n1", gpus=1))
    seen = GpuReport("GPU-n1-0", processes=(GpuProcess(7, None),))
    w.see(model.ReportSeen(replace(report("n1"), gpus=(seen,))))
    assert closed(w) is ReasonCode.GPU_OCCUPIED


@pytest.mark.parametrize(("used", "expected"), [(300, 0), (None, 0), (900, 900)])
def test_without_a_list_of_processes_use_of_an_empty_gpu_is_foreign(used, expected):
    w = World(node("n1", gpus=1))
    seen = GpuReport("GPU-n1-0", memory_used_mib=used, processes=None)
    w.see(model.ReportSeen(replace(report("n1"), gpus=(seen,))))
    assert w.snapshot().nodes["n1"].gpus[0].foreign_memory_mib == expected


def test_our_own_processes_are_not_foreign():
    w = World(node("n1", gpus=1))
    w.submit(running("j", "n1", [piece("GPU-n1-0", 10 * GIB, 300, "mps")]))
    seen = GpuReport("GPU-n1-0", processes=(GpuProcess(7, 9000, "j.1.0"),))
    w.see(model.ReportSeen(replace(report("n1"), gpus=(seen,))))
    assert free(w) == (70 * GIB, 700)


def test_unhealthy_and_unavailable_gpus_are_not_offered():
    w = World(node("n1", [gpu("n1", 0), gpu("n1", 1, unavailable="lost"), gpu("n1", 2)]))
    w.see(model.ReportSeen(report("n1", faults={"GPU-n1-0": "Xid 79"})))
    assert closed(w, index=0) is ReasonCode.GPU_UNHEALTHY
    assert closed(w, index=1) is ReasonCode.GPU_UNHEALTHY
    w.submit(*(job(f"j{n}") for n in range(3)))
    assert len(w.cycle()) == 1
    assert w.where("j0") == ["GPU-n1-2"]
    w.see(model.ReportSeen(report("n1", START_MS + 1)))
    assert w.cycle() == ["j1"], "well again"


def test_a_fault_of_a_card_closes_its_mig_instances():
    w = World(node("n1", [gpu("n1", 0, unavailable="MIG mode"), mig("n1", 0, 1, 16384, 142)]))
    w.see(model.ReportSeen(report("n1", faults={"GPU-n1-0": "Xid 79"})))
    assert closed(w, index=1) is ReasonCode.GPU_UNHEALTHY


# --- what exists on a node without a live allocation ---


def test_da1_a_gpu_is_taken_until_the_end_on_it_is_confirmed():
    """Full node of four jobs of two GPUs. Cancel one; its successor gets exactly its GPUs, and not before."""
    w = World(node("n1"))
    w.submit(*(job(f"j{n}", gpus=2) for n in range(4)))
    w.cycle()
    uuids = w.where("j1")
    w.put(cancelled(w.live("j1"), w.now_ms))
    w.settle()
    w.submit(job("j5", gpus=2))
    assert w.cycle() == [], "asked to stop is not stopped"
    w.see(model.TaskSeen(task(w.live("j1"), state=TaskState.EXITED, exit_code=143, released=False)))
    w.settle()
    assert w.cycle() == [], "a process of it is left"
    w.see(model.TaskSeen(task(w.live("j1"), state=TaskState.EXITED, exit_code=143)))
    w.settle()
    assert w.cycle() == ["j5"]
    assert sorted(w.where("j5")) == sorted(uuids)


def test_what_a_node_still_has_without_a_live_job_is_not_free():
    w = World(node("n1", gpus=2))
    w.see(model.ReportSeen(report("n1", held={"old.1.0": ("GPU-n1-0",)})))
    assert closed(w) is ReasonCode.GPU_OCCUPIED
    assert free(w, index=1) == (80 * GIB, 1000)
    w.see(model.ReportSeen(report("n1", START_MS + 1)))
    assert closed(w) is None


def test_da9_a_task_on_another_gpu_than_it_was_given_closes_that_gpu():
    w = World(node("n1", gpus=2))
    w.submit(running("j", "n1", [piece("GPU-n1-0")]))
    w.see(model.ReportSeen(report("n1", held={"j.1.0": ("GPU-n1-1",)})))
    assert closed(w, index=1) is ReasonCode.GPU_OCCUPIED
    assert w.snapshot().nodes["n1"].gpus[1].closed.subjects == ("GPU-n1-1", "j.1.0")


def test_a_process_of_an_attempt_that_is_over_keeps_its_gpu():
    w = World(node("n1", gpus=1))
    seen = GpuReport("GPU-n1-0", processes=(GpuProcess(7, 100, "old.1.0"),))
    w.see(model.ReportSeen(replace(report("n1"), gpus=(seen,))))
    assert closed(w) is ReasonCode.GPU_OCCUPIED


def test_lk10_a_report_older_than_a_confirmed_end_says_nothing_about_it():
    w = World(node("n1", gpus=1))
    w.submit(job("j"), job("k", 1))
    w.cycle()
    w.see(model.ReportSeen(report("n1", w.now_ms, held={"j.1.0": ("GPU-n1-0",)})))
    w.now = 4
    w.end("j")
    assert w.cycle() == ["k"], "free at once, not after the next report"


@pytest.mark.parametrize("was_reported_before", [False, True])
def test_a_report_after_the_end_that_still_has_it_counts(was_reported_before):
    w = World(node("n1", gpus=1))
    w.submit(job("j"), job("k", 1))
    w.cycle()
    if was_reported_before:
        w.see(model.ReportSeen(report("n1", w.now_ms, held={"j.1.0": ("GPU-n1-0",)})))
    w.now = 4
    w.end("j")
    assert closed(w) is None
    w.now = 5
    w.see(model.ReportSeen(report("n1", w.now_ms, held={"j.1.0": ("GPU-n1-0",)})))
    assert w.cycle() == []
    assert closed(w) is ReasonCode.GPU_OCCUPIED


def test_a_view_tells_of_its_gpus_what_was_so_when_it_was_taken_however_late_it_is_asked():
    w = World(node("n1", gpus=1))
    w.see(model.ReportSeen(report("n1", w.now_ms, held={"j.1.0": ("GPU-n1-0",)})))
    before = w.cluster.snapshot(w.now_ms)
    ended = task(
        running("j", "n1", [piece("GPU-n1-0")]), 0, TaskState.EXITED, ended_at_ms=w.now_ms, released=True
    )
    w.see(model.TaskSeen(ended))
    assert w.cluster.snapshot(w.now_ms).nodes["n1"].gpus[0].closed is None
    [then] = before.nodes["n1"].gpus
    assert (then.closed.code, then.memory_free_mib) == (ReasonCode.GPU_OCCUPIED, 0)


# --- identity ---


def test_da9_id2_a_gpu_that_two_nodes_claim_is_given_to_nobody():
    w = World(node("n1", gpus=2))
    w.add(node("n2", [gpu("n1", 0), gpu("n2", 1)]))
    assert closed(w, "n1", 0) is ReasonCode.GPU_CLAIMED_TWICE
    assert closed(w, "n2", 0) is ReasonCode.GPU_CLAIMED_TWICE
    assert closed(w, "n1", 1) is None
    w.see(model.InventoryGone("n2"))
    assert closed(w, "n1", 0) is None


def test_id2_a_node_that_came_back_under_another_name_has_its_gpus_once_the_old_one_is_given_up():
    w = World(node("old", gpus=1), lost_seconds=600)
    w.see(model.ReportGone("old"))
    w.add(node("new", [gpu("old", 0)]))
    assert closed(w, "new") is ReasonCode.GPU_CLAIMED_TWICE
    w.now = 600
    assert closed(w, "new") is None


def test_id2_a_node_that_was_given_up_and_reports_again_has_its_claim_again():
    w = World(node("old", gpus=[gpu("x", 0)]))
    w.see(model.ReportGone("old"))
    w.add(node("new", gpus=[gpu("x", 0)]))
    w.now += w.settings.lost_seconds
    assert closed(w, "new") is None
    w.see(model.ReportSeen(report("old", w.now_ms)))
    assert closed(w, "new") is closed(w, "old") is ReasonCode.GPU_CLAIMED_TWICE


def test_id2_a_node_that_registers_again_is_one_node():
    w = World(node("n1", gpus=1))
    w.submit(running("j", "n1", [piece("GPU-n1-0")]))
    w.see(model.InventorySeen(node("n1", gpus=1, machine_id="other", engine_node_id="new-id")))
    assert list(w.snapshot().nodes) == ["n1"]
    assert free(w) == (0, 0)


# --- status ---


def test_a_node_is_ready_unknown_and_lost():
    w = World(node("n1"), lost_seconds=600)
    assert w.snapshot().nodes["n1"].status is NodeStatus.READY
    w.now = 10
    w.see(model.ReportGone("n1"))
    w.now = 609
    assert w.snapshot().nodes["n1"].status is NodeStatus.UNKNOWN
    w.now = 610
    view = w.snapshot().nodes["n1"]
    assert view.status is NodeStatus.LOST
    assert view.status_reason.numbers == {"silent_seconds": 600}
    w.see(model.ReportSeen(report("n1")))
    assert w.snapshot().nodes["n1"].status is NodeStatus.READY


def test_tp4_a_silent_node_gets_no_work_and_keeps_what_it_has():
    w = World(node("n1", gpus=2), lost_seconds=600)
    w.submit(running("j", "n1", [piece("GPU-n1-0")]))
    w.see(model.ReportGone("n1"))
    w.now = 90
    w.submit(job("k"))
    assert w.cycle() == []
    w.see(model.ReportSeen(report("n1", w.now_ms)))
    assert w.settle() == ()
    assert w.live("j").allocation.nodes == ("n1",)
    assert w.cycle() == ["k"]


def test_le3_a_new_leader_gives_every_node_its_full_grace():
    """Fifty nodes whose leases have all run out: the silence before the take-over does not count."""
    w = World(lost_seconds=600)
    w.now = 10_000
    for n in range(50):
        w.see(model.InventorySeen(node(f"n{n:02}", gpus=1)))
        w.submit(running(f"j{n:02}", f"n{n:02}", [piece(f"GPU-n{n:02}-0")], retries=1))
    w.cluster.lead(w.now_ms)
    assert {view.status for view in w.snapshot().nodes.values()} == {NodeStatus.UNKNOWN}
    w.now += 599
    assert w.settle() == (), "no job is moved"
    w.now += 3001
    assert len(w.settle()) == 50, "they were taken for silent together, and that has an end"


def test_le3_a_standby_that_takes_over_starts_the_grace_anew():
    w = World(node("n1"), lost_seconds=600)
    w.see(model.ReportGone("n1"))
    w.now = 500
    w.snapshot()
    w.cluster.lead(w.now_ms)
    w.now = 700
    assert w.snapshot().nodes["n1"].status is NodeStatus.UNKNOWN
    w.now = 1100
    assert w.snapshot().nodes["n1"].status is NodeStatus.LOST


def silenced(count: int, of: int, **changes: int) -> World:
    """Nodes with a job each, of which the first `count` lose their leases at once, ten seconds later."""
    w = World(*(node(f"n{n:02}", gpus=1) for n in range(of)), lost_seconds=600, **changes)
    w.submit(*(running(f"j{n:02}", f"n{n:02}", [piece(f"GPU-n{n:02}-0")], retries=1) for n in range(of)))
    for n in range(of):
        w.run(f"j{n:02}")
    w.now = 10
    w.see(*(model.ReportGone(f"n{n:02}") for n in range(count)))
    w.snapshot()
    return w


def settled(w: World) -> set[str]:
    return {transition.before.id for transition in w.settle()}


@pytest.mark.parametrize("count", [50, 26])
def test_le11_leases_that_vanish_together_move_no_job(count: int):
    """All of fifty, or most: the store or the network is to blame. It is said, nothing new goes there, and they come back
    as they were."""
    w = silenced(count, of=50)
    for seconds in (0, 600, 2000):
        w.now = 10 + seconds
        assert settled(w) == set()
        snapshot = w.snapshot()
        assert snapshot.silent_together == count
        assert snapshot.nodes["n00"].status is NodeStatus.UNKNOWN
    reason = snapshot.nodes["n00"].status_reason
    assert reason is not None
    assert reason.numbers == {"silent_seconds": 2000, "silent_nodes": count}
    w.see(*(model.ReportSeen(report(f"n{n:02}", w.now_ms)) for n in range(count)))
    assert settled(w) == set()
    snapshot = w.snapshot()
    assert snapshot.silent_together == 0
    assert {view.status for view in snapshot.nodes.values()} == {NodeStatus.READY}


@pytest.mark.parametrize(("count", "of"), [(25, 50), (2, 2), (1, 1)])
def test_le11_half_of_the_nodes_or_two_of_two_are_given_up_at_their_time(count: int, of: int):
    w = silenced(count, of)
    w.now = 609
    assert settled(w) == set()
    w.now = 610
    assert settled(w) == {f"j{n:02}" for n in range(count)}
    assert w.snapshot().silent_together == 0


def test_le11_who_stays_silent_when_the_others_are_back_gets_its_grace_anew():
    w = silenced(5, of=5)
    w.now = 2000
    assert settled(w) == set()
    w.see(*(model.ReportSeen(report(f"n{n:02}", w.now_ms)) for n in range(3)))
    assert settled(w) == set()
    w.now = 2599
    assert settled(w) == set()
    w.now = 2600
    assert settled(w) == {"j03", "j04"}


def test_le11_the_hold_has_an_end_and_time_alone_brings_it():
    w = silenced(5, of=5, mass_silence_hold_seconds=3600)
    w.now = 3609
    assert settled(w) == set()
    due_ms = w.snapshot().next_due_ms
    assert due_ms is not None
    assert due_ms <= START_MS + 3_610_000
    w.now = 3610
    assert settled(w) == {f"j{n:02}" for n in range(5)}
    assert {view.status for view in w.snapshot().nodes.values()} == {NodeStatus.LOST}


@pytest.mark.parametrize("changes", [{"mass_silence_hold_seconds": 0}, {"mass_silence_percent": 100}])
def test_le11_the_hold_can_be_turned_off(changes: dict[str, int]):
    w = silenced(5, of=5, **changes)
    w.snapshot()
    w.now = 610
    assert len(settled(w)) == 5


def test_le11_a_cordoned_node_is_given_up_all_the_same():
    """What an administrator does who knows that it is really down."""
    w = silenced(5, of=5)
    w.see(model.AdminSeen(NodeAdmin("n03", cordoned=True)))
    w.now = 610
    assert settled(w) == {"j03"}
    assert w.snapshot().silent_together == 4


def test_le11_nodes_that_die_one_after_the_other_are_not_silent_together():
    w = silenced(1, of=5)
    lost: list[str] = []
    for n in range(1, 5):
        lost += sorted(settled(w))
        w.now += 700
        w.see(model.ReportGone(f"n{n:02}"))
    w.now += 700
    lost += sorted(settled(w))
    assert lost == ["j00", "j01", "j02", "j03", "j04"]


def test_le11_records_of_nodes_that_nobody_misses_hold_nothing_up():
    """Inventories that were left behind: never heard, with nothing on them."""
    w = World(*(node(f"n{n}", gpus=1) for n in range(3)), lost_seconds=600)
    w.see(*(model.InventorySeen(node(f"old{n}", gpus=1)) for n in range(9)))
    w.submit(running("j", "n0", [piece("GPU-n0-0")], retries=1))
    w.see(model.ReportGone("n0"))
    w.snapshot()
    w.now = 600
    assert settled(w) == {"j"}
    assert w.snapshot().nodes["old0"].status is NodeStatus.LOST


def test_le11_a_new_leader_that_never_heard_the_nodes_holds_too():
    """The leader's own lease went with theirs."""
    w = World(lost_seconds=600)
    for n in range(5):
        w.see(model.InventorySeen(node(f"n{n}", gpus=1)))
        w.submit(running(f"j{n}", f"n{n}", [piece(f"GPU-n{n}-0")], retries=1))
    w.cluster.lead(w.now_ms)
    w.snapshot()
    w.now = 700
    assert settled(w) == set()
    assert w.snapshot().silent_together == 5


def told(w: World, offsets: dict[str, int]) -> dict[str, int]:
    """Reports of all nodes, made by clocks that are so many seconds ahead."""
    for name, seconds in offsets.items():
        w.see(model.ReportSeen(report(name, w.now_ms + 1000 * seconds)))
    return dict(w.snapshot().clocks_off)


def test_le1_clocks_that_are_off_are_told_and_decide_nothing():
    """Five minutes ahead, five behind, one that jumps back an hour, one that is well: no node changes its status, no job
    is moved or stopped, and who is off is said until the clock is set."""
    names = ("ahead", "behind", "jumps", "well")
    w = World(*(node(name, gpus=1) for name in names), lost_seconds=600)
    w.submit(*(running(f"j-{name}", name, [piece(f"GPU-{name}-0")]) for name in names))
    for name in names:
        w.run(f"j-{name}")
    off = {"ahead": 300, "behind": -300, "jumps": 0, "well": 1}
    for _ in range(3):
        w.now += 10
        seen = told(w, off)
        assert {view.status for view in w.snapshot().nodes.values()} == {NodeStatus.READY}
        assert w.settle() == ()
    assert seen == {"ahead": 300, "behind": -300}
    off["jumps"] = -3600
    w.now += 10
    assert "jumps" not in told(w, off), "one report alone may only have been late"
    w.now += 10
    assert told(w, off) == {"ahead": 300, "behind": -300, "jumps": -3600}
    assert w.settle() == ()
    w.now += 10
    assert told(w, dict.fromkeys(names, 0)) == {}
    w.see(model.ReportGone("ahead"))
    assert w.snapshot().nodes["behind"].status is NodeStatus.READY


def test_le1_a_report_that_lay_in_the_store_says_nothing_about_the_clock():
    """As when everything is listed at a start; and of a node that is gone nothing is said."""
    w = World(lost_seconds=600)
    w.now = 30
    w.see(model.InventorySeen(node("n1")), model.ReportSeen(report("n1", START_MS)))
    assert w.snapshot().clocks_off == {}
    w.now = 40
    assert told(w, {"n1": 0}) == {}
    told(w, {"n1": 60})
    assert told(w, {"n1": 60}) == {"n1": 60}
    w.see(model.ReportGone("n1"))
    assert w.snapshot().clocks_off == {}


def test_an_administrator_cordons_and_labels():
    w = World(node("n1", labels={"zone": "a", "rack": "r1"}))
    w.see(model.AdminSeen(NodeAdmin("n1", cordoned=True, labels={"zone": "b"})))
    view = w.snapshot().nodes["n1"]
    assert view.is_cordoned
    assert view.labels == {"zone": "b", "rack": "r1"}
    w.see(model.AdminGone("n1"))
    assert not w.snapshot().nodes["n1"].is_cordoned


def test_a_node_without_records_use_or_grants_is_forgotten():
    w = World(node("n1"))
    w.see(model.ReportGone("n1"), model.InventoryGone("n1"))
    assert w.snapshot().nodes == {}
