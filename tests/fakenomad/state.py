"""The fake's tables and its scheduler: jobs, evaluations, allocations, nodes, one index, and the ring of events.

Everything happens when a test or a request makes it happen; nothing runs by itself. `hold_scheduler` keeps
evaluations pending until `schedule()`.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import deque
from typing import Any

from attrs import define, field

from tests.fakenomad import shapes
from tests.fakenomad.clients import Clients
from tests.fakenomad.shapes import Body

CONFLICT = "Enforcing job modify index 0: job already exists"
LIVE = ("pending", "running", "unknown")


class Refused(Exception):
    """An error answer: status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


@define
class FakeNode:
    id: str
    name: str
    memory_mb: int = 16384
    status: str = "ready"
    create_index: int = 0
    modify_index: int = 0


@define
class FakeNomad:
    """`acl` maps tokens to capabilities; None means that ACLs are off."""

    version: str = "1.6.3"
    acl: dict[str, set[str]] | None = None
    namespaces: set[str] = field(factory=lambda: {"default"})
    event_buffer: int = 100
    hold_scheduler: bool = False
    now_ns: int = 1_795_977_461_000_000_000
    index: int = 9
    jobs: dict[tuple[str, str], Body] = field(factory=dict)
    allocs: dict[str, Body] = field(factory=dict)
    evals: dict[str, Body] = field(factory=dict)
    nodes: dict[str, FakeNode] = field(factory=dict)
    table_index: dict[str, int] = field(factory=lambda: {"jobs": 1, "allocs": 1, "evals": 1, "nodes": 1})
    history: list[Body] = field(factory=list)
    events: deque[Body] = field(init=False)
    _random: random.Random = field(factory=lambda: random.Random(7))
    _waiters: set[asyncio.Future[None]] = field(factory=set)
    clients: Clients = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.events = deque(maxlen=self.event_buffer)
        self.clients = Clients(self)

    # --- index, ids, waiting --------------------------------------------------------------------------------------

    def new_id(self) -> str:
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def commit(self, *tables: str) -> int:
        """One raft entry."""
        self.index += 1
        self.now_ns += 1_000_000
        for table in tables:
            self.table_index[table] = self.index
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        return self.index

    async def changed(self) -> None:
        """Waits for the next raft entry."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        await waiter

    def emit(self, kind: str, *objects: tuple[str, Body]) -> None:
        """One line of the event stream: objects of one index."""
        events = []
        for topic, payload in objects:
            shown = shapes.event_object(topic, payload)
            keys = [payload["JobID"], ""] if topic in ("Allocation", "Evaluation") else None
            events.append(
                {"FilterKeys": keys, "Index": self.index, "Key": payload["ID"], "Namespace": payload.get("Namespace", ""),
                 "Payload": {topic: shown}, "Topic": topic, "Type": kind}
            )  # fmt: skip
        line = {"Events": events, "Index": self.index}
        self.history.append(line)
        self.events.append(line)

    def lose_events(self) -> None:
        """The ring overflowed: nothing of it is left."""
        self.events.clear()

    def replay_events(self) -> None:
        """A restarted server builds its ring from the raft log: old events come again."""
        self.events.clear()
        self.events.extend(self.history[-self.event_buffer :])

    # --- nodes ----------------------------------------------------------------------------------------------------

    def add_node(self, name: str, id: str | None = None, *, memory_mb: int = 16384) -> FakeNode:
        index = self.commit("nodes")
        node = FakeNode(id or self.new_id(), name, memory_mb, create_index=index, modify_index=index)
        self.nodes[node.id] = node
        return node

    def node_body(self, node: FakeNode) -> Body:
        return shapes.node(
            node.id,
            node.name,
            node.memory_mb,
            self.version,
            node.status,
            node.create_index,
            node.modify_index,
        )

    # --- jobs -----------------------------------------------------------------------------------------------------

    def check_register(self, request: Any) -> Body:
        """The checks before the raft entry, made on a snapshot; nothing repeats them afterwards. Raises `Refused`."""
        if not isinstance(request, dict) or not isinstance(request.get("Job"), dict):
            raise Refused(400, "Job must be specified")
        body = shapes.job(request["Job"], keeps_disconnect=self.at_least(1, 8))
        if faults := shapes.job_faults(body):
            raise Refused(500, shapes.errors(faults))
        if body["Namespace"] not in self.namespaces:
            raise Refused(500, f'job "{body["ID"]}" is in nonexistent namespace "{body["Namespace"]}"')
        if request.get("EnforceIndex"):
            self._check_index(body, request.get("JobModifyIndex", 0))
        return body

    def _check_index(self, body: Body, wanted: int) -> None:
        known = self.jobs.get((body["Namespace"], body["ID"]))
        if wanted == 0 and known is not None:
            raise Refused(500, CONFLICT)
        if wanted and (known is None or known["JobModifyIndex"] != wanted):
            raise Refused(
                500, f"Enforcing job modify index {wanted}: job exists with conflicting job modify index"
            )

    def register(self, body: Body) -> Body:
        """Writes the job and its evaluation; an equal spec does not bump the version."""
        key = (body["Namespace"], body["ID"])
        known = self.jobs.get(key)
        index = self.commit("jobs", "evals")
        if (
            known is not None
            and not known["Stop"]
            and all(known[name] == value for name, value in body.items())
        ):
            kept = known
        else:
            kept = body | {
                "Stop": False, "Status": "pending", "SubmitTime": self.now_ns, "JobModifyIndex": index,
                "CreateIndex": known["CreateIndex"] if known else index, "ModifyIndex": index,
                "Version": known["Version"] + 1 if known else 0,
            }  # fmt: skip
            self.jobs[key] = kept
        evaluation = self._new_evaluation(kept, "job-register")
        self.emit("JobRegistered", ("Job", kept))
        self.emit("JobRegistered", ("Evaluation", evaluation))
        self._soon(evaluation)
        return {
            "EvalCreateIndex": index, "EvalID": evaluation["ID"], "Index": index,
            "JobModifyIndex": kept["JobModifyIndex"], "KnownLeader": False, "LastContact": 0, "NextToken": "",
            "Warnings": "",
        }  # fmt: skip

    def deregister(self, namespace: str, id: str, *, purge: bool) -> Body:
        """Stops the job. Deregistering what is not there makes an evaluation all the same."""
        job = self.jobs.get((namespace, id))
        index = self.commit("jobs", "evals")
        body = job or shapes.job({"ID": id}, keeps_disconnect=False) | {
            "JobModifyIndex": index,
            "Namespace": namespace,
        }
        if job is not None:
            job |= {
                "Stop": True,
                "ModifyIndex": index,
                "JobModifyIndex": index,
                "Version": job["Version"] + 1,
            }
        if purge:
            self.jobs.pop((namespace, id), None)
        evaluation = self._new_evaluation(body, "job-deregister")
        self.emit("JobDeregistered", ("Evaluation", evaluation))
        self._soon(evaluation)
        return {
            "EvalCreateIndex": index, "EvalID": evaluation["ID"], "Index": index, "JobModifyIndex": index,
            "KnownLeader": False, "LastContact": 0, "NextToken": "", "VolumeEvalID": "", "VolumeEvalIndex": 0,
        }  # fmt: skip

    def allocations_of(self, namespace: str, id: str, group: str | None = None) -> list[Body]:
        return [
            alloc for alloc in self.allocs.values()
            if alloc["JobID"] == id and alloc["Namespace"] == namespace and group in (None, alloc["TaskGroup"])
        ]  # fmt: skip

    def settle_status(self, namespace: str, id: str) -> None:
        """Derives the job's status, as the server does after each change."""
        job = self.jobs.get((namespace, id))
        if job is None:
            return
        allocs = self.allocations_of(namespace, id)
        waiting = any(
            e["JobID"] == id and e["Namespace"] == namespace and e["Status"] in ("pending", "blocked")
            for e in self.evals.values()
        )
        if any(alloc["ClientStatus"] in LIVE for alloc in allocs):
            status = "running"
        else:
            status = "pending" if waiting and not job["Stop"] else "dead"
        if status != job["Status"]:
            job |= {"Status": status, "ModifyIndex": self.index}
            self.table_index["jobs"] = self.index

    def gc(self) -> None:
        """Forgets ended allocations and evaluations, as the collector does when a disk fills up."""
        self.commit("allocs", "evals")
        self.allocs = {id: alloc for id, alloc in self.allocs.items() if alloc["ClientStatus"] in LIVE}
        self.evals = {id: e for id, e in self.evals.items() if e["Status"] in ("pending", "blocked")}

    def at_least(self, major: int, minor: int) -> bool:
        return tuple(int(part) for part in self.version.split(".")[:2]) >= (major, minor)

    # --- the scheduler --------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Works off the pending evaluations."""
        for evaluation in list(self.evals.values()):
            if evaluation["Status"] == "pending":
                self._evaluate(evaluation)

    def reevaluate(self, namespace: str, id: str, triggered_by: str) -> None:
        job = self.jobs.get((namespace, id))
        if job is not None:
            self.commit("evals")
            evaluation = self._new_evaluation(job, triggered_by)
            self.emit("EvaluationUpdated", ("Evaluation", evaluation))
            self._soon(evaluation)

    def unblock(self) -> None:
        """Capacity came: blocked evaluations are tried again."""
        for evaluation in list(self.evals.values()):
            if evaluation["Status"] == "blocked":
                evaluation["Status"] = "pending"
                self._evaluate(evaluation)

    def _new_evaluation(self, body: Body, triggered_by: str, **given: Any) -> Body:
        evaluation = shapes.evaluation(self.new_id(), body, triggered_by, self.index, self.now_ns, **given)
        self.evals[evaluation["ID"]] = evaluation
        return evaluation

    def _soon(self, evaluation: Body) -> None:
        if not self.hold_scheduler:
            self._evaluate(evaluation)

    def _evaluate(self, evaluation: Body) -> None:
        namespace, id = evaluation["Namespace"], evaluation["JobID"]
        job = self.jobs.get((namespace, id))
        if job is None or job["Stop"]:
            self._stop(evaluation)
        else:
            self._place(evaluation, job)
        self.settle_status(namespace, id)

    def _stop(self, evaluation: Body) -> None:
        namespace, id = evaluation["Namespace"], evaluation["JobID"]
        index = self.commit("allocs", "evals")
        stopped = [a for a in self.allocations_of(namespace, id) if a["ClientStatus"] in LIVE]
        for alloc in stopped:
            alloc |= {"DesiredStatus": "stop", "ModifyIndex": index, "AllocModifyIndex": index}
            alloc["DesiredDescription"] = "alloc not needed due to job update"
        for other in self.evals.values():
            if other["JobID"] == id and other["Namespace"] == namespace and other["Status"] == "blocked":
                other |= {"Status": "canceled", "ModifyIndex": index}
                other["StatusDescription"] = "job deregistered"
        if stopped:
            self.emit("PlanResult", *(("Allocation", alloc) for alloc in stopped))
        self._complete(evaluation)
        for alloc in stopped:
            self.clients.stop(alloc)

    def _place(self, evaluation: Body, job: Body) -> None:
        failed: dict[str, Body] = {}
        placed: list[Body] = []
        index = self.commit("allocs", "evals")
        evaluation["SnapshotIndex"] = index - 1
        for group in job["TaskGroups"]:
            if not self._wants_placement(job, group):
                continue
            node, why = self._choose(group)
            if node is None:
                failed[group["Name"]] = why
                continue
            alloc = shapes.allocation(
                self.new_id(), job, group, node.id, node.name, evaluation["ID"], index, self.now_ns
            )
            self.allocs[alloc["ID"]] = alloc
            self.clients.remember(alloc, job)
            placed.append(alloc)
        if placed:
            self.emit("PlanResult", ("Evaluation", evaluation), *(("Allocation", alloc) for alloc in placed))
        evaluation["QueuedAllocations"] = {g["Name"]: int(g["Name"] in failed) for g in job["TaskGroups"]}
        if failed:
            self._block(evaluation, job, failed)
        else:
            self._complete(evaluation)
        for alloc in placed:
            self.clients.receive(alloc, job)

    def _wants_placement(self, job: Body, group: Body) -> bool:
        """A lost allocation is replaced whatever the reschedule policy says; an older version's is replaced too."""
        kept = False
        for alloc in self.allocations_of(job["Namespace"], job["ID"], group["Name"]):
            if alloc["ClientStatus"] == "lost":
                continue
            if alloc["JobVersion"] < job["Version"] and alloc["ClientStatus"] in LIVE:
                alloc |= {
                    "DesiredStatus": "stop",
                    "DesiredDescription": "alloc is being updated due to job update",
                }
                self.clients.stop(alloc)
                continue
            kept = True
        return not kept

    def _choose(self, group: Body) -> tuple[FakeNode | None, Body]:
        ready = [node for node in self.nodes.values() if node.status == "ready"]
        wanted = [c for c in group["Constraints"] or [] if c["LTarget"] == "${node.unique.id}"]
        fitting = [node for node in ready if all(node.id == c["RTarget"] for c in wanted)]
        filtered = {f"{c['LTarget']} = {c['RTarget']}": len(ready) - len(fitting) for c in wanted}
        memory_mb = sum(task["Resources"]["MemoryMB"] for task in group["Tasks"])
        for node in fitting:
            if self._used_mb(node) + memory_mb <= node.memory_mb:
                return node, {}
        why = shapes.metric(
            ClassFiltered={"gpu": len(ready) - len(fitting)} if len(ready) > len(fitting) else None,
            ConstraintFiltered={text: count for text, count in filtered.items() if count} or None,
            DimensionExhausted={"memory": len(fitting)} if fitting else None,
            NodesAvailable={"dc1": len(ready)},
            NodesEvaluated=len(ready),
            NodesExhausted=len(fitting),
            NodesFiltered=len(ready) - len(fitting),
            NodesInPool=len(ready),
        )
        return None, why

    def _used_mb(self, node: FakeNode) -> int:
        return sum(
            task["Resources"]["MemoryMB"]
            for alloc in self.allocs.values()
            if alloc["NodeID"] == node.id
            and alloc["ClientStatus"] in LIVE
            and alloc["DesiredStatus"] == "run"
            for task in self.clients.group(alloc)["Tasks"]
        )

    def _block(self, evaluation: Body, job: Body, failed: dict[str, Body]) -> None:
        index = self.commit("evals")
        evaluation["FailedTGAllocs"] = failed
        if evaluation["TriggeredBy"] == "queued-allocs":
            evaluation |= {"Status": "blocked", "ModifyIndex": index}
            return
        blocked = self._new_evaluation(
            job, "queued-allocs", Status="blocked", StatusDescription="created to place remaining allocations",
            PreviousEval=evaluation["ID"], EscapedComputedClass=True, FailedTGAllocs=failed, SnapshotIndex=index,
        )  # fmt: skip
        evaluation["BlockedEval"] = blocked["ID"]
        self.emit("EvaluationUpdated", ("Evaluation", blocked))
        self._complete(evaluation)

    def _complete(self, evaluation: Body) -> None:
        index = self.commit("evals")
        evaluation |= {"Status": "complete", "ModifyIndex": index, "ModifyTime": self.now_ns}
        evaluation.setdefault("SnapshotIndex", index - 1)
        self.emit("EvaluationUpdated", ("Evaluation", evaluation))
