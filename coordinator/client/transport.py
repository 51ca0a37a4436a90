"""One request to the coordinator: authorization, deadlines, retries with back-off, problem documents into errors.

What is retried: everything that certainly did not happen (no connection, 429, 502, 503, 504), until `retry_seconds` are
over; and, for requests that may be sent twice (reads, and writes whose second arrival changes nothing), also those
whose answer was lost.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from decimal import Decimal
from random import Random
from ssl import SSLContext
from types import TracebackType
from typing import Any

import aiohttp
from attrs import field, frozen
from yarl import URL

from coordinator.client.errors import AnswerUnreadable, ApiError, Unreachable

_BACK_OFF_SECONDS = 0.2
_LONGEST_BACK_OFF_SECONDS = 5.0
_TRY_AGAIN = frozenset({429, 502, 503, 504})

Query = Mapping[str, str | int | None]


@frozen
class Request:
    """`repeatable`: it may arrive twice without harm, so it is sent again when its answer was lost."""

    method: str
    path: str
    query: Query = field(factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(factory=dict)
    repeatable: bool = True


class Transport:
    """A session with one coordinator address. `on_retry` is told each time why it tries again."""

    def __init__(
        self,
        address: str,
        token: str,
        *,
        timeout_seconds: float,
        retry_seconds: float,
        random: Random,
        ssl: SSLContext | None,
        on_retry: Callable[[str], None] | None,
    ) -> None:
        self._base = URL(address if "://" in address else f"http://{address}")
        self._token = token
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._random = random
        self._ssl = ssl
        self._on_retry = on_retry
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Transport:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def json(self, request: Request) -> Any:
        """The answer's JSON, None when it has no body. Raises `ApiError`, `Unreachable`, `AnswerUnreadable`."""
        deadline = asyncio.get_running_loop().time() + self._retry_seconds
        tries = 0
        while True:
            try:
                return await self._once(request)
            except ApiError as error:
                if error.status not in _TRY_AGAIN:
                    raise
                await self._back_off(tries, deadline, error, error.retry_after_seconds)
            except Unreachable as error:
                if not request.repeatable and not isinstance(error, NotSent):
                    raise
                await self._back_off(tries, deadline, error, 0.0)
            tries += 1

    async def _once(self, request: Request) -> Any:
        async with self.open(request, timeout_seconds=self._timeout_seconds) as answer:
            try:
                text = await answer.text()
            except (aiohttp.ClientError, TimeoutError) as error:
                raise Unreachable(f"the answer of {self._base} was lost: {error or 'timeout'}") from error
        if not text:
            return None
        try:
            return json.loads(text)
        except ValueError as error:
            raise AnswerUnreadable(
                f"{self._base} answered {request.path} with something that is not Serai's API"
            ) from error

    @asynccontextmanager
    async def open(
        self, request: Request, *, timeout_seconds: float | None, idle_seconds: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One try, the body not yet read. `idle_seconds`: the longest silence of a stream."""
        timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=5.0, sock_read=idle_seconds)
        query = {name: str(value) for name, value in request.query.items() if value is not None}
        data = None if request.body is None else json.dumps(request.body, default=_plain).encode()
        headers = {**self._headers(data is not None), **request.headers}
        url = self._base.joinpath(request.path.lstrip("/"), encoded=True).with_query(query)
        try:
            answer = await self._opened_session().request(
                request.method, url, data=data, headers=headers, timeout=timeout, ssl=self._ssl or True
            )
        except aiohttp.ClientConnectorError as error:
            raise NotSent(f"no coordinator reached at {self._base}: {_why(error)}") from error
        except TimeoutError as error:
            raise Unreachable(f"{self._base} did not answer in time") from error
        except aiohttp.InvalidURL as error:
            raise Unreachable(f"{str(self._base)!r} is not an address") from error
        except aiohttp.ClientError as error:
            raise Unreachable(f"the connection to {self._base} broke: {error}") from error
        async with answer:
            if answer.status >= 400:
                raise await _problem(answer)
            yield answer

    async def back_off(self, tries: int) -> None:
        """Waits before a stream is opened again."""
        await asyncio.sleep(self._delay(tries))

    def _opened_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session

    def _headers(self, has_body: bool) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if has_body:
            headers["Content-Type"] = "application/json"
        return headers

    async def _back_off(self, tries: int, deadline: float, error: Exception, at_least: float) -> None:
        delay = max(self._delay(tries), at_least)
        if asyncio.get_running_loop().time() + delay > deadline:
            raise error
        if self._on_retry is not None:
            self._on_retry(str(error))
        await asyncio.sleep(delay)

    def _delay(self, tries: int) -> float:
        longest = min(_LONGEST_BACK_OFF_SECONDS, _BACK_OFF_SECONDS * 2.0 ** min(tries, 10))
        # Half of it is chance, so that clients that were cut off together do not come back together.
        return longest * (0.5 + self._random.random() / 2)


class NotSent(Unreachable):
    """No connection was made, so the request certainly did not arrive."""


async def _problem(answer: aiohttp.ClientResponse) -> ApiError:
    try:
        problem = json.loads(await answer.text())
    except (ValueError, aiohttp.ClientError, TimeoutError):
        problem = None
    if not isinstance(problem, dict):
        problem = {"detail": f"HTTP {answer.status} {answer.reason or ''} from {answer.url.origin()}".strip()}
    return ApiError.from_problem(answer.status, problem, _retry_after(answer.headers.get("Retry-After", "")))


def _plain(value: object) -> object:
    """Decimal fractions, as the strict YAML reader makes them. Where a float would change a digit it stays text."""
    if isinstance(value, Decimal):
        return float(value) if Decimal(repr(float(value))) == value else str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _why(error: aiohttp.ClientConnectorError) -> str:
    number = error.os_error.errno
    return os.strerror(number) if number is not None and number > 0 else str(error.os_error)


def _retry_after(value: str) -> float:
    return float(value) if value.strip().isdigit() else 0.0
