"""Every endpoint of the HTTP API as a typed method, and the two things that need several requests: following the
output of a job, and waiting for its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from random import Random
from ssl import SSLContext
from types import TracebackType
from typing import Any, cast, overload
from urllib.parse import quote

import aiohttp

from coordinator.client.errors import ApiError, Unreachable, WaitedTooLong
from coordinator.client.events import Event, follow
from coordinator.client.transport import Request, Transport
from coordinator.client.views import (
    ApplicationView,
    ClusterView,
    HappeningView,
    JobView,
    NodeView,
    QueueView,
    Spec,
    TenantView,
    TokenView,
    WhoView,
    is_final,
)

_PAGE = 500


class Client:
    """Talks to one coordinator address (any replica). Every method raises `ApiError` when it is refused, and
    `Unreachable` when nobody answered for `retry_seconds`. `poll_seconds` is how often `wait_for` looks when the
    live events say nothing."""

    def __init__(
        self,
        address: str,
        token: str = "",
        *,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 20.0,
        poll_seconds: float = 5.0,
        random: Random | None = None,
        ssl: SSLContext | None = None,
        on_retry: Callable[[str], None] | None = None,
    ) -> None:
        self._random = random or Random()
        self._poll_seconds = poll_seconds
        self._transport = Transport(
            address,
            token,
            timeout_seconds=timeout_seconds,
            retry_seconds=retry_seconds,
            random=self._random,
            ssl=ssl,
            on_retry=on_retry,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._transport.close()

    # --- jobs ---------------------------------------------------------------------------------------------------

    @overload
    async def submit(self, spec: Spec, *, idempotency_key: str = "") -> JobView: ...

    @overload
    async def submit(self, spec: Sequence[Spec], *, idempotency_key: str = "") -> list[JobView]: ...

    async def submit(
        self, spec: Spec | Sequence[Spec], *, idempotency_key: str = ""
    ) -> JobView | list[JobView]:
        """Submits one job, or several that are accepted all or none. Sent again with the same key until the answer
        is known, so a lost reply never makes a second job."""
        headers = {"Idempotency-Key": idempotency_key or f"{self._random.getrandbits(128):032x}"}
        many = not isinstance(spec, dict)
        body = list(spec) if many else spec
        answer = await self._transport.json(Request("POST", "/v1/jobs", body=body, headers=headers))
        return cast(list[JobView], answer["items"]) if many else cast(JobView, answer)

    async def jobs(
        self,
        *,
        tenant: str | None = None,
        state: str | None = None,
        name: str | None = None,
        id_prefix: str | None = None,
        sort: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[JobView]:
        """Jobs page by page; at most `limit` of them."""
        query = {"tenant": tenant, "state": state, "name": name, "id_prefix": id_prefix, "sort": sort}
        async with aclosing(self._pages("/v1/jobs", query, limit)) as items:
            async for item in items:
                yield item

    async def job(self, id: str) -> JobView:
        return cast(JobView, await self._get(f"/v1/jobs/{_quoted(id)}"))

    async def cancel(self, id: str) -> JobView:
        return cast(JobView, await self._write("POST", f"/v1/jobs/{_quoted(id)}/cancel"))

    async def job_events(self, id: str) -> list[HappeningView]:
        answer = await self._get(f"/v1/jobs/{_quoted(id)}/events")
        return cast(list[HappeningView], answer["items"])

    async def logs(
        self,
        id: str,
        *,
        task: int = 0,
        attempt: int | None = None,
        stream: str = "stdout",
        follow: bool = False,
        tail_bytes: int | None = None,
    ) -> AsyncIterator[bytes]:
        """The output of one task as it comes. A broken connection is made again, and what was already handed out is
        skipped (with `tail_bytes` that cannot be known, so it then goes on with what is new)."""
        given = tries = 0
        query: dict[str, str | int | None] = {"task": task, "attempt": attempt, "stream": stream}
        query |= {"follow": int(follow), "tail_bytes": tail_bytes}
        while True:
            skip = given if tail_bytes is None else 0
            request = Request("GET", f"/v1/jobs/{_quoted(id)}/logs", query=query)
            try:
                async with self._transport.open(request, timeout_seconds=None) as answer:
                    async for chunk in answer.content.iter_any():
                        piece, skip = chunk[skip:], max(0, skip - len(chunk))
                        if piece:
                            given, tries = given + len(piece), 0
                            yield piece
                return
            except (Unreachable, aiohttp.ClientError, TimeoutError) as error:
                if tries >= 5:
                    raise Unreachable(f"the log stream broke: {error}") from error
            except ApiError as error:
                if error.status not in (429, 502, 503, 504) or tries >= 5:
                    raise
            await self._transport.back_off(tries)
            tries += 1
            query["tail_bytes"] = None if tail_bytes is None or not given else 0

    async def wait_for(self, id: str, *, timeout_seconds: float | None = None) -> JobView:
        """The job once it has ended. Raises `WaitedTooLong`."""
        try:
            async with asyncio.timeout(timeout_seconds):
                async for job in self.watch_job(id):
                    if is_final(job):
                        return job
        except TimeoutError:
            raise WaitedTooLong(f"{id} has not ended within {timeout_seconds:g} s; it goes on") from None
        raise AssertionError("watch_job ends with a final job")

    async def watch_job(self, id: str) -> AsyncIterator[JobView]:
        """The job now, and again after each change, until it has ended. Live events tell when to look; a look each
        `poll_seconds` covers what they do not tell (a coordinator that restarts, a proxy that holds streams back)."""
        changed = asyncio.Event()
        listener: asyncio.Task[None] | None = None
        seen: JobView | None = None
        try:
            while True:
                changed.clear()
                job = await self.job(id)
                if listener is None:  # from this look on, so that nothing falls between it and the stream
                    listener = asyncio.create_task(self._listen(id, changed, str(job["revision"])))
                if seen is None or _changed(seen, job):
                    yield job
                if is_final(job):
                    return
                seen = job
                try:
                    async with asyncio.timeout(self._poll_seconds):
                        await changed.wait()
                except TimeoutError:
                    continue
        finally:
            if listener is not None:
                listener.cancel()
                await asyncio.gather(listener, return_exceptions=True)

    async def _listen(self, id: str, changed: asyncio.Event, after: str) -> None:
        try:
            async for event in self.events(after):
                about = event.data.get("id", event.data.get("job"))
                if event.kind == "resync" or (event.kind == "job" and about in (id, None)):
                    changed.set()
        except (ApiError, Unreachable):
            return  # the looks each poll_seconds go on, and report what is wrong

    def events(self, last_event_id: str = "") -> AsyncIterator[Event]:
        """Live events, resumed by themselves after a broken connection."""
        return follow(self._transport, last_event_id)

    async def queue(self) -> QueueView:
        """Waiting jobs in their order, all pages, and the tenants in order of their turn."""
        first = cast(dict[str, Any], await self._get("/v1/queue", limit=_PAGE))
        page = first
        while page.get("next_cursor"):
            page = await self._get("/v1/queue", limit=_PAGE, cursor=page["next_cursor"])
            first["items"] += page["items"]
        first.pop("next_cursor", None)
        return cast(QueueView, first)

    # --- tenants ------------------------------------------------------------------------------------------------

    async def tenants(self) -> list[TenantView]:
        return [item async for item in self._pages("/v1/tenants")]

    async def tenant(self, name: str) -> TenantView:
        return cast(TenantView, await self._get(f"/v1/tenants/{_quoted(name)}"))

    async def create_tenant(self, name: str, **fields: Any) -> TenantView:
        """`fields`: quota_memory, limit_memory (sizes), limit_compute, weight. 409 when it exists already."""
        request = Request("POST", "/v1/tenants", body={"name": name, **fields}, repeatable=False)
        return cast(TenantView, await self._transport.json(request))

    async def update_tenant(self, name: str, **fields: Any) -> TenantView:
        return cast(TenantView, await self._write("PATCH", f"/v1/tenants/{_quoted(name)}", fields))

    async def delete_tenant(self, name: str) -> None:
        await self._write("DELETE", f"/v1/tenants/{_quoted(name)}")

    async def apply_for_quota(self, tenant: str, quota_memory: str, text: str = "") -> ApplicationView:
        path = f"/v1/tenants/{_quoted(tenant)}/applications"
        body = {"quota_memory": quota_memory, "text": text}
        request = Request("POST", path, body=body, repeatable=False)
        return cast(ApplicationView, await self._transport.json(request))

    async def applications(self, tenant: str) -> list[ApplicationView]:
        return [item async for item in self._pages(f"/v1/tenants/{_quoted(tenant)}/applications")]

    async def answer_application(
        self, tenant: str, id: str, *, grant: bool, answer: str = ""
    ) -> ApplicationView:
        verb = "grant" if grant else "refuse"
        path = f"/v1/tenants/{_quoted(tenant)}/applications/{_quoted(id)}/{verb}"
        return cast(ApplicationView, await self._write("POST", path, {"answer": answer}))

    # --- nodes and the cluster ----------------------------------------------------------------------------------

    async def nodes(self) -> list[NodeView]:
        return [item async for item in self._pages("/v1/nodes")]

    async def node(self, name: str) -> NodeView:
        return cast(NodeView, await self._get(f"/v1/nodes/{_quoted(name)}"))

    async def cordon(self, name: str, reason: str = "") -> NodeView:
        path = f"/v1/nodes/{_quoted(name)}/cordon"
        return cast(NodeView, await self._write("POST", path, {"reason": reason}))

    async def uncordon(self, name: str) -> NodeView:
        return cast(NodeView, await self._write("POST", f"/v1/nodes/{_quoted(name)}/uncordon"))

    async def cluster(self) -> ClusterView:
        return cast(ClusterView, await self._get("/v1/cluster"))

    async def snapshot(self) -> dict[str, Any]:
        return cast(dict[str, Any], await self._get("/v1/debug/snapshot"))

    async def is_ready(self) -> bool:
        """Whether the coordinator can serve now. Raises `Unreachable`."""
        try:
            async with self._transport.open(Request("GET", "/readyz"), timeout_seconds=5.0):
                return True
        except ApiError:
            return False

    # --- tokens -------------------------------------------------------------------------------------------------

    async def create_token(self, role: str, *, tenant: str = "", label: str = "") -> TokenView:
        """The answer holds the token itself, this once."""
        body = {"role": role, "label": label} | ({"tenant": tenant} if tenant else {})
        request = Request("POST", "/v1/tokens", body=body, repeatable=False)
        return cast(TokenView, await self._transport.json(request))

    async def tokens(self) -> list[TokenView]:
        return [item async for item in self._pages("/v1/tokens")]

    async def delete_token(self, sha256: str) -> None:
        await self._write("DELETE", f"/v1/tokens/{_quoted(sha256)}")

    async def whoami(self) -> WhoView:
        return cast(WhoView, await self._get("/v1/whoami"))

    # --- requests -----------------------------------------------------------------------------------------------

    async def _get(self, path: str, **query: str | int | None) -> Any:
        return await self._transport.json(Request("GET", path, query=query))

    async def _write(self, method: str, path: str, body: Any = None) -> Any:
        return await self._transport.json(Request(method, path, body=body))

    async def _pages(
        self, path: str, query: dict[str, str | None] | None = None, limit: int | None = None
    ) -> AsyncGenerator[Any, None]:
        left, cursor = limit, None
        while left is None or left > 0:
            page = await self._get(path, **(query or {}), limit=min(left or _PAGE, _PAGE), cursor=cursor)
            for item in page["items"][:left]:
                yield item
            left = None if left is None else left - len(page["items"])
            cursor = page.get("next_cursor")
            if not cursor:
                return


def _quoted(part: str) -> str:
    return quote(part, safe="")


def _changed(before: JobView, after: JobView) -> bool:
    return any(
        before.get(name) != after.get(name) for name in ("state", "attempt", "reason", "tasks", "history")
    )
