"""What the mix of jobs would pay: the tables of `coordinator.worth`, made from what tenants submit.

1. Sizes. Fractions of a GPU are patterns that must cover the mix with the fewest GPUs; the dual prices of that
   covering problem (cutting stock, Gilmore and Gomory 1961, solved by column generation) say what each size is worth.
   A size that two of fill a GPU pays for half of it; a small size that fits into holes that are there anyway pays
   nothing. `k` whole GPUs are worth `k`.
2. CPU. Each size needs the mean CPU of its jobs, at least its part of the CPU of the mean GPU.
3. Tables. For five prices of CPU: the best that can be had from a piece of a GPU, and from `f` whole ones.
4. Models. Where jobs ask for models, their demand is spread over the models that they allow as evenly as possible;
   a model in short supply becomes dear.
5. Whole slots. A size of several whole GPUs that is hard to place gets a premium, so that nodes which could take it
   are not broken.

The LP may use floats, since its result is rounded once and is data from then on. Sizes in memory count in steps of a
twentieth of the largest card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from coordinator import kernels
from coordinator.worth import GPU_UNITS, STEP_MILLI, STEPS, Kind, Worth
from vgpu.inventory import WHOLE_GPU_MILLI

CPU_FACTORS = (0.0, 0.4, 0.8, 1.2, 2.0)
MEMORY_STEPS = 20
LARGEST_WHOLE = 64
PREMIUM = 0.1
# Below so many jobs nothing is known of the mix. Few tell enough: what comes before there are prices takes the GPUs of
# models in short supply, and stays there.
FEWEST_JOBS = 10
_EPSILON = 1e-7
# More sizes than this are too many for the covering problem: some hundred steps of a third of a millisecond are enough
# beside the cycles. Fewer of a mix of 130 cost up to 0.4 points of packing, 100 nothing.
_MOST_SIZES = 100
# Prices of sizes are made anew after as many jobs as there were before, and after so many at the latest.
_RARELY = 2000

Table = NDArray[np.int64]
T = TypeVar("T")


Market = Callable[[Worth], tuple[Mapping[str, int], Mapping[int, int], int]]


class Pricing:
    """When prices are made anew. Those of sizes settle as more is known, so they are made more and more rarely, or
    once where the mix `is_known` beforehand; those of models and whole slots follow what is left every `every` jobs."""

    def __init__(self, every: int = 50, is_known: bool = False) -> None:
        self.worth: Worth | None = None
        self._is_known = is_known
        self._every = every
        self._sizes_at = 0 if is_known else FEWEST_JOBS
        self._market_at = 0

    def is_due(self, jobs: int) -> bool:
        """`jobs`: how many have arrived so far."""
        return jobs >= (self._market_at if self.worth else self._sizes_at)

    def refresh(self, mix: Mapping[Kind, int], jobs: int, market: Market, card_mib: int) -> None:
        """Makes `worth` anew where something moved; it stays the same object where nothing did. `market` tells what
        is left (`coordinator.index.Index.market`)."""
        _finished(self.refreshing(mix, jobs, market, card_mib))

    def refreshing(
        self, mix: Mapping[Kind, int], jobs: int, market: Market, card_mib: int
    ) -> Generator[None, None, None]:
        """`refresh` in steps of a few milliseconds, for who has other things to do between them."""
        sizes = self.worth
        if sizes is None or (jobs >= self._sizes_at and not self._is_known):
            sizes = yield from _size_prices(mix, card_mib)
            self._sizes_at = jobs + min(max(jobs, FEWEST_JOBS), _RARELY)
        self._market_at = jobs + self._every
        if sizes is None:
            return
        priced = with_market(sizes, mix, *market(sizes))
        if self.worth is None or moved(self.worth, priced):
            self.worth = priced


@frozen
class _Size:
    """A fraction of a GPU in steps, rounded up, with what its jobs need. `share` is the scarcer of both shares."""

    compute: int
    memory: int
    count: int
    cpu_milli: float
    share: float

    def most(self, memory_steps: int) -> int:
        """How many of them one GPU takes."""
        by_compute = STEPS // self.compute
        return min(by_compute, memory_steps // self.memory) if memory_steps else by_compute


def size_prices(mix: Mapping[Kind, int], card_mib: int) -> Worth | None:
    """Steps 1 to 3; no model and no whole size costs more than another yet. None while too little is known."""
    return _finished(_size_prices(mix, card_mib))


def _finished(steps: Generator[None, None, T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def _size_prices(mix: Mapping[Kind, int], card_mib: int) -> Generator[None, None, Worth | None]:
    if sum(mix.values()) < FEWEST_JOBS or card_mib <= 0:
        return None
    wholes, sizes = _sizes(mix, card_mib)
    gpus = sum(s.count * s.share for s in sizes) + sum(k * n for k, (n, _) in wholes.items())
    if gpus <= 0:
        return None
    cpu_milli = sum(n * kind.cpu_milli for kind, n in mix.items() if kind.gpus)
    rho = cpu_milli / gpus
    pays = yield from _pays_of(sizes)
    cpu = tuple(round(factor * GPU_UNITS / rho) if rho else 0 for factor in CPU_FACTORS)
    needs = [max(size.cpu_milli, rho * size.share) for size in sizes]
    values = []
    for price in cpu:
        paid = [pay - round(price * need) for pay, need in zip(pays, needs, strict=True)]
        table = kernels.knapsack(*_levels(sizes), np.array(paid, np.int64), STEPS, _memory_steps(sizes))
        values.append(tuple(map(tuple, table.tolist())))
        yield
    worth = Worth(cpu, tuple(values), (), max(1, card_mib // MEMORY_STEPS))
    return evolve(worth, whole=_wholes(worth, mix, {}))


def with_market(
    worth: Worth, mix: Mapping[Kind, int], values: Mapping[str, int], idle: Mapping[int, int], free_milli: int
) -> Worth:
    """Steps 4 and 5. `values` is what the nodes of each model are worth at equal prices, in units; `idle` counts
    nodes by their whole GPUs; `free_milli` is the compute that is left."""
    models = _model_prices(mix, values, worth)
    premiums = _premiums(mix, idle, free_milli)
    return evolve(worth, models=models, whole=_wholes(worth, mix, premiums))


def moved(before: Worth, after: Worth) -> bool:
    """Whether a price of a size moved, or one of a model or of whole slots by more than a thousandth."""
    if (before.cpu, before.memory_step_mib, before.values) != (
        after.cpu,
        after.memory_step_mib,
        after.values,
    ):
        return True
    names = {*before.models, *after.models}
    if any(abs(before.models.get(m, 1000) - after.models.get(m, 1000)) > 1 for m in names):
        return True
    pairs = zip(before.whole, after.whole, strict=True)
    return any(
        abs(a - b) > GPU_UNITS // 1000
        for one, other in pairs
        for a, b in zip(one[:9], other[:9], strict=True)
    )


def _sizes(mix: Mapping[Kind, int], card_mib: int) -> tuple[dict[int, tuple[int, float]], list[_Size]]:
    """({whole GPUs: (jobs, their CPU in all)}, sizes of fractions, those that most is asked for of first)."""
    step_mib = max(1, card_mib // MEMORY_STEPS)
    wholes: dict[int, tuple[int, float]] = {}
    found: dict[tuple[int, int], list[float]] = {}
    for kind, n in mix.items():
        if not kind.gpus:
            continue
        if kind.compute_milli == WHOLE_GPU_MILLI and kind.memory_mib is None:
            jobs, cpu = wholes.get(kind.gpus, (0, 0.0))
            wholes[kind.gpus] = jobs + n, cpu + n * kind.cpu_milli
            continue
        memory_mib = card_mib if kind.memory_mib is None else min(kind.memory_mib, card_mib)
        memory = min(MEMORY_STEPS, -(-memory_mib // step_mib))
        level = -(-kind.compute_milli // STEP_MILLI), memory
        entry = found.setdefault(level, [0.0, 0.0, 0.0])
        entry[0] += n * kind.gpus
        entry[1] += n * kind.cpu_milli
        share = max(kind.compute_milli / WHOLE_GPU_MILLI, memory_mib / card_mib)
        entry[2] += n * kind.gpus * share
    # Memory counts only where it can run out before compute.
    is_flat = all(
        memory * STEPS <= (compute + STEPS // MEMORY_STEPS) * MEMORY_STEPS for compute, memory in found
    )
    merged: dict[tuple[int, int], list[float]] = {}
    for (compute, memory), entry in sorted(found.items()):
        into = merged.setdefault((compute, 0 if is_flat else memory), [0.0, 0.0, 0.0])
        for n in range(3):
            into[n] += entry[n]
    sizes = [_Size(c, m, int(n), cpu / n, share / n) for (c, m), (n, cpu, share) in merged.items()]
    return wholes, sorted(sizes, key=lambda size: -size.count * size.share)


def _memory_steps(sizes: Sequence[_Size]) -> int:
    return MEMORY_STEPS if any(size.memory for size in sizes) else 0


def _levels(sizes: Sequence[_Size]) -> tuple[Table, Table]:
    return np.array([s.compute for s in sizes], np.int64), np.array([s.memory for s in sizes], np.int64)


def _pays_of(sizes: Sequence[_Size]) -> Generator[None, None, list[int]]:
    """What each size pays for its piece of a GPU, in units: its dual price. Of a size that little is asked for this is
    what the GPU could not sell beside it, so the rare ones need no covering problem; one after the other, so that no
    GPU can be sold for more than one."""
    common, steps = sizes[:_MOST_SIZES], _memory_steps(sizes)
    duals = yield from _duals(common)
    pays = [round(GPU_UNITS * dual) for dual in duals]
    for place, size in enumerate(sizes[len(common) :], len(common)):
        table = kernels.knapsack(*_levels(sizes[:place]), np.array(pays, np.int64), STEPS, steps)
        unsold = [
            (GPU_UNITS - int(table[STEPS - n * size.compute, steps - n * size.memory])) // n
            for n in range(1, size.most(steps) + 1)
        ]
        pays.append(max(0, min(unsold)))
        yield
    return pays


def _duals(sizes: Sequence[_Size]) -> Generator[None, None, list[float]]:
    """Dual prices of "cover all sizes with the fewest GPUs". Revised simplex over patterns; the first ones hold one
    size only, the next is always the one that would pay most for a GPU at the present prices. The basis is kept
    inverted and only by sums: solvers start threads for a hundred sizes, which a busy machine makes a thousand times
    slower."""
    if not sizes:
        return []
    compute, memory = _levels(sizes)
    steps, count = _memory_steps(sizes), len(sizes)
    demand = np.array([s.count for s in sizes], float)
    most = np.array([s.most(steps) for s in sizes], float)
    inverse, amounts = np.diag(1 / most), demand / demand.sum() / most
    for _ in range(20 * count):
        prices = np.maximum(inverse.sum(axis=0), 0.0)
        pattern, best = kernels.best_pattern(compute, memory, prices, STEPS, steps)
        if best <= 1 + _EPSILON:
            break
        direction = (inverse * pattern).sum(axis=1)
        ratios = np.full(count, np.inf)
        positive = direction > 1e-9
        ratios[positive] = np.maximum(amounts[positive], 0.0) / direction[positive]
        leaves = int(ratios.argmin())
        row, amount = inverse[leaves] / direction[leaves], ratios[leaves]
        inverse -= np.outer(direction, row)
        amounts -= direction * amount
        inverse[leaves], amounts[leaves] = row, amount
        yield
    return [float(price) for price in np.round(prices / max(best, 1.0), 9)]


def _wholes(
    worth: Worth, mix: Mapping[Kind, int], premiums: Mapping[int, float]
) -> tuple[tuple[int, ...], ...]:
    wholes: dict[int, tuple[int, int]] = {}
    gpus, cpu_milli = 0.0, 0
    card_mib = worth.memory_step_mib * MEMORY_STEPS
    for kind, n in mix.items():
        if not kind.gpus:
            continue
        is_whole = kind.compute_milli == WHOLE_GPU_MILLI and kind.memory_mib is None
        memory_mib = card_mib if kind.memory_mib is None else kind.memory_mib
        gpus += n * kind.gpus * max(kind.compute_milli / WHOLE_GPU_MILLI, min(1.0, memory_mib / card_mib))
        cpu_milli += n * kind.cpu_milli
        if is_whole:
            jobs, cpu = wholes.get(kind.gpus, (0, 0))
            wholes[kind.gpus] = jobs + n, cpu + n * kind.cpu_milli
    rho = cpu_milli / gpus if gpus else 0.0
    tables = []
    for price, values in zip(worth.cpu, worth.values, strict=True):
        pays = {
            k: round(GPU_UNITS * k * (1 + premiums.get(k, 0.0)) - price * max(cpu / jobs, rho * k))
            for k, (jobs, cpu) in wholes.items()
        }
        table = [0]
        for f in range(1, LARGEST_WHOLE + 1):
            best = table[f - 1] + values[STEPS][-1]
            table.append(max([best, *(pay + table[f - k] for k, pay in pays.items() if k <= f)]))
        tables.append(tuple(table))
    return tuple(tables)


def _premiums(mix: Mapping[Kind, int], idle: Mapping[int, int], free_milli: int) -> dict[int, float]:
    asked = sum(n * kind.gpus * kind.compute_milli for kind, n in mix.items())
    sizes = {kind.gpus for kind in mix if kind.gpus > 1 and kind.compute_milli == WHOLE_GPU_MILLI}
    premiums = {}
    for k in sorted(sizes):
        wanted = sum(n * (kind.gpus // k) for kind, n in mix.items()) * free_milli / max(1, asked)
        slots = sum(count * (whole // k) for whole, count in idle.items())
        load = min(4.0, wanted / slots) if slots else 4.0
        premiums[k] = PREMIUM * load**4 if wanted else 0.0
    return premiums


def _model_prices(mix: Mapping[Kind, int], values: Mapping[str, int], worth: Worth) -> dict[str, int]:
    """Prices of models in thousandths; nothing where no job asks for a model."""
    total = sum(values.values())
    if total <= 0 or not any(kind.model for kind in mix):
        return {}
    models = sorted(values)
    demand: Counter[frozenset[str]] = Counter()
    for kind, n in mix.items():
        allowed = frozenset(m for m in models if model_matches(kind.model, m))
        if kind.gpus and allowed:
            demand[allowed] += n * _pays(kind, worth)
    asked = sum(demand.values())
    if not asked:
        return {}
    flows = {allowed: amount * total / asked for allowed, amount in demand.items()}
    capacity = {model: values[model] + 0.001 * total for model in models}
    loads = _balanced(flows, capacity, asked=float(total))
    prices = {model: min(loads[model], 10.0) ** 2 for model in models}
    scale = total / max(1e-9, sum(prices[m] * values[m] for m in models))
    return {model: round(1000 * price * scale) for model, price in prices.items()}


def model_matches(wanted: str, model: str) -> bool:
    """As placement does it (`coordinator.fit.matches_model`)."""
    return wanted.lower() in model.lower()


def _pays(kind: Kind, worth: Worth) -> int:
    """What a task of this kind pays for its GPUs, in thousandths of a GPU and never nothing: small sizes pay nothing
    for a piece of a GPU, yet they are demand for a model."""
    if kind.compute_milli == WHOLE_GPU_MILLI and kind.memory_mib is None:
        return 1000 * kind.gpus
    values = worth.values[0]
    steps = worth.memory_steps
    memory = kind.memory_mib if kind.memory_mib is not None else worth.memory_step_mib * MEMORY_STEPS
    level = min(steps, -(-memory // worth.memory_step_mib)) if steps else 0
    return kind.gpus * values[min(STEPS, -(-kind.compute_milli // STEP_MILLI))][level] // (GPU_UNITS // 1000)


def _balanced(
    flows: Mapping[frozenset[str], float], capacity: Mapping[str, float], asked: float
) -> dict[str, float]:
    """Loads of models when each set's demand is spread over its models as evenly as possible: sets are filled like
    water one after the other, and again, until nothing moves."""
    filled = dict.fromkeys(capacity, 0.0)
    parts: dict[frozenset[str], dict[str, float]] = {}
    order = sorted(flows, key=lambda allowed: (len(allowed), sorted(allowed)))
    for _ in range(100):
        change = 0.0
        for allowed in order:
            before = parts.get(allowed, {})
            for model, part in before.items():
                filled[model] -= part
            parts[allowed] = _poured(flows[allowed], sorted(allowed), filled, capacity)
            for model, part in parts[allowed].items():
                filled[model] += part
                change += abs(part - before.get(model, 0.0))
        if change < 1e-6 * asked:
            break
    return {model: filled[model] / capacity[model] for model in capacity}


def _poured(
    amount: float, models: Sequence[str], filled: Mapping[str, float], capacity: Mapping[str, float]
) -> dict[str, float]:
    """Raises the lowest levels first until `amount` is poured."""
    order = sorted(models, key=lambda model: filled[model] / capacity[model])
    level, wide = 0.0, 0.0
    for place, model in enumerate(order):
        wide += capacity[model]
        inside = sum(filled[m] for m in order[: place + 1])
        level = (amount + inside) / wide
        if place + 1 == len(order) or level <= filled[order[place + 1]] / capacity[order[place + 1]]:
            break
    return {m: max(0.0, level * capacity[m] - filled[m]) for m in order}
