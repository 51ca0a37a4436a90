"""The part of a submitted spec that describes one kind of task: image, command, environment, GPUs, CPU, memory."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jobspecs.fields import Fields, plain_text
from jobspecs.spec import TaskSpec
from jobspecs.units import (
    MAX_SIZE_MIB,
    ValueInvalid,
    compute_text,
    cpu_text,
    parse_compute,
    parse_cpu,
    parse_size,
    size_text,
)
from vgpu.inventory import WHOLE_GPU_MILLI
from vgpu.isolation import BACKENDS
from vgpu.slices import SliceRequest

TASK_FIELDS = ("count", "image", "command", "env", "gpus", "cpu", "memory", "shm")
MASK = "***"

DEFAULT_CPU_MILLI = 1000
DEFAULT_MEMORY_MIB = 1024
DEFAULT_SHM_MIB = 64
MAX_GPUS_PER_TASK = 128
MIN_MEMORY_MIB = 10  # Nomad's least; the Docker Engine's is 6
MAX_IMAGE_CHARACTERS = 512
MAX_COMMAND_ARGUMENTS = 1024
MAX_COMMAND_BYTES = 64 * 1024
MAX_ENV_VARIABLES = 512
MAX_ENV_BYTES = 64 * 1024
MAX_MODEL_CHARACTERS = 128

# What a task takes in its grant and in the job's allocation besides its own text: labels, Serai's environment, GPU
# settings, field names. Measured on rendered grants; the test of the estimate holds them against the real ones.
LAUNCH_BYTES = 1_000
LAUNCH_BYTES_PER_GPU = 450
LAUNCH_BYTES_MPS = 850

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f]")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# These decide which GPUs a container sees and how much of them: they are Serai's (an image's own are overlaid).
RESERVED_ENV = re.compile(r"NVIDIA_.*|CUDA_VISIBLE_DEVICES|CUDA_MPS_.*|SERAI_.*", re.ASCII)


def read_task(fields: Fields, inherited: Mapping[str, object], *, name: str, count: int) -> TaskSpec:
    """A task from its own fields over the `inherited` ones of the job. Environments are merged, name by name; any
    other field is taken whole from where it is written. Faults stand at the path of the task."""
    given = {key: value for key, value in fields.values.items() if value is not None}
    own_env, base_env = given.get("env"), inherited.get("env")
    merged: dict[str, object] = {**inherited, **given}
    if isinstance(own_env, Mapping) and isinstance(base_env, Mapping):
        merged["env"] = {**base_env, **own_env}
    task = Fields(merged, fields.path, fields.faults, frozenset(inherited.keys() - given.keys()))
    # A memory that could not be read must not make a second fault of a shared memory that may be right.
    unreadable = DEFAULT_MEMORY_MIB if task.get("memory") is None else MAX_SIZE_MIB
    memory_mib = task.parsed("memory", _memory, unreadable)
    return TaskSpec(
        name=name,
        count=count,
        image=_image(task),
        command=_command(task),
        env=_env(task),
        gpus=_gpus(task),
        cpu_milli=task.parsed("cpu", parse_cpu, DEFAULT_CPU_MILLI),
        memory_mib=memory_mib,
        shm_mib=_shm(task, memory_mib),
    )


def _memory(value: object) -> int:
    return parse_size(value, least_mib=MIN_MEMORY_MIB)


def _shm(task: Fields, memory_mib: int) -> int:
    shm_mib = task.parsed("shm", parse_size, min(DEFAULT_SHM_MIB, memory_mib))
    if shm_mib > memory_mib:
        message = (
            f"shared memory is part of the memory: raise memory from {size_text(memory_mib)}, or lower shm"
        )
        task.fault("shm", message, size_text(memory_mib), task.get("shm"))
    return shm_mib


def _image(task: Fields) -> str:
    image = task.text("image", most=MAX_IMAGE_CHARACTERS)
    if image and not _IMAGE.fullmatch(image):
        task.fault("image", "is no image reference", "name, name:tag or name@sha256:...", image)
    return image


def _command(task: Fields) -> tuple[str, ...]:
    value = task.get("command")
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        hint = 'must be a list: [python, train.py], or ["sh", "-c", "..."] for a line of shell'
        task.fault("command", hint, "a list of texts")
        return ()
    if len(value) > MAX_COMMAND_ARGUMENTS:
        task.fault("command", "has too many arguments", MAX_COMMAND_ARGUMENTS, len(value))
        return ()
    words = []
    for position, item in enumerate(value):
        word = plain_text(item)
        if word is None:
            task.fault(f"command[{position}]", "must be text: put it in quotes", "text", item)
        elif not _storable(word) or (position == 0 and not word):
            task.fault(f"command[{position}]", "is empty or has a character that no command can hold", "text")
        else:
            words.append(word)
    size = sum(len(word.encode()) + 1 for word in words)
    if size > MAX_COMMAND_BYTES:
        task.fault("command", f"has {size} bytes in all", f"{MAX_COMMAND_BYTES} bytes", f"{size} bytes")
    return tuple(words)


def _env(task: Fields) -> dict[str, str]:
    value = task.get("env")
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        task.fault("env", "must be a mapping of names to values: {LEVEL: debug}", "a mapping")
        return {}
    if len(value) > MAX_ENV_VARIABLES:
        task.fault("env", "has too many variables", MAX_ENV_VARIABLES, len(value))
        return {}
    env = {}
    for name, item in value.items():
        text = plain_text(item)
        fault = _env_fault(name, text)
        if fault:
            task.fault(f"env.{name[:80]}" if name.isprintable() else "env", *fault)
        elif text is not None:
            env[name] = text
    size = sum(len(name) + len(text.encode()) + 2 for name, text in env.items())
    if size > MAX_ENV_BYTES:
        task.fault("env", f"has {size} bytes in all", f"{MAX_ENV_BYTES} bytes", f"{size} bytes")
    return env


def _env_fault(name: str, text: str | None) -> tuple[str, str] | None:
    """Message and limit; never the value, which may be a secret."""
    if not _ENV_NAME.fullmatch(name):
        return "is no name of a variable", "letters, digits and _, not beginning with a digit"
    if RESERVED_ENV.fullmatch(name):
        return (
            "is set by Serai and may not be given",
            "not NVIDIA_*, CUDA_VISIBLE_DEVICES, CUDA_MPS_*, SERAI_*",
        )
    if text is None:
        return "must be text: put the value in quotes", "text"
    if not _storable(text):
        return "has a character that no variable can hold (NUL, or half of a pair)", "text"
    return None


def _storable(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _gpus(task: Fields) -> SliceRequest:
    value = task.get("gpus")
    if value is None:
        return SliceRequest()
    if not isinstance(value, Mapping):
        if isinstance(value, int) and not isinstance(value, bool):
            return SliceRequest(count=task.whole("gpus", 0, MAX_GPUS_PER_TASK, default=0))
        hint = "must be a whole number of GPUs, or a mapping such as {count: 1, memory: 20GiB, compute: 50%}"
        task.fault("gpus", hint, f"0 to {MAX_GPUS_PER_TASK}, or a mapping", value)
        return SliceRequest()
    gpus = Fields.of(value, task.at("gpus"), task.faults)
    gpus.refuse_unknown(("count", "memory", "compute", "model", "isolation"))
    others = [name for name in gpus.values if name != "count" and gpus.get(name) is not None]
    count = gpus.whole("count", 0, MAX_GPUS_PER_TASK, default=1)
    if count == 0 and others:
        gpus.fault("count", f"0 GPUs have no {others[0]}: leave gpus out", f"1 to {MAX_GPUS_PER_TASK}", 0)
    if count == 0:
        return SliceRequest()
    isolation = _isolation(gpus)
    return SliceRequest(
        count=count,
        memory_mib=gpus.parsed("memory", parse_size, None),
        compute_milli=_compute(gpus, isolation),
        model=gpus.text("model", most=MAX_MODEL_CHARACTERS, default=""),
        isolation=isolation,
    )


def _isolation(gpus: Fields) -> str:
    value = gpus.get("isolation")
    known = ", ".join(sorted(BACKENDS))
    if value is None:
        return ""
    if not isinstance(value, str) or value not in BACKENDS:
        gpus.fault("isolation", f"unknown; known are {known}", known, value)
        return ""
    if value == "exclusive" and (gpus.get("memory") is not None or gpus.get("compute") is not None):
        message = "exclusive gives whole GPUs: leave out memory and compute, or choose mps or timeslice"
        gpus.fault("isolation", message, "whole GPUs", value)
    return value


def _compute(gpus: Fields, isolation: str) -> int:
    if isolation == "mig" and gpus.get("compute") is None:
        return 1  # an instance brings its own compute and is given out as it is
    if gpus.get("memory") is not None and gpus.get("compute") is None:
        # Whoever gets memory alone would run without bound beside tasks that were charged for compute.
        message = "required with memory: which part of the GPU's compute, such as 50%"
        gpus.fault("compute", message, "0.1% to 100%")
        return WHOLE_GPU_MILLI
    return gpus.parsed("compute", parse_compute, WHOLE_GPU_MILLI)


def launch_bytes(task: TaskSpec) -> int:
    """An upper estimate of what one such task takes in the store."""
    items = [task.image, *task.command, *task.env, *task.env.values()]
    text = "".join(items)
    # JSON writes a control character, the costliest one, as six bytes; quotes and backslashes as two.
    own = len(text.encode()) + text.count('"') + text.count("\\") + 4 * len(items)
    own += 5 * len(_CONTROL.findall(text))
    may_be_mps = (
        task.gpus.count == 1 and (task.gpus.isolation or ("" if task.gpus.is_whole else "mps")) == "mps"
    )
    return own + LAUNCH_BYTES + LAUNCH_BYTES_PER_GPU * task.gpus.count + LAUNCH_BYTES_MPS * may_be_mps


def task_view(task: TaskSpec, *, mask: bool) -> dict[str, object]:
    """The task with the field names of a submitted one, without name and count."""
    return {
        "image": task.image,
        "command": list(task.command),
        "env": {name: MASK if mask else value for name, value in task.env.items()},
        "gpus": gpus_view(task.gpus),
        "cpu": int(cpu_text(task.cpu_milli)) if task.cpu_milli % 1000 == 0 else cpu_text(task.cpu_milli),
        "memory": size_text(task.memory_mib),
        "shm": size_text(task.shm_mib),
    }


def gpus_view(request: SliceRequest) -> dict[str, object] | None:
    """What was asked of GPUs; None for a task without any."""
    if request.count == 0:
        return None
    view: dict[str, object] = {"count": request.count}
    if request.memory_mib is not None:
        view["memory"] = size_text(request.memory_mib)
    if not request.is_whole:
        view["compute"] = compute_text(request.compute_milli)
    if request.model:
        view["model"] = request.model
    if request.isolation:
        view["isolation"] = request.isolation
    return view


__all__ = ["MASK", "TASK_FIELDS", "ValueInvalid", "gpus_view", "launch_bytes", "read_task", "task_view"]
