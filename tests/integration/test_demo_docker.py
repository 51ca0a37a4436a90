"""`serai dev --runner docker --once`: the same jobs as real containers; none is left afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker_engine import IMAGE, DockerEngine, docker_engine

__all__ = ["docker_engine"]  # the fixture
pytestmark = [pytest.mark.etcd, pytest.mark.docker, pytest.mark.timeout(180)]


def test_the_trial_with_containers(docker_engine: DockerEngine, tmp_path: Path) -> None:
    client = docker_engine.client()
    try:
        had = any("busybox:1.36" in image.tags for image in client.images.list())
        if not had:  # the examples name it; it is never pulled
            client.images.get(IMAGE).tag("busybox", "1.36")
        before = {container.id for container in client.containers.list(all=True)}
        file = tmp_path / "outcome.json"
        env = {name: value for name, value in os.environ.items() if not name.startswith("SERAI_")}
        found = subprocess.run(
            [
                *(sys.executable, "-c", "from coordinator.cli import main; main()"),
                *("dev", "--runner", "docker", "--once", "--json-file", str(file)),
            ],
            env={**env, "DOCKER_HOST": docker_engine.url, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=170,
        )
        assert found.returncode == 0, found.stdout + found.stderr
        assert json.loads(file.read_text())["ok"] is True
        assert {container.id for container in client.containers.list(all=True)} <= before
    finally:
        if not had:
            client.images.remove("busybox:1.36")
        client.close()
