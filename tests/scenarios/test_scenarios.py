"""Scenarios as tables: nodes, tenants, jobs, what happens to them, and what must be so afterwards.

Each runs cycles until the wanted picture is there (at most ten), then five more that must change nothing: a plan that
moves to and fro would be seen. `World` checks the invariants after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from attrs import field, frozen

from coordinator import model
from coordinator.lifecycle import cancelled
from coordinator.model import Job, NodeAdmin, TaskState
from tests.builders import GIB, World, gpu, job, mig, node, piece, report, running, task
from vgpu.inventory import NodeInventory
from vgpu.reasons import Reason
from vgpu.reasons import ReasonCode as R

CARD = 80 * GIB
ROUNDS, STABLE_ROUNDS, ROUND_SECONDS = 10, 5, 10


@frozen
class Scenario:
    """`then` happens once the first picture has settled. `on`: where jobs run, as node names; `waits`: why others
    wait; `gone`: ids that have left. Jobs that are in none of them make the scenario fail."""

    name: str
    nodes: tuple[NodeInventory, ...]
    jobs: tuple[Job, ...]
    tenants: Mapping[str, Mapping[str, int]] = field(factory=dict)
    then: Callable[[World], None] | None = None
    on: Mapping[str, tuple[str, ...]] = field(factory=dict)
    waits: Mapping[str, R] = field(factory=dict)
    gone: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(factory=dict)


def end(id: str, exit_code: int = 0) -> Callable[[World], None]:
    def happen(w: World) -> None:
        w.end(id, exit_code)

    return happen


def cancel_confirmed(id: str) -> Callable[[World], None]:
    def happen(w: World) -> None:
        w.put(cancelled(w.live(id), w.now_ms))
        w.settle()
        for placed in w.live(id).allocation.tasks:
            w.see(model.TaskSeen(task(w.live(id), placed.task, TaskState.EXITED, exit_code=143)))
        w.settle()

    return happen


def cancel_unconfirmed(id: str) -> Callable[[World], None]:
    def happen(w: World) -> None:
        w.put(cancelled(w.live(id), w.now_ms))
        w.settle()

    return happen


def silent(name: str, seconds: int) -> Callable[[World], None]:
    def happen(w: World) -> None:
        w.see(model.ReportGone(name))
        w.now += seconds
        w.settle()

    return happen


def later(w: World) -> None:
    """Past any back-off."""
    w.now += 60
    w.cycle()


def both(*steps: Callable[[World], None]) -> Callable[[World], None]:
    def happen(w: World) -> None:
        for step in steps:
            step(w)

    return happen


def faults(name: str, **xids: str) -> Callable[[World], None]:
    def happen(w: World) -> None:
        w.see(
            model.ReportSeen(
                report(name, w.now_ms, faults={f"GPU-{name}-{n[1:]}": x for n, x in xids.items()})
            )
        )

    return happen


def see(*events: model.Event) -> Callable[[World], None]:
    def happen(w: World) -> None:
        w.see(*events)

    return happen


def submit(*jobs: Job) -> Callable[[World], None]:
    def happen(w: World) -> None:
        w.submit(*jobs)

    return happen


SCENARIOS = (
    Scenario(
        "fractions share a card, whole cards go elsewhere",
        nodes=(node("n1", gpus=2),),
        jobs=(
            job("half1", memory=40 * GIB, compute=500),
            job("half2", 1, memory=40 * GIB, compute=500),
            job("one", 2),
        ),
        on={"half1": ("n1",), "half2": ("n1",), "one": ("n1",)},
    ),
    Scenario(
        "DA-1: the successor of a cancelled job waits until its end is confirmed",
        nodes=(node("n1", gpus=4),),
        jobs=(job("j1", gpus=2), job("j2", 1, gpus=2), job("j3", 2, gpus=2)),
        then=cancel_unconfirmed("j1"),
        on={"j1": ("n1",), "j2": ("n1",)},
        waits={"j3": R.NOT_ENOUGH_IDLE_GPUS},
    ),
    Scenario(
        "DA-1: and starts once it is",
        nodes=(node("n1", gpus=4),),
        jobs=(job("j1", gpus=2), job("j2", 1, gpus=2), job("j3", 2, gpus=2)),
        then=cancel_confirmed("j1"),
        on={"j2": ("n1",), "j3": ("n1",)},
        gone=("j1",),
    ),
    Scenario(
        "GA-1: of two gangs that need everything one gets it, and the other starts after it",
        nodes=tuple(node(f"n{n}") for n in range(4)),
        jobs=(job("g1", gpus=8, count=4), job("g2", 1, gpus=8, count=4)),
        on={"g1": ("n0", "n1", "n2", "n3")},
        waits={"g2": R.NOT_ENOUGH_IDLE_GPUS},
    ),
    Scenario(
        "GA-1: the second gang starts when the first has ended",
        nodes=tuple(node(f"n{n}") for n in range(4)),
        jobs=(job("g1", gpus=8, count=4), job("g2", 1, gpus=8, count=4)),
        then=end("g1"),
        on={"g2": ("n0", "n1", "n2", "n3")},
        gone=("g1",),
    ),
    Scenario(
        "TP-1: a gang goes wholly into the rack that has room",
        nodes=(
            node("a1", labels={"rack": "A"}),
            node("a2", labels={"rack": "A"}),
            node("b1", labels={"rack": "B"}),
            node("b2", labels={"rack": "B"}),
        ),
        jobs=(running("busy", "a1", [piece(f"GPU-a1-{n}") for n in range(8)]), job("g", gpus=8, count=2)),
        on={"busy": ("a1",), "g": ("b1", "b2")},
    ),
    Scenario(
        "borrowing: one tenant fills the idle cluster, and the other is served first when something ends",
        nodes=(node("n1", gpus=2),),
        tenants={"a": {"quota": CARD}, "b": {"quota": CARD}},
        jobs=(job("a1"), job("a2", 1), job("a3", 2)),
        then=both(submit(job("b1", 50, tenant="b")), end("a1")),
        on={"a2": ("n1",), "b1": ("n1",)},
        waits={"a3": R.NOT_ENOUGH_IDLE_GPUS},
        gone=("a1",),
    ),
    Scenario(
        "QT-1: the limit counts every slice, and the rest of it can be used to the last MiB",
        nodes=(node("n1"),),
        tenants={"a": {"quota": 4096, "limit_memory_mib": 5096}},
        jobs=(job("two", gpus=2, memory=2048, compute=20),),
        then=submit(job("over", 1, memory=1001, compute=1), job("exact", 2, memory=1000, compute=9)),
        on={"two": ("n1",), "exact": ("n1",)},
        waits={"over": R.OVER_LIMIT},
    ),
    Scenario(
        "QF-2: the only large node is down, so the job waits and is not refused",
        nodes=(node("n1"), node("n2", gpus=2)),
        jobs=(job("small", gpus=2),),
        then=both(see(model.ReportGone("n1")), submit(job("large", 20, gpus=8))),
        on={"small": ("n2",)},
        waits={"large": R.NOT_ENOUGH_IDLE_GPUS},
    ),
    Scenario(
        "QF-1: a job that can never run blocks nobody",
        nodes=(node("n1", gpus=4),),
        jobs=(job("never", gpus=6), job("ok", 1)),
        on={"ok": ("n1",)},
        waits={"never": R.TASK_LARGER_THAN_ANY_NODE},
    ),
    Scenario(
        "EX-7: a silent node keeps its job, and no second copy is started",
        nodes=(node("n1", gpus=1), node("n2", gpus=1)),
        jobs=(job("j", retries=3),),
        then=silent("n1", 180),
        on={"j": ("n1",)},
        settings={"lost_seconds": 3600},
    ),
    Scenario(
        "EX-7: past the limit it starts elsewhere, where retries allow it",
        nodes=(node("n1", gpus=1), node("n2", gpus=1)),
        jobs=(job("j", retries=3), job("k", 1, gpus=0)),
        then=silent("n1", 600),
        on={"j": ("n2",)},
        gone=("k",),
    ),
    Scenario(
        "a cordoned node gets nothing new and keeps what runs",
        nodes=(node("n1", gpus=2),),
        jobs=(job("j1"),),
        then=both(see(model.AdminSeen(NodeAdmin("n1", cordoned=True))), submit(job("j2"))),
        on={"j1": ("n1",)},
        waits={"j2": R.NODE_CORDONED},
    ),
    Scenario(
        "DA-7: an unreadable allocation closes its node, the others go on",
        nodes=(node("n1", gpus=1), node("n2", gpus=1)),
        jobs=(),
        then=both(
            see(model.RecordUnreadable("/serai/grants/n1/x.1", "garbage")), submit(job("j1"), job("j2", 1))
        ),
        on={"j1": ("n2",)},
        waits={"j2": R.NOT_ENOUGH_IDLE_GPUS},
    ),
    Scenario(
        "a GPU with a hardware fault is not given out",
        nodes=(node("n1", gpus=2),),
        jobs=(),
        then=both(faults("n1", g1="Xid 79"), submit(job("j1"), job("j2", 1))),
        on={"j1": ("n1",)},
        waits={"j2": R.NOT_ENOUGH_IDLE_GPUS},
    ),
    Scenario(
        "MG-1, MG-5: slices go to the instance that holds them, whole cards to whole cards",
        nodes=(
            node(
                "n1",
                [
                    gpu("n1", 0, unavailable="MIG mode"),
                    gpu("n1", 1),
                    mig("n1", 0, 2, 16384, 142),
                    mig("n1", 0, 3, 33280, 285),
                ],
                isolations=("exclusive", "mig"),
            ),
        ),
        jobs=(
            job("s", memory=17000, compute=100, isolation="mig"),
            job("t", 1, memory=17000, compute=100, isolation="mig"),
            job("w", 2),
            job("x", 3),
        ),
        on={"s": ("n1",), "w": ("n1",)},
        waits={"t": R.NOT_ENOUGH_TOTAL_MEMORY, "x": R.NOT_ENOUGH_IDLE_GPUS},
    ),
    Scenario(
        "a failed job is tried again as often as its user allowed, then it is gone",
        nodes=(node("n1", gpus=1),),
        jobs=(job("j", retries=1),),
        then=both(end("j", 1), later, end("j", 1)),
        gone=("j",),
    ),
)


def picture(w: World) -> tuple[dict[str, tuple[str, ...]], dict[str, R]]:
    on = {id: one.allocation.nodes for id, one in w.cluster.live_jobs.items() if one.allocation}
    return on, {id: _filter_of(reason) for id, reason in w.plan().waiting.items()}


def _filter_of(reason: Reason) -> R:
    """Of a job with a reservation: why it does not fit now, as most nodes say; of equals the one that comes last."""
    if reason.code is not R.RESERVED:
        return reason.code
    counted = [
        (reason.numbers[code.value], n, code) for n, code in enumerate(R) if code.value in reason.numbers
    ]
    return max(counted)[-1]


def start(scenario: Scenario, policy: str) -> World:
    w = World(*scenario.nodes, policy=policy, **scenario.settings)
    for name, words in scenario.tenants.items():
        w.tenant(name, **words)
    w.submit(*scenario.jobs)
    w.cycle()
    return w


def turn(w: World) -> None:
    """What a leader does in one round, with the nodes that are up starting whatever they were given."""
    w.now += ROUND_SECONDS
    w.settle()
    for id in w.cycle():
        w.run(id)


@pytest.mark.parametrize("policy", ["space-time", "serai"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario(scenario: Scenario, policy: str):
    w = start(scenario, policy)
    for id in list(w.cluster.live_jobs):
        w.run(id)
    if scenario.then is not None:
        scenario.then(w)
    wanted = (dict(scenario.on), dict(scenario.waits))
    for _ in range(ROUNDS):
        turn(w)
        if picture(w) == wanted:
            break
    assert picture(w) == wanted
    for _ in range(STABLE_ROUNDS):
        turn(w)
        assert picture(w) == wanted, "it does not stay so"
    known = {*w.cluster.live_jobs, *w.cluster.waiting_jobs}
    assert not known & set(scenario.gone)
