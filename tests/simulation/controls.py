"""Negative controls: one safeguard of the system taken away at its border, so that the simulation has to find it."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from msgspec.structs import replace

from coordinator.model import Task, TaskState
from coordinator.records import LEADER, TASKS, decode, encode, grant_key
from coordinator.store import Compare, Put, TxnResult, Write
from jobspecs.container import Grant
from tests.simulation.store import Client, Server


class Control(enum.Enum):
    FENCE_OFF = "fence-off"
    RENEWAL_OFF = "renewal-off"
    LAUNCH_TWICE = "launch-twice"
    EARLY_RELEASE = "early-release"


class _Unfenced(Client):
    """A coordinator whose writes do not ask who leads."""

    async def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        if any(write.key != LEADER for write in writes):
            compares = [compare for compare in compares if compare.key != LEADER]
        return await super().txn(compares, writes)


class _Unrenewed(Client):
    """A coordinator that takes a lost answer for a refusal: it does not shut out what is still under way."""

    async def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        is_renewal = len(writes) == 1 and isinstance(writes[0], Put) and writes[0].key == LEADER
        if is_renewal and compares and compares[0].revision:
            return TxnResult(True, compares[0].revision)
        return await super().txn(compares, writes)


class _Hasty(Client):
    """An agent that calls a task ended when it was asked to end it."""

    server: Server

    async def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        return await super().txn(compares, [self._hastened(write) for write in writes])

    def _hastened(self, write: Write) -> Write:
        if not isinstance(write, Put) or not write.key.startswith(TASKS):
            return write
        task = decode(Task, write.value)
        found = self.server.items(grant_key(task.node, task.job, task.attempt))
        if task.state is TaskState.EXITED or not found or not decode(Grant, found[0].value).stopping:
            return write
        ended = replace(task, state=TaskState.EXITED, released=True, exit_code=143, ended_at_ms=0)
        return Put(write.key, encode(ended), write.lease)


_KINDS: dict[Control, tuple[type[Client], str]] = {
    Control.FENCE_OFF: (_Unfenced, "c"),
    Control.RENEWAL_OFF: (_Unrenewed, "c"),
    Control.EARLY_RELEASE: (_Hasty, "n"),
}


def controlled(client: Client, name: str, control: Control | None) -> Client:
    """The same client, or one without the safeguard, for the processes that it is about."""
    kind, letter = _KINDS.get(control, (Client, "")) if control is not None else (Client, "")
    if not letter or not name.startswith(letter):
        return client
    other = kind(client._server, client._process, client._fates)
    if isinstance(other, _Hasty):
        other.server = client._server
    return other
