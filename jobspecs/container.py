"""The launch settings of one task: everything an engine needs to start its container, the same for all engines."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from vgpu.isolation.settings import GpuSettings, Step
from vgpu.slices import Slice

LABEL_JOB = "serai.job"
LABEL_ATTEMPT = "serai.attempt"
LABEL_TASK = "serai.task"
LABEL_TENANT = "serai.tenant"
LABEL_CLUSTER = "serai.cluster"


@frozen
class ContainerSettings:
    """`env` is final: the user's values with Serai's own on top. `labels` identify the attempt, so that an agent that
    lost its memory finds its containers again."""

    task: int
    image: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    gpu: GpuSettings
    cpu_milli: int
    memory_mib: int
    shm_mib: int
    stop_grace_seconds: int
    labels: Mapping[str, str]
    slices: tuple[Slice, ...] = ()
    steps: tuple[Step, ...] = ()


@frozen
class Grant:
    """What a node sees of an allocation: its tasks there and how to start them. `stopping` asks the node to end them
    and to say when that is confirmed. `engine` tells who starts the containers: the `agent` itself, or `nomad` (the
    agent then only performs the steps)."""

    node: str
    job: str
    attempt: int
    tenant: str
    containers: tuple[ContainerSettings, ...]
    granted_at_ms: int
    engine: str = "agent"
    stopping: bool = False
    stop_reason: str = ""
    max_runtime_ms: int | None = None
    version: int = 1
