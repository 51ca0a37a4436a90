"""The NVML source through the real pynvml and a fake libnvidia-ml.so.1, so that struct layouts and error codes count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.device_nodes import KernelFiles, pci_address
from nodeagent.gpu_source import GpuReader, GpusNotReady, WhyNotReady, XidKind
from nodeagent.nvml import NvmlSource
from tests.fakenvml import library
from tests.fakenvml.library import FakeMachine
from vgpu.inventory import Gpu, LinkLevel
from vgpu.slices import Slice

NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND = 3, 4, 9, 13
GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, UNKNOWN = 15, 18, 999


def uuid_of(letter: str, *, mig: bool = False) -> str:
    return f"{'MIG' if mig else 'GPU'}-{letter * 8}-{letter * 4}-{letter * 4}-{letter * 4}-{letter * 12}"


A, B, C, D = (uuid_of(letter) for letter in "abcd")
FOUR = [
    f"gpu uuid={uuid} model=NVIDIA_T4 mem=15360 reserved=450 bus={n + 1}"
    for n, uuid in enumerate((A, B, C, D))
]


@pytest.fixture(scope="module")
def fake_library() -> Iterator[None]:
    with library.loaded():
        yield


@pytest.fixture
def machine(fake_library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    monkeypatch.setenv("FAKE_NVML_SPEC", str(tmp_path / "spec"))
    return FakeMachine(tmp_path / "spec")


@pytest.fixture
def files(tmp_path: Path) -> KernelFiles:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    return KernelFiles(sys_root=tmp_path / "sys", dev_root=tmp_path / "dev", proc_root=tmp_path / "proc")


@pytest.fixture
def source(machine: FakeMachine, files: KernelFiles) -> Iterator[NvmlSource]:
    made = NvmlSource(files=files, good_probes_needed=3)
    yield made
    made.close()


def nobody(pid: int) -> str:
    return ""


def fault_of(source: NvmlSource, uuid: str) -> str:
    return next(report.fault for report in source.read_report(nobody, {}) if report.uuid == uuid)


# --- what there is ---


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
    assert any("does not say how much memory" in line for line in inventory.warnings)


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
    machine.write(*FOUR[:1], "xid 1 gpu=0 code=79")
    source.read_inventory()
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


CHILD = """
import json
from nodeagent.gpu_source import GpusNotReady
from nodeagent.nvml import NvmlSource
source = NvmlSource()
try:
    gpus = source.read_inventory().gpus
    reports = source.read_report(lambda pid: "", {})
    print(json.dumps([[g.memory_mib for g in gpus], [[p.pid for p in r.processes or ()] for r in reports]]))
except GpusNotReady as error:
    print(json.dumps(error.reason.value))
