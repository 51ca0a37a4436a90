"""A submitted mapping to a `JobSpec`, and back. The only place that knows the field names users write.

`read_spec` names every fault at once, each with its path (`tasks[1].gpus.memory`), the limit it broke and the value,
except for values of environment variables, which may be secrets and are never repeated. `spec_view` is the inverse:
what it answers can be submitted again (when it is not masked) and gives an equal spec.
"""

from __future__ import annotations

from collections.abc import Mapping

from jobspecs.documents import DocumentInvalid, parse_json, parse_yaml
from jobspecs.fields import (
    MAX_NAME_CHARACTERS,
    Fault,
    Fields,
    SpecInvalid,
    tenant_fault,
)
from jobspecs.spec import JobSpec, TaskSpec
from jobspecs.task_fields import (
    MASK,
    TASK_FIELDS,
    launch_bytes,
    read_task,
    task_view,
)
from jobspecs.units import (
    ValueInvalid,
    duration_text,
    parse_compute,
    parse_cpu,
    parse_duration,
    parse_size,
)

MAX_TASKS = 2000
MAX_TASK_GROUPS = 256
MIN_PRIORITY, MAX_PRIORITY = -1000, 1000
MAX_RETRIES = 100
MAX_CONSTRAINTS = 32
MAX_STOP_GRACE_SECONDS = 3600
# The record of a job stands in one etcd value, next to its allocation.
MAX_SPEC_BYTES = 512 * 1024
# All grants of a job are one etcd transaction with its record, which etcd limits to 1.5 MiB. Each task brings its
# own copy of environment and command.
MAX_LAUNCH_BYTES = 1_400_000

_JOB_FIELDS = ("name", "tenant", "tasks", "priority", "max_runtime", "retries", "constraints", "stop_grace")
_FIELDS = _JOB_FIELDS + tuple(name for name in TASK_FIELDS if name != "count")


def read_spec(mapping: object, *, tenant: str | None) -> JobSpec:
    """The spec in `mapping`. `tenant` is that of the caller's token; None (an administrator) means that the spec must
    name one. Raises `SpecInvalid` with all faults."""
    fields = Fields.of(mapping, "")
    fields.refuse_unknown(_FIELDS)
    tasks = _tasks(fields)
    spec = JobSpec(
        name=_name(fields, tasks),
        tenant=_tenant(fields, tenant),
        tasks=tasks,
        priority=fields.whole("priority", MIN_PRIORITY, MAX_PRIORITY, default=0),
        max_runtime_seconds=fields.parsed("max_runtime", parse_duration, None),
        retries=fields.whole("retries", 0, MAX_RETRIES, default=0),
        constraints=fields.texts("constraints", most=MAX_CONSTRAINTS),
        stop_grace_seconds=fields.parsed("stop_grace", _grace, 10),
    )
    if not fields.faults:
        _check_size(spec, fields)
    if fields.faults:
        raise SpecInvalid(tuple(fields.faults))
    return spec


def _grace(value: object) -> int:
    return parse_duration(value, least_seconds=0, most_seconds=MAX_STOP_GRACE_SECONDS)


def _tenant(fields: Fields, tenant: str | None) -> str:
    named = fields.get("tenant")
    if named is None:
        if tenant is None:
            fields.fault("tenant", "required: an administrator names the tenant that a job is for")
        return tenant or ""
    fault = tenant_fault(named)
    if fault is not None:
        fields.faults.append(fault)
        return ""
    if tenant is not None and named != tenant:
        # Neither the other tenant's existence nor anything about it is said.
        fields.fault("tenant", "this token submits for its own tenant only", limit=tenant, value=named)
    return str(named)


def _name(fields: Fields, tasks: tuple[TaskSpec, ...]) -> str:
    if fields.get("name") is None:
        image = tasks[0].image if tasks else ""
        return image.rpartition("/")[2].partition("@")[0].partition(":")[0][:MAX_NAME_CHARACTERS] or "job"
    return fields.text("name", most=MAX_NAME_CHARACTERS)


