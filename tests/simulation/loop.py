"""An event loop on virtual time, and processes in it that can be paused and killed like real ones.

Time stands still while anything is ready and then jumps to the next timer, so a simulated minute costs what its events
cost. Callbacks run one by one in the order in which they were made ready, and tasks hash by their number, so that the
same seed gives the same run.

Every callback belongs to the process in whose context it was made. Those of a paused process wait until it goes on
(SIGSTOP, SIGCONT); those of a dead one are kept and never run, not even `finally` (SIGKILL). They are kept since a
coroutine that is thrown away would run its `finally` then.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import enum
import heapq
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from coordinator.clock import SteadyClock


class Life(enum.Enum):
    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


class Process:
    """`skew_ms` says how far the wall clock of its machine is off. `clock_ms` is what the real processes have."""

    def __init__(self, loop: VirtualLoop, name: str, skew_ms: Callable[[], int]) -> None:
        self.name = name
        self.life = Life.RUNNING
        self.is_cut = False
        self.is_stopping = False
        self.main: asyncio.Task[Any] | None = None
        self._loop = loop
        self._parked: list[asyncio.Handle] = []
        self._context = contextvars.Context()
        self._context.run(_PROCESS.set, self)
        self.clock_ms = SteadyClock(
            lambda: (loop.wall_ms() + skew_ms()) * 1_000_000, lambda: int(loop.time() * 1_000_000_000)
        )

    def __repr__(self) -> str:
        return self.name

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(work, context=self._context.copy())

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.main = self.spawn(work)
        return self.main

    def terminate(self) -> None:
        """SIGTERM: its main task is cancelled, and cleans up."""
        if self.life is Life.RUNNING and self.main is not None:
            self.is_stopping = True
            self.main.cancel()

    def kill(self) -> None:
        self.life = Life.DEAD

    def pause(self) -> None:
        if self.life is Life.RUNNING:
            self.life = Life.PAUSED

    def resume(self) -> None:
        if self.life is Life.PAUSED:
            self.life = Life.RUNNING
            parked, self._parked = self._parked, []
            self._loop.add_ready(parked)

    def park(self, handle: asyncio.Handle) -> None:
        self._parked.append(handle)


_PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


def current_process() -> Process | None:
    return _PROCESS.get(None)


class _Task(asyncio.Task[Any]):
    """Sets of tasks, as in `asyncio.wait`, go by number and not by address."""

    _numbers = itertools.count()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._number = next(self._numbers)
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number


class NothingLeft(Exception):
    """Nothing is ready and no timer is set: everything waits for ever."""


class _Timer(asyncio.TimerHandle):
    """One that is quick to make."""

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        arguments: tuple[object, ...],
        loop: VirtualLoop,
        context: contextvars.Context,
    ) -> None:
        self._when = when
        self._callback: Any = callback
        self._args: Any = arguments
        self._loop = loop
        self._context = context
        self._cancelled = self._scheduled = False
        self._repr = self._source_traceback = None


class VirtualLoop(asyncio.BaseEventLoop):
    """`start_ms` is the wall time at which it begins. `steps` counts the callbacks that ran.

    Most of a seed's time would be spent in what `BaseEventLoop` does around each callback, so that is done here anew:
    without debug mode, threads and I/O little of it is left."""

    _ready: collections.deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, start_ms: int) -> None:
        super().__init__()
        self._now = 0.0
        self._start_ms = start_ms
        self._world = contextvars.Context()
        self._timers: list[tuple[float, int, _Timer]] = []
        self._numbers = itertools.count()
        self.steps = 0
        self.errors: list[dict[str, Any]] = []
        self.set_task_factory(lambda loop, work, **options: _Task(work, loop=loop, **options))
        self.set_exception_handler(lambda loop, context: self.errors.append(context))

    def time(self) -> float:
        return self._now

    def wall_ms(self) -> int:
        return self._start_ms + int(self._now * 1000)

    def later(self, seconds: float, action: Callable[..., object], *arguments: object) -> asyncio.TimerHandle:
        """An action of the world outside all processes."""
        return self.call_at(self._now + seconds, action, *arguments, context=self._world)

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        if context is None:
            context = contextvars.copy_context()
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def add_ready(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def _run_once(self) -> None:
        """Until it is stopped."""
        ready = self._ready
        while not self._stopping:
            if not ready:
                self._jump()
            handle: Any = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_PROCESS)
            if process is not None and process.life is not Life.RUNNING:
                process.park(handle)
                continue
            self.steps += 1
            try:
                handle._context.run(handle._callback, *handle._args)
            except Exception as error:
                self.call_exception_handler(
                    {"message": f"in {handle!r}", "exception": error, "handle": handle}
                )

    def _jump(self) -> None:
        """To the next timer, and those at the same moment."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise NothingLeft
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(timers)[2])

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time has come."""

    def _write_to_self(self) -> None:
        """There are no other threads."""
