"""The one sentence of a reason, in words of a user; API, CLI, page, event and log all show this one.

Which numbers a reason carries grows with the code that makes it, so a sentence is built from what is there:

- A template may name numbers (`{needed_memory_mib|memory_mib}`; `{a|b}` is the first of two that is there), `{subject}` (the
  first), `{subjects}`, `{others}` (all but the first) and `{detail}`. A part in square brackets is left out when a
  name in it has nothing to show; every name stands in such a part.
- Counts of nodes, under the names of the filters that turned them away, make "of 12 nodes 9 ..., 3 ...".
- A number that no template names is added at the end, with its name and unit, so that nothing is lost; only what was
  asked for and is free elsewhere stays away from a sentence about something else.

Sizes and counts are never shown below 0: what is overdrawn is said in words by a number of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from vgpu.reasons import Reason, ReasonCode

_C = ReasonCode

TEMPLATES: Mapping[ReasonCode, str] = {
    # a spec that is refused
    _C.UNKNOWN_FIELD: "unknown field[ {subject}][: {detail}]",
    _C.MISSING_FIELD: "a field is missing[: {subjects}][ ({detail})]",
    _C.BAD_VALUE: "a value is not allowed[ in {subject}][: {detail}]",
    # can never run
    _C.NO_SUCH_GPU: "can never run here: no node has such a GPU[ ({subjects})]; `serai nodes` shows the models",
    _C.TASK_LARGER_THAN_ANY_NODE: (
        "can never run here: one task needs more than any node has[ ({detail})]"
        "[; it needs {needed_gpus|gpus}][, the largest node has {largest_gpus}]"
        "[; it needs {needed_cpu_milli|cpu_milli}][, the largest such node has {largest_cpu_milli}]"
        "[; it needs {needed_node_memory_mib|node_memory_mib} of memory]"
        "[, the largest such node has {largest_node_memory_mib}]; split it into more tasks"
    ),
    _C.SLICE_LARGER_THAN_ANY_GPU: (
        "can never run here: the slice is larger than any GPU"
        "[; it needs {needed_memory_mib|memory_mib} of GPU memory]"
        "[, the largest GPU has {largest_memory_mib|largest_gpu_memory_mib}]"
        "[; it needs {needed_compute_milli|compute_milli} of a GPU][, the largest has {largest_compute_milli}]"
    ),
    _C.JOB_LARGER_THAN_CLUSTER: (
        "can never run here: the job needs more than the whole cluster has[ ({detail})]"
        "[; it needs {needed_gpus|gpus}][, the cluster has {cluster_gpus}]"
        "[; it needs {needed_memory_mib|memory_mib} of GPU memory][, the cluster has {cluster_memory_mib}]"
    ),
    _C.JOB_LARGER_THAN_LIMIT: (
        "can never run: the job alone exceeds the limit of its tenant[ {subject}]"
        "[; it needs {needed_memory_mib|memory_mib} of GPU memory][, the limit is {limit_memory_mib}]"
        "[; it needs {needed_compute_milli|compute_milli} of GPUs][, the limit is {limit_compute_milli}]"
        "; ask an administrator for a higher limit, or make the job smaller"
    ),
    # does not fit now: the same words serve one node and the whole cluster
    _C.NODE_NOT_READY: (
        "the node[ {subject}] has not reported[ for {silent_seconds}]"
        "[; {silent_nodes} nodes fell silent together, so it is not given up: look at etcd and the network][: {detail}]"
    ),
    _C.NODE_CORDONED: "the node[ {subject}] takes no new work (cordoned)[: {detail}]",
    _C.NODE_CLOSED: "the node[ {subject}] is closed to new work[: {detail}]",
    _C.LABELS_DIFFER: "none[ of {nodes}] has the labels that are asked for[ ({subjects})]",
    _C.GPU_MODEL_DIFFERS: "no free node has the GPU model that is asked for[ ({subjects})]",
    _C.NO_ISOLATION: "the GPU cannot be cut that way[ ({subjects})][: {detail}]",
    _C.NOT_ENOUGH_IDLE_GPUS: "too few idle GPUs[: needs {needed_gpus|gpus}][, {idle_gpus} idle]",
    _C.NOT_ENOUGH_TOTAL_MEMORY: (
        "too little free GPU memory in all[: needs {needed_memory_mib|memory_mib}][, {free_memory_mib} free]"
    ),
    _C.NOT_ENOUGH_DISTINCT_GPUS: (
        "the slices need different GPUs[: needs {needed_gpus|gpus}][, {free_gpus} have room][, the node has {gpus}]"
    ),
    _C.NOT_ENOUGH_GPU_MEMORY: (
        "too little free GPU memory[: needs {needed_memory_mib|memory_mib}][, largest free piece {largest_free_memory_mib}]"
    ),
    _C.NOT_ENOUGH_GPU_COMPUTE: (
        "too little free GPU compute[: needs {needed_compute_milli|compute_milli}]"
        "[, largest free piece {largest_free_compute_milli}]"
    ),
    _C.NOT_ENOUGH_CPU: "too little free CPU[: needs {needed_cpu_milli|cpu_milli}][, at most {largest_free_cpu_milli} free]",
    _C.NOT_ENOUGH_NODE_MEMORY: (
        "too little free memory on the node[: needs {needed_node_memory_mib|node_memory_mib}]"
        "[, at most {largest_free_node_memory_mib} free]"
    ),
    _C.GANG_DOES_NOT_FIT: (
        "waits: its tasks[, {tasks} in all,] start together or not at all, and they do not fit now"
    ),
    # the tenant's turn and limits
    _C.OVER_LIMIT: (
        "waits: its tenant[ {subject}] is at its limit"
        "[: it holds {held_memory_mib} of GPU memory][ of at most {limit_memory_mib}]"
        "[, the job needs {needed_memory_mib}]"
        "[; it holds {held_compute_milli} of a GPU][ of at most {limit_compute_milli}]"
        "[, the job needs {needed_compute_milli}]"
    ),
    _C.BEHIND_OTHER_TENANTS: "waits: it is the turn of other tenants[: {subjects}][; {placed_before} jobs were placed before it]",
    _C.BEHIND_OWN_JOBS: "waits: other jobs of its tenant go first[, {placed_before} just now][ (tenant {subject})]",
    _C.HELD_FOR_LONG_WAIT: "waits: free GPUs are kept for a job that has waited longer[: {subject}]",
    _C.RESERVED: "waits: the GPUs that free soonest are reserved for it[, in {due_seconds} at the latest][ ({subjects})]",
    _C.RESERVED_FOR_OTHER: (
        "waits: what it needs is reserved for job[ {subject}], whose tenant is owed it"
        "[; that starts in {due_seconds} at the latest, and what ends before goes first]"
    ),
    _C.BORROWING_STOPPED: (
        "waits: its tenant[ {others}] holds its share, and borrows nothing more while job[ {subject}] of a tenant that is owed waits"
    ),
    _C.NO_NODES: "waits: the cluster has no nodes yet; start an agent on each GPU machine with `serai agent`",
    _C.BACK_OFF: "waits[ {seconds|back_off_seconds}] before it is tried again[, after failure {failures}][: {detail}]",
    _C.NODES_REFUSED: (
        "waits for another node: what has room now would not start it before[: {subjects}][ ({detail})]"
        "[; tried there again in {seconds|wait_seconds}]"
    ),
    _C.INTERNAL_ERROR: (
        "waits: Serai failed on this job and goes on without it[: {detail}]; it is tried again[ after {retry_seconds}]; "
        "the log of the leading coordinator tells operators what to report"
    ),
    # what happened to a job
    _C.SUBMITTED: "submitted[ by {subject}]",
    _C.CHOSEN: (
        "the turn of its tenant[ {subject}][: priority {priority_millionths}]"
        "[ = space share {space_millionths}][ - time share {time_millionths}][: {detail}]"
    ),
    _C.EVICTED: "stopped to make room, and goes back into the queue[: {detail}]",
    _C.PLACED: (
        "placed[ on {subjects}][: {gpus}][, communication cost {communication_cost}]"
        "[, {idle_gpus_before} idle there before][: {detail}]"
    ),
    _C.ENGINE_UNAVAILABLE: "waits until the engine that runs containers can start it[: {detail}]",
    _C.STARTED: "started[ on {subjects}]",
    _C.ENDED: "ended[ after {ran_seconds}]",
    _C.EXIT_CODE: "exited[ with code {exit_code}][ (task {task})][: {detail}]",
    _C.SIGNALLED: "ended[ by signal {signal}][ (task {task})][: {detail}]",
    _C.OUT_OF_MEMORY: (
        "[task {task}: ]ran out of memory[; its limit was {limit_memory_mib}]; ask for more memory[ ({detail})]"
    ),
    _C.IMAGE_UNAVAILABLE: "the image[ {subject}] could not be had; check its name and tag[: {detail}]",
    _C.LAUNCH_FAILED: "could not be started[ (task {task})][: {detail}]",
    _C.LAUNCH_DEADLINE: "did not start in time[ ({limit_seconds})][: {detail}]",
    _C.TIME_LIMIT: "stopped: it ran as long as its max_runtime allows[ ({limit_seconds})]",
    _C.CANCELLED_BY_USER: "cancelled[ by {subject}][; {held_reservation} reservation went with it]",
    _C.NODE_LOST: "node lost[: {subjects}][ (silent for {silent_seconds})]",
    _C.GPU_LOST: "a GPU was lost while the job ran[: {subjects}][ ({detail})]",
    _C.SIBLING_FAILED: "stopped, since another task of the job failed[ (task {task})]",
    _C.ISOLATION_STEPS_FAILED: "the node could not prepare the slice[: {detail}]",
    _C.ENGINE_REFUSED: "the engine that runs containers refused it[ ({subjects})][: {detail}]",
    _C.STOP_UNCONFIRMED: (
        "asked to stop[ {limit_seconds} ago], but its end is not confirmed[ by {subjects}]; its GPUs stay taken"
    ),
    _C.TASK_VANISHED: "[task {task}: ]its container is gone, and nobody saw how it ended[ ({subjects})][: {detail}]",
    # what keeps a GPU or a node from work
    _C.GPU_UNHEALTHY: "the GPU[ {subject}] is not healthy[: {detail}]",
    _C.GPU_IN_MIG_MODE: "the GPU[ {subject}] is divided into MIG instances and is not given out whole",
    _C.GPU_OCCUPIED: "the GPU[ {subject}] is in use by something else[: {others}][ ({detail})]",
    _C.GPU_CLAIMED_TWICE: "the GPU[ {subject}] is claimed twice[: {others}]; it takes no work until that is settled",
    _C.ALLOCATION_UNREADABLE: (
        "a record of what runs here cannot be read[: {subjects}]; it takes no new work until that is repaired"
    ),
}

# A filter's words for one node, for several, and the numbers that belong to it.
_FILTERS: Mapping[str, tuple[str, str, str]] = {
    "node_not_ready": ("is not ready", "are not ready", ""),
    "node_cordoned": ("is cordoned", "are cordoned", ""),
    "node_closed": ("is closed to new work", "are closed to new work", ""),
    "labels_differ": ("has other labels", "have other labels", ""),
    "gpu_model_differs": ("has another GPU model", "have another GPU model", ""),
    "no_isolation": ("cannot cut a GPU that way", "cannot cut a GPU that way", ""),
    "not_enough_idle_gpus": (
        "has too few idle GPUs",
        "have too few idle GPUs",
        "[needs {needed_gpus|gpus}][, at most {largest_idle_gpus} idle]",
    ),
    "not_enough_total_memory": (
        "lacks GPU memory in all",
        "lack GPU memory in all",
        "[{total_free_memory_mib} free in all, ][needs {needed_memory_mib|memory_mib} on each of {needed_gpus|gpus}]",
    ),
    "not_enough_distinct_gpus": (
        "has too few different GPUs with room",
        "have too few different GPUs with room",
        "[needs {needed_gpus|gpus}]",
    ),
    "not_enough_gpu_memory": (
        "lacks GPU memory",
        "lack GPU memory",
        "[largest free piece {largest_free_memory_mib}, ][{total_free_memory_mib} free in all, ]"
        "[needs {needed_memory_mib|memory_mib}]",
    ),
    "not_enough_gpu_compute": (
        "lacks GPU compute",
        "lack GPU compute",
        "[largest free piece {largest_free_compute_milli}, ][{total_free_compute_milli} free in all, ]"
        "[needs {needed_compute_milli|compute_milli}]",
    ),
    "not_enough_cpu": (
        "lacks CPU",
        "lack CPU",
        "[at most {largest_free_cpu_milli} free, ][needs {needed_cpu_milli|cpu_milli}]",
    ),
    "not_enough_node_memory": (
        "lacks memory",
        "lack memory",
        "[at most {largest_free_node_memory_mib} free, ][needs {needed_node_memory_mib|node_memory_mib}]",
    ),
    "gpu_unhealthy": ("has unhealthy GPUs", "have unhealthy GPUs", ""),
    "gpu_in_mig_mode": ("has its GPUs in MIG mode", "have their GPUs in MIG mode", ""),
    "gpu_occupied": ("has its GPUs in use", "have their GPUs in use", ""),
    "allocation_unreadable": ("has a record that cannot be read", "have records that cannot be read", ""),
}

# What was asked for and what is free beside it: told where a filter is about it, and left out elsewhere.
_ASKED = {
    "tasks", "gpus", "memory_mib", "compute_milli", "cpu_milli", "node_memory_mib", "largest_free_memory_mib",
    "largest_free_compute_milli", "total_free_memory_mib", "total_free_compute_milli",
}  # fmt: skip

_PART = re.compile(r"\[([^\]]*)\]")
_NAME = re.compile(r"\{(\w+)(?:\|(\w+))?\}")
_LONGEST_DETAIL = 500
_SHOWN_SUBJECTS = 8


_WITH_COUNTS = (ReasonCode.GANG_DOES_NOT_FIT, ReasonCode.HELD_FOR_LONG_WAIT, ReasonCode.RESERVED)


def sentence(reason: Reason) -> str:
    """One line of English without a full stop, for every reason that there is."""
    used: set[str] = set()
    counts = {name: count for name, count in reason.numbers.items() if name in _FILTERS and count > 0}
    if counts:
        used |= {"nodes", *(name for name in reason.numbers if name in _FILTERS)}
        text = _turned_away(reason, counts, used)
    else:
        text = _fill(TEMPLATES[reason.code], reason, used)
        if len(reason.subjects) == reason.numbers.get("nodes"):
            used.add("nodes")  # they have been named, each of them
    rest = [_named(name, value) for name, value in reason.numbers.items() if name not in used]
    return f"{text} ({', '.join(rest)})" if rest else text


def _turned_away(reason: Reason, counts: Mapping[str, int], used: set[str]) -> str:
    nodes = max(reason.numbers.get("nodes", 0), *counts.values())
    parts = []
    for name in _FILTERS:  # in the order in which placement asks, whatever the order of the numbers
        if name not in counts:
            continue
        one, several, numbers = _FILTERS[name]
        figures = _fill(numbers, reason, used).strip(", ")
        words = one if counts[name] == 1 else several
        parts.append(f"{counts[name]} {words}" + (f" ({figures})" if figures else ""))
    used |= _ASKED
    has_words = reason.code in _WITH_COUNTS
    head = _fill(TEMPLATES[reason.code], reason, used) if has_words else "waits"
    whole = nodes if "nodes" in reason.numbers else sum(counts.values())
    text = f"{head}: of {whole} {'node' if whole == 1 else 'nodes'} {', '.join(parts)}"
    asked = ", ".join(reason.subjects[:_SHOWN_SUBJECTS])
    if asked and reason.code in (
        ReasonCode.LABELS_DIFFER,
        ReasonCode.GPU_MODEL_DIFFERS,
        ReasonCode.NO_ISOLATION,
    ):
        text += f"; asked for {asked}"
    return text


def _fill(template: str, reason: Reason, used: set[str]) -> str:
    def part(match: re.Match[str]) -> str:
        names = [
            other if other in reason.numbers and name not in reason.numbers else name
            for name, other in _NAME.findall(match[1])
        ]
        values = [_value(name, reason) for name in names]
        if not all(values):
            return ""
        used.update(names)
        following = iter(values)
        return _NAME.sub(lambda _: next(following), match[1])

    return _PART.sub(part, template)


def _value(name: str, reason: Reason) -> str:
    subjects = reason.subjects
    if name == "subject":
        return subjects[0] if subjects else ""
    if name == "subjects":
        return _listed(subjects)
    if name == "others":
        return _listed(subjects[1:])
    if name == "detail":
        detail = " ".join(reason.detail.split())  # text from elsewhere may have several lines
        return detail if len(detail) <= _LONGEST_DETAIL else detail[:_LONGEST_DETAIL] + "…"
    return _with_unit(name, reason.numbers[name]) if name in reason.numbers else ""


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - _SHOWN_SUBJECTS
    return ", ".join(names[:_SHOWN_SUBJECTS]) + (f" and {more} more" if more > 0 else "")


def _with_unit(name: str, value: int) -> str:
    if name.endswith("_millionths"):
        return _fraction(value, 6)  # a share may be negative: the tenant is above its quota
    if name == "exit_code":
        return str(value)
    value = max(0, value)
    if name.endswith("_mib"):
        return f"{value} MiB"
    if name.endswith("cpu_milli"):
        return f"{_fraction(value, 3)} cores"
    if name == "nodes":
        return "1 node" if value == 1 else f"{value} nodes"
    if name.endswith("_milli"):
        return f"{_fraction(value, 1)}%"
    if name == "seconds" or name.endswith("_seconds"):
        return _duration(value)
    if name.endswith("gpus") or name == "idle_gpus_before":
        return f"{value} GPU" if value == 1 else f"{value} GPUs"
    return str(value)


def _named(name: str, value: int) -> str:
    words = re.sub(r"_(mib|milli|seconds|millionths|gpus)$", "", name).replace("_", " ")
    return f"{words} {_with_unit(name, value)}"


def _fraction(value: int, digits: int) -> str:
    """`value` / 10^digits, exactly, without idle zeros."""
    whole, part = divmod(abs(value), 10**digits)
    text = f"{whole}.{part:0{digits}d}".rstrip("0").rstrip(".")
    return f"-{text}" if value < 0 and text != "0" else text


def _duration(seconds: int) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            rest = seconds % length
            return f"{seconds // length} {unit}" + (f" {_duration(rest)}" if rest else "")
    return f"{seconds} s"
