"""MIG instances through the real pynvml and the fake library."""

from __future__ import annotations

import pytest

from nodeagent.device_nodes import KernelFiles
from nodeagent.nvml import NvmlSource
from tests.fakenvml.library import FakeMachine
from tests.unit.nvml.cards import (
    M1,
    M2,
    M3,
    MIG,
    A,
    B,
    by_uuid,
    nobody,
    uuid_of,
)
from vgpu.slices import Slice


def test_mig_sizes_come_from_the_driver_MG_1(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(*MIG)
    gpus = by_uuid(source.read_inventory().gpus)
    assert [gpus[uuid].memory_mib for uuid in (M1, M2, M3)] == [16384, 33280, 71424]
    assert [gpus[uuid].compute_milli for uuid in (M1, M2, M3)] == [142, 285, 428]
    assert [gpus[uuid].mig_profile for uuid in (M1, M2, M3)] == ["1g.18gb", "2g.35gb", "3g.71gb"]
    assert {gpus[uuid].parent for uuid in (M1, M2, M3)} == {A}


def test_card_in_mig_mode_is_never_offered_whole_MG_5(machine: FakeMachine, source: NvmlSource) -> None:
    seven = [f"mig gpu=0 uuid={uuid_of(n, mig=True)} mem=16384 gi={7 + int(n)}" for n in "1234567"]
    machine.write(*MIG[:2], *seven)
    inventory = source.read_inventory()
    gpus = by_uuid(inventory.gpus)
    assert gpus[A].unavailable == "in MIG mode"
    assert [gpu.uuid for gpu in inventory.gpus if not gpu.unavailable and not gpu.parent] == [B]
    instances = [gpu for gpu in inventory.gpus if gpu.parent]
    assert len(instances) == 7
    assert {gpu.unavailable for gpu in instances} == {""}
    assert sum(gpu.compute_milli for gpu in instances) <= 1000
    assert [(link.first, link.second) for link in inventory.links] == [(A, B)]
    assert {report.fault for report in source.read_report(nobody, {})} == {""}


def test_old_mig_uuid_form_is_known_MG_5(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(MIG[0], f"mig gpu=0 uuid=MIG-{A}/7/0 mem=16384 gi=7")
    assert [gpu.unavailable for gpu in source.read_inventory().gpus] == ["in MIG mode", ""]


@pytest.mark.parametrize("odd", ["MIG-17", f"{B}", "MIG-GPU-17/1/2"])
def test_unknown_uuid_form_is_an_explicit_error_MG_5(
    machine: FakeMachine, source: NvmlSource, odd: str
) -> None:
    machine.write(MIG[0], f"mig gpu=0 uuid={odd} mem=16384 gi=7")
    inventory = source.read_inventory()
    assert (
        by_uuid(inventory.gpus)[odd].unavailable
        == f"UUID {odd!r} has a form that is not known for a MIG instance"
    )
    assert any("may not be used" in line and odd in line for line in inventory.warnings)


def test_removed_instance_is_retired_and_flagged_only_for_its_holder_MG_4(
    machine: FakeMachine, source: NvmlSource
) -> None:
    machine.write(*MIG)
    source.read_inventory()
    machine.write(*MIG[:4])
    inventory = source.read_inventory()
    assert M3 not in by_uuid(inventory.gpus)
    assert f"MIG instance {M3} of {A} no longer exists" in inventory.warnings
    held = {"j1.1.0": (Slice(M3, 71424, 428, "mig"),), "j2.1.0": (Slice(M1, 16384, 142, "mig"),)}
    faults = {report.uuid: report.fault for report in source.read_report(nobody, held)}
    assert faults == {A: "", B: "", M1: "", M2: "", M3: "gone: the machine no longer has it"}


def test_leaving_mig_mode_gives_the_whole_card_back_MG_4(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(*MIG[:3])
    source.read_inventory()
    machine.write(MIG[0].replace("mig=1", "mig=0"), MIG[1])
    assert [(gpu.uuid, gpu.unavailable) for gpu in source.read_inventory().gpus] == [(A, ""), (B, "")]


def test_compute_instances_of_one_gpu_instance_share_its_memory(
    machine: FakeMachine, source: NvmlSource
) -> None:
    machine.write(
        MIG[0],
        f"mig gpu=0 uuid={M1} mem=71424 gi=1 ci=0 slices=1",
        f"mig gpu=0 uuid={M2} mem=71424 gi=1 ci=1 slices=2",
        MIG[4].replace("gi=1", "gi=2"),
    )
    gpus = by_uuid(source.read_inventory().gpus)
    assert [gpus[uuid].memory_mib for uuid in (M1, M2, M3)] == [35712, 35712, 71424]


def test_mig_device_nodes_open_that_instance_only(
    machine: FakeMachine, source: NvmlSource, files: KernelFiles
) -> None:
    machine.write(*MIG[:4])
    caps = files.proc_root / "driver/nvidia/capabilities/gpu0/mig"
    for path, minor in (("gi7/access", 66), ("gi7/ci0/access", 67), ("gi3/access", 30)):
        (caps / path).parent.mkdir(parents=True, exist_ok=True)
        (caps / path).write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 256\nDeviceFileModify: 1\n")
    (files.dev_root / "nvidia-caps").mkdir()
    for minor in (30, 66, 67):
        (files.dev_root / f"nvidia-caps/nvidia-cap{minor}").touch()
    gpus = by_uuid(source.read_inventory().gpus)
    card = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
    assert gpus[M1].device_paths == (*card, "/dev/nvidia-caps/nvidia-cap66", "/dev/nvidia-caps/nvidia-cap67")
    assert gpus[M2].device_paths == ()  # one of its two capabilities is missing


def test_mig_instances_report_their_own_memory_and_processes_MG_1(
    machine: FakeMachine, source: NvmlSource
) -> None:
    machine.write(*MIG, "process mig=1 pid=321 mem=100")
    reports = {report.uuid: report for report in source.read_report(nobody, {})}
    assert reports[M2].memory_used_mib == 100
    assert [process.pid for process in reports[M2].processes or ()] == [321]
    assert reports[M1].processes == ()
    assert reports[M1].utilization_percent is None  # the driver has none for an instance
