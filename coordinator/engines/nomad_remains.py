"""What Nomad may still have of each attempt, so that nobody gets its GPUs before it is gone (RR-11). Pure.

An attempt that is given up with its node is over for the store, and its client in Nomad may not know it yet: it may run
it, or begin to once the image is there, beside whatever a node that is back was given meanwhile. A container can be seen
by the agent beside it; an allocation without one only here.

Nothing of it is stored. What a term expects of the attempts that are live stands in their allocations; what was left
before it is in Nomad's own lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from attrs import frozen

from coordinator.engines import Occupied
from coordinator.engines.nomad_records import JobSeen
from coordinator.model import Allocation
from jobspecs.container import Grant

Attempt = tuple[str, int]
IsLive = Callable[[Attempt], bool]


@frozen
class Seat:
    """Where one task of an attempt was sent, and the GPUs that it uses there."""

    node: str
    gpus: tuple[str, ...] = ()


Seats = Mapping[int, Seat]  # by task number


def seats_of(allocation: Allocation) -> Seats:
    return {
        placed.task: Seat(placed.node, tuple(piece.gpu for piece in placed.slices))
        for placed in allocation.tasks
    }


def seats_granted(grants: Iterable[Grant]) -> Seats:
    return {
        container.task: Seat(grant.node, tuple(piece.gpu for piece in container.slices))
        for grant in grants
        for container in grant.containers
    }


def seats_seen(job: JobSeen) -> Seats:
    """They stand in the tasks' own environment, which outlives a node's registration and every record of ours."""
    seats = {}
    for group in job.task_groups or ():
        env = next((task.env for task in group.tasks or ()), None) or {}
        number = group.name.rpartition("-")[2]
        if number.isdecimal():
            named = env.get("NVIDIA_VISIBLE_DEVICES", "")
            gpus = tuple(named.split(",")) if env.get("SERAI_GPU_MEMORY_MIB") else ()
            seats[int(number)] = Seat(env.get("SERAI_NODE", ""), gpus)
    return seats


class Remains:
    """Of live attempts too, from before they are sent: that one is over is known at once, and what is left of it later.
    `is_live` says what the store says now; `id` is the attempt's name in Nomad."""

    def __init__(self, is_live: IsLive) -> None:
        self._is_live = is_live
        self._seats: dict[Attempt, Seats] = {}
        self._ids: dict[Attempt, str] = {}
        self._on: dict[tuple[str, str], set[tuple[Attempt, int]]] = {}  # (node, GPU)
        self._over: set[Attempt] = set()  # those that are not live, and others that were not once

    def of(self, attempt: Attempt) -> Seats:
        return self._seats.get(attempt, {})

    def put(self, attempt: Attempt, id: str, seats: Seats) -> None:
        """This much is left of it, and no more."""
        if seats and seats == self.of(attempt):
            self.look_at(attempt)
            return
        self.drop(attempt)
        if not seats:
            return
        self._seats[attempt], self._ids[attempt] = seats, id
        for number, seat in seats.items():
            for gpu in seat.gpus:
                self._on.setdefault((seat.node, gpu), set()).add((attempt, number))
        self.look_at(attempt)

    def ended(self, attempt: Attempt, number: int) -> None:
        """Nothing is left of this task, and nothing of it can come."""
        if number in self.of(attempt):
            self.put(
                attempt,
                self._ids[attempt],
                {n: seat for n, seat in self._seats[attempt].items() if n != number},
            )

    def drop(self, attempt: Attempt) -> None:
        for number, seat in self._seats.pop(attempt, {}).items():
            for gpu in seat.gpus:
                there = self._on[seat.node, gpu]
                there.discard((attempt, number))
                if not there:
                    del self._on[seat.node, gpu]
        self._ids.pop(attempt, None)
        self._over.discard(attempt)

    def look_at(self, attempt: Attempt) -> None:
        """Whether it is live may have changed."""
        if attempt in self._seats and not self._is_live(attempt):
            self._over.add(attempt)

    def look_at_all(self) -> None:
        for attempt in self._seats:
            self.look_at(attempt)

    def over(self) -> Mapping[Attempt, str]:
        """Attempts that are not live and of which something may be left, with their ids."""
        return {attempt: self._ids[attempt] for attempt in self._over if not self._is_live(attempt)}

    def in_the_way(self, seats: Seats) -> str:
        """A task of an attempt that is over and may still use a GPU of these; "" where there is none."""
        found = {
            _text(attempt, number)
            for seat in seats.values()
            for gpu in seat.gpus
            for attempt, number in self._on.get((seat.node, gpu), ())
            if not self._is_live(attempt)
        }
        return min(found, default="")

    def occupied(self) -> Occupied:
        found: dict[str, dict[str, set[str]]] = {}
        for attempt in self.over():
            for number, seat in self._seats[attempt].items():
                for gpu in seat.gpus:
                    found.setdefault(seat.node, {}).setdefault(gpu, set()).add(_text(attempt, number))
        return {
            node: {gpu: tuple(sorted(keys)) for gpu, keys in sorted(gpus.items())}
            for node, gpus in sorted(found.items())
        }


def _text(attempt: Attempt, number: int) -> str:
    return f"{attempt[0]}.{attempt[1]}.{number}"
