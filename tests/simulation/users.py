"""Users: they submit, send it again with the same idempotency key until they know, and cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coordinator.store import StoreUnavailable, StoreUncertain
from tests.simulation.checks import Checks, Violation
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.parts import Api
from tests.simulation.scenario import Wish

AGAIN_SECONDS = 1.0
PATIENCE_SECONDS = 60.0  # a server that died with the request answers nothing
ANSWER_SECONDS = 0.001


class Users:
    """`serving` gives the API where there is one. `open` counts what users still wait for."""

    def __init__(
        self,
        loop: VirtualLoop,
        checks: Checks,
        serving: Callable[[], tuple[Api, Process] | None],
        wishes: int,
    ) -> None:
        self.open = wishes
        self._keys = 0
        self._loop = loop
        self._checks = checks
        self._serving = serving

    def wants(self, wish: Wish) -> None:
        self._keys += 1
        self._submit(wish, f"key-{self._keys}" if wish.has_key else "")

    def _submit(self, wish: Wish, key: str) -> None:
        def again() -> None:
            if key:
                self._submit(wish, key)
            else:
                self.open -= 1  # nobody can tell whether it is there

        def acknowledged(id: str) -> None:
            self.open -= 1
            self._checks.acknowledged.setdefault(id, "submit")
            self._checks.tell(f"{id} is acknowledged")
            if wish.cancel_after is not None:
                self.open += 1
                self._loop.later(wish.cancel_after, self._cancel, wish.spec.tenant, id)

        request = _Request(self._loop, again)
        server = self._serving()
        if server is None:
            self._loop.later(AGAIN_SECONDS, request.close, again)
            return
        api, process = server
        sent: list[str] = []

        async def ask() -> None:
            try:
                id = await api.submit(wish.spec, key, sent.append)
            except StoreUncertain:
                self._loop.later(AGAIN_SECONDS, request.close, again)
            except StoreUnavailable:
                self._loop.later(ANSWER_SECONDS, self._refused, sent)
                self._loop.later(AGAIN_SECONDS, request.close, again)
            else:
                self._loop.later(ANSWER_SECONDS, request.close, acknowledged, id)

        process.spawn(ask()).add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._checks.fail(Violation(f"a request ended with {task.exception()!r}"))

    def _refused(self, sent: list[str]) -> None:
        """The API said that nothing was written."""
        self._checks.never.update(sent)
        for id in sent:
            if id in self._checks.jobs:
                self._checks.fail(Violation(f"{id} was refused for certain and is there"))

    def _cancel(self, tenant: str, id: str) -> None:
        def again() -> None:
            self._cancel(tenant, id)

        def acknowledged(what: str) -> None:
            self.open -= 1
            self._checks.tell(f"the cancel of {id} is acknowledged: {what or 'it has ended'}")
            if what:
                self._checks.acknowledged[id] = what

        request = _Request(self._loop, again)
        server = self._serving()
        if server is None:
            self._loop.later(AGAIN_SECONDS, request.close, again)
            return
        api, process = server

        async def ask() -> None:
            try:
                what = await api.cancel(tenant, id)
            except StoreUnavailable:
                self._loop.later(AGAIN_SECONDS, request.close, again)
            else:
                self._loop.later(ANSWER_SECONDS, request.close, acknowledged, what)

        process.spawn(ask()).add_done_callback(self._answered)


class _Request:
    """One request of a user: the first thing that comes of it counts, and `gives_up` after a while is one."""

    def __init__(self, loop: VirtualLoop, gives_up: Callable[[], None]) -> None:
        self._is_open = True
        loop.later(PATIENCE_SECONDS, self.close, gives_up)

    def close(self, then: Callable[..., None], *arguments: object) -> None:
        if self._is_open:
            self._is_open = False
            then(*arguments)
