"""Staying with a job until it ends: its states on stderr, its output on stdout and stderr."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, BinaryIO

from coordinator.cli.output import is_terminal, sentence

if TYPE_CHECKING:
    from coordinator.client import Client
    from coordinator.client.views import JobView, TaskView

# How long the rest of the output may take once the job has ended.
_LAST_OUTPUT_SECONDS = 15.0


async def stay(client: Client, id: str, *, show_states: bool, show_output: bool) -> JobView:
    """Returns the job once it has ended and its output was shown."""
    copies: dict[tuple[int, int], asyncio.Task[None]] = {}
    last: JobView | None = None
    try:
        async for job in client.watch_job(id):
            if show_states and is_terminal(sys.stderr) and _line(job) != (last and _line(last)):
                print(_line(job), file=sys.stderr, flush=True)
            last = job
            for task in job["tasks"] if show_output else ():
                key = (job["attempt"], task["task"])
                if key not in copies and _has_output(task):
                    label = f"[{task['task']}] " if len(job["tasks"]) > 1 else ""
                    copies[key] = asyncio.create_task(_copy_task(client, job, task, label))
        if copies:
            await asyncio.wait(copies.values(), timeout=_LAST_OUTPUT_SECONDS)
    finally:
        for copy in copies.values():
            copy.cancel()
        await asyncio.gather(*copies.values(), return_exceptions=True)
    if last is None:
        raise AssertionError("a watched job is seen at least once")
    return last


async def copy_output(chunks: AsyncIterator[bytes], out: BinaryIO, label: str = "") -> None:
    """Bytes as they come; with a label line by line, so that the lines of several tasks do not mix."""
    rest = b""
    async for chunk in chunks:
        if not label:
            out.write(chunk)
            out.flush()
            continue
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            out.write(label.encode() + line + b"\n")
        out.flush()
    if rest:
        out.write(label.encode() + rest + b"\n")
        out.flush()


async def _copy_task(client: Client, job: JobView, task: TaskView, label: str) -> None:
    await asyncio.gather(*(_copy_stream(client, job, task, stream, label) for stream in ("stdout", "stderr")))


async def _copy_stream(client: Client, job: JobView, task: TaskView, stream: str, label: str) -> None:
    from coordinator.client import ApiError, Unreachable

    out = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
    chunks = client.logs(job["id"], task=task["task"], attempt=job["attempt"], stream=stream, follow=True)
    try:
        await copy_output(chunks, out, label)
    except (ApiError, Unreachable) as error:
        print(f"{label}no more {stream}: {error}", file=sys.stderr)


def _has_output(task: TaskView) -> bool:
    return task["state"] == "RUNNING" or (task["state"] == "EXITED" and task["started_at"] is not None)


def _line(job: JobView) -> str:
    if job["state"] == "PENDING":
        why = sentence(job["reason"])
    elif job["state"] in ("ALLOCATED", "STARTING", "RUNNING"):
        why = "on " + ", ".join(sorted({task["node"] for task in job["tasks"] if task["node"]}))
    else:
        why = sentence(job["reason"])
    attempt = f" (attempt {job['attempt']})" if job["attempt"] > 1 else ""
    return f"{job['id']} {job['state']}{attempt} {why}".rstrip()