"""


def in_child(**env: str) -> object:
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, **env},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


def test_old_driver_without_the_v3_calls_NV_1(tmp_path: Path) -> None:
    old = library.build("NO_V3")
    spec = FakeMachine(tmp_path / "spec")
    spec.write(*FOUR[:1], "process gpu=0 pid=100 mem=500", "process gpu=0 pid=4194305 mem=1")
    answer = in_child(LD_LIBRARY_PATH=str(old), FAKE_NVML_SPEC=str(spec.path))
    assert answer == [[15360], [[100]]]


def test_no_library_is_a_reason_of_its_own_RR_2() -> None:
    try:
        has_library = (
            "libnvidia-ml.so.1"
            in subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
        )
    except (OSError, subprocess.CalledProcessError):
        has_library = False
    if has_library:
        pytest.skip("this machine has NVIDIA's library")
    assert in_child(LD_LIBRARY_PATH="") == "no_library"


# --- not ready, and ready again ---


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (DRIVER_NOT_LOADED, WhyNotReady.DRIVER_NOT_LOADED),
        (LIB_RM_VERSION_MISMATCH, WhyNotReady.DRIVER_MISMATCH),
        (NO_PERMISSION, WhyNotReady.NO_PERMISSION),
        (FUNCTION_NOT_FOUND, WhyNotReady.DRIVER_TOO_OLD),
        (UNKNOWN, WhyNotReady.FAILED),
    ],
)
@pytest.mark.parametrize("call", ["Init", "DeviceGetCount"])
def test_not_ready_says_why_and_heals_by_itself_RR_2_GH_10(
    machine: FakeMachine, source: NvmlSource, call: str, code: int, reason: WhyNotReady
) -> None:
    machine.write(*FOUR[:1], f"error {call} {code}")
    for _ in range(2):
        with pytest.raises(GpusNotReady) as raised:
            source.read_inventory()
        assert raised.value.reason is reason
    machine.write(*FOUR[:1])
    assert [gpu.uuid for gpu in source.read_inventory().gpus] == [A]


def test_no_gpus_is_an_answer_and_the_card_appears_later_GH_10(
    machine: FakeMachine, source: NvmlSource
) -> None:
    machine.write()
    inventory = source.read_inventory()
    assert inventory.gpus == ()
    assert inventory.warnings == ("the driver is loaded and reports no GPUs",)
    assert source.read_report(nobody, {}) == ()
    machine.write(*FOUR[:1])
    assert [gpu.uuid for gpu in source.read_inventory().gpus] == [A]


def test_driver_gone_while_running_is_not_ready_not_lost_RR_2(
    machine: FakeMachine, source: NvmlSource
) -> None:
    machine.write(*FOUR[:1])
    source.read_inventory()
    machine.write(*FOUR[:1], f"error any {DRIVER_NOT_LOADED}")
    with pytest.raises(GpusNotReady):
        source.read_report(nobody, {})
    machine.write(*FOUR[:1])
    assert [report.fault for report in source.read_report(nobody, {})] == [""]


async def test_hung_driver_blocks_nobody_and_costs_one_thread(
    machine: FakeMachine, source: NvmlSource, tmp_path: Path
) -> None:
    stuck = tmp_path / "stuck"
    stuck.touch()
    machine.write(*FOUR[:1], f"hang DeviceGetCount {stuck}")
    reader = GpuReader(source, limit_seconds=0.05)
    for _ in range(20):
        with pytest.raises(GpusNotReady) as raised:
            await reader.inventory()
        assert raised.value.reason is WhyNotReady.NO_ANSWER
    hanging = [thread for thread in threading.enumerate() if thread.name.startswith("gpu-")]
    assert len(hanging) == 1
    stuck.unlink()
    hanging[0].join(10)
    assert not hanging[0].is_alive()
    patient = GpuReader(source, limit_seconds=10)
    assert [gpu.uuid for gpu in (await patient.inventory()).gpus] == [A]
    deadline = time.monotonic() + 10
    while True:  # the late answer is settled by the loop
        try:
            assert len(await reader.report(nobody, {})) == 1
            break
        except GpusNotReady:
            assert time.monotonic() < deadline
    await reader.close()


# --- MIG ---

# Sizes as an H200 shows them: 1g.18gb is 16384 MiB, far from the 18 of its name (MG-1).
MIG = [
    f"gpu uuid={A} model=NVIDIA_H200 mem=143771 mig=1",
    f"gpu uuid={B} model=NVIDIA_H200 mem=143771",
    f"mig gpu=0 uuid={uuid_of('1', mig=True)} model=NVIDIA_H200_MIG_1g.18gb mem=16384 gi=7 slices=1",
    f"mig gpu=0 uuid={uuid_of('2', mig=True)} model=NVIDIA_H200_MIG_2g.35gb mem=33280 gi=3 slices=2 used=100",
    f"mig gpu=0 uuid={uuid_of('3', mig=True)} model=NVIDIA_H200_MIG_3g.71gb mem=71424 gi=1 slices=3",
]
M1, M2, M3 = (uuid_of(letter, mig=True) for letter in "123")


def by_uuid(gpus: tuple[Gpu, ...]) -> dict[str, Gpu]:
    return {gpu.uuid: gpu for gpu in gpus}


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


# --- Xids ---


def test_application_xid_fails_the_job_and_leaves_the_gpu_GH_2(
    machine: FakeMachine, source: NvmlSource
) -> None:
    machine.write(*FOUR[:2], *(f"xid {n + 1} gpu=0 code={code}" for n, code in enumerate((13, 31, 43))))
    source.read_inventory()
    assert fault_of(source, A) == ""
    events = source.take_events()
    assert [(event.uuid, event.xid, event.kind) for event in events] == [
        (A, code, XidKind.APPLICATION) for code in (13, 31, 43)
    ]
    assert source.take_events() == ()


def test_hardware_xid_takes_the_gpu_out_until_good_probes_GH_2(
    machine: FakeMachine, source: NvmlSource
) -> None:
    machine.write(*FOUR[:2], "xid 1 gpu=1 code=48")
    source.read_inventory()
    texts = [fault_of(source, B) for _ in range(3)]
    assert texts[0] == "Xid 48: double-bit memory error (good again for 1 of 3 probes)"
    assert texts[2] == ""
    assert fault_of(source, A) == ""
    assert [(event.uuid, event.kind) for event in source.take_events()] == [(B, XidKind.HARDWARE)]


def test_gpu_that_still_asks_for_a_reset_stays_out_GH_2(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(f"{FOUR[0]} recovery=1", "xid 1 gpu=0 code=95")
    source.read_inventory()
    for _ in range(5):
        fault = fault_of(source, A)
    assert fault.startswith("Xid 95: ")
    assert fault.endswith("; now the driver asks for a reset of the GPU")
    machine.write(FOUR[0], "xid 1 gpu=0 code=95")
    assert [bool(fault_of(source, A)) for _ in range(3)] == [True, True, False]


def test_operator_clears_a_fault_GH_2(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(*FOUR[:1], "xid 1 gpu=0 code=79")
    source.read_inventory()
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
    machine.write(*MIG, "xid 1 gpu=0 code=31 gi=3 ci=0")
    source.read_inventory()
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
