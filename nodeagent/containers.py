"""Runs tasks as containers of the Docker Engine. The only importer of docker; none of its objects leave.

The Docker SDK blocks, so each call is made in a worker thread and bounded by the SDK's read timeout, whatever the engine
does. A container is known by its labels alone; its name is derived from the attempt, so that a second creation of the
same attempt meets the first one (EX-5).
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import docker
import docker.errors
import requests.exceptions
import urllib3.exceptions
from docker.constants import DEFAULT_DOCKER_API_VERSION
from docker.utils import parse_repository_tag, version_lt

from jobspecs.container import LABEL_ATTEMPT, LABEL_CLUSTER, LABEL_JOB, LABEL_TASK, ContainerSettings, Grant
from jobspecs.render import LOG_FILE_MIB, docker_arguments
from nodeagent.blocking import StreamBroken, in_thread, stream_items, to_end
from nodeagent.container_facts import has_cdi_spec, has_dropped, observed_task
from nodeagent.container_output import read_output
from nodeagent.runner import (
    KILL_CONFIRM_SECONDS,
    LABEL_NODE,
    LaunchFailed,
    LogsUnknown,
    Observed,
    ObservedTask,
    RunnerFacts,
    RunnerUnavailable,
    StopUnconfirmed,
    TaskKey,
    grant_labels,
)
from vgpu.reasons import ReasonCode

T = TypeVar("T")

DEFAULT_SOCKET = Path("/var/run/docker.sock")
CALL_SECONDS = 30
# A pull answers while it makes progress; silence for so long is a registry that hangs (EX-3).
PULL_SECONDS = 300
CONNECTIONS = 32
EVENT_RETRY_SECONDS = 1.0
NOMAD_LABEL = "com.hashicorp.nomad.alloc_id"
# What a registry says of an image that waiting does not change; anything else is tried again elsewhere (EX-4).
_FINAL = re.compile(
    r"manifest unknown|manifest for .* not found|unauthorized|authentication required|access (to .* is )?denied"
    r"|does not exist|invalid reference format|no matching manifest|name unknown|repository name must",
    re.IGNORECASE,
)
_NOT_FOUND = re.compile(r"executable file not found|exec: .*: (stat .*: )?no such file", re.IGNORECASE)
_NOT_EXECUTABLE = re.compile(r"exec: .*: permission denied|exec format error|is a directory", re.IGNORECASE)
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")


class DockerRunner:
    """See `runner.Runner`. Containers of Serai that Nomad runs here are seen and left alone. Of each one's output the
    last `log_file_mib` are kept, or up to twice as much."""

    name = "docker"

    def __init__(
        self,
        node: str,
        cluster: str,
        engine_socket: Path = DEFAULT_SOCKET,
        *,
        call_seconds: int = CALL_SECONDS,
        kill_confirm_seconds: int = KILL_CONFIRM_SECONDS,
        log_file_mib: int = LOG_FILE_MIB,
    ) -> None:
        self._call_seconds = call_seconds
        self._kill_confirm_seconds = kill_confirm_seconds
        self._log_file_mib = log_file_mib
        self._node = node
        self._cluster = cluster
        self._socket = engine_socket
        self._client: docker.APIClient | None = None
        self._version = ""
        self._connecting = threading.Lock()
        self._ids: dict[str, TaskKey] = {}  # container id -> task, as of the last list
        self._ended: dict[str, ObservedTask] = {}  # by container id

    async def list(self) -> tuple[ObservedTask, ...]:
        return await self._call(self._list)

    async def start(self, grant: Grant, container: ContainerSettings) -> None:
        key = TaskKey(grant.job, grant.attempt, container.task)
        if await self._call(lambda: self._adopt(key)):
            return
        if not await self._call(lambda: self._has_image(container.image)):
            await self._call(lambda: self._pull(container.image))
        # Not called off half-way: a container that comes up after its task was reported ended would run unseen.
        await to_end(self._call(lambda: self._create_and_start(grant, container, key)))

    async def stop(self, key: TaskKey, grace_seconds: int) -> None:
        await self._call(lambda: self._stop(key, grace_seconds))

    async def remove(self, key: TaskKey) -> None:
        await self._call(lambda: self._remove(key))

    async def events(self) -> AsyncIterator[None]:
        while True:
            with suppress(StreamBroken):
                async for _ in stream_items(self._open_events):
                    yield
            await asyncio.sleep(EVENT_RETRY_SECONDS)

    async def logs(
        self, key: TaskKey, *, stream: str, follow: bool, tail_bytes: int | None
    ) -> AsyncIterator[bytes]:
        found = await self._call(lambda: self._inspect(key))
        if found is None:
            raise LogsUnknown(str(key))

        def open_output(following: bool, since_ms: int | None) -> AsyncIterator[bytes]:
            def open_stream() -> tuple[Any, Any]:
                client = self._new_client(None)
                since = {} if since_ms is None else {"since": since_ms // 1000}
                wanted = {"stdout": stream == "stdout", "stderr": stream == "stderr"}
                return client, client.logs(
                    found["Id"], stream=True, follow=following, timestamps=True, **wanted, **since
                )

            return stream_items(open_stream)

        try:
            async for chunk in read_output(
                open_output, has_dropped=has_dropped(found), follow=follow, tail_bytes=tail_bytes
            ):
                yield chunk
        except StreamBroken as error:
            raise RunnerUnavailable(f"the Docker Engine at {self._socket}: {error}") from error

    def attempt_of(self, pid: int) -> str:
        """By its cgroup, which names the container also when the process can no longer be killed (GH-8)."""
        try:
            text = Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            return ""
        for id in _CONTAINER_ID.findall(text):
            if id in self._ids:
                return str(self._ids[id])
        return ""

    async def probe(self) -> RunnerFacts:
        info = await self._call(lambda: self._docker().info())
        if info.get("CDISpecDirs") and has_cdi_spec(info["CDISpecDirs"]):
            how = "cdi"
        else:
            how = "nvidia-runtime" if "nvidia" in (info.get("Runtimes") or {}) else "devices"
        warnings = [] if info.get("MemoryLimit", True) else ["this kernel holds no container to its memory"]
        return RunnerFacts(how, tuple(warnings))

    async def close(self) -> None:
        if self._client is not None:
            self._client.close()

    # --- in worker threads -----------------------------------------------------------------------------------------

    def _docker(self) -> Any:
        """The client for calls that are answered at once. `docker` has no types worth having."""
        with self._connecting:
            self._reach()
            if self._client is None:
                self._version = self._negotiate()
                self._client = self._new_client(self._call_seconds)
            return self._client

    def _reach(self) -> None:
        """OSError when nobody listens: the SDK would leave its socket open then."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(self._call_seconds)
            probe.connect(str(self._socket))

    def _negotiate(self) -> str:
        """The newest API that both sides speak. Not left to the SDK, whose constructor leaks a socket when the engine
        does not answer."""
        client = docker.APIClient(
            base_url=f"unix://{self._socket}", version=DEFAULT_DOCKER_API_VERSION, timeout=self._call_seconds
        )
        try:
            newest: str = client.version(api_version=False)["ApiVersion"]
        finally:
            client.close()
        return newest if version_lt(newest, DEFAULT_DOCKER_API_VERSION) else DEFAULT_DOCKER_API_VERSION

    def _new_client(self, read_seconds: int | None) -> Any:
        """One with another limit between two bytes of an answer (None = no limit), to be closed by the caller."""
        if not self._version:
            self._docker()
        self._reach()
        client = docker.APIClient(
            base_url=f"unix://{self._socket}",
            version=self._version,
            timeout=self._call_seconds,
            num_pools=CONNECTIONS,
        )
        client.timeout = read_seconds  # type: ignore[assignment]
        return client

    def _list(self) -> tuple[ObservedTask, ...]:
        client = self._docker()
        found = client.containers(
            all=True, filters={"label": [f"{LABEL_CLUSTER}={self._cluster}", LABEL_JOB]}
        )
        ids: dict[str, TaskKey] = {}
        seen: dict[str, ObservedTask] = {}
        for summary in found:
            key = self._key(summary.get("Labels") or {})
            if key is None:
                continue
            ids[summary["Id"]] = key
            # An ended container does not change any more; of the others the list itself knows less, and later.
            has_ended = summary["State"] == "exited"
            task = self._ended.get(summary["Id"]) if has_ended else None
            task = task or self._look(client, summary["Id"], key)
            if task is not None:
                seen[summary["Id"]] = task
        self._ids = ids
        self._ended = {id: task for id, task in seen.items() if task.state is Observed.EXITED}
        return tuple(sorted(seen.values(), key=lambda task: task.key))

    def _key(self, labels: Mapping[str, str]) -> TaskKey | None:
        """None for what is none of ours: another node's of this machine, or labels that nobody can read."""
        if labels.get(LABEL_NODE) != self._node and NOMAD_LABEL not in labels:
            return None
        try:
            return TaskKey.parse(f"{labels[LABEL_JOB]}.{labels[LABEL_ATTEMPT]}.{labels[LABEL_TASK]}")
        except (KeyError, ValueError):
            return None

    def _look(self, client: Any, id: str, key: TaskKey) -> ObservedTask | None:
        try:
            return observed_task(client.inspect_container(id), key, self._node)
        except docker.errors.NotFound:
            return None  # removed since the list was made

    def _inspect(self, key: TaskKey) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._docker().inspect_container(key.name)
        except docker.errors.NotFound:
            return None
        is_ours = self._key(found["Config"].get("Labels") or {}) == key
        return found if is_ours else None

    def _adopt(self, key: TaskKey) -> bool:
        """Whether the attempt is there already. One that was made and never started is started."""
        found = self._inspect(key)
        if found is None:
            return False
        if found["State"]["Status"] == "created":
            self._start(found["Id"])
        return True

    def _has_image(self, image: str) -> bool:
        try:
            self._docker().inspect_image(image)
        except docker.errors.ImageNotFound:
            return False
        except docker.errors.APIError as error:
            if error.is_client_error():
                raise LaunchFailed(ReasonCode.IMAGE_UNAVAILABLE.value, _said(error)) from error
            raise
        return True

    def _pull(self, image: str) -> None:
        repository, tag = parse_repository_tag(image)
        client = self._new_client(PULL_SECONDS)
        try:
            # Without a tag the engine would fetch every tag there is.
            for line in client.pull(repository, tag=tag or "latest", stream=True, decode=True):
                if "error" in line:
                    raise pull_failed(image, line["error"])
        except docker.errors.APIError as error:
            raise pull_failed(image, _said(error)) from error
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            raise pull_failed(image, f"timeout: {error}") from error
        finally:
            client.close()

    def _create_and_start(self, grant: Grant, container: ContainerSettings, key: TaskKey) -> None:
        body = docker_arguments(container, key.name, log_file_mib=self._log_file_mib)
        body["Labels"] = dict(grant_labels(grant, container))
        try:
            id = self._docker().create_container_from_config(body, key.name)["Id"]
        except docker.errors.APIError as error:
            if error.status_code == 409 and self._adopt(key):
                return
            raise LaunchFailed(ReasonCode.LAUNCH_FAILED.value, _said(error)) from error
        self._start(id)

    def _start(self, id: str) -> None:
        """The engine finds most faults only now; what it made is removed again."""
        client = self._docker()
        try:
            client.start(id)
        except docker.errors.APIError as error:
            said = _said(error)
            client.remove_container(id, force=True)
            if _NOT_FOUND.search(said):
                raise LaunchFailed("", said, 127) from error
            if _NOT_EXECUTABLE.search(said):
                raise LaunchFailed("", said, 126) from error
            raise LaunchFailed(ReasonCode.LAUNCH_FAILED.value, said) from error

    def _stop(self, key: TaskKey, grace_seconds: int) -> None:
        found = self._inspect(key)
        if found is None or not found["State"]["Running"]:
            return
        # The engine answers when the container has ended; the SDK adds the grace to this limit.
        client = self._new_client(self._kill_confirm_seconds)
        try:
            client.stop(found["Id"], timeout=grace_seconds)
        except docker.errors.NotFound:
            return
        except (docker.errors.APIError, requests.exceptions.RequestException) as error:
            raise StopUnconfirmed(f"{key} may still run: {error}") from error
        finally:
            client.close()

    def _remove(self, key: TaskKey) -> None:
        found = self._inspect(key)
        if found is None:
            return
        try:
            self._docker().remove_container(found["Id"], v=True, force=not found["State"]["Running"])
        except docker.errors.NotFound:
            return
        except docker.errors.APIError as error:
            raise RunnerUnavailable(f"{key} could not be removed: {_said(error)}") from error

    def _open_events(self) -> tuple[Any, Any]:
        client = self._new_client(None)
        filters = {"type": "container", "label": f"{LABEL_CLUSTER}={self._cluster}"}
        return client, _Announced(client.events(filters=filters, decode=True))

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            return await in_thread(work)
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            self._client, client = None, self._client  # it may come back as another version
            if client is not None:
                client.close()
            raise RunnerUnavailable(f"the Docker Engine at {self._socket}: {error}") from error


class _Announced:
    """A stream of events whose first item says that it is open: what happened before it was is not told by it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        yield {}
        yield from self._stream

    def close(self) -> None:
        self._stream.close()


def pull_failed(image: str, said: str) -> LaunchFailed:
    """What a registry's answer means to a launch (EX-4)."""
    fault = ReasonCode.IMAGE_UNAVAILABLE if _FINAL.search(said) else ReasonCode.LAUNCH_FAILED
    return LaunchFailed(fault.value, f"image {image} could not be pulled: {said}")


def _said(error: docker.errors.APIError) -> str:
    return str(error.explanation or error)
