"""A three-member etcd that loses members, data and history while jobs flow: none is lost, none runs twice."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import pytest

from coordinator.records import JOBS
from coordinator.store import Put
from tests.etcd_server import EtcdServer, make_members
from tests.integration.live import ADMIN, Flow, LiveCluster, live_cluster, spec
from tests.tcp_proxy import TcpProxy

pytestmark = pytest.mark.etcd


class Members:
    """Three members in the place of one server."""

    def __init__(self, folder: Path) -> None:
        # Without the option etcd wants all members to have been up for 5 s before it takes another one's place.
        self.members = make_members(folder, 3, "--strict-reconfig-check=false")
        self.url = ",".join(member.url for member in self.members)

    def stop(self) -> None:
        for member in self.members:
            member.stop()

    def last_lines(self, count: int) -> str:
        return "\n".join(member.last_lines(count) for member in self.members)

    def leader(self) -> EtcdServer:
        for member in self.members:
            line = member.etcdctl("endpoint", "status").stdout
            if line.split(", ")[4] == "true":
                return member
        raise AssertionError("no member leads")

    def watched(self) -> int:
        """The member by which most is watched."""

        def watchers(member: EtcdServer) -> float:
            with urllib.request.urlopen(f"{member.url}/metrics", timeout=5) as answer:
                text = answer.read().decode()
            (count,) = re.findall(r"^etcd_debugging_mvcc_watcher_total (\S+)$", text, re.MULTILINE)
            return float(count)

        counts = [watchers(member) for member in self.members]
        return counts.index(max(counts))

    def replace(self, lost: EtcdServer) -> None:
        """Its disk is gone: it leaves the cluster, and joins again empty, as etcd's manual says."""
        other = next(member for member in self.members if member is not lost)
        lost.kill()
        listed = other.etcdctl("member", "list").stdout
        (id,) = re.findall(rf"^(\w+), \w+, {lost.name},", listed, re.MULTILINE)
        _until_taken(other, "member", "remove", id)
        lost.forget()
        _until_taken(other, "member", "add", lost.name, "--peer-urls", lost.peer_url)
        lost._options = ("--initial-cluster-state", "existing")
        lost.start()

    def restart_each(self) -> None:
        for member in self.members:
            member.stop()
            member.start()

    def forget_history(self, revision: int) -> None:
        self.members[0].etcdctl("compact", str(revision))
        for member in self.members:
            member.etcdctl("defrag")


def _until_taken(member: EtcdServer, *command: str) -> None:
    """Again while the members are choosing a leader. One of which the answer was lost is refused the second time."""
    deadline = time.monotonic() + 60
    while (said := member.etcdctl(*command, check=False)).returncode:
        if "not found" in said.stderr or "already exists" in said.stderr:
            return
        assert time.monotonic() < deadline, said.stderr
        time.sleep(0.1)


@pytest.mark.timeout(240)
async def test_members_die_lose_their_data_and_their_history(tmp_path: Path) -> None:
    """ET-1, ET-2, LE-8: the network between the coordinator and one member is cut; the leading member killed and restarted,
    a member that lost its disk, compaction up to the head with defragmentation, a rolling restart; jobs are submitted
    and run all the time."""
    members = await asyncio.to_thread(Members, tmp_path / "etcd")
    live = LiveCluster(tmp_path, cast(EtcdServer, members), lease_seconds=3, node_lease_seconds=8)
    try:
        async with AsyncExitStack() as stack:
            proxies = [await stack.enter_async_context(TcpProxy(m.client_port)) for m in members.members]
            await live.start_coordinator("c1", etcd=",".join(proxy.url for proxy in proxies))
            admin = await live.bootstrap()
            await live.start_agent("n1", "simulated:8x80GiB:A100")
            await admin.create_tenant("a", quota_memory="640GiB")
            flow = Flow(admin, tmp_path / "ran")
            await flow.goes_on(live)
            await _cut_off(live, members, proxies, flow)
            await live.stop(["c1"])
        await live.start_coordinator("c2")
        flow.client = live.client(ADMIN)
        await _harm_members(live, members, flow)
        await flow.end()
        await flow.check(live, flow.client)
        assert len(flow.ids) >= 25
        await live.check()
    finally:
        await live.stop()
        await asyncio.to_thread(members.stop)


async def _cut_off(live: LiveCluster, members: Members, proxies: Sequence[TcpProxy], flow: Flow) -> None:
    """First from a member that swallows what it says, so that nothing tells of the cut; then from one that refuses
    connections. Each time it is the member that carries watches."""
    first = proxies[await asyncio.to_thread(members.watched)]
    first.swallow_answers = True
    await first.swallowed.wait()
    await flow.goes_on(live, jobs=8)
    first.swallow_answers = False
    await first.cut()
    second = proxies[await asyncio.to_thread(members.watched)]
    await second.refuse()
    await flow.goes_on(live)
    await second.restore()


async def _harm_members(live: LiveCluster, members: Members, flow: Flow) -> None:
    await flow.goes_on(live)
    first = await asyncio.to_thread(members.leader)
    await asyncio.to_thread(first.kill)
    await flow.goes_on(live)
    await asyncio.to_thread(first.start)
    await asyncio.to_thread(members.replace, members.members[1])
    await flow.goes_on(live)
    revision = (await live.store.list(JOBS)).revision
    await asyncio.to_thread(members.forget_history, revision)
    await flow.goes_on(live)
    await asyncio.to_thread(members.restart_each)
    await flow.goes_on(live)


async def test_an_agent_whose_watch_was_compacted_away_still_gets_its_grants(tmp_path: Path) -> None:
    """ET-1: cut off from etcd while a grant for it was written and history was forgotten. A watch that is ended by a
    compaction ends with a message and not with an error; an agent that overlooks it leaves the job allocated for ever."""
    async with live_cluster(tmp_path, lease_seconds=3, node_lease_seconds=20) as live:
        await live.start_coordinator()
        admin = await live.bootstrap()
        async with TcpProxy(live.etcd.client_port) as proxy:
            await live.start_agent("n1", "simulated:1x16GiB:T4", "process", "--etcd", proxy.url)
            await admin.create_tenant("a", quota_memory="16GiB")
            await proxy.refuse()
            job = await admin.submit(spec("job", "true", tenant="a", gpus=1))
            await live.until(lambda: _is_allocated(live))
            for number in range(100):
                await live.store.txn([], [Put("/other/key", b"%d" % number)])
            revision = (await live.store.list(JOBS)).revision
            await live.store.compact(revision)
            assert (await admin.job(job["id"]))["state"] == "ALLOCATED"
            await proxy.restore()
            assert (await admin.wait_for(job["id"], timeout_seconds=40))["state"] == "SUCCEEDED", live.logs()
            await live.stop(["n1"])


async def _is_allocated(live: LiveCluster) -> bool:
    return bool(await live.keys("grants/"))
