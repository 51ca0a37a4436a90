"""A machine of the fake NVML library, and the source under test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.device_nodes import KernelFiles
from nodeagent.nvml import NvmlSource
from tests.fakenvml import library
from tests.fakenvml.library import FakeMachine


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
