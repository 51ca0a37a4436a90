"""Where one task goes: every filter with its reason, the three classes of score, ties, the draft."""

from __future__ import annotations

import pytest

from coordinator import model
from coordinator.fit import Fit, fit
from coordinator.model import Job, NodeAdmin
from coordinator.placement import Draft, Spot, empty_draft, wait_reason
from coordinator.snapshot import shape_of
from coordinator.usage import Headroom
from jobspecs.spec import JobSpec
from tests.builders import GIB, START_MS, World, node, piece, report, running, spec
from vgpu.inventory import NodeInventory
from vgpu.reasons import ReasonCode as R

NO_LIMIT = Headroom()


def world(*nodes: NodeInventory, jobs: tuple[Job, ...] = ()) -> World:
    w = World(*nodes)
    w.submit(*jobs)
    return w


def part(
    id: str, on: str, gpu_index: int, memory: int = 10 * GIB, compute: int = 125, **changes: object
) -> Job:
    return running(id, on, [piece(f"GPU-{on}-{gpu_index}", memory, compute, "mps")], **changes)


def whole(id: str, on: str, *gpus: int) -> Job:
    return running(id, on, [piece(f"GPU-{on}-{n}") for n in gpus])


def place(w: World, of: JobSpec, headroom: Headroom = NO_LIMIT) -> Spot | None:
    shape = shape_of(of)
    return Draft(w.snapshot()).search(shape.tasks[0], shape.constraints).best(headroom)


def where(w: World, of: JobSpec) -> tuple[str, tuple[int, ...]] | None:
    spot = place(w, of)
    return (spot.node, spot.found.gpus) if spot else None


# --- filters, in their order ---


def refused(w: World, of: JobSpec) -> dict[str, int]:
    """How many nodes refused for what."""
    shape = shape_of(of)
    counts = Draft(w.snapshot()).search(shape.tasks[0], shape.constraints).refusals().counts
    return {code.value: count for code, count in counts.items() if count}


def full_cpu(n: int = 1) -> Job:
    return running("cpu", "n1", [], cpu=128_000 - n, node_memory=1)


FILTERS = [
    (node("n1", gpus=1), (), spec(model="H100"), R.GPU_MODEL_DIFFERS),
    (node("n1", gpus=0), (), spec(), R.GPU_MODEL_DIFFERS),
    (node("n1", labels={"zone": "b"}), (), spec(constraints={"zone": "a"}), R.LABELS_DIFFER),
    (node("n1"), (), spec(constraints={"zone": "a"}), R.LABELS_DIFFER),
    (node("n1", gpus=1), (), spec(gpus=2), R.NOT_ENOUGH_IDLE_GPUS),
    (node("n1", gpus=2), (whole("w", "n1", 0),), spec(gpus=2), R.NOT_ENOUGH_IDLE_GPUS),
    (node("n1", gpus=2), (part("p", "n1", 0),), spec(gpus=2), R.NOT_ENOUGH_IDLE_GPUS),
    (node("n1", gpus=1), (), spec(memory=100 * GIB, compute=100), R.NOT_ENOUGH_TOTAL_MEMORY),
    (node("n1", gpus=1), (), spec(gpus=2, memory=10 * GIB, compute=100), R.NOT_ENOUGH_DISTINCT_GPUS),
    (
        node("n1", gpus=2),
        (part("p", "n1", 0, 50 * GIB), part("q", "n1", 1, 50 * GIB)),
        spec(memory=40 * GIB, compute=100),
        R.NOT_ENOUGH_GPU_MEMORY,
    ),
    (
        node("n1", gpus=1),
        (part("p", "n1", 0, 1024, 600),),
        spec(memory=1024, compute=500),
        R.NOT_ENOUGH_GPU_COMPUTE,
    ),
    (node("n1", isolations=("exclusive",)), (), spec(memory=1024, compute=100), R.NO_ISOLATION),
    (node("n1", cpu=500), (), spec(cpu=501), R.NOT_ENOUGH_CPU),
    (node("n1"), (full_cpu(),), spec(cpu=2), R.NOT_ENOUGH_CPU),
    (node("n1", node_memory=100), (), spec(node_memory=101), R.NOT_ENOUGH_NODE_MEMORY),
    # the first filter that refuses is the reason
    (node("n1", gpus=1, cpu=1), (), spec(gpus=2, model="H100"), R.GPU_MODEL_DIFFERS),
    (node("n1", gpus=1, cpu=1), (), spec(gpus=2), R.NOT_ENOUGH_IDLE_GPUS),
    (node("n1", gpus=1, cpu=1, node_memory=1), (), spec(), R.NOT_ENOUGH_CPU),
]


