"""What tenants submit: how many tasks of each kind have come, for the prices of placement.

Every job counts once, when it is first seen. Old demand fades: once the counts are many they are all halved, so that
they are those of the last ten thousand tasks or so. The leader writes them to the store from time to time
(`coordinator.sweep`), so that jobs which have ended are still known after a restart.
"""

from __future__ import annotations

from collections import Counter

from coordinator.model import Mix, MixLine
from coordinator.snapshot import Shape
from coordinator.worth import Kind, kind_of
from vgpu.inventory import WHOLE_GPU_MILLI

# Beyond so many tasks, or kinds of them, the past fades. The record of so many kinds has some 100 KB.
MOST_TASKS = 20_000
MOST_KINDS = 1_000
# It is written again once a tenth of it is new.
_NEW_PART = 10


class JobMix:
    """Mutable, and owned by one `Cluster`. `seen` only grows: so many tasks have come, those of the record included.
    `written` is how many had come when it was written last. Jobs that were submitted up to `until_ms` stand in the
    record that was read."""

    def __init__(self) -> None:
        self._counts: Counter[Kind] = Counter()
        self._total = 0
        self._seen = 0
        self._new: dict[Shape, int] = {}  # jobs that are not among them yet
        self.until_ms = 0
        self.written = 0

    def add(self, shape: Shape) -> None:
        """A job of this shape. It is counted when somebody looks: many come of few shapes."""
        self._new[shape] = self._new.get(shape, 0) + 1
        if len(self._new) > MOST_KINDS:
            self._take_in()

    @property
    def counts(self) -> Counter[Kind]:
        self._take_in()
        return self._counts

    @property
    def seen(self) -> int:
        self._take_in()
        return self._seen

    def past(self, record: Mix) -> None:
        """What an earlier leader wrote, before anything else is counted. A line that is of no possible task is
        passed over."""
        for line in record.lines:
            kind = Kind(line.cpu_milli, line.compute_milli, line.memory_mib, line.gpus, line.model)
            self._count(kind, line.tasks)
        self._fade()
        self.until_ms = record.until_ms
        self.written = self.seen

    @property
    def is_due(self) -> bool:
        """Whether enough is new to write it."""
        new = self.seen - self.written
        return new > 0 and _NEW_PART * new >= self._total

    def record(self, now_ms: int) -> Mix:
        lines = (
            MixLine(tasks, kind.gpus, kind.compute_milli, kind.memory_mib, kind.model, kind.cpu_milli)
            for kind, tasks in self.counts.most_common()
        )
        return Mix(now_ms, tuple(lines))

    def _take_in(self) -> None:
        if self._new:
            for shape, jobs in self._new.items():
                for task in shape.tasks:
                    self._count(kind_of(task.gpus, task.cpu_milli), task.count * jobs)
            self._new.clear()
            self._fade()

    def _count(self, kind: Kind, tasks: int) -> None:
        if tasks > 0 and _is_possible(kind):
            counted = min(tasks, MOST_TASKS)
            self._counts[kind] += counted
            self._total += counted
            self._seen += tasks

    def _fade(self) -> None:
        """What is left over by one kind goes to the next one of its size, so that rare kinds lose together what they
        should, and not each of them everything."""
        while self._total > MOST_TASKS or len(self._counts) > MOST_KINDS:
            rest, halved = 0, Counter[Kind]()
            for kind in sorted(self._counts, key=_size):
                half, rest = divmod(self._counts[kind] + rest, 2)
                if half:
                    halved[kind] = half
            self._counts, self._total = halved, halved.total()


def _is_possible(kind: Kind) -> bool:
    """Records may be odd; what the prices are made of may not."""
    if kind.cpu_milli < 0 or kind.gpus < 0:
        return False
    is_part = 0 < kind.compute_milli <= WHOLE_GPU_MILLI and (kind.memory_mib is None or kind.memory_mib > 0)
    return is_part or not kind.gpus


def _size(kind: Kind) -> tuple[int, int, int, str, int]:
    memory_mib = -1 if kind.memory_mib is None else kind.memory_mib
    return kind.gpus, kind.compute_milli, memory_mib, kind.model, kind.cpu_milli
