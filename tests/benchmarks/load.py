"""Jobs sent over HTTP: as fast as they are taken, or at a steady rate, by a fixed number of connections.

Plain HTTP/1.1 on sockets, since a client library would take more of the machine than the API that is measured. At a
steady rate a job's time counts from when it was due, so that a slow answer does not hide the wait of those behind it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import msgspec
from attrs import define, field


class _Id(msgspec.Struct):
    id: str


class _Items(msgspec.Struct):
    items: list[_Id]


@define
class Sent:
    """When each job was sent, or due, and when its submit was answered; monotonic seconds."""

    sent: dict[str, float] = field(factory=dict)
    answered: dict[str, float] = field(factory=dict)
    refused: int = 0


def spec(number: int, tenant: str) -> dict[str, object]:
    """Half a GPU of a simulated node, with the environment that a training job commonly has."""
    return {
        "name": f"train-{number:06d}",
        "tenant": tenant,
        "image": "registry.example.com/team/pytorch:2.3-cuda12",
        "command": ["python", "-m", "train", "--config", "configs/base.yaml", "--seed", str(number)],
        "gpus": {"count": 1, "memory": "40GiB", "compute": "50%"},
        "cpu": 4,
        "memory": "16GiB",
        "env": {
            "DATA": "/data/imagenet",
            "EPOCHS": "90",
            "LR": "0.1",
            "OMP_NUM_THREADS": "4",
            "RUN_NAME": f"resnet50-{number}",
        },
    }


def bodies(jobs: int, in_one: int, tenants: Sequence[str]) -> list[bytes]:
    """The requests' bodies: single specs, or lists of `in_one`."""
    specs = [spec(number, tenants[number % len(tenants)]) for number in range(jobs)]
    if in_one == 1:
        return [json.dumps(one).encode() for one in specs]
    return [json.dumps(specs[start : start + in_one]).encode() for start in range(0, jobs, in_one)]


class Load:
    """Sends bodies to one API by `connections` connections."""

    def __init__(self, host: str, port: int, token: str, connections: int) -> None:
        self._host, self._port = host, port
        self._head = (
            f"POST /v1/jobs HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._connections = connections
        self.result = Sent()

    async def as_fast_as_it_goes(self, requests: Sequence[bytes]) -> None:
        waiting = iter(requests)

        async def one() -> None:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            for body in waiting:
                await self._post(reader, writer, body, time.monotonic())
            writer.close()

        await asyncio.gather(*(one() for _ in range(self._connections)))

    async def steadily(self, requests: Sequence[bytes], rate: float) -> None:
        """`rate` requests a second."""
        due: asyncio.Queue[tuple[bytes, float] | None] = asyncio.Queue()

        async def one() -> None:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            while (item := await due.get()) is not None:
                await self._post(reader, writer, *item)
            writer.close()

        senders = [asyncio.create_task(one()) for _ in range(self._connections)]
        started_at = time.monotonic() + 0.1
        for number, body in enumerate(requests):
            at = started_at + number / rate
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            due.put_nowait((body, at))
        for _ in senders:
            due.put_nowait(None)
        await asyncio.gather(*senders)

    async def _post(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, at: float
    ) -> None:
        writer.write(b"%s%d\r\n\r\n%s" % (self._head, len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        start = head.lower().index(b"content-length:") + 15
        answer = await reader.readexactly(int(head[start : head.index(b"\r", start)]))
        now = time.monotonic()
        if not head.startswith(b"HTTP/1.1 201"):
            self.result.refused += 1
            if self.result.refused == 1:
                print(f"refused: {answer[:300]!r}", flush=True)
            return
        if body.startswith(b"["):
            ids = [item.id for item in msgspec.json.decode(answer, type=_Items).items]
        else:
            ids = [msgspec.json.decode(answer, type=_Id).id]
        for id in ids:
            self.result.sent[id] = at
            self.result.answered[id] = now
