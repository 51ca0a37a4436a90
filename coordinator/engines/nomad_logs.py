"""The output of a task, read through Nomad from the client that ran it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import aiohttp

from coordinator.engines import LogsExpired
from coordinator.engines.nomad_api import NomadApi, NomadError
from coordinator.engines.nomad_records import AllocationSeen
from coordinator.model import Task
from jobspecs.nomad_job import TASK_NAME, group_name

# Right after an end the client may not have written all of it down yet.
EMPTY_RETRIES = 4
# A follower of a task that has ended has read everything once nothing more comes for so long.
SETTLE_SECONDS = 1.0


async def read_logs(
    api: NomadApi, nomad_id: str, task: Task, *, stream: str, follow: bool, tail_bytes: int | None
) -> AsyncIterator[bytes]:
    """Raises `LogsExpired` once Nomad has forgotten the allocation (its collector may do so at any time after the
    end, and a purge does)."""
    allocation = await _allocation(api, nomad_id, task)
    while follow and not _has_started(allocation):
        await asyncio.sleep(api.settings.log_retry_seconds)
        allocation = await _allocation(api, nomad_id, task)
    if not _has_started(allocation):
        return
    params = [("task", TASK_NAME), ("type", stream), ("plain", "true"), ("namespace", api.settings.namespace)]
    if tail_bytes is not None:
        params += [("origin", "end"), ("offset", str(tail_bytes))]
    path = f"/v1/client/fs/logs/{allocation.id}"
    if follow and not allocation.is_ended:
        async for chunk in _followed(api, nomad_id, task, path, [*params, ("follow", "true")]):
            yield chunk
        return
    for _ in range(EMPTY_RETRIES):
        empty = True
        async for chunk in _chunks(api, path, params):
            empty = False
            yield chunk
        if not empty:
            return
        await asyncio.sleep(api.settings.log_retry_seconds)


async def _followed(
    api: NomadApi, nomad_id: str, task: Task, path: str, params: list[tuple[str, str]]
) -> AsyncIterator[bytes]:
    """Nomad goes on following a task that has ended, so its end is watched for here."""
    chunks = _chunks(api, path, params)
    pending: asyncio.Future[bytes] | None = None
    ended = False
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(chunks))
            done, _ = await asyncio.wait({pending}, timeout=SETTLE_SECONDS)
            if done:
                try:
                    chunk = pending.result()
                except StopAsyncIteration:
                    return
                finally:
                    pending = None
                yield chunk
            elif ended:
                return
            else:
                ended = (await _allocation(api, nomad_id, task)).is_ended
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await chunks.aclose()


async def _chunks(api: NomadApi, path: str, params: list[tuple[str, str]]) -> AsyncGenerator[bytes, None]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=api.settings.connect_seconds)
    try:
        async with aclosing(api.stream(path, params, timeout)) as body:
            async for chunk in body:
                if chunk:
                    yield chunk
    except NomadError as error:
        if (
            error.status == 404
            or "unknown allocation" in error.text.lower()
            or "not found" in error.text.lower()
        ):
            raise LogsExpired("Nomad has no logs of this task any more") from None
        raise


async def _allocation(api: NomadApi, nomad_id: str, task: Task) -> AllocationSeen:
    """The one of the task's record; else the first one of the task, since a later copy is not the attempt."""
    if task.container:
        recorded = await api.allocation(task.container)
        if recorded is None:
            raise LogsExpired("Nomad does not know this task any more")
        return recorded
    mine = [one for one in await api.job_allocations(nomad_id) if one.task_group == group_name(task.task)]
    if not mine:
        if await api.job(nomad_id) is None:
            raise LogsExpired("Nomad does not know this job any more")
        return AllocationSeen(id="", job_id=nomad_id, node_id="")
    return min(mine, key=lambda one: one.create_index)


def _has_started(allocation: AllocationSeen) -> bool:
    return bool(allocation.id) and (allocation.task.started_at is not None or allocation.is_ended)
