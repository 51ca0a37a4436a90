"""Performs and undoes the steps of isolation backends on this machine.

What has been done is read from the machine each time and kept nowhere else: a control daemon of CUDA MPS runs or it
does not. So an agent that was restarted finds the daemons of its predecessor, and one that died is started again.

A daemon sees its own folder as /dev/shm, in a mount namespace of its own, since the containers of its clients have that
folder as theirs (see `vgpu.isolation.mps`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from nodeagent.process_table import process_of, send
from nodeagent.view import StepId, step_id
from vgpu.isolation.settings import Step

CONTROL = "nvidia-cuda-mps-control"
COMMAND_SECONDS = 20.0
POLL_SECONDS = 0.05
MPS_FOLDER = "run/serai/mps"
# "$1" is the folder that becomes /dev/shm, the rest is the command.
_IN_OWN_SHM = 'mount --bind "$1" /dev/shm && shift && exec "$@"'


class StepFailed(Exception):
    """The step could not be performed or undone; the message says why, with the tool's own words."""


class IsolationSteps:
    """`root` stands in front of every path that a step names. `has_instance` says whether a MIG instance of that
    UUID exists."""

    def __init__(self, has_instance: Callable[[str], bool], root: Path = Path("/")) -> None:
        self._root = root
        self._has_instance = has_instance
        self._instances: dict[StepId, Step] = {}

    def done(self) -> Mapping[StepId, Step]:
        """The steps that are done on this machine now."""
        found = dict(self._instances)
        for record in (self._root / MPS_FOLDER).glob("*/step.json"):
            try:
                step = msgspec.json.decode(record.read_bytes(), type=Step)
            except (OSError, msgspec.DecodeError, msgspec.ValidationError):
                continue
            if self._daemon_pid(step) is not None:
                found[step_id(step)] = step
        return found

    async def perform(self, step: Step) -> None:
        """Does nothing when it is done already. StepFailed."""
        if step.kind == "start_mps_daemon":
            await self._start_daemon(step)
        elif step.kind == "create_mig_instance":
            if not self._has_instance(step.gpu):
                raise StepFailed(
                    f"there is no MIG instance {step.gpu}: create it with nvidia-smi mig, Serai does not"
                )
            self._instances[step_id(step)] = step
        else:
            raise StepFailed(
                f"this agent does not know the step {step.kind!r}; is it older than its coordinator?"
            )

    async def undo(self, step: Step) -> None:
        """Does nothing when it is undone already. StepFailed."""
        self._instances.pop(step_id(step), None)
        if step.kind == "start_mps_daemon":
            await self._quit_daemon(step)

    async def _start_daemon(self, step: Step) -> None:
        if self._daemon_pid(step) is not None:
            return
        if shutil.which(CONTROL) is None:
            raise StepFailed(
                f"{CONTROL} is not on this node: install the driver's utilities, or do not ask for mps"
            )
        pipe, log, shm = (self._path(step, name) for name in ("pipe", "log", "shm"))
        for folder in (pipe, log, shm):
            folder.mkdir(parents=True, exist_ok=True)
        shm.chmod(0o1777)
        record = self._record(step)
        record.write_bytes(msgspec.json.encode(step))
        await self._run(
            step,
            ["unshare", "--mount", "sh", "-c", _IN_OWN_SHM, "sh", str(shm), CONTROL, "-d"],
        )
        if not await self._until(lambda: self._daemon_pid(step) is not None):
            raise StepFailed(f"{CONTROL} for {step.gpu} did not come up, see {log}")

    async def _quit_daemon(self, step: Step) -> None:
        pid = self._daemon_pid(step)
        if pid is not None:
            try:
                await self._run(step, [CONTROL], said=b"quit\n")
            except StepFailed:
                send(pid, signal.SIGTERM)
            if not await self._until(lambda: self._daemon_pid(step) is None):
                send(pid, signal.SIGKILL)
        shutil.rmtree(self._record(step).parent, ignore_errors=True)

    def _record(self, step: Step) -> Path:
        return self._root / MPS_FOLDER / step.gpu / "step.json"

    def _path(self, step: Step, name: str) -> Path:
        default = f"/{MPS_FOLDER}/{step.gpu}/{name}"
        return self._root / step.parameters.get(f"{name}_directory", default).lstrip("/")

    def _daemon_pid(self, step: Step) -> int | None:
        """The daemon writes its pid into its pipe folder; a pid that was used again is not one."""
        try:
            pid = int((self._path(step, "pipe") / f"{CONTROL}.pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        process = process_of(pid)
        if process is None or process.is_zombie or CONTROL.encode() not in command:
            return None
        return pid

    async def _run(self, step: Step, command: list[str], said: bytes = b"") -> None:
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": step.gpu,
            "CUDA_MPS_PIPE_DIRECTORY": str(self._path(step, "pipe")),
            "CUDA_MPS_LOG_DIRECTORY": str(self._path(step, "log")),
        }
        try:
            child = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,  # the daemon keeps it open, so its end is not that of the command
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise StepFailed(f"{command[0]} could not be started: {error}") from error
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                await child.communicate(said)
        except TimeoutError:
            send(child.pid, signal.SIGKILL)
            await child.wait()
            raise StepFailed(f"{CONTROL} for {step.gpu} did not answer in {COMMAND_SECONDS:g} s") from None
        if child.returncode:
            raise StepFailed(
                f"{CONTROL} for {step.gpu} ended with {child.returncode}, see {self._path(step, 'log')}"
            )

    async def _until(self, condition: Callable[[], bool]) -> bool:
        for _ in range(int(COMMAND_SECONDS / 4 / POLL_SECONDS)):
            if condition():
                return True
            await asyncio.sleep(POLL_SECONDS)
        return False
