"""A node's own records in the store: its inventory, and the report and endpoint that live as long as its lease.

The name of a node belongs to one machine. Whoever comes second is refused while the first one reports (ID-1); a machine
that comes back under its old name is the same node again (ID-2), and one that replaces a silent machine takes over.

A report lands only on the one before it: one whose answer was lost may still be on its way, and would show a machine as
it was (seed 210220: a lost GPU, with processes on it, as idle and well).
"""

from __future__ import annotations

import asyncio
import logging

from msgspec.structs import replace

from coordinator.records import Endpoint, Unreadable, decode, encode, endpoint_key, inventory_key, report_key
from coordinator.store import (
    Compare,
    KeyValue,
    LeaseLost,
    Put,
    Store,
    StoreUnavailable,
    StoreUncertain,
    absent,
    unchanged,
)
from vgpu.inventory import NodeInventory, NodeReport

log = logging.getLogger("serai.agent")

RETRY_SECONDS = 1.0


class NodeNameTaken(Exception):
    """Another machine reports under this name now. Give one of the two another --node."""


class Presence:
    """`endpoint` is written beside each first report of a lease."""

    def __init__(
        self, store: Store, node: str, machine_id: str, lease_seconds: int, endpoint: Endpoint
    ) -> None:
        self._store = store
        self._node = node
        self._machine_id = machine_id
        self._lease_seconds = lease_seconds
        self._endpoint = endpoint
        self._lease = 0
        self._report_revision = 0  # of the report that stands there; 0: to be read back
        self._written: NodeInventory | None = None

    async def claim(self) -> NodeInventory | None:
        """The inventory that stands in the store, if it is of this machine. NodeNameTaken, StoreUnavailable."""
        _, _, found = await self._claimable()
        if found is not None and found.machine_id == self._machine_id:
            self._written = found
            return found
        return None

    async def claim_when_reached(self) -> NodeInventory | None:
        """`claim`, however long the store takes to come up. NodeNameTaken."""
        said = ""
        while True:
            try:
                return await self.claim()
            except StoreUnavailable as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("waiting for the store: %s", said)
                await asyncio.sleep(RETRY_SECONDS)

    async def write_inventory(self, inventory: NodeInventory) -> None:
        """Only when it differs from what stands there. NodeNameTaken, StoreUnavailable."""
        if inventory == self._written:
            return
        inventory_stands, _, _ = await self._claimable()
        result = await self._store.txn(
            [inventory_stands], [Put(inventory_key(self._node), encode(inventory))]
        )
        if not result.succeeded:
            raise StoreUnavailable("the records of this node changed meanwhile, will look again")
        self._written = inventory

    async def report(self, report: NodeReport) -> None:
        """Renews the lease, or begins a new one if it was lost. NodeNameTaken, StoreUnavailable."""
        put = Put(report_key(self._node), encode(report), self._lease)
        if self._lease and await self._report_again(put):
            return
        inventory_stands, report_stands, _ = await self._claimable()
        lease = await self._store.grant_lease(self._lease_seconds)
        writes = [
            replace(put, lease=lease),
            Put(endpoint_key(self._node), encode(self._endpoint), lease),
        ]
        try:
            result = await self._store.txn([inventory_stands, report_stands], writes)
        except LeaseLost as error:
            raise StoreUnavailable("a new lease was lost at once") from error
        if not result.succeeded:
            await self._store.revoke_lease(lease)
            raise StoreUnavailable("the records of this node changed meanwhile, will look again")
        self._lease, self._report_revision = lease, result.revision

    async def _report_again(self, put: Put) -> bool:
        """Under the lease of the last report. False where that is gone. StoreUnavailable."""
        try:
            await self._store.keep_alive(self._lease)
            if not self._report_revision:
                item = await self._store.get(put.key)
                if item is None or item.lease != self._lease:
                    raise LeaseLost("its report is gone, or another's")
                self._report_revision = item.mod_revision
            result = await self._store.txn([unchanged(put.key, self._report_revision)], [put])
        except LeaseLost:
            log.warning("the lease of %s was lost: it did not report in time", self._node)
            self._lease = self._report_revision = 0
            return False
        except StoreUncertain:
            self._report_revision = 0
            raise
        self._report_revision = result.revision if result.succeeded else 0
        if not result.succeeded:
            raise StoreUnavailable("the report of this node changed meanwhile, will look again")
        return True

    async def leave(self) -> None:
        """Ends the lease, so that the coordinator sees at once that nobody watches this node. No error: the lease
        ends by itself too."""
        lease, self._lease = self._lease, 0
        if lease:
            try:
                await self._store.revoke_lease(lease)
            except StoreUnavailable as error:
                log.warning("the lease was not given back, it ends by itself: %s", error)

    async def _claimable(self) -> tuple[Compare, Compare, NodeInventory | None]:
        """What must not change until the inventory, or the report, is written; and the inventory. NodeNameTaken."""
        report = await self._store.get(report_key(self._node))
        inventory = await self._store.get(inventory_key(self._node))
        found = _inventory(inventory)
        if report is not None and found is not None and found.machine_id != self._machine_id:
            raise NodeNameTaken(
                f"node {self._node} is machine {found.machine_id}, which reports now; this is machine "
                f"{self._machine_id}: give it another --node, or stop the other agent and wait "
                f"{self._lease_seconds} s"
            )
        return (
            _stands(inventory_key(self._node), inventory),
            _stands(report_key(self._node), report),
            found,
        )


def _stands(key: str, item: KeyValue | None) -> Compare:
    return absent(key) if item is None else unchanged(key, item.mod_revision)


def _inventory(item: KeyValue | None) -> NodeInventory | None:
    try:
        return None if item is None else decode(NodeInventory, item.value)
    except Unreadable as error:
        log.warning("%s cannot be read and is written anew: %s", item.key if item else "", error)
        return None
