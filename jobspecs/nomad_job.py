"""One attempt of a job as a Nomad batch job: Serai has decided everything, and Nomad only runs it where it was told.

Each knob below that keeps Nomad from deciding is there because of what a real server did without it: a pinned job
whose node was lost started a second copy beside the first when the node came back, a finished job was run again
after its allocation had been collected, text of users was read as a template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jobspecs.container import ContainerSettings, Grant
from jobspecs.spec import JobSpec
from vgpu.reasons import Reason, ReasonCode

TASK_NAME = "main"
META_JOB, META_ATTEMPT, META_TENANT = "serai_job", "serai_attempt", "serai_tenant"
META_FENCE, META_TASKS, META_TASK = "serai_fence", "serai_tasks", "serai_task"

_SECOND = 1_000_000_000  # durations are whole nanoseconds
_SLUG_CHARACTERS = 40
# Below the disk that a group asks for, or the server refuses the job.
_LOG_FILES, _LOG_FILE_MIB, _DISK_MIB = 4, 10, 64
# How long a node may be away before Nomad itself gives its tasks up. Serai decides that much sooner, and deregisters.
_AWAY_SECONDS = 30 * 86_400
_PIDS_LIMIT = 16_384
_CAPABILITIES_DROPPED = ("mknod", "net_raw")

_REFERENCE = re.compile(r"\$\{([A-Za-z0-9_.\-]+)\}", re.ASCII)
_NOMAD_NAMES = ("node.", "attr.", "meta.", "unique.", "env.", "device.", "NOMAD_")
_JOB_ID = re.compile(
    r"(?P<tenant>[a-z0-9._-]+)\.(?P<slug>[a-z0-9-]+)-(?P<job>[a-z0-9]+)\.a(?P<attempt>[1-9][0-9]*)", re.ASCII
)


class NomadRefused(ValueError):
    """Nomad cannot run this attempt as it was granted. `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.detail)
        self.reason = reason


def nomad_job_id(tenant: str, name: str, job: str, attempt: int) -> str:
    """`<tenant>.<slug of the name>-<job>.a<attempt>`: for people to read, and unique by job and attempt alone. Made
    of letters, digits, `.`, `-` and `_`, so that it stands in a path as it is."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_SLUG_CHARACTERS].strip("-")
    return f"{tenant}.{slug or 'job'}-{job}.a{attempt}"


def parse_nomad_job_id(nomad_id: str) -> tuple[str, str, int] | None:
    """(tenant, job, attempt) of an id that `nomad_job_id` made; None for any other job of the cluster."""
    match = _JOB_ID.fullmatch(nomad_id)
    if match is None:
        return None
    return match["tenant"], match["job"], int(match["attempt"])


def nomad_refusal(spec: JobSpec) -> Reason | None:
    """Why Nomad would not run this spec as it is written; None if it would.

    Nomad replaces `${name}` in environment values by its own and the task's variables, and has no escape there. In
    the command there is one, but not for a `$` or `%` that stands before the sequence itself. Values are not
    repeated in the reason, since they may be secrets.
    """
    for position, task in enumerate(spec.tasks):
        path = f"tasks[{position}]." if len(spec.tasks) > 1 else ""
        for name, value in task.env.items():
            rewritten = _rewritten(value, task.env)
            if rewritten:
                detail = f"Nomad would replace ${{{rewritten}}} in this value, and has no way to prevent it"
                return Reason(ReasonCode.ENGINE_REFUSED, {}, (f"{path}env.{name}",), detail)
        for number, word in enumerate(task.command):
            if "$${" in word or "%%{" in word:
                detail = "Nomad reads $${ and %%{ as ${ and %{, so this argument would arrive changed"
                return Reason(ReasonCode.ENGINE_REFUSED, {}, (f"{path}command[{number}]",), detail)
    return None


def _rewritten(value: str, env: Mapping[str, str]) -> str:
    """The first name in `value` that Nomad knows; any variable of the task itself counts, ours too."""
    for name in _REFERENCE.findall(value):
        if name.startswith((*_NOMAD_NAMES, "SERAI_", "NVIDIA_", "CUDA_")) or name in env:
            return str(name)
    return ""


def nomad_job(
    job_id: str,
    spec: JobSpec,
    grants: Sequence[Grant],
    nomad_node_ids: Mapping[str, str],
    *,
    version: str,
    fence: int,
    namespace: str = "default",
    region: str = "global",
) -> dict[str, object]:
    """The value of `Job` in `POST /v1/jobs`. `nomad_node_ids` are the ids by Serai's node name, `version` that of the
    servers ("1.6.3"), `fence` the leader's token. Raises `NomadRefused`, KeyError for a node without an id."""
    refusal = nomad_refusal(spec)
    if refusal is not None:
        raise NomadRefused(refusal)
    attempt = grants[0].attempt
    nomad_id = nomad_job_id(spec.tenant, spec.name, job_id, attempt)
    placed = [(container, grant.node) for grant in grants for container in grant.containers]
    placed.sort(key=lambda pair: pair[0].task)
    return {
        "ID": nomad_id,
        "Name": spec.name,
        "Type": "batch",
        "Region": region,
        "Namespace": namespace,
        "Datacenters": ["*"],  # the constraint on the node says where
        "NodePool": "all",
        "Priority": 50,  # one for all: Nomad must have no order of its own, and preempt nobody
        "AllAtOnce": True,
        "Meta": {
            META_JOB: job_id,
            META_ATTEMPT: str(attempt),
            META_TENANT: spec.tenant,
            META_FENCE: str(fence),
            META_TASKS: str(len(placed)),
        },
        "TaskGroups": [_group(container, nomad_node_ids[node], version) for container, node in placed],
    }


def group_name(task: int) -> str:
    return f"task-{task}"


def _group(container: ContainerSettings, node_id: str, version: str) -> dict[str, object]:
    return {
        "Name": group_name(container.task),
        "Count": 1,
        "Constraints": [{"LTarget": "${node.unique.id}", "Operand": "=", "RTarget": node_id}],
        "RestartPolicy": {
            "Attempts": 0,
            "Interval": 86_400 * _SECOND,
            "Delay": 15 * _SECOND,
            "Mode": "fail",  # "delay" with 0 attempts is refused
        },
        "ReschedulePolicy": {
            "Attempts": 0,
            "Unlimited": False,
            "Interval": 0,
            "Delay": 0,
            "DelayFunction": "constant",
            "MaxDelay": 0,
        },
        **_disconnect(version),
        "EphemeralDisk": {"SizeMB": _DISK_MIB, "Sticky": False, "Migrate": False},
        "Meta": {META_TASK: str(container.task)},
        "Tasks": [_task(container)],
    }


def _disconnect(version: str) -> dict[str, object]:
    """Without either, a node that comes back runs a second copy. Servers before 1.8 drop `Disconnect` silently, and
    later ones refuse both together."""
    if _version(version) < (1, 8):
        return {"MaxClientDisconnect": _AWAY_SECONDS * _SECOND}
    return {
        "Disconnect": {
            "LostAfter": _AWAY_SECONDS * _SECOND,
            "Replace": False,
            "Reconcile": "keep_original",
        }
    }


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"v?(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"not a version of Nomad: {text!r}")
    return int(match[1]), int(match[2])


def _task(container: ContainerSettings) -> dict[str, object]:
    return {
        "Name": TASK_NAME,
        "Driver": "docker",
        "Config": _config(container),
        "Env": dict(container.env),  # not escaped: Nomad has no escape here
        "Resources": {
            # Nomad counts MHz. A core is taken as 1000 of them, less than any real one has, so that Nomad never finds
            # too few where Serai found enough; containers get processor time in proportion, which this keeps.
            "CPU": container.cpu_milli,
            "MemoryMB": container.memory_mib,
        },
        "LogConfig": {"MaxFiles": _LOG_FILES, "MaxFileSizeMB": _LOG_FILE_MIB},
        "KillTimeout": max(1, container.stop_grace_seconds) * _SECOND,  # 0 would mean the default of 5 s
        "KillSignal": "SIGTERM",
    }


def _config(container: ContainerSettings) -> dict[str, object]:
    gpu = container.gpu
    if gpu.cdi_devices:
        detail = "the Docker driver of Nomad knows no CDI devices: let the node mount device nodes or use the runtime"
        raise NomadRefused(Reason(ReasonCode.ENGINE_REFUSED, subjects=(gpu.cdi_devices[0],), detail=detail))
    config: dict[str, object] = {
        "image": _literal(container.image),
        "force_pull": False,
        "shm_size": container.shm_mib * 1024 * 1024,
        "pids_limit": _PIDS_LIMIT,
        "cap_drop": list(_CAPABILITIES_DROPPED),
        "security_opt": ["no-new-privileges"],
        # A map is written as a list of maps in the JSON of a driver's configuration.
        "labels": [{key: _literal(value) for key, value in container.labels.items()}],
    }
    if container.command:
        config["command"] = _literal(container.command[0])
        config["args"] = [_literal(word) for word in container.command[1:]]
    if gpu.devices:
        config["devices"] = [
            {
                "host_path": device.host_path,
                "container_path": device.container_path,
                "cgroup_permissions": device.permissions,
            }
            for device in gpu.devices
        ]
    if gpu.mounts:
        config["mount"] = [
            {
                "type": "bind",
                "source": mount.source,
                "target": mount.target,
                "readonly": mount.read_only,
            }
            for mount in gpu.mounts
        ]
    if gpu.runtime:
        config["runtime"] = gpu.runtime
    return config


def _literal(text: str) -> str:
    """Text of a user in a driver's configuration, which Nomad reads as a template: `${` and `%{` begin one."""
    return text.replace("${", "$${").replace("%{", "%%{")
