"""When the driver is not there, old, hung, or slow to show its GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nodeagent.gpu_source import GpuReader, GpusNotReady, WhyNotReady
from nodeagent.nvml import NvmlSource
from tests.fakenvml import library
from tests.fakenvml.library import FakeMachine
from tests.unit.nvml.cards import (
    DRIVER_NOT_LOADED,
    FOUR,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    LIB_RM_VERSION_MISMATCH,
    NO_PERMISSION,
    UNKNOWN,
    A,
    B,
    nobody,
)

ROOT = Path(__file__).parents[3]

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
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


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


def test_missing_card_is_asked_for_with_back_off_GH_10(machine: FakeMachine, source: NvmlSource) -> None:
    lost = [*FOUR[:2], f"error any@1 {GPU_IS_LOST}"]
    refused = f"error Init {UNKNOWN}"
    opened = []
    machine.write(*lost)
    source.read_inventory()
    for reading in range(1, 20):
        machine.write(*lost, refused)  # only a reading that opens the library anew meets this
        try:
            source.read_inventory()
        except GpusNotReady:
            opened.append(reading)
            machine.write(*lost)
            source.read_inventory()
    assert opened == [1, 3, 7, 15]
    machine.write(*FOUR[:2])
    assert [gpu.uuid for gpu in source.read_inventory().gpus] == [A, B]


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


def test_old_driver_without_the_v3_calls_NV_1(tmp_path: Path) -> None:
    old = library.build("NO_V3")
    spec = FakeMachine(tmp_path / "spec")
    spec.write(*FOUR[:1], "process gpu=0 pid=100 mem=500", "process gpu=0 pid=4194305 mem=1")
    answer = in_child(LD_LIBRARY_PATH=str(old), FAKE_NVML_SPEC=str(spec.path))
    assert answer == [[15360], [[100]]]


def test_an_error_of_all_gives_the_library_back_GH_10(machine: FakeMachine, source: NvmlSource) -> None:
    machine.write(*FOUR[:1])
    source.read_inventory()
    machine.write(*FOUR[:1], f"error DeviceGetCount {UNKNOWN}")
    with pytest.raises(GpusNotReady):
        source.read_inventory()
    machine.write(*FOUR[:1], f"error Init {DRIVER_NOT_LOADED}")  # met only by one that opens it anew
    with pytest.raises(GpusNotReady, match="driver_not_loaded"):
        source.read_inventory()


HANGING_CHILD = """
import asyncio
from nodeagent.gpu_source import GpuReader, GpusNotReady
from nodeagent.nvml import NvmlSource
async def main():
    try:
        await GpuReader(NvmlSource(), limit_seconds=0.05).inventory()
    except GpusNotReady as error:
        print(error.reason.value)
asyncio.run(main())
"""


def test_hung_driver_does_not_keep_the_agent_from_exiting(tmp_path: Path) -> None:
    spec = FakeMachine(tmp_path / "spec")
    spec.write(f"hang Init {spec.path}")
    env = {**os.environ, "LD_LIBRARY_PATH": str(library.build()), "FAKE_NVML_SPEC": str(spec.path)}
    done = subprocess.run(
        [sys.executable, "-c", HANGING_CHILD],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout == "no_answer\n"