@pytest.mark.parametrize(("inventory", "jobs", "of", "reason"), FILTERS)
def test_each_filter_refuses_with_its_reason(inventory, jobs, of, reason):
    w = world(inventory, jobs=jobs)
    assert place(w, of) is None
    assert refused(w, of) == {reason.value: 1}
    assert wait_reason(shape_of(of), Draft(w.snapshot())).code is reason


def test_what_is_left_may_be_taken_to_the_last_unit():
    w = world(node("n1", gpus=1, cpu=1500, node_memory=2048), jobs=(part("p", "n1", 0, 70 * GIB, 900),))
    exact = {"memory": 10 * GIB, "compute": 100, "cpu": 500, "node_memory": 1024}
    assert where(w, spec(**exact)) == ("n1", (0,))
    for name, amount in exact.items():
        assert place(w, spec(**{**exact, name: amount + 1})) is None, name


def test_every_filter_of_a_node_was_met():
    """The table above leaves none out; the node's own state is below."""
    own_state = {R.NODE_NOT_READY, R.NODE_CORDONED, R.NODE_CLOSED}
    codes = list(R)
    filters = set(codes[codes.index(R.NODE_NOT_READY) : codes.index(R.GANG_DOES_NOT_FIT)])
    assert filters - own_state == {reason for *_, reason in FILTERS}


def test_the_state_of_a_node_comes_first():
    w = world(node("down"), node("cordoned"), node("closed"), node("other", labels={"zone": "b"}))
    w.see(
        model.ReportGone("down"),
        model.AdminSeen(NodeAdmin("cordoned", cordoned=True)),
        model.RecordUnreadable("/serai/grants/closed/x.1", "?"),
    )
    of = spec(gpus=9, constraints={"zone": "a"})
    assert refused(w, of) == {"node_not_ready": 1, "node_cordoned": 1, "node_closed": 1, "labels_differ": 1}


def test_model_matches_as_a_part_of_the_name_in_any_case():
    w = world(node("n1", model="NVIDIA A100-SXM4-80GB"))
    assert place(w, spec(model="a100")) is not None
    assert place(w, spec(model="A100-SXM4")) is not None
    assert place(w, spec(model="A1000")) is None


def test_reasons_count_nodes_and_show_the_largest_free_piece():
    w = world(
        node("n1", gpus=1), node("n2", gpus=1), node("n3", gpus=1, model="T4"), jobs=(whole("w", "n2", 0),)
    )
    w.submit(part("p", "n1", 0, 70 * GIB, 300))
    of = spec(memory=20 * GIB, compute=100, model="A100")
    reason = wait_reason(shape_of(of), Draft(w.snapshot()))
    assert reason.code is R.NOT_ENOUGH_TOTAL_MEMORY
    assert reason.numbers == {
        "nodes": 3,
        "tasks": 1,
        "not_enough_total_memory": 2,
        "gpu_model_differs": 1,
        "gpus": 1,
        "memory_mib": 20 * GIB,
        "compute_milli": 100,
        "largest_free_memory_mib": 10 * GIB,
        "largest_free_compute_milli": 700,
        "total_free_memory_mib": 10 * GIB,
        "total_free_compute_milli": 700,
        "cpu_milli": 1000,
        "node_memory_mib": 1024,
    }


def test_a_piece_with_no_compute_left_is_no_free_piece():
    w = world(node("n1", gpus=1), jobs=(part("p", "n1", 0, 10 * GIB, 1000),))
    numbers = wait_reason(shape_of(spec(memory=1024, compute=1)), Draft(w.snapshot())).numbers
    assert (numbers["largest_free_memory_mib"], numbers["total_free_memory_mib"]) == (0, 70 * GIB)


def test_no_nodes_is_a_reason():
    assert wait_reason(shape_of(spec()), Draft(World().snapshot())).code is R.NO_NODES


# --- less than one GPU: least fragmentation ---


def test_a_fraction_goes_to_a_broken_gpu_that_it_fills_best():
    jobs = (part("p", "n1", 1, 40 * GIB, 500), part("q", "n1", 2, 60 * GIB, 750))
    assert where(world(node("n1"), jobs=jobs), spec(memory=20 * GIB, compute=250)) == ("n1", (2,))


