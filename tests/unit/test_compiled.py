"""Nothing is compiled inside a cycle: what a process loads before it campaigns is all that a cycle calls."""

from __future__ import annotations

from attrs import evolve
from msgspec.structs import replace

from coordinator import freeing_kernels, gang_kernels, kernels
from coordinator.cycle import plan_cycle
from coordinator.index import Index
from coordinator.rehearsal import load_compiled
from tests.builders import GIB, World, gpu, job, mig, node, piece, running


def compiled() -> dict[str, int]:
    """Forms of each compiled function that were made for one set of argument types."""
    functions = vars(kernels) | vars(gang_kernels) | vars(freeing_kernels)
    return {name: len(f.signatures) for name, f in functions.items() if hasattr(f, "signatures")}


def test_a_cycle_calls_only_what_was_loaded_before():
    load_compiled()
    before = compiled()
    called = {"catch_up", "choose", "take", "restore", "hold", "put", "free_pieces", "knapsack"}
    called |= {"place", "fit_somewhere", "capacities", "best_single", "best_domain", "fill"}
    called |= {"look", "change_of", "first_change"}
    assert all(before[name] == 1 for name in called), before
    w = World(
        node("n1"),
        node("n2", gpus=1, groups=()),
        node("n3", [gpu("n3", 0, unavailable="MIG mode"), mig("n3", 0, 1, 16384, 142)]),
        node("n4", labels={"zone": "a"}),
    )
    w.tenant("a", 900 * GIB)
    w.submit(running("r", "n1", [piece("GPU-n1-0", 10 * GIB, 125, "mps")]))
    for n, changes in enumerate(
        (
            {"gpus": 8},
            {"gpus": 0},
            {"memory": 9 * GIB},
            {"compute": 300},
            {"gpus": 3, "count": 3},
            {"gpus": 9},
            {},
        )
    ):
        for m in range(6):
            w.submit(job(f"j{n}{m}", constraints={"zone": "a"} if m == 5 else {}, **changes))
    memo = Index()
    for _ in range(3):
        plan = plan_cycle(w.snapshot(), w.policy, memo)
        dict(plan.waiting)
    assert plan.placements
    assert plan.waiting
    changed = {
        name: replace(view, row=view.row._replace(memory_mib=view.row.memory_mib - 1))
        for name, view in w.snapshot().nodes.items()
    }
    plan_cycle(evolve(w.snapshot(), nodes=changed), w.policy, memo)
    assert compiled() == before
