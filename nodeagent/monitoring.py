"""What the agent knows about the GPUs of its machine: the last inventory, the last measurement, and what follows from it.

A GPU that cannot be read is not a GPU that is gone: while the source is not ready the last inventory stands, each of its
GPUs is reported with a fault, and nothing is taken for clean (RR-2, GH-10).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from nodeagent.gpu_source import AttemptOf, GpuInventory, GpuReader, GpusNotReady, XidKind
from nodeagent.runner import Observed, ObservedTask, TaskKey
from nodeagent.view import Failure
from vgpu.inventory import Gpu, GpuReport
from vgpu.reasons import ReasonCode

log = logging.getLogger("serai.agent.gpus")

READ_AGAIN_MS = 60_000
FIRST_RETRY_MS = 2_000
LONGEST_RETRY_MS = 30_000
# A task may be over its slice for so long before it is ended: a peak between two measurements is not seen either.
OVER_USE_MS = 5_000


class GpuMonitor:
    """`known` is the inventory that the node had when it was last seen, if any."""

    def __init__(self, reader: GpuReader, clock_ms: Callable[[], int], known: tuple[Gpu, ...] = ()) -> None:
        self._reader = reader
        self._clock_ms = clock_ms
        self._inventory: GpuInventory | None = None
        self._known = known
        self._next_ms = 0
        self._retry_ms = FIRST_RETRY_MS
        self._over_since_ms: dict[TaskKey, int] = {}
        self.problem = "not read yet"
        self.reports: tuple[GpuReport, ...] = ()
        self.notes: dict[TaskKey, str] = {}
        self.condemned: dict[TaskKey, Failure] = {}

    @property
    def inventory(self) -> GpuInventory | None:
        """None until the GPUs were read once."""
        return self._inventory

    @property
    def is_ready(self) -> bool:
        return self._inventory is not None and not self.problem

    @property
    def warnings(self) -> tuple[str, ...]:
        found = self._inventory.warnings if self._inventory is not None else ()
        return (*found, self.problem) if self.problem else found

    def availability(self) -> Mapping[str, str] | None:
        """GPU -> why nothing may start on it, empty if it may; None while the GPUs cannot be read. The inventory is read
        seldom, so what the last measurement found counts too."""
        if not self.is_ready or self._inventory is None:
            return None
        faults = {report.uuid: report.fault for report in self.reports}
        return {gpu.uuid: gpu.unavailable or faults.get(gpu.uuid, "") for gpu in self._inventory.gpus}

    def has_instance(self, uuid: str) -> bool:
        gpus = self._inventory.gpus if self._inventory is not None else ()
        return any(gpu.uuid == uuid and gpu.is_mig_instance for gpu in gpus)

    async def refresh(self) -> bool:
        """Reads the inventory when it is due. True when it differs from the last one."""
        if self._clock_ms() < self._next_ms:
            return False
        try:
            inventory = await self._reader.inventory()
        except GpusNotReady as error:
            self._not_ready(error)
            return False
        self._ready(READ_AGAIN_MS)
        before, self._inventory = self._inventory, inventory
        return before != inventory

    async def measure(self, attempt_of: AttemptOf, tasks: Mapping[TaskKey, ObservedTask]) -> None:
        """A fresh report of each GPU. Afterwards `reports`, `notes` and `condemned` are up to date."""
        running = {key: task for key, task in tasks.items() if task.state is not Observed.EXITED}
        slices = {str(key): task.slices for key, task in running.items()}
        try:
            self.reports = await self._reader.report(attempt_of, slices)
        except GpusNotReady as error:
            self._not_ready(error)
            return
        if self._inventory is None or self.problem:
            self._next_ms = 0  # it answers again: read the inventory at once
        self._note_xids(tasks)
        self._watch_use(running)

    def faulty_reports(self) -> tuple[GpuReport, ...]:
        """What to report while nothing can be measured."""
        gpus = self._inventory.gpus if self._inventory is not None else self._known
        return tuple(GpuReport(gpu.uuid, fault=self.problem) for gpu in gpus)

    def on_gpu(self) -> dict[TaskKey, tuple[int, ...]]:
        """The processes that the last measurement saw, by the task they belong to."""
        found: dict[TaskKey, list[int]] = {}
        for report in self.reports:
            for process in report.processes or ():
                if process.attempt:
                    found.setdefault(TaskKey.parse(process.attempt), []).append(process.pid)
        return {key: tuple(sorted(set(pids))) for key, pids in found.items()}

    def forget(self, keys: set[TaskKey]) -> None:
        """Drops what was noted about tasks that are over."""
        for table in (self.notes, self.condemned, self._over_since_ms):
            for key in keys & table.keys():
                del table[key]

    async def close(self) -> None:
        await self._reader.close()

    def _ready(self, again_ms: int) -> None:
        if self.problem:
            log.info("the GPUs can be read")
        self.problem = ""
        self._retry_ms = FIRST_RETRY_MS
        self._next_ms = self._clock_ms() + again_ms

    def _not_ready(self, error: GpusNotReady) -> None:
        if self.problem != str(error):
            log.warning("%s", error)
        self.problem = str(error)
        self._next_ms = self._clock_ms() + self._retry_ms
        self._retry_ms = min(2 * self._retry_ms, LONGEST_RETRY_MS)

    def _note_xids(self, held: Mapping[TaskKey, ObservedTask]) -> None:
        for event in self._reader.source.take_events():
            log.warning("Xid %d on %s: %s", event.xid, event.uuid, event.text)
            if event.kind is XidKind.NOTICE:
                continue
            for key, task in held.items():
                if event.uuid in task.gpus:
                    self.notes[key] = f"Xid {event.xid} on {event.uuid}: {event.text}"

    def _watch_use(self, held: Mapping[TaskKey, ObservedTask]) -> None:
        """Where nothing else holds a slice to its memory, this does (the isolation `timeslice`)."""
        now_ms = self._clock_ms()
        over = {}
        for report in self.reports:
            for key, task in held.items():
                granted_mib = sum(
                    piece.memory_mib
                    for piece in task.slices
                    if piece.gpu == report.uuid and piece.isolation == "timeslice"
                )
                used_mib = sum(
                    process.memory_mib or 0
                    for process in report.processes or ()
                    if process.attempt == str(key)
                )
                if granted_mib and used_mib > granted_mib:
                    over[key] = f"used {used_mib} MiB of {report.uuid}, was granted {granted_mib} MiB"
        self._over_since_ms = {key: self._over_since_ms.get(key, now_ms) for key in over}
        for key, detail in over.items():
            if now_ms - self._over_since_ms[key] >= OVER_USE_MS and key not in self.condemned:
                log.warning("%s %s: it is stopped", key, detail)
                self.condemned[key] = Failure(ReasonCode.OUT_OF_MEMORY.value, detail, now_ms)
