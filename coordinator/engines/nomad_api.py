"""The adapter to Nomad's HTTP API: python-nomad in worker threads with a deadline, and our own loop for streams.

python-nomad has no blocking queries, drops the index header, reads NOMAD_* behind the caller's back, does not quote
ids and does not verify certificates unless told; so its endpoint classes are made here with everything given, and
asked for raw answers. Its event and log streams block a thread and die without a word, so those go through aiohttp.
All of its errors become the three below; nothing of the library leaves this module.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
import nomad.api
import requests
from attrs import field, frozen
from nomad.api.exceptions import BaseNomadException, TimeoutNomadException

from coordinator.engines import EngineUnavailable
from coordinator.engines.nomad_records import (
    AgentSelf,
    AllocationSeen,
    EvaluationSeen,
    JobSeen,
    NodeSeen,
    Registered,
    StreamLine,
)

CONFLICT = "Enforcing job modify index"
_LONGEST_TEXT = 500

T = TypeVar("T")


class NomadUnreachable(EngineUnavailable):
    """No answer: whether the request was carried out is unknown."""


class NomadDenied(EngineUnavailable):
    """The token may not do this. Nothing was done; it is a fault of the setup, not of the job."""


class NomadError(EngineUnavailable):
    """Nomad answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"Nomad answered {status}: {text[:_LONGEST_TEXT].strip()}")
        self.status = status
        self.text = text


@frozen
class NomadSettings:
    """How to reach Nomad. `token` and the files are for its ACLs and TLS; without `ca_file` the system's certificate
    authorities count. `evaluation_seconds`: how long to wait for Nomad's scheduler before looking again.
    `quiet_seconds`: a stream without a heartbeat for so long is broken (Nomad sends one every 10 seconds)."""

    address: str = "http://127.0.0.1:4646"
    namespace: str = "default"
    region: str = "global"
    token: str = field(default="", repr=False)
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    workers: int = 16
    connect_seconds: float = 5
    request_seconds: float = 20
    evaluation_seconds: float = 5
    relist_seconds: float = 60
    poll_seconds: float = 5
    quiet_seconds: float = 35
    longest_back_off_seconds: float = 30
    missing_grace_seconds: float = 30
    log_retry_seconds: float = 0.5

    @classmethod
    def from_environment(cls, address: str, environ: Mapping[str, str]) -> NomadSettings:
        """The variables that Nomad's own command line reads."""
        token_file = environ.get("SERAI_NOMAD_TOKEN_FILE", "")
        return cls(
            address=address,
            namespace=environ.get("NOMAD_NAMESPACE") or "default",
            region=environ.get("NOMAD_REGION") or "global",
            token=Path(token_file).read_text().strip() if token_file else environ.get("NOMAD_TOKEN", ""),
            ca_file=environ.get("NOMAD_CACERT", ""),
            cert_file=environ.get("NOMAD_CLIENT_CERT", ""),
            key_file=environ.get("NOMAD_CLIENT_KEY", ""),
        )


