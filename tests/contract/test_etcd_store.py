"""What only a real etcd can do to its client: crash, freeze, forget logins, fill up, lose a member, go back in time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.etcd_store import EtcdSettings, EtcdStore
from coordinator.etcd_watch import Patience
from coordinator.store import (
    Change,
    Compacted,
    Delete,
    Put,
    StoreFull,
    StoreUnavailable,
    StoreUncertain,
    WatchBatch,
    absent,
)
from tests.etcd_server import EtcdServer, etcd_server, make_certificates, make_members
from tests.tcp_proxy import TcpProxy

__all__ = ["etcd_server"]  # a fixture
pytestmark = pytest.mark.etcd

IMPATIENT = Patience(idle_seconds=0.3, answer_seconds=0.3)


@asynccontextmanager
async def store_at(url: str, **options: Any) -> AsyncIterator[EtcdStore]:
    store = EtcdStore(EtcdSettings.from_url(url, **options), patience=IMPATIENT)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server that a test may harm."""
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    yield server
    server.stop()


async def put(store: EtcdStore, key: str, value: bytes = b"v") -> int:
    return (await store.txn([], [Put(key, value)])).revision


async def put_when_possible(store: EtcdStore, key: str, value: bytes = b"v") -> int:
    async with asyncio.timeout(15):
        while True:
            try:
                return await put(store, key, value)
            except StoreUnavailable:
                await asyncio.sleep(0.05)


class Watcher:
    """Reads one watch in the background and keeps what it saw."""

    def __init__(self, store: EtcdStore, prefix: str, after: int) -> None:
        self.changes: list[Change] = []
        self.connected: list[bool] = []
        self._turn = asyncio.Event()
        self.task = asyncio.create_task(self._read(store, prefix, after))

    async def _read(self, store: EtcdStore, prefix: str, after: int) -> None:
        async with aclosing(store.watch(prefix, after)) as batches:
            async for batch in batches:
                self._take(batch)

    def _take(self, batch: WatchBatch) -> None:
        self.changes += batch.changes
        if not self.connected or self.connected[-1] is not batch.connected:
            self.connected.append(batch.connected)
        self._turn.set()
        self._turn = asyncio.Event()

    async def until(self, condition: Any, seconds: float = 15) -> None:
        async with asyncio.timeout(seconds):
            while not condition(self):
                turn = asyncio.create_task(self._turn.wait())
                await asyncio.wait({turn, self.task}, return_when=asyncio.FIRST_COMPLETED)
                turn.cancel()
                if self.task.done():
                    self.task.result()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def watching(store: EtcdStore, prefix: str, after: int) -> AsyncIterator[Watcher]:
    watcher = Watcher(store, prefix, after)
    try:
        yield watcher
    finally:
        await watcher.close()


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
            assert [change.item.key for change in watcher.changes] == ["/w/1", "/w/2"]
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
            await watcher.until(lambda w: w.changes[-1].item.key == "/f/3")
            assert watcher.connected[-1]


async def test_a_healthy_idle_watch_stays(etcd_server: EtcdServer) -> None:
    async with store_at(etcd_server.url) as store:
        start = await put(store, "/idle/0")
        async with watching(store, "/idle/", start) as watcher:
            await asyncio.sleep(6 * IMPATIENT.idle_seconds)
            await put(store, "/idle/1")
            await watcher.until(lambda w: w.changes)
            assert watcher.connected == [True]


async def test_a_watch_notices_a_restored_backup(own_server: EtcdServer, tmp_path: Path) -> None:
    """Its revision lies in the future then, and etcd would let it wait until it is reached again."""
    async with store_at(own_server.url) as store:
        for n in range(10):
            start = await put(store, f"/r/{n}")
        async with watching(store, "/r/", start) as watcher:
            await put(store, "/r/x")
            await watcher.until(lambda w: w.changes)
            await asyncio.to_thread(own_server.kill)
            own_server.folder = tmp_path / "restored"
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


# --- login and TLS ---------------------------------------------------------------------------------------------------


async def test_a_login_is_renewed(tmp_path: Path) -> None:
    """LE-10: the token expires while idle, and a restarted etcd knows none at all."""
    server = EtcdServer(tmp_path / "etcd", "--auth-token-ttl", "1")
    server.start()
    try:
        server.require_login("secret")
        async with store_at(server.url, user="root", password="secret") as store:
            lease = await store.grant_lease(60)
            start = await put(store, "/auth/0")
            async with watching(store, "/auth/", start) as watcher:
                for n in range(1, 3):
                    if n == 1:
                        await asyncio.sleep(3)  # etcd looks for expired tokens each second
                    else:
                        await asyncio.to_thread(server.kill)
                        await asyncio.to_thread(server.start, wait=False)
                        async with asyncio.timeout(15):
                            while True:
                                try:
                                    await store.get("/auth/0")
                                    break
                                except StoreUnavailable:
                                    await asyncio.sleep(0.05)
                    assert (
                        await store.txn([absent(f"/auth/{n}")], [Put(f"/auth/{n}", b"", lease)])
                    ).succeeded
                    assert await store.keep_alive(lease) > 0
                    await watcher.until(lambda w, n=n: len(w.changes) == n)
                    second = [batch async for batch in _first(store, "/auth/", start)]
                    assert second[0].changes
            await store.revoke_lease(lease)
        async with store_at(server.url, user="root", password="wrong") as store:
            with pytest.raises(StoreUnavailable, match="invalid user ID or password"):
                await store.get("/auth/0")
        async with store_at(server.url) as store:
            with pytest.raises(StoreUnavailable):
                await store.get("/auth/0")
    finally:
        server.stop()


