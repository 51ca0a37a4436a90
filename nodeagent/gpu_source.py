"""What the agent asks of whatever knows the GPUs of this machine, and how it asks without ever being blocked by it.

Two sources answer: `nvml.NvmlSource` (the driver) and `simulated.SimulatedSource` (a trial). Both are plain blocking
objects used by one call at a time; `GpuReader` is the door that the agent uses. Not knowing the GPUs yet
(`GpusNotReady`) is never the same as having none (an inventory with no GPUs): the first keeps what was known (RR-2).
"""

from __future__ import annotations

import asyncio
import enum
import threading
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from attrs import frozen

from vgpu.inventory import Gpu, GpuReport, Link
from vgpu.slices import Slice

T = TypeVar("T")

AttemptOf = Callable[[int], str]
"""pid -> `<job>.<attempt>.<task>` that the process belongs to, "" for a foreign process. Called in a worker thread."""

Held = Mapping[str, tuple[Slice, ...]]
"""`<job>.<attempt>.<task>` -> the slices it holds here, for everything of ours that still exists on the machine."""


class WhyNotReady(enum.Enum):
    """Why the GPUs of this machine cannot be read now."""

    NO_LIBRARY = "no_library"
    DRIVER_NOT_LOADED = "driver_not_loaded"
    DRIVER_TOO_OLD = "driver_too_old"
    DRIVER_MISMATCH = (
        "driver_mismatch"  # library and kernel module differ, as after an upgrade without a reboot
    )
    NO_PERMISSION = "no_permission"
    NO_ANSWER = "no_answer"
    FAILED = "failed"


class GpusNotReady(Exception):
    """The GPUs cannot be read now; ask again later. `reason` is for programs, `detail` is the library's own words."""

    def __init__(self, reason: WhyNotReady, detail: str) -> None:
        super().__init__(f"GPU inventory not ready ({reason.value}): {detail}")
        self.reason = reason
        self.detail = detail


class XidKind(enum.Enum):
    """Who has to act on an Xid: the job's owner, the machine's operator, or nobody."""

    APPLICATION = "application"  # fails the job, the GPU stays schedulable
    HARDWARE = "hardware"  # takes the GPU out
    NOTICE = "notice"  # recorded only


@frozen
class XidEvent:
    """An error that the driver reported for one GPU (of a MIG instance where the driver names it)."""

    uuid: str
    xid: int
    kind: XidKind
    text: str


@frozen
class GpuInventory:
    """Everything found at one moment. `warnings` are sentences for the operator: what could not be read, and why."""

    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    warnings: tuple[str, ...] = ()


class GpuSource(Protocol):
    """One call at a time. Every method but `close` and `clear_fault` may block for as long as the driver likes."""

    simulated: bool
    blocking: bool
    """Whether a call may hang in a driver, so that it must run in a thread of its own."""
    warnings: tuple[str, ...]
    """What the last report could not read, in sentences for the operator."""

    def read_inventory(self) -> GpuInventory:
        """What there is now. A GPU that was known and is lost stays in it, with `unavailable` set. GpusNotReady."""
        ...

    def read_report(self, attempt_of: AttemptOf, held: Held) -> tuple[GpuReport, ...]:
        """One report for each GPU of the last inventory (which it reads first if there was none), in its order.
        GpusNotReady."""
        ...

    def take_events(self) -> tuple[XidEvent, ...]:
        """The Xids seen by `read_report` since the last call, oldest first. Never blocks."""
        ...

    def clear_fault(self, uuid: str) -> None:
        """The operator says that this GPU is good again. Never blocks."""
        ...

    def close(self) -> None:
        """Gives the library back. A source that was closed may be read again."""
        ...


class GpuReader:
    """Asks a source with a time limit. A hung driver costs one thread, however often the agent asks: while a call is
    out, the next ones are refused at once with NO_ANSWER, and work again when it has come back."""

    def __init__(self, source: GpuSource, limit_seconds: float = 10.0) -> None:
        self.source = source
        self._limit_seconds = limit_seconds
        self._busy = False

    async def inventory(self) -> GpuInventory:
        return await self._ask(self.source.read_inventory, "inventory")

    async def report(self, attempt_of: AttemptOf, held: Held) -> tuple[GpuReport, ...]:
        return await self._ask(lambda: self.source.read_report(attempt_of, held), "report")

    async def close(self) -> None:
        """Gives the library back, unless a call hangs in it: then only the end of the process can."""
        if not self._busy:
            await self._ask(self.source.close, "close")

    async def _ask(self, call: Callable[[], T], what: str) -> T:
        if not self.source.blocking:
            return call()
        if self._busy:
            raise GpusNotReady(
                WhyNotReady.NO_ANSWER, f"an earlier call still hangs in the driver, {what} not read"
            )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._busy = True
        # A daemon thread and not the loop's executor: a call that never returns must not keep the agent from exiting.
        threading.Thread(target=self._run, args=(loop, call, answer), name=f"gpu-{what}", daemon=True).start()
        try:
            # Not asyncio.wait_for: that of Python 3.11 loses a cancellation which comes together with the answer.
            async with asyncio.timeout(self._limit_seconds):
                return await answer
        except TimeoutError:
            limit = f"{self._limit_seconds:g} s"
            raise GpusNotReady(
                WhyNotReady.NO_ANSWER, f"the driver did not answer the {what} in {limit}"
            ) from None

    def _run(self, loop: asyncio.AbstractEventLoop, call: Callable[[], T], answer: asyncio.Future[T]) -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = call()
        except BaseException as raised:  # goes to the waiting caller, whatever it is
            error = raised

        def settle() -> None:
            self._busy = False
            if answer.done():  # the caller has given up; a late answer is an old answer
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)  # type: ignore[arg-type]

        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop was closed meanwhile: nobody waits any more
            return
