"""The JSON bodies of a Nomad 1.6.3, field for field as in `recorded.json`."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

Body = dict[str, Any]

_JOB: Body = {
    "Affinities": None, "AllAtOnce": False, "Constraints": None, "ConsulNamespace": "", "ConsulToken": "",
    "Datacenters": ["*"], "DispatchIdempotencyToken": "", "Dispatched": False, "Meta": None, "Multiregion": None,
    "Namespace": "default", "NodePool": "default", "NomadTokenID": "", "ParameterizedJob": None, "ParentID": "",
    "Payload": None, "Periodic": None, "Priority": 50, "Region": "global", "Spreads": None, "Stable": False,
    "StatusDescription": "", "Type": "service", "Update": {}, "VaultNamespace": "", "VaultToken": "",
}  # fmt: skip
_GROUP: Body = {
    "Affinities": None, "Constraints": None, "Consul": {"Namespace": ""}, "Count": 1, "EphemeralDisk": {"SizeMB": 300},
    "MaxClientDisconnect": None, "Meta": None, "Migrate": None, "Networks": None, "ReschedulePolicy": None,
    "RestartPolicy": None, "Scaling": None, "Services": None, "ShutdownDelay": None, "Spreads": None,
    "StopAfterClientDisconnect": None, "Update": None, "Volumes": None,
}  # fmt: skip
_TASK: Body = {
    "Affinities": None, "Artifacts": None, "CSIPluginConfig": None, "Config": {}, "Constraints": None,
    "DispatchPayload": None, "Env": None, "Identity": None, "KillSignal": "", "KillTimeout": 5_000_000_000, "Kind": "",
    "Leader": False, "Lifecycle": None, "LogConfig": {"MaxFiles": 10, "MaxFileSizeMB": 10}, "Meta": None,
    "RestartPolicy": None, "ScalingPolicies": None, "Services": None, "ShutdownDelay": 0, "Templates": None,
    "User": "", "Vault": None, "VolumeMounts": None,
}  # fmt: skip
_RESOURCES: Body = {
    "CPU": 100, "Cores": 0, "Devices": None, "DiskMB": 0, "IOPS": 0, "MemoryMB": 300, "MemoryMaxMB": 0, "Networks": None
}  # fmt: skip


def job(given: Mapping[str, Any], *, keeps_disconnect: bool) -> Body:
    """The job as the server keeps it. A server before 1.8 drops the Disconnect block without a word."""
    body = _JOB | dict(given)
    groups = []
    for group in given.get("TaskGroups") or []:
        tasks = [
            _TASK | task | {"Resources": _RESOURCES | (task.get("Resources") or {})}
            | {"LogConfig": {"Disabled": False} | _TASK["LogConfig"] | (task.get("LogConfig") or {})}
            for task in group.get("Tasks") or []
        ]  # fmt: skip
        kept = _GROUP | group | {"Tasks": tasks}
        if not keeps_disconnect:
            kept.pop("Disconnect", None)
        groups.append(kept)
    return body | {"TaskGroups": groups, "Name": given.get("Name") or given.get("ID", "")}


def job_faults(body: Body) -> list[str]:
    """Why the server refuses the job, in its words."""
    faults = []
    for field in ("ID", "Name"):
        value, noun = body.get(field) or "", f"Job {field}" if field == "ID" else "Job Name"
        if not value:
            faults.append(f"Missing job {field if field == 'ID' else 'name'}")
        if field == "ID" and " " in value:
            faults.append("Job ID contains a space")
        if "\0" in value:
            faults.append(f"{noun} contains a null character")
    if not body["TaskGroups"]:
        faults.append("Missing job task groups")
    for group in body["TaskGroups"]:
        faults += _group_faults(group)
    return faults


def _group_faults(group: Body) -> list[str]:
    faults = []
    disk_mb = group["EphemeralDisk"].get("SizeMB", 300)
    if group["MaxClientDisconnect"] and group["StopAfterClientDisconnect"]:
        faults.append(
            f"Task group {group['Name']} cannot be configured with both max_client_disconnect and stop_after_client_disconnect"
        )
    for task in group["Tasks"]:
        log_mb = task["LogConfig"]["MaxFiles"] * task["LogConfig"]["MaxFileSizeMB"]
        if log_mb >= disk_mb:
            faults.append(
                f"log storage ({log_mb} MB) must be less than requested disk capacity ({disk_mb} MB)"
            )
    return faults


def errors(faults: list[str]) -> str:
    """Several faults as Nomad words them."""
    count = "1 error" if len(faults) == 1 else f"{len(faults)} errors"
    return f"{count} occurred:\n" + "".join(f"\t* {fault}\n" for fault in faults) + "\n"


def metric(**given: Any) -> Body:
    """An AllocMetric: why nodes were not taken."""
    return {
        "AllocationTime": 9484, "ClassExhausted": None, "ClassFiltered": None, "CoalescedFailures": 0,
        "ConstraintFiltered": None, "DimensionExhausted": None, "NodesAvailable": {"dc1": 0}, "NodesEvaluated": 0,
        "NodesExhausted": 0, "NodesFiltered": 0, "NodesInPool": 0, "QuotaExhausted": None, "ResourcesExhausted": None,
        "ScoreMetaData": None, "Scores": None,
    } | given  # fmt: skip


def evaluation(id: str, body: Body, triggered_by: str, index: int, now_ns: int, **given: Any) -> Body:
    return {
        "CreateIndex": index, "CreateTime": now_ns, "ID": id, "JobID": body["ID"],
        "JobModifyIndex": body["JobModifyIndex"], "ModifyIndex": index, "ModifyTime": now_ns,
        "Namespace": body["Namespace"], "Priority": body["Priority"], "Status": "pending",
        "TriggeredBy": triggered_by, "Type": body["Type"],
    } | given  # fmt: skip


def allocation(
    id: str, body: Body, group: Body, node: str, node_name: str, eval_id: str, index: int, now_ns: int
) -> Body:
    """A fresh allocation, before its client has heard of it."""
    return {
        "AllocModifyIndex": index, "ClientDescription": "", "ClientStatus": "pending", "CreateIndex": index,
        "CreateTime": now_ns, "DeploymentStatus": None, "DesiredDescription": "", "DesiredStatus": "run",
        "DesiredTransition": {"ForceReschedule": None, "Migrate": None, "NoShutdownDelay": None, "Reschedule": None},
        "EvalID": eval_id, "FollowupEvalID": "", "ID": id, "JobID": body["ID"], "JobType": body["Type"],
        "JobVersion": body["Version"], "ModifyIndex": index, "ModifyTime": now_ns,
        "Name": f"{body['ID']}.{group['Name']}[0]", "Namespace": body["Namespace"], "NextAllocation": "",
        "NodeID": node, "NodeName": node_name, "PreemptedAllocations": None, "PreemptedByAllocation": "",
        "RescheduleTracker": None, "TaskGroup": group["Name"], "TaskStates": None,
    }  # fmt: skip


_STUB_ONLY = ("DeploymentStatus", "FollowupEvalID", "JobType", "JobVersion", "NextAllocation", "PreemptedAllocations",
              "PreemptedByAllocation", "RescheduleTracker", "DesiredTransition")  # fmt: skip


def alloc_stub(alloc: Body) -> Body:
    return {key: value for key, value in alloc.items() if key != "AllocModifyIndex"}


def full_allocation(stub: Body) -> Body:
    """`/v1/allocation/ID` shows the object itself, which leaves empty fields out; lists show stubs."""
    shown = {key: value for key, value in stub.items() if key not in _STUB_ONLY}
    return {key: value for key, value in shown.items() if value != "" and value is not None} | {"Job": {}}


def event_object(topic: str, body: Body) -> Body:
    """What the event stream carries: objects and not stubs, an allocation without its job."""
    if topic == "Allocation":
        return {key: value for key, value in full_allocation(body).items() if key != "Job"}
    if topic == "Node":
        event = {
            "CreateIndex": 0,
            "Details": None,
            "Message": "Node registered",
            "Subsystem": "Cluster",
            "Timestamp": "",
        }
        return {key: value for key, value in body.items() if key not in ("Address", "Version")} | {
            "Events": [event],
            "Meta": {},
        }
    return dict(body)


def task_state(state: str) -> Body:
    return {
        "Events": [], "Failed": False, "FinishedAt": None, "LastRestart": None, "Restarts": 0, "StartedAt": None,
        "State": state, "TaskHandle": None,
    }  # fmt: skip


def task_event(
    kind: str, now_ns: int, shown: str = "", details: Mapping[str, str] | None = None, **given: Any
) -> Body:
    """All values of Details are strings."""
    return {
        "Details": dict(details or {}), "DiskLimit": 0, "DisplayMessage": shown, "DownloadError": "",
        "DriverError": "", "DriverMessage": "", "ExitCode": 0, "FailedSibling": "", "FailsTask": False,
        "GenericSource": "", "KillError": "", "KillReason": "", "KillTimeout": 0, "Message": "", "RestartReason": "",
        "SetupError": "", "Signal": 0, "StartDelay": 0, "TaskSignal": "", "TaskSignalReason": "", "Time": now_ns,
        "Type": kind, "ValidationError": "", "VaultError": "",
    } | given  # fmt: skip


def node(id: str, name: str, memory_mb: int, version: str, status: str, create: int, modify: int) -> Body:
    driver = {
        "Attributes": {"driver.docker": "true"}, "Detected": True, "HealthDescription": "Healthy", "Healthy": True,
        "UpdateTime": "2026-01-01T00:00:00.000000001Z",
    }  # fmt: skip
    return {
        "Address": "127.0.0.1", "Attributes": {}, "CreateIndex": create, "Datacenter": "dc1", "Drain": False,
        "Drivers": {"docker": driver, "raw_exec": driver}, "HostVolumes": None, "ID": id, "LastDrain": None,
        "ModifyIndex": modify, "Name": name, "NodeClass": "gpu", "NodePool": "default",
        "NodeResources": {"Cpu": {"CpuShares": 16000}, "Memory": {"MemoryMB": memory_mb}, "Disk": {"DiskMB": 78113}},
        "ReservedResources": {
            "Cpu": {"CpuShares": 0, "ReservedCpuCores": None}, "Disk": {"DiskMB": 0}, "Memory": {"MemoryMB": 0},
            "Networks": {"ReservedHostPorts": ""},
        },
        "SchedulingEligibility": "eligible", "Status": status, "StatusDescription": "", "Version": version,
    }  # fmt: skip


def job_stub(body: Body, *, meta: bool) -> Body:
    """A line of `/v1/jobs`; Meta only with `meta=true`."""
    kept = ("ID", "ParentID", "Name", "Namespace", "Datacenters", "NodePool", "Type", "Priority", "Stop", "Status",
            "StatusDescription", "CreateIndex", "ModifyIndex", "JobModifyIndex", "SubmitTime")  # fmt: skip
    return {key: body[key] for key in kept} | ({"Meta": body["Meta"]} if meta else {})


def timestamp(now_ns: int) -> str:
    """RFC 3339 with nine digits, as Go writes it."""
    seconds, nanoseconds = divmod(now_ns, 1_000_000_000)
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S") + f".{nanoseconds:09d}Z"
