"""Xid events and probes through the real pynvml and the fake library."""

from __future__ import annotations

import pytest

from nodeagent.gpu_source import XidKind
from nodeagent.nvml import NvmlSource
from tests.fakenvml.library import FakeMachine
from tests.unit.nvml.cards import FOUR, GPU_IS_LOST, M1, M2, M3, MIG, A, B, fault_of, nobody


def test_application_xid_fails_the_job_and_leaves_the_gpu_GH_2(
    machine: FakeMachine, source: NvmlSource
) -> None:
    machine.write(*FOUR[:2])
    source.read_inventory()
    machine.write(*FOUR[:2], *(f"xid {n + 1} gpu=0 code={code}" for n, code in enumerate((13, 31, 43))))
    assert fault_of(source, A) == ""
    events = source.take_events()
    assert [(event.uuid, event.xid, event.kind) for event in events] == [
        (A, code, XidKind.APPLICATION) for code in (13, 31, 43)
    ]
    assert source.take_events() == ()


def test_hardware_xid_takes_the_gpu_out_until_good_probes_GH_2(
    machine: FakeMachine, source: NvmlSource
) -> None:
    machine.write(*FOUR[:2])
    source.read_inventory()
    machine.write(*FOUR[:2], "xid 1 gpu=1 code=48")
    texts = [fault_of(source, B) for _ in range(3)]
    assert texts[0] == "Xid 48: double-bit memory error (good again for 1 of 3 probes)"
    assert texts[2] == ""
    assert fault_of(source, A) == ""
    assert [(event.uuid, event.kind) for event in source.take_events()] == [(B, XidKind.HARDWARE)]


def test_gpu_that_still_asks_for_a_reset_stays_out_GH_2(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(FOUR[0])
    source.read_inventory()
    machine.write(f"{FOUR[0]} recovery=1", "xid 1 gpu=0 code=95")
    for _ in range(5):
        fault = fault_of(source, A)
    assert fault.startswith("Xid 95: ")
    assert fault.endswith("; now the driver asks for a reset of the GPU")
    machine.write(FOUR[0], "xid 1 gpu=0 code=95")
    assert [bool(fault_of(source, A)) for _ in range(3)] == [True, True, False]


def test_operator_clears_a_fault_GH_2(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(*FOUR[:1])
    source.read_inventory()
    machine.write(*FOUR[:1], "xid 1 gpu=0 code=79")
    assert fault_of(source, A)
    source.clear_fault(A)
    assert fault_of(source, A) == ""


def test_xid_of_a_card_that_is_gone_is_still_told_GH_2(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(*FOUR[:2])
    source.read_inventory()
    machine.write(*FOUR[:2], f"error any@1 {GPU_IS_LOST}", "xid 1 gpu=1 code=79")
    assert fault_of(source, B) == "Xid 79: the GPU has fallen off the bus; now GPU is lost"
    assert [(event.uuid, event.xid) for event in source.take_events()] == [(B, 79)]


def test_xid_on_mig_names_the_instance_and_hardware_takes_the_card_GH_2(
    machine: FakeMachine, source: NvmlSource
) -> None:
    machine.write(*MIG)
    source.read_inventory()
    machine.write(*MIG, "xid 1 gpu=0 code=31 gi=3 ci=0")
    source.read_report(nobody, {})
    assert [(event.uuid, event.xid) for event in source.take_events()] == [(M2, 31)]
    machine.write(*MIG, "xid 2 gpu=0 code=95")
    faults = {report.uuid: bool(report.fault) for report in source.read_report(nobody, {})}
    assert faults == {A: True, B: False, M1: True, M2: True, M3: True}


def test_row_that_cannot_be_remapped_takes_the_gpu_out(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(f"{FOUR[0]} remapfail=1", FOUR[1])
    source.read_inventory()
    assert fault_of(source, A) == "a bad row of its memory could not be remapped"
    assert fault_of(source, B) == ""


def test_xid_of_a_gpu_instance_concerns_all_its_compute_instances_GH_2(
    machine: FakeMachine, source: NvmlSource
) -> None:
    lines = [
        MIG[0],
        f"mig gpu=0 uuid={M1} mem=71424 gi=1 ci=0",
        f"mig gpu=0 uuid={M2} mem=71424 gi=1 ci=1",
        f"mig gpu=0 uuid={M3} mem=71424 gi=2 ci=0",
    ]
    machine.write(*lines)
    source.read_inventory()
    machine.write(*lines, "xid 1 gpu=0 code=31 gi=1", "xid 2 gpu=0 code=13 gi=1 ci=1")
    source.read_report(nobody, {})
    assert [(event.uuid, event.xid) for event in source.take_events()] == [(M1, 31), (M2, 31), (M2, 13)]


def test_xids_are_not_lost_when_the_library_is_opened_anew_GH_2(
    machine: FakeMachine, source: NvmlSource
) -> None:
    machine.write(*FOUR[:2], f"error any@1 {GPU_IS_LOST}")
    source.read_inventory()
    machine.write(*FOUR[:2], "xid 1 gpu=0 code=31")
    source.read_inventory()  # the lost card makes this one open the library anew
    assert [(event.uuid, event.xid) for event in source.take_events()] == [(A, 31)]


def test_loss_that_only_the_inventory_saw_needs_good_probes_too_GH_2(
    machine: FakeMachine, source: NvmlSource
) -> None:
    machine.write(*FOUR[:2])
    source.read_inventory()
    machine.write(FOUR[0])
    source.read_inventory()
    machine.write(*FOUR[:2])
    source.read_inventory()
    assert [bool(fault_of(source, B)) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("getter", ["Processes_v3", "DeviceGetTemperature", "DeviceGetFieldValues"])
def test_a_gpu_may_be_lost_at_any_call_GH_1(machine: FakeMachine, source: NvmlSource, getter: str) -> None:
    machine.write(*FOUR[:2])
    source.read_inventory()
    machine.write(*FOUR[:2], f"error {getter}@0 {GPU_IS_LOST}")
    assert [report.fault for report in source.read_report(nobody, {})] == ["GPU is lost", ""]
