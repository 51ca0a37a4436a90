"""What a mix would pay, and that placement loses the least of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from attrs import evolve

from coordinator.fit import Fit, fit
from coordinator.index import Index
from coordinator.placement import Draft
from coordinator.prices import FEWEST_JOBS, Pricing, moved, size_prices, with_market
from coordinator.snapshot import TaskShape, shape_of
from coordinator.usage import Headroom
from coordinator.worth import GPU_UNITS, Kind, Worth
from tests.builders import GIB, World, node, piece, running, spec

CARD = 80 * GIB


def kind(milli: int, gpus: int = 1, cpu: int = 1000, memory: int | None = -1, model: str = "") -> Kind:
    """Memory in proportion to compute unless it is given; a whole GPU has all of it."""
    if memory == -1:
        memory = None if milli == 1000 else CARD * milli // 1000
    return Kind(cpu, milli, memory, gpus, model)


def priced(mix: Mapping[Kind, int]) -> Worth:
    worth = size_prices(mix, CARD)
    assert worth is not None
    return worth


def pays(worth: Worth, milli: int) -> float:
    """What such a piece is worth where CPU costs nothing, in GPUs."""
    return worth.values[0][milli // 10][-1] / GPU_UNITS


@pytest.mark.parametrize(
    ("mix", "prices"),
    [
        # nothing goes beside an 810: it pays for the whole GPU; 100s fit into the holes that are there anyway
        ({kind(810): 100, kind(100): 50}, {810: 1.0, 800: 0.0}),
        ({kind(470): 100}, {470: 0.5, 940: 1.0, 460: 0.0}),
        ({kind(320): 100}, {320: 1 / 3, 640: 2 / 3, 1000: 1.0}),
        # many 300s beside few 700s: whoever is left over decides
        ({kind(700): 50, kind(300): 500}, {300: 1 / 3, 700: 2 / 3}),
    ],
)
def test_a_size_is_worth_its_part_of_the_fewest_gpus(mix, prices):
    worth = priced(mix)
    for milli, expected in prices.items():
        assert pays(worth, milli) == pytest.approx(expected, abs=1e-6), milli


def test_prices_cover_the_mix_and_no_gpu_can_be_sold_for_more_than_one():
    """Weak duality: no pattern pays more than a GPU, so the priced mix is a lower bound of the GPUs that it needs."""
    mix = {kind(m): n for m, n in ((810, 1078), (470, 750), (320, 328), (650, 253), (230, 140), (460, 128))}
    worth = priced(mix)
    assert pays(worth, 1000) == pytest.approx(1.0, abs=1e-6)
    needed = sum(n * pays(worth, k.compute_milli) for k, n in mix.items())
    assert (
        sum(n * k.compute_milli / 1000 for k, n in mix.items()) <= needed <= 1078 + 375 + 110 + 253 + 35 + 64
    )


def test_a_rare_size_pays_what_the_gpu_cannot_sell_beside_it():
    """Of more sizes than the covering problem takes. Nothing goes beside a 700 of the many but a 300."""
    many = {kind(10 * c, memory=CARD * m // 20): 100 for c in range(70, 82) for m in range(8, 18)}
    worth = priced(many | {kind(600): 1, kind(300): 1, kind(400): 1})
    assert pays(worth, 600) == pytest.approx(1.0, abs=1e-6)
    assert pays(worth, 300) == 0
    assert pays(worth, 400) == 0, "the rare 600 would sell the whole GPU already"
    assert max(line[-1] for line in worth.values[0]) <= GPU_UNITS, "no GPU is sold for more than one"


def test_little_known_is_no_price():
    assert size_prices({kind(500): FEWEST_JOBS - 1}, CARD) is None
    assert size_prices({Kind(1000, 0, 0, 0, ""): 500}, CARD) is None, "nobody wants a GPU"
    assert size_prices({kind(500): 500}, 0) is None, "no GPU"


def test_memory_counts_once_it_can_run_out_before_compute():
    assert priced({kind(250): 100}).memory_steps == 0
    worth = priced({kind(100, memory=CARD // 2): 100})
    assert worth.memory_steps > 0
    assert worth.values[0][100][10] == pytest.approx(GPU_UNITS / 2, abs=1), "half the memory is half the card"
    assert worth.values[0][10][20] == pytest.approx(GPU_UNITS / 2, abs=1)


def test_a_model_in_short_supply_becomes_dear():
    mix = {kind(1000): 100, kind(1000, model="h100"): 100}
    worth = with_market(priced(mix), mix, {"A100": 9 * GPU_UNITS, "H100": GPU_UNITS}, {1: 10}, 10_000)
    assert worth.models["H100"] > 3 * worth.models["A100"]
    even = with_market(priced(mix), mix, {"A100": 5 * GPU_UNITS, "H100": 5 * GPU_UNITS}, {1: 10}, 10_000)
    assert even.models["H100"] == pytest.approx(even.models["A100"], abs=2)
    nobody = {kind(1000): 100}
    assert with_market(priced(nobody), nobody, {"A100": 1, "H100": 1}, {1: 2}, 2000).models == {}


def test_slots_of_several_whole_gpus_get_a_premium_as_they_become_few():
    mix = {kind(1000): 100, kind(1000, gpus=8): 20}
    worth = priced(mix)
    many = with_market(worth, mix, {"A100": GPU_UNITS}, {8: 1000}, 8_000_000)
    few = with_market(worth, mix, {"A100": GPU_UNITS}, {8: 1, 4: 1998}, 8_000_000)
    assert few.whole[0][8] > 1.3 * many.whole[0][8]
    assert moved(many, few)
    assert not moved(many, many)


def test_a_node_short_of_cpu_is_worth_less():
    mix = {kind(1000, cpu=12_000): 100}
    worth = priced(mix)
    w = World(node("rich", cpu=96_000), node("poor", cpu=12_000), node("none", gpus=0))
    rows = {name: view.row for name, view in w.snapshot().nodes.items()}
    assert worth.of(rows["rich"]) > 2 * worth.of(rows["poor"]) > 0
    assert worth.of(rows["none"]) == 0


def where(w: World, worth: Worth | None, of: TaskShape) -> tuple[str, tuple[int, ...]]:
    snapshot = evolve(w.snapshot(), worth=worth)
    plain = Draft(snapshot).search(of, ()).best(Headroom())
    indexed = Draft(snapshot, index=Index()).search(of, ()).best(Headroom())
    assert plain is not None
    assert indexed is not None
    assert (indexed.node, indexed.found.gpus) == (plain.node, plain.found.gpus)
    return plain.node, plain.found.gpus


def test_a_job_goes_where_the_least_worth_is_lost():
    """A 230 in the hole of an 810 would be free, but there is none; beside a 470 it costs half a GPU, in the rest of
    a 540 it takes what a 460 would pay for; best fit would take the tighter one."""
    mix = Counter({kind(470): 400, kind(230): 10, kind(750): 300})
    w = World(node("n1", gpus=2, groups=()))
    w.submit(
        running("a", "n1", [piece("GPU-n1-0", CARD * 520 // 1000, 520, "mps")])
    )  # 480 left: a 470 goes there
    w.submit(
        running("b", "n1", [piece("GPU-n1-1", CARD * 550 // 1000, 550, "mps")])
    )  # 450 left: nothing does
    of = shape_of(spec(memory=CARD * 230 // 1000, compute=230)).tasks[0]
    assert where(w, priced(mix), of) == ("n1", (1,))
    of = shape_of(spec(memory=CARD * 450 // 1000, compute=450)).tasks[0]
    assert where(w, priced(mix), of) == ("n1", (1,))


def test_of_gpus_that_lose_as_little_one_that_is_broken_already_is_taken():
    """An 810 still fits beside a 100."""
    mix = Counter({kind(810): 100, kind(100): 50})
    w = World(node("n1", gpus=1, groups=()), node("n2", gpus=2, groups=()))
    w.submit(running("a", "n2", [piece("GPU-n2-1", CARD * 810 // 1000, 810, "mps")]))
    of = shape_of(spec(memory=CARD * 100 // 1000, compute=100)).tasks[0]
    worth = priced(mix)
    row = w.snapshot().nodes["n1"].row
    found = fit(of, row, worth)
    assert isinstance(found, Fit)
    assert found.score == (0, 1), "nothing is lost, yet a GPU is broken"
    assert where(w, worth, of) == ("n2", (1,))


def test_whole_gpus_of_nodes_that_communication_leaves_equal_go_by_worth():
    """Two GPUs of the node that has no CPU for a job of eight anyway."""
    mix = Counter({kind(1000, gpus=8, cpu=64_000): 60, kind(1000, gpus=2, cpu=2000): 60})
    w = World(node("a", groups=(), cpu=96_000), node("b", groups=(), cpu=16_000))
    of = shape_of(spec(gpus=2, cpu=2000)).tasks[0]
    assert where(w, None, of)[0] == "a", "without prices all is equal, so the name decides"
    assert where(w, priced(mix), of)[0] == "b"


def test_prices_are_made_rarely_and_swapped_only_when_they_moved():
    pricing, asked = Pricing(every=50), 0

    def market(worth: Worth) -> tuple[Mapping[str, int], Mapping[int, int], int]:
        nonlocal asked
        asked += 1
        return {"A100": 8 * GPU_UNITS}, {8: 1}, 8000

    seen = []
    for jobs in range(1000):
        if pricing.is_due(jobs):
            pricing.refresh({kind(470): jobs}, jobs, market, CARD)
            seen.append(pricing.worth)
    assert asked <= 25
    assert len({id(worth) for worth in seen}) == 1, "of more of the same nothing moves"
    pricing.refresh({kind(470): 1000, kind(810): 1000}, 2000, market, CARD)
    assert pricing.worth is not seen[-1]
