"""The fake's client agents: they start, watch and kill containers, and lose touch with the server when told to.

`hold_starts` leaves allocations pending until `start_held()`; `hold_kills` leaves containers running until
`kill_held()`. `overlaps` names the groups of which a second container was started beside a running first one: the
thing that must never happen to a slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.fakenomad import shapes
from tests.fakenomad.containers import Container, DriverFailure, FailedValidation, create
from tests.fakenomad.shapes import Body

if TYPE_CHECKING:
    from tests.fakenomad.state import FakeNomad


class Clients:
    def __init__(self, nomad: FakeNomad) -> None:
        self._nomad = nomad
        self._jobs: dict[str, Body] = {}
        self._held_starts: list[Body] = []
        self._held_kills: list[Body] = []
        self.hold_starts = False
        self.hold_kills = False
        self.images = {"serai-test:1"}
        self.devices = {"/dev/null", "/dev/zero", "/dev/full", "/dev/nvidia0", "/dev/nvidia1"}
        self.containers: dict[str, Container] = {}
        self.overlaps: list[str] = []

    def group(self, alloc: Body) -> Body:
        """The group as it was when the allocation was placed."""
        groups = self._jobs[alloc["ID"]]["TaskGroups"]
        return next(group for group in groups if group["Name"] == alloc["TaskGroup"])

    def of_job(self, id: str) -> list[Container]:
        """Every container that was ever started for the job."""
        return [c for key, c in self.containers.items() if self._jobs[key]["ID"] == id]

    # --- starting -------------------------------------------------------------------------------------------------

    def remember(self, alloc: Body, job: Body) -> None:
        """The job of an allocation that was just placed: the next group's placement asks what this one uses."""
        self._jobs[alloc["ID"]] = job

    def receive(self, alloc: Body, job: Body) -> None:
        if self.hold_starts:
            self._event(self._state(alloc), "Received", "Task received by client")
            self._report(alloc, "pending", "No tasks have started")
            self._held_starts.append(alloc)
        else:
            self._start(alloc)

    def start_held(self) -> None:
        held, self._held_starts = self._held_starts, []
        for alloc in held:
            if alloc["DesiredStatus"] == "run":
                self._start(alloc)

    def _start(self, alloc: Body) -> None:
        state = self._state(alloc)
        if not state["Events"]:
            self._event(state, "Received", "Task received by client")
        message = "Building Task Directory"
        self._event(state, "Task Setup", message, {"message": message}, Message=message)
        self._report(alloc, "pending", "No tasks have started")
        task = self.group(alloc)["Tasks"][0]
        node = self._nomad.nodes[alloc["NodeID"]]
        known = {"node.unique.id": node.id, "node.unique.name": node.name, "NOMAD_ALLOC_ID": alloc["ID"],
                 "NOMAD_TASK_NAME": task["Name"], "node.class": "gpu"}  # fmt: skip
        try:
            container = create(alloc["ID"], node.id, task, known, self.images, self.devices)
        except FailedValidation as error:
            self._fail(alloc, state, "Failed Validation", {"validation_error": str(error)}, str(error))
        except DriverFailure as error:
            if "Failed to pull" in str(error):
                self._event(state, "Driver", "Downloading image", {"image": task["Config"]["image"]})
            self._fail(alloc, state, "Driver Failure", {"driver_error": str(error)}, str(error))
        else:
            self._run(alloc, state, container)

    def _run(self, alloc: Body, state: Body, container: Container) -> None:
        if any(self._same_group(alloc, other) and other.running for other in self.containers.values()):
            self.overlaps.append(alloc["Name"])
        self.containers[alloc["ID"]] = container
        container.start()
        self._event(state, "Started", "Task started by client")
        state |= {"State": "running", "StartedAt": shapes.timestamp(self._nomad.now_ns)}
        self._report(alloc, "running", "Tasks are running")
        if not container.running:
            self._report_end(alloc, killed=False)

    def _same_group(self, alloc: Body, other: Container) -> bool:
        known = self._nomad.allocs.get(other.alloc)
        return known is not None and known["Name"] == alloc["Name"] and other.alloc != alloc["ID"]

    def _fail(self, alloc: Body, state: Body, kind: str, details: dict[str, str], text: str) -> None:
        self._event(state, kind, text, details)
        self._no_restart(state)
        self._report(alloc, "failed", "Failed tasks")

    # --- ending ---------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Time passes for all containers; ends are told where the node is in touch with the server."""
        self._nomad.now_ns += int(seconds * 1e9)
        for container in list(self.containers.values()):
            if container.running:
                container.advance(seconds)
                if not container.running and self._nomad.nodes[container.node].status == "ready":
                    self._tell_end(container)

    def finish(self, job: str, *, exit_code: int = 0, oom: bool = False) -> None:
        """All running containers of the job end by themselves."""
        for container in self.of_job(job):
            if container.running:
                container.exit_code, container.oom = exit_code, oom
                self._tell_end(container)

    def _tell_end(self, container: Container) -> None:
        if container.alloc in self._nomad.allocs:
            self._report_end(self._nomad.allocs[container.alloc], killed=False)

    def stop(self, alloc: Body) -> None:
        """The server wants it stopped; a node out of touch hears of it when it is back."""
        if self._nomad.nodes[alloc["NodeID"]].status != "ready":
            return
        if self.hold_kills:
            self._held_kills.append(alloc)
        else:
            self._kill(alloc)

    def kill_held(self) -> None:
        held, self._held_kills = self._held_kills, []
        for alloc in held:
            self._kill(alloc)

    def _kill(self, alloc: Body) -> None:
        container = self.containers.get(alloc["ID"])
        if container is not None and alloc["ClientStatus"] not in ("complete", "failed"):
            killed = container.running
            container.kill()
            self._report_end(alloc, killed=killed)
        elif container is None and alloc["ClientStatus"] not in ("complete", "failed"):
            state = self._state(alloc)
            self._event(
                state, "Killing", "Sent interrupt. Waiting 5s before force killing", {"kill_timeout": "5s"}
            )
            self._event(state, "Killed", "Task successfully killed")
            state["State"] = "dead"
            self._report(alloc, "complete", "All tasks have completed")

    def _report_end(self, alloc: Body, *, killed: bool) -> None:
        container = self.containers[alloc["ID"]]
        state = self._state(alloc)
        code = container.exit_code or 0
        if killed:
            self._event(state, "Killing", "Sent interrupt. Waiting 5s before force killing", {"kill_timeout": "5s"},
                        KillTimeout=5_000_000_000)  # fmt: skip
        details = {"exit_code": str(code), "signal": "0", "oom_killed": str(container.oom).lower()}
        shown, message = f"Exit Code: {code}", ""
        if code:
            message = (
                "OOM Killed" if container.oom else f"Docker container exited with non-zero exit code: {code}"
            )
            details["exit_message"] = message
            shown += f', Exit Message: "{message}"'
        self._event(state, "Terminated", shown, details, ExitCode=code, Message=message)
        state |= {"State": "dead", "FinishedAt": shapes.timestamp(self._nomad.now_ns)}
        if killed:
            self._event(state, "Killed", "Task successfully killed")
        elif code:
            self._no_restart(state)
        failed = bool(code) and not killed
        self._report(
            alloc, *(("failed", "Failed tasks") if failed else ("complete", "All tasks have completed"))
        )

    def _no_restart(self, state: Body) -> None:
        reason = "Policy allows no restarts"
        self._event(state, "Not Restarting", reason, {"restart_reason": reason, "fails_task": "true"}, FailsTask=True,
                    RestartReason=reason)  # fmt: skip
        state |= {"Failed": True, "State": "dead", "FinishedAt": shapes.timestamp(self._nomad.now_ns)}

    # --- losing touch ---------------------------------------------------------------------------------------------

    def down(self, node_id: str) -> None:
        """The server misses the node's heartbeats. Its containers go on running."""
        node = self._nomad.nodes[node_id]
        here = [
            a
            for a in self._nomad.allocs.values()
            if a["NodeID"] == node_id and a["ClientStatus"] in ("pending", "running")
        ]
        patient = [alloc for alloc in here if self._waits_for_node(alloc)]
        self._set_status(node_id, "disconnected" if patient else "down")
        for alloc in patient:
            self._report(alloc, "unknown", "alloc is unknown since its node is disconnected")
        self._lose([alloc for alloc in here if alloc not in patient])
        assert node.status != "ready"

    def expire_disconnect(self, node_id: str) -> None:
        """The time of MaxClientDisconnect is over."""
        self._set_status(node_id, "down")
        self._lose(
            [
                a
                for a in self._nomad.allocs.values()
                if a["NodeID"] == node_id and a["ClientStatus"] == "unknown"
            ]
        )

    def _lose(self, allocs: list[Body]) -> None:
        for alloc in allocs:
            alloc["DesiredStatus"] = "stop"
            alloc["DesiredDescription"] = "alloc is lost since its node is down"
            self._report(alloc, "lost", alloc["ClientDescription"], kind="PlanResult")
            self._nomad.reevaluate(alloc["Namespace"], alloc["JobID"], "node-update")

    def up(self, node_id: str, *, sync: bool = True) -> None:
        """The node is back. Blocked evaluations are tried first, which is how a second copy comes to run beside the
        first; `sync` (or a later call of it) lets the client kill what it should not have."""
        self._set_status(node_id, "ready")
        for alloc in [
            a
            for a in self._nomad.allocs.values()
            if a["NodeID"] == node_id and a["ClientStatus"] == "unknown"
        ]:
            if alloc["DesiredStatus"] == "run":
                self._reconnect(alloc)
        self._nomad.unblock()
        if sync:
            self.sync(node_id)

    def sync(self, node_id: str) -> None:
        for alloc in list(self._nomad.allocs.values()):
            if alloc["NodeID"] == node_id and alloc["DesiredStatus"] == "stop":
                self._kill(alloc)

    def _reconnect(self, alloc: Body) -> None:
        self._event(self._state(alloc), "Reconnected", "Client reconnected")
        container = self.containers.get(alloc["ID"])
        if container is None:
            self._report(alloc, "pending", "No tasks have started")
            return
        self._report(alloc, "running", "Tasks are running")
        if not container.running:
            self._report_end(alloc, killed=False)

    def _waits_for_node(self, alloc: Body) -> bool:
        group = self.group(alloc)
        return bool(group.get("MaxClientDisconnect") or (group.get("Disconnect") or {}).get("LostAfter"))

    def _set_status(self, node_id: str, status: str) -> None:
        node = self._nomad.nodes[node_id]
        node.status = status
        node.modify_index = self._nomad.commit("nodes")
        self._nomad.emit("NodeStatusUpdate", ("Node", self._nomad.node_body(node)))

    # --- telling the server ---------------------------------------------------------------------------------------

    def _state(self, alloc: Body) -> Body:
        if alloc["TaskStates"] is None:
            alloc["TaskStates"] = {
                task["Name"]: shapes.task_state("pending") for task in self.group(alloc)["Tasks"]
            }
        state: Body = next(iter(alloc["TaskStates"].values()))
        return state

    def _event(
        self, state: Body, kind: str, shown: str, details: dict[str, str] | None = None, **given: Any
    ) -> None:
        """The last ten events are kept."""
        state["Events"] = [
            *state["Events"],
            shapes.task_event(kind, self._nomad.now_ns, shown, details, **given),
        ][-10:]

    def _report(self, alloc: Body, status: str, description: str, kind: str = "AllocationUpdated") -> None:
        index = self._nomad.commit("allocs")
        alloc |= {"ClientStatus": status, "ClientDescription": description, "ModifyIndex": index}
        alloc["ModifyTime"] = self._nomad.now_ns
        if alloc["ID"] in self._nomad.allocs:
            node = self._nomad.node_body(self._nomad.nodes[alloc["NodeID"]])
            self._nomad.emit(kind, ("Allocation", alloc), ("Node", node))
            self._nomad.settle_status(alloc["Namespace"], alloc["JobID"])
