"""The index gives the answers and reasons of the plain search, whatever changed between two questions."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import gangs, model
from coordinator.index import Index
from coordinator.model import NodeAdmin
from coordinator.placement import Draft, IndexedSearch, Spot, wait_reason
from coordinator.prices import size_prices, with_market
from coordinator.snapshot import Shape, TaskShape, shape_of
from coordinator.usage import Headroom
from coordinator.worth import Worth, kind_of
from tests.builders import GIB, World, gpu, mig, node, piece, running, spec

NO_LIMIT = Headroom()
SEEN: Counter[str] = Counter()


def world() -> World:
    """Racks, models, cards of two sizes, flat nodes and nodes with groups, MIG instances, a node of ten GPUs."""
    return World(
        node("n1", labels={"rack": "r1", "zone": "a"}),
        node("n2", gpus=4, groups=(), labels={"rack": "r1", "zone": "a"}, cpu=20_000),
        node("n3", gpus=2, groups=(), memory=16 * GIB, model="T4", labels={"rack": "r2", "zone": "a"}),
        node("n4", labels={"rack": "r2", "zone": "a"}, isolations=("exclusive", "timeslice")),
        node("n5", gpus=0, cpu=64_000),
        node(
            "n6", [gpu("n6", 0, unavailable="MIG mode"), *(mig("n6", 0, 1 + n, 16384, 142) for n in range(3))]
        ),
        node("n7", gpus=10, groups=((0, 1, 2, 3, 4), (5, 6, 7, 8, 9)), labels={"rack": "r9"}),
        node("n8", gpus=1, node_memory=8 * GIB),
        node(
            "n9", [gpu("n9", 0), gpu("n9", 1, unavailable="lost"), gpu("n9", 2, 40 * GIB, "A30")], groups=()
        ),
    )


sizes = st.one_of(
    st.builds(lambda n: {"gpus": n}, st.integers(0, 9)),
    st.builds(
        lambda n, m: {"gpus": n, "model": m}, st.integers(1, 2), st.sampled_from(["a100", "T4", "H100"])
    ),
    st.builds(
        lambda m, c, n, i: {"memory": m * GIB, "compute": c, "gpus": n, "isolation": i},
        st.integers(1, 90),
        st.integers(1, 1000),
        st.sampled_from([1, 1, 1, 2, 3]),
        st.sampled_from(["", "", "mps", "timeslice"]),
    ),
    st.builds(lambda c: {"compute": c}, st.integers(1, 999)),
)
shapes = st.builds(
    lambda size, cpu, memory, labels: shape_of(spec(cpu=cpu, node_memory=memory, constraints=labels, **size)),
    sizes,
    st.integers(1, 30_000),
    st.integers(1, 4096),
    st.sampled_from([{}, {}, {}, {"zone": "a"}, {"rack": "r2"}]),
)


def prices(asked: list[Shape]) -> Worth | None:
    """Prices of a mix of these shapes, each many times."""
    mix: Counter[object] = Counter()
    for shape in asked:
        for task in shape.tasks:
            mix[kind_of(task.gpus, task.cpu_milli)] += 40
    worth = size_prices(mix, 80 * GIB)  # type: ignore[arg-type]
    if worth is None:
        return None
    values = {"NVIDIA A100-SXM4-80GB": 10**10, "T4": 10**9}
    return with_market(worth, mix, values, {0: 2, 3: 1, 8: 2}, 20_000)  # type: ignore[arg-type]


def same(
    kept: Draft, plain: Draft, task: TaskShape, constraints: tuple[tuple[str, str], ...], limit: Headroom
) -> Spot | None:
    one, other = kept.search(task, constraints), plain.search(task, constraints)
    found, expected = one.best(limit), other.best(limit)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found.node, found.found.gpus, found.found.isolations, found.found.cost) == (
            expected.node,
            expected.found.gpus,
            expected.found.isolations,
            expected.found.cost,
        )
    assert one.fits_somewhere == other.fits_somewhere
    assert one.refusals() == other.refusals()
    return expected


def shaken(w: World, random: Random, turn: int) -> None:
    """Something changes between two cycles."""
    what = random.randrange(7)
    name = random.choice(sorted(w.cluster.snapshot(w.now_ms).nodes))
    if what == 0:
        w.see(model.AdminSeen(NodeAdmin(name, cordoned=random.random() < 0.5)))
    elif what == 1:
        w.see(model.AdminSeen(NodeAdmin(name, labels={"zone": random.choice("ab")})))
    elif what == 2:
        w.see(model.ReportGone(name))
    elif what == 3:
        w.add(node(f"new{turn}", gpus=random.randrange(5), groups=()))
    elif what == 4:
        failed = random.randrange(8)
        gpus = [gpu("n4", n, unavailable="lost" if n == failed else "") for n in range(8)]
        isolations = random.choice([("exclusive", "timeslice"), ("exclusive", "mps")])
        w.add(node("n4", gpus, labels={"rack": "r2", "zone": "a"}, isolations=isolations))
        SEEN["GPU failed"] += 1
    elif what >= 5:
        w.submit(running(f"r{turn}", "n2", [piece("GPU-n2-0", 10 * GIB, 125, "mps")]))
        SEEN["allocation"] += 1


@settings(max_examples=60, deadline=None)
@given(st.lists(shapes, min_size=3, max_size=8), st.booleans(), st.randoms(use_true_random=False))
def test_the_index_answers_as_the_plain_search_does_property(asked, with_prices, random: Random):
    w, index = world(), Index(most_bytes=random.choice([1 << 20, 300]))
    worth = prices(asked) if with_prices else None
    for turn in range(4):
        snapshot = evolve(w.cluster.snapshot(w.now_ms), worth=worth)
        held = random.choice([frozenset(), frozenset({"n1", "n6"}), frozenset({"n1", "n2", "n7"})])
        kept, plain = Draft(snapshot, index=index, held=held), Draft(snapshot, held=held)
        for step in range(12):
            shape = random.choice(asked)
            limit = Headroom(random.choice([20 * GIB, 200 * GIB]), 2000) if step % 4 == 3 else NO_LIMIT
            spot = same(kept, plain, shape.tasks[0], shape.constraints, limit)
            SEEN["refused" if spot is None else "placed"] += 1
            SEEN["priced"] += worth is not None
            if spot is not None:
                SEEN["odd"] += spot.node in ("n6", "n7")
                if step % 3 == 2 and limit is NO_LIMIT:
                    idle = kept.idle_gpus(spot.node)
                    search = kept.search(shape.tasks[0], shape.constraints)
                    assert isinstance(search, IndexedSearch)
                    taken = search.take_best()
                    assert taken is not None
                    assert (taken[0].node, taken[1]) == (spot.node, idle)
                else:
                    kept.take([spot])
                plain.take([spot])
                assert kept.row(spot.node) == plain.row(spot.node)
                assert kept.idle_gpus(spot.node) == plain.idle_gpus(spot.node)
            if step == 8 and turn == 2:
                for draft in (kept, plain):
                    draft.hold(["n1", "n6"])
                SEEN["held"] += 1
            if step == 5:
                name = random.choice(["n2", "n6", "n8"])
                for draft in (kept, plain):
                    draft.put({name: draft.views[name].full_row})
            if step % 5 == 4:
                assert kept.fitting(asked) == plain.fitting(asked)
            location = kept.views["n1"].location
            assert kept.idle_in(location) == plain.idle_in(location)
        for shape in asked:
            assert wait_reason(shape, kept) == wait_reason(shape, plain)
        rows = {name: snapshot.nodes[name].full_row for name in random.sample(["n1", "n2", "n6", "n7"], 2)}
        others = kept.beside(rows, "other", held), plain.beside(rows, "other", held)
        for shape in asked:
            same(*others, shape.tasks[0], shape.constraints, NO_LIMIT)
        shaken(w, random, turn)


def test_a_shape_that_nobody_asked_for_a_long_time_looks_at_all_nodes():
    w, index = world(), Index()
    shape = shape_of(spec(memory=40 * GIB, compute=500))
    snapshot = w.cluster.snapshot(w.now_ms)
    kept, plain = Draft(snapshot, index=index), Draft(snapshot)
    same(kept, plain, shape.tasks[0], shape.constraints, NO_LIMIT)
    for draft in (kept, plain):
        draft.put(
            {name: view.row._replace(cpu_milli=0) for name, view in snapshot.nodes.items() if name != "n4"}
        )
    for cpu_milli in range(2000):
        kept.put({"n1": snapshot.nodes["n1"].row._replace(cpu_milli=cpu_milli % 2)})
    plain.put({"n1": kept.row("n1")})
    found = same(kept, plain, shape.tasks[0], shape.constraints, NO_LIMIT)
    assert found is not None
    assert found.node == "n4"


def racks() -> World:
    """Two zones with racks of three nodes of several builds, all of which the compiled rules know."""
    w = World()
    for number in range(14):
        labels = {"rack": f"r{number // 3}", "zone": f"z{number // 9}"} if number < 13 else {}
        if number % 4 == 3:
            w.add(node(f"n{number:02}", gpus=4, groups=(), labels=labels, cpu=20_000, model="T4"))
        else:
            w.add(node(f"n{number:02}", labels=labels, cpu=8000 * (1 + number % 3)))
    return w


gang_shapes = st.builds(
    lambda size, count, cpu: shape_of(spec(count=count, cpu=cpu, **size)),
    sizes,
    st.integers(2, 7),
    st.sampled_from([0, 1000, 1000, 9000]),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(gang_shapes, min_size=2, max_size=6),
    st.lists(shapes, max_size=2),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_gang_goes_where_the_plain_rules_put_it_property(gangs_asked, asked, with_prices, random: Random):
    w, index = racks(), Index()
    worth = prices(gangs_asked + asked) if with_prices else None
    for _ in range(2):
        snapshot = evolve(w.cluster.snapshot(w.now_ms), worth=worth)
        kept, plain = Draft(snapshot, index=index), Draft(snapshot)
        for _ in range(14):
            shape = random.choice(gangs_asked + asked)
            found, expected = (gangs.place(draft, shape, NO_LIMIT) for draft in (kept, plain))
            assert _where(found) == _where(expected)
            if expected is not None and found is not None:
                count = len({spot.node for spot in expected})
                SEEN["gang in a node" if count == 1 else "gang over nodes"] += shape.task_count > 1
                SEEN["gang over racks"] += len({kept.views[s.node].location.rack for s in expected}) > 1
                kept.take(found)
                plain.take(expected)
            else:
                SEEN["gang refused"] += 1
        w.see(model.AdminSeen(NodeAdmin(random.choice(sorted(snapshot.nodes)), cordoned=True)))


def _where(spots: tuple[Spot, ...] | None) -> object:
    if spots is None:
        return None
    return [(s.number, s.node, s.found.gpus, s.found.isolations, s.found.cost, s.found.use) for s in spots]


def test_the_property_above_was_not_vacuous():
    if not SEEN:
        pytest.skip("the property did not run")
    wanted = "placed", "refused", "priced", "odd", "held", "allocation", "GPU failed"
    wanted += "gang in a node", "gang over nodes", "gang over racks", "gang refused"
    assert all(SEEN[name] > 0 for name in wanted), SEEN
