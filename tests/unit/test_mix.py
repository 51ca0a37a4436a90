"""What tenants submit is counted once, fades, and outlives a restart."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from coordinator import model
from coordinator.cluster import Cluster
from coordinator.mix import MOST_KINDS, MOST_TASKS, JobMix
from coordinator.model import Mix, MixLine
from coordinator.records import decode, encode
from coordinator.snapshot import Shape, shape_of
from coordinator.worth import Kind
from tests.builders import GIB, START_MS, World, job, node, settings, spec

HALF = Kind(1000, 500, 40 * GIB, 1, "")
WHOLE = Kind(1000, 1000, None, 1, "")


def shape(**changes: int) -> Shape:
    return shape_of(spec(**changes))


def line(kind: Kind, tasks: int) -> MixLine:
    return MixLine(tasks, kind.gpus, kind.compute_milli, kind.memory_mib, kind.model, kind.cpu_milli)


def test_a_job_counts_once_with_all_its_tasks():
    w = World(node("n1"))
    w.snapshot()
    w.submit(job("a", memory=40 * GIB, compute=500, count=3), job("b"))
    w.cycle()
    w.run("a")
    w.end("a")
    assert (w.cluster.mix.counts, w.cluster.mix.seen) == ({HALF: 3, WHOLE: 1}, 4)


def test_a_new_leader_knows_what_was_submitted_before():
    """Jobs of the listing that the record knows already are not counted again, in whatever order both come."""
    for is_first in (True, False):
        cluster = Cluster(settings())
        record = model.MixSeen(Mix(START_MS, (line(HALF, 70), line(WHOLE, 30))))
        old, new = job("old"), replace(job("new"), submitted_at_ms=START_MS + 1)
        events = [record, model.JobSeen(old, 1), model.JobSeen(new, 2)]
        for event in events if is_first else reversed(events):
            cluster.apply(event, START_MS + 5)
        cluster.snapshot(START_MS + 5)
        assert cluster.mix.counts == {HALF: 70, WHOLE: 31}
        cluster.apply(record, START_MS + 6)
        assert cluster.mix.counts == {HALF: 70, WHOLE: 31}, "what the leader writes is no news to a standby"


def test_without_a_record_the_jobs_of_the_listing_are_the_mix():
    cluster = Cluster(settings())
    cluster.apply(model.JobSeen(job("j"), 1), START_MS)
    cluster.snapshot(START_MS)
    assert cluster.mix.counts == {WHOLE: 1}


def test_the_record_is_due_once_a_tenth_is_new_and_reads_back_as_it_was():
    mix = JobMix()
    assert not mix.is_due
    for _ in range(100):
        mix.add(shape())
    mix.add(shape(memory=40 * GIB, compute=500))
    assert mix.is_due
    record = decode(Mix, encode(mix.record(START_MS)))
    assert record.lines == (line(WHOLE, 100), line(HALF, 1)), "the commonest first"
    again = JobMix()
    again.past(record)
    assert (again.counts, again.seen, again.until_ms, again.is_due) == (mix.counts, 101, START_MS, False)
    for _ in range(12):
        assert not again.is_due
        again.add(shape())
    assert again.is_due


def test_old_demand_fades_and_rare_kinds_lose_their_part_together():
    mix = JobMix()
    for cpu in range(1, 201):
        mix.add(shape(gpus=8, cpu=cpu))  # two hundred kinds of one size, each seen once
    mix.add(shape(count=MOST_TASKS - 200))
    assert mix.counts.total() == MOST_TASKS
    mix.add(shape(count=2))
    of_eight = Counter({kind: n for kind, n in mix.counts.items() if kind.gpus == 8})
    assert of_eight.total() == 100, "half of them, though half of one is nothing"
    assert mix.counts[WHOLE] == (MOST_TASKS - 198) // 2
    assert mix.seen == MOST_TASKS + 2


def test_kinds_without_end_are_not_kept():
    mix = JobMix()
    for cpu in range(1, 3 * MOST_KINDS):
        mix.add(shape(cpu=cpu))
        assert len(mix.counts) <= MOST_KINDS


def test_an_odd_line_is_passed_over():
    """DA-7: a record that a person wrote; nothing of it may end up in the prices."""
    odd = (
        replace(line(HALF, 5), tasks=-5),
        replace(line(HALF, 5), compute_milli=0),
        replace(line(HALF, 5), compute_milli=1001),
        replace(line(HALF, 5), memory_mib=-1),
        replace(line(HALF, 5), gpus=-1),
        replace(line(HALF, 5), cpu_milli=-1),
    )
    mix = JobMix()
    mix.past(Mix(START_MS, (*odd, line(HALF, 5), replace(line(WHOLE, 1), tasks=10**18))))
    assert mix.counts.keys() == {HALF, WHOLE}
    assert mix.counts.total() <= MOST_TASKS
