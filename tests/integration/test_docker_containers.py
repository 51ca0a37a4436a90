"""What a container of ours can see and use, and what the Docker Engine's own faults look like to the agent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import docker
import pytest

from jobspecs.container import Grant
from nodeagent.containers import DockerRunner
from nodeagent.runner import OUTPUT_DROPPED, LaunchFailed, Observed, RunnerUnavailable, StopUnconfirmed
from tests.contract.test_runner import KEY, container, end_of, grant, observe, output, until
from tests.docker_engine import IMAGE, DockerEngine
from vgpu.isolation.settings import Device, GpuSettings

pytestmark = pytest.mark.docker


@pytest.fixture
async def runner(docker_engine: DockerEngine) -> AsyncIterator[DockerRunner]:
    made = DockerRunner("n1", "test", docker_engine.socket)
    yield made
    await made.close()
    _remove_all(docker_engine)


def _remove_all(engine: DockerEngine) -> None:
    client = engine.client()
    for left in client.containers.list(all=True, filters={"label": "serai.cluster=test"}):
        left.remove(force=True)
    client.close()


@pytest.fixture
def fake_gpu(tmp_path: Path) -> Path:
    """A device node that behaves as /dev/null does."""
    path = tmp_path / "nvidia0"
    try:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("device nodes cannot be made here")
    return path


async def run(runner: DockerRunner, script: str, **changes: object) -> bytes:
    settings = container("sh", "-c", script, **changes)
    await runner.start(grant(settings), settings)
    await end_of(runner)
    return await output(runner)


async def test_a_container_sees_exactly_its_device_nodes_ex_9(runner: DockerRunner, fake_gpu: Path) -> None:
    gpu = GpuSettings(devices=(Device(str(fake_gpu), "/dev/nvidia0"),))
    said = await run(runner, "cd /dev; ls -d nvidia*; echo x > nvidia0 && echo used", gpu=gpu)
    assert said == b"nvidia0\nused\n"


async def test_a_container_without_gpus_sees_none_and_makes_none_ex_9(runner: DockerRunner) -> None:
    said = await run(runner, "ls -d /dev/nvidia* 2>/dev/null; mknod /tmp/d c 1 3 2>/dev/null || echo refused")
    assert said == b"refused\n"


async def test_memory_cpu_and_shm_are_held(runner: DockerRunner, docker_engine: DockerEngine) -> None:
    script = (
        "cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes;"
        "stat -f -c '%b %S' /dev/shm"
    )
    limit, shm = (await run(runner, script, memory_mib=48, shm_mib=8)).splitlines()
    assert int(limit) == 48 * 2**20
    blocks, size = map(int, shm.split())
    assert blocks * size == 8 * 2**20
    client = docker.APIClient(base_url=docker_engine.url)
    host = client.inspect_container(KEY.name)["HostConfig"]
    client.close()
    assert host["RestartPolicy"]["Name"] in ("", "no")
    assert not host["Privileged"]
    assert host["AutoRemove"] is False


async def test_more_memory_than_granted_is_an_out_of_memory_kill_ex_1(runner: DockerRunner) -> None:
    settings = container("tail", "/dev/zero", memory_mib=16)
    await runner.start(grant(settings), settings)
    ended = await end_of(runner)
    assert (ended.exit_code, ended.oom_killed) == (137, True)


async def test_a_missing_device_fails_the_launch_and_leaves_nothing(runner: DockerRunner) -> None:
    settings = container("true", gpu=GpuSettings(devices=(Device("/dev/no-such-gpu", "/dev/nvidia0"),)))
    with pytest.raises(LaunchFailed, match="no-such-gpu") as failed:
        await runner.start(grant(settings), settings)
    assert failed.value.fault == "launch_failed"
    assert await runner.list() == ()


async def test_an_unknown_runtime_fails_the_launch_with_the_engines_words(runner: DockerRunner) -> None:
    settings = container("true", gpu=GpuSettings(runtime="no-such-runtime"))
    with pytest.raises(LaunchFailed, match="no-such-runtime") as failed:
        await runner.start(grant(settings), settings)
    assert failed.value.fault == "launch_failed"
    assert await runner.list() == ()


async def test_an_image_that_no_registry_can_be_asked_for_may_be_tried_again_ex_4(
    runner: DockerRunner,
) -> None:
    settings = container("true", image="127.0.0.1:9/nobody/nothing:1")
    with pytest.raises(LaunchFailed, match=r"127\.0\.0\.1:9") as failed:
        await runner.start(grant(settings), settings)
    assert failed.value.fault == "launch_failed"
    assert await runner.list() == ()


async def test_an_image_name_that_is_none_is_hopeless_ex_4(runner: DockerRunner) -> None:
    settings = container("true", image="No Such Image")
    with pytest.raises(LaunchFailed) as failed:
        await runner.start(grant(settings), settings)
    assert failed.value.fault == "image_unavailable"


async def test_a_file_that_cannot_be_executed_is_126(runner: DockerRunner) -> None:
    settings = container("/etc")
    with pytest.raises(LaunchFailed) as failed:
        await runner.start(grant(settings), settings)
    assert (failed.value.exit_code, failed.value.fault) == (126, "")
    assert await runner.list() == ()


async def test_a_container_that_was_made_and_not_started_is_started_ex_5(
    runner: DockerRunner, docker_engine: DockerEngine
) -> None:
    settings = container("sh", "-c", "exit 5")
    await runner.start(grant(settings), settings)
    await end_of(runner)
    client = docker.APIClient(base_url=docker_engine.url)
    labels = client.inspect_container(KEY.name)["Config"]["Labels"]
    await runner.remove(KEY)
    client.create_container(
        IMAGE, ["sh", "-c", "exit 6"], name=KEY.name, labels=labels
    )  # by an agent that died
    client.close()
    created = await observe(runner)
    assert created is not None
    assert created.state is Observed.CREATED
    await runner.start(grant(settings), settings)
    assert (await end_of(runner)).exit_code == 6


async def test_containers_of_others_are_not_ours(runner: DockerRunner, docker_engine: DockerEngine) -> None:
    other = DockerRunner("n2", "test", docker_engine.socket)
    settings = container("sleep", "100")
    await other.start(Grant("n2", KEY.job, 1, "a", (settings,), 0), settings)
    assert await runner.list() == ()
    await runner.stop(KEY, 0)
    await runner.remove(KEY)
    mine = await observe(other)
    assert mine is not None
    assert mine.state is Observed.RUNNING
    await other.close()


async def test_what_nomad_runs_for_us_is_seen_as_foreign(
    runner: DockerRunner, docker_engine: DockerEngine
) -> None:
    client = docker.APIClient(base_url=docker_engine.url)
    labels = {**container().labels, "com.hashicorp.nomad.alloc_id": "x"}
    id = client.create_container(IMAGE, ["sleep", "100"], labels=labels)["Id"]
    client.start(id)
    client.close()
    task = await observe(runner)
    assert task is not None
    assert (task.foreign, task.state) == (True, Observed.RUNNING)


async def test_output_beyond_its_limit_keeps_the_end_and_says_so_ob_2(
    runner: DockerRunner, docker_engine: DockerEngine
) -> None:
    """80 bytes of JSON around each line count too: some 4 MiB, where 2 files of 1 MiB are kept."""
    small = DockerRunner("n1", "test", docker_engine.socket, log_file_mib=1)
    line = "x" * 999
    said = await run(small, f"yes {line} | head -n 4000; echo END")
    await small.close()
    assert said.endswith(b"END\n")
    assert said.startswith(OUTPUT_DROPPED)
    assert len(said) < 2 * 2**20
    assert (await output(runner, tail_bytes=4)) == b"END\n"


async def test_a_restarted_engine_is_waited_for_and_its_containers_have_ended(
    docker_engine: DockerEngine, runner: DockerRunner
) -> None:
    if not docker_engine.is_own:
        pytest.skip("the machine's own Docker Engine is not restarted")
    hints = 0

    async def count() -> None:
        nonlocal hints
        async for _ in runner.events():
            hints += 1

    counting = asyncio.create_task(count())
    settings = container("sleep", "1000")
    await runner.start(grant(settings), settings)
    await until(lambda: _is(hints > 0))
    await asyncio.to_thread(docker_engine.stop)
    with pytest.raises(RunnerUnavailable, match=str(docker_engine.socket)):
        await runner.list()
    with pytest.raises(RunnerUnavailable):
        await runner.start(grant(settings), settings)
    await asyncio.to_thread(docker_engine.start)
    ended = await end_of(runner)
    assert ended.exit_code not in (0, None)  # an engine without live-restore kills what it ran
    seen = hints
    await runner.remove(KEY)
    await until(lambda: _is(hints > seen))  # the events are followed again
    counting.cancel()
    await asyncio.gather(counting, return_exceptions=True)


async def test_a_container_that_cannot_be_killed_costs_a_bounded_wait_gh_8(
    docker_engine: DockerEngine, runner: DockerRunner
) -> None:
    if not docker_engine.is_own:
        pytest.skip("the machine's own Docker Engine is not frozen")
    hasty = DockerRunner("n1", "test", docker_engine.socket, call_seconds=5, kill_confirm_seconds=1)
    settings = container("sleep", "1000")
    await runner.start(grant(settings), settings)
    daemon = docker_engine.process
    assert daemon is not None
    os.kill(daemon.pid, signal.SIGSTOP)  # it takes the request and never answers
    try:
        async with asyncio.timeout(15):
            with pytest.raises((StopUnconfirmed, RunnerUnavailable)):
                await hasty.stop(KEY, 1)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
        await hasty.close()
    await runner.stop(KEY, 0)
    assert (await end_of(runner)).exit_code == 137


async def test_the_engine_says_how_gpus_enter_a_container(runner: DockerRunner) -> None:
    facts = await runner.probe()
    assert facts.container_gpus in ("devices", "nvidia-runtime", "cdi")
    if subprocess.run(["which", "nvidia-container-runtime"], capture_output=True).returncode:
        assert facts.container_gpus == "devices"


async def _is(value: bool) -> bool:
    return value
