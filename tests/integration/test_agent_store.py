"""What an agent makes of a store that is not as it was: emptied, restored, or with records that nobody can read."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from coordinator.model import TaskState
from coordinator.records import LEADER, Leadership, encode, grant_key, grant_prefix, task_key
from coordinator.store import Compacted, Delete, MemoryStore, Put, WatchBatch
from jobspecs.container import Grant
from nodeagent.process_cleanup import stop_all
from nodeagent.runner import Observed
from tests.fakes import FlakyStore
from tests.integration.test_agent import JOB, SLEEP, World
from vgpu.inventory import NodeReport


class Replaceable(FlakyStore):
    """Once `store` is another one, the next change under a watch of the old one ends it, as etcd's client does when
    it comes back to a smaller revision."""

    async def watch(self, prefix: str, after_revision: int | None) -> AsyncGenerator[WatchBatch, None]:
        old = self.store
        async with aclosing(old.watch(prefix, after_revision)) as batches:
            async for batch in batches:
                if self.store is not old:
                    raise Compacted(1)
                yield batch


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """Nobody leads."""
    made = World(tmp_path)
    made.store = Replaceable(made.memory)
    yield made
    stop_all(tmp_path / "tasks", grace_seconds=0.1)


async def test_nothing_is_stopped_for_lack_of_a_grant_while_nobody_leads(world: World) -> None:
    """RR-5, RR-6: an etcd that lost everything has no grants; nor has one that a restore is filling. Once a
    coordinator leads, what it does not list is ended."""
    runner = world.make_runner()
    orphan = world.container(*SLEEP)
    await runner.start(Grant("n1", JOB, 1, "a", (orphan,), 0), orphan)
    async with world.agent():
        await world.until_report(lambda report: report.held)
        await world.memory.txn([], [Put(LEADER, encode(Leadership("restore.1", "", 1)))])
        # two graces and two looks of the agent
        await world.until_report(lambda report: report.sequence >= 4)
        assert [task.state for task in await runner.list()] == [Observed.RUNNING]
        await world.lead()
        await world.until_report(lambda report: not report.held)
    assert [task.state for task in await runner.list()] == [Observed.EXITED]
    await runner.close()


async def test_a_store_that_went_back_takes_no_grant_away(world: World) -> None:
    """The agent lives on while etcd is emptied and filled from a backup: its task is never touched, and its end is
    written under the grant that is there again."""
    async with world.agent():
        await world.lead()
        grant = await world.grant(world.container("sh", "-c", "sleep 3; exit 5"))
        await world.until_task(TaskState.RUNNING)
        for number in range(20):
            await world.memory.txn([], [Put("/serai/done/x", b"%d" % number)])
        before = world.memory
        world.memory = MemoryStore(time.monotonic)
        assert isinstance(world.store, FlakyStore)
        world.store.store = world.memory
        await before.compact(
            before.revision
        )  # ends the watch that is open; what it lists next is the new store
        await before.txn([], [Put(grant_prefix("n1"), b"{}")])
        await world.until_report(lambda report: report.held)
        await world.memory.txn([], [Put(grant_key("n1", JOB, 1), encode(grant))])
        task = await world.until_task(TaskState.EXITED, released=True)
    assert task.exit_code == 5


async def test_a_key_under_grants_that_names_no_attempt_harms_nobody(world: World) -> None:
    """UP-1: written by hand, before the agent comes and while it watches. It is reported, and the agent goes on."""
    prefix = grant_prefix("n1")
    await world.memory.txn([], [Put(f"{prefix}garbage", b"{}"), Put(f"{prefix}a.b.c", b"x")])
    await world.memory.txn([], [Put(task_key("n1", JOB, 1, 0) + ".x.y", b"{}")])
    async with world.agent():
        await world.until_report(lambda report: len(_unread(report)) == 2)
        await world.memory.txn([], [Put(f"{prefix}{JOB}.{'9' * 30}", b"\xff"), Put(f"{prefix}", b"")])
        await world.grant(world.container("sh", "-c", "exit 7"))
        assert (await world.until_task(TaskState.EXITED, released=True)).exit_code == 7
        wrong = Grant("n1", "0000000000000002", 1, "a", (world.container(*SLEEP, task=3),), 0)
        await world.memory.txn([], [Put(grant_key("n1", JOB, 4), encode(wrong))])
        report = await world.until_report(lambda report: len(_unread(report)) == 5)
        assert any("it is one of 0000000000000002.1" in warning for warning in report.warnings)
        await world.memory.txn(
            [], [Delete(f"{prefix}garbage"), Delete(prefix), Delete(grant_key("n1", JOB, 4))]
        )
        await world.until_report(lambda report: len(_unread(report)) == 2)


def _unread(report: NodeReport) -> list[str]:
    return [warning for warning in report.warnings if warning.startswith("grant ")]
