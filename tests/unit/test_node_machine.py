"""What the agent reads of its machine, and what it accepts on its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.__main__ import main
from nodeagent.machine import Load, machine_id, read_machine

MEMINFO = "MemTotal:  2048000 kB\nMemFree: 1 kB\nMemAvailable: 1024000 kB\nHugePages_Total: 0\n"


def made(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_machines_from_one_image_are_told_apart_id_1(tmp_path: Path) -> None:
    one = made(tmp_path / "1", etc__machine_id="same")
    two = made(tmp_path / "2", etc__machine_id="same")
    for root, firmware in ((one, "A"), (two, "B")):
        (root / "etc/machine_id").rename(root / "etc/machine-id")
        made(root, sys__class__dmi__id__product_uuid=firmware)
    assert machine_id(one) != machine_id(two)
    assert machine_id(one) == machine_id(one)
    assert "same" not in machine_id(one)


def test_a_machine_without_an_identity_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="systemd-machine-id-setup"):
        machine_id(tmp_path)


def test_load_is_measured_between_two_looks(tmp_path: Path) -> None:
    cpus = "cpu0 0 0 0 0\ncpu1 0 0 0 0\n"
    root = made(tmp_path, proc__meminfo=MEMINFO, proc__stat=f"cpu 100 0 100 700 100 0 0 0 0 0\n{cpus}")
    load = Load(root)
    assert load.read() == (None, 1000)
    made(root, proc__stat=f"cpu 150 0 125 775 150 0 0 0 0 0\n{cpus}")
    assert load.read() == (750, 1000)  # 75 of 200 ticks of two cores
    assert load.read() == (None, 1000)  # no time has passed


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.cpu_milli >= 1000
    assert machine.memory_mib > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--node", "Has Blanks"], "--node"),
        (["--node", "x" * 64], "--node"),
        (["--label", "novalue"], "--label"),
        (["--cpu-milli", "0"], "--cpu-milli"),
        (["--etcd", ""], "--etcd"),
        (["--gpus", "magic"], "--gpus"),
        (["--gpus", "simulated:8xnonsense"], "nonsense"),
        (["--listen", "here"], "--listen"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--node", "n1", "--data-folder", str(tmp_path), "--runner", "process", *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in error


def test_a_config_file_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, said in (
        ("report_seconds: 0", "report_seconds"),
        ("- a", "mapping"),
        ("a: [", "YAML"),
        ("x: 1", "'x'"),
    ):
        config = tmp_path / "config.yaml"
        config.write_text(text)
        assert main(["--node", "n1", "--data-folder", str(tmp_path), "--config", str(config)]) == 2
        assert said in capsys.readouterr().err
