"""Nomad, its nodes and its answers fail while the real coordinators use it: each job ends as it should, nothing runs twice.
`tests/contract/test_nomad_faults.py` has the engine alone."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from coordinator.client import Client
from jobspecs.nomad_job import nomad_job_id
from tests.integration.live import spec
from tests.integration.live_nomad import TENANT, Nomad, nomad_cluster

pytestmark = pytest.mark.etcd

LONG = ("sh", "-c", "sleep 100000")
OTHERS_MEMORY_MB = 16384  # all that a node of the fake has


@pytest.mark.timeout(300)
async def test_what_nomad_does_to_a_cluster(tmp_path: Path) -> None:
    """One cluster lives through all of it, and at the end nothing is left behind. The lost job comes first, since it
    takes longest until it may be given up."""
    async with nomad_cluster(tmp_path, gpus=8, lease_seconds=3) as nomad:
        forgotten = await _a_job_is_purged_and_its_allocation_forgotten(nomad)
        await _a_register_is_taken_and_its_answer_lost(nomad)
        ended = await _an_end_falls_into_a_gap_of_the_event_stream(nomad)
        await _a_restarted_server_tells_old_events_again(nomad, ended)
        await _permission_is_denied_with_500(nomad)
        await _a_job_is_purged_while_its_container_runs(nomad)
        await _a_node_is_out_of_touch_and_back(nomad)
        await _a_second_copy_runs_beside_the_first(nomad)
        await _an_evaluation_is_blocked(nomad)
        assert set(nomad.fake.clients.overlaps) == {nomad.fake.clients.overlaps[0]}, "the second copy alone"

        view = await nomad.admin.wait_for(forgotten, timeout_seconds=60)
        assert (view["state"], view["attempt"], view["exit_code"]) == ("FAILED", 1, 125)
        assert view["reason"]["code"] == "node_lost"
        assert len(nomad.containers(forgotten)) == 1
        assert await nomad.live.keys("jobs/") == []
        assert await nomad.live.keys("grants/") == []
        assert await nomad.live.keys("tasks/") == []


# --- the faults -----------------------------------------------------------------------------------------------------------


async def _a_job_is_purged_and_its_allocation_forgotten(nomad: Nomad) -> str:
    """EX-8: judged by our own record. The caller looks at its end, which comes after a time of grace."""
    job = await _running(nomad, "forgotten")
    nomad.fake.clients.hold_kills = True
    nomad.fake.deregister("default", nomad_job_id(TENANT, "forgotten", job, 1), purge=True)
    (container,) = nomad.containers(job)
    del nomad.fake.allocs[container.alloc]
    nomad.fake.clients.hold_kills = False
    await nomad.live.until(lambda: _fault(nomad, job, "node_lost"))
    container.kill()  # as its client does with what the server has forgotten
    return job


async def _a_register_is_taken_and_its_answer_lost(nomad: Nomad) -> None:
    nomad.web.lose_replies["POST"] = 1
    job = await _running(nomad, "unanswered")
    assert nomad.web.lose_replies["POST"] == 0
    await _finishes(nomad, job, "unanswered")


async def _an_end_falls_into_a_gap_of_the_event_stream(nomad: Nomad) -> str:
    job = await _running(nomad, "unheard")
    await nomad.web.stop()
    nomad.finish(job, "unheard", exit_code=4)
    nomad.fake.lose_events()
    await nomad.web.start()
    await _ends(nomad.admin, job, "FAILED", exit_code=4)
    return job


async def _a_restarted_server_tells_old_events_again(nomad: Nomad, ended: str) -> None:
    """A job that ran from before the restart to after it shows that the old events have been read."""
    before = await nomad.admin.job(ended)
    job = await _running(nomad, "survivor")
    await nomad.web.restart()
    await nomad.live.until(lambda: nomad.web.streams >= 1)
    assert len(nomad.fake.events) > 10
    await _finishes(nomad, job, "survivor")
    assert await nomad.admin.job(ended) == before
    assert len(nomad.containers(ended)) == 1


async def _permission_is_denied_with_500(nomad: Nomad) -> None:
    """A fault of the setup: neither the launch nor the stop is given up, and no attempt is used."""
    denied = ("POST", "/v1/jobs", 500, "Permission denied")
    nomad.web.answers += [denied] * 2
    job = await _running(nomad, "denied")
    assert nomad.web.answers == []
    nomad.web.answers += [("DELETE", "/v1/job/", 500, "Permission denied")] * 2
    await nomad.admin.cancel(job)
    await _ends(nomad.admin, job, "CANCELLED")
    assert nomad.web.answers == []
    assert [container.running for container in nomad.containers(job)] == [False]


async def _a_job_is_purged_while_its_container_runs(nomad: Nomad) -> None:
    job = await _running(nomad, "purged")
    nomad.fake.deregister("default", nomad_job_id(TENANT, "purged", job, 1), purge=True)
    await _ends(nomad.admin, job, "FAILED", exit_code=137)
    assert len(nomad.containers(job)) == 1


async def _a_node_is_out_of_touch_and_back(nomad: Nomad) -> None:
    """EX-7: the same allocation, attempt and container; its end is that of the container."""
    job = await _running(nomad, "away")
    node = await _nomad_node(nomad, job)
    nomad.fake.clients.down(node)
    await nomad.live.until(lambda: _detail(nomad, job, "out of touch"))
    assert await _is(nomad.admin, job, "RUNNING")
    nomad.fake.clients.up(node)
    await nomad.live.until(lambda: _detail(nomad, job, ""))
    await _finishes(nomad, job, "away")


async def _a_second_copy_runs_beside_the_first(nomad: Nomad) -> None:
    """RR-11: as Nomad does it to jobs that it does not wait for. The coordinator is paused, or it would be faster. Both
    copies must be dead before the slices are free, and the job goes on as its next attempt."""
    job = await _running(nomad, "doubled", retries=1)
    node = await _nomad_node(nomad, job)
    nomad.live.kill("c1", signal.SIGSTOP)
    nomad.fake.clients.down(node)
    nomad.fake.clients.expire_disconnect(node)
    nomad.fake.clients.up(node, sync=False)
    assert [container.running for container in nomad.containers(job)] == [True, True]
    nomad.live.kill("c1", signal.SIGCONT)
    await nomad.live.until(lambda: not nomad.containers(job)[1].running)
    await nomad.live.until(lambda: _fault(nomad, job, "node_lost"))
    assert len(nomad.containers(job)) == 2, "its slices are held for as long as the first copy may run"
    nomad.fake.clients.sync(node)
    await nomad.live.until(lambda: _is(nomad.admin, job, "RUNNING", attempt=2))
    assert [container.running for container in nomad.containers(job, 1)] == [False, False]
    await _finishes(nomad, job, "doubled", attempt=2)


async def _an_evaluation_is_blocked(nomad: Nomad) -> None:
    """Others use the nodes too, and Nomad finds no place. It would start the job whenever there is one; so it is
    withdrawn, tried again as often as it may, and never starts once it has failed."""
    taken = [_somebody_else(nomad, node) for node in nomad.nodes.values()]
    job = (await nomad.admin.submit(spec("blocked", *LONG, tenant=TENANT, gpus=1)))["id"]
    view = await nomad.admin.wait_for(job, timeout_seconds=40)
    assert (view["state"], view["exit_code"]) == ("FAILED", 125)
    assert view["attempt"] == 2
    for id in taken:
        nomad.fake.deregister("default", id, purge=True)
    nomad.fake.unblock()
    await _finishes(nomad, await _running(nomad, "next"), "next")
    assert nomad.containers(job) == []


# --- what they are made of ------------------------------------------------------------------------------------------------


def _somebody_else(nomad: Nomad, node: str) -> str:
    """A job of others, as large as what is left of the node."""
    used = nomad.fake._used_mb(nomad.fake.nodes[node])
    (example, *_) = nomad.fake.jobs.values()
    body: dict[str, Any] = {
        **example,
        "ID": f"web.{node}",
        "Name": "web",
        "Meta": {"owner": "shop"},
        "TaskGroups": [
            group
            | {
                "Constraints": [{"LTarget": "${node.unique.id}", "RTarget": node, "Operand": "="}],
                "Tasks": [
                    task | {"Resources": task["Resources"] | {"MemoryMB": OTHERS_MEMORY_MB - used}}
                    for task in group["Tasks"]
                ],
            }
            for group in example["TaskGroups"]
        ],
    }
    nomad.fake.register(nomad.fake.check_register({"Job": body}))
    return f"web.{node}"


async def _running(nomad: Nomad, name: str, **fields: Any) -> str:
    job = (await nomad.admin.submit(spec(name, *LONG, tenant=TENANT, gpus=1, **fields)))["id"]
    await nomad.live.until(lambda: _is(nomad.admin, job, "RUNNING"))
    return str(job)


async def _finishes(nomad: Nomad, job: str, name: str, attempt: int = 1) -> None:
    """Its container, the only one of the attempt, ends well; so does the job."""
    assert [container.running for container in nomad.containers(job, attempt)] == [True]
    nomad.finish(job, name, attempt)
    await _ends(nomad.admin, job, "SUCCEEDED", exit_code=0, attempt=attempt)


async def _ends(
    client: Client, job: str, state: str, *, exit_code: int | None = None, attempt: int = 1
) -> None:
    view = await client.wait_for(job, timeout_seconds=40)
    assert (view["state"], view["attempt"]) == (state, attempt)
    if exit_code is not None:
        assert view["exit_code"] == exit_code


async def _is(client: Client, job: str, state: str, attempt: int = 1) -> bool:
    view = await client.job(job)
    return bool((view["state"], view["attempt"]) == (state, attempt))


async def _task(nomad: Nomad, job: str) -> dict[str, Any]:
    (task,) = (await nomad.admin.job(job))["tasks"]
    return task


async def _fault(nomad: Nomad, job: str, fault: str) -> bool:
    return bool((await _task(nomad, job))["fault"] == fault)


async def _detail(nomad: Nomad, job: str, text: str) -> bool:
    detail = (await _task(nomad, job))["detail"] or ""
    return text in detail if text else not detail


async def _nomad_node(nomad: Nomad, job: str) -> str:
    return nomad.nodes[(await _task(nomad, job))["node"]]
