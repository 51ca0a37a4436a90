"""What a broken, frozen or restored etcd does to a watch, and a lost answer to a write; on a real etcd."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from coordinator.cluster import Cluster
from coordinator.config import Settings
from coordinator.leader import campaign, fence
from coordinator.replica import Replica
from coordinator.store import (
    Compacted,
    Delete,
    Put,
    StoreUnavailable,
    StoreUncertain,
    absent,
)
from tests.etcd_clients import IMPATIENT, Watcher, put, put_when_possible, store_at, watching
from tests.etcd_server import EtcdServer
from tests.tcp_proxy import TcpProxy

pytestmark = pytest.mark.etcd


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server that a test may harm."""
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    yield server
    server.stop()


# --- watches ---------------------------------------------------------------------------------------------------------


async def test_a_watch_survives_a_crash_of_etcd(own_server: EtcdServer) -> None:
    async with store_at(own_server.url) as store:
        start = await put(store, "/w/0")
        async with watching(store, "/w/", start) as watcher:
            await put(store, "/w/1")
            await watcher.until(lambda w: len(w.changes) == 1)
            await asyncio.to_thread(own_server.kill)
            await watcher.until(lambda w: w.connected[-1] is False)
            await asyncio.to_thread(own_server.start)
            await put_when_possible(store, "/w/2")
            await watcher.until(lambda w: len(w.changes) >= 2)
            assert list(dict.fromkeys(watcher.keys)) == ["/w/1", "/w/2"]
            assert watcher.connected == [True, False, True]


async def test_nothing_is_lost_when_a_connection_breaks_in_catch_up(etcd_server: EtcdServer) -> None:
    """5,000 revisions of 1 KiB, cut three times; etcd packs a thousand of them in one answer, in fragments."""
    async with store_at(etcd_server.url) as direct, TcpProxy(etcd_server.client_port) as proxy:
        start = (await direct.list("/catchup/")).revision
        for n in range(0, 5_000, 50):
            await asyncio.gather(*(put(direct, f"/catchup/{m:04d}", b"x" * 1024) for m in range(n, n + 50)))
        async with store_at(proxy.url) as store:
            seen: list[tuple[int, str]] = []
            cuts = 0
            proxy.cut_after_bytes = 600_000
            async with asyncio.timeout(30), aclosing(store.watch("/catchup/", start)) as batches:
                async for batch in batches:
                    seen += [(change.item.mod_revision, change.item.key) for change in batch.changes]
                    if not batch.connected:
                        cuts += 1
                        proxy.cut_after_bytes = 1_700_000 if cuts < 3 else None
                    if len(seen) >= 5_000:
                        break
            assert cuts == 3
            assert len(seen) == 5_000
            assert seen == sorted(set(seen))


async def test_a_watch_that_was_cut_off_over_a_compaction_says_so(etcd_server: EtcdServer) -> None:
    """ET-1."""
    async with store_at(etcd_server.url) as direct, TcpProxy(etcd_server.client_port) as proxy:
        start = await put(direct, "/et1/0")
        async with store_at(proxy.url) as store, watching(store, "/et1/", start) as watcher:
            last = await put(direct, "/et1/1")
            await watcher.until(lambda w: w.changes)
            await proxy.refuse()
            await watcher.until(lambda w: w.connected[-1] is False)
            for n in range(1_000):
                last = await put(direct, f"/et1/{n % 10}")
            await direct.compact(last)
            await proxy.restore()
            with pytest.raises(Compacted) as error:
                await watcher.until(lambda w: False, seconds=5)
            assert error.value.revision == last


async def test_a_deletion_at_the_compacted_revision_is_never_missed(etcd_server: EtcdServer) -> None:
    """etcd before 3.4.34 and 3.5.15 drops it, and a plain watch from there on would say nothing."""
    async with store_at(etcd_server.url) as store:
        start = await put(store, "/tomb/k")
        deleted = (await store.txn([], [Delete("/tomb/k")])).revision
        await put(store, "/tomb/other")
        await store.compact(deleted)
        try:
            async with watching(store, "/tomb/", start) as watcher:
                await watcher.until(lambda w: w.changes)
                assert watcher.changes[0].deleted
        except Compacted:
            pass  # the reader lists again, which is as good


async def test_a_frozen_etcd_is_noticed_and_nothing_is_lost(own_server: EtcdServer) -> None:
    async with store_at(own_server.url, timeout_seconds=0.5) as store:
        start = await put(store, "/f/0")
        async with watching(store, "/f/", start) as watcher:
            await put(store, "/f/1")
            await watcher.until(lambda w: w.changes)
            own_server.freeze()
            try:
                await watcher.until(lambda w: w.connected[-1] is False, seconds=3)
                with pytest.raises(StoreUncertain):
                    await put(store, "/f/2")
                with pytest.raises(StoreUnavailable):
                    await store.get("/f/1")
                with pytest.raises(StoreUnavailable):
                    await store.keep_alive(1)
            finally:
                own_server.thaw()
            await put_when_possible(store, "/f/3")
            # What was lost on its way in, /f/2, may be applied at any time from now on, also behind /f/3.
            await watcher.until(lambda w: "/f/3" in w.keys)
            assert watcher.connected[-1]


async def test_a_watch_from_now_on_says_at_once_that_it_cannot_begin() -> None:
    async with store_at("127.0.0.1:1", timeout_seconds=0.5) as store:
        with pytest.raises(StoreUnavailable):
            await anext(store.watch("/now/", None))


