"""`make bench-links`: what placement costs jobs that talk, on a made-up cluster with links, while jobs come and go.

64 nodes of 8 GPUs in racks of four to eight: three in four have two NVLink groups of four, the others have PCIe alone.
Jobs are drawn from openb (`multigpu50`: a pod of k GPUs is one task on one node) and from Philly (k GPUs are a gang of k
tasks), and last exponentially long. A job comes as soon as less than the load is given out, the next end makes room
first; who finds no room is dropped. Placement is Serai's own (`gangs.place` on snapshots of a `Cluster`, with learned
prices), against the node with the least left and its first GPUs, and against chance, on the same jobs with the same
lifetimes.

    cost_of_pair    mean cost of a pair of GPUs of a job (`vgpu.topology.TopologyCosts`), over jobs of several GPUs
    cost_of_job     mean of all pairs of a job together
    one_group       percentage of jobs of 2 to 4 GPUs that lie in one NVLink group
    one_node        percentage of jobs of 2 to 8 GPUs that lie on one node
    step_time       of jobs of 2 to 4 GPUs, as measured for six models by how many nodes they lie on; 1 is on one node
    groups_whole    percentage of the NVLink groups in which no GPU is in use
    refused         percentage of the GPUs that were asked for by jobs of several GPUs and found no room

    MIXES=openb,philly  LOADS=50,70,90  POLICIES=serai,bestfit,random  SEEDS=2  JOBS=3000  TRACES_FOLDER=...
"""

from __future__ import annotations

import csv
import gzip
import heapq
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from statistics import mean, median

from attrs import define, field, frozen

from coordinator import gangs, lifecycle
from coordinator.cluster import Cluster
from coordinator.config import Settings
from coordinator.fit import Fit
from coordinator.index import Index
from coordinator.model import Allocation, InventorySeen, Job, JobGone, JobSeen, JobState, ReportSeen
from coordinator.nodes import Row
from coordinator.placement import Draft, Spot
from coordinator.prices import Pricing
from coordinator.snapshot import Shape, TaskShape, shape_of
from jobspecs.spec import JobSpec, TaskSpec
from tests.benchmarks import openb, record
from vgpu import isolation
from vgpu.inventory import WHOLE_GPU_MILLI, Gpu, Link, LinkLevel, NodeInventory, NodeReport
from vgpu.reasons import Reason
from vgpu.slices import SliceRequest

DATA = Path(__file__).parent / "data"
POLICIES = ("serai", "bestfit", "random")
NODES = 64
GROUP = 4
GPUS = 8
RACKS = (8, 6, 4, 7, 5)  # nodes of each rack, over and over
PRICES_EVERY = 250
SAMPLED_EVERY = 10


@frozen
class Arrival:
    """`lifetime` in mean lifetimes."""

    spec: JobSpec
    shape: Shape
    lifetime: float

    @property
    def gpus(self) -> int:
        return sum(task.count * task.gpus.count for task in self.shape.tasks)

    @property
    def milli(self) -> int:
        return sum(task.count * task.gpus.count * task.gpus.compute_milli for task in self.shape.tasks)


def arrivals(mix: str, count: int, seed: int) -> list[Arrival]:
    random = Random(seed)
    specs = _openb_specs() if mix == "openb" else _philly_specs()
    kinds = [(spec, shape_of(spec)) for spec in specs]
    return [Arrival(*random.choice(kinds), random.expovariate(1.0)) for _ in range(count)]


def _openb_specs() -> list[JobSpec]:
    pods = openb.pods_of("multigpu50" if openb.folder() else openb.SAMPLE)
    return [_spec(pod) for pod in pods if pod.gpus]


@cache
def _spec(pod: openb.Pod) -> JobSpec:
    if pod.milli == openb.WHOLE:
        request = SliceRequest(pod.gpus)
    else:
        request = SliceRequest(pod.gpus, pod.gpu_mib, pod.milli)
    task = TaskSpec(image="x", gpus=request, cpu_milli=pod.cpu_milli, memory_mib=pod.memory_mib)
    return JobSpec("job", "t", (task,))


def _philly_specs() -> list[JobSpec]:
    with gzip.open(DATA / "philly_small.csv.gz", "rt") as lines:
        counts = [int(row["num_gpus"]) for row in csv.DictReader(lines)]
    known = {
        gpus: JobSpec(
            "job",
            "t",
            (TaskSpec(count=gpus, image="x", gpus=SliceRequest(1), cpu_milli=4000, memory_mib=4096),),
        )
        for gpus in set(counts)
    }
    return [known[gpus] for gpus in counts]


def inventories() -> Iterator[NodeInventory]:
    rack, left = 0, RACKS[0]
    for number in range(NODES):
        if left == 0:
            rack += 1
            left = RACKS[rack % len(RACKS)]
        left -= 1
        yield _node(f"n{number:03}", f"r{rack:02}", has_nvlink=number % 4 != 3)


