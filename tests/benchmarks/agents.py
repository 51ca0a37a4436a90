"""A thousand simulated nodes in one process: their records, their watches, their transactions. Nothing is started.

Each node writes its inventory and a leased report, watches its own grants, and answers each with a transaction of its
own, fenced as a real agent's is. So the store carries what a thousand machines would make it carry; only connections
are shared, since one process speaks for all. A real agent puts what it has to say of several jobs into one
transaction; here that is an option, since placement fills node after node and would make it a bench of few nodes.

    until running    each task is reported RUNNING
    until end        RUNNING, then EXITED and released; the job has ended when its grant is gone

It speaks gRPC itself: the store's own client, made for one node, would be the bottleneck of the bench.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import msgspec

from coordinator.etcd_watch import prefix_end
from coordinator.etcdpb import etcd_pb2 as pb
from coordinator.model import Task, TaskState
from coordinator.records import encode, grant_prefix, inventory_key, report_key, task_key
from nodeagent.simulated import SimulatedSource
from vgpu.inventory import NodeInventory, NodeReport

GPUS = "8x80GiB:A100-SXM4-80GB:nvlink=4"
TRANSACTIONS_IN_FLIGHT = 32
WATCHES_ON_A_STREAM = 125
NODE_LEASE_SECONDS = 600  # no node is to be missed where the whole cluster shares two cores with others
_SERVICE = "/etcdserverpb."


class _Container(msgspec.Struct):
    task: int


class _Grant(msgspec.Struct):
    """What the bench needs of a grant; all else in it is skipped."""

    job: str
    attempt: int
    containers: list[_Container]
    stopping: bool = False


class _Wish(msgspec.Struct):
    """Task records that a node has yet to write, under the condition that the grant still stands."""

    grant_key: bytes
    created: int
    grant: _Grant
    state: TaskState


def clock_ms() -> int:
    return time.time_ns() // 1_000_000


class Rpc:
    """The few calls of etcd that agents make, on one connection."""

    def __init__(self, target: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(target, options)
        self.txn = self._unary("KV/Txn", pb.TxnRequest, pb.TxnResponse)
        self.grant_lease = self._unary("Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)

    def _unary(self, path: str, request: type, answer: type) -> grpc.aio.UnaryUnaryMultiCallable:
        return self._channel.unary_unary(
            _SERVICE + path,
            request_serializer=request.SerializeToString,
            response_deserializer=answer.FromString,
        )

    def stream(self, path: str, request: type, answer: type) -> grpc.aio.StreamStreamCall:
        return self._channel.stream_stream(
            _SERVICE + path,
            request_serializer=request.SerializeToString,
            response_deserializer=answer.FromString,
        )()

    async def close(self) -> None:
        await self._channel.close()


class Node:
    """One machine: its records, and what it has yet to write. At most one of its transactions is in flight."""

    def __init__(self, name: str, fleet: Fleet) -> None:
        self.name = name
        self.lease = 0
        self._fleet = fleet
        self._sequence = 0
        self._wishes: list[_Wish] = []
        self._is_writing = False

    def inventory(self) -> NodeInventory:
        gpus = SimulatedSource(self.name, GPUS).read_inventory()
        return NodeInventory(
            self.name,
            f"machine-{self.name}",
            "bench",
            gpus.gpus,
            gpus.links,
            192_000,
            1_500_000,
            simulated=True,
        )

    def report(self) -> pb.RequestOp:
        self._sequence += 1
        report = NodeReport(self.name, self._sequence, clock_ms(), ())
        return _put(report_key(self.name), encode(report), self.lease)

    def seen(self, event: pb.Event) -> None:
        """A grant came, was asked to stop, or has gone."""
        if event.type == pb.Event.DELETE:
            self._fleet.ended(event.kv.key.rsplit(b"/", 1)[1].split(b".")[0].decode())
            return
        grant = msgspec.json.decode(event.kv.value, type=_Grant)
        state = TaskState.EXITED if grant.stopping else TaskState.RUNNING
        self._wishes.append(_Wish(event.kv.key, event.kv.create_revision, grant, state))
        if not self._is_writing:
            self._is_writing = True
            self._fleet.spawn(self._write())

    async def _write(self) -> None:
        while self._wishes:
            count = len(self._wishes) if self._fleet.shares else 1
            wishes, self._wishes = self._wishes[:count], self._wishes[count:]
            async with self._fleet.gate:
                answer = await self._fleet.rpc.txn(self._transaction(wishes))
            at = time.monotonic()
            self._fleet.transactions += 1
            if not answer.succeeded:
                self._fleet.refused += len(wishes)
                continue
            for wish in wishes:
                if wish.state is TaskState.RUNNING:
                    self._fleet.running(wish.grant.job, at)
                    if self._fleet.to_the_end:
                        self._wishes.append(msgspec.structs.replace(wish, state=TaskState.EXITED))
        self._is_writing = False

    def _transaction(self, wishes: Sequence[_Wish]) -> pb.TxnRequest:
        request = pb.TxnRequest()
        now_ms = clock_ms()
        for wish in wishes:
            compare = request.compare.add()
            compare.key, compare.target, compare.create_revision = (
                wish.grant_key,
                pb.Compare.CREATE,
                wish.created,
            )
            for container in wish.grant.containers:
                task = Task(
                    wish.grant.job,
                    wish.grant.attempt,
                    container.task,
                    self.name,
                    wish.state,
                    started_at_ms=now_ms,
                )
                if wish.state is TaskState.EXITED:
                    task = _ended(task, now_ms)
                key = task_key(self.name, task.job, task.attempt, task.task)
                request.success.append(_put(key, encode(task)))
        return request


def _ended(task: Task, now_ms: int) -> Task:
    return Task(
        task.job,
        task.attempt,
        task.task,
        task.node,
        TaskState.EXITED,
        started_at_ms=task.started_at_ms,
        ended_at_ms=now_ms,
        exit_code=0,
        released=True,
    )


def _put(key: str, value: bytes, lease: int = 0) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key.encode(), value=value, lease=lease))


class Fleet:
    """All nodes. `done` is set once `expected` jobs have come as far as the bench wants."""

    def __init__(
        self, rpc: Rpc, count: int, expected: int, to_the_end: bool = False, shares: bool = False
    ) -> None:
        self.rpc = rpc
        self.to_the_end = to_the_end
        self.shares = shares
        self.transactions = 0
        self.gate = asyncio.Semaphore(TRANSACTIONS_IN_FLIGHT)
        self.refused = 0
        self.lost_watches = 0
        self.done = asyncio.Event()
        self._expected = expected
        self._running_at: dict[str, float] = {}
        self._ended_at: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.nodes = [Node(f"n{number:04d}", self) for number in range(count)]

    def running(self, job: str, at: float) -> None:
        self._running_at.setdefault(job, at)
        if not self.to_the_end and len(self._running_at) >= self._expected:
            self.done.set()

    def ended(self, job: str) -> None:
        self._ended_at[job] = time.monotonic()
        if self.to_the_end and len(self._ended_at) >= self._expected:
            self.done.set()

    def result(self) -> dict[str, object]:
        return {
            "running": self._running_at,
            "ended": self._ended_at,
            "transactions": self.transactions,
            "refused": self.refused,
            "lost_watches": self.lost_watches,
        }

    def spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            print(f"an agent failed: {task.exception()!r}", file=sys.stderr, flush=True)

    async def enroll(self) -> int:
        """Every node's inventory, lease and report; answers the revision from which its grants are watched."""
        revision = 0

        async def one(node: Node) -> None:
            nonlocal revision
            async with self.gate:
                lease = await self.rpc.grant_lease(pb.LeaseGrantRequest(TTL=NODE_LEASE_SECONDS))
                node.lease = lease.ID
                puts = [_put(inventory_key(node.name), encode(node.inventory())), node.report()]
                answer = await self.rpc.txn(pb.TxnRequest(success=puts))
                revision = max(revision, answer.header.revision)

        await asyncio.gather(*(one(node) for node in self.nodes))
        return revision

    async def watch(self, revision: int) -> None:
        """Opens a watch for each node, and follows them beside."""
        for start in range(0, len(self.nodes), WATCHES_ON_A_STREAM):
            nodes = self.nodes[start : start + WATCHES_ON_A_STREAM]
            stream = self.rpc.stream("Watch/Watch", pb.WatchRequest, pb.WatchResponse)
            for number, node in enumerate(nodes, 1):
                prefix = grant_prefix(node.name).encode()
                create = pb.WatchCreateRequest(
                    key=prefix, range_end=prefix_end(prefix), start_revision=revision + 1, watch_id=number
                )
                await stream.write(pb.WatchRequest(create_request=create))
            for _ in nodes:
                await stream.read()
            self.spawn(self._follow(stream, nodes))

    async def _follow(self, stream: grpc.aio.StreamStreamCall, nodes: Sequence[Node]) -> None:
        while True:
            answer = await stream.read()
            if answer.canceled:
                self.lost_watches += 1
            node = nodes[answer.watch_id - 1]
            for event in answer.events:
                node.seen(event)

    async def keep_reporting(self, period_seconds: float) -> None:
        """Each node renews its lease and writes its report once a period, one after another."""
        keep_alive = self.rpc.stream(
            "Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
        )
        due = time.monotonic()
        while True:
            for node in self.nodes:
                due += period_seconds / len(self.nodes)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await keep_alive.write(pb.LeaseKeepAliveRequest(ID=node.lease))
                await keep_alive.read()
                await self.rpc.txn(pb.TxnRequest(success=[node.report()]))


async def run(options: argparse.Namespace) -> None:
    rpc = Rpc(options.etcd)
    fleet = Fleet(rpc, options.nodes, options.expect, options.until == "end", options.share)
    revision = await fleet.enroll()
    await fleet.watch(revision)
    if options.report_seconds:
        fleet.spawn(fleet.keep_reporting(options.report_seconds))
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)
    print(json.dumps({"event": "ready"}), flush=True)
    await fleet.done.wait()
    Path(options.out).write_bytes(msgspec.json.encode(fleet.result()))
    print(json.dumps({"event": "done"}), flush=True)
    await asyncio.Event().wait()  # until it is ended: what it used is read while it lives


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--etcd", required=True, help="host:port")
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--expect", type=int, required=True, help="jobs until this process is done")
    parser.add_argument("--until", choices=("running", "end"), default="running")
    parser.add_argument("--share", action="store_true", help="a node's jobs share its transactions")
    parser.add_argument("--report-seconds", type=float, default=10.0, help="0 = only at the start")
    parser.add_argument("--out", required=True, help="where the times go, as JSON")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
