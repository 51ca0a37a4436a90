"""`make bench-core`: how fast the real cycle decides, on the full path: snapshot, select, place, plan, reasons.

Nodes have 8 GPUs of 80 GiB in two NVLink groups, 192 cores, racks of 8 nodes, two GPU models, one in fifty cordoned.
Jobs are of the openb mix with memory drawn independently of compute; one in a hundred is a gang of 2 to 4 tasks, one in
ten is tied to a model, three priorities, 100 tenants. Modes:

    arrivals  500 new jobs before each cycle, until 95 % of the compute is given out or a cycle places nothing
    backlog   all jobs wait from the start
    single    one new job before each cycle
    steady    a full cluster with a queue: one departure and a cycle; cycles in which nothing fits; every row changed

Placements a second count snapshot and cycle; `with_events` also what the store's watch would deliver: each submitted
job and each placement applied. `cpu_us_per_placement` is processor time, which a neighbour disturbs less. One core
is used; run it pinned (`taskset -c 0`) on a noisy machine. Each run is a process of its own, so that `rss_mib` is the
most that one such cluster took. All figures are with the settings' own policy.

With several sizes it also draws how cost grows, `build/bench/core.png`.

    NODES=500,1000,4000,10000  WAITING=100000  MODES=arrivals,steady  DEPARTURES=1000  RUNS=1  SHAPES=openb|many
"""

from __future__ import annotations

import gc
import itertools
import os
import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random

from attrs import evolve
from msgspec.structs import replace

from coordinator import lifecycle
from coordinator.cluster import Cluster
from coordinator.config import Settings
from coordinator.cycle import Plan, plan_cycle
from coordinator.fairness import policy_from
from coordinator.index import Index
from coordinator.model import (
    AdminSeen,
    Event,
    InventorySeen,
    Job,
    JobGone,
    JobSeen,
    JobState,
    NodeAdmin,
    ReportSeen,
    Tenant,
    TenantSeen,
)
from coordinator.prices import Pricing
from coordinator.rehearsal import load_compiled
from coordinator.snapshot import shape_of
from coordinator.worth import Kind, kind_of
from jobspecs.spec import JobSpec, TaskSpec
from tests.benchmarks import record
from vgpu.inventory import Gpu, Link, LinkLevel, NodeInventory, NodeReport
from vgpu.slices import SliceRequest

CARD_MIB = 80 * 1024
MODELS = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3")
MODEL_WISHES = ("A100", "H100")
TENANTS = 100
BATCH = 500
FULL = 0.95
SINGLES = 500
# The sizes of openb's default mix and how many of its 8,152 pods have them: thousandths of one GPU, or whole ones.
FRACTIONS = {
    810: 1078,
    470: 750,
    320: 328,
    650: 253,
    230: 140,
    460: 128,
    550: 90,
    160: 80,
    590: 60,
    100: 60,
    50: 60,
}
WHOLES = {1: 3911, 2: 16, 4: 15, 8: 44}
CPU_ONLY = 1088
MEMORIES_GIB = (4, 8, 12, 20, 28, 40, 56, 72)


