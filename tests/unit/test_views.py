"""Views are derived anew in parts, and are what a whole look would give; and who asks is told which ones changed."""

from __future__ import annotations

from collections import Counter
from random import Random

from attrs import evolve
from msgspec.structs import asdict, replace

from coordinator import model
from coordinator.cluster import Cluster
from coordinator.model import NodeAdmin, TaskState
from coordinator.nodes import NodeStatus, NodeView
from tests.builders import GIB, START_MS, World, gpu, node, piece, report, running, settings, task


def test_a_view_derived_in_parts_is_the_one_that_a_whole_look_gives() -> None:
    """One cluster looks after every few events, another one only once, at the end: then nothing is known before. (What is
    silent together depends on when somebody looked, and is left out here.)"""
    random = Random(11)
    seen: Counter[str] = Counter()
    for _ in range(40):
        events: list[tuple[model.Event, int]] = []
        watcher = Cluster(settings(lost_seconds=4, mass_silence_percent=100))
        changes = Changes(random)
        for at_ms in range(START_MS, START_MS + 60_000, 700):
            for event in changes.some(at_ms):
                events.append((event, at_ms))
                watcher.apply(event, at_ms)
                seen[type(event).__name__] += 1
            if random.random() < 0.7:
                watcher.snapshot(at_ms)
            if random.random() < 0.05:
                other = Cluster(watcher._settings)
                for event, then_ms in events:
                    other.apply(event, then_ms)
                found, expected = watcher.snapshot(at_ms), other.snapshot(at_ms)
                assert found.nodes.keys() == expected.nodes.keys()
                for name, view in found.nodes.items():
                    assert told(view) == told(expected.nodes[name])
                    seen[view.status.value] += 1
                    seen["closed GPU"] += any(gpu.closed for gpu in view.gpus)
                assert (found.kinds, found.cluster_memory_mib) == (
                    expected.kinds,
                    expected.cluster_memory_mib,
                )
                assert found.restless == expected.restless
    assert min(seen[status.value] for status in NodeStatus) > 5, seen
    assert (
        min(
            seen[name]
            for name in ("JobSeen", "JobGone", "ReportSeen", "ReportGone", "TaskSeen", "closed GPU")
        )
        > 50
    )


def told(view: NodeView) -> tuple[dict[str, object], object]:
    """All that a view says; which ends are confirmed only counts for what it says of its GPUs."""
    return asdict(replace(view, facts=replace(view.facts, released={}))), view.gpus


class Changes:
    """Things that happen to three nodes of two GPUs, one of which two of the nodes claim at times."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.live: dict[str, model.Job] = {}
        self.count = 0
        self.begun = False

    def some(self, at_ms: int) -> list[model.Event]:
        if not self.begun:
            self.begun = True
            nodes = [node(f"n{n}", gpus=2) for n in range(3)]
            return [
                e for one in nodes for e in (model.InventorySeen(one), model.ReportSeen(report(one.node)))
            ]
        return [self.one(at_ms) for _ in range(self.random.randrange(3))]

    def one(self, at_ms: int) -> model.Event:
        random, self.count = self.random, self.count + 1
        name, revision = random.choice(("n0", "n1", "n2")), self.count
        gpus = [f"GPU-{name}-{index}" for index in (0, 1)]
        what = random.randrange(16)
        if what < 4:
            pieces = [
                piece(gpu, GIB * random.randrange(1, 9), 50, "mps") for gpu in gpus if random.random() < 0.7
            ]
            one = running(f"j{self.count}", name, pieces, tenant=random.choice("ab"))
            self.live[one.id] = one
            return model.JobSeen(one, revision)
        if what < 7 and self.live:
            return model.JobGone(self.live.pop(random.choice(sorted(self.live))).id, "jobs")
        if what == 7 and self.live:
            id = random.choice(sorted(self.live))
            self.live[id] = replace(self.live[id], state=model.JobState.EVICTING)
            return model.JobSeen(self.live[id], revision)
        if what == 8:
            twin = gpu("n0", 1) if random.random() < 0.5 else gpu(name, 1)
            return model.InventorySeen(node(name, gpus=[gpu(name, 0), twin], cpu=1000 * random.randrange(9)))
        if what == 9:
            return model.ReportGone(name)
        if what == 10:
            return model.AdminSeen(
                NodeAdmin(name, random.random() < 0.5, labels={"rack": random.choice("xy")})
            )
        if what == 12:
            key = f"/serai/grants/{name}/odd.1"
            return model.RecordUnreadable(key, "garbage") if random.random() < 0.4 else model.RecordGone(key)
        if what == 11 and self.live:
            one = self.live[random.choice(sorted(self.live))]
            return model.TaskSeen(task(one, 0, TaskState.EXITED, ended_at_ms=at_ms))
        held = {
            f"{id}.1.0": tuple(random.sample(gpus, 1))
            for id in random.sample(sorted(self.live), len(self.live) // 3)
        }
        foreign = {random.choice(gpus): 500} if random.random() < 0.3 else {}
        faults = {random.choice(gpus): "ecc"} if random.random() < 0.2 else {}
        return model.ReportSeen(report(name, at_ms, held, foreign, faults))


def test_a_snapshot_tells_which_nodes_changed_since_another() -> None:
    w = World(*(node(f"n{n}", gpus=1) for n in range(5)))
    first = w.snapshot()
    again = w.snapshot()
    assert again.nodes is first.nodes, "nothing changed"
    assert again.view_log.since(first.view_log) == set()
    w.submit(running("a", "n1", [piece("GPU-n1-0")]))
    second = w.snapshot()
    w.see(model.ReportGone("n3"), model.ReportSeen(replace(report("n2"), sequence=2)))
    w.add(node("n9"))
    third = w.snapshot()
    assert second.view_log.since(first.view_log) == {"n1"}
    assert third.view_log.since(second.view_log) == {"n2", "n3", "n9"}
    assert third.view_log.since(first.view_log) == {"n1", "n2", "n3", "n9"}
    same = [name for name in first.nodes if third.nodes[name] is first.nodes[name]]
    assert same == ["n0", "n4"]
    assert first.view_log.since(third.view_log) is None, "the past is not told"
    other = evolve(third, nodes={**third.nodes, "n0": third.nodes["n9"]})
    assert other.view_log.since(first.view_log) is None, "nodes that no cluster told of"
    assert World(node("n1")).snapshot().view_log.since(first.view_log) is None
    for _ in range(1_000):
        w.submit(running("b", "n0", [piece("GPU-n0-0")]))
        last = w.cluster.snapshot(w.now_ms)
    assert last.view_log.since(first.view_log) is None, "too long ago"
    assert len(w.cluster._machines._changed_views) < 1_000
