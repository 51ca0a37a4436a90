"""Holds the fake Nomad against what a real 1.6.3 answered (`tests/fakenomad/recorded.json`).

Each recorded request is sent to the fake in the recorded order. Status, content type and error texts must be equal;
bodies must have the fields that the engine reads, and no field that the real server does not have, with equal types.
Scenes whose register was not recorded (exit 3, OOM, ...) are set up again first.
"""

from __future__ import annotations

import asyncio
import copy
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.fakenomad import FakeNomad, NomadServer

RECORDED = json.loads((pathlib.Path(__file__).parents[1] / "fakenomad" / "recorded.json").read_text())
NODE_1, NODE_2 = "3f84e98e-f224-c0b1-b732-75bd4f48e426", "4a530c1c-bfc2-f194-fb68-11ee2e394bae"
HOUR_NS = 3600 * 10**9

# What the engine reads, by the kind of body; the fake must have all of it wherever the real server had it.
READ_OF_ALLOCATION = {
    "ID", "JobID", "TaskGroup", "NodeID", "NodeName", "ClientStatus", "DesiredStatus", "TaskStates", "CreateIndex",
    "ModifyIndex", "Namespace", "Events", "State", "Failed", "StartedAt", "FinishedAt", "Type", "Time", "Details",
    "DisplayMessage", "DesiredDescription", "ClientDescription",
}  # fmt: skip
READ_OF_EVALUATION = {"ID", "JobID", "Status", "FailedTGAllocs", "BlockedEval", "ModifyIndex", "QueuedAllocations",
                      "ConstraintFiltered", "DimensionExhausted", "NodesFiltered", "NodesExhausted", "TriggeredBy"}  # fmt: skip
READ_OF_JOB = {"ID", "Meta", "Stop", "Status", "TaskGroups", "Name", "JobModifyIndex", "SubmitTime", "Namespace",
               "Constraints", "Tasks", "Config"}  # fmt: skip
READ_OF_NODE = {"ID", "Name", "Status", "Version", "SchedulingEligibility", "Drivers"}
READ_OF_ANSWER = {"EvalID", "Index", "JobModifyIndex"}
READ = READ_OF_ALLOCATION | READ_OF_EVALUATION | READ_OF_JOB | READ_OF_NODE | READ_OF_ANSWER
# Figures that depend on the machine, whole trees that Nomad shows and nobody reads, notes of whoever recorded.
FREE = {"Metrics", "AllocatedResources", "Resources", "SharedResources", "TaskResources", "Job", "NetworkStatus",
        "SigningKeyID", "ResourcesExhausted", "ClassExhausted", "ClassFiltered", "Update", "RestartPolicy",
        "ReschedulePolicy", "Attributes", "_note", "Details", "ConstraintFiltered", "Env", "SnapshotIndex",
        "QueuedAllocations"}  # fmt: skip


def differences(fake: Any, real: Any, path: str = "") -> list[str]:
    """Where the fake's body is not of the shape of the real one."""
    if isinstance(real, dict) and isinstance(fake, dict):
        found = [f"{path}.{key} is invented" for key in fake.keys() - real.keys() if key not in FREE]
        found += [f"{path}.{key} is missing" for key in (real.keys() - fake.keys()) & READ]
        for key in fake.keys() & real.keys() - FREE:
            found += differences(fake[key], real[key], f"{path}.{key}")
        return found
    if isinstance(real, list) and isinstance(fake, list):
        if bool(real) != bool(fake):
            return [f"{path} has {len(fake)} items, not {len(real)}"]
        return [text for item in fake for text in differences(item, real[0], f"{path}[]")]
    if fake is None or real is None or type(fake) is type(real):
        return []
    return [f"{path} is {type(fake).__name__}, not {type(real).__name__}"]


