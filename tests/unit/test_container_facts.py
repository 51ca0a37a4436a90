"""What the words of the Docker Engine mean to the agent, without one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.container_facts import has_cdi_spec, has_dropped, observed_task
from nodeagent.container_output import read_output
from nodeagent.containers import pull_failed
from nodeagent.runner import OUTPUT_DROPPED, Observed, TaskKey

KEY = TaskKey("job1", 1, 0)


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("received unexpected HTTP status: 502 Bad Gateway", "launch_failed"),
        (
            "net/http: request canceled while waiting for connection (Client.Timeout exceeded)",
            "launch_failed",
        ),
        ("Get https://r/v2/: dial tcp: lookup r: no such host", "launch_failed"),
        ("toomanyrequests: You have reached your pull rate limit", "launch_failed"),
        ("something nobody has seen before", "launch_failed"),
        ("manifest for busybox:nope not found: manifest unknown: manifest unknown", "image_unavailable"),
        ("unauthorized: authentication required", "image_unavailable"),
        (
            "pull access denied for x, repository does not exist or may require 'docker login'",
            "image_unavailable",
        ),
        ("no matching manifest for linux/arm64 in the manifest list entries", "image_unavailable"),
    ],
)
def test_what_waiting_cannot_change_is_hopeless_ex_4(said: str, fault: str) -> None:
    failed = pull_failed("r/x:1", said)
    assert (failed.fault, failed.exit_code) == (fault, None)
    assert "r/x:1" in failed.detail
    assert said in failed.detail


def inspected(status: str, **state: object) -> dict[str, Any]:
    defaults = {
        "Status": status,
        "Running": status in ("running", "paused"),
        "ExitCode": 0,
        "OOMKilled": False,
        "StartedAt": "2026-01-02T03:04:05.123456789Z",
        "FinishedAt": "0001-01-01T00:00:00Z",
        "Error": "",
    }
    labels = {"serai.node": "n1", "serai.slices": "not json"}
    return {"Name": "/serai-job1-1-0", "State": defaults | state, "Config": {"Labels": labels}}


def test_a_running_container_has_no_end() -> None:
    for status in ("running", "paused"):
        task = observed_task(inspected(status), KEY, "n1")
        assert (task.state, task.exit_code, task.ended_at_ms) == (Observed.RUNNING, None, None)
        assert task.started_at_ms == 1767323045123
        assert (task.container, task.slices, task.foreign) == ("serai-job1-1-0", (), False)


@pytest.mark.parametrize("status", ["exited", "dead", "removing"])
def test_an_ended_container_says_how(status: str) -> None:
    end = inspected(status, ExitCode=137, OOMKilled=True, FinishedAt="2026-01-02T03:04:06Z", Error="oops")
    task = observed_task(end, KEY, "n2")
    assert (task.state, task.exit_code, task.oom_killed) == (Observed.EXITED, 137, True)
    assert (task.ended_at_ms, task.detail, task.foreign) == (1767323046000, "oops", True)


def test_a_container_that_never_started_is_created() -> None:
    task = observed_task(inspected("created", StartedAt="0001-01-01T00:00:00Z"), KEY, "n1")
    assert (task.state, task.started_at_ms, task.exit_code) == (Observed.CREATED, None, None)


def test_cdi_counts_only_with_a_specification_of_gpus(tmp_path: Path) -> None:
    assert not has_cdi_spec([str(tmp_path), "/nowhere"])
    (tmp_path / "nvidia.yaml").touch()
    assert has_cdi_spec([str(tmp_path)])


def test_output_may_be_missing_when_the_oldest_file_is_in_use(tmp_path: Path) -> None:
    log = tmp_path / "x-json.log"
    found = {"LogPath": str(log), "HostConfig": {"LogConfig": {"Config": {"max-file": "3"}}}}
    (tmp_path / "x-json.log.1").touch()
    assert not has_dropped(found)
    (tmp_path / "x-json.log.2").touch()
    assert has_dropped(found)
    assert not has_dropped({"LogPath": "", "HostConfig": {}})


FRAMES = [
    b"2026-01-02T03:04:05.%09dZ %s" % (number, text)
    for number, text in enumerate((b"one\n", b"two\n", b"three\n"))
]


async def collect(
    *, dropped: bool = False, follow: bool = False, tail_bytes: int | None = None
) -> list[bytes]:
    asked: list[tuple[bool, int | None]] = []

    async def open_output(following: bool, since_ms: int | None) -> AsyncIterator[bytes]:
        asked.append((following, since_ms))
        for frame in FRAMES[: None if following or not follow else 2]:
            yield frame

    output = read_output(open_output, has_dropped=dropped, follow=follow, tail_bytes=tail_bytes)
    return [part async for part in output]


async def test_frames_lose_their_time_and_nothing_else() -> None:
    assert await collect() == [b"one\n", b"two\n", b"three\n"]
    assert await collect(dropped=True) == [OUTPUT_DROPPED, b"one\n", b"two\n", b"three\n"]


async def test_the_last_bytes_are_exact_and_marked_only_if_they_reach_the_gap() -> None:
    assert await collect(tail_bytes=8) == [b"o\nthree\n"]
    assert await collect(tail_bytes=0) == [b""]
    assert await collect(dropped=True, tail_bytes=8) == [b"o\nthree\n"]
    assert await collect(dropped=True, tail_bytes=1000) == [OUTPUT_DROPPED, b"one\ntwo\nthree\n"]


async def test_following_from_the_last_bytes_repeats_nothing() -> None:
    assert await collect(follow=True, tail_bytes=4) == [b"two\n", b"three\n"]
