"""The agent engine: the node agents see their grants in the store and start the containers themselves.

A committed grant is the launch, and a grant marked `stopping` is the stop, so there is nothing left to hand over;
the agents write the task records. What remains is to fetch the output of a task from its node.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import aiohttp

from coordinator.engines import EngineUnavailable, LogsExpired, Occupied, RunningAttempt, TaskSink
from coordinator.model import Job, Task
from coordinator.records import Endpoint
from jobspecs.container import Grant

# A node that does not answer within this is down as far as logs are concerned; the body may stay silent for hours.
CONNECT_SECONDS = 5


class AgentEngine:
    """`endpoint` looks up where a node serves the output of its tasks (None = it does not report)."""

    name = "agent"
    by_grants = True

    def __init__(self, endpoint: Callable[[str], Awaitable[Endpoint | None]]) -> None:
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def launch(
        self, job: Job, grants: Sequence[Grant], is_held: Callable[[], bool] = lambda: True
    ) -> None:
        """Nothing: the committed grants are the launch."""

    async def stop(self, job: str, attempt: int, tenant: str) -> None:
        """Nothing: the committed `stopping` grants are the stop."""

    async def list(self) -> Sequence[RunningAttempt]:
        """Nothing: an agent itself ends what runs without a grant."""
        return ()

    def occupied(self) -> Occupied:
        """Nothing: an agent reports what is left on its GPUs."""
        return {}

    async def observe(self, sink: TaskSink) -> None:
        """Nothing: the agents write their own task records."""

    async def logs(
        self, task: Task, *, stream: str, follow: bool, tail_bytes: int | None
    ) -> AsyncIterator[bytes]:
        endpoint = await self._endpoint(task.node)
        if endpoint is None:
            raise EngineUnavailable(f"node {task.node} does not report, so its logs cannot be read now")
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            self._session = aiohttp.ClientSession(timeout=timeout)
        query = {"stream": stream, "follow": "1" if follow else "0"}
        if tail_bytes is not None:
            query["tail_bytes"] = str(tail_bytes)
        url = f"{endpoint.address}/v1/logs/{task.attempt_key}"
        try:
            async with self._session.get(
                url, params=query, headers={"Authorization": f"Bearer {endpoint.token}"}
            ) as response:
                if response.status in (404, 410):
                    raise LogsExpired(f"node {task.node} no longer has the output of {task.attempt_key}")
                if response.status != 200:
                    raise EngineUnavailable(
                        f"node {task.node} answered {response.status} for the logs of {task.attempt_key}"
                    )
                async for chunk in response.content.iter_any():
                    yield chunk
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"the logs of {task.attempt_key} broke off: {error}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
