"""Records that a person or another version wrote, in every folder: isolated, reported, and never the end of anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator import model, records
from coordinator.api.routes import ROUTES
from coordinator.cluster import Cluster
from coordinator.config import Settings
from coordinator.cycle import plan_cycle
from coordinator.fairness import policy_from
from coordinator.lifecycle import settle
from coordinator.model import Job, JobState, Mix, MixLine, NodeAdmin, Task, TaskState, Tenant, UsageHour
from coordinator.store import Change, Delete, KeyValue, Put
from coordinator.sweep import attempt_of
from jobspecs.container import Grant
from jobspecs.spec import JobSpec, TaskSpec
from tests.api_world import SPEC, Caller, World
from vgpu.inventory import NodeInventory, NodeReport

JOB = Job("0000000000000009", JobSpec("n", "team-a", (TaskSpec(image="i"),)), JobState.PENDING, 1, 1)
# A right record for each kind of key, and its place.
RIGHT: dict[str, object] = {
    records.LEADER: records.Leadership("c9.1", "", 1),
    records.tenant_key("t9"): Tenant("t9"),
    records.application_key("team-a", "app9"): records.Application("app9", "team-a", 1, "", 1),
    records.TOKENS + "ab": records.Token("admin"),
    records.idempotency_key("team-a", "k"): records.Idempotency("ab", ("x",), 1),
    records.queue_key("team-a", JOB.id): JOB,
    records.grant_key("n1", JOB.id, 1): Grant("n1", JOB.id, 1, "team-a", (), 1),
    records.task_key("n1", JOB.id, 1, 0): Task(JOB.id, 1, 0, "n1", TaskState.RUNNING),
    records.inventory_key("n9"): NodeInventory("n9", "m", "9", (), (), 1, 1),
    records.report_key("n9"): NodeReport("n9", 1, 1, ()),
    records.endpoint_key("n9"): records.Endpoint("n9", "", ""),
    records.admin_key("n9"): NodeAdmin("n9"),
    records.usage_key("team-a", 3_600_000): UsageHour("team-a", 3_600_000, 1, (0,) * 12, (0,) * 12),
    records.MIX: Mix(1, (MixLine(5, 1, 500, 40_960, "", 1000),)),
}
ODD_KEYS = (
    "leader/holder/more", "tenants/", "tenants/a/b", "queue/x", "queue/a/b/c/d", "jobs/", "jobs/x/y", "done/a/b", "grants/",
    "grants/x", "grants/n1/x", "grants/n1/a.b", "grants/n1/a.1.2.3", "grants/n1/.1", "tasks/x", "tasks/n1/a.b.c", "tasks/n1/a",
    "nodes/n1", "nodes/n1/x", "nodes/n1/report/x", "nodes/", "usage/a", "usage/a/b/c", "mix/", "mix/x", "unknown/x", "x", "", "fences/",
)  # fmt: skip
GARBAGE = (
    b"", b"{}", b"[]", b"null", b"7", b"\xff\xfe\x00", b"{", b'"text"', b'{"version":99}', b"[" * 100_000,
    b'{"x":' + b"[" * 100_000, b'{"id":7,"name":7,"node":7,"job":7}', b"\xef\xbb\xbf{}", b'{"attempt":' + b"9" * 5000 + b"}",
)  # fmt: skip


def spoiled(key: str, record: object) -> list[bytes]:
    """Garbage; the record with a field less, each in turn; with a field of another kind; at another place."""
    fields: dict[str, Any] = json.loads(records.encode(record))
    less = [{name: value for name, value in fields.items() if name != gone} for gone in fields]
    other = [fields | {name: {"a": [None]}} for name in fields]
    return [*GARBAGE, *(json.dumps(one).encode() for one in (*less, *other))]


@pytest.mark.parametrize("key", RIGHT)
def test_unknown_fields_are_ignored(key: str) -> None:
    """UP-1: a newer version adds fields; an older coordinator goes on."""
    record = RIGHT[key]
    newer = json.loads(records.encode(record)) | {"version": 2, "new": {"deep": [1]}}
    again = records.decode(type(record), json.dumps(newer).encode())
    assert json.loads(records.encode(again)) == json.loads(records.encode(record)) | {"version": 2}


@pytest.mark.parametrize("key", [*RIGHT, *(records.ROOT + odd for odd in ODD_KEYS)])
def test_no_record_stops_the_fold_and_a_deletion_mends_everything(key: str) -> None:
    """DA-7: whatever stands under a key, the state can be read, planned with and settled; and once the key is gone
    nothing of it is left that closes a node."""
    cluster = Cluster(Settings())
    policy = policy_from(Settings())
    revision = 1
    node = NodeInventory("n1", "m", "0.1.0", (), (), 4000, 4096)
    for name, record in (
        (records.inventory_key("n1"), node),
        (records.report_key("n1"), NodeReport("n1", 1, 1, ())),
    ):
        fold(cluster, Change(KeyValue(name, records.encode(record), revision, revision)))
    for value in spoiled(key, RIGHT.get(key, JOB)):
        revision += 1
        fold(cluster, Change(KeyValue(key, value, revision, revision)))
        snapshot = cluster.snapshot(revision)
        plan_cycle(snapshot, policy)
        settle(snapshot)
        attempt_of(key)
        revision += 1
        fold(cluster, Change(KeyValue(key, b"", 0, revision), deleted=True))
        snapshot = cluster.snapshot(revision)
        assert not snapshot.unreadable, (key, value[:80])
        assert snapshot.nodes["n1"].status.value == "ready", (key, value[:80])


def fold(cluster: Cluster, change: Change) -> None:
    event = records.event(change)
    if event is not None:
        cluster.apply(event, 1)


@pytest.mark.parametrize(
    ("folder", "record"),
    [
        ("grants/n2/{}.1", Grant("n1", JOB.id, 1, "team-a", (), 1)),
        ("tasks/n2/{}.1.0", Task(JOB.id, 1, 0, "n1", TaskState.RUNNING)),
        ("tasks/n1/{}.2.0", Task(JOB.id, 1, 0, "n1", TaskState.EXITED, released=True)),
        ("done/{}", JOB),
        ("jobs/{}", JOB),
        ("queue/team-b/{}", JOB),
        ("usage/team-b/00000003600000", RIGHT[records.usage_key("team-a", 3_600_000)]),
    ],
)
def test_a_record_in_the_wrong_place_is_unreadable(folder: str, record: object) -> None:
    """DA-7: a right record under another's key would end an attempt that it is not about."""
    key = records.ROOT + folder.format(JOB.id)
    event = records.event(Change(KeyValue(key, records.encode(record), 1, 1)))
    assert isinstance(event, model.RecordUnreadable)
    assert "does not belong here" in event.detail


