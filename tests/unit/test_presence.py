"""A node's report: under its lease, and never an older one over a newer."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.records import Endpoint, decode, report_key
from coordinator.store import Delete, MemoryStore, StoreUnavailable, StoreUncertain
from nodeagent.presence import Presence
from tests.fakes import FlakyStore
from vgpu.inventory import NodeReport

pytestmark = pytest.mark.looptime

LEASE_SECONDS = 10


def _store() -> FlakyStore:
    store = FlakyStore(MemoryStore(asyncio.get_running_loop().time))
    store.only = report_key("n1")
    return store


def _presence(store: FlakyStore) -> Presence:
    return Presence(store, "n1", "machine-1", LEASE_SECONDS, Endpoint("n1", "", ""))


def _report(sequence: int) -> NodeReport:
    return NodeReport("n1", sequence, 1000 * sequence, ())


async def _shown(store: FlakyStore) -> int:
    item = await store.get(report_key("n1"))
    return decode(NodeReport, item.value).sequence if item is not None else 0


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_report_that_arrives_late_does_not_hide_a_newer_one(is_first: bool) -> None:
    """Seed 210220: it showed a GPU that was lost meanwhile as idle and well, and a job was placed on it."""
    store = _store()
    presence = _presence(store)
    if not is_first:
        await presence.report(_report(1))
    store.late_requests = 1
    with pytest.raises(StoreUncertain):
        await presence.report(_report(2))
    await presence.report(_report(3))
    assert [result.succeeded for result in await store.deliver()] == [False]
    assert await _shown(store) == 3
    await presence.report(_report(4))
    assert await _shown(store) == 4


@pytest.mark.parametrize("is_first", [True, False])
async def test_one_that_landed_though_its_answer_was_lost_is_gone_on_from(is_first: bool) -> None:
    store = _store()
    presence = _presence(store)
    if not is_first:
        await presence.report(_report(1))
    store.lost_replies = 1
    with pytest.raises(StoreUncertain):
        await presence.report(_report(2))
    assert await _shown(store) == 2
    await presence.report(_report(3))
    assert await _shown(store) == 3


async def test_one_that_arrives_just_before_the_next_only_puts_it_off() -> None:
    store = _store()
    presence = _presence(store)
    await presence.report(_report(1))
    store.late_requests = 1
    with pytest.raises(StoreUncertain):
        await presence.report(_report(2))
    store.late_requests = 1
    with pytest.raises(StoreUncertain):
        await presence.report(_report(3))
    assert [result.succeeded for result in await store.deliver()] == [True, False]
    await presence.report(_report(4))
    assert await _shown(store) == 4


async def test_what_an_agent_had_sent_before_it_died_does_not_hide_what_the_next_one_says() -> None:
    store = _store()
    before = _presence(store)
    await before.report(_report(1))
    store.late_requests = 1
    with pytest.raises(StoreUncertain):
        await before.report(_report(2))
    await _presence(store).report(_report(1))
    assert [result.succeeded for result in await store.deliver()] == [False]


async def test_a_node_that_was_silent_for_too_long_begins_a_new_lease() -> None:
    store = _store()
    presence = _presence(store)
    await presence.report(_report(1))
    await asyncio.sleep(LEASE_SECONDS + 1)
    assert await _shown(store) == 0
    await presence.report(_report(2))
    assert await _shown(store) == 2
    await presence.report(_report(3))
    assert await _shown(store) == 3


async def test_a_report_that_somebody_deleted_is_written_again() -> None:
    """As by an operator with etcdctl."""
    store = _store()
    presence = _presence(store)
    await presence.report(_report(1))
    await store.store.txn([], [Delete(report_key("n1"))])
    with pytest.raises(StoreUnavailable):
        await presence.report(_report(2))
    await presence.report(_report(3))
    assert await _shown(store) == 3
