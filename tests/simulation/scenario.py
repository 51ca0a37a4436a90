"""What happens in one seed, as data: the cluster, the wishes of users, and the faults with their times.

Everything is drawn here, so that a failing scenario can be made smaller by leaving things out.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from attrs import evolve, field, frozen
from msgspec.structs import replace as changed

from coordinator.config import Settings
from jobspecs.spec import JobSpec, TaskSpec
from vgpu.slices import SliceRequest

FAULTS_UNTIL_SECONDS = 60.0
SMALL_FAULTS = (
    "crash_before",
    "crash_after",
    "lost",
    "late",
    "dropped",
    "dropped_slowly",
    "runner_no_effect",
    "runner_no_answer",
    "runner_hangs",
    "step",
    "nomad_no_effect",
    "nomad_no_answer",
    "nomad_hangs",
    "nomad_late",
)
EVENT_FAULTS = ("nomad_event_late", "nomad_event_again")


@frozen
class Wish:
    """A user wants a job at a time, and perhaps its end some seconds later (None: lets it run)."""

    at: float
    spec: JobSpec
    has_key: bool
    cancel_after: float | None


@frozen
class Fault:
    """`target` and `value` mean what the kind says; `seconds` is how long it lasts."""

    at: float
    kind: str
    seconds: float = 0.0
    target: int = 0
    value: int = 0


@frozen
class Scenario:
    """`odds` are those of each small fault, for each call that it can strike."""

    seed: int
    engine: str
    coordinators: int
    nodes: tuple[str, ...]
    settings: Settings
    wishes: tuple[Wish, ...]
    faults: tuple[Fault, ...]
    odds: Mapping[str, float] = field(factory=dict)


def draw(seed: int, late: bool = False) -> Scenario:
    """`late`: a small cluster with many jobs, and many requests that arrive after they were given up."""
    random = Random(seed)
    late = late or seed % 10 == 9
    engine = "nomad" if random.random() < 0.35 else "agent"
    is_crowded = random.random() < 0.2 or late
    nodes = tuple(
        random.choice(("1x16GiB:T4", "2x16GiB:T4", "2x40GiB:A100", "4x40GiB:A100:nvlink=2"))
        for _ in range(random.randint(3, 5))
    )
    if is_crowded:
        nodes = nodes[:1] + ("1x16GiB:T4",) * random.randint(0, 2)
    settings = Settings(
        engine=engine,
        report_seconds=random.choice((2, 4)),
        node_lease_seconds=10,
        lost_seconds=random.choice((20, 30)),
        launch_deadline_seconds=25,
        stop_deadline_seconds=15,
        orphan_grace_seconds=6,
        launch_retries=random.choice((1, 3)),
        back_off_seconds=1,
        jobs_per_transaction=1 if is_crowded else random.choice((1, 3, 40)),
        log_retention_seconds=20,
        compact_keep_revisions=random.choice((20, 100)),
        compact_keep_seconds=5,
    )
    odds = {}
    for kind in SMALL_FAULTS:
        if random.random() < 0.5:
            odds[kind] = random.choice((0.002, 0.01, 0.04))
    if is_crowded:
        odds["late"] = 0.06
    if late:
        odds = {"late": 0.25}
    more_odds, more_faults = _more(seed) if engine == "nomad" and not late else ({}, [])
    pulls, cuts = _pulls(seed) if engine == "nomad" and not late else (random, [])
    scenario = Scenario(
        seed,
        engine,
        random.randint(2, 3),
        nodes,
        settings,
        tuple(
            _wish(random, [int(gpus[0]) for gpus in nodes])
            for _ in range(random.randint(6, 18) * (1 + is_crowded))
        ),
        tuple(sorted(_faults(random, engine, len(nodes)) + more_faults + cuts, key=lambda fault: fault.at)),
        odds | more_odds,
    )
    return _with_pulls(scenario, pulls, cuts[0].at) if cuts else scenario


def _more(seed: int) -> tuple[dict[str, float], list[Fault]]:
    """Events of Nomad that come late, in another order or again. Drawn beside the rest, so that the seeds from before
    they were thought of are what they were."""
    random = Random(f"{seed}/more")
    odds = {kind: random.choice((0.02, 0.1)) for kind in EVENT_FAULTS if random.random() < 0.5}
    times = [round(random.uniform(1.0, FAULTS_UNTIL_SECONDS), 3) for _ in range(random.choice((0, 0, 1, 2)))]
    faults = [Fault(at, "nomad_restart") for at in times]
    if random.random() < 0.2:
        # So long that whatever Nomad was sent before is thought to have arrived (`missing_grace_seconds`).
        at, seconds = round(random.uniform(1.0, 35.0), 3), round(random.uniform(12.0, 35.0), 3)
        faults.append(Fault(at, "leader_pause", seconds))
    return odds, faults


def _pulls(seed: int) -> tuple[Random, list[Fault]]:
    """A machine that falls silent while images are pulled on it, and whose client of Nomad is out of touch for longer
    than its agent: of what it will start then nothing can be seen. Drawn beside the rest, too."""
    random = Random(f"{seed}/pulls")
    if random.random() < 0.7:
        return random, []
    at, target = round(random.uniform(3.0, 15.0), 3), random.randrange(60)
    silent = round(random.uniform(31.0, 44.0), 3)
    longer = round(silent + random.choice((0.0, random.uniform(0.5, 12.0))), 3)
    return random, [
        Fault(at, "agent_cut", silent, target),
        Fault(at, "nomad_client_cut", longer, target),
    ]


def _with_pulls(scenario: Scenario, random: Random, cut_at: float) -> Scenario:
    """Of what is submitted shortly before, most is pulled for long."""

    def pulled(wish: Wish) -> Wish:
        if not cut_at - 12 < wish.at < cut_at or random.random() < 0.2:
            return wish
        spec, word = wish.spec, f"pull_ms={random.choice((20_000, 35_000, 45_000))}"
        tasks = tuple(changed(task, command=(*task.command, word)) for task in spec.tasks)
        return evolve(wish, spec=changed(spec, tasks=tasks))

    return evolve(scenario, wishes=tuple(pulled(wish) for wish in scenario.wishes))


def _wish(random: Random, gpus_of_nodes: list[int]) -> Wish:
    """One that the cluster can run, or the API would refuse it."""
    run_ms = random.choice((300, 2000, 5000, 12000, 25000))
    words = [f"run_ms={run_ms}", f"exit={random.choice((0, 0, 0, 0, 1, 3))}"]
    words.append(f"term={random.choice(('obey', 'obey', 'clean', 'ignore'))}")
    if random.random() < 0.2:
        words.append(f"ghost_ms={random.choice((500, 4000, 20000))}")
    if random.random() < 0.1:
        words.append(f"stuck_ms={random.choice((3000, 20000))}")
    if random.random() < 0.15:
        words.append(f"launch={random.choice(('slow', 'image', 'refused'))}")
    count = min(sum(gpus_of_nodes), random.choice((1, 1, 1, 1, 2, 3)))
    most = max(gpus_of_nodes) if count == 1 else 1
    kind = random.choice(("whole", "part", "part", "none"))
    isolation = "mps" if kind == "part" and random.random() < 0.3 else ""
    gpus = {
        "none": SliceRequest(),
        "whole": SliceRequest(min(most, random.choice((1, 1, 2))), None, 1000),
        "part": SliceRequest(1, random.choice((4096, 8192)), random.choice((250, 500)), "", isolation),
    }[kind]
    task = TaskSpec(
        count=count,
        image="simulated",
        command=("sim", *words),
        gpus=gpus,
        cpu_milli=random.choice((500, 2000)),
        memory_mib=random.choice((512, 4096)),
    )
    cancel = random.random() < 0.3
    spec = JobSpec(
        f"job-{random.randrange(1000)}",
        random.choice(("team-a", "team-b", "team-c")),
        (task,),
        priority=random.choice((0, 0, 5)),
        max_runtime_seconds=random.choice((None, None, None, 3, 8)),
        retries=random.choice((0, 0, 1, 2)),
        stop_grace_seconds=random.choice((0, 1, 4)),
    )
    return Wish(
        round(random.uniform(0.5, FAULTS_UNTIL_SECONDS - 5), 3),
        spec,
        random.random() < 0.5,
        round(random.choice((0.0, 0.01, 0.5, random.uniform(0, 15))), 3) if cancel else None,
    )


# kind -> (weight, shortest, longest)
_KINDS: Mapping[str, tuple[int, float, float]] = {
    "coordinator_crash": (4, 0.1, 8.0),
    "coordinator_pause": (4, 0.5, 10.0),
    "coordinator_cut": (3, 0.5, 10.0),
    "leader_crash": (4, 0.1, 5.0),
    "leader_pause": (5, 0.5, 9.0),
    "leader_lease_revoked": (2, 0.0, 0.0),
    "leader_key_deleted": (1, 0.0, 0.0),
    "leader_resigns": (2, 0.0, 3.0),
    "api_crash": (2, 0.1, 3.0),
    "agent_crash": (4, 0.1, 50.0),
    "agent_crash_wiped": (2, 0.1, 20.0),
    "agent_pause": (3, 0.5, 50.0),
    "agent_cut": (4, 1.0, 55.0),
    "machine_off": (3, 2.0, 50.0),
    "machine_wiped": (2, 2.0, 50.0),
    "gpu_lost": (3, 0.5, 20.0),
    "gpus_unreadable": (3, 1.0, 20.0),
    "runner_down": (3, 0.5, 15.0),
    "store_full": (2, 0.5, 10.0),
    "store_down": (2, 0.2, 8.0),
    "store_slow": (3, 1.0, 10.0),
    "compaction": (4, 0.0, 0.0),
    "watch_cut": (4, 0.1, 6.0),
    "clock_step": (2, 0.0, 0.0),
    "cordon": (1, 1.0, 20.0),
    "nomad_down": (4, 0.5, 15.0),
    "nomad_events_lost": (3, 1.0, 15.0),
}


def _faults(random: Random, engine: str, nodes: int) -> list[Fault]:
    kinds = [kind for kind in _KINDS if engine == "nomad" or not kind.startswith("nomad")]
    weights = [_KINDS[kind][0] for kind in kinds]
    faults = []
    for kind in random.choices(kinds, weights, k=random.randint(0, 9)):
        _, shortest, longest = _KINDS[kind]
        faults.append(
            Fault(
                round(random.uniform(1.0, FAULTS_UNTIL_SECONDS), 3),
                kind,
                round(random.uniform(shortest, longest), 3),
                random.randrange(60),
                random.choice((-3_600_000, -30_000, -2_000, 2_000, 30_000, 3_600_000)),
            )
        )
    return faults
