"""From an allocation to launch settings, and from those to what the Docker Engine takes. (`jobspecs.nomad_job` makes
the Nomad job from the same settings.)

A container knows these names, and no others of ours: SERAI_JOB_ID, SERAI_TENANT, SERAI_ATTEMPT (from
1), SERAI_TASK (its number, from 0), SERAI_TASKS (how many there are), SERAI_TASK_NAME, SERAI_NODE, SERAI_CPU_MILLI,
SERAI_MEMORY_MIB, and with GPUs SERAI_GPU_MEMORY_MIB and SERAI_GPU_COMPUTE_MILLI (comma lists in the order of the
GPUs). RANK, WORLD_SIZE and MASTER_ADDR are left to the user: only the program knows whether a task or a process is a
rank, and a wrong guess makes a launcher hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import evolve

from jobspecs.container import (
    LABEL_ATTEMPT,
    LABEL_CLUSTER,
    LABEL_JOB,
    LABEL_TASK,
    LABEL_TENANT,
    ContainerSettings,
    Grant,
)
from jobspecs.nomad_job import (
    NomadRefused,
    nomad_job,
    nomad_job_id,
    nomad_refusal,
    parse_nomad_job_id,
)
from jobspecs.spec import JobSpec
from vgpu.inventory import NodeInventory
from vgpu.isolation import gpu_settings, gpu_steps
from vgpu.slices import Slice

MIB = 1024 * 1024
# Threads count too, and a data loader on a large machine has thousands; a fork bomb has more.
PIDS_LIMIT = 16_384
# What no job needs of Docker's default set: to make device nodes, and to send packets under a false name.
CAPABILITIES_DROPPED = ("MKNOD", "NET_RAW")
LOG_FILES, LOG_FILE_MIB = 2, 50


class PlacedTask(Protocol):
    """One task of an allocation: where it is and what it holds there."""

    @property
    def task(self) -> int: ...
    @property
    def node(self) -> str: ...
    @property
    def slices(self) -> tuple[Slice, ...]: ...


class Placed(Protocol):
    """An allocation, as far as launch settings follow from it."""

    @property
    def attempt(self) -> int: ...
    @property
    def tasks(self) -> Sequence[PlacedTask]: ...
    @property
    def allocated_at_ms(self) -> int: ...


def containers_for(
    job_id: str,
    attempt: int,
    spec: JobSpec,
    tasks: Sequence[tuple[int, Sequence[Slice], str]],
    inventories: Mapping[str, NodeInventory],
    cluster: str,
) -> tuple[ContainerSettings, ...]:
    """The launch settings of these tasks, each given as (number, slices, node), in the same order. Raises KeyError
    for a node or a GPU that `inventories` does not know, IndexError for a task that the spec does not have."""
    return tuple(
        _container(job_id, attempt, spec, number, tuple(slices), inventories[node], cluster)
        for number, slices, node in tasks
    )


def _container(
    job_id: str,
    attempt: int,
    spec: JobSpec,
    number: int,
    slices: tuple[Slice, ...],
    inventory: NodeInventory,
    cluster: str,
) -> ContainerSettings:
    task = spec.task(number)
    gpus = {gpu.uuid: gpu for gpu in inventory.gpus}
    gpu = gpu_settings(slices, gpus, inventory.container_gpus)
    own = {
        "SERAI_JOB_ID": job_id,
        "SERAI_TENANT": spec.tenant,
        "SERAI_ATTEMPT": str(attempt),
        "SERAI_TASK": str(number),
        "SERAI_TASKS": str(spec.task_count),
        "SERAI_TASK_NAME": task.name,
        "SERAI_NODE": inventory.node,
        "SERAI_CPU_MILLI": str(task.cpu_milli),
        "SERAI_MEMORY_MIB": str(task.memory_mib),
    }
    return ContainerSettings(
        task=number,
        image=task.image,
        command=task.command,
        env={**task.env, **own, **gpu.env},  # ours last: a user cannot name another tenant's GPU
        gpu=evolve(gpu, env={}),  # they stand in `env` already, and a grant is stored
        cpu_milli=task.cpu_milli,
        memory_mib=task.memory_mib,
        shm_mib=task.shm_mib,
        stop_grace_seconds=spec.stop_grace_seconds,
        labels={
            LABEL_JOB: job_id,
            LABEL_ATTEMPT: str(attempt),
            LABEL_TASK: str(number),
            LABEL_TENANT: spec.tenant,
            LABEL_CLUSTER: cluster,
        },
        slices=slices,
        steps=gpu_steps(slices),
    )


def grants_for(
    job_id: str,
    spec: JobSpec,
    allocation: Placed,
    inventories: Mapping[str, NodeInventory],
    *,
    engine: str,
    cluster: str,
    ran_ms: int = 0,
) -> tuple[Grant, ...]:
    """One grant for each node of the allocation, by node name. `ran_ms` is the running time of earlier attempts,
    which counts against `max_runtime_seconds`. Raises as `containers_for` does."""
    return tuple(
        grant_for(node, job_id, spec, allocation, inventories, engine=engine, cluster=cluster, ran_ms=ran_ms)
        for node in sorted({task.node for task in allocation.tasks})
    )


def grant_for(
    node: str,
    job_id: str,
    spec: JobSpec,
    allocation: Placed,
    inventories: Mapping[str, NodeInventory],
    *,
    engine: str,
    cluster: str,
    ran_ms: int = 0,
) -> Grant:
    """What `node` sees of the allocation."""
    tasks = [(task.task, task.slices, task.node) for task in allocation.tasks if task.node == node]
    limit = spec.max_runtime_seconds
    return Grant(
        node=node,
        job=job_id,
        attempt=allocation.attempt,
        tenant=spec.tenant,
        containers=containers_for(job_id, allocation.attempt, spec, tasks, inventories, cluster),
        granted_at_ms=allocation.allocated_at_ms,
        engine=engine,
        # At least a moment, so that a job whose time is up ends by its limit and not by a negative figure.
        max_runtime_ms=None if limit is None else max(1, limit * 1000 - ran_ms),
    )


def container_name(container: ContainerSettings) -> str:
    """`serai-<job>-<attempt>-<task>`: a second start of the same attempt meets the first one by name."""
    labels = container.labels
    return f"serai-{labels[LABEL_JOB]}-{labels[LABEL_ATTEMPT]}-{labels[LABEL_TASK]}"


def docker_arguments(
    container: ContainerSettings, name: str, *, log_file_mib: int = LOG_FILE_MIB
) -> dict[str, object]:
    """The body of the Docker Engine's `POST /containers/create`, in the engine's own field names.

    The engine takes `name` as a query parameter; in the body it is the host name that the program sees. Network and
    user are the engine's and the image's defaults. The engine restarts and removes nothing: the agent has to see the
    end and to read the output.
    """
    body: dict[str, object] = {
        "Image": container.image,
        "Hostname": name[:63],
        "Env": [f"{key}={value}" for key, value in sorted(container.env.items())],
        "Labels": dict(container.labels),
        "StopTimeout": container.stop_grace_seconds,
        "HostConfig": _host_config(container, log_file_mib),
    }
    if container.command:
        body["Cmd"] = list(container.command)
    return body


def _host_config(container: ContainerSettings, log_file_mib: int) -> dict[str, object]:
    gpu = container.gpu
    config: dict[str, object] = {
        "NanoCpus": container.cpu_milli * 1_000_000,
        "Memory": container.memory_mib * MIB,
        "MemorySwap": container.memory_mib * MIB,  # memory and swap together: no swap
        "ShmSize": container.shm_mib * MIB,
        "PidsLimit": PIDS_LIMIT,
        "Privileged": False,
        "SecurityOpt": ["no-new-privileges"],
        "CapDrop": list(CAPABILITIES_DROPPED),
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
        "LogConfig": {
            "Type": "json-file",
            "Config": {"max-size": f"{log_file_mib}m", "max-file": str(LOG_FILES)},
        },
        "Devices": [
            {
                "PathOnHost": device.host_path,
                "PathInContainer": device.container_path,
                "CgroupPermissions": device.permissions,
            }
            for device in gpu.devices
        ],
        "Mounts": [
            {
                "Type": "bind",
                "Source": mount.source,
                "Target": mount.target,
                "ReadOnly": mount.read_only,
            }
            for mount in gpu.mounts
        ],
    }
    if gpu.runtime:
        config["Runtime"] = gpu.runtime
    if gpu.cdi_devices:
        config["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": list(gpu.cdi_devices)}]
    return config


__all__ = [
    "NomadRefused",
    "Placed",
    "PlacedTask",
    "container_name",
    "containers_for",
    "docker_arguments",
    "grant_for",
    "grants_for",
    "nomad_job",
    "nomad_job_id",
    "nomad_refusal",
    "parse_nomad_job_id",
]
