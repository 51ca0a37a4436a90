"""The processes of a trial: started in sessions of their own so that Ctrl-C reaches only the trial, tied to its life,
their output in files, and their ready lines read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from attrs import define

from coordinator.dev import etcd, tied

_STOP_SECONDS = 5.0
_ETCD_TRIES = 3


class PartFailed(Exception):
    """A part of the trial ended or did not come up. `log` is the end of what it printed."""

    def __init__(self, text: str, log: str = "") -> None:
        super().__init__(text)
        self.log = log


@define
class Part:
    """One process of the trial."""

    name: str
    log: Path
    process: asyncio.subprocess.Process

    def last_lines(self, count: int = 12) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])
        except OSError:
            return ""

    async def failure(self) -> PartFailed:
        """Waits until it has ended, and says how."""
        code = await self.process.wait()
        return PartFailed(f"{self.name} ended with exit code {code}", self.last_lines())

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to its whole session when that does not help in time."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()


async def start(name: str, command: Sequence[str], logs: Path, *, env: dict[str, str] | None = None) -> Part:
    """Starts a part; standard output and error go to one log file."""
    log = logs / f"{name}.log"
    tie = [sys.executable, "-I", "-S", tied.__file__, str(os.getpid())]
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *tie,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    return Part(name, log, process)


async def start_etcd(program: etcd.EtcdProgram, folder: Path, logs: Path) -> tuple[Part, str]:
    """etcd once it answers, and its address."""
    for _ in range(_ETCD_TRIES):
        port = etcd.free_port()
        command = etcd.command(program, folder / "etcd", port, etcd.free_port())
        part = await start("etcd", command, logs)
        address = f"http://127.0.0.1:{port}"
        if await _is_healthy(part, address):
            return part, address
        await part.stop()
        if "address already in use" not in part.last_lines(50):
            break
    raise await part.failure()


async def _is_healthy(part: Part, address: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=1.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while part.process.returncode is None:
            try:
                async with session.get(f"{address}/health") as answer:
                    health = await answer.json(content_type=None)
                    if answer.status == 200 and health.get("health") == "true":
                        return True
            except (aiohttp.ClientError, TimeoutError, ValueError):
                pass
            await asyncio.sleep(0.05)
    return False


async def ready_line(part: Part, *, seconds: float) -> dict[str, Any]:
    """The first `{"event": "ready", ...}` with an address that it printed. Raises `PartFailed`."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                for line in _json_lines(part.log):
                    if line.get("event") == "ready" and line.get("address"):
                        return line
                if part.process.returncode is not None:
                    raise await part.failure()
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise PartFailed(f"{part.name} was not ready in {seconds:g} s", part.last_lines()) from None


def _json_lines(log: Path) -> list[dict[str, Any]]:
    found = []
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    found.append(value)
    return found