def job(
    id: str, node: str, script: str, *, image: str = "serai-test:1", memory_mb: int = 64, **group: Any
) -> dict[str, Any]:
    """A job as the recording's, with another script."""
    request = copy.deepcopy(next(entry for entry in RECORDED if entry["tag"] == "register.create")["request"])
    body = request["Job"]
    body |= {"ID": id, "Name": id}
    body["TaskGroups"][0] |= {
        "Constraints": [{"LTarget": "${node.unique.id}", "Operand": "=", "RTarget": node}],
        **group,
    }
    task = body["TaskGroups"][0]["Tasks"][0]
    task["Resources"] = {"CPU": 100, "MemoryMB": memory_mb}
    task["Config"] |= {"image": image, "command": "sh", "args": ["-c", script], "devices": []}
    return request


class Replay:
    """Sends recorded requests, with this run's ids in the place of the recorded ones."""

    def __init__(self, server: NomadServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.nomad = server.nomad
        self.session = session
        self.ids: dict[str, str] = {}

    async def send(self, entry: dict[str, Any]) -> tuple[int, str | None, Any]:
        path = entry["path"]
        for recorded, ours in self.ids.items():
            path = path.replace(recorded, ours)
        # The one request that was no JSON was recorded without its body.
        data = b"{" if entry["tag"] == "register.badjson" else None
        async with self.session.request(
            entry["method"],
            self.server.address + path,
            json=entry.get("request") if data is None else None,
            data=data,
        ) as response:
            text = await response.text()
            kind = response.headers.get("Content-Type")
            body = json.loads(text) if kind == "application/json" else text
            if isinstance(body, dict) and isinstance(entry["body"], dict) and "EvalID" in entry["body"]:
                self.ids[entry["body"]["EvalID"]] = body["EvalID"]
            return response.status, kind, body

    def scene(self, entry: dict[str, Any]) -> None:
        """What happened before this request without having been recorded."""
        if entry["tag"] in _SCENES:
            _SCENES[entry["tag"]](self, entry)


def _register(replay: Replay, entry: dict[str, Any], script: str, **given: Any) -> str:
    id = entry["path"].split("/")[3]
    replay.nomad.register(replay.nomad.check_register(job(id, given.pop("node", NODE_2), script, **given)))
    return id


def _completed(replay: Replay, entry: dict[str, Any]) -> None:
    replay.ids[entry["body"]["ID"]] = next(iter(replay.nomad.allocs))


def _badcmd(replay: Replay, entry: dict[str, Any]) -> None:
    request = job(entry["path"].split("/")[3], NODE_2, "")
    request["Job"]["TaskGroups"][0]["Tasks"][0]["Config"] |= {"command": "/nope", "args": []}
    replay.nomad.register(replay.nomad.check_register(request))


def _gone(replay: Replay, entry: dict[str, Any]) -> None:
    request = job(entry["path"].split("/")[3], NODE_2, "exit 0")
    device = {"host_path": "/dev/nvidia9", "container_path": "/dev/nvidia9", "cgroup_permissions": "rw"}
    request["Job"]["TaskGroups"][0]["Tasks"][0]["Config"]["devices"] = [device]
    replay.nomad.register(replay.nomad.check_register(request))


def _unplaced(replay: Replay, entry: dict[str, Any]) -> None:
    down = "down" in entry["body"]["JobID"]
    if down:
        replay.nomad.clients.down(NODE_2)
    node = {"t.nonode": "00000000-0000-0000-0000-000000000000", "t.down": NODE_2}.get(
        entry["body"]["JobID"].rpartition("-")[0], NODE_1
    )
    memory_mb = 999_999 if "bigmem" in entry["body"]["JobID"] else 64
    request = job(entry["body"]["JobID"], node, "exit 0", memory_mb=memory_mb)
    answer = replay.nomad.register(replay.nomad.check_register(request))
    replay.ids[entry["body"]["ID"]] = answer["EvalID"]
    replay.ids[entry["body"]["BlockedEval"]] = replay.nomad.evals[answer["EvalID"]]["BlockedEval"]
    if down:
        replay.nomad.deregister("default", entry["body"]["JobID"], purge=True)
        replay.nomad.clients.up(NODE_2)


def _deregistered(replay: Replay, entry: dict[str, Any]) -> None:
    replay.nomad.deregister("default", _register(replay, entry, "sleep 3600"), purge=False)


def _lost(replay: Replay, entry: dict[str, Any]) -> None:
    _register(replay, entry, "sleep 3600")
    replay.nomad.clients.down(NODE_2)
    replay.nomad.clients.up(NODE_2)
    # Seen on the real one: the second copy ran beside the first (nomad.overlaps is what the engine must prevent).
    assert replay.nomad.clients.overlaps


def _disconnected(replay: Replay, entry: dict[str, Any]) -> None:
    _register(replay, entry, "sleep 3600", MaxClientDisconnect=HOUR_NS)
    replay.nomad.clients.down(NODE_2)
    assert replay.nomad.nodes[NODE_2].status == "disconnected"
    replay.nomad.clients.up(NODE_2)


def _deregistered_while_down(replay: Replay, entry: dict[str, Any]) -> None:
    given = {"MaxClientDisconnect": HOUR_NS} if "maxdisc" in entry["tag"] else {}
    id = _register(replay, entry, "trap 'exit 9' TERM; sleep 3600", **given)
    replay.nomad.clients.down(NODE_2)
    replay.nomad.deregister("default", id, purge=False)
    replay.nomad.clients.up(NODE_2)
    assert len(replay.nomad.clients.of_job(id)) == 1


_SCENES: dict[str, Any] = {
    "alloc.complete": _completed,
    "allocs.exit3": lambda replay, entry: _register(replay, entry, "exit 3"),
    "allocs.oom": lambda replay, entry: _register(replay, entry, "tail /dev/zero"),
    "allocs.badimg": lambda replay, entry: _register(replay, entry, "exit 0", image="no-such:1"),
    "allocs.badcmd": _badcmd,
    "allocs.sig": lambda replay, entry: _register(replay, entry, "exit 0"),
    "allocs.gone": _gone,
    "eval.placement_failed": _unplaced,
    "eval.exhausted": _unplaced,
    "eval.node_down": _unplaced,
    "allocs.deregistered": _deregistered,
    "allocs.node_lost": _lost,
    "allocs.maxdisc": _disconnected,
    "allocs.deregdown": _deregistered_while_down,
    "allocs.maxdisc-dereg": _deregistered_while_down,
}
# StopAfterClientDisconnect is never used by the engine (it cannot stand beside MaxClientDisconnect).
_LEFT_OUT = {"allocs.stopafter", "event.stream"}


@pytest.fixture
async def replay() -> AsyncIterator[Replay]:
    nomad = FakeNomad()
    nomad.add_node("gpu-node-1", NODE_1)
    nomad.add_node("gpu-node-2", NODE_2)
    server = NomadServer(nomad, heartbeat_seconds=0.05)
    await server.start()
    async with aiohttp.ClientSession() as session:
        yield Replay(server, session)
    await server.stop()


async def test_every_recorded_request_is_answered_as_by_the_real_server(replay: Replay) -> None:
    checked = 0
    for entry in RECORDED:
        if entry["tag"] in _LEFT_OUT:
            continue
        replay.scene(entry)
        status, kind, body = await replay.send(entry)
        where = f"{entry['tag']} {entry['method']} {entry['path']}: {body}"
        assert status == entry["status"], where
        # A few answers were recorded without their content type.
        assert "ctype" not in entry or kind == entry["ctype"], where
        if isinstance(entry["body"], str):
            assert body == entry["body"], where
        else:
            assert differences(body, entry["body"]) == [], where
        checked += 1
    assert checked == len(RECORDED) - len(_LEFT_OUT)


async def test_allocations_tell_the_same_story_as_the_real_ones(replay: Replay) -> None:
    """Statuses, event types and Details, which is what the engine judges by."""

    def story(body: list[dict[str, Any]]) -> list[Any]:
        return [
            (alloc["ClientStatus"], alloc["ClientDescription"], alloc["DesiredStatus"], alloc["DesiredDescription"],
             [(state["State"], state["Failed"], state["StartedAt"] is None,
               [(event["Type"], {k: v for k, v in event["Details"].items() if k not in ("driver_error", "image")})
                for event in state["Events"]])
              for state in alloc["TaskStates"].values()])
            for alloc in sorted(body, key=lambda alloc: alloc["CreateIndex"])
        ]  # fmt: skip

    compared = 0
    for entry in RECORDED:
        if entry["tag"] in _LEFT_OUT:
            continue
        replay.scene(entry)
        _, _, body = await replay.send(entry)
        if entry["tag"].startswith("allocs."):
            # The recorded gang has two ranks; one stands for both.
            real = entry["body"][:1] if entry["tag"] == "allocs.deregistered" else entry["body"]
            assert story(body) == story(real), entry["tag"]
            compared += 1
    assert compared == 11


def _status(event: dict[str, Any]) -> tuple[str, bool]:
    """Objects leave empty fields out, so that an allocation that its client knows has more of them."""
    payload = event["Payload"].get("Allocation") or event["Payload"].get("Evaluation") or {}
    return payload.get("ClientStatus") or payload.get("Status", ""), "TaskStates" in payload


async def test_event_stream_has_the_recorded_lines(replay: Replay) -> None:
    real = next(entry for entry in RECORDED if entry["tag"] == "event.stream")["body"]
    shapes = {(event["Topic"], _status(event)): event for line in real for event in line["Events"]}
    replay.nomad.register(replay.nomad.check_register(job("t.ev", NODE_1, "exit 1")))
    replay.nomad.deregister("default", "t.ev", purge=False)
    lines = await _lines(replay, wanted=8)
    kinds = [(event["Topic"], event["Type"]) for line in lines for event in line.get("Events", [])]
    recorded = {(event["Topic"], event["Type"]) for line in real for event in line["Events"]}
    assert {} in lines  # a heartbeat
    assert set(kinds) <= recorded | {("Job", "JobDeregistered")}
    for line in lines:
        for event in line.get("Events", []):
            assert differences(event, shapes[event["Topic"], _status(event)], event["Topic"]) == []
            assert "Job" not in event["Payload"].get("Allocation", {})


async def test_old_events_come_again_after_a_restart_and_lost_ones_do_not(replay: Replay) -> None:
    replay.nomad.register(replay.nomad.check_register(job("t.old", NODE_1, "exit 0")))
    before = await _lines(replay, wanted=6)
    replay.nomad.lose_events()
    assert [line for line in await _lines(replay, wanted=1) if line] == []
    await replay.server.restart()
    assert [line for line in await _lines(replay, wanted=6) if line] == [line for line in before if line]


async def _lines(replay: Replay, wanted: int) -> list[dict[str, Any]]:
    """The first lines of the stream, up to a second heartbeat after which nothing is left to come."""
    lines: list[dict[str, Any]] = []
    url = replay.server.address + "/v1/event/stream?topic=Job&topic=Evaluation&topic=Allocation&topic=Node"
    async with replay.session.get(url) as response, asyncio.timeout(10):
        async for raw in response.content:
            lines.append(json.loads(raw))
            if lines.count({}) >= 2:
                break
    assert len(lines) >= wanted
    return lines


async def test_blocking_query_returns_on_change_and_on_time(replay: Replay) -> None:
    url = replay.server.address + "/v1/allocations"
    async with replay.session.get(url) as response:
        index = response.headers["X-Nomad-Index"]
    async with replay.session.get(f"{url}?index={index}&wait=20ms") as response:
        assert (response.headers["X-Nomad-Index"], await response.json()) == (index, [])
    poll = asyncio.ensure_future(replay.session.get(f"{url}?index={index}&wait=10s"))
    async with asyncio.timeout(5):
        while len(replay.server.requests) < 3:
            await asyncio.sleep(0)
        replay.nomad.register(replay.nomad.check_register(job("t.poll", NODE_1, "exit 0")))
        async with await poll as response:
            assert int(response.headers["X-Nomad-Index"]) > int(index)


async def test_a_blocked_evaluation_starts_the_job_when_the_node_comes_back(replay: Replay) -> None:
    replay.nomad.clients.down(NODE_2)
    replay.nomad.register(replay.nomad.check_register(job("t.blocked", NODE_2, "sleep 10")))
    assert replay.nomad.clients.of_job("t.blocked") == []
    assert replay.nomad.jobs["default", "t.blocked"]["Status"] == "pending"
    replay.nomad.clients.up(NODE_2)
    assert [container.running for container in replay.nomad.clients.of_job("t.blocked")] == [True]


async def test_the_check_of_the_index_is_not_atomic(replay: Replay) -> None:
    """Several create-only registers at once are accepted; equal specs make one allocation all the same."""
    replay.server.race = asyncio.Barrier(3)
    request = job("t.race", NODE_1, "sleep 10")
    answers = await asyncio.gather(
        *(replay.session.post(replay.server.address + "/v1/jobs", json=request) for _ in range(3))
    )
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert len(replay.nomad.allocations_of("default", "t.race")) == 1


@pytest.mark.parametrize(
    ("text", "arrives"),
    [
        ("$${HOME}", "${HOME}"),
        ("%%{x}", "%{x}"),
        ("${1+1}", "2"),
        ("100% $HOME 'quoted' \"so\"\nnext", "100% $HOME 'quoted' \"so\"\nnext"),
        ("${HOME}", None),
        ("%{x}", None),
        ("${", None),
    ],
)
async def test_config_is_read_as_a_template(replay: Replay, text: str, arrives: str | None) -> None:
    request = job("t.hcl", NODE_1, "exit 0")
    request["Job"]["TaskGroups"][0]["Tasks"][0]["Config"] |= {"labels": [{"text": text}]}
    replay.nomad.register(replay.nomad.check_register(request))
    [alloc] = replay.nomad.allocations_of("default", "t.hcl")
    if arrives is None:
        assert alloc["ClientStatus"] == "failed"
        assert "Failed Validation" in [event["Type"] for event in alloc["TaskStates"]["main"]["Events"]]
    else:
        assert replay.nomad.clients.of_job("t.hcl")[0].labels == {"text": arrives}


async def test_only_known_names_are_replaced_in_env_and_nothing_escapes_them(replay: Replay) -> None:
    request = job("t.env", NODE_1, "exit 0")
    request["Job"]["TaskGroups"][0]["Tasks"][0]["Env"] = {
        "A": "${node.unique.id}",
        "B": "${HOME} $${y}",
        "C": "$${NOMAD_TASK_NAME}",
    }
    replay.nomad.register(replay.nomad.check_register(request))
    assert replay.nomad.clients.of_job("t.env")[0].env == {"A": NODE_1, "B": "${HOME} $${y}", "C": "$main"}


async def test_acl_denies_with_403_but_streams_and_logs_with_500(replay: Replay) -> None:
    replay.nomad.acl = {
        "coordinator": {"list-jobs", "read-job", "submit-job", "read-logs", "node:read"},
        "weak": set(),
    }
    seen = {}
    for token in ("coordinator", "weak", "unknown"):
        for path in (
            "/v1/jobs",
            "/v1/nodes",
            "/v1/agent/self",
            "/v1/client/fs/logs/x?task=main",
            "/v1/event/stream",
        ):
            async with replay.session.get(
                replay.server.address + path, headers={"X-Nomad-Token": token}
            ) as response:
                seen[token, path.partition("?")[0]] = response.status
                assert response.status in (200, 404) or await response.text() in (
                    "Permission denied",
                    "ACL token not found",
                )
    assert list(seen.values()) == [200, 200, 403, 404, 200, 403, 403, 403, 500, 500, 403, 403, 403, 403, 403]


async def test_invalid_disk_disconnect_and_namespace_are_refused(replay: Replay) -> None:
    small = job("t.disk", NODE_1, "exit 0", EphemeralDisk={"SizeMB": 5})
    both = job("t.both", NODE_1, "exit 0", MaxClientDisconnect=1, StopAfterClientDisconnect=1)
    other = job("b", NODE_1, "exit 0")
    other["Job"]["Namespace"] = "nope"
    texts = []
    for request in (small, both, other):
        async with replay.session.post(replay.server.address + "/v1/jobs", json=request) as response:
            assert response.status == 500
            texts.append(await response.text())
    assert "log storage (5 MB) must be less than requested disk capacity (5 MB)" in texts[0]
    assert "cannot be configured with both" in texts[1]
    assert texts[2] == 'job "b" is in nonexistent namespace "nope"'
