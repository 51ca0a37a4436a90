"""What the NVML source finds, through the real pynvml and a fake libnvidia-ml.so.1, so that struct layouts count."""

from __future__ import annotations

import pytest

from nodeagent.device_nodes import KernelFiles, pci_address
from nodeagent.nvml import NvmlSource
from tests.fakenvml.library import FakeMachine
from tests.unit.nvml.cards import (
    FOUR,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    A,
    B,
    C,
    D,
    fault_of,
    nobody,
)
from vgpu.inventory import LinkLevel


def test_reserve_is_not_given_out_FR_7(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(*FOUR[:1])
    inventory = source.read_inventory()
    (gpu,) = inventory.gpus
    assert (gpu.memory_total_mib, gpu.memory_mib) == (15360, 14910)
    assert gpu.memory_mib // 1024 == 14
    assert (gpu.uuid, gpu.index, gpu.model, gpu.pci_bus_id) == (A, 0, "NVIDIA T4", "0000:01:00.0")
    assert gpu.compute_milli == 1000
    assert gpu.unavailable == ""
    assert inventory.warnings == ()


def test_unknown_reserve_is_said_FR_7(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(*FOUR[:1], f"error DeviceGetMemoryInfo_v2 {FUNCTION_NOT_FOUND}")
    inventory = source.read_inventory()
    assert inventory.gpus[0].memory_mib == 15360
    assert any("does not say how much memory it keeps" in line for line in inventory.warnings)


def test_numa_node_and_device_nodes(machine: FakeMachine, source: NvmlSource, files: KernelFiles) -> None:
    machine.write(*FOUR[:3], f"gpu uuid={D} minor=9")
    for address, node in (("0000:01:00.0", "1"), ("0000:02:00.0", "-1")):
        folder = files.sys_root / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    inventory = source.read_inventory()
    assert [gpu.numa_node for gpu in inventory.gpus] == [1, None, None, None]
    assert inventory.gpus[1].device_paths == ("/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")
    assert inventory.gpus[3].device_paths == ()
    assert [line for line in inventory.warnings if "/dev/nvidia9" in line]


@pytest.mark.parametrize(
    ("written", "read"),
    [("00000000:3B:00.0", "0000:3b:00.0"), ("00010000:01:00.0", "10000:01:00.0"), ("", ""), ("odd", "")],
)
def test_pci_address(written: str, read: str) -> None:
    assert pci_address(written) == read


def test_topology_levels(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(*FOUR, "topology 0 1 10", "topology 2 3 30", "topology 0 2 40", "topology 0 3 77")
    level = {(link.first, link.second): link.level for link in source.read_inventory().links}
    assert len(level) == 6
    assert level[A, B] is LinkLevel.PCIE_SWITCH
    assert level[C, D] is LinkLevel.HOST_BRIDGE
    assert level[A, C] is LinkLevel.NUMA_NODE
    assert level[A, D] is LinkLevel.SYSTEM  # a level that is not known is taken for the farthest
    assert level[B, D] is LinkLevel.SYSTEM


def test_direct_nvlinks_count_where_both_ends_are_up(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(
        *FOUR[:3],
        *("nvlink 0 0 peer=1", "nvlink 0 1 peer=1", "nvlink 0 2 peer=2", "nvlink 0 3 peer=2 active=0"),
        *("nvlink 1 0 peer=0", "nvlink 1 1 peer=0", "nvlink 2 5 peer=1"),
    )
    count = {(link.first, link.second): link.nvlinks for link in source.read_inventory().links}
    assert count == {(A, B): 2, (A, C): 0, (B, C): 0}


def test_each_pair_behind_an_nvswitch_counts_all_links(machine: FakeMachine, source: NvmlSource) -> None:
    full = [f"nvlink {gpu} {link} switch=1" for gpu in (0, 1) for link in range(18)]
    machine.write(*FOUR[:3], *full, *(f"nvlink 2 {link} switch=1" for link in range(17)))
    count = {(link.first, link.second): link.nvlinks for link in source.read_inventory().links}
    assert count == {(A, B): 18, (A, C): 17, (B, C): 17}


# --- lost, replaced and shifted cards ---


def test_one_lost_gpu_hides_no_other_GH_1(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(*FOUR, f"error any@2 {GPU_IS_LOST}")
    inventory = source.read_inventory()
    assert [gpu.uuid for gpu in inventory.gpus] == [A, B, D]
    assert inventory.warnings == ("GPU 2 cannot be read: GPU is lost",)
    assert [report.fault for report in source.read_report(nobody, {})] == ["", "", ""]


def test_gpu_lost_while_running_stays_known_and_comes_back_GH_1(
    machine: FakeMachine, source: NvmlSource
) -> None:
    machine.write(*FOUR)
    source.read_inventory()
    machine.write(*FOUR, f"error any@2 {GPU_IS_LOST}")
    reports = {report.uuid: report for report in source.read_report(nobody, {})}
    assert {uuid: report.fault for uuid, report in reports.items()} == {A: "", B: "", C: "GPU is lost", D: ""}
    assert reports[C].memory_used_mib is None
    lost = next(gpu for gpu in source.read_inventory().gpus if gpu.uuid == C)
    assert lost.unavailable == "lost: the driver no longer lists it"
    machine.write(*FOUR)
    assert [gpu.unavailable for gpu in source.read_inventory().gpus] == ["", "", "", ""]
    assert "good again for 1 of 3 probes" in fault_of(source, C)
    assert fault_of(source, C)
    assert fault_of(source, C) == ""


def test_gpu_lost_over_a_restart_is_shown_and_indexes_shift_GH_5(
    machine: FakeMachine, source: NvmlSource, files: KernelFiles
) -> None:
    machine.write(*FOUR)
    known = source.read_inventory().gpus
    source.close()
    machine.write(FOUR[0], *FOUR[2:])
    again = NvmlSource(known, files)
    gpus = {gpu.uuid: gpu for gpu in again.read_inventory().gpus}
    assert [gpus[uuid].index for uuid in (A, C, D)] == [0, 1, 2]
    assert (gpus[D].unavailable, gpus[D].pci_bus_id) == ("", "0000:04:00.0")
    assert gpus[B].unavailable.startswith("lost: ")
    assert {report.uuid for report in again.read_report(nobody, {}) if report.fault} == {B}
    again.close()


def test_replaced_card_is_new_and_healthy_GH_4(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(*FOUR[:1])
    source.read_inventory()
    machine.write(*FOUR[:1], "xid 1 gpu=0 code=79")
    assert fault_of(source, A).startswith("Xid 79")
    machine.write(f"gpu uuid={B} bus=1")
    source.close()  # a card is replaced with the machine off
    inventory = source.read_inventory()
    assert [gpu.uuid for gpu in inventory.gpus] == [B]
    assert f"GPU {A} at 0000:01:00.0 was replaced by {B}" in inventory.warnings
    assert fault_of(source, B) == ""


@pytest.mark.parametrize("getter", ["DeviceGetUUID", "DeviceGetMemoryInfo"])
def test_only_uuid_and_memory_take_a_gpu_out_NV_2(
    machine: FakeMachine, source: NvmlSource, getter: str
) -> None:
    both = getter == "DeviceGetMemoryInfo"
    extra = [f"error DeviceGetMemoryInfo_v2@0 {UNKNOWN}"] if both else []
    machine.write(*FOUR[:2], f"error {getter}@0 {UNKNOWN}", *extra)
    inventory = source.read_inventory()
    assert [gpu.uuid for gpu in inventory.gpus] == [B]
    assert any(line.startswith("GPU 0") and "Unknown Error" in line for line in inventory.warnings)


FIELDS = {
    "DeviceGetUtilizationRates": "utilization_percent",
    "DeviceGetTemperature": "temperature_celsius",
    "DeviceGetPowerUsage": "power_milliwatt",
    "Processes_v3": "processes",
}
OTHERS = [
    *(
        "DeviceGetPciInfo",
        "DeviceGetMinorNumber",
        "DeviceGetName",
        "DeviceGetMigMode",
        "DeviceGetRemappedRows",
    ),
    *(
        "DeviceGetFieldValues",
        "DeviceGetTopologyCommonAncestor",
        "DeviceGetNvLinkState",
        "DeviceRegisterEvents",
    ),
    *("DeviceGetNvLinkRemoteDeviceType", "DeviceGetNvLinkRemotePciInfo", "EventSetCreate", "EventSetWait"),
]


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, UNKNOWN])
@pytest.mark.parametrize("getter", [*FIELDS, *OTHERS])
def test_a_getter_that_fails_costs_its_field_alone_NV_2(
    machine: FakeMachine, source: NvmlSource, getter: str, code: int
) -> None:
    busy = f"{FOUR[0]} used=2048 util=30 temp=55 power=70000"
    machine.write(busy, FOUR[1], "nvlink 0 0 peer=1", "nvlink 1 0 peer=0", f"error {getter} {code}")
    inventory = source.read_inventory()
    assert [(gpu.uuid, gpu.memory_mib, gpu.unavailable) for gpu in inventory.gpus] == [
        (A, 14910, ""),
        (B, 14910, ""),
    ]
    assert len(inventory.links) == 1
    report = source.read_report(nobody, {})[0]
    expected = {
        "memory_used_mib": 2048,
        "utilization_percent": 30,
        "temperature_celsius": 55,
        "power_milliwatt": 70000,
        "processes": (),
        "fault": "",
    }
    if getter in FIELDS:
        expected[FIELDS[getter]] = None
    assert {name: getattr(report, name) for name in expected} == expected


# --- processes ---


def test_impossible_process_rows_are_dropped_NV_1(machine: FakeMachine, source: NvmlSource) -> None:
    rows = [
        "process gpu=0 pid=100 mem=500",
        "process gpu=0 pid=4194305 mem=1",
        "process gpu=0 pid=7 mem=15361",
    ]
    machine.write(*FOUR[:1], *rows, "process gpu=0 pid=200 mem=-1", "process gpu=0 pid=0 mem=1")
    attempts = {100: "j1.1.0"}
    (report,) = source.read_report(lambda pid: attempts.get(pid, ""), {})
    assert report.processes is not None
    seen = [(process.pid, process.memory_mib, process.attempt) for process in report.processes]
    assert seen == [(100, 500, "j1.1.0"), (200, None, "")]
    assert source.warnings == (f"process info unavailable for GPU {A}: 3 of 5 rows cannot be true",)


def test_nothing_but_impossible_rows_is_unknown_not_empty_NV_1(
    machine: FakeMachine, source: NvmlSource
) -> None:
    machine.write(*FOUR[:1], "process gpu=0 pid=524288000 mem=0")
    assert source.read_report(nobody, {})[0].processes is None
