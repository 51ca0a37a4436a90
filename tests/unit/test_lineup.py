"""The lineup that follows the lines from snapshot to snapshot says what one made from nothing says."""

from __future__ import annotations

from random import Random

from coordinator.lineup import Lineup, Lineups
from coordinator.model import JobGone
from coordinator.snapshot import NEVER_MS, LineKey
from tests.builders import GIB, World, gpu, job, node


def told(lineup: Lineup) -> dict[str, object]:
    """All of it, in terms that do not depend on the places of lines."""
    at = lineup.order.at

    def keys(lines: int) -> set[LineKey]:
        found = {place for place in at if lines >> place & 1}
        assert sum(1 << place for place in found) == lines, "every place is known"
        return {LineKey(at[place].priority, at[place].shape) for place in found}

    return {
        tenant: (
            keys(front.all),
            {(at[place].priority, at[place].shape): ms for ms, place in front.quickest},
            {key: tuple(line) for key, line in front.lines.items()},
            front.wanted,
            front.waits_since(NEVER_MS) and front.oldest_ms,
        )
        for tenant, front in lineup.fronts.items()
    }


def holds(lineup: Lineup) -> None:
    for front in lineup.fronts.values():
        limits = {
            lineup.order.lines[key].place: [
                1000 * job.spec.max_runtime_seconds
                for job in line
                if job.spec.max_runtime_seconds is not None
            ]
            for key, line in front.lines.items()
        }
        assert front.quickest == sorted((min(found), place) for place, found in limits.items() if found)
    lines = [line for _, line in sorted(lineup.order.at.items())]
    ranks = [(-line.priority, line.needs.size) for line in lines]
    assert ranks == sorted(ranks), "the line that goes first has the lowest bit"
    for line, rank in zip(lines, ranks, strict=True):
        assert line.peers == sum(other.bit for other, its in zip(lines, ranks, strict=True) if its == rank)
        assert lineup.order.of_shape(line.shape) & line.bit


def test_what_follows_is_what_is_made_from_nothing() -> None:
    """With enough new shapes between two others that there is no place left, several times."""
    random = Random(3)
    w = World(node("n1", [gpu("n1", n, 40 * GIB, ("A100", "H100")[n % 2]) for n in range(4)]))
    lineups, waiting, orders = Lineups(), [], set()
    for step in range(400):
        w.now = step
        for _ in range(random.randrange(4) if step < 300 else 0):
            one = job(
                f"j{step}-{random.random()}",
                step - random.randrange(3),
                tenant=random.choice("abc"),
                memory=random.choice((None, 1 + random.randrange(300))),
                compute=random.choice((100, 1000)),
                model=random.choice(("", "A100", "H100")),
                priority=random.choice((0, 1)),
                max_runtime_seconds=random.choice((None, 60, 90)),
            )
            waiting.append(one)
            w.submit(one)
        if step > 300 or (waiting and random.random() < 0.3):
            for _ in range(min(len(waiting), random.randrange(8))):
                gone = waiting.pop(random.choice((0, random.randrange(len(waiting)))))
                w.see(JobGone(gone.id, "queue"))
        if random.random() < 0.7:
            snapshot = w.snapshot()
            lineup = lineups.of(snapshot)
            assert told(lineup) == told(Lineups().of(snapshot))
            holds(lineup)
            orders.add(id(lineup.order))
    assert not waiting
    assert len(orders) > 2


def test_a_new_kind_of_card_is_a_new_order() -> None:
    """A whole card is taken for the smallest that matches."""
    w = World(node("n1", [gpu("n1", 0, 40 * GIB)]))
    w.submit(job("whole"), job("slice", memory=20 * GIB, compute=100))
    lineups = Lineups()
    assert lineups.of(w.snapshot()).fronts["a"].wanted.memory == 60 * GIB
    w.add(node("n2", [gpu("n2", 0, 16 * GIB, "T4")]))
    lineup = lineups.of(w.snapshot())
    assert lineup.fronts["a"].wanted.memory == 36 * GIB
    holds(lineup)


def test_lines_that_nobody_waits_in_any_more_are_forgotten() -> None:
    """Each larger than all before, so that there is always a place behind."""
    w = World(node("n1", [gpu("n1", 0, 40 * GIB)]))
    lineups = Lineups()
    for memory in range(1, 1_500):
        one = job(f"j{memory}", memory, memory=memory, compute=100)
        w.submit(one)
        lineup = lineups.of(w.snapshot())
        w.see(JobGone(one.id, "queue"))
    assert len(lineup.order.lines) < 1_100
    assert max(lineup.order.at) < 10_000
