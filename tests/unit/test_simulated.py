"""Simulated GPUs: from a description to inventory and reports, without chance."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest

from nodeagent.gpu_source import GpuReader, GpusNotReady, GpuSource, WhyNotReady, XidKind
from nodeagent.simulated import BadDescription, SimulatedSource, parse_description, simulated_uuid
from vgpu.inventory import GpuProcess, LinkLevel
from vgpu.slices import Slice

EIGHT = "8x80GiB:A100-SXM4-80GB:nvlink=4"


def nobody(pid: int) -> str:
    return ""


def test_eight_gpus_in_two_nvlink_groups_and_numa_halves() -> None:
    inventory = SimulatedSource("n1", EIGHT).read_inventory()
    assert [gpu.index for gpu in inventory.gpus] == list(range(8))
    assert {(gpu.memory_mib, gpu.memory_total_mib, gpu.model) for gpu in inventory.gpus} == {
        (81920, 81920, "A100-SXM4-80GB")  # the simulated driver keeps nothing for itself
    }
    assert [gpu.numa_node for gpu in inventory.gpus] == [0] * 4 + [1] * 4
    assert {gpu.device_paths for gpu in inventory.gpus} == {("/dev/null",)}
    assert len({gpu.pci_bus_id for gpu in inventory.gpus}) == 8
    index = {gpu.uuid: gpu.index for gpu in inventory.gpus}
    assert len(inventory.links) == 28
    for link in inventory.links:
        first, second = index[link.first], index[link.second]
        assert first < second
        assert (link.nvlinks > 0) == (first // 4 == second // 4)
        assert (link.level is LinkLevel.SYSTEM) == (first // 4 != second // 4)
        assert (link.level is LinkLevel.PCIE_SWITCH) == (first // 2 == second // 2)


def test_uuids_are_stable_and_differ_by_node_and_index() -> None:
    here = [gpu.uuid for gpu in SimulatedSource("n1", EIGHT).read_inventory().gpus]
    assert here == [gpu.uuid for gpu in SimulatedSource("n1", EIGHT).read_inventory().gpus]
    there = [gpu.uuid for gpu in SimulatedSource("n2", EIGHT).read_inventory().gpus]
    assert len({*here, *there}) == 16
    assert all(re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid) for uuid in here)
    assert here[0] == simulated_uuid("n1", 0) == "GPU-29aeba3c-fee4-504e-9fe7-481e7c6a0bbc"


def test_groups_are_joined_and_mapping_is_the_same_as_text() -> None:
    inventory = SimulatedSource("n1", "2x16GiB:T4 + 1x40GiB:A100-PCIE-40GB").read_inventory()
    assert [(gpu.model, gpu.memory_mib) for gpu in inventory.gpus] == [
        ("T4", 16384),
        ("T4", 16384),
        ("A100-PCIE-40GB", 40960),
    ]
    assert all(link.nvlinks == 0 for link in inventory.links)
    mapping = {"count": 8, "memory": "80GiB", "model": "A100-SXM4-80GB", "nvlink": 4}
    assert parse_description(mapping) == parse_description(EIGHT)
    assert parse_description("4x40GiB:A100:nvlink=2:links=4:numa=2")[0].links == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected <count>x<memory>"),
        ("eight", "expected <count>x<memory>"),
        ("8x80GiB", "model is missing"),
        ("8x80:A100", "memory is '80', must be a size up to 1024GiB with a unit"),
        ("8x80GB:A100", "memory is '80GB', must be a size"),
        ("8x0GiB:A100", "memory is '0GiB'"),
        ("8x2000GiB:A100", "memory is '2000GiB', must be a size up to 1024GiB"),
        ("0x80GiB:A100", "count is '0', must be a whole number from 1 to 64"),
        ("65x80GiB:A100", "count is '65'"),
        ("40x80GiB:A100+40x80GiB:A100", "80 GPUs are more than 64"),
        ("8x80GiB:A100:nvlink=9", "nvlink is '9', must be a whole number from 1 to 8"),
        ("8x80GiB:A100:nvlink=3", "nvlink=3 does not divide the 8 GPUs"),
        ("8x80GiB:A100:numa=x", "numa is 'x'"),
        (
            "8x80GiB:A100:speed=1",
            "unknown field 'speed'; known are count, memory, model, nvlink, links, numa",
        ),
        ("8x80GiB:A100:fast", "'fast' is no <option>=<number>"),
        ({"count": True, "memory": "1GiB", "model": "m"}, "count is True"),
        ({"count": 1, "memory": 16384, "model": "m"}, "memory is 16384, must be a size"),
        ({"memory": "1GiB", "model": "m"}, "count is None"),
    ],
)
def test_bad_descriptions_say_field_value_and_limit(text: str | dict[str, object], says: str) -> None:
    with pytest.raises(BadDescription) as raised:
        parse_description(text)
    assert says in str(raised.value)


def test_report_follows_from_what_is_held() -> None:
    source = SimulatedSource("n1", "2x16GiB:T4")
    first, second = (gpu.uuid for gpu in source.read_inventory().gpus)
    held = {
        "j1.1.0": (Slice(first, 4096, 500, "mps"),),
        "j2.1.0": (Slice(first, 8192, 500, "mps"), Slice("GPU-elsewhere", 1, 1, "mps")),
    }
    busy, idle = source.read_report(nobody, held)
    assert (busy.uuid, busy.memory_used_mib, busy.utilization_percent) == (first, 12288, 90)
    assert (idle.uuid, idle.memory_used_mib, idle.utilization_percent) == (second, 0, 0)
    assert busy.temperature_celsius is not None
    assert idle.temperature_celsius is not None
    assert busy.temperature_celsius > idle.temperature_celsius
    assert busy.power_milliwatt is not None
    assert idle.power_milliwatt is not None
    assert busy.power_milliwatt > idle.power_milliwatt
    assert (busy.fault, busy.processes) == ("", ())
    assert source.read_report(nobody, held) == (busy, idle)


def test_lost_gpu_leaves_the_others_and_comes_back_GH_1() -> None:
    source = SimulatedSource("n1", "4x40GiB:A100-PCIE-40GB", good_probes_needed=2)
    gone = simulated_uuid("n1", 2)
    source.lose(gone)
    inventory = source.read_inventory()
    assert [gpu.unavailable for gpu in inventory.gpus] == ["", "", "lost: GPU is lost", ""]
    assert all(gone not in (link.first, link.second) for link in inventory.links)
    assert [report.fault for report in source.read_report(nobody, {})] == ["", "", "GPU is lost", ""]
    source.restore(gone)
    assert source.read_inventory().gpus[2].unavailable == ""
    assert "good again for 1 of 2" in source.read_report(nobody, {})[2].fault
    assert source.read_report(nobody, {})[2].fault == ""


def test_xids_and_sick_gpus_GH_2() -> None:
    source = SimulatedSource("n1", "2x16GiB:T4", good_probes_needed=1)
    first, second = (gpu.uuid for gpu in source.read_inventory().gpus)
    source.raise_xid(first, 31)
    source.raise_xid(second, 79)
    assert [(event.uuid, event.kind) for event in source.take_events()] == [
        (first, XidKind.APPLICATION),
        (second, XidKind.HARDWARE),
    ]
    source.sicken(second, "too hot")
    assert [report.fault for report in source.read_report(nobody, {})] == [
        "",
        "Xid 79: the GPU has fallen off the bus; now too hot",
    ]
    source.clear_fault(second)
    source.restore(second)
    assert [report.fault for report in source.read_report(nobody, {})] == ["", ""]


def test_foreign_process_is_shown_with_its_memory() -> None:
    source = SimulatedSource("n1", "1x16GiB:T4")
    (gpu,) = source.read_inventory().gpus
    source.occupy(gpu.uuid, [GpuProcess(77, 5000), GpuProcess(78, None)])
    (report,) = source.read_report({78: "j1.1.0"}.get, {})  # type: ignore[arg-type]
    assert report.memory_used_mib == 5000
    assert [(process.pid, process.attempt or "") for process in report.processes or ()] == [
        (77, ""),
        (78, "j1.1.0"),
    ]


def test_fault_of_a_gpu_that_is_not_here_is_refused() -> None:
    with pytest.raises(KeyError, match="no simulated GPU GPU-x"):
        SimulatedSource("n1", "1x16GiB:T4").lose("GPU-x")


async def test_reader_uses_no_thread_for_simulated_gpus_and_passes_not_ready_RR_2() -> None:
    source = SimulatedSource("n1", "1x16GiB:T4")
    reader = GpuReader(source)
    before = threading.active_count()
    assert len((await reader.inventory()).gpus) == 1
    assert len(await reader.report(nobody, {})) == 1
    assert threading.active_count() == before
    source.set_not_ready(GpusNotReady(WhyNotReady.DRIVER_NOT_LOADED, "not yet"))
    with pytest.raises(GpusNotReady, match="driver_not_loaded"):
        await reader.inventory()
    with pytest.raises(GpusNotReady):
        await reader.report(nobody, {})
    source.set_not_ready(None)
    assert len((await reader.inventory()).gpus) == 1
    await reader.close()


class Stuck(SimulatedSource):
    """Blocks until it is let go, as a driver may; then fails as told."""

    blocking = True

    def __init__(self) -> None:
        super().__init__("n1", "1x16GiB:T4")
        self.go = threading.Event()
        self.calls = 0

    def read_inventory(self):  # type: ignore[no-untyped-def]
        self.calls += 1
        self.go.wait(30)
        raise OSError("late")


async def test_a_call_that_hangs_refuses_the_next_ones_at_once() -> None:
    source = Stuck()
    reader = GpuReader(source, limit_seconds=0.02)
    for _ in range(5):
        with pytest.raises(GpusNotReady) as raised:
            await reader.inventory()
        assert raised.value.reason is WhyNotReady.NO_ANSWER
    with pytest.raises(GpusNotReady):
        await reader.report(nobody, {})
    await reader.close()  # does not wait for the hanging call
    assert source.calls == 1
    source.go.set()
    async with asyncio.timeout(10):
        while True:
            try:
                await reader.report(nobody, {})
                break
            except GpusNotReady:
                await asyncio.sleep(0.001)


async def test_an_error_of_the_source_reaches_the_caller() -> None:
    source = Stuck()
    source.go.set()
    with pytest.raises(OSError, match="late"):
        await GpuReader(source, limit_seconds=10).inventory()


def test_it_is_a_gpu_source() -> None:
    source: GpuSource = SimulatedSource("n1", "1x16GiB:T4")
    assert source.simulated
    assert not source.blocking