def _node(name: str, rack: str, has_nvlink: bool) -> NodeInventory:
    """Two GPUs share a PCIe switch, four a socket. NVLink joins the four of a socket."""
    model = "A100-SXM4-80GB" if has_nvlink else "A100-PCIE-80GB"
    gpus = tuple(
        Gpu(f"{name}-{n}", n, model, openb.CARD_MIB, openb.CARD_MIB, ("/dev/null",), numa_node=n // GROUP)
        for n in range(GPUS)
    )
    links = []
    for a in range(GPUS):
        for b in range(a + 1, GPUS):
            is_near = a // GROUP == b // GROUP
            level = LinkLevel.PCIE_SWITCH if a // 2 == b // 2 else LinkLevel.HOST_BRIDGE
            nvlinks = 4 if has_nvlink and is_near else 0
            links.append(Link(gpus[a].uuid, gpus[b].uuid, level if is_near else LinkLevel.SYSTEM, nvlinks))
    isolations = ("exclusive", "mps", "timeslice")
    labels = {"zone": "z", "rack": rack}
    return NodeInventory(
        name, name, "1", gpus, tuple(links), 128_000, 1024 * 1024, labels, isolations=isolations
    )


@define
class World:
    """A cluster that is driven as the scheduler drives it. `used_milli` of compute is given out."""

    policy: str
    random: Random
    cluster: Cluster = field(factory=lambda: Cluster(Settings()))
    index: Index = field(factory=Index)
    pricing: Pricing = field(factory=lambda: Pricing(PRICES_EVERY))
    used_milli: int = 0
    now: float = 0.0
    _ends: list[tuple[float, str, int]] = field(factory=list)
    _count: int = 0

    def __attrs_post_init__(self) -> None:
        for inventory in inventories():
            self.cluster.apply(InventorySeen(inventory), 0)
            self.cluster.apply(ReportSeen(NodeReport(inventory.node, 1, 0, ())), 0)
        self.index.sync(self.cluster.snapshot(0))

    def make_room(self, milli: int, most_milli: float) -> None:
        """The next jobs end until so much may be given out."""
        while self._ends and self.used_milli + milli > most_milli:
            self.now, id, given = heapq.heappop(self._ends)
            self.used_milli -= given
            self.cluster.apply(JobGone(id, "jobs"), 0)

    def place(self, arrival: Arrival) -> tuple[Draft, tuple[Spot, ...]] | None:
        """The job runs from now on; None where it finds no room. The draft is as it was before."""
        mix = self.cluster.mix
        if self.policy == "serai" and self.pricing.is_due(mix.seen):
            self.pricing.refresh(dict(mix.counts), mix.seen, self.index.market, openb.CARD_MIB)
            self.cluster.worth = self.pricing.worth
        draft = Draft(self.cluster.snapshot(0), index=self.index)
        if self.policy == "serai":
            spots = gangs.place(draft, arrival.shape, gangs.NO_LIMIT)
        else:
            spots = placed_by(self.policy, draft, arrival.shape, self.random)
            draft = Draft(self.cluster.snapshot(0), index=self.index)
        if spots is None:
            mix.add(shape_of(arrival.spec))
            return None
        self._count += 1
        id = f"{self._count:08}"
        job = Job(id, arrival.spec, JobState.PENDING, 0, 0)
        allocation = Allocation(1, draft.placements(spots), 0)
        self.cluster.apply(JobSeen(lifecycle.allocated(job, allocation), self._count), 0)
        self.used_milli += arrival.milli
        heapq.heappush(self._ends, (self.now + arrival.lifetime, id, arrival.milli))
        return draft, spots


def placed_by(policy: str, draft: Draft, shape: Shape, random: Random) -> tuple[Spot, ...] | None:
    """One task after the other: to the node with the least compute left and its first GPUs (a fraction to the one that
    it fills most), or by chance. The draft is changed."""
    spots: list[Spot] = []
    for task in shape.tasks:
        for _ in range(task.count):
            nodes = sorted(draft.search(task, shape.constraints).fitting())
            if not nodes:
                return None
            if policy == "random":
                node = random.choice(nodes)
            else:
                node = min(
                    nodes, key=lambda name: (sum(p.compute_milli for p in draft.row(name).pieces), name)
                )
            found = _found(policy, task, draft.row(node), random)
            spots.append(Spot(len(spots), node, task, found))
            draft.take(spots[-1:])
    return tuple(spots)


def _found(policy: str, task: TaskShape, row: Row, random: Random) -> Fit:
    request = task.gpus
    if request.is_whole:
        free = [gpu for gpu in range(len(row.pieces)) if row.is_idle(gpu)]
    else:
        memory_mib = request.memory_mib or 0
        free = [
            gpu
            for gpu, piece in enumerate(row.pieces)
            if piece.is_open
            and piece.compute_milli >= request.compute_milli
            and piece.memory_mib >= memory_mib
        ]
    if policy == "random":
        gpus = sorted(random.sample(free, request.count))
    else:
        order = (
            free if request.is_whole else sorted(free, key=lambda gpu: (row.pieces[gpu].compute_milli, gpu))
        )
        gpus = sorted(order[: request.count])
    names = []
    for gpu in gpus:
        name = isolation.choose(request, row.build.gpus[gpu], row.build.isolations, row.pieces[gpu].sharing)
        assert not isinstance(name, Reason)
        names.append(name)
    return Fit(tuple(gpus), tuple(names), ())


def on_nodes(spots: Sequence[Spot]) -> list[int]:
    """How many GPUs of the job each of its nodes has, the fewest first."""
    counts: Counter[str] = Counter()
    for spot in spots:
        counts[spot.node] += len(spot.found.gpus)
    return sorted(counts.values())


@cache
def step_times() -> Mapping[str, float]:
    """By placement, such as "13": how much longer a step takes than with all GPUs on one node. For each model the
    median over equal batch sizes, then the mean over the models."""
    measured: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    with gzip.open(DATA / "placement_steps.csv.gz", "rt") as lines:
        for row in csv.DictReader(lines):
            measured[row["model"], row["placement"]][row["local_bsz"]] = float(row["step_time"])
    ratios: dict[str, list[float]] = defaultdict(list)
    for (model, placement), steps in measured.items():
        together = measured[model, str(sum(map(int, placement)))]
        ratios[placement].append(median(steps[size] / together[size] for size in steps if size in together))
    return {placement: mean(values) for placement, values in ratios.items()}


def is_in_one_group(draft: Draft, spots: Sequence[Spot]) -> bool:
    """Nodes differ, or the sockets of one."""
    groups = {(spot.node, gpu // GROUP) for spot in spots for gpu in spot.found.gpus}
    return len(groups) == 1 and "SXM" in draft.views[spots[0].node].row.build.gpus[0].model


def groups_whole(world: World) -> float:
    whole = count = 0
    for view in world.cluster.snapshot(0).nodes.values():
        if "SXM" in view.row.build.gpus[0].model:
            for first in range(0, GPUS, GROUP):
                count += 1
                whole += all(view.row.is_idle(gpu) for gpu in range(first, first + GROUP))
    return 100 * whole / count


def measured(mix: str, load: int, policy: str, seed: int, jobs: int) -> record.Row:
    """The second half of the jobs counts: by then the cluster has been full and turned over."""
    stream = arrivals(mix, jobs, seed)
    world, most = World(policy, Random(seed + 1)), NODES * GPUS * WHOLE_GPU_MILLI * load / 100
    seen: dict[str, list[float]] = defaultdict(list)
    asked = refused = 0
    for number, arrival in enumerate(stream):
        world.make_room(arrival.milli, most)
        found = world.place(arrival)
        if 2 * number < jobs:
            continue
        if number % SAMPLED_EVERY == 0:
            seen["given"].append(100 * world.used_milli / (NODES * GPUS * WHOLE_GPU_MILLI))
            seen["groups_whole"].append(groups_whole(world))
        if arrival.gpus < 2:
            continue
        asked += arrival.gpus
        if found is None:
            refused += arrival.gpus
            continue
        for name, value in _figures(*found).items():
            seen[name].append(value)
    row: dict[str, record.Value] = {"mix": mix, "load": load, "policy": policy, "seed": seed}
    row["several_gpus"] = len(seen["cost_of_job"])
    row |= {name: round(mean(seen[name]), 4) for name in _MEANS if seen[name]}
    row["refused"] = round(100 * refused / max(1, asked), 4)
    return row


def _figures(draft: Draft, spots: Sequence[Spot]) -> dict[str, float]:
    nodes = on_nodes(spots)
    gpus = sum(nodes)
    cost = gangs.communication_cost(draft, spots)
    found = {"cost_of_job": float(cost), "cost_of_pair": cost / (gpus * (gpus - 1) / 2)}
    if gpus <= GPUS:
        found["one_node"] = 100.0 * (len(nodes) == 1)
    if gpus <= GROUP:
        found["one_group"] = 100.0 * is_in_one_group(draft, spots)
        found["step_time"] = step_times()["".join(map(str, nodes))]
    return found


_MEANS = ("given", "cost_of_pair", "cost_of_job", "one_group", "one_node", "step_time", "groups_whole")
_COLUMNS = ("mix", "load", "policy", "several_gpus", *_MEANS, "refused")


def main() -> None:
    mixes = (os.environ.get("MIXES") or "openb,philly").split(",")
    loads = [int(load) for load in (os.environ.get("LOADS") or "50,70,90").split(",")]
    policies = (os.environ.get("POLICIES") or ",".join(POLICIES)).split(",")
    jobs = int(os.environ.get("JOBS") or 3000)
    if openb.folder() is None and "openb" in mixes:
        print(openb.WHERE)
    rows: list[record.Row] = []
    for mix in mixes:
        for load in loads:
            shown = []
            for policy in policies:
                seeds = range(int(os.environ.get("SEEDS") or 2))
                found = [measured(mix, load, policy, seed, jobs) for seed in seeds]
                rows += found
                means = {name: mean(float(row.get(name) or 0) for row in found) for name in _COLUMNS[3:]}
                shown.append({"mix": mix, "load": load, "policy": policy, **means})
            print(record.table(shown, _COLUMNS), flush=True)
            record.write("links", rows, record.machine("numpy", "numba"))


if __name__ == "__main__":
    main()
