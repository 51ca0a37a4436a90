"""Tokens and roles, tenants and their quotas, nodes and the cluster over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest

from coordinator import records
from coordinator.api.context import Limits
from coordinator.api.routes import ANYONE, ROUTES
from coordinator.model import Job, JobState, Tenant
from coordinator.store import Delete, Put
from jobspecs.spec import JobSpec, TaskSpec
from tests.api_world import GIB, SPEC, Caller, World
from vgpu.inventory import NodeReport


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = await World.make()
    await world.put_node()
    yield world
    await world.close()


def path_of(route: object) -> str:
    path: str = route.path  # type: ignore[attr-defined]
    for name in ("id", "tenant", "node", "sha256"):
        path = path.replace("{" + name + "}", "team-a" if name == "tenant" else "x1")
    return path


class TestAuth:
    @pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
    async def test_every_route_asks_for_a_token_unless_it_says_otherwise(
        self, world: World, route: object
    ) -> None:
        client = await world.instance()
        status, answer, headers = await Caller(client).call(route.method, path_of(route))  # type: ignore[attr-defined]
        if route.role == ANYONE:  # type: ignore[attr-defined]
            assert status == 200
        else:
            assert (status, answer["code"]) == (401, "login_denied")
            assert headers["WWW-Authenticate"].startswith("Bearer")

    @pytest.mark.parametrize(
        "route", [route for route in ROUTES if route.role == "admin"], ids=lambda route: route.name
    )
    async def test_a_tenant_may_do_nothing_that_is_an_administrators(
        self, world: World, route: object
    ) -> None:
        _, a, _ = await world.callers()
        before = world.memory.revision
        problem = await a.refused(route.method, path_of(route))  # type: ignore[attr-defined]
        assert (problem["status"], problem["code"]) == (403, "admin_only")
        assert world.memory.revision == before

    @pytest.mark.parametrize(
        "header", ["", "Bearer", "Bearer ", "Basic YTpi", "a-token", "Bearer a-token x", "Bearer A-TOKEN"]
    )
    async def test_what_is_no_known_bearer_token_is_denied(self, world: World, header: str) -> None:
        client = await world.instance()
        problem = await Caller(client).refused("GET", "/v1/whoami", headers={"Authorization": header})
        assert problem["status"] == 401

    async def test_a_token_works_everywhere_at_once_and_no_longer_once_revoked(self, world: World) -> None:
        admin, _, _ = await world.callers()
        other = await world.instance()
        made = await admin.post("/v1/tokens", {"role": "tenant", "tenant": "team-b", "label": "ci"})
        for client in (other, admin.client):
            who = await Caller(client, made["token"]).get("/v1/whoami")
            assert who == {"role": "tenant", "tenant": "team-b", "label": "ci"}
        stored = [item.value for item in (await world.memory.list(records.ROOT)).items]
        assert not any(made["token"].encode() in value for value in stored), "only a hash is kept"
        listed = (await admin.get("/v1/tokens"))["items"]
        assert not any("token" in token for token in listed)
        assert made["sha256"] in {token["sha256"] for token in listed}
        await admin.ok("DELETE", f"/v1/tokens/{made['sha256']}")
        assert (await Caller(admin.client, made["token"]).refused("GET", "/v1/whoami"))["status"] == 401
        for _ in range(1000):
            status, _, _ = await Caller(other, made["token"]).call("GET", "/v1/whoami")
            if status == 401:
                break
        assert status == 401, "the other instance follows by its watch"
        assert (await admin.refused("DELETE", f"/v1/tokens/{made['sha256']}"))["status"] == 404

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({}, "role"), ({"role": "root"}, "role"), ({"role": "tenant"}, "tenant"), ({"role": "tenant", "tenant": "no"}, "tenant"),
            ({"role": "admin", "tenant": "team-a"}, "tenant"), ({"role": "admin", "label": "x" * 129}, "label"),
            ({"role": "admin", "colour": "red"}, "colour"), ({"role": 5}, "role"),
        ],
    )  # fmt: skip
    async def test_a_bad_wish_for_a_token_is_refused(self, world: World, body: object, field: str) -> None:
        admin, _, _ = await world.callers()
        problem = await admin.refused("POST", "/v1/tokens", body)
        assert (problem["status"], problem["field"]) == (422, field)


class TestTenants:
    async def test_create_change_and_delete(self, world: World) -> None:
        admin, _, _ = await world.callers()
        status, tenant, headers = await admin.call(
            "POST", "/v1/tenants", {"name": "new", "quota_memory": "320GiB", "limit_compute": 16, "weight": 2}
        )
        assert status == 201
        assert int(headers["X-Serai-Revision"]) == world.memory.revision
        expected = {
            "quota_memory_mib": 320 * GIB,
            "limit_memory_mib": None,
            "limit_compute_milli": 16_000,
            "weight": 2,
        }
        assert expected.items() <= tenant.items()
        assert (await admin.refused("POST", "/v1/tenants", {"name": "new"}))["status"] == 409
        changed = await admin.ok(
            "PATCH", "/v1/tenants/new", {"limit_memory": "400GiB", "limit_compute": "150%"}
        )
        assert (changed["limit_memory_mib"], changed["limit_compute_milli"]) == (400 * GIB, 1500)
        assert changed["quota_memory_mib"] == 320 * GIB
        cleared = await admin.ok("PATCH", "/v1/tenants/new", {"limit_memory": None, "limit_compute": None})
        assert (cleared["limit_memory_mib"], cleared["limit_compute_milli"]) == (None, None)
        status, _, _ = await admin.call("DELETE", "/v1/tenants/new")
        assert status == 204
        assert (await admin.refused("GET", "/v1/tenants/new"))["status"] == 404

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"weight": -1}, "weight"), ({"weight": True}, "weight"), ({"weight": "2"}, "weight"), ({"quota_memory": "5"}, "quota_memory"),
            ({"quota_memory": None}, "quota_memory"), ({"quota_memory_mib": -1}, "quota_memory_mib"), ({"limit_compute": "0.0001"}, "limit_compute"),
            ({"limit_compute": "-1"}, "limit_compute"), ({"limit_compute": "nan"}, "limit_compute"), ({"limit_compute": "inf"}, "limit_compute"),
            ({"quota": "5GiB"}, "quota"), ({"name": "other"}, "name"),
        ],
    )  # fmt: skip
    async def test_a_bad_change_is_refused_and_writes_nothing(
        self, world: World, body: object, field: str
    ) -> None:
        """QF-5 for the negative weight."""
        admin, _, _ = await world.callers()
        before = world.memory.revision
        problem = await admin.refused("PATCH", "/v1/tenants/team-a", body)
        assert (problem["status"], problem["field"]) == (422, field)
        assert world.memory.revision == before

    @pytest.mark.parametrize("name", ["", "A", "a/b", "a b", "-a", "a" * 64, "ü", "..", 5])
    async def test_a_bad_name_is_refused(self, world: World, name: object) -> None:
        admin, _, _ = await world.callers()
        problem = await admin.refused("POST", "/v1/tenants", {"name": name})
        assert (problem["status"], problem["field"]) == (422, "name")

    async def test_a_quota_below_what_is_used_is_accepted_and_shown(self, world: World) -> None:
        """QT-3, RR-7: over by three, a headroom of 0 and never less, and what runs stays."""
        admin, a, _ = await world.callers()
        for n in range(8):
            await world.put_waiting(f"j{n}")
            await world.place(f"j{n}", gpu=n, memory_mib=10 * GIB)
        tenant = await admin.ok("PATCH", "/v1/tenants/team-a", {"quota_memory": "50GiB"})
        assert (tenant["used_memory_mib"], tenant["quota_memory_mib"]) == (80 * GIB, 50 * GIB)
        assert (tenant["over_by_memory_mib"], tenant["headroom_memory_mib"]) == (30 * GIB, 0)
        assert (tenant["running"], tenant["used_compute_milli"]) == (8, 800)
        assert tenant["space_share"] < 0
        assert len((await a.get("/v1/jobs"))["items"]) == 8

    async def test_a_tenant_with_jobs_is_not_deleted(self, world: World) -> None:
        """QT-5: waiting ones count as well as live ones; afterwards it takes jobs as before."""
        admin, a, _ = await world.callers()
        job = await a.post("/v1/jobs", SPEC)
        problem = await admin.refused("DELETE", "/v1/tenants/team-a")
        assert (problem["status"], problem["code"], problem["value"]) == (409, "tenant_has_jobs", 1)
        await world.place(job["id"])
        assert (await admin.refused("DELETE", "/v1/tenants/team-a"))["status"] == 409
        assert (await a.post("/v1/jobs", SPEC))["state"] == "PENDING"

    async def test_a_submit_and_a_delete_that_meet_never_leave_a_job_without_a_tenant(
        self, world: World
    ) -> None:
        """QT-5: many rounds of both at once, over two instances."""
        admin, _, _ = await world.callers()
        other = Caller(await world.instance(), "admin-token")
        world.store.jitter = Random(1)
        outcomes = set()
        for n in range(30):
            name = f"t{n}"
            await admin.post("/v1/tenants", {"name": name})
            spec = {**SPEC, "tenant": name}
            if n % 3 == 0:
                delete, submit = await asyncio.gather(
                    admin.call("DELETE", f"/v1/tenants/{name}"), other.call("POST", "/v1/jobs", spec)
                )
            else:
                submit, delete = await asyncio.gather(
                    other.call("POST", "/v1/jobs", spec), admin.call("DELETE", f"/v1/tenants/{name}")
                )
            is_there = await world.memory.get(records.tenant_key(name)) is not None
            jobs = (await world.memory.list(f"{records.QUEUE}{name}/")).items
            assert (submit[0], delete[0]) in ((201, 409), (422, 204), (409, 204), (409, 409))
            assert is_there == (delete[0] == 409)
            assert len(jobs) == (submit[0] == 201)
            assert is_there or not jobs
            outcomes.add((submit[0] == 201, delete[0] == 204))
        assert {(True, False), (False, True)} <= outcomes, "both outcomes came up"

    async def test_a_delete_whose_client_goes_away_goes_to_its_end(self, world: World) -> None:
        admin, _, _ = await world.callers(limits=Limits(request_seconds=0.05))
        await admin.post("/v1/tenants", {"name": "new"})
        await admin.get("/v1/whoami")
        world.store.gate.clear()
        problem = await admin.refused("DELETE", "/v1/tenants/new")
        assert (problem["status"], problem["code"]) == (503, "timeout")
        world.store.gate.set()
        async with asyncio.timeout(5):
            while await world.memory.get(records.tenant_key("new")) is not None:
                await asyncio.sleep(0)

    async def test_a_tenant_sees_itself_alone(self, world: World) -> None:
        """AP-7"""
        admin, a, _ = await world.callers()
        assert [tenant["name"] for tenant in (await a.get("/v1/tenants"))["items"]] == ["team-a"]
        assert (await a.refused("GET", "/v1/tenants/team-b"))["status"] == 404
        assert (await a.refused("GET", "/v1/tenants/team-b/applications"))["status"] == 404
        body = {"quota_memory": "1GiB"}
        assert (await a.refused("POST", "/v1/tenants/team-b/applications", body))["status"] == 404
        page = await admin.get("/v1/tenants", limit=1)
        rest = await admin.get("/v1/tenants", limit=1, cursor=page["next_cursor"])
        assert [page["items"][0]["name"], rest["items"][0]["name"]] == ["team-a", "team-b"]
        assert rest["next_cursor"] is None

    async def test_an_application_is_granted_once(self, world: World) -> None:
        admin, a, _ = await world.callers()
        made = await a.post("/v1/tenants/team-a/applications", {"quota_memory": "640GiB", "text": "thesis"})
        assert (made["state"], made["quota_memory_mib"], made["answered_at"]) == ("OPEN", 640 * GIB, None)
        assert (await a.refused("POST", f"/v1/tenants/team-a/applications/{made['id']}/grant"))[
            "status"
        ] == 403
        granted = await admin.post(f"/v1/tenants/team-a/applications/{made['id']}/grant", {"answer": "fine"})
        assert (granted["state"], granted["answer"]) == ("GRANTED", "fine")
        assert (await a.get("/v1/tenants/team-a"))["quota_memory_mib"] == 640 * GIB
        await admin.ok("PATCH", "/v1/tenants/team-a", {"quota_memory": "1GiB"})
        assert (await admin.post(f"/v1/tenants/team-a/applications/{made['id']}/grant", {}))[
            "state"
        ] == "GRANTED"
        assert (await a.get("/v1/tenants/team-a"))["quota_memory_mib"] == GIB, (
            "granting again changes nothing"
        )
        problem = await admin.refused(
            "POST", f"/v1/tenants/team-a/applications/{made['id']}/refuse", {"answer": "no"}
        )
        assert (problem["status"], problem["code"]) == (409, "already_answered")
        listed = (await a.get("/v1/tenants/team-a/applications"))["items"]
        assert [one["id"] for one in listed] == [made["id"]]


class TestNodes:
    async def test_what_a_node_has_and_gives(self, world: World) -> None:
        _, a, _ = await world.callers()
        node = (await a.get("/v1/nodes"))["items"][0]
        assert (node["name"], node["status"], node["cordoned"], node["simulated"]) == (
            "n1",
            "ready",
            False,
            True,
        )
        assert len(node["gpus"]) == 8
        assert node["gpus"][0]["memory_used_mib"] is None, "unknown is null and not 0"
        assert (await a.refused("GET", "/v1/nodes/none"))["status"] == 404

    async def test_cordon_and_uncordon(self, world: World) -> None:
        admin, a, _ = await world.callers()
        node = await admin.post("/v1/nodes/n1/cordon", {"reason": "new disk"})
        assert (node["cordoned"], node["status_reason"]) == (True, "new disk")
        job = await a.post("/v1/jobs", SPEC)
        [item] = (await a.get("/v1/queue"))["items"]
        assert (item["id"], item["reason"]["code"]) == (job["id"], "node_cordoned")
        node = await admin.post("/v1/nodes/n1/uncordon")
        assert (node["cordoned"], node["status_reason"]) == (False, "")
        assert (await admin.refused("POST", "/v1/nodes/none/cordon"))["status"] == 404

    async def test_the_cluster_in_figures(self, world: World) -> None:
        admin, a, _ = await world.callers()
        await a.post("/v1/jobs", SPEC)
        placed = await a.post("/v1/jobs", SPEC)
        await world.place(placed["id"])
        cluster = await admin.get("/v1/cluster")
        assert cluster["nodes"] == {"ready": 1, "unknown": 0, "lost": 0, "closed": 0}
        assert (cluster["gpus"], cluster["memory_mib"], cluster["memory_granted_mib"]) == (
            8,
            640 * GIB,
            8 * GIB,
        )
        assert (cluster["jobs"]["pending"], cluster["jobs"]["allocated"], cluster["jobs"]["running"]) == (
            1,
            1,
            0,
        )
        assert cluster["leader"] is None
        await world.put(records.LEADER, records.Leadership("c1", "host:1", world.clock()))
        assert (await admin.get("/v1/cluster"))["leader"]["id"] == "c1"
        await world.write(Delete(records.report_key("n1")))
        assert (await admin.get("/v1/cluster"))["nodes"]["unknown"] == 1
        world.clock.advance(700_000)
        assert (await admin.get("/v1/nodes/n1"))["status"] == "lost", "time alone changes it"

    async def test_the_cluster_tells_of_silence_together_and_of_clocks(self, world: World) -> None:
        """LE-1, LE-11: what only an operator can mend is told by the API, the command and /metrics."""
        admin, _, _ = await world.callers()
        cluster = await admin.get("/v1/cluster")
        assert (cluster["silent_together"], cluster["clocks_off"]) == (0, {})
        for name in ("n2", "n3", "n4"):
            await world.put_node(name)
            await world.write(Delete(records.report_key(name)))
        for _ in range(2):
            await world.put(records.report_key("n1"), NodeReport("n1", 1, world.clock() - 90_000, ()))
        cluster = await admin.get("/v1/cluster")
        assert (cluster["silent_together"], cluster["clocks_off"]) == (3, {"n1": -90})
        assert "3 nodes fell silent together" in (await admin.get("/v1/nodes/n2"))["status_reason"]
        metrics = await (await admin.client.get("/metrics")).text()
        assert "serai_nodes_silent_together 3.0" in metrics
        assert "serai_nodes_clock_off 1.0" in metrics

    async def test_the_snapshot_is_for_admins_and_readable(self, world: World) -> None:
        admin, a, _ = await world.callers()
        await a.post("/v1/jobs", SPEC)
        snapshot = await admin.get("/v1/debug/snapshot")
        assert snapshot["revision"] == world.memory.revision
        assert len(snapshot["jobs"]) == 1


class TestMetrics:
    async def test_the_figures_and_that_series_go_with_what_they_are_about(self, world: World) -> None:
        """OB-4"""
        admin, a, _ = await world.callers()
        name = '¯\\_(ツ)_/¯ "x"'
        job = await a.post("/v1/jobs", {**SPEC, "name": name})
        await a.get("/v1/queue")
        await a.call("GET", "/v1/jobs/secret-id")
        text = await Caller(a.client).get("/metrics")
        lines = set(text.splitlines())
        assert 'serai_jobs{state="PENDING"} 1.0' in lines
        assert 'serai_nodes{status="ready"} 1.0' in lines
        assert f'serai_tenant_quota_memory_mib{{tenant="team-a"}} {100 * GIB:.1f}' in lines
        assert "serai_store_revision_behind 0.0" in lines
        assert 'serai_http_request_seconds_count{method="POST",route="/v1/jobs",status="2xx"} 1.0' in lines
        assert (
            'serai_http_request_seconds_count{method="GET",route="/v1/jobs/{id}",status="4xx"} 1.0' in lines
        )
        assert "serai_submit_transaction_jobs_count 1.0" in lines
        assert "secret-id" not in text
        assert job["id"] not in text
        await a.post(f"/v1/jobs/{job['id']}/cancel")
        await world.put_tenant(Tenant("gone"))
        assert 'tenant="gone"' in await admin.get("/metrics")
        await world.write(Delete(records.tenant_key("gone")))
        assert 'tenant="gone"' not in await admin.get("/metrics")

    async def test_an_answer_carries_the_revision_it_reflects(self, world: World) -> None:
        _, a, _ = await world.callers()
        spec = JobSpec("n", "team-a", (TaskSpec(image="i"),))
        revision = await world.write(
            Put(records.queue_key("team-a", "j1"), records.encode(Job("j1", spec, JobState.PENDING, 1, 1)))
        )
        for path in (
            "/v1/jobs",
            "/v1/jobs/j1",
            "/v1/queue",
            "/v1/nodes",
            "/v1/cluster",
            "/v1/whoami",
            "/healthz",
        ):
            _, _, headers = await a.call("GET", path)
            assert int(headers["X-Serai-Revision"]) == revision