@pytest.mark.parametrize("value", [b"{", b"\xff", b'{"version":99}', b"[" * 50_000])
async def test_the_api_answers_among_garbage_everywhere(value: bytes) -> None:
    """DA-7, UP-1: garbage under every kind of key at once. Lists show the rest, what needs the record says which one it
    is, the number of them is told, and jobs are taken in; taken away again, nothing is left of it."""
    world = await World.make()
    try:
        await world.put_node()
        admin, a, _ = await world.callers()
        running = await world.put_waiting("0000000000000001")
        keys = [*RIGHT, *(records.ROOT + odd for odd in ODD_KEYS if odd), records.admin_key("n1")]
        for key in keys:
            await world.write(Put(key, value))
        for route in ROUTES:
            if route.method != "GET" or route.is_stream:
                continue
            path = route.path.format(id=running.id, tenant="team-a", node="n1", sha256="ab")
            await admin.ok("GET", path)
        cluster = await admin.get("/v1/cluster")
        assert cluster["unreadable"] > 10
        assert cluster["leader"] is None
        assert (await a.post("/v1/jobs", SPEC))["state"] == "PENDING"
        assert (await admin.get("/readyz"))["status"] == "ready"
        assert "serai_replica_unreadable" in (await Caller(admin.client).call("GET", "/metrics"))[1]
        problem = await admin.refused("PATCH", "/v1/tenants/t9", {"weight": 2})
        assert (problem["status"], problem["code"]) == (409, "record_unreadable")
        await admin.ok("POST", "/v1/nodes/n1/cordon", {"reason": "r"})
        await world.write(*(Delete(key) for key in keys))
        assert (await admin.get("/v1/cluster"))["unreadable"] == 0
        assert [
            node["status"] for node in (await admin.get("/v1/nodes"))["items"] if node["name"] == "n1"
        ] == ["ready"]
    finally:
        await world.close()


async def test_an_agent_of_a_newer_format_gets_no_work_and_says_why() -> None:
    """UP-1: incompatible, with both versions, and not silently pending."""
    world = await World.make()
    try:
        await world.put_node()
        admin, a, _ = await world.callers()
        item = await world.memory.get(records.inventory_key("n1"))
        assert item is not None
        newer = json.loads(item.value) | {"version": 2, "agent_version": "7.0"}
        await world.write(Put(item.key, json.dumps(newer).encode()))
        node = await admin.get("/v1/nodes/n1")
        assert node["status"] == "closed"
        assert (
            "incompatible: agent 7.0 writes records of version 2, this coordinator knows 1"
            in node["status_reason"]
        )
        await a.post("/v1/jobs", SPEC)
        (waiting,) = (await a.get("/v1/queue"))["items"]
        assert "closed" in waiting["reason"]["sentence"]
    finally:
        await world.close()
