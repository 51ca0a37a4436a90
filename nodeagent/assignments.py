"""What the store asks of this node (its grants) and what it was told (its task records).

Grants come from a listing and a watch. A task record is written only while its grant is the very one the task was
started for, and only over the record that this agent knows of: a write whose answer was lost and which lands late
finds another revision, and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from coordinator.model import Task, TaskState
from coordinator.records import (
    LEADER,
    Unreadable,
    decode,
    encode,
    grant_key,
    grant_prefix,
    task_key,
    task_prefix,
)
from coordinator.store import (
    Change,
    Compacted,
    Compare,
    KeyValue,
    Put,
    Store,
    StoreUnavailable,
    StoreUncertain,
    TxnResult,
    absent,
    created_at,
    unchanged,
)
from jobspecs.container import Grant
from nodeagent.runner import TaskKey
from nodeagent.view import SeenGrant, WriteTask

log = logging.getLogger("serai.agent")

STORE_RETRY_SECONDS = 1.0
ATTEMPT_DIGITS = 9
Attempt = tuple[str, int]


class Assignments:
    """`changed` is called after each change of the grants. Nothing may be decided before `is_known`."""

    def __init__(
        self, store: Store, node: str, writes_per_transaction: int, changed: Callable[[], None]
    ) -> None:
        self._store = store
        self._node = node
        # Each record costs up to two compares, and etcd counts compares and writes each against the limit.
        self._batch = max(1, writes_per_transaction // 2)
        self._changed = changed
        self._mods: dict[TaskKey, int] = {}
        self._must_reread = False
        self._revision = 0
        # Tasks of which it may yet be told that they run or have ended: by a write whose answer was lost, or by one that
        # the agent before this one has under way, for what it found when it began.
        self.in_doubt: set[TaskKey] = set()
        self.is_known = False
        self.grants: dict[Attempt, SeenGrant] = {}
        self.unreadable: dict[Attempt, str] = {}
        self.withdrawn: set[Attempt] = set()
        self.records: dict[TaskKey, Task] = {}

    async def follow(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                revision = await self._list()
                async for batch in self._store.watch(grant_prefix(self._node), revision):
                    self._revision = batch.revision
                    for change in batch.changes:
                        self._apply(change)
                    if batch.changes:
                        self._changed()
            except Compacted as error:
                log.info("the grants are listed again: %s", error)
            except StoreUnavailable as error:
                log.warning("the store cannot be reached, tasks run on: %s", error)
                await asyncio.sleep(STORE_RETRY_SECONDS)

    async def is_unlisted(self, key: TaskKey) -> bool:
        """Whether a task may be stopped because it has no grant. Linearizable looks at the store itself; waits until a
        coordinator leads. An etcd that has lost everything, or is about to be filled from a backup, has no grants
        either, and no leader that holds its key under a lease. StoreUnavailable."""
        while True:
            leader = await self._store.get(LEADER)
            if await self._store.get(grant_key(self._node, key.job, key.attempt)) is not None:
                return False
            if leader is not None and leader.lease:
                return True
            await asyncio.sleep(STORE_RETRY_SECONDS)

    async def write(self, writes: Sequence[WriteTask], seen: Mapping[TaskKey, Task]) -> None:
        """`seen` are the records on which these were decided: what has turned out otherwise since is not written, and
        the next pass decides anew. What cannot be written now is asked for again by it too. StoreUnavailable."""
        if self._must_reread:
            await self._read_records()
        right = [write for write in writes if self.records.get(_key(write)) == seen.get(_key(write))]
        if len(right) < len(writes):
            self._changed()
        for start in range(0, len(right), self._batch):
            await self._write_batch(right[start : start + self._batch])

    def forget_withdrawn(self, still_there: Iterable[Attempt]) -> None:
        """Attempts of which nothing is left on the machine need not be known any more."""
        self.withdrawn &= set(still_there)

    # --- grants ----------------------------------------------------------------------------------------------------

    async def _list(self) -> int:
        listing = await self._store.list(grant_prefix(self._node))
        await self._read_records()
        before = {*self.grants, *self.unreadable}
        self.grants, self.unreadable = {}, {}
        for item in listing.items:
            self._see(item)
        if listing.revision >= self._revision:
            self.withdrawn |= before - self.grants.keys() - self.unreadable.keys()
        else:
            # Nobody took them back: this is another store, or an older state of it. Orphans have their grace.
            log.warning("the store went back from revision %d to %d", self._revision, listing.revision)
        self.in_doubt = {key for key in self.in_doubt if (key.job, key.attempt) in self.grants}
        if not self.is_known:
            self.in_doubt.update(
                TaskKey(seen.grant.job, seen.grant.attempt, container.task)
                for seen in self.grants.values()
                for container in seen.grant.containers
            )
        self._revision = listing.revision
        self.is_known = True
        self._changed()
        return listing.revision

    def _apply(self, change: Change) -> None:
        if not change.deleted:
            self._see(change.item)
            return
        attempt = self._attempt(change.item.key)
        self.grants.pop(attempt, None)
        self.unreadable.pop(attempt, None)
        self.withdrawn.add(attempt)
        # The leader deletes the records of an attempt together with its grant.
        for key in [key for key in self.records if (key.job, key.attempt) == attempt]:
            del self.records[key]
            self._mods.pop(key, None)
        self.in_doubt = {key for key in self.in_doubt if (key.job, key.attempt) != attempt}

    def _see(self, item: KeyValue) -> None:
        attempt = self._attempt(item.key)
        try:
            grant = decode(Grant, item.value)
            if (grant.job, grant.attempt) != attempt:
                raise Unreadable(f"it is one of {grant.job}.{grant.attempt}")
        except Unreadable as error:
            # What runs for it runs on; nobody may take it for an orphan.
            log.error("grant %s.%d cannot be read: %s", *attempt, error)
            self.unreadable[attempt] = str(error)
            self.grants.pop(attempt, None)
            return
        self.unreadable.pop(attempt, None)
        self.withdrawn.discard(attempt)
        self.grants[attempt] = SeenGrant(grant, item.create_revision)

    def _attempt(self, key: str) -> Attempt:
        """A key that names none is its own job, which nothing that runs here can belong to."""
        name = key.removeprefix(grant_prefix(self._node))
        job, _, attempt = name.rpartition(".")
        is_attempt = attempt.isascii() and attempt.isdigit() and len(attempt) <= ATTEMPT_DIGITS
        return (job, int(attempt)) if is_attempt else (name, 0)

    # --- task records ----------------------------------------------------------------------------------------------

    async def _read_records(self) -> None:
        listing = await self._store.list(task_prefix(self._node))
        records: dict[TaskKey, Task] = {}
        mods: dict[TaskKey, int] = {}
        for item in listing.items:
            try:
                key = TaskKey.parse(item.key.removeprefix(task_prefix(self._node)))
                mods[key] = item.mod_revision
                records[key] = decode(Task, item.value)
            except (Unreadable, ValueError) as error:
                log.error("%s cannot be read and is written anew: %s", item.key, error)
        self.records, self._mods = records, mods
        self._must_reread = False

    async def _write_batch(self, writes: Sequence[WriteTask]) -> None:
        compares = list(dict.fromkeys(compare for write in writes for compare in self._conditions(write)))
        puts = [Put(self._record_key(_key(write)), encode(write.task)) for write in writes]
        try:
            result = await self._store.txn(compares, puts)
        except StoreUncertain:
            self._must_reread = True
            self.in_doubt |= {_key(write) for write in writes if write.task.state is TaskState.EXITED}
            raise
        if result.succeeded:
            if not self.in_doubt.isdisjoint(map(_key, writes)):
                self.in_doubt.difference_update(map(_key, writes))
                self._changed()
            for write in writes:
                self.records[_key(write)] = write.task
                self._mods[_key(write)] = result.revision
                log.info("%s: %s", write.task.attempt_key, _told(write.task))
            return
        left = [write for write in writes if self._still_holds(write, result)]
        self._must_reread = any(self._record_changed(write, result) for write in writes)
        if left and len(left) < len(writes):
            await self._write_batch(left)

    def _conditions(self, write: WriteTask) -> tuple[Compare, Compare]:
        key = _key(write)
        grant = created_at(grant_key(self._node, key.job, key.attempt), write.grant_revision)
        path, mod_revision = self._record_key(key), self._mods.get(key)
        return grant, absent(path) if mod_revision is None else unchanged(path, mod_revision)

    def _still_holds(self, write: WriteTask, result: TxnResult) -> bool:
        grant = result.seen.get(self._conditions(write)[0].key)
        is_granted = grant is not None and grant.create_revision == write.grant_revision
        return is_granted and not self._record_changed(write, result)

    def _record_changed(self, write: WriteTask, result: TxnResult) -> bool:
        record = result.seen.get(self._record_key(_key(write)))
        return (record.mod_revision if record is not None else None) != self._mods.get(_key(write))

    def _record_key(self, key: TaskKey) -> str:
        return task_key(self._node, key.job, key.attempt, key.task)


def _key(write: WriteTask) -> TaskKey:
    return TaskKey(write.task.job, write.task.attempt, write.task.task)


def _told(task: Task) -> str:
    if task.exit_code is None and not task.fault:
        return task.state.value
    return f"{task.state.value} exit_code={task.exit_code} {task.fault} {task.detail}".rstrip()