class NomadApi:
    """One connection pool to one region. Every call raises `NomadUnreachable`, `NomadDenied` or `NomadError`."""

    def __init__(self, settings: NomadSettings) -> None:
        self.settings = settings
        self._pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="nomad")
        self._http = requests.Session()
        # Proxies and .netrc of the environment are not for the cluster's own control plane.
        self._http.trust_env = False
        adapter = requests.adapters.HTTPAdapter(pool_connections=1, pool_maxsize=settings.workers)
        self._http.mount(settings.address, adapter)
        given: dict[str, Any] = {
            "address": settings.address.rstrip("/"),
            "namespace": settings.namespace,
            "region": settings.region,
            "token": settings.token or None,
            "verify": settings.ca_file or True,
            "cert": (settings.cert_file, settings.key_file) if settings.cert_file else (),
            "session": self._http,
        }
        self._jobs = nomad.api.Jobs(**given)
        self._job = nomad.api.Job(**given)
        self._allocations = nomad.api.Allocations(**given)
        self._allocation = nomad.api.Allocation(**given)
        self._evaluation = nomad.api.Evaluation(**given)
        self._nodes = nomad.api.Nodes(**given)
        self._agent = nomad.api.Agent(**given)
        self._session: aiohttp.ClientSession | None = None

    # --- writes -----------------------------------------------------------------------------------------------------

    async def register(self, job: Mapping[str, Any]) -> Registered:
        """Create-only: a job of this id, even a stopped one, is a `NomadError` with `CONFLICT` in its text."""
        body = {"Job": job, "EnforceIndex": True, "JobModifyIndex": 0}
        answer, _ = await self._call(Registered, self._jobs, method="post", json=body)
        return answer

    async def deregister(self, id: str, *, purge: bool = False) -> Registered:
        """Stops all of the job; the same again, and for a job that is not there, is no error."""
        try:
            answer, _ = await self._call(
                Registered,
                self._job,
                quote(id, safe=""),
                method="delete",
                params={"purge": str(purge).lower()},
            )
        except NomadError as error:
            if error.status == 404:
                return Registered()
            raise
        return answer

    # --- reads ------------------------------------------------------------------------------------------------------

    async def jobs(self, prefix: str = "") -> Sequence[JobSeen]:
        params = {"meta": "true", "prefix": prefix} if prefix else {"meta": "true"}
        return (await self._call(tuple[JobSeen, ...], self._jobs, params=params))[0]

    async def job(self, id: str) -> JobSeen | None:
        return await self._found(JobSeen, self._job, quote(id, safe=""))

    async def job_allocations(self, id: str) -> Sequence[AllocationSeen]:
        # `all` would show those of an earlier job of this name too; without it a purged job still has its own.
        return (await self._call(tuple[AllocationSeen, ...], self._job, quote(id, safe=""), "allocations"))[0]

    async def allocation(self, id: str) -> AllocationSeen | None:
        return await self._found(AllocationSeen, self._allocation, quote(id, safe=""))

    async def job_evaluations(self, id: str) -> Sequence[EvaluationSeen]:
        return (await self._call(tuple[EvaluationSeen, ...], self._job, quote(id, safe=""), "evaluations"))[0]

    async def allocations(
        self, after: int = 0, wait_seconds: float = 0
    ) -> tuple[Sequence[AllocationSeen], int]:
        """All allocations of the namespace, and the index of the list. With `after`, blocks up to `wait_seconds`
        until the list has changed beyond that index."""
        params: dict[str, Any] = {"task_states": "true"}
        if after:
            params |= {"index": after, "wait": f"{int(wait_seconds * 1000)}ms"}
        return await self._call(
            tuple[AllocationSeen, ...], self._allocations, params=params, wait_seconds=wait_seconds
        )

    async def settled(self, evaluation: str) -> EvaluationSeen | None:
        """Follows an evaluation until the scheduler is done with it, or `evaluation_seconds` are over; None if Nomad
        does not know it (any more)."""
        deadline = asyncio.get_running_loop().time() + self.settings.evaluation_seconds
        # Not one of the routes to which the library adds the namespace; a token may have no right on the default one.
        namespace = {"namespace": self.settings.namespace}
        params: dict[str, Any] = namespace
        while True:
            seen = await self._found(EvaluationSeen, self._evaluation, evaluation, params=params)
            left = deadline - asyncio.get_running_loop().time()
            if seen is None or seen.is_settled or left <= 0:
                return seen
            params = {**namespace, "index": seen.modify_index, "wait": f"{int(left * 1000) + 1}ms"}

    async def nodes(self) -> Sequence[NodeSeen]:
        return (await self._call(tuple[NodeSeen, ...], self._nodes))[0]

    async def version(self) -> str:
        """The servers' version. A token without `agent:read` cannot ask for it, so the nodes' is taken then."""
        try:
            answer, _ = await self._call(AgentSelf, self._agent, "self")
        except NomadDenied:
            return next((node.version for node in await self.nodes() if node.version), "")
        return answer.config.version.version

    async def _found(
        self, kind: type[T], endpoint: Any, *path: str, params: Mapping[str, Any] | None = None
    ) -> T | None:
        try:
            return (
                await self._call(
                    kind, endpoint, *path, params=params, wait_seconds=self.settings.evaluation_seconds
                )
            )[0]
        except NomadError as error:
            if error.status == 404:
                return None
            raise

    # --- one request ------------------------------------------------------------------------------------------------

    async def _call(
        self,
        kind: type[T],
        endpoint: Any,
        *path: str,
        method: str = "get",
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        wait_seconds: float = 0,
    ) -> tuple[T, int]:
        """The decoded body and X-Nomad-Index. Nomad may hold a blocking query for a sixteenth longer than asked."""
        limit = self.settings.request_seconds + wait_seconds * 17 / 16
        work = asyncio.get_running_loop().run_in_executor(
            self._pool,
            lambda: endpoint.request(
                *path,
                method=method,
                params=dict(params or {}),
                json=json,
                timeout=(self.settings.connect_seconds, limit),
            ),
        )
        try:
            # Not wait_for: before Python 3.12 it swallows a cancellation that meets the answer.
            async with asyncio.timeout(limit + self.settings.connect_seconds):
                response = await work
        except TimeoutError:
            raise NomadUnreachable(
                f"no answer from Nomad at {self.settings.address} within {limit:.0f} s"
            ) from None
        except (BaseNomadException, TimeoutNomadException) as error:
            raise self._translated(error) from None
        try:
            body = msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError as error:
            raise NomadError(response.status_code, f"not the JSON that was expected: {error}") from error
        index = response.headers.get("X-Nomad-Index", "")
        return body, int(index) if index.isdecimal() else 0

    def _translated(self, error: Exception) -> EngineUnavailable:
        """`nomad_resp` is a response, or the exception that kept one from coming."""
        answer = getattr(error, "nomad_resp", error)
        if isinstance(answer, requests.Response):
            return self._error(answer.status_code, answer.text)
        return NomadUnreachable(f"Nomad at {self.settings.address} cannot be reached: {_cause(answer)}")

    def _error(self, status: int, text: str) -> EngineUnavailable:
        """Some routes deny with 500; everybody else's 500 is told apart by its text."""
        if status == 403 or text.strip() == "Permission denied":
            return NomadDenied(
                f"Nomad denied the request ({status} {text.strip()}): the token needs list-jobs, read-job, submit-job and "
                f"read-logs on namespace {self.settings.namespace}, and node read"
            )
        return NomadError(status, text)

    # --- streams ----------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[frozenset[str] | None, None]:
        """The ids of jobs to which something happened, none in a heartbeat; the first item is None and tells that the
        stream stands. A hint: events may be lost, repeated or old. Ends when the stream does."""
        params = [("topic", "Allocation"), ("topic", "Evaluation"), ("namespace", self.settings.namespace)]
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self.settings.connect_seconds, sock_read=self.settings.quiet_seconds
        )
        async with aclosing(self._lines("/v1/event/stream", params, timeout)) as lines:
            async for line in lines:
                try:
                    jobs = msgspec.json.decode(line, type=StreamLine).job_ids if line else None
                except msgspec.MsgspecError as error:
                    raise NomadUnreachable(f"the event stream is broken: {error}") from error
                yield jobs

    async def _lines(
        self, path: str, params: Sequence[tuple[str, str]], timeout: aiohttp.ClientTimeout
    ) -> AsyncGenerator[bytes, None]:
        """An empty line when the answer has begun, then each line. (A line may be longer than aiohttp reads.)"""
        rest = b""
        first = True
        async with aclosing(self.stream(path, params, timeout)) as chunks:
            async for chunk in chunks:
                if first:
                    yield b""
                    first = False
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield line

    async def stream(
        self, path: str, params: Sequence[tuple[str, str]], timeout: aiohttp.ClientTimeout
    ) -> AsyncGenerator[bytes, None]:
        """The body of a GET as it comes; an empty chunk first, when the answer has begun."""
        query = [*params, ("region", self.settings.region)]
        try:
            async with self._client().get(
                self.settings.address.rstrip("/") + path, params=query, timeout=timeout
            ) as response:
                if response.status != 200:
                    raise self._error(response.status, await response.text())
                yield b""
                async for chunk in response.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise NomadUnreachable(
                f"the stream from Nomad at {self.settings.address} broke: {why}"
            ) from error

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"X-Nomad-Token": self.settings.token} if self.settings.token else {}
            context = ssl.create_default_context(cafile=self.settings.ca_file or None)
            if self.settings.cert_file:
                context.load_cert_chain(self.settings.cert_file, self.settings.key_file or None)
            # Each follower of a log holds a connection, so there is no limit on them here.
            connector = aiohttp.TCPConnector(ssl=context, limit=0)
            self._session = aiohttp.ClientSession(headers=headers, connector=connector)
        return self._session

    async def close(self) -> None:
        """Requests under way in threads end by their own time limits."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()
        if self._session is not None:
            await self._session.close()


def _cause(error: Exception) -> str:
    """The innermost cause in what `requests` tells, less the request: users read it, and it is the same each time."""
    wrapped = error.args[0] if error.args else error
    return str(getattr(wrapped, "reason", None) or error).rpartition("): ")[2]
