"""The log server of a node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from nodeagent.endpoint import REMEMBERED_KEYS, ExpiredOutput, make_log_app
from nodeagent.runner import LogsUnknown, RunnerUnavailable, TaskKey

KEY = TaskKey("job1", 2, 0)
TOKEN = {"Authorization": "Bearer secret"}


class LogRunner:
    """Has the output of one task; remembers how it was asked."""

    def __init__(self) -> None:
        self.asked: tuple[object, ...] = ()
        self.breaks_after: int | None = None

    async def logs(
        self, key: TaskKey, *, stream: str, follow: bool, tail_bytes: int | None
    ) -> AsyncIterator[bytes]:
        self.asked = (stream, follow, tail_bytes)
        if key != KEY:
            raise LogsUnknown(str(key))
        for number, part in enumerate((b"one\n", b"two\n")):
            if number == self.breaks_after:
                raise RunnerUnavailable("the engine went away")
            yield part


@pytest.fixture
def runner() -> LogRunner:
    return LogRunner()


@pytest.fixture
async def client(runner: LogRunner, tmp_path: Path) -> AsyncIterator[TestClient]:
    expired = ExpiredOutput(tmp_path / "data" / "expired")
    expired.add(TaskKey("old", 1, 0))
    async with TestClient(TestServer(make_log_app(runner, "secret", expired))) as made:  # type: ignore[arg-type]
        yield made


async def test_output_is_sent_as_it_was_asked_for(client: TestClient, runner: LogRunner) -> None:
    answer = await client.get(f"/v1/logs/{KEY}?stream=stderr&follow=1&tail_bytes=5", headers=TOKEN)
    assert (answer.status, await answer.read()) == (200, b"one\ntwo\n")
    assert runner.asked == ("stderr", True, 5)
    await client.get(f"/v1/logs/{KEY}", headers=TOKEN)
    assert runner.asked == ("stdout", False, None)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secre"}])
async def test_nothing_is_told_without_the_token(client: TestClient, headers: dict[str, str]) -> None:
    for key in (str(KEY), "old.1.0", "never.1.0"):
        assert (await client.get(f"/v1/logs/{key}", headers=headers)).status == 401


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("old.1.0", 410),
        ("never.1.0", 404),
        ("no-key", 400),
        (f"{KEY}?stream=both", 400),
        (f"{KEY}?follow=yes", 400),
        (f"{KEY}?tail_bytes=-1", 400),
        (f"{KEY}?tail_bytes=²", 400),
    ],
)
async def test_what_cannot_be_answered_says_why_ob_1(client: TestClient, path: str, status: int) -> None:
    answer = await client.get(f"/v1/logs/{path}", headers=TOKEN)
    assert answer.status == status
    assert (await answer.json())["detail"]


async def test_an_engine_that_is_away_is_no_end_of_the_output(client: TestClient, runner: LogRunner) -> None:
    runner.breaks_after = 0
    assert (await client.get(f"/v1/logs/{KEY}", headers=TOKEN)).status == 503
    runner.breaks_after = 1
    answer = await client.get(f"/v1/logs/{KEY}", headers=TOKEN)
    with pytest.raises(Exception, match=r"[Pp]ayload|[Cc]onnection"):
        await answer.read()


def test_expired_keys_are_known_after_a_restart_and_bounded(tmp_path: Path) -> None:
    first = ExpiredOutput(tmp_path / "expired")
    for number in range(REMEMBERED_KEYS + 1):
        first.add(TaskKey("job", number, 0))
    second = ExpiredOutput(tmp_path / "expired")
    for expired in (first, second):
        assert TaskKey("job", 0, 0) not in expired
        assert TaskKey("job", 1, 0) in expired
        assert TaskKey("job", REMEMBERED_KEYS, 0) in expired
    assert len((tmp_path / "expired").read_text().split()) == REMEMBERED_KEYS
