"""Wall time that never jumps.

A step of the machine's clock must not make the leader give up nodes, nor end jobs at a time limit that they have not
reached (LE-1): whoever measures a duration as the difference of two times of this clock is off by a twentieth at
most, however far the wall clock was set.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# So much faster or slower than the monotonic clock at most, while it makes good for a step.
SLEW_DIVISOR = 20


class SteadyClock:
    """Calling it gives whole milliseconds since 1970. It begins at the wall time, goes on with the monotonic clock, and
    comes back to a wall clock that was set by running a little faster or slower; never backwards."""

    def __init__(
        self,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._at_ns = monotonic_ns()
        self._now_ns = wall_ns()

    def __call__(self) -> int:
        at_ns = self._monotonic_ns()
        passed_ns, self._at_ns = at_ns - self._at_ns, at_ns
        error_ns = self._wall_ns() - (self._now_ns + passed_ns)
        most_ns = passed_ns // SLEW_DIVISOR
        self._now_ns += passed_ns + max(-most_ns, min(most_ns, error_ns))
        return self._now_ns // 1_000_000