async def test_a_healthy_idle_watch_stays(etcd_server: EtcdServer) -> None:
    async with store_at(etcd_server.url) as store:
        start = await put(store, "/idle/0")
        async with watching(store, "/idle/", start) as watcher:
            await asyncio.sleep(6 * IMPATIENT.idle_seconds)
            await put(store, "/idle/1")
            await watcher.until(lambda w: w.changes)
            assert watcher.connected == [True]


async def test_a_watch_notices_a_restored_backup(own_server: EtcdServer) -> None:
    """Its revision lies in the future then, and etcd would let it wait until it is reached again."""
    async with store_at(own_server.url) as store:
        for n in range(10):
            start = await put(store, f"/r/{n}")
        async with watching(store, "/r/", start) as watcher:
            await put(store, "/r/x")
            await watcher.until(lambda w: w.changes)
            await asyncio.to_thread(own_server.kill)
            own_server.forget()  # an empty store is one that went back in time, too
            await asyncio.to_thread(own_server.start)
            with pytest.raises(Compacted):
                await watcher.until(lambda w: False)


# --- lost answers ----------------------------------------------------------------------------------------------------


async def test_a_lost_answer_is_uncertain_and_never_refused(etcd_server: EtcdServer) -> None:
    """A client that tries again by itself would say "not created" of a key that it has created."""
    async with (
        store_at(etcd_server.url) as direct,
        TcpProxy(etcd_server.client_port) as proxy,
        store_at(proxy.url) as store,
    ):
        assert await store.get("/lost/k") is None
        proxy.swallow_answers = True
        sending = asyncio.create_task(store.txn([absent("/lost/k")], [Put("/lost/k", b"mine")]))
        async with asyncio.timeout(5):
            while await direct.get("/lost/k") is None:
                await asyncio.sleep(0.01)
        await proxy.cut()
        with pytest.raises(StoreUncertain):
            await sending
        proxy.swallow_answers = False
        item = await store.get("/lost/k")
        assert item is not None
        assert item.value == b"mine"


async def test_an_answer_that_does_not_come_in_time_is_uncertain(etcd_server: EtcdServer) -> None:
    async with TcpProxy(etcd_server.client_port) as proxy, store_at(proxy.url, timeout_seconds=0.3) as store:
        await store.get("/lost/k")
        proxy.swallow_answers = True
        with pytest.raises(StoreUncertain):
            await put(store, "/lost/late")


async def test_what_could_not_be_sent_is_certainly_not_written() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        async with store_at(f"127.0.0.1:{taken.getsockname()[1]}") as store:
            with pytest.raises(StoreUnavailable) as error:
                await put(store, "/k")
            assert not isinstance(error.value, StoreUncertain)
            with pytest.raises(StoreUnavailable):
                await store.get("/k")


async def test_a_name_without_an_address_is_named() -> None:
    async with store_at("http://no-such-host.invalid:2379") as store:
        with pytest.raises(StoreUnavailable, match=r"no-such-host\.invalid"):
            await store.get("/k")


async def test_a_closed_store_says_so(etcd_server: EtcdServer) -> None:
    async with store_at(etcd_server.url) as store:
        watcher = Watcher(store, "/closed/", await put(store, "/closed/0"))
        await put(store, "/closed/1")
        await watcher.until(lambda w: w.changes)
    with pytest.raises(StoreUnavailable):
        await watcher.until(lambda w: False, seconds=5)
    with pytest.raises(StoreUnavailable):
        await store.get("/closed/0")


# --- those who live on it --------------------------------------------------------------------------------------------


async def test_a_standby_takes_over_on_etcd(etcd_server: EtcdServer) -> None:
    """LE-4, LE-8: by resignation at once, and when the leader's link is cut after it has stopped by itself."""
    settings = Settings()
    async with (
        TcpProxy(etcd_server.client_port) as proxy,
        store_at(proxy.url) as cut,
        store_at(etcd_server.url) as store,
    ):
        first = await campaign(cut, settings, "a", lambda: 0)
        standing_by = asyncio.create_task(campaign(store, settings, "b", lambda: 0))
        await first.resign()
        async with asyncio.timeout(1):
            second = await standing_by
        standing_by = asyncio.create_task(campaign(cut, settings, "a", lambda: 0))
        await second.resign()
        async with asyncio.timeout(1):
            third = await standing_by
        await proxy.refuse()
        standing_by = asyncio.create_task(campaign(store, settings, "b", lambda: 0))
        async with asyncio.timeout(settings.lease_seconds + 2):
            fourth = await standing_by
        assert not third.is_held
        assert not (await store.txn([fence(third.token)], [Put("/le4", b"")])).succeeded
        assert (await store.txn([fence(fourth.token)], [Put("/le4", b"")])).succeeded
        await third.resign()
        await fourth.resign()


async def test_a_replica_on_etcd_makes_up_for_a_compacted_gap(etcd_server: EtcdServer) -> None:
    """ET-1, ET-2."""
    async with (
        store_at(etcd_server.url) as direct,
        TcpProxy(etcd_server.client_port) as proxy,
        store_at(proxy.url) as cut,
    ):
        replica = Replica(cut, lambda: Cluster(Settings()), lambda: 0, prefix="/replica/")
        await put(direct, "/replica/goes")
        following = asyncio.create_task(replica.run())
        try:
            async with asyncio.timeout(15):
                await replica.ready()
                await replica.wait_for(await put(direct, "/replica/stays"))
                await proxy.refuse()
                while replica.connected:
                    await replica.wait_for_change(replica.changes)
                await direct.txn([], [Delete("/replica/goes")])
                last = await put(direct, "/replica/comes")
                await direct.compact(last)
                await proxy.restore()
                await replica.wait_for(last)
            assert set(replica.key_values) == {"/replica/stays", "/replica/comes"}
            assert replica.connected
            assert replica.numbers.listings == 2
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
