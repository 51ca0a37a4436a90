"""Submitting, looking at, listing and cancelling jobs over HTTP."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from coordinator import records
from coordinator.api.context import API, Limits
from coordinator.model import Happening, Job, JobState, PastAttempt, TaskState, Tenant
from coordinator.store import Delete, Put
from jobspecs.spec import JobSpec, TaskSpec
from tests.api_world import GIB, SPEC, Caller, World
from vgpu.reasons import Reason, ReasonCode


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = await World.make()
    await world.put_node()
    yield world
    await world.close()


NAMES = [
    "/Users/x/demo", "/", "why?", "@a", "a b", "a%2Fb", "..", "a#b", "ümlaut", "¯\\_(ツ)_/¯", "x" * 63, "x" * 128, "'\"<b>",
]  # fmt: skip


class TestSubmit:
    @pytest.mark.parametrize("name", NAMES)
    async def test_every_accepted_name_makes_the_round_trip(self, world: World, name: str) -> None:
        """AP-1, AP-4: ids are ours and safe in a URL; names are free text, stored and given back as they came."""
        _, a, _ = await world.callers()
        job = await a.post("/v1/jobs", {**SPEC, "name": name})
        assert job["name"] == name
        assert job["id"].isalnum()
        assert (await a.get(f"/v1/jobs/{job['id']}"))["name"] == name
        assert [item["id"] for item in (await a.get("/v1/jobs", name=name))["items"]] == [job["id"]]
        cancelled = await a.post(f"/v1/jobs/{job['id']}/cancel")
        assert (cancelled["state"], cancelled["name"]) == ("CANCELLED", name)

    @pytest.mark.parametrize("name", ["", "x" * 129, "x" * 300, "a\nb", "a\0b", 5])
    async def test_a_name_out_of_bounds_is_refused_at_submit(self, world: World, name: object) -> None:
        """AP-2: as a fault of its field, and not as a lack of resources."""
        _, a, _ = await world.callers()
        problem = await a.refused("POST", "/v1/jobs", {**SPEC, "name": name})
        assert problem["status"] == 422
        assert [fault["field"] for fault in problem["errors"]] == ["name"]

    async def test_a_minimal_spec_gets_its_defaults(self, world: World) -> None:
        """AP-11"""
        _, a, _ = await world.callers()
        job = await a.post("/v1/jobs", {"image": "repo/tool:1", "gpus": 1})
        assert (job["name"], job["tenant"], job["state"], job["attempt"]) == ("tool", "team-a", "PENDING", 1)
        assert job["history"][0]["reason"]["code"] == "submitted"
        assert job["spec"]["max_runtime"] is None

    async def test_all_faults_are_told_at_once_with_their_places(self, world: World) -> None:
        """AP-11, FR-9"""
        _, a, _ = await world.callers()
        bad = {
            "name": 5,
            "gpus": {"count": -1, "memory": "0GiB", "compute": "150%"},
            "cpus": 2,
            "retries": 101,
        }
        problem = await a.refused("POST", "/v1/jobs", bad)
        assert problem["status"] == 422
        fields = {fault["field"] for fault in problem["errors"]}
        assert {"name", "image", "gpus.count", "gpus.memory", "gpus.compute", "cpus", "retries"} <= fields
        assert problem["field"] == problem["errors"][0]["field"]
        listed = await a.refused("POST", "/v1/jobs", [SPEC, bad])
        assert all(fault["field"].startswith("[1].") for fault in listed["errors"])
        assert (await a.get("/v1/jobs"))["items"] == [], "a list is all or nothing"

    @pytest.mark.parametrize(
        ("gpus", "field"),
        [
            ({"count": 1, "memory": "1GiB", "compute": "0%"}, "gpus.compute"),
            ({"count": 1, "memory": "1GiB", "compute": "101%"}, "gpus.compute"),
            ({"count": 1, "memory": "1GiB", "compute": "-1%"}, "gpus.compute"),
            ({"count": -1}, "gpus.count"),
            ({"count": 10**6}, "gpus.count"),
            ({"count": 1, "memory": "-5GiB", "compute": "10%"}, "gpus.memory"),
            ({"count": 1, "memory": "0GiB", "compute": "10%"}, "gpus.memory"),
            ({"count": 1, "memory": "1GiB"}, "gpus.compute"),
        ],
    )
    async def test_amounts_out_of_range_are_refused_and_never_clamped(
        self, world: World, gpus: object, field: str
    ) -> None:
        """FR-9, FR-10"""
        _, a, _ = await world.callers()
        problem = await a.refused("POST", "/v1/jobs", {"image": "i", "gpus": gpus})
        assert problem["status"] == 422
        assert any(fault["field"].startswith(("gpus", field)) for fault in problem["errors"])
        assert problem["errors"][0]["message"]

    async def test_a_list_and_yaml_are_taken(self, world: World) -> None:
        _, a, _ = await world.callers()
        listed = await a.post("/v1/jobs", [SPEC, {**SPEC, "name": "two"}])
        assert [job["name"] for job in listed["items"]] == ["train", "two"]
        text = "name: of yaml\nimage: i\nmax_runtime: 5-00:00:00\nmemory: 600000M\n"
        job = await a.post("/v1/jobs", text, **{"Content-Type": "application/yaml"})
        assert (job["name"], job["spec"]["memory"]) == ("of yaml", "600000MiB")
        record = await world.job_record(job["id"])
        assert record is not None
        assert record[1].spec.max_runtime_seconds == 432_000

    @pytest.mark.parametrize(
        "body", ["", "{", "[", "[]", "null", "5", '"text"', '{"a": NaN}', "[[]]", '{"name":"a","name":"b"}']
    )
    async def test_a_body_that_is_no_spec_is_a_problem(self, world: World, body: str) -> None:
        _, a, _ = await world.callers()
        problem = await a.refused("POST", "/v1/jobs", body, headers={"Content-Type": "application/json"})
        assert problem["status"] in (400, 422)

    async def test_bounds_of_a_request(self, world: World) -> None:
        _, a, _ = await world.callers()
        too_many = await a.refused("POST", "/v1/jobs", [SPEC] * 126)
        assert (too_many["limit"], too_many["value"]) == (125, 126)
        assert len((await a.post("/v1/jobs", [SPEC] * 125))["items"]) == 125
        huge = await a.refused(
            "POST",
            "/v1/jobs",
            io.BytesIO(b"x" * (4 * 1024 * 1024 + 1)),
            headers={"Content-Type": "application/json"},
        )
        assert (huge["status"], huge["limit"]) == (413, 4 * 1024 * 1024)
        wide = {**SPEC, "env": {f"K{n}": "x" * 4000 for n in range(15)}}
        large = await a.refused("POST", "/v1/jobs", [wide] * 20)
        assert large["status"] == 413

    async def test_the_answer_is_durable_and_a_get_right_after_finds_it(self, world: World) -> None:
        """Also at another instance, whose replica may be behind."""
        _, a, _ = await world.callers()
        other = Caller(await world.instance(), "a-token")
        for _ in range(20):
            job = await a.post("/v1/jobs", SPEC)
            assert (await world.job_record(job["id"])) is not None
            assert (await other.get(f"/v1/jobs/{job['id']}"))["state"] == "PENDING"

    async def test_values_of_env_never_leave(self, world: World) -> None:
        """AP-5: neither to the owner nor to an admin, in no view, event, metric or error."""
        admin, a, b = await world.callers()
        canary = "canary-5f1e"
        spec = {**SPEC, "env": {"HF_TOKEN": canary}, "tasks": [{"env": {"OTHER": canary}}]}
        job = await a.post("/v1/jobs", spec)
        assert "HF_TOKEN" in str(job)
        bad = await a.refused(
            "POST",
            "/v1/jobs",
            {**SPEC, "env": {"K": canary, "NVIDIA_VISIBLE_DEVICES": canary, "L": [canary]}},
        )
        seen = [job, bad]
        for caller in (admin, a):
            for path in (
                f"/v1/jobs/{job['id']}",
                "/v1/jobs",
                f"/v1/jobs/{job['id']}/events",
                "/v1/queue",
                "/v1/nodes",
                "/metrics",
            ):
                seen.append(await caller.get(path))
        seen.append(await admin.get("/v1/debug/snapshot"))
        assert (await b.refused("GET", f"/v1/jobs/{job['id']}"))["status"] == 404
        assert canary not in str(seen)
        record = await world.job_record(job["id"])
        assert canary in str(record), "the negative control: it is there, for the container"


class TestAdmission:
    async def test_more_gpus_than_any_node_has_is_refused_and_split_over_tasks_is_not(
        self, world: World
    ) -> None:
        """QF-2"""
        _, a, _ = await world.callers()
        await world.put_node("n2")
        problem = await a.refused("POST", "/v1/jobs", {"image": "i", "gpus": 12})
        assert (problem["status"], problem["code"]) == (422, "task_larger_than_any_node")
        assert "8" in problem["detail"]
        assert problem["reasons"][0]["sentence"] == problem["detail"]
        job = await a.post("/v1/jobs", {"image": "i", "gpus": 6, "tasks": 2})
        assert job["state"] == "PENDING"

    async def test_a_node_that_is_merely_down_counts_as_there(self, world: World) -> None:
        """QF-2"""
        _, a, _ = await world.callers()
        await world.write(Delete(records.report_key("n1")))
        job = await a.post("/v1/jobs", {"image": "i", "gpus": 8})
        queue = await a.get("/v1/queue")
        assert queue["items"][0]["id"] == job["id"]
        assert queue["items"][0]["reason"]["code"] == "node_not_ready"

    async def test_a_job_beyond_the_limit_of_its_tenant_is_refused_until_the_limit_is_raised(
        self, world: World
    ) -> None:
        """QT-7: with the other instance changing the limit, so that the replica has to catch up."""
        admin, a, _ = await world.callers()
        other_admin = Caller(await world.instance(), "admin-token")
        await admin.ok("PATCH", "/v1/tenants/team-a", {"limit_memory": "320GiB"})
        spec = {"image": "i", "gpus": 5}
        problem = await a.refused("POST", "/v1/jobs", spec)
        assert (problem["status"], problem["code"]) == (422, "job_larger_than_limit")
        assert problem["limit"]["limit_memory_mib"] == 320 * GIB
        assert (await a.post("/v1/jobs", {"image": "i", "gpus": 4}))["state"] == "PENDING"
        await other_admin.ok("PATCH", "/v1/tenants/team-a", {"limit_memory": "400GiB"})
        job = await a.post("/v1/jobs", spec)
        await admin.ok("PATCH", "/v1/tenants/team-a", {"limit_memory": "320GiB"})
        reasons = {item["id"]: item["reason"] for item in (await a.get("/v1/queue"))["items"]}
        assert reasons[job["id"]]["code"] == "job_larger_than_limit", (
            "a limit that was lowered after the submit is told"
        )

    async def test_the_tenant_must_be_named_by_an_admin_and_be_ones_own_otherwise(self, world: World) -> None:
        """AP-7"""
        admin, a, _ = await world.callers()
        assert (await admin.refused("POST", "/v1/jobs", SPEC))["field"] == "tenant"
        foreign = await a.refused("POST", "/v1/jobs", {**SPEC, "tenant": "team-b"})
        unknown = await a.refused("POST", "/v1/jobs", {**SPEC, "tenant": "no-such"})
        assert (foreign["status"], foreign["field"]) == (422, "tenant")
        assert {k: v for k, v in foreign.items() if k not in ("value", "errors")} == {
            k: v for k, v in unknown.items() if k not in ("value", "errors")
        }, "whether another tenant exists is not told"
        gone = await admin.refused("POST", "/v1/jobs", {**SPEC, "tenant": "no-such"})
        assert (gone["status"], gone["code"]) == (422, "unknown_tenant")
        assert (await admin.post("/v1/jobs", {**SPEC, "tenant": "team-b"}))["tenant"] == "team-b"
        assert (await a.post("/v1/jobs", {**SPEC, "tenant": "team-a"}))["tenant"] == "team-a"


class TestIdempotency:
    async def test_twenty_at_once_on_two_instances_are_one_job_and_equal_answers(self, world: World) -> None:
        """AP-8, with two answers of the store lost on the way."""
        _, first, _ = await world.callers()
        second = Caller(await world.instance(), "a-token")
        world.store.only, world.store.lost_replies = records.QUEUE, 2
        answers = await asyncio.gather(
            *((first, second)[n % 2].post("/v1/jobs", SPEC, **{"Idempotency-Key": "k1"}) for n in range(20))
        )
        assert all(answer == answers[0] for answer in answers)
        assert len((await first.get("/v1/jobs"))["items"]) == 1

    async def test_another_body_is_a_conflict_and_the_key_is_per_tenant(self, world: World) -> None:
        """AP-8"""
        _, a, b = await world.callers()
        key = {"Idempotency-Key": "k1"}
        job = await a.post("/v1/jobs", SPEC, **key)
        problem = await a.refused("POST", "/v1/jobs", {**SPEC, "name": "other"}, headers=key)
        assert (problem["status"], problem["code"]) == (409, "idempotency_conflict")
        assert (await b.post("/v1/jobs", SPEC, **key))["id"] != job["id"]

    async def test_the_answer_is_the_same_after_the_job_has_ended_and_a_day_later_the_key_is_free(
        self, world: World
    ) -> None:
        """AP-8"""
        _, a, _ = await world.callers()
        key = {"Idempotency-Key": "k1"}
        job = await a.post("/v1/jobs", SPEC, **key)
        await a.post(f"/v1/jobs/{job['id']}/cancel")
        world.clock.advance(24 * 3600 * 1000 - 1)
        assert await a.post("/v1/jobs", SPEC, **key) == job
        world.clock.advance(1)
        assert (await a.post("/v1/jobs", SPEC, **key))["id"] != job["id"]

    async def test_a_list_is_answered_again_as_a_list(self, world: World) -> None:
        _, a, _ = await world.callers()
        key = {"Idempotency-Key": "k1"}
        first = await a.post("/v1/jobs", [SPEC, SPEC], **key)
        assert await a.post("/v1/jobs", [SPEC, SPEC], **key) == first
        assert (await a.refused("POST", "/v1/jobs", SPEC, headers=key))["status"] == 409

    async def test_a_retry_is_answered_even_where_the_job_would_be_refused_by_now(self, world: World) -> None:
        admin, a, _ = await world.callers()
        key = {"Idempotency-Key": "k1"}
        job = await a.post("/v1/jobs", {"image": "i", "gpus": 5}, **key)
        await admin.ok("PATCH", "/v1/tenants/team-a", {"limit_memory": "1GiB"})
        assert await a.post("/v1/jobs", {"image": "i", "gpus": 5}, **key) == job


class TestTrouble:
    async def test_a_lost_answer_of_the_store_is_read_back(self, world: World) -> None:
        _, a, _ = await world.callers()
        world.store.only, world.store.lost_replies = records.QUEUE, 1
        await a.post("/v1/jobs", SPEC)
        assert len((await a.get("/v1/jobs"))["items"]) == 1

    async def test_no_store_is_503_and_a_full_one_says_what_to_do(self, world: World) -> None:
        _, a, _ = await world.callers()
        await a.get("/v1/jobs")
        world.store.is_down = True
        status, problem, headers = await a.call("POST", "/v1/jobs", SPEC)
        assert (status, problem["code"]) == (503, "store_unavailable")
        assert int(headers["Retry-After"]) >= 1
        assert (await a.get("/v1/jobs"))["items"] == [], "reads of the replica and known tokens go on"
        assert (await a.refused("GET", "/readyz"))["status"] == 503
        assert (await a.get("/healthz"))["status"] == "ok"
        world.store.is_down, world.store.is_full = False, True
        full = await a.refused("POST", "/v1/jobs", SPEC)
        assert (full["status"], full["code"]) == (503, "store_full")
        assert "defragment" in full["hint"]

    async def test_a_full_queue_is_429_with_retry_after(self) -> None:
        world = await World.make(submit_queue_jobs=3)
        _, a, _ = await world.callers()
        await a.post("/v1/jobs", SPEC)
        world.store.gate.clear()
        waiting = [asyncio.create_task(a.call("POST", "/v1/jobs", SPEC)) for _ in range(3)]
        while a.client.app[API].pump.waiting_jobs < 3:
            await asyncio.sleep(0.001)
        status, problem, headers = await a.call("POST", "/v1/jobs", SPEC)
        assert (status, problem["code"], problem["limit"]) == (429, "queue_full", 3)
        assert int(headers["Retry-After"]) >= 1
        world.store.gate.set()
        assert [status for status, _, _ in await asyncio.gather(*waiting)] == [201] * 3
        await world.close()

    async def test_a_slow_store_ends_in_503_and_the_rest_is_served_meanwhile(self, world: World) -> None:
        _, a, _ = await world.callers(limits=Limits(request_seconds=0.2))
        await a.post("/v1/jobs", SPEC)
        world.store.gate.clear()
        slow = asyncio.create_task(a.call("POST", "/v1/jobs", {**SPEC, "name": "slow"}))
        assert len((await a.get("/v1/jobs"))["items"]) == 1
        status, problem, headers = await slow
        assert (status, problem["code"]) == (503, "timeout")
        assert "Idempotency-Key" in problem["hint"]
        assert "Retry-After" in headers
        world.store.gate.set()

    async def test_an_unknown_path_or_method_is_a_problem_too(self, world: World) -> None:
        _, a, _ = await world.callers()
        assert (await a.refused("GET", "/v1/nothing"))["status"] == 404
        problem = await a.refused("PUT", "/v1/jobs")
        assert (problem["status"], problem["detail"]) == (405, "allowed here: GET, POST")


class TestCancel:
    async def test_a_waiting_job_is_over_at_once(self, world: World) -> None:
        """CT-1"""
        _, a, _ = await world.callers()
        job = await a.post("/v1/jobs", SPEC)
        status, cancelled, _ = await a.call("POST", f"/v1/jobs/{job['id']}/cancel")
        assert (status, cancelled["state"], cancelled["reason"]["code"]) == (
            202,
            "CANCELLED",
            "cancelled_by_user",
        )
        assert cancelled["ended_at"] is not None
        record = await world.job_record(job["id"])
        assert record is not None
        assert record[0] == "done"
        assert (await a.get("/v1/queue"))["items"] == []

    async def test_a_live_job_is_asked_to_end_and_asking_again_changes_nothing(self, world: World) -> None:
        """CT-1"""
        _, a, _ = await world.callers()
        job = await a.post("/v1/jobs", SPEC)
        live = await world.place(job["id"])
        await world.task(live, TaskState.RUNNING)
        assert (await a.get(f"/v1/jobs/{job['id']}"))["state"] == "RUNNING"
        for _ in range(2):
            status, cancelled, _ = await a.call("POST", f"/v1/jobs/{job['id']}/cancel")
            assert (status, cancelled["state"]) == (202, "CANCELLING")
        record = await world.job_record(job["id"])
        assert record is not None
        assert record[0] == "jobs"
        assert record[1].allocation == live.allocation, "its slices stay until the nodes confirm the end"
        assert [line.state for line in record[1].history].count(JobState.CANCELLING) == 1

    async def test_on_a_final_job_it_is_a_no_op(self, world: World) -> None:
        """CT-1"""
        _, a, _ = await world.callers()
        done = Job(
            "j1", (await world.put_waiting("w")).spec, JobState.SUCCEEDED, 1, 1, exit_code=0, ended_at_ms=5
        )
        await world.put(records.done_key("j1"), done)
        status, job, _ = await a.call("POST", "/v1/jobs/j1/cancel")
        assert (status, job["state"], job["exit_code"]) == (200, "SUCCEEDED", 0)
        assert await world.job_record("j1") == ("done", done)

    async def test_a_cancel_that_meets_the_placement_goes_on_to_the_live_job(self, world: World) -> None:
        """The leader moves the job between the read and the write of the cancel."""
        _, a, _ = await world.callers()
        job = await a.post("/v1/jobs", SPEC)
        reading = world.store.get

        async def overtaken(key: str) -> object:
            item = await reading(key)
            if key == records.queue_key("team-a", job["id"]) and item is not None:
                await world.place(job["id"])
            return item

        world.store.get = overtaken  # type: ignore[assignment]
        cancelled = await a.post(f"/v1/jobs/{job['id']}/cancel")
        assert cancelled["state"] == "CANCELLING"

    async def test_a_lost_answer_is_looked_up(self, world: World) -> None:
        _, a, _ = await world.callers()
        job = await a.post("/v1/jobs", SPEC)
        world.store.only, world.store.lost_replies = records.QUEUE, 1
        assert (await a.post(f"/v1/jobs/{job['id']}/cancel"))["state"] == "CANCELLED"
        record = await world.job_record(job["id"])
        assert record is not None
        assert len([line for line in record[1].history if line.state is JobState.CANCELLED]) == 1

    async def test_two_at_once_on_two_instances_both_succeed(self, world: World) -> None:
        _, a, _ = await world.callers()
        other = Caller(await world.instance(), "a-token")
        job = await a.post("/v1/jobs", SPEC)
        answers = await asyncio.gather(
            *(c.post(f"/v1/jobs/{job['id']}/cancel") for c in (a, other, a, other))
        )
        assert {answer["state"] for answer in answers} == {"CANCELLED"}
        record = await world.job_record(job["id"])
        assert record is not None
        assert len(record[1].history) == 2


class TestIsolation:
    async def test_what_is_not_yours_is_not_there(self, world: World) -> None:
        """AP-7: the same answer as for what does not exist."""
        admin, a, b = await world.callers()
        job = await a.post("/v1/jobs", SPEC)
        for method, path in (
            ("GET", "/v1/jobs/{}"), ("POST", "/v1/jobs/{}/cancel"), ("GET", "/v1/jobs/{}/logs"), ("GET", "/v1/jobs/{}/events"),
        ):  # fmt: skip
            foreign = await b.refused(method, path.format(job["id"]))
            missing = await b.refused(method, path.format("0" * 16))
            assert foreign["status"] == missing["status"] == 404
            assert foreign["detail"].replace(job["id"], "") == missing["detail"].replace("0" * 16, "")
        for query in ({"tenant": "team-a"}, {"name": "train"}, {"id_prefix": job["id"]}, {}):
            assert (await b.get("/v1/jobs", **query))["items"] == []
        assert (await b.get("/v1/queue"))["items"] == []
        assert (await b.get("/v1/queue", tenant="team-a"))["items"] == []
        assert (await a.get(f"/v1/jobs/{job['id']}"))["state"] == "PENDING", "and b's cancel did nothing"
        assert len((await admin.get("/v1/jobs", tenant="team-a"))["items"]) == 1

    async def test_slices_of_others_are_seen_without_their_owner(self, world: World) -> None:
        admin, a, b = await world.callers()
        job = await a.post("/v1/jobs", SPEC)
        await world.place(job["id"], gpu=2)
        for caller, owner in ((admin, "team-a"), (a, "team-a"), (b, None)):
            node = await caller.get("/v1/nodes/n1")
            [piece] = node["gpus"][2]["slices"]
            assert (piece["tenant"], piece["job"]) == (owner, job["id"] if owner else None)
            assert (piece["memory_mib"], node["gpus"][2]["memory_free_mib"]) == (8 * GIB, 72 * GIB)


class TestViews:
    async def test_a_running_job_shows_what_it_holds_and_why(self, world: World) -> None:
        _, a, _ = await world.callers()
        job = await a.post("/v1/jobs", SPEC)
        world.clock.advance(5_000)
        live = await world.place(job["id"])
        assert (await a.get(f"/v1/jobs/{job['id']}"))["state"] == "ALLOCATED"
        await world.task(live, TaskState.STARTING, started_at_ms=None)
        assert (await a.get(f"/v1/jobs/{job['id']}"))["state"] == "STARTING"
        await world.task(live, TaskState.RUNNING)
        world.clock.advance(2_500)
        view = await a.get(f"/v1/jobs/{job['id']}")
        assert (view["state"], view["waited_seconds"], view["ran_seconds"]) == ("RUNNING", 5.0, 2.5)
        assert (view["chosen"]["code"], view["placed"]["code"]) == ("chosen", "placed")
        assert view["chosen"]["subjects"] == [view["tenant"]]
        assert view["chosen"]["numbers"] == {
            "space_millionths": 3,
            "time_millionths": 2,
            "priority_millionths": 1,
        }
        [task] = view["tasks"]
        assert (task["node"], task["state"], task["exit_code"]) == ("n1", "RUNNING", None)
        [piece] = task["slices"]
        assert (piece["index"], piece["model"], piece["memory_mib"], piece["isolation"]) == (
            0,
            "NVIDIA A100",
            8 * GIB,
            "mps",
        )
        assert piece["memory_by"]
        assert [line["state"] for line in view["history"]] == ["PENDING", "RUNNING"]
        assert view["submitted_at"].endswith("Z")
        events = await a.get(f"/v1/jobs/{job['id']}/events")
        assert events["items"] == view["history"]

    async def test_a_job_that_is_being_stopped_says_so_after_it_ran(self, world: World) -> None:
        _, a, _ = await world.callers()
        live = await world.place((await a.post("/v1/jobs", SPEC))["id"])
        await world.task(live, TaskState.RUNNING)
        stop = Reason(ReasonCode.TIME_LIMIT, {"limit_seconds": 60})
        line = Happening(JobState.RUNNING, world.clock() + 60_000, 1, stop)
        stopping = replace(live, stop=stop, reason=stop, history=(*live.history, line))
        await world.put(records.job_key(live.id), stopping)
        view = await a.get(f"/v1/jobs/{live.id}")
        assert (view["state"], view["reason"]["code"]) == ("RUNNING", "time_limit")
        told = [(line["state"], line["reason"] and line["reason"]["code"]) for line in view["history"]]
        assert told[-2:] == [("RUNNING", None), ("RUNNING", "time_limit")]

    async def test_an_ended_job_still_shows_where_it_ran(self, world: World) -> None:
        _, a, _ = await world.callers()
        live = await world.place((await a.post("/v1/jobs", SPEC))["id"])
        assert live.allocation is not None
        task = await world.task(
            live, TaskState.EXITED, exit_code=3, ended_at_ms=world.clock() + 1000, released=True
        )
        done = replace(
            live, state=JobState.FAILED, allocation=None, exit_code=3, ran_ms=1000, started_at_ms=task.started_at_ms,
            ended_at_ms=task.ended_at_ms, past=(PastAttempt(live.allocation, (task,)),),
        )  # fmt: skip
        await world.write(
            Delete(records.job_key(live.id)), Put(records.done_key(live.id), records.encode(done))
        )
        view = await a.get(f"/v1/jobs/{live.id}")
        assert (view["state"], view["exit_code"], view["ran_seconds"]) == ("FAILED", 3, 1.0)
        assert (view["tasks"][0]["node"], view["tasks"][0]["exit_code"]) == ("n1", 3)
        assert view["placed"]["code"] == "placed"
        held = (await a.get("/v1/tenants/team-a"))["used_memory_mib"]
        assert held == 0, "what an ended attempt held is not held"


class TestLists:
    async def test_pages_neither_loop_nor_lose_while_jobs_come_and_go(self, world: World) -> None:
        """AP-9: 250 jobs, 50 of them of one time; the cursor's own job goes, others are added."""
        _, a, _ = await world.callers()
        for n in range(250):
            world.clock.advance(0 if 100 <= n < 150 else 1)
            await world.memory.txn((), (Put(*await _waiting(world, f"j{n:03d}")),))
        await world.write(Put("/serai/other", b""))
        for sort in ("submitted_at", "-submitted_at"):
            seen: list[str] = []
            cursor: dict[str, str] = {}
            pages = 0
            while True:
                page = await a.get("/v1/jobs", limit=100, sort=sort, **cursor)
                seen += [item["id"] for item in page["items"]]
                pages += 1
                if page["next_cursor"] is None:
                    break
                cursor = {"cursor": page["next_cursor"]}
                last = seen[-1]
                await world.write(Delete(records.queue_key("team-a", last)))
                restored = await _waiting(world, last)
                await world.write(
                    Put(*await _waiting(world, f"new-{sort}-{pages}")), Put("/serai/gone", restored[1])
                )
            assert pages == 3
            assert len(seen) == len(set(seen))
            existing = {id for id in seen if id.startswith("j")}
            assert len(existing) == (250 if sort == "submitted_at" else 248)

    async def test_filters(self, world: World) -> None:
        admin, a, _ = await world.callers()
        first = await a.post("/v1/jobs", SPEC)
        world.clock.advance(1)
        second = await a.post("/v1/jobs", {**SPEC, "name": "other"})
        live = await world.place(second["id"])
        await world.task(live, TaskState.RUNNING)

        async def ids(**query: str) -> list[str]:
            return [item["id"] for item in (await admin.get("/v1/jobs", **query))["items"]]

        assert await ids() == [first["id"], second["id"]]
        assert await ids(sort="-submitted_at") == [second["id"], first["id"]]
        assert await ids(state="RUNNING") == [second["id"]]
        assert await ids(state="pending,running") == [first["id"], second["id"]]
        assert await ids(state="ALLOCATED") == [], "the state that is shown counts"
        assert await ids(name="other") == [second["id"]]
        assert await ids(tenant="team-b") == []
        assert await ids(id_prefix=first["id"][:-1]) == [first["id"]] or first["id"][:-1] == second["id"][:-1]

    @pytest.mark.parametrize(
        ("query", "name"),
        [
            ({"limit": "0"}, "limit"), ({"limit": "1001"}, "limit"), ({"limit": "x"}, "limit"), ({"state": "BUSY"}, "state"),
            ({"sort": "name"}, "sort"), ({"cursor": "%%%"}, "cursor"), ({"cursor": "WzFd"}, "cursor"), ({"tennant": "a"}, "tennant"),
        ],
    )  # fmt: skip
    async def test_a_bad_parameter_is_named(self, world: World, query: dict[str, str], name: str) -> None:
        _, a, _ = await world.callers()
        problem = await a.refused("GET", "/v1/jobs", **query)
        assert (problem["status"], problem["field"]) == (400, name)

    async def test_the_queue_stands_in_the_order_of_turns_and_pages_show_one_revision(
        self, world: World
    ) -> None:
        admin, a, b = await world.callers()
        await world.put_tenant(Tenant("team-a", 200 * GIB))
        for n in range(6):
            await (a if n % 2 else b).post("/v1/jobs", {**SPEC, "name": f"q{n}"})
            world.clock.advance(1)
        whole = await admin.get("/v1/queue")
        assert [item["position"] for item in whole["items"]] == [1, 2, 3, 4, 5, 6]
        assert whole["items"][0]["tenant"] == "team-a", "it has the larger quota left"
        assert [turn["tenant"] for turn in whole["tenants"]] == ["team-a", "team-b"]
        assert whole["tenants"][0]["priority"] >= whole["tenants"][1]["priority"]
        pages: list[str] = []
        page = await admin.get("/v1/queue", limit=2)
        for _ in range(3):
            pages += [item["id"] for item in page["items"]]
            await admin.post(f"/v1/jobs/{page['items'][0]['id']}/cancel")
            if page["next_cursor"]:
                page = await admin.get("/v1/queue", limit=2, cursor=page["next_cursor"])
        assert pages == [item["id"] for item in whole["items"]]
        mine = await b.get("/v1/queue")
        assert {item["tenant"] for item in mine["items"]} <= {"team-b"}
        assert [turn["tenant"] for turn in mine["tenants"]] == ["team-b"]

    async def test_the_reservation_is_shown_to_all_and_its_tenant_to_its_own(self, world: World) -> None:
        admin, a, b = await world.callers()
        await world.put_tenant(Tenant("team-a", 400 * GIB))
        await world.put_tenant(Tenant("team-b", 400 * GIB))
        assert (await b.get("/v1/queue"))["reservation"] is None
        for gpu in range(5):
            id = (await b.post("/v1/jobs", {**SPEC, "max_runtime": "2h"}))["id"]
            await world.place(id, "team-b", gpu=gpu, memory_mib=80 * GIB)
        whole = {**SPEC, "gpus": 4}
        job = await a.post("/v1/jobs", whole)
        found = (await admin.get("/v1/queue"))["reservation"]
        assert (found["job"], found["tenant"], found["nodes"]) == (job["id"], "team-a", ["n1"])
        assert len(found["slices"]) == 4
        assert found["due_at"] is not None
        theirs = (await b.get("/v1/queue"))["reservation"]
        assert theirs == {**found, "tenant": None}
        told = (await a.get("/v1/queue"))["items"][0]["reason"]
        assert told["code"] == "reserved"
        assert "reserved for it" in told["sentence"]

    async def test_a_waiting_job_says_why_once_the_cluster_is_full(self, world: World) -> None:
        _, a, _ = await world.callers()
        for gpu in range(8):
            id = (await a.post("/v1/jobs", SPEC))["id"]
            await world.place(id, gpu=gpu, memory_mib=80 * GIB)
        job = await a.post("/v1/jobs", SPEC)
        [item] = (await a.get("/v1/queue"))["items"]
        assert item["id"] == job["id"]
        assert item["reason"]["code"].startswith("not_enough")
        assert item["reason"]["sentence"]
        assert item["asked"]["gpu_memory_mib"] == 8 * GIB
        assert (await a.get(f"/v1/jobs/{job['id']}"))["reason"]["code"] == item["reason"]["code"]

    async def test_a_reason_that_has_become_old_is_not_told_and_a_new_one_is_found(
        self, world: World
    ) -> None:
        admin, a, _ = await world.callers()
        await admin.post("/v1/nodes/n1/cordon")
        path = f"/v1/jobs/{(await a.post('/v1/jobs', SPEC))['id']}"

        async def told() -> str | None:
            reason = (await a.get(path))["reason"]
            return reason["code"] if reason else None

        async with asyncio.timeout(5):
            while await told() != "node_cordoned":
                pass
        await admin.post("/v1/nodes/n1/uncordon")
        await world.write(Delete(records.report_key("n1")))
        world.clock.advance(60_000)
        assert await told() is None
        async with asyncio.timeout(5):
            while await told() != "node_not_ready":
                pass

    async def test_a_long_list_is_made_in_a_thread_and_is_the_same(self, world: World) -> None:
        _, a, b = await world.callers()
        writes = []
        for n in range(5_100):
            world.clock.advance(1)
            writes.append(Put(*await _waiting(world, f"j{n:04d}")))
        for start in range(0, len(writes), 128):
            await world.memory.txn((), writes[start : start + 128])
        await world.write(Put("/serai/other", b""))
        page = await a.get("/v1/jobs", sort="-submitted_at", limit=3)
        assert [item["id"] for item in page["items"]] == ["j5099", "j5098", "j5097"]
        page = await a.get("/v1/jobs", sort="-submitted_at", limit=3, cursor=page["next_cursor"])
        assert [item["id"] for item in page["items"]] == ["j5096", "j5095", "j5094"]
        assert (await b.get("/v1/jobs"))["items"] == []
        assert (await a.refused("GET", "/v1/jobs", cursor="x"))["field"] == "cursor"


async def _waiting(world: World, id: str) -> tuple[str, bytes]:
    spec = JobSpec("n", "team-a", (TaskSpec(image="i"),))
    job = Job(id, spec, JobState.PENDING, world.clock(), world.clock())
    return records.queue_key("team-a", id), records.encode(job)


async def test_what_nomad_would_rewrite_is_refused_at_submit() -> None:
    """With the Nomad engine only; the value itself is not repeated, it may be a secret."""
    for engine, status in (("nomad", 422), ("agent", 201)):
        world = await World.make(engine=engine)
        await world.put_node()
        _, tenant, _ = await world.callers()
        spec = {"name": "x", "image": "i:1", "command": ["true"], "env": {"K": "hunter2 ${node.unique.id}"}}
        seen, answer, _ = await tenant.call("POST", "/v1/jobs", spec)
        assert seen == status
        if status == 422:
            assert answer["code"] == "engine_refused"
            assert "env.K" in str(answer)
            assert "hunter2" not in str(answer)
        await world.close()