class World:
    """A cluster that is driven as the scheduler drives it, with its own clock."""

    def __init__(self, nodes: int, seed: int, many_shapes: bool = False) -> None:
        self.settings = Settings()
        self.policy = policy_from(self.settings)
        self.cluster = Cluster(self.settings)
        self.random = Random(seed)
        self.now_ms = 1_700_000_000_000
        self.index = Index()
        self._many = many_shapes
        self._specs: dict[tuple[object, ...], JobSpec] = {}
        self._count = self._revision = 0
        self.gpus = 8 * nodes
        for number in range(nodes):
            inventory = _node(number)
            self.see(InventorySeen(inventory), ReportSeen(NodeReport(inventory.node, 1, self.now_ms, ())))
            if number % 50 == 49:
                self.see(AdminSeen(NodeAdmin(inventory.node, cordoned=True)))
        for number in range(TENANTS):
            self.see(TenantSeen(Tenant(f"t{number:02}", self.gpus * CARD_MIB // TENANTS)))

    def see(self, *events: Event) -> None:
        for event in events:
            self.cluster.apply(event, self.now_ms)

    def jobs(self, count: int) -> Iterator[Job]:
        return (self._job() for _ in range(count))

    @property
    def shapes(self) -> int:
        """Of the jobs that were made."""
        return len({shape_of(spec) for spec in self._specs.values()})

    def submitted(self, job: Job) -> JobSeen:
        self._revision += 1
        return JobSeen(job, self._revision)

    def cycle(self) -> Plan:
        return plan_cycle(self.cluster.snapshot(self.now_ms), self.policy, self.index)

    def commit(self, plan: Plan) -> None:
        for placement in plan.placements:
            self.see(self.submitted(lifecycle.allocated(placement.job, placement.allocation)))

    def end(self, job: Job) -> None:
        self.see(JobGone(job.id, "jobs"))

    def price(self, jobs: Sequence[Job]) -> None:
        """As the scheduler does between cycles."""
        mix: dict[Kind, int] = {}
        for job in jobs:
            for task in job.spec.tasks:
                kind = kind_of(task.gpus, task.cpu_milli)
                mix[kind] = mix.get(kind, 0) + task.count
        pricing = Pricing()
        self.index.sync(self.cluster.snapshot(self.now_ms))
        pricing.refresh(mix, len(jobs), self.index.market, CARD_MIB)
        self.cluster.worth = pricing.worth

    def share_given(self) -> float:
        held = self.cluster.snapshot(self.now_ms).held
        return sum(use.compute for use in held.values()) / (1000 * self.gpus)

    def _job(self) -> Job:
        self._count += 1
        random = self.random
        tenant = f"t{random.randrange(TENANTS):02}"
        key = (tenant, random.choice((0, 0, 0, 0, 1, -1)), *self._shape())
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = _spec(*key)  # type: ignore[arg-type]
        id = f"{self._count:012}"
        return Job(id, spec, JobState.PENDING, self.now_ms, self.now_ms)

    def _shape(self) -> tuple[object, ...]:
        """(whole GPUs, thousandths, MiB, cores, model, tasks)"""
        random = self.random
        what = random.choices((0, 1, 2), (CPU_ONLY, sum(FRACTIONS.values()), sum(WHOLES.values())))[0]
        model = random.choice(MODEL_WISHES) if random.random() < 0.1 else ""
        if what == 0:
            return 0, 0, 0, random.choice((1, 4, 8, 16)), "", 1
        if what == 1:
            milli = random.choices(list(FRACTIONS), list(FRACTIONS.values()))[0]
            if self._many:  # one variant in ten is tied to a model: some 1,230 of them
                step = random.randrange(1, 112)
                variant = 11 * step + milli
                return 1, milli, 512 * step, 8, "" if variant % 10 else MODEL_WISHES[step % 2], 1
            return 1, milli, 1024 * random.choice(MEMORIES_GIB), 8, model, 1
        gpus = random.choices(list(WHOLES), list(WHOLES.values()))[0]
        tasks = random.randrange(2, 5) if random.random() < 0.02 else 1
        return gpus, 1000, None, 11 * gpus, model, tasks


def _node(number: int) -> NodeInventory:
    name = f"n{number:05}"
    model = MODELS[number % 2]
    gpus = tuple(Gpu(f"GPU-{name}-{n}", n, model, CARD_MIB, CARD_MIB, ("/dev/null",)) for n in range(8))
    links = tuple(
        Link(gpus[a].uuid, gpus[b].uuid, LinkLevel.SYSTEM, 4 if a // 4 == b // 4 else 0)
        for a in range(8)
        for b in range(a + 1, 8)
    )
    labels = {"zone": f"z{number // 800}", "rack": f"r{number // 8:04}"}
    isolations = ("exclusive", "mps", "timeslice")
    return NodeInventory(name, name, "1", gpus, links, 192_000, 1024 * 1024, labels, isolations)


def _spec(
    tenant: str, priority: int, gpus: int, milli: int, memory: int | None, cores: int, model: str, tasks: int
) -> JobSpec:
    request = SliceRequest(gpus, memory, milli, model) if gpus else SliceRequest()
    task = TaskSpec(count=tasks, image="x", gpus=request, cpu_milli=1000 * cores, memory_mib=4096)
    return JobSpec("job", tenant, (task,), priority)


def filled(world: World, mode: str, jobs: Iterator[Job], count: int) -> dict[str, float]:
    """Cycles until the cluster is full or nothing fits; seconds of snapshot and cycle, and those with events. Of the
    `count` jobs each is made when it is submitted: what the cluster does not hold is in nobody's memory."""
    batch = {"arrivals": BATCH, "backlog": count, "single": 1}[mode]
    placed, planned, applied, planned_cpu = 0, 0.0, 0.0, 0.0
    limit = SINGLES if mode == "single" else count
    while placed < limit:
        arrived = [world.submitted(job) for job in itertools.islice(jobs, batch)]
        start = time.perf_counter()
        world.see(*arrived)
        middle, middle_cpu = time.perf_counter(), time.process_time()
        plan = world.cycle()
        end, planned_cpu = time.perf_counter(), planned_cpu + time.process_time() - middle_cpu
        world.commit(plan)
        found = len(plan.placements)
        del plan  # as the scheduler lets go of a plan once it is committed, and no later cycle pays for it
        placed += found
        planned += end - middle
        if mode != "backlog" or placed > found:
            applied += middle - start
        applied += time.perf_counter() - end
        world.now_ms += 10
        if world.share_given() >= FULL or (not found and (mode == "backlog" or not arrived)):
            break
    return {
        "placed": placed,
        "planned": planned,
        "with_events": planned + applied,
        "planned_cpu": planned_cpu,
    }


def percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def steady(world: World, waiting: int, departures: int) -> dict[str, float]:
    """A full cluster, and so many more jobs: figures in milliseconds."""
    for job in world.jobs(waiting):
        world.see(world.submitted(job))
    while (plan := world.cycle()).placements:
        world.commit(plan)
    gc.collect()
    gc.freeze()  # as a leader does once it has read the state
    gone, nothing, gone_cpu = [], [], []
    for _ in range(departures):
        job = world.random.choice(list(world.cluster.live_jobs.values()))
        start, start_cpu = time.perf_counter(), time.process_time()
        world.end(job)
        plan = world.cycle()
        gone.append(1000 * (time.perf_counter() - start))
        gone_cpu.append(1000 * (time.process_time() - start_cpu))
        world.commit(plan)
        world.commit(world.cycle())
        start = time.perf_counter()
        world.cycle()
        nothing.append(1000 * (time.perf_counter() - start))
        world.now_ms += 10
    return {
        "departure_p50_ms": percentile(gone, 50),
        "departure_cpu_p50_ms": percentile(gone_cpu, 50),
        "departure_p99_ms": percentile(gone, 99),
        "nothing_fits_p99_ms": percentile(nothing, 99),
        "all_changed_ms": _all_changed(world),
    }


def _all_changed(world: World) -> float:
    """Every node loses a little of its memory at once, between two cycles."""
    snapshot = world.cluster.snapshot(world.now_ms)
    nodes = {
        name: replace(view, row=view.row._replace(memory_mib=view.row.memory_mib - 1))
        for name, view in snapshot.nodes.items()
    }
    changed = evolve(snapshot, nodes=nodes)
    start = time.perf_counter()
    plan_cycle(changed, world.policy, world.index)
    return 1000 * (time.perf_counter() - start)


def ready_seconds(world: World) -> float:
    """An index from nothing, with what waits answered once; compiled code comes from the cache."""
    world.index = Index()
    start = time.perf_counter()
    world.cycle()
    return time.perf_counter() - start


def measured(nodes: int, mode: str, waiting: int, departures: int, seed: int, many: bool) -> record.Row:
    world = World(nodes, seed, many)
    count = max(waiting, 16 * nodes) if mode != "steady" else 12 * nodes
    first = [*world.jobs(min(count, 5000))]
    world.price(first)
    jobs = itertools.chain(first, world.jobs(count - len(first)))
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)
    row: dict[str, record.Value] = {
        "nodes": nodes,
        "waiting": waiting,
        "mode": mode,
        "ready_seconds": round(ready_seconds(world), 3),
    }
    if mode == "steady":
        filled(world, "arrivals", jobs, count)
        found = steady(world, waiting, departures)
        row |= {name: round(value, 3) for name, value in found.items()}
    else:
        found = filled(world, mode, jobs, count)
        row["placed"] = int(found["placed"])
        row["given_percent"] = round(100 * world.share_given(), 1)
        row["placements_per_second"] = round(found["placed"] / found["planned"])
        row["with_events_per_second"] = round(found["placed"] / found["with_events"])
        row["cpu_us_per_placement"] = round(1e6 * found["planned_cpu"] / found["placed"], 1)
    row["shapes"] = world.shapes
    row["rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return row


def main() -> None:
    nodes = [int(n) for n in (os.environ.get("NODES") or "500,1000").split(",")]
    modes = (os.environ.get("MODES") or "arrivals,backlog,single,steady").split(",")
    waiting = int(os.environ.get("WAITING") or 5000)
    departures = int(os.environ.get("DEPARTURES") or 1000)
    runs = int(os.environ.get("RUNS") or 1)
    many = os.environ.get("SHAPES") == "many"
    rows: list[record.Row] = []
    alone = ProcessPoolExecutor(1, get_context("spawn"), load_compiled, max_tasks_per_child=1)
    with alone:  # nothing is left of those before in the memory that a row tells
        for count in nodes:
            for mode in modes:
                tries = [(count, mode, waiting, departures, seed, many) for seed in range(runs)]
                rows.append(_best([*alone.map(measured, *zip(*tries, strict=True))]))
                print(f"{count} nodes, {mode}: done", flush=True)
                record.write("core", rows, record.machine("numpy", "numba", "attrs"))
    print(record.table(rows, _COLUMNS))
    if len(nodes) > 1:
        print(f"how cost grows: {drawn(rows)}")


def drawn(rows: list[record.Row]) -> Path:
    """How cost grows with the cluster, both axes logarithmic: what follows the dotted line grows as the cluster does."""
    import matplotlib.pyplot as plt  # only here: it takes memory, which is one of the figures

    figure, axes = plt.subplots(figsize=(8, 6))
    for mode, name, label in _CURVES:
        points = [(row["nodes"], row[name]) for row in rows if row["mode"] == mode and name in row]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    nodes = sorted({float(row["nodes"]) for row in rows})
    axes.plot(nodes, [nodes_ / nodes[0] for nodes_ in nodes], ":", color="grey", label="as the cluster")
    axes.set(xscale="log", yscale="log", xlabel="nodes of 8 GPUs", ylabel="ms; us for a placement")
    axes.legend()
    axes.grid(visible=True, which="both", alpha=0.3)
    path = record.FOLDER / "core.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _best(rows: list[record.Row]) -> record.Row:
    """The best of the runs, figure by figure: machines are shared, and a neighbour only ever costs."""
    best = dict(rows[0])
    for name in best:
        values = [row[name] for row in rows]
        if name.endswith("_per_second"):
            best[name] = max(values)  # type: ignore[type-var]
        elif name.endswith(("_ms", "_seconds", "cpu_us_per_placement")):
            best[name] = min(values)  # type: ignore[type-var]
    return best


# (mode, field, what it is)
_CURVES = (
    ("arrivals", "cpu_us_per_placement", "a placement, us"),
    ("steady", "departure_p50_ms", "cycle after a departure, p50"),
    ("steady", "departure_p99_ms", "cycle after a departure, p99"),
    ("steady", "nothing_fits_p99_ms", "cycle in which nothing fits, p99"),
    ("steady", "all_changed_ms", "every node changed"),
)
_COLUMNS = (
    "nodes", "shapes", "waiting", "mode", "placements_per_second", "with_events_per_second", "cpu_us_per_placement",
    "departure_p50_ms", "departure_p99_ms", "nothing_fits_p99_ms", "all_changed_ms", "ready_seconds", "rss_mib",
)  # fmt: skip


if __name__ == "__main__":
    main()
