"""Containers of a trial that are still there after its agents have ended: removed, by the label of its cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import aiohttp

from jobspecs.container import LABEL_CLUSTER

_SOCKET = "unix:///var/run/docker.sock"


def docker_socket(env: Mapping[str, str] = os.environ) -> str:
    """The socket of this machine's Docker Engine; empty where DOCKER_HOST names one that is elsewhere."""
    address = env.get("DOCKER_HOST") or _SOCKET
    return address.removeprefix("unix://") if address.startswith("unix://") else ""


async def remove_containers(cluster: str, env: Mapping[str, str] = os.environ) -> int:
    """How many there were. Only a Docker Engine behind a Unix socket is asked, since only that is on this machine."""
    socket = docker_socket(env)
    if not socket:
        return 0
    connector = aiohttp.UnixConnector(path=socket)
    filters = json.dumps({"label": [f"{LABEL_CLUSTER}={cluster}"]})
    timeout = aiohttp.ClientTimeout(total=30.0)
    try:
        async with aiohttp.ClientSession("http://docker", connector=connector, timeout=timeout) as session:
            async with session.get("/containers/json", params={"all": "1", "filters": filters}) as answer:
                found = [container["Id"] for container in await answer.json()] if answer.status == 200 else []
            for id in found:
                async with session.delete(f"/containers/{id}", params={"force": "1", "v": "1"}):
                    pass
    except (aiohttp.ClientError, TimeoutError):
        return 0
    return len(found)
