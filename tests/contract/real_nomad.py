"""A real Nomad for the contract tests: one server and two clients of one machine, on loopback.

Clients that share a Docker Engine must not collect each other's containers, and each shows the whole machine, so the
configuration turns collection off and sets what each has. The server's heartbeats are short, so that a node that is
gone is missed within seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coordinator.engines.nomad import NomadSettings

START_SECONDS = 60
COMMON = """
region     = "global"
datacenter = "dc1"
name       = "{name}"
data_dir   = "{folder}/{name}/data"
bind_addr  = "127.0.0.1"
disable_update_check = true
leave_on_interrupt   = false
leave_on_terminate   = false
advertise {{
  http = "127.0.0.1"
  rpc  = "127.0.0.1"
  serf = "127.0.0.1"
}}
ports {{
  http = {http}
  rpc  = {rpc}
  serf = {serf}
}}
limits {{
  http_max_conns_per_client = 0
  rpc_max_conns_per_client  = 0
}}
consul {{
  server_auto_join = false
  client_auto_join = false
  auto_advertise   = false
}}
"""
SERVER = """
server {
  enabled                = true
  bootstrap_expect       = 1
  heartbeat_grace        = "3s"
  min_heartbeat_ttl      = "3s"
  failover_heartbeat_ttl = "30s"
}
"""
CLIENT = """
client {{
  enabled           = true
  servers           = ["127.0.0.1:{server_rpc}"]
  network_interface = "lo"
  min_dynamic_port  = {low}
  max_dynamic_port  = {high}
  max_kill_timeout  = "120s"
  cpu_total_compute = 16000
  memory_total_mb   = 16384
  gc_max_allocs            = 2000
  gc_disk_usage_threshold  = 99
  gc_inode_usage_threshold = 99
  cgroup_parent     = "/nomad-{name}"
  options = {{
    "fingerprint.denylist" = "env_aws,env_gce,env_azure,env_digitalocean,consul,vault"
    "driver.allowlist"     = "docker"
  }}
}}
plugin "docker" {{
  config {{
    endpoint = "{docker}"
    allow_privileged = false
    gc {{
      image     = false
      container = true
      dangling_containers {{
        enabled = false
      }}
    }}
    volumes {{
      enabled = true
    }}
  }}
}}
"""


def real_nomad(docker: str) -> Iterator[tuple[NomadSettings, dict[str, str]]]:
    """Settings, and Nomad's node ids by the names n1 and n2. `docker` is the Docker Engine's address. Everything is stopped and removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="serai-nomad-"))
    agents: list[subprocess.Popen[bytes]] = []
    server_http, server_rpc, *ports = _free_ports(9)
    try:
        agents.append(_start(folder, "srv1", (server_http, server_rpc, ports.pop()), SERVER))
        address = f"http://127.0.0.1:{server_http}"
        _wait(lambda: bool(_get(f"{address}/v1/status/leader")))
        for number in (1, 2):
            client = CLIENT.format(
                docker=docker,
                server_rpc=server_rpc,
                low=20_000 + 1000 * number,
                high=20_999 + 1000 * number,
                name=f"c{number}",
            )
            agents.append(_start(folder, f"c{number}", (ports.pop(), ports.pop(), ports.pop()), client))
        _wait(lambda: len(_ready(address)) == 2)
        nodes = {name: _ready(address)[f"c{name[1]}"] for name in ("n1", "n2")}
        yield NomadSettings(address=address, relist_seconds=10, poll_seconds=1), nodes
        _purge(address)
    finally:
        for agent in reversed(agents):
            os.killpg(agent.pid, signal.SIGTERM)
            agent.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, name: str, ports: tuple[int, int, int], rest: str) -> subprocess.Popen[bytes]:
    home = folder / name
    home.mkdir()
    http, rpc, serf = ports
    config = home / "agent.hcl"
    config.write_text(COMMON.format(name=name, folder=folder, http=http, rpc=rpc, serf=serf) + rest)
    with (home / "log").open("wb") as output:
        return subprocess.Popen(
            ["nomad", "agent", f"-config={config}"], stdout=output, stderr=output, start_new_session=True
        )


def _ready(address: str) -> dict[str, str]:
    return {
        node["Name"]: node["ID"]
        for node in _get(f"{address}/v1/nodes")
        if node["Status"] == "ready" and node["Drivers"].get("docker", {}).get("Healthy")
    }


def _purge(address: str) -> None:
    for job in _get(f"{address}/v1/jobs"):
        request = urllib.request.Request(f"{address}/v1/job/{job['ID']}?purge=true", method="DELETE")
        urllib.request.urlopen(request, timeout=10).close()
    _wait(lambda: all(a["ClientStatus"] in ("complete", "failed") for a in _get(f"{address}/v1/allocations")))


def _get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return json.load(response)
    except (urllib.error.URLError, ConnectionError):
        return []


def _wait(check: Any) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not check():
        if time.monotonic() > deadline:
            raise RuntimeError("Nomad did not come up in time")
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
