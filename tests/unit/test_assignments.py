"""What a pass decided on records that have turned out otherwise since is not written over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from attrs import evolve, frozen
from msgspec.structs import replace

from coordinator.model import Task, TaskState
from coordinator.records import decode, encode, grant_key, task_key
from coordinator.store import MemoryStore, Put, StoreUncertain
from jobspecs.container import ContainerSettings, Grant
from nodeagent.assignments import Assignments
from nodeagent.runner import TaskKey
from nodeagent.view import WriteTask
from tests.fakes import FlakyStore
from vgpu.isolation.settings import GpuSettings

KEY = TaskKey("j1", 1, 0)
CONTAINER = ContainerSettings(0, "image:1", ("true",), {}, GpuSettings(), 1000, 64, 16, 7, {})
PREPARED = Task("j1", 1, 0, "n1", TaskState.PREPARED)
NEVER_RAN = replace(PREPARED, state=TaskState.EXITED, released=True)


@frozen
class Granted:
    """An agent that has seen its only grant, written at `revision`; `woken` tells of another change."""

    store: FlakyStore
    revision: int
    woken: asyncio.Event
    assignments: Assignments


@pytest.fixture
async def granted() -> AsyncIterator[Granted]:
    store = FlakyStore(MemoryStore(lambda: 0.0))
    result = await store.txn([], [Put(grant_key("n1", "j1", 1), encode(Grant("n1", "j1", 1, "a", (), 0)))])
    woken = asyncio.Event()
    assignments = Assignments(store, "n1", 128, woken.set)
    following = asyncio.create_task(assignments.follow())
    await woken.wait()
    woken.clear()
    yield Granted(store, result.revision, woken, assignments)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_an_end_that_was_decided_without_the_record_that_had_landed_is_not_written(
    granted: Granted,
) -> None:
    """Seed 11115 of the simulation: the answer to PREPARED was lost, so the leader launched; asked to stop, the agent
    held that nothing had been prepared, read the records again, and wrote over PREPARED that nothing runs."""
    seen = dict(granted.assignments.records)
    granted.store.lost_replies = 1
    with pytest.raises(StoreUncertain):
        await granted.assignments.write([WriteTask(PREPARED, granted.revision)], seen)
    await granted.assignments.write([WriteTask(NEVER_RAN, granted.revision)], seen)
    item = await granted.store.get(task_key("n1", "j1", 1, 0))
    assert item is not None
    assert decode(Task, item.value) == PREPARED
    assert granted.woken.is_set()  # another pass decides on what there is


async def test_an_end_whose_answer_was_lost_is_in_doubt_until_the_record_is_written_again(
    granted: Granted,
) -> None:
    """Seed 611688 of the simulation: it landed once the task had been started after all."""
    granted.store.late_requests = 1
    with pytest.raises(StoreUncertain):
        await granted.assignments.write([WriteTask(NEVER_RAN, granted.revision)], {})
    assert granted.assignments.in_doubt == {KEY}
    await granted.assignments.write([WriteTask(PREPARED, granted.revision)], {})
    assert not granted.assignments.in_doubt
    assert granted.woken.is_set()  # what waited for it may be started
    assert [late.succeeded for late in await granted.store.deliver()] == [False]


async def test_what_an_agent_finds_when_it_begins_is_in_doubt_until_its_record_is_written() -> None:
    """Seed 710539 of the simulation: on a machine that had lost everything a task was being started anew when RUNNING
    of the former agent landed."""
    store = FlakyStore(MemoryStore(lambda: 0.0))
    grant = Grant("n1", "j1", 1, "a", (CONTAINER,), 0)
    revision = (await store.txn([], [Put(grant_key("n1", "j1", 1), encode(grant))])).revision

    async def following(assignments: Assignments, woken: asyncio.Event) -> asyncio.Task[None]:
        task = asyncio.create_task(assignments.follow())
        await woken.wait()
        woken.clear()
        return task

    woken = asyncio.Event()
    former = Assignments(store, "n1", 128, woken.set)
    task = await following(former, woken)
    store.late_requests = 1
    with pytest.raises(StoreUncertain):
        await former.write([WriteTask(replace(PREPARED, state=TaskState.RUNNING), revision)], {})
    task.cancel()

    assignments = Assignments(store, "n1", 128, woken.set)
    task = await following(assignments, woken)
    assert assignments.in_doubt == {KEY}
    await assignments.write([WriteTask(replace(PREPARED, state=TaskState.STARTING), revision)], {})
    assert not assignments.in_doubt
    assert woken.is_set()
    assert [late.succeeded for late in await store.deliver()] == [False]

    woken.clear()
    await store.txn([], [Put(grant_key("n1", "j2", 1), encode(evolve(grant, job="j2")))])
    await woken.wait()
    assert ("j2", 1) in assignments.grants
    assert not assignments.in_doubt, "nobody was here before for what comes later"
    task.cancel()
