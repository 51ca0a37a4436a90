"""MPS daemons are started, found again and ended; a script on the PATH stands for NVIDIA's control program."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nodeagent.isolation_steps import CONTROL, IsolationSteps, StepFailed
from nodeagent.view import step_id
from vgpu.isolation.settings import Step

GPU = "GPU-11111111-2222-3333-4444-555555555555"
# Writes its pid where the real one does, says what it was given, and ends on "quit".
FAKE = f"""#!/bin/sh
pipe=$CUDA_MPS_PIPE_DIRECTORY
echo "$@ $CUDA_VISIBLE_DEVICES" >>"$pipe/calls"
if [ "$1" = "-d" ]; then
    [ -e "$pipe/refuse" ] && exit 3
    touch /dev/shm/seen-by-daemon
    setsid sh -c 'exec -a {CONTROL} sleep 1000' >/dev/null 2>&1 &
    until [ "$(tr '\\0' ' ' </proc/$!/cmdline)" = "{CONTROL} 1000 " ]; do :; done # it is the daemon only from here on
    echo $! >"$pipe/{CONTROL}.pid"
    exit 0
fi
read said
[ "$said" = quit ] && kill "$(cat "$pipe/{CONTROL}.pid")"
"""


def step(gpu: str = GPU) -> Step:
    folder = f"/run/serai/mps/{gpu}"
    parameters = {f"{name}_directory": f"{folder}/{name}" for name in ("pipe", "log", "shm")}
    return Step("start_mps_daemon", gpu, parameters)


@pytest.fixture
async def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[IsolationSteps]:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces cannot be made here")
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(FAKE.replace("sh -c 'exec", "bash -c 'exec"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    made = IsolationSteps(lambda uuid: uuid == "MIG-there", tmp_path)
    yield made
    for left in made.done().values():
        await made.undo(left)


def calls(root: Path) -> list[str]:
    return (root / "run/serai/mps" / GPU / "pipe/calls").read_text().splitlines()


async def test_a_daemon_is_started_once_for_its_gpu_and_found_by_the_next_agent(
    steps: IsolationSteps, tmp_path: Path
) -> None:
    assert steps.done() == {}
    await steps.perform(step())
    await steps.perform(step())
    assert calls(tmp_path) == [f"-d {GPU}"]
    assert dict(steps.done()) == {step_id(step()): step()}
    assert dict(IsolationSteps(lambda _: False, tmp_path).done()) == {step_id(step()): step()}


async def test_the_daemon_shares_its_own_shm_folder_with_its_clients(
    steps: IsolationSteps, tmp_path: Path
) -> None:
    await steps.perform(step())
    shm = tmp_path / "run/serai/mps" / GPU / "shm"
    assert (shm / "seen-by-daemon").exists()
    assert not Path("/dev/shm/seen-by-daemon").exists()
    assert shm.stat().st_mode & 0o7777 == 0o1777


async def test_undoing_ends_the_daemon_and_leaves_nothing(steps: IsolationSteps, tmp_path: Path) -> None:
    await steps.perform(step())
    pid = int((tmp_path / "run/serai/mps" / GPU / f"pipe/{CONTROL}.pid").read_text())
    await steps.undo(step())
    assert steps.done() == {}
    assert not (tmp_path / "run/serai/mps" / GPU).exists()
    assert not Path(f"/proc/{pid}/exe").exists()
    await steps.undo(step())


async def test_a_daemon_that_died_is_not_done_and_is_started_again(
    steps: IsolationSteps, tmp_path: Path
) -> None:
    await steps.perform(step())
    pid_file = tmp_path / "run/serai/mps" / GPU / f"pipe/{CONTROL}.pid"
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    pid_file.write_text(str(os.getpid()))  # its pid was used again
    assert steps.done() == {}
    await steps.perform(step())
    assert len(calls(tmp_path)) == 2
    assert len(steps.done()) == 1


async def test_a_daemon_that_refuses_says_so(steps: IsolationSteps, tmp_path: Path) -> None:
    pipe = tmp_path / "run/serai/mps" / GPU / "pipe"
    pipe.mkdir(parents=True)
    (pipe / "refuse").touch()
    with pytest.raises(StepFailed, match=f"{GPU} ended with 3"):
        await steps.perform(step())
    assert steps.done() == {}


async def test_a_node_without_the_control_program_says_what_to_do(
    steps: IsolationSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(StepFailed, match=CONTROL):
        await steps.perform(step())


async def test_a_mig_instance_is_taken_if_it_exists_and_never_made(steps: IsolationSteps) -> None:
    there, missing = Step("create_mig_instance", "MIG-there"), Step("create_mig_instance", "MIG-missing")
    await steps.perform(there)
    assert step_id(there) in steps.done()
    with pytest.raises(StepFailed, match="MIG-missing"):
        await steps.perform(missing)
    await steps.undo(there)
    assert steps.done() == {}


async def test_an_unknown_step_is_refused(steps: IsolationSteps) -> None:
    with pytest.raises(StepFailed, match="polish"):
        await steps.perform(Step("polish", GPU))
