"""Live events as server-sent events. The id of an event is the store revision of what it tells.

The hub keeps the newest changes that the replica folded. A stream that begins behind them reads the gap from the
store's own history; where that was compacted away it gets `resync`, and its client reads its lists again. Events of
one revision share an id, which only the last of them carries: a stream that breaks between them gets them all again.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from contextlib import aclosing

from attrs import define, frozen

from coordinator import model, records
from coordinator.api.answers import dump
from coordinator.api.auth import Caller
from coordinator.api.views import View, reason_view
from coordinator.lifecycle import shown_state
from coordinator.replica import Replica
from coordinator.store import Change, Compacted, Store

_PAGE = 1_000


@frozen
class Line:
    """One event. `tenant` is whose it is; empty for what everyone may know."""

    revision: int
    kind: str
    tenant: str
    data: bytes

    def text(self, with_id: bool) -> bytes:
        id = b"id: %d\n" % self.revision if with_id else b""
        return b"%sevent: %s\ndata: %s\n\n" % (id, self.kind.encode(), self.data)


@define
class _Entry:
    """A change that may become an event; it is written out when the first stream wants it."""

    revision: int
    change: Change
    event: model.Event
    line: Line | None = None
    is_drawn: bool = False


class EventHub:
    """`start` and `close` bracket its listening. At least the newest `kept` changes stay."""

    def __init__(self, store: Store, replica: Replica, kept: int) -> None:
        self._kept = kept
        self._store = store
        self._replica = replica
        self._entries: list[_Entry] = []
        self._floor = replica.revision  # everything after this revision is in the entries
        self._epoch = 0  # grows where the copy was made anew, so that every stream must resync
        self._turn = asyncio.Event()
        self._stop: Callable[[], None] = lambda: None

    @property
    def revision(self) -> int:
        return self._replica.revision

    def start(self) -> None:
        self._floor = self._replica.revision
        self._stop = self._replica.listen(self._on_change, self._on_resync)

    def close(self) -> None:
        self._stop()

    def subscribe(self, caller: Caller, after: int | None) -> Subscription:
        """Events after revision `after`; None: from now on."""
        return Subscription(self, caller, self.revision if after is None else after, self._epoch)

    def _on_change(self, change: Change, event: model.Event | None) -> None:
        if event is None or not isinstance(event, _TOLD):
            return
        if isinstance(event, model.ReportSeen) and change.item.create_revision != change.item.mod_revision:
            return  # a node that goes on reporting is no news
        newest = self._entries[-1].revision if self._entries else 0
        self._entries.append(_Entry(max(newest, change.item.mod_revision), change, event))
        if len(self._entries) > 2 * self._kept:
            self._floor = self._entries[-self._kept - 1].revision
            del self._entries[: -self._kept]
        self._wake()

    def _on_resync(self, revision: int) -> None:
        self._entries.clear()
        self._floor = revision
        self._epoch += 1
        self._wake()

    def _wake(self) -> None:
        self._turn.set()
        self._turn = asyncio.Event()

    def _drawn(self, entry: _Entry) -> Line | None:
        if not entry.is_drawn:
            entry.line, entry.is_drawn = draw(entry.revision, entry.event, self._replica), True
        return entry.line


class Subscription:
    """The place of one stream. Nothing is queued for it: it reads on when its client has taken what it got."""

    def __init__(self, hub: EventHub, caller: Caller, position: int, epoch: int) -> None:
        self._hub = hub
        self._caller = caller
        self._position = position
        self._epoch = epoch

    async def more(self) -> list[Line]:
        """The next events, in order; waits until there are some. Cancel it at any time: nothing is lost."""
        hub = self._hub
        while True:
            if self._epoch != hub._epoch or self._position > hub.revision:
                self._epoch = hub._epoch
                return [self._resync()]
            if self._position < hub._floor:
                lines, position = await self._from_store()
            else:
                turn = hub._turn
                lines, position = self._from_hub()
                if position == self._position:
                    await turn.wait()
                    continue
            self._position = position
            lines = [line for line in lines if not line.tenant or self._caller.may_see(line.tenant)]
            if lines:
                return lines

    def _resync(self) -> Line:
        self._position = self._hub.revision
        return Line(self._position, "resync", "", dump({"revision": self._position}))

    def _from_hub(self) -> tuple[list[Line], int]:
        hub = self._hub
        start = bisect_right(hub._entries, self._position, key=lambda entry: entry.revision)
        end = min(start + _PAGE, len(hub._entries))
        while 0 < end < len(hub._entries) and hub._entries[end].revision == hub._entries[end - 1].revision:
            end += 1  # never part of a revision
        if start == end:
            return [], self._position
        lines = [line for entry in hub._entries[start:end] if (line := hub._drawn(entry)) is not None]
        return lines, hub._entries[end - 1].revision

    async def _from_store(self) -> tuple[list[Line], int]:
        hub, lines = self._hub, list[Line]()
        position = self._position
        try:
            async with aclosing(hub._store.watch(records.ROOT, position)) as batches:
                async for batch in batches:
                    for change in batch.changes:
                        event = records.event(change)
                        if event is not None and isinstance(event, _TOLD):
                            line = draw(change.item.mod_revision, event, hub._replica)
                            lines += [line] if line is not None else []
                    position = max(position, batch.revision)
                    if position >= hub._floor or len(lines) >= _PAGE:
                        break
        except Compacted:
            line = self._resync()
            return [line], line.revision
        return lines, position


_TOLD = (
    model.JobSeen,
    model.TaskSeen,
    model.TenantSeen,
    model.TenantGone,
    model.InventorySeen,
    model.InventoryGone,
    model.ReportSeen,
    model.ReportGone,
    model.AdminSeen,
    model.AdminGone,
)


def draw(revision: int, event: model.Event, replica: Replica) -> Line | None:
    """The event that a stream tells of this change; None where there is nothing to tell."""
    if isinstance(event, model.JobSeen):
        tasks = replica.cluster.tasks_of(event.job.id, event.job.attempt)
        return _job_line(revision, event.job, shown_state(event.job, tasks.values()))
    if isinstance(event, model.TaskSeen):
        return _task_line(revision, event.task, replica)
    if isinstance(event, model.TenantSeen | model.TenantGone):
        name = event.tenant.name if isinstance(event, model.TenantSeen) else event.name
        data: View = {"name": name, "deleted": isinstance(event, model.TenantGone), "revision": revision}
        return Line(revision, "tenant", name, dump(data))
    name, change = _node_change(event)
    return (
        Line(revision, "node", "", dump({"name": name, "change": change, "revision": revision}))
        if name
        else None
    )


def _node_change(event: model.Event) -> tuple[str, str]:
    """Which node, and what about it."""
    if isinstance(event, model.InventorySeen):
        return event.inventory.node, "inventory"
    if isinstance(event, model.ReportSeen):
        return event.report.node, "reports"
    if isinstance(event, model.AdminSeen):
        return event.admin.node, "admin"
    if isinstance(event, model.ReportGone):
        return event.node, "silent"
    if isinstance(event, model.InventoryGone | model.AdminGone):
        return event.node, "inventory" if isinstance(event, model.InventoryGone) else "admin"
    return "", ""


def _task_line(revision: int, task: model.Task, replica: Replica) -> Line | None:
    """RUNNING stands in no job record: the task's record tells it. Nothing of an attempt that is over."""
    job = replica.cluster.live_jobs.get(task.job)
    if job is None or job.attempt != task.attempt:
        return None
    shown = shown_state(job, replica.cluster.tasks_of(job.id, job.attempt).values())
    seen: View = {
        "task": task.task,
        "node": task.node,
        "state": task.state.value,
        "exit_code": task.exit_code,
    }
    return _job_line(revision, job, shown, seen)


def _job_line(revision: int, job: model.Job, shown: model.JobState, task: View | None = None) -> Line:
    data: View = {
        "id": job.id,
        "name": job.spec.name,
        "tenant": job.tenant,
        "state": shown.value,
        "attempt": job.attempt,
        "exit_code": job.exit_code,
        "reason": reason_view(job.reason),
        "task": task,
        "revision": revision,
    }
    return Line(revision, "job", job.tenant, dump(data))
