"""What has to be written for each decision about a job: pure functions from a decision to an `Intent`.

placement    queue/ -> jobs/ with the allocation, one grant for each node
transition   an end or a new attempt: jobs/ -> done/ or queue/, its grants and task records go;
             a stop: the record says why, its grants ask the nodes to end it
reason       the record learns why the job waits, in the queue or for its engine, for whoever reads etcd
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve
from msgspec.structs import replace

from coordinator.commit import Intent
from coordinator.lifecycle import Transition, allocated, check_complete
from coordinator.model import Allocation, Job, UsageHour
from coordinator.records import (
    Unreadable,
    decode,
    encode,
    folder_key,
    grant_key,
    job_key,
    queue_key,
    task_key,
    usage_key,
)
from coordinator.store import Compare, Delete, KeyValue, Put, Write, unchanged
from jobspecs.container import Grant
from jobspecs.render import grants_for
from vgpu.inventory import NodeInventory
from vgpu.reasons import Reason, ReasonCode

# A job that is retried for ever must not grow its record without end; the newest happenings are kept.
HISTORY_LENGTH = 50
HOURS_PER_INTENT = 50

Keys = Mapping[str, KeyValue]


def placement_intent(
    job: Job,
    allocation: Allocation,
    inventories: Mapping[str, NodeInventory],
    keys: Keys,
    *,
    engine: str,
    cluster: str,
) -> Intent | None:
    """None when the waiting record is not there any more, as after a cancel that was seen since the snapshot. Raises
    `AllocationIncomplete`: nothing is written, above all no grant that would start a job on GPUs that it does not hold."""
    waiting = queue_key(job.tenant, job.id)
    if waiting not in keys:
        return None
    check_complete(job, allocation, inventories)
    grants = grants_for(
        job.id, job.spec, allocation, inventories, engine=engine, cluster=cluster, ran_ms=job.ran_ms
    )
    # In this order: whoever folds it sees a job that was placed, and never one that is nowhere.
    writes: list[Write] = [
        Put(job_key(job.id), encode(_trimmed(allocated(job, allocation)))),
        Delete(waiting),
    ]
    writes += [Put(grant_key(grant.node, grant.job, grant.attempt), encode(grant)) for grant in grants]
    return Intent(job.id, (unchanged(waiting, keys[waiting].mod_revision),), tuple(writes))


def transition_intent(transition: Transition, keys: Keys, most_writes: int) -> Intent | None:
    """None when the record has gone since the snapshot. Of a job with more task records than a transaction takes, some
    stay behind its end; nothing reads them any more, and the sweep deletes them."""
    before, after = transition.before, transition.after
    old, new = folder_key(before), folder_key(after)
    if old not in keys:
        return None
    compare = unchanged(old, keys[old].mod_revision)
    writes: list[Write] = [Put(new, encode(_trimmed(after)))]
    if new != old:
        writes.append(Delete(old))
    if after.allocation is None:
        writes += [Delete(key) for key in _attempt_keys(before, keys)[: most_writes - len(writes)]]
    elif transition.stop:
        writes += _stop_writes(after, keys)
    return Intent(before.id, (compare,), tuple(writes))


def usage_intents(hours: Sequence[UsageHour]) -> list[Intent]:
    """A few tenants' hours in each, so that any number of tenants fits."""
    puts = [Put(usage_key(hour.tenant, hour.hour_ms), encode(hour)) for hour in hours]
    parts = (puts[start : start + HOURS_PER_INTENT] for start in range(0, len(puts), HOURS_PER_INTENT))
    return [Intent("", (), tuple(part)) for part in parts]


def reason_intent(job: Job, reason: Reason | None, keys: Keys) -> Intent | None:
    key = folder_key(job)
    if key not in keys:
        return None
    compare: Compare = unchanged(key, keys[key].mod_revision)
    return Intent(job.id, (compare,), (Put(key, encode(replace(job, reason=reason))),))


def grants_of(job: Job, keys: Keys) -> tuple[Grant, ...]:
    """The grants of a live job that can be read; one that cannot is the agent's to report."""
    found = []
    for node in job.allocation.nodes if job.allocation else ():
        item = keys.get(grant_key(node, job.id, job.attempt))
        try:
            if item is not None:
                found.append(decode(Grant, item.value))
        except Unreadable:
            continue
    return tuple(found)


def _trimmed(job: Job) -> Job:
    return replace(job, history=job.history[-HISTORY_LENGTH:])


def _attempt_keys(job: Job, keys: Keys) -> list[str]:
    """Grants first: they must go with the end, since nothing that is over may hold one."""
    if job.allocation is None:
        return []
    grants = [grant_key(node, job.id, job.attempt) for node in job.allocation.nodes]
    tasks = [task_key(task.node, job.id, job.attempt, task.task) for task in job.allocation.tasks]
    return [key for key in (*grants, *tasks) if key in keys]


def _stop_writes(job: Job, keys: Keys) -> list[Write]:
    why = (job.stop or Reason(ReasonCode.CANCELLED_BY_USER)).code.value
    return [
        Put(grant_key(grant.node, job.id, job.attempt), encode(evolve(grant, stopping=True, stop_reason=why)))
        for grant in grants_of(job, keys)
        if not grant.stopping
    ]
