"""The Python client of the HTTP API: typed, asynchronous, and safe to retry.

async with Client("http://127.0.0.1:8765", token) as serai:
    job = await serai.submit({"name": "hello", "image": "busybox:1", "command": ["echo", "hello"]})
    end = await serai.wait_for(job["id"])
    print(end["state"], end["exit_code"])
"""

from coordinator.client.client import Client
from coordinator.client.errors import AnswerUnreadable, ApiError, ClientError, Unreachable, WaitedTooLong
from coordinator.client.events import Event

__all__ = [
    "AnswerUnreadable",
    "ApiError",
    "Client",
    "ClientError",
    "Event",
    "Unreachable",
    "WaitedTooLong",
]