def _tasks(fields: Fields) -> tuple[TaskSpec, ...]:
    given = fields.get("tasks")
    if not isinstance(given, list | tuple):
        count = fields.whole("tasks", 1, MAX_TASKS, default=1)
        return (read_task(fields, {}, name="main", count=count),)
    if not given:
        fields.fault("tasks", "the list is empty: leave it out for one task", limit="1 or more", value="[]")
        return ()
    if len(given) > MAX_TASK_GROUPS:
        fields.fault("tasks", "too many different tasks", limit=MAX_TASK_GROUPS, value=len(given))
        return ()
    tasks = tuple(_task(fields, item, position, len(given)) for position, item in enumerate(given))
    total = sum(task.count for task in tasks)
    if total > MAX_TASKS:
        fields.fault(
            "tasks", f"the job has {total} tasks in all, at most {MAX_TASKS} are taken", MAX_TASKS, total
        )
    names = [task.name for task in tasks]
    for position, name in enumerate(names):
        if name in names[:position]:
            fields.fault(
                f"tasks[{position}].name", "two tasks have this name", limit="unique names", value=name
            )
    return tasks


def _task(fields: Fields, item: object, position: int, groups: int) -> TaskSpec:
    own = Fields.of(item, f"tasks[{position}]", fields.faults)
    own.refuse_unknown(("name", *TASK_FIELDS))
    default = "main" if groups == 1 else f"task-{position}"
    name = own.text("name", most=64) if own.get("name") is not None else default
    count = own.whole("count", 1, MAX_TASKS, default=1)
    inherited = {key: value for key, value in fields.values.items() if key in TASK_FIELDS}
    return read_task(own, inherited, name=name, count=count)


def _check_size(spec: JobSpec, fields: Fields) -> None:
    """Last, on a spec that is right otherwise: it must fit into the store, as a record and as grants."""
    sizes = [(task.count, launch_bytes(task)) for task in spec.tasks]
    size = sum(each for _, each in sizes)
    if size > MAX_SPEC_BYTES:
        fields.fault(
            "tasks", "the spec is too large to be stored", f"{MAX_SPEC_BYTES} bytes", f"{size} bytes"
        )
        return
    launch = sum(count * each for count, each in sizes)
    if launch > MAX_LAUNCH_BYTES:
        message = (
            "all tasks together start with too much environment and command: use fewer tasks or a smaller env"
        )
        fields.fault("tasks", message, f"{MAX_LAUNCH_BYTES} bytes", f"{launch} bytes")


def spec_view(spec: JobSpec, *, mask: bool = True) -> dict[str, object]:
    """The spec with the field names of a submitted one. `mask` shows environment values as `***`."""
    view: dict[str, object] = {"name": spec.name, "tenant": spec.tenant}
    only = spec.tasks[0]
    if len(spec.tasks) == 1 and only.name == "main":
        view |= {"tasks": only.count, **task_view(only, mask=mask)}
    else:
        view["tasks"] = [
            {"name": task.name, "count": task.count, **task_view(task, mask=mask)} for task in spec.tasks
        ]
    limit = spec.max_runtime_seconds
    return view | {
        "priority": spec.priority,
        "max_runtime": None if limit is None else duration_text(limit),
        "retries": spec.retries,
        "constraints": dict(spec.constraints),
        "stop_grace": duration_text(spec.stop_grace_seconds),
    }


def binary_notices(mapping: object) -> tuple[str, ...]:
    """One sentence for each size that was written with `G` or `M`, to say how it was read."""
    notices: list[str] = []
    _collect_notices(mapping, "", notices)
    return tuple(notices)


def _collect_notices(value: object, path: str, notices: list[str]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key != "env":
                _collect_notices(item, f"{path}.{key}" if path else str(key), notices)
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _collect_notices(item, f"{path}[{position}]", notices)
    elif (
        path.rpartition(".")[2] in ("memory", "shm") and isinstance(value, str) and value.endswith(("G", "M"))
    ):
        notices.append(f"{path}: {value} is read as {value}iB (binary)")


__all__ = [
    "MASK",
    "DocumentInvalid",
    "Fault",
    "SpecInvalid",
    "ValueInvalid",
    "binary_notices",
    "parse_compute",
    "parse_cpu",
    "parse_duration",
    "parse_json",
    "parse_size",
    "parse_yaml",
    "read_spec",
    "spec_view",
]
