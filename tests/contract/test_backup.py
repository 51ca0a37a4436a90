"""`serai backup` and `serai restore` on a real etcd, through the command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coordinator import backup, records
from coordinator.backup import BackupInvalid, read_backup
from coordinator.config import Settings
from coordinator.etcd_store import EtcdStore
from coordinator.leader import campaign
from coordinator.store import Delete, Put
from tests.etcd_clients import store_at
from tests.etcd_server import EtcdServer
from tests.fakes import FakeClock

pytestmark = pytest.mark.etcd

TENANT = records.tenant_key("a")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    """One of its own: the commands know one prefix only."""
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def store(server: EtcdServer) -> AsyncIterator[EtcdStore]:
    async with store_at(server.url) as store:
        yield store


async def _serai(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-c", "from coordinator.cli import main; main()", *arguments]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


async def _fill(store: EtcdStore, count: int) -> None:
    """`count` keys, garbage and a leased one among them."""
    lease = await store.grant_lease(60)
    puts = [Put(f"/serai/done/{number:06d}", b'{"n":%d}' % number) for number in range(count - 3)]
    puts += [Put(TENANT, '{"name":"ä"}'.encode()), Put("/serai/usage/x", b"\xff\x00 no text")]
    puts += [Put("/serai/nodes/n1/report", b"alive", lease), Put("/serai/idempotency/a/k", b"{}", lease)]
    for start in range(0, len(puts), 100):
        await store.txn([], puts[start : start + 100])


async def _contents(store: EtcdStore) -> dict[str, bytes]:
    return {
        item.key: item.value
        for item in (await store.list("/serai/")).items
        if not item.key.endswith("report")
    }


async def test_what_was_there_is_there_again(store: EtcdStore, server: EtcdServer, tmp_path: Path) -> None:
    """More than one page and one transaction; bytes that are no text; leased keys left out, answers to submits kept."""
    await _fill(store, 700)
    await store.txn(
        [], [Put("/serai/queue/a/big", b"x" * 900_000), Put("/serai/queue/a/big2", b"x" * 300_000)]
    )
    before = await _contents(store)
    file = tmp_path / "b.jsonl"
    assert await _serai("backup", str(file), "--etcd", server.url) == (
        0, f"{len(before)} records at revision {json.loads(file.read_text().splitlines()[0])['revision']} in {file}\n",
    )  # fmt: skip
    assert file.stat().st_mode & 0o777 == 0o600
    for key in before:
        await store.txn([], [Delete(key)])
    code, said = await _serai("restore", str(file), "--etcd", server.url)
    assert code == 0, said
    assert await _contents(store) == before
    assert not [
        item for item in (await store.list("/serai/")).items if item.lease and not item.key.endswith("report")
    ]


async def test_a_cluster_that_holds_something_is_left_alone_unless_forced(
    store: EtcdStore, server: EtcdServer, tmp_path: Path
) -> None:
    await _fill(store, 10)
    file = tmp_path / "b.jsonl"
    await _serai("backup", str(file), "--etcd", server.url)
    before = await _contents(store)
    kept = await store.get("/serai/done/000001")
    await store.txn(
        [], [Put(TENANT, b"changed"), Put("/serai/queue/a/new", b"{}"), Delete("/serai/done/000000")]
    )
    code, said = await _serai("restore", str(file), "--etcd", server.url)
    assert code == 4
    assert "not empty" in said
    assert (await store.get(TENANT) or kept).value == b"changed"  # type: ignore[union-attr]
    code, said = await _serai("restore", str(file), "--etcd", server.url, "--force")
    assert code == 0, said
    assert "2 records written, 8 stood there already, 1 removed" in said
    assert await _contents(store) == before
    assert await store.get("/serai/done/000001") == kept, (
        "what is equal is not written: no agent sees its grant change"
    )


async def test_a_leader_is_refused_and_with_force_shut_out(
    store: EtcdStore, server: EtcdServer, tmp_path: Path
) -> None:
    """LE-4: it loses its term at once, and nothing of it lands in the restored cluster."""
    file = tmp_path / "b.jsonl"
    await _serai("backup", str(file), "--etcd", server.url)
    term = await campaign(store, Settings(lease_seconds=30), "c1", FakeClock())
    code, said = await _serai("restore", str(file), "--etcd", server.url)
    assert (code, "c1" in said) == (4, True)
    assert term.is_held
    code, said = await _serai("restore", str(file), "--etcd", server.url, "--force")
    assert code == 0, said
    async with asyncio.timeout(10):
        await term.lost.wait()
    await term.resign()
    assert await store.get(records.LEADER) is None


async def test_nobody_leads_after_half_a_restore_until_it_is_whole(store: EtcdStore) -> None:
    """The key is held under no lease, and only --force takes it over."""

    wanted = {f"/serai/done/{number}": b"{}" for number in range(250)}
    writes = 0
    txn = store.txn

    async def dies_in_the_middle(compares, writes_):  # type: ignore[no-untyped-def]
        nonlocal writes
        writes += 1
        if writes == 3:
            raise ConnectionError("the machine went away")
        return await txn(compares, writes_)

    store.txn = dies_in_the_middle  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        await backup.restore(store, wanted, 1)
    store.txn = txn  # type: ignore[method-assign]
    held = await store.get(records.LEADER)
    assert held is not None
    assert held.lease == 0
    with pytest.raises(backup.RestoreRefused, match="an unfinished restore"):
        await backup.restore(store, wanted, 2)
    done = await backup.restore(store, wanted, 3, force=True)
    assert (done.written, done.kept) == (150, 100)
    assert await store.get(records.LEADER) is None


async def test_files_that_are_no_backup(store: EtcdStore, server: EtcdServer, tmp_path: Path) -> None:
    """UP-1: nothing is written unless the whole file is right; each "no" says why."""
    await _fill(store, 10)
    _, whole = await backup.back_up(store, 5)
    header, *lines = whole.splitlines(keepends=True)
    newer = header.replace(b'"serai_backup":1', b'"serai_backup":2')
    twice = b"".join(lines[:-1]) + lines[0]
    for data, why in (
        (b"", "no backup"),
        (b"\xff\xfe{}", "no backup"),
        (b"[1]\n", "no backup"),
        (newer + b"".join(lines), "format 2"),
        (header + b"".join(lines[:-1]), "cut"),
        (header + b"".join([lines[1], lines[0], *lines[2:]]), "checksum"),
        (header.replace(b'"count":10', b'"count":"10"').replace(b'"count":9', b'"count":"9"'), "its header"),
        (_with_digest(header, twice) + twice, "second time"),
        (_with_digest(header, b"[]\n" * len(lines)) + b"[]\n" * len(lines), "no record"),
        (
            _with_digest(header, other := whole[len(header) :].replace(b"/serai/", b"/other/")) + other,
            "no backup holds",
        ),
    ):
        with pytest.raises(BackupInvalid, match=why):
            read_backup(data)
    before = await _contents(store)
    file = tmp_path / "bad.jsonl"
    file.write_bytes(newer + b"".join(lines))
    code, said = await _serai("restore", str(file), "--etcd", server.url, "--force")
    assert (code, "format 2" in said) == (4, True)
    assert await _contents(store) == before


def _with_digest(header: bytes, body: bytes) -> bytes:
    import hashlib

    return json.dumps(json.loads(header) | {"sha256": hashlib.sha256(body).hexdigest()}).encode() + b"\n"
