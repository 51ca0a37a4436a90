"""What a tenant asks for: the job spec as data. Reading one from YAML or JSON is `jobspecs.reading`'s."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from vgpu.slices import SliceRequest


class TaskSpec(Struct, frozen=True, gc=False):
    """`count` equal tasks of a job, each one container. CPU in thousandths of a core, memory in MiB."""

    name: str = "main"
    count: int = 1
    image: str = ""
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: SliceRequest = field(default_factory=SliceRequest)
    cpu_milli: int = 1000
    memory_mib: int = 1024
    shm_mib: int = 64


class JobSpec(Struct, frozen=True, gc=False):
    """A job: all its tasks are placed and run together (a gang), or none is.

    `max_runtime_seconds` (None = no limit) counts running time, over all attempts. `retries` is how often a job is
    started again after it failed or its node was lost. `constraints` are node labels that must be equal.
    """

    name: str
    tenant: str
    tasks: tuple[TaskSpec, ...]
    priority: int = 0
    max_runtime_seconds: int | None = None
    retries: int = 0
    constraints: Mapping[str, str] = field(default_factory=dict)
    stop_grace_seconds: int = 10

    @property
    def task_count(self) -> int:
        return sum(task.count for task in self.tasks)

    @property
    def gpu_count(self) -> int:
        return sum(task.count * task.gpus.count for task in self.tasks)

    def task(self, number: int) -> TaskSpec:
        """The spec of task `number`; IndexError where there is none."""
        for task in self.tasks:
            if number < task.count:
                return task
            number -= task.count
        raise IndexError(number)
