"""Runs tasks as plain processes, for a trial on a machine without Docker.

Each task has a folder under the state folder, and a small shell in a session of its own that writes into it: who it is
(pid and start time, so that a pid which was used again is not taken for it), and how the command ended. The agent may
die and come back; the shell and the folder tell the next one everything. If the folder is lost too, the processes are
still known by an entry in their environment.

    <state folder>/<job>.<attempt>.<task>/
        task.json      what was granted and on which boot of the machine; written before the shell starts
        shell          /proc/<pid>/stat of the shell; written by the shell before it starts the command
        exit           the exit code, 128 + n for signal n; written by the shell at the end
        stdout stderr  the output; its beginning is given back to the disk when it grows too long
        work/          the working directory

What a trial does without: the image is ignored, and nothing holds a process to its CPU, its memory (RLIMIT_AS counts
address space, of which every CUDA program takes far more than it uses) or its devices. Use Docker for real tenants.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from attrs import frozen

from jobspecs.container import LABEL_CLUSTER, ContainerSettings, Grant
from nodeagent.process_output import drop_beginning, read_output
from nodeagent.process_table import (
    MARK,
    Process,
    boot_id,
    live_processes,
    mark_of,
    marked_key,
    parse_stat,
    process_of,
    send,
)
from nodeagent.runner import (
    KILL_CONFIRM_SECONDS,
    LABEL_NODE,
    OUTPUT_KEPT_BYTES,
    LaunchFailed,
    LogsUnknown,
    Observed,
    ObservedTask,
    RunnerFacts,
    StopUnconfirmed,
    TaskKey,
    grant_labels,
    slices_of,
)
from vgpu.reasons import ReasonCode

POLL_SECONDS = 0.05
WATCH_SECONDS = 1.0
STREAMS = ("stdout", "stderr")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# A TERM for the whole group must end the command and leave the shell to say how it ended: a caught signal is reset to
# its default in the command, an ignored one would stay ignored there. Files appear whole, by rename.
_SHELL = """
d=$1; shift
trap : TERM INT HUP QUIT
cat /proc/$$/stat >"$d/shell.new" && mv "$d/shell.new" "$d/shell" || exit 70
cd "$d/work" || exit 70
"$@" >>"$d/stdout" 2>>"$d/stderr" </dev/null
echo $? >"$d/exit.new" && mv "$d/exit.new" "$d/exit"
"""


@frozen
class _Settings:
    """What `task.json` holds."""

    labels: dict[str, str]
    boot_id: str


class ProcessRunner:
    """See `runner.Runner`."""

    name = "process"

    def __init__(
        self, node: str, cluster: str, state_folder: Path, *, output_kept_bytes: int = OUTPUT_KEPT_BYTES
    ) -> None:
        self._node = node
        self._cluster = cluster
        self._folder = state_folder
        self._kept_bytes = output_kept_bytes
        self._children: set[int] = set()
        self._changed = asyncio.Event()
        self._tidied: set[TaskKey] = set()
        state_folder.mkdir(parents=True, exist_ok=True)

    async def list(self) -> tuple[ObservedTask, ...]:
        self._reap()
        found = {}
        for folder in self._folders():
            task = self._observe(folder)
            if task is not None:
                found[task.key] = task
        for key in self._marked_keys() - found.keys():
            found[key] = ObservedTask(
                key, Observed.RUNNING, detail="its state folder is lost", container=key.name
            )
        return tuple(found[key] for key in sorted(found))

    async def start(self, grant: Grant, container: ContainerSettings) -> None:
        key = TaskKey(grant.job, grant.attempt, container.task)
        folder = self._path(key)
        if self._observe(folder) is not None or key in self._marked_keys():
            return
        environment = {"PATH": DEFAULT_PATH, **container.env, MARK: mark_of(self._folder, key)}
        program = _find_program(container, environment["PATH"])
        shutil.rmtree(folder, ignore_errors=True)  # an earlier launch was cut off before its shell started
        (folder / "work").mkdir(parents=True)
        labels = {**grant_labels(grant, container), LABEL_NODE: self._node, LABEL_CLUSTER: self._cluster}
        settings = msgspec.json.encode(_Settings(labels, boot_id()))
        (folder / "task.json").write_bytes(settings)
        for stream in STREAMS:
            (folder / stream).touch()
        try:
            pid = self._spawn(folder, (program, *container.command[1:]), environment)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise LaunchFailed(
                ReasonCode.LAUNCH_FAILED.value, f"no process could be made: {error}"
            ) from error
        self._children.add(pid)
        await self._wait_for_shell(folder, pid)

    async def stop(self, key: TaskKey, grace_seconds: int) -> None:
        self._tell(key, signal.SIGTERM)
        if await self._has_ended(key, grace_seconds):
            return
        if await self._has_ended(key, KILL_CONFIRM_SECONDS, killing=True):
            return
        raise StopUnconfirmed(f"processes of {key} are there {KILL_CONFIRM_SECONDS} s after SIGKILL")

    async def remove(self, key: TaskKey) -> None:
        shutil.rmtree(self._path(key), ignore_errors=True)
        self._tidied.discard(key)

    async def events(self) -> AsyncIterator[None]:
        """An ended shell wakes it at once, also one that an earlier agent started."""
        loop = asyncio.get_running_loop()
        watched: dict[int, int] = {}  # pid -> pidfd
        try:
            while True:
                self._watch_shells(loop, watched)
                try:
                    async with asyncio.timeout(WATCH_SECONDS):
                        await self._changed.wait()
                except TimeoutError:
                    self._bound_output()
                    continue
                self._changed.clear()
                yield
        finally:
            for descriptor in watched.values():
                loop.remove_reader(descriptor)
                os.close(descriptor)

    async def logs(
        self, key: TaskKey, *, stream: str, follow: bool, tail_bytes: int | None
    ) -> AsyncIterator[bytes]:
        folder = self._path(key)
        if not (folder / stream).exists():
            raise LogsUnknown(str(key))

        def is_running() -> bool:
            task = self._observe(folder)
            return follow and task is not None and task.state is not Observed.EXITED

        async for chunk in read_output(folder / stream, is_running, tail_bytes):
            yield chunk

    def attempt_of(self, pid: int) -> str:
        """By the environment the process was started with; every child has it, unless it cleared it on purpose."""
        return str(key) if (key := marked_key(self._folder, pid)) is not None else ""

    async def probe(self) -> RunnerFacts:
        return RunnerFacts(
            warnings=("tasks run as plain processes: image, CPU, memory and device limits are not enforced",)
        )

    async def close(self) -> None:
        self._reap()

    # --- one task --------------------------------------------------------------------------------------------------

    def _path(self, key: TaskKey) -> Path:
        return self._folder / str(key)

    def _folders(self) -> tuple[Path, ...]:
        self._folder.mkdir(parents=True, exist_ok=True)  # somebody may have wiped it (RR-5)
        return tuple(self._folder.iterdir())

    def _observe(self, folder: Path) -> ObservedTask | None:
        """None for what is no task, and for a launch that never got as far as its shell."""
        try:
            key = TaskKey.parse(folder.name)
            settings = msgspec.json.decode((folder / "task.json").read_bytes(), type=_Settings)
            started_at_ms = _written_at_ms(folder / "shell")
        except (OSError, ValueError):
            return None
        slices = slices_of(settings.labels)
        ended_at_ms, exit_code, detail = self._end(folder, settings)
        state = Observed.RUNNING if ended_at_ms is None else Observed.EXITED
        if state is Observed.EXITED and key not in self._tidied:
            self._kill_leftovers(key)
        return ObservedTask(
            key,
            state,
            exit_code=exit_code,
            started_at_ms=started_at_ms,
            ended_at_ms=ended_at_ms,
            slices=slices,
            detail=detail,
            container=key.name,
        )

    def _end(self, folder: Path, settings: _Settings) -> tuple[int | None, int | None, str]:
        """When and how it ended; (None, None, "") while it runs."""
        shell_runs = settings.boot_id == boot_id() and self._shell(folder) is not None
        # Looked at after the shell: one that ends in between has written its file before.
        if (folder / "exit").exists():
            return _written_at_ms(folder / "exit"), *_exit_code(folder / "exit")
        if shell_runs:
            return None, None, ""
        detail = (
            "its shell was killed, or the machine went down"
            if settings.boot_id == boot_id()
            else ("the machine was started anew")
        )
        last_ms = max(
            _written_at_ms(path) for name in ("shell", *STREAMS) if (path := folder / name).exists()
        )
        return last_ms, 128 + signal.SIGKILL, detail

    def _shell(self, folder: Path) -> Process | None:
        """The shell of a task if it still runs."""
        try:
            pid, start_ticks = parse_stat((folder / "shell").read_text())[0:3:2]
        except (OSError, ValueError):
            return None
        process = process_of(pid)
        if process is None or process.start_ticks != start_ticks or process.is_zombie:
            return None
        return process

    def _spawn(self, folder: Path, command: tuple[str, ...], environment: dict[str, str]) -> int:
        """posix_spawn and no Popen: the child outlives this process, and nobody has to wait for it."""
        null = os.open(os.devnull, os.O_RDWR)
        try:
            return os.posix_spawn(
                "/bin/sh",
                ["sh", "-c", _SHELL, "serai-task", str(folder.resolve()), *command],
                environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, null, descriptor) for descriptor in (0, 1, 2)],
                setsid=True,
                setsigmask=(),
                setsigdef=(signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
            )
        finally:
            os.close(null)

    async def _wait_for_shell(self, folder: Path, pid: int) -> None:
        """Until the shell has said who it is, so that a stop right after the start finds it."""
        for _ in range(int(KILL_CONFIRM_SECONDS / POLL_SECONDS)):
            if (folder / "shell").exists():
                return
            if process_of(pid) is None or process_of(pid).is_zombie:  # type: ignore[union-attr]
                break
            await asyncio.sleep(POLL_SECONDS / 5)
        if (folder / "shell").exists():
            return
        send(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        raise LaunchFailed(
            ReasonCode.LAUNCH_FAILED.value, f"the shell of the task did not come up in {folder}"
        )

    # --- its processes ---------------------------------------------------------------------------------------------

    def _tell(self, key: TaskKey, number: signal.Signals) -> None:
        """The shell is spared, so that it can write down how the command ended."""
        shell = self._shell(self._path(key))
        for process in self._processes_of(key, shell):
            if shell is None or process.pid != shell.pid:
                send(process.pid, number)

    async def _has_ended(self, key: TaskKey, seconds: float, *, killing: bool = False) -> bool:
        """`killing`: again and again, since what was forked while the others were being killed is still there."""
        folder = self._path(key)
        for attempt in range(max(1, int(seconds / POLL_SECONDS))):
            if killing:
                self._tell(key, signal.SIGKILL)
            if attempt:
                await asyncio.sleep(POLL_SECONDS)
            self._reap()
            shell = self._shell(folder)
            if shell is None and not self._processes_of(key, None):
                return True
        return False

    def _processes_of(self, key: TaskKey, shell: Process | None) -> tuple[Process, ...]:
        return tuple(
            process
            for process in live_processes()
            if (
                (shell is not None and process.session == shell.pid)
                or marked_key(self._folder, process.pid) == key
            )
        )

    def _kill_leftovers(self, key: TaskKey) -> None:
        """What a command leaves behind ends with it, as in a container."""
        left = self._processes_of(key, None)
        for process in left:
            send(process.pid, signal.SIGKILL)
        if not left:
            self._tidied.add(key)

    def _marked_keys(self) -> set[TaskKey]:
        keys = (marked_key(self._folder, process.pid) for process in live_processes())
        return {key for key in keys if key is not None}

    def _reap(self) -> None:
        for pid in tuple(self._children):
            try:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    self._children.discard(pid)
            except ChildProcessError:
                self._children.discard(pid)

    def _watch_shells(self, loop: asyncio.AbstractEventLoop, watched: dict[int, int]) -> None:
        for folder in self._folders():
            shell = self._shell(folder)
            if shell is None or shell.pid in watched:
                continue
            try:
                descriptor = os.pidfd_open(shell.pid)
            except OSError:
                self._changed.set()
                continue
            watched[shell.pid] = descriptor
            loop.add_reader(descriptor, self._ended, loop, watched, shell.pid)

    def _ended(self, loop: asyncio.AbstractEventLoop, watched: dict[int, int], pid: int) -> None:
        descriptor = watched.pop(pid)
        loop.remove_reader(descriptor)
        os.close(descriptor)
        self._reap()
        self._changed.set()

    def _bound_output(self) -> None:
        for folder in self._folders():
            for stream in STREAMS:
                drop_beginning(folder / stream, self._kept_bytes)


def _find_program(container: ContainerSettings, path: str) -> str:
    """Its path, so that the shell never takes a name for one of its own commands."""
    if not container.command:
        raise LaunchFailed("", "a plain process needs a command: there is no image to take one from", 127)
    program = container.command[0]
    found = shutil.which(program, path=path)
    if found is not None:
        return found
    if "/" in program and os.path.exists(program):
        raise LaunchFailed("", f"{program} cannot be executed", 126)
    raise LaunchFailed("", f"{program} was not found", 127)


def _exit_code(path: Path) -> tuple[int | None, str]:
    """What the shell wrote; None and why, where the disk was full or somebody else wrote there (UP-2)."""
    try:
        return int(path.read_text()), ""
    except ValueError:
        return None, f"its exit code cannot be read in {path}"


def _written_at_ms(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000