def test_a_fraction_breaks_a_whole_gpu_only_where_no_broken_one_has_room():
    jobs = (part("p", "n1", 1, 70 * GIB, 500),)
    assert where(world(node("n1"), node("n2"), jobs=jobs), spec(memory=20 * GIB, compute=250)) == ("n1", (0,))
    assert where(world(node("n2"), node("n1"), jobs=jobs), spec(memory=5 * GIB, compute=50)) == ("n1", (1,))


def test_then_the_fullest_node():
    jobs = (whole("w", "n2", 0, 1, 2),)
    assert where(world(node("n1"), node("n2"), jobs=jobs), spec(memory=20 * GIB, compute=250)) == ("n2", (3,))


def test_then_the_rack_with_the_fewest_idle_gpus():
    nodes = [
        node("n1", labels={"rack": "r1"}),
        node("n2", labels={"rack": "r1"}),
        node("n3", labels={"rack": "r2"}),
        node("n4", labels={"rack": "r2"}),
    ]
    w = world(*nodes, jobs=(whole("w", "n4", *range(8)),))
    assert where(w, spec(memory=20 * GIB, compute=250)) == ("n3", (0,))


def test_then_the_name():
    assert where(world(node("b"), node("a")), spec(memory=20 * GIB, compute=250)) == ("a", (0,))


def test_all_memory_and_a_part_of_the_compute_needs_a_card_with_all_its_memory():
    w = world(node("n1", gpus=2), jobs=(part("p", "n1", 0, 1024, 100),))
    spot = place(w, spec(compute=500))
    assert spot is not None
    assert spot.found.gpus == (1,)
    [placed] = Draft(w.snapshot()).placements([spot])
    assert (placed.slices[0].memory_mib, placed.slices[0].compute_milli) == (80 * GIB, 500)


# --- exactly one GPU ---


def test_one_gpu_goes_to_the_most_remote_node():
    """n3 stands alone in its rack, so sets over n1 and n2 stay whole; but no group is broken for that."""
    nodes = [
        node("n1", labels={"rack": "r1"}),
        node("n2", labels={"rack": "r1"}),
        node("n3", labels={"rack": "r2"}),
    ]
    assert where(world(*nodes), spec()) == ("n3", (0,))
    assert where(world(*nodes, jobs=(whole("w", "n1", 0, 1, 2, 3),)), spec()) == ("n3", (0,)), (
        "before the fullest"
    )
    assert where(world(*nodes, jobs=(whole("w", "n1", 0, 1, 2),)), spec()) == ("n1", (3,)), "a broken group"


def test_one_gpu_goes_to_the_node_whose_gpus_are_connected_worst():
    w = world(node("a-nvlink", gpus=4, groups=((0, 1, 2, 3),)), node("b-pcie", gpus=4, groups=()))
    assert where(w, spec()) == ("b-pcie", (0,))
    w.add(node("c-alone", gpus=1))
    assert where(w, spec()) == ("c-alone", (0,))


@pytest.mark.parametrize(
    ("busy", "expected"),
    [
        ((), 0),
        ((0,), 1),  # the rest of the broken group of four
        ((4,), 5),
        ((0, 1, 4), 2),  # two left of one group, three of the other
        ((0, 1, 2, 4), 3),  # the last one of its group
    ],
)
def test_in_the_node_the_worst_connected_free_gpu(busy, expected):
    jobs = (whole("w", "n1", *busy),) if busy else ()
    assert where(world(node("n1"), jobs=jobs), spec()) == ("n1", (expected,))


def test_a_broken_gpu_is_not_a_whole_one():
    assert where(world(node("n1", gpus=2), jobs=(part("p", "n1", 0, 1, 1),)), spec()) == ("n1", (1,))


def test_then_the_fullest_node_and_then_the_name():
    jobs = (whole("w", "n2", 0, 1),)
    assert where(world(node("n1"), node("n2"), node("n3"), jobs=jobs), spec()) == ("n2", (2,))
    assert where(world(node("n2"), node("n1")), spec()) == ("n1", (0,))


# --- more than one GPU ---


def test_several_gpus_are_the_set_of_least_communication_cost():
    jobs = (whole("w", "n1", 0, 1),)
    assert where(world(node("n1"), jobs=jobs), spec(gpus=3)) == ("n1", (4, 5, 6))
    assert where(world(node("n1"), jobs=jobs), spec(gpus=2)) == ("n1", (2, 3)), (
        "the smallest domain that fits"
    )


