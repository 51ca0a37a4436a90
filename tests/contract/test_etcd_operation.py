"""Logins, certificates, several members and a full disk: the sides of a real etcd that operators meet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from coordinator.etcd_store import EtcdStore
from coordinator.store import (
    Put,
    StoreFull,
    StoreUnavailable,
    StoreUncertain,
    WatchBatch,
    absent,
)
from tests.etcd_clients import put, put_when_possible, store_at, watching
from tests.etcd_server import EtcdServer, make_certificates, make_members

pytestmark = pytest.mark.etcd

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
                await watcher.until(lambda w: revisions[-1] in w.revisions)
                seen = watcher.revisions
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
                await watcher.until(lambda w: "/m/back" in w.keys)
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
