"""`serai dev --engine nomad --once` on a Nomad cluster that is there already (the fake, held against recorded answers of a
real one): its nodes get simulated GPUs, and every example job runs pinned in it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.fakenomad import FakeNomad, NomadServer

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(150)]


async def test_the_trial_on_nomad(tmp_path: Path) -> None:
    fake = FakeNomad()
    fake.clients.images.add("busybox:1.36")
    for name in ("a-large", "b-middle", "c-small"):
        fake.add_node(name)
    server = NomadServer(fake, heartbeat_seconds=0.5)
    await server.start()
    clock = asyncio.create_task(keep_time(fake))
    try:
        file = tmp_path / "outcome.json"
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SERAI_", "NOMAD_"))}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from coordinator.cli import main; main()",
            "dev", "--engine", "nomad", "--once", "--json-file", str(file),
            env={**env, "NOMAD_ADDR": server.address, "TMPDIR": str(tmp_path)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        text, _ = await asyncio.wait_for(process.communicate(), 140)
        assert process.returncode == 0, text.decode()
    finally:
        clock.cancel()
        await asyncio.gather(clock, return_exceptions=True)
        await server.stop()
    outcome = json.loads(file.read_text())
    assert outcome["ok"] is True
    assert outcome["engine"] == "nomad"
    jobs = {job["name"]: job for job in outcome["jobs"]}
    assert jobs["train-a"]["nodes"] == ["a-large"]
    assert jobs["pretrain"]["nodes"] == ["a-large", "b-middle"]
    check_containers(fake, jobs)


def check_containers(fake: FakeNomad, jobs: dict[str, dict[str, object]]) -> None:
    """Each task was one container on the node that was chosen, and no slice had two."""
    ids = {job["id"]: job for job in jobs.values() if job["id"]}
    seen: dict[object, int] = {}
    for container in fake.clients.containers.values():
        seen[container.labels["serai.job"]] = seen.get(container.labels["serai.job"], 0) + 1
    assert seen == {id: 3 if job["name"] == "pretrain" else 1 for id, job in ids.items()}
    assert fake.clients.overlaps == []


async def keep_time(fake: FakeNomad) -> None:
    """The containers of the fake sleep by its clock, which is moved with the real one."""
    while True:
        await asyncio.sleep(0.2)
        fake.clients.advance(0.2)