def test_the_node_with_the_cheaper_set_wins_over_the_fuller_one():
    w = world(node("n1", gpus=2, groups=()), node("n2"))
    assert where(w, spec(gpus=2)) == ("n2", (0, 1))


def test_equal_cost_is_best_fit():
    jobs = (whole("w", "n2", 4, 5, 6, 7),)
    assert where(world(node("n1"), node("n2"), jobs=jobs), spec(gpus=4)) == ("n2", (0, 1, 2, 3))
    jobs = (part("p", "n2", 7),)
    assert where(world(node("n1"), node("n2"), jobs=jobs), spec(gpus=4)) == ("n2", (0, 1, 2, 3))


def test_fr11_slices_of_one_task_are_on_distinct_gpus():
    w = world(node("n1", gpus=2))
    spot = place(w, spec(gpus=2, memory=1024, compute=10))
    assert spot is not None
    assert spot.found.gpus == (0, 1)
    assert place(world(node("n1", gpus=1)), spec(gpus=2, memory=1024, compute=10)) is None


# --- without a GPU ---


def test_a_task_without_a_gpu_goes_where_the_fewest_are():
    assert where(world(node("a"), node("b", gpus=0), node("c", gpus=2)), spec(gpus=0)) == ("b", ())


# --- the draft ---


def test_a_draft_sees_its_own_placements_and_leaves_the_snapshot_alone():
    w = world(node("n1", gpus=1))
    snapshot = w.snapshot()
    draft = Draft(snapshot)
    shape = shape_of(spec())
    search = draft.search(shape.tasks[0], ())
    spot = search.best(NO_LIMIT)
    assert spot is not None
    draft.take([spot])
    assert search.best(NO_LIMIT) is None
    assert Draft(snapshot).search(shape.tasks[0], ()).best(NO_LIMIT) == spot, (
        "dropping the draft is the rollback"
    )


def test_a_search_finds_what_a_fresh_one_finds_after_every_placement():
    """The answers that are kept over a cycle are those of a search that knows nothing yet."""
    w = world(
        node("n1"), node("n2", gpus=4), node("n3", gpus=2, model="T4"), node("n4", labels={"rack": "r"})
    )
    snapshot = w.snapshot()
    specs = [spec(memory=m * GIB, compute=50 * m) for m in (1, 3, 7, 20)] + [
        spec(),
        spec(gpus=2),
        spec(gpus=3),
    ]
    draft = Draft(snapshot)
    placed = 0
    for turn in range(120):
        task = shape_of(specs[turn * 5 % len(specs)]).tasks[0]
        fresh = Draft(snapshot, {name: draft.row(name) for name in draft.views})
        kept, anew = draft.search(task, ()), fresh.search(task, ())
        spot = kept.best(NO_LIMIT)
        assert spot == anew.best(NO_LIMIT)
        assert kept.refusals() == anew.refusals()
        if spot is not None:
            draft.take([spot])
            placed += 1
    assert 20 < placed < 120, "both answers occurred"


def test_headroom_passes_over_cards_that_are_too_large_for_the_tenant():
    w = world(node("big", gpus=1, memory=80 * GIB), node("small", gpus=2, memory=16 * GIB))
    assert where(w, spec()) == ("big", (0,))
    spot = place(w, spec(), Headroom(memory_mib=20 * GIB))
    assert spot is not None
    assert spot.node == "small"
    assert place(w, spec(), Headroom(memory_mib=10 * GIB)) is None
    assert place(w, spec(), Headroom(compute_milli=999)) is None


def test_the_empty_cluster_ignores_what_is_there_and_who_is_down():
    w = world(node("n1"), jobs=(whole("w", "n1", *range(8)),))
    w.see(model.ReportGone("n1"))
    shape = shape_of(spec(gpus=8))
    spot = empty_draft(w.snapshot()).search(shape.tasks[0], ()).best(NO_LIMIT)
    assert spot is not None


def test_foreign_use_makes_a_card_no_whole_one():
    w = world(node("n1", gpus=1))
    w.see(model.ReportSeen(report("n1", START_MS, foreign={"GPU-n1-0": 1})))
    assert place(w, spec()) is None
    assert where(w, spec(memory=1024, compute=100)) == ("n1", (0,))


def test_fit_is_a_function_of_task_and_row():
    w = world(node("n1"), node("n2"))
    rows = [view.row for view in w.snapshot().nodes.values()]
    assert rows[0] == rows[1]
    assert rows[0].build is rows[1].build
    assert isinstance(fit(shape_of(spec()).tasks[0], rows[0]), Fit)
