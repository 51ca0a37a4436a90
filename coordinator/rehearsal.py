"""Plans that are made and dropped, so that the first one that counts is as fast as all others.

Placement runs on compiled code. On a fresh install that is made when it is first used, which takes longer than a lease;
later it is read from its cache. So a process plans for a made-up cluster before anything depends on its event loop,
and a standby plans for the real one while it waits.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from coordinator import kernels
from coordinator.cluster import Cluster
from coordinator.config import Settings
from coordinator.cycle import plan_cycle
from coordinator.fairness import policy_from
from coordinator.gangs import place
from coordinator.index import Index
from coordinator.kernels import GPUS
from coordinator.market import keep_prices
from coordinator.model import InventorySeen, Job, JobSeen, JobState, ReportSeen, Tenant, TenantSeen
from coordinator.placement import Draft, Spot
from coordinator.prices import FEWEST_JOBS, size_prices, with_market
from coordinator.replica import Replica
from coordinator.snapshot import shape_of
from coordinator.soonest import Soonest
from coordinator.usage import NO_LIMIT, Headroom
from coordinator.worth import kind_of
from jobspecs.spec import JobSpec, TaskSpec
from vgpu.inventory import Gpu, Link, LinkLevel, NodeInventory, NodeReport
from vgpu.slices import SliceRequest

log = logging.getLogger("serai.rehearsal")

REHEARSE_SECONDS = 5.0
_CARD_MIB = 80 * 1024
_ASKED = (
    SliceRequest(1, 40 * 1024, 500),
    SliceRequest(1, 10 * 1024, 100),
    SliceRequest(1),
    SliceRequest(2),
    SliceRequest(8),
    SliceRequest(),
)


def load_compiled(*, is_installing: bool = False) -> None:
    """Everything that a cycle may call is compiled, or read from its cache, when this comes back."""
    cache = Path(kernels.catch_up.stats.cache_path)
    with one_at_a_time(cache):
        before, began = _compiled_files(cache), time.monotonic()
        if not before and not is_installing:
            log.warning(
                "no compiled code in %s: it is made now, which takes up to a minute, and only once. "
                "`serai coordinator --compile` does it when Serai is installed.",
                cache,
            )
        _plan_for_a_made_up_cluster()
        if new := _compiled_files(cache) - before:
            log.info("compiled %d functions into %s in %.1f s", len(new), cache, time.monotonic() - began)


def _compiled_files(cache: Path) -> set[tuple[str, int]]:
    """By name and time of writing."""
    return {(file.name, file.stat().st_mtime_ns) for file in cache.glob("*.nbc")}


@contextmanager
def one_at_a_time(cache: Path) -> Iterator[None]:
    """Of the processes that compile into this folder. The compiler names the code of a function in its index before it
    has replaced the file: after an upgrade in place, the other role of this coordinator, which starts at the same time,
    would find the former version's code under the new one's name. And what the one compiles the other need not."""
    try:
        lock = (cache / "serai.lock").open("w")
    except OSError as error:
        log.info("compiled code is not guarded: %s", error)  # nothing can be written there, so nothing is
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _plan_for_a_made_up_cluster() -> None:
    settings = Settings()
    cluster, policy, memo = Cluster(settings), policy_from(settings), Index()
    for name, gpus in (("a", 8), ("b", 8), ("more-than-rows-hold", 9)):
        cluster.apply(InventorySeen(_inventory(name, gpus)), 0)
        cluster.apply(ReportSeen(NodeReport(name, 1, 0, ())), 0)
    cluster.apply(TenantSeen(Tenant("t", 10 * _CARD_MIB)), 0)
    for number, asked in enumerate(_ASKED):
        for count in (1, 2):
            task = TaskSpec(count=count, image="i", gpus=asked)
            # A gang is placed by compiled code only where all of its nodes can be.
            constraints = {"kind": "small"} if count > 1 else {}
            spec = JobSpec("n", "t", (task,), constraints=constraints)
            job = Job(f"{count}{number}", spec, JobState.PENDING, 0, 0)
            cluster.apply(JobSeen(job, 1), 0)
    kinds = Counter({kind_of(asked, 1000): FEWEST_JOBS for asked in _ASKED})
    for _ in ("without prices", "with prices"):
        plan = plan_cycle(cluster.snapshot(1), policy, memo)
        for id in plan.waiting:
            plan.waiting[id]
        sizes = size_prices(kinds, _CARD_MIB)
        cluster.worth = with_market(sizes, kinds, *memo.market(sizes)) if sizes else None
    draft = Draft(cluster.snapshot(1), index=memo)  # nothing of what the plans placed is in it
    for job in cluster.waiting_jobs.values():
        for headroom in (NO_LIMIT, Headroom(1, 1)):
            place(draft, shape_of(job.spec), headroom)
    draft.fitting([shape_of(job.spec) for job in cluster.waiting_jobs.values()])
    _reserve(draft, list(cluster.waiting_jobs.values()))
    draft.hold(("a",))


def _reserve(draft: Draft, jobs: Sequence[Job]) -> None:
    """What frees soonest for each job once all of them have taken what they could."""
    taken: dict[str, list[tuple[Job, Spot]]] = {}
    for job in jobs:
        for spot in place(draft, shape_of(job.spec), NO_LIMIT) or ():
            draft.take([spot])
            taken.setdefault(spot.node, []).append((job, spot))
    for job in jobs:
        Soonest(draft, taken, shape_of(job.spec)).found()


async def rehearse(replica: Replica, settings: Settings, clock_ms: Callable[[], int], memo: Index) -> None:
    """What a standby does until it is cancelled: views of nodes, prices and the memo's answers are there when it wins."""
    policy, seen = policy_from(settings), -1
    prices = asyncio.create_task(keep_prices(replica, memo))
    try:
        while True:
            if replica.changes != seen:
                seen = replica.changes
                try:
                    plan_cycle(replica.cluster.snapshot(clock_ms()), policy, memo)
                except Exception:
                    log.exception("a rehearsal failed")  # it decides nothing, and must end nothing
            await asyncio.sleep(REHEARSE_SECONDS)
    finally:
        prices.cancel()


def _inventory(node: str, count: int) -> NodeInventory:
    gpus = tuple(
        Gpu(f"{node}{index}", index, "A100", _CARD_MIB, _CARD_MIB, ("/dev/null",), numa_node=index // 4)
        for index in range(count)
    )
    links = tuple(
        Link(first.uuid, second.uuid, LinkLevel.PCIE_SWITCH, 12)
        for first in gpus
        for second in gpus[first.index + 1 :]
    )
    labels = {"kind": "small" if count <= GPUS else "large"}
    return NodeInventory(node, node, "", gpus, links, 64_000, 512 * 1024, labels)