async def _first(store: EtcdStore, prefix: str, after: int) -> AsyncIterator[WatchBatch]:
    """The first batch of a new watch."""
    async with asyncio.timeout(5), aclosing(store.watch(prefix, after)) as batches:
        async for batch in batches:
            if batch.changes:
                yield batch
                return


async def test_a_user_is_no_trouble_where_etcd_wants_none(etcd_server: EtcdServer) -> None:
    async with store_at(etcd_server.url, user="root", password="secret") as store:
        await put(store, "/nouser")


async def test_mutual_tls(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "tls")
    server = EtcdServer(tmp_path / "etcd", tls=certificates)
    server.start()
    ca = str(certificates / "ca.pem")
    client = {"cert_file": str(certificates / "client.pem"), "key_file": str(certificates / "client.key")}
    try:
        async with store_at(server.url, ca_file=ca, **client) as store:
            lease = await store.grant_lease(60)
            assert (await store.txn([], [Put("/tls", b"1", lease)])).succeeded
            assert await store.keep_alive(lease) > 0
        named = server.url.replace("127.0.0.1", "localhost")
        for url, options, works in (
            (named, {"ca_file": ca, **client}, True),
            (server.url, {"ca_file": ca, "server_name": "localhost", **client}, True),
            (server.url, {"ca_file": ca, "server_name": "elsewhere", **client}, False),
            (server.url, {"ca_file": ca}, False),
            (server.url, client, False),
            (server.url, {"ca_file": str(tmp_path / "none.pem")}, False),
        ):
            async with store_at(url, **options) as store:
                if works:
                    assert await store.get("/tls") is not None
                else:
                    with pytest.raises(StoreUnavailable):
                        await store.get("/tls")
    finally:
        server.stop()


# --- several members -------------------------------------------------------------------------------------------------


async def test_three_members_go_on_with_two_and_stop_at_once_with_one(tmp_path: Path) -> None:
    members = make_members(tmp_path, 3)
    try:
        async with store_at(",".join(member.url for member in members)) as store:
            assert len(await store.members()) == 3
            start = await put(store, "/m/0")
            async with watching(store, "/m/", start) as watcher:
                leader = (await store.status()).leader
                ids = {member.id: member.name for member in await store.members()}
                first = next(member for member in members if member.name == ids[leader])
                rest = [member for member in members if member is not first]
                await asyncio.to_thread(first.kill)
                revisions = [await put_when_possible(store, f"/m/{n}") for n in range(1, 20)]
                await watcher.until(lambda w: w.changes and w.changes[-1].item.mod_revision == revisions[-1])
                seen = [change.item.mod_revision for change in watcher.changes]
                assert seen == sorted(set(seen))
                assert set(revisions) <= set(seen)

                await asyncio.to_thread(rest[0].kill)
                await watcher.until(lambda w: w.connected[-1] is False)
                async with asyncio.timeout(15):
                    while (
                        await store.status()
                    ).leader:  # the last member takes a while to see that it is alone
                        await asyncio.sleep(0.05)
                with pytest.raises(StoreUnavailable) as error:
                    await put(store, "/m/never")
                assert not isinstance(error.value, StoreUncertain)
                await asyncio.to_thread(rest[0].start, wait=False)
                assert await put_when_possible(store, "/m/back") > revisions[-1]
                await watcher.until(lambda w: w.changes[-1].item.key == "/m/back")
    finally:
        for member in members:
            member.stop()


# --- space -----------------------------------------------------------------------------------------------------------


async def test_a_full_etcd_is_told_from_a_missing_one(tmp_path: Path) -> None:
    """ET-3: writes are refused, reads and keep-alives go on; after compaction, defragmentation and disarming it goes on."""
    server = EtcdServer(tmp_path / "etcd", "--quota-backend-bytes", str(2 << 20))
    server.start()
    try:
        async with store_at(server.url) as store:
            lease = await store.grant_lease(60)
            last = 0

            async def fill() -> None:
                nonlocal last
                for n in range(100):
                    last = await put(store, f"/full/{n % 3}", b"x" * 200_000)

            with pytest.raises(StoreFull):
                await fill()
            assert await store.alarms() == ("NOSPACE",)
            assert any("NOSPACE" in error for error in (await store.status()).errors)
            assert await store.get("/full/0") is not None
            assert await store.keep_alive(lease) > 0
            await store.compact(last)
            server.etcdctl("defrag")
            server.etcdctl("alarm", "disarm")
            assert await store.alarms() == ()
            await put(store, "/full/0")
    finally:
        server.stop()


async def test_status_names_version_and_size(etcd_server: EtcdServer) -> None:
    async with store_at(etcd_server.url) as store:
        status = await store.status()
        (member,) = await store.members()
        assert status.version.startswith("3.")
        assert status.leader == status.member == member.id
        assert 0 < status.used_bytes <= status.file_bytes
        assert status.errors == ()
        assert member.client_urls == (etcd_server.url,)
