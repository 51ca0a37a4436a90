"""A TCP proxy that tests can turn against their client: it swallows answers, cuts connections, or refuses them."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class TcpProxy:
    """Between a client and 127.0.0.1:`port`. Use as an async context manager."""

    def __init__(self, port: int) -> None:
        self._behind = port
        self._server: asyncio.Server | None = None
        self._port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.swallow_answers = False
        self.cut_after_bytes: int | None = None
        self.swallowed = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> TcpProxy:
        await self.restore()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()

    async def restore(self) -> None:
        """Takes connections (again), on the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """No new connections, and the present ones are cut."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self.cut()

    async def cut(self) -> None:
        """Breaks every connection in the middle of whatever it carries."""
        for writer in self._writers:
            writer.transport.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        with suppress(ConnectionError, asyncio.CancelledError):
            behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", self._behind)
            self._writers.add(behind_writer)
            await asyncio.gather(
                self._pump(reader, behind_writer, is_answer=False),
                self._pump(behind_reader, writer, is_answer=True),
            )
        for one in (writer, *([behind_writer] if "behind_writer" in locals() else [])):
            one.transport.abort()
            self._writers.discard(one)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        while data := await reader.read(65536):
            if is_answer and self.swallow_answers:
                self.swallowed.set()
                continue
            if is_answer and self.cut_after_bytes is not None:
                self.cut_after_bytes -= len(data)
                if self.cut_after_bytes <= 0:
                    self.cut_after_bytes = None
                    raise ConnectionResetError
            writer.write(data)
            await writer.drain()
