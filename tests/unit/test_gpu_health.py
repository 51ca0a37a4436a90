"""Xid table and the way back of a faulty GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.gpu_facts import HIGHEST_PID, MIB, processes_of
from nodeagent.gpu_health import XIDS, GpuHealth, classify, recovery_complaint
from nodeagent.gpu_source import XidKind
from vgpu.inventory import Gpu


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 94])
def test_application_xids_GH_2(xid: int) -> None:
    assert classify(xid).kind is XidKind.APPLICATION


@pytest.mark.parametrize("xid", [46, 48, 64, 74, 79, 95, 119, 120, 140])
def test_hardware_xids_GH_2(xid: int) -> None:
    assert classify(xid).kind is XidKind.HARDWARE


@pytest.mark.parametrize("xid", [63, 92, 154])
def test_notices_change_nothing_GH_2(xid: int) -> None:
    health = GpuHealth(2)
    assert health.see_xid("g", xid).kind is XidKind.NOTICE
    assert health.fault("g") == ""


def test_unknown_xid_takes_the_gpu_out_GH_2() -> None:
    assert 9999 not in XIDS
    health = GpuHealth(2)
    health.see_xid("g", 9999)
    assert health.fault("g") == "Xid 9999: an Xid that is not in the catalog"


def test_every_rule_has_a_text() -> None:
    assert len(XIDS) > 60
    assert all(rule.text for rule in XIDS.values())


def test_a_bad_probe_starts_the_count_again() -> None:
    health = GpuHealth(3)
    health.see_xid("g", 79)
    for complaint in ("", "", "GPU is lost"):
        health.see_probe("g", complaint)
    assert health.fault("g") == "Xid 79: the GPU has fallen off the bus; now GPU is lost"
    health.see_probe("g", "GPU requires restart")
    assert health.fault("g") == "Xid 79: the GPU has fallen off the bus; now GPU requires restart"
    for _ in range(3):
        assert health.fault("g")
        health.see_probe("g")
    assert health.fault("g") == ""


def test_forgotten_gpus_take_their_faults_along_GH_4() -> None:
    health = GpuHealth()
    health.see_xid("old", 79)
    health.see_xid("kept", 79)
    health.forget_all_but(frozenset({"kept", "new"}))
    assert (health.fault("old"), health.fault("new")) == ("", "")
    assert health.fault("kept")


def test_recovery_actions() -> None:
    assert recovery_complaint(0) == ""
    assert recovery_complaint(2) == "the driver asks for a reboot of the node"
    assert recovery_complaint(5) == ""  # concerns the IMEX domain, not this GPU


def test_no_good_probes_is_refused() -> None:
    with pytest.raises(ValueError, match="good_probes_needed: 0"):
        GpuHealth(0)


def test_back_only_after_enough_good_probes_in_a_row_GH_2_property() -> None:
    cleared = 0

    @given(st.integers(1, 4), st.lists(st.sampled_from(["good", "bad", "xid 31", "xid 79"]), max_size=30))
    def check(needed: int, history: list[str]) -> None:
        nonlocal cleared
        health = GpuHealth(needed)
        out, good = False, 0
        for seen in history:
            if seen.startswith("xid"):
                health.see_xid("g", int(seen[4:]))
            else:
                health.see_probe("g", "" if seen == "good" else "bad")
            if seen in ("bad", "xid 79"):
                out, good = True, 0
            elif seen == "good" and out:
                good += 1
                if good == needed:
                    out = False
                    cleared += 1
            assert bool(health.fault("g")) == out
        assert health.fault("other") == ""

    check()
    assert cleared > 0


def test_process_rows_that_pass_can_be_true_NV_1_property() -> None:
    gpu = Gpu("g", 0, "m", 100, 100, ())
    kept_some = dropped_some = 0
    pids = st.one_of(
        st.integers(0, 10), st.integers(HIGHEST_PID - 2, HIGHEST_PID + 2), st.integers(0, 2**32 - 1)
    )
    sizes = st.one_of(st.none(), st.integers(0, 200 * MIB), st.integers(0, 2**64 - 1))

    @given(st.lists(st.tuples(pids, sizes), max_size=8))
    def check(rows: list[tuple[int, int | None]]) -> None:
        nonlocal kept_some, dropped_some
        warnings: list[str] = []
        processes = processes_of(gpu, rows, lambda pid: f"a{pid}", warnings)
        kept = len(processes or ())
        assert bool(warnings) == (kept < len(rows))
        for process in processes or ():
            assert 0 < process.pid <= HIGHEST_PID
            assert process.memory_mib is None or 0 <= process.memory_mib <= 100
            assert process.attempt == f"a{process.pid}"
        assert (processes is None) == (kept == 0 and bool(rows))
        kept_some += kept > 0
        dropped_some += kept < len(rows)

    check()
    assert kept_some
    assert dropped_some
