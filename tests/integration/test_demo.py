"""The trial end to end: `serai dev --once` on real etcd, a real coordinator and agents, with plain processes; and that
nothing is left of it, however it ends. Every process of a trial names its folder on its command line, or is found by it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]

_SERAI = [sys.executable, "-c", "from coordinator.cli import main; main()"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the temporary folder of the trial is made; its name is part of the command lines under it."""
    made = tmp_path / "serai-demo"
    made.mkdir()
    return made


@pytest.fixture
def demo(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("SERAI_")}
        process = subprocess.Popen(
            [*_SERAI, "dev", *words],
            env={**env, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    for pid in processes_of(folder):
        os.kill(pid, signal.SIGKILL)


def test_the_demo_ends_as_it_should(
    demo: Callable[..., subprocess.Popen[str]], folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "outcome.json"
    begin = time.monotonic()
    process = demo("--once", "--json-file", str(file))
    text, _ = process.communicate(timeout=170)
    assert process.returncode == 0, text
    assert time.monotonic() - begin < 90
    outcome = json.loads(file.read_text())
    assert outcome["ok"] is True
    jobs = {job["name"]: job for job in outcome["jobs"]}
    assert all(job["as_wanted"] for job in jobs.values())
    check_what_it_shows(jobs, outcome)
    assert processes_of(folder) == {}
    assert list(folder.iterdir()) == []


def check_what_it_shows(jobs: dict[str, Any], outcome: dict[str, Any]) -> None:
    refused, failed, gang, part = (jobs[name] for name in ("too-large", "broken", "pretrain", "label-images"))
    assert refused["state"] == "REFUSED"
    assert "GPU" in refused["why_placed"]
    assert (failed["state"], failed["exit_code"]) == ("FAILED", 3)
    assert len(gang["nodes"]) == 2
    assert sum(gpu["compute_milli"] for gpu in gang["gpus"]) == 12_000
    assert [(gpu["memory_mib"], gpu["compute_milli"]) for gpu in part["gpus"]] == [(8192, 500)]
    for name in ("train-a", "train-b", "train-c", "train-d", "train-e"):
        job = jobs[name]
        assert job["nodes"] == ["nvlink-8x80"]
        assert {gpu["index"] // 4 for gpu in job["gpus"]} in ({0}, {1})  # one NVLink group, never across two
        assert job["why_chosen"]
        assert job["why_placed"]
        assert job["ran_seconds"] >= 3
    # vision was there first with train-c, but speech is below its quota: a training of it goes ahead.
    assert jobs["train-c"]["submitted_at"] < jobs["train-d"]["submitted_at"]
    assert min(jobs[name]["started_at"] for name in ("train-d", "train-e")) < jobs["train-c"]["started_at"]
    assert outcome["fairness"]
    check_nothing_was_given_twice(list(jobs.values()))


def check_nothing_was_given_twice(jobs: list[dict[str, Any]]) -> None:
    """On each GPU, at each start of a job: what was granted then is no more than the GPU has."""
    held = [(job, gpu) for job in jobs for gpu in job["gpus"] if job["started_at"]]
    assert held
    for now in sorted(job["started_at"] for job, _ in held):
        compute: dict[str, int] = {}
        for job, gpu in held:
            if job["started_at"] <= now < job["ended_at"]:
                compute[gpu["gpu"]] = compute.get(gpu["gpu"], 0) + gpu["compute_milli"]
        assert all(milli <= 1000 for milli in compute.values()), (now, compute)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_nothing(
    demo: Callable[..., subprocess.Popen[str]], folder: Path, number: signal.Signals
) -> None:
    process = demo("--once")
    wait_until(lambda: has_task(folder), process)
    os.killpg(process.pid, number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert processes_of(folder) == {}
    assert list(folder.iterdir()) == []


def test_a_killed_trial_leaves_nothing(demo: Callable[..., subprocess.Popen[str]], folder: Path) -> None:
    """SIGKILL to the process that does everything: its keeper ends the rest, tasks included."""
    process = demo("--once")
    wait_until(lambda: has_task(folder), process)
    os.kill(child_of(process.pid), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert processes_of(folder) == {}
    assert list(folder.iterdir()) == []


def test_a_killed_keeper_leaves_no_process(demo: Callable[..., subprocess.Popen[str]], folder: Path) -> None:
    """SIGKILL to the process that the user started."""
    process = demo("--once")
    wait_until(lambda: has_task(folder), process)
    child = child_of(process.pid)
    process.kill()
    process.wait()
    wait_until(lambda: not processes_of(folder) and not Path(f"/proc/{child}").exists(), None)


def test_a_trial_that_stays_can_be_used(demo: Callable[..., subprocess.Popen[str]], folder: Path) -> None:
    """The commands that it prints work as they stand there."""
    process = demo()
    env_file = wait_until(lambda: next(folder.glob("*/env"), None), process)
    wait_until(lambda: "export SERAI_TOKEN" in env_file.read_text(), process)
    assert env_file.stat().st_mode & 0o077 == 0
    command = (
        "run --tenant vision --image busybox:1.36 --gpus 1 -- sh -c 'echo on $CUDA_VISIBLE_DEVICES; exit 7'"
    )
    serai = " ".join(["exec", sys.executable, "-c", "'from coordinator.cli import main; main()'"])
    found = subprocess.run(
        ["sh", "-c", f". {env_file}; {serai} {command}"], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 7, found.stderr
    assert found.stdout.startswith("on GPU-")
    [etcd] = re.findall(r"export ETCDCTL_ENDPOINTS=(?:http://)?(\S+)", env_file.read_text())
    with urllib.request.urlopen(f"http://{etcd}/health", timeout=10) as answer:
        assert b"true" in answer.read()
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert processes_of(folder) == {}


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str] | None) -> Any:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        assert process is None or process.poll() is None, process and process.communicate()[0]
        time.sleep(0.05)
    raise AssertionError("it did not come about in 100 s")


def has_task(folder: Path) -> bool:
    return any("serai-task" in line for line in processes_of(folder).values())


def processes_of(folder: Path) -> dict[int, str]:
    """Living processes that name the folder on their command line, or were started in a trial there."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            env = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in ("Z", "X") and (str(folder) in line or f"TMPDIR={folder}".encode() in env):
            found[int(entry.name)] = line
    return found


def child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0])
