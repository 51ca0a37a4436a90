"""The steady clock: no jump, never backwards, and home again in the end."""

from __future__ import annotations

from coordinator.clock import SteadyClock

SECOND = 1_000_000_000


class Sources:
    def __init__(self) -> None:
        self.wall_ns = 1_700_000_000 * SECOND
        self.monotonic_ns = 5 * SECOND
        self.clock = SteadyClock(lambda: self.wall_ns, lambda: self.monotonic_ns)

    def pass_seconds(self, seconds: float) -> int:
        """What the clock says has passed, in milliseconds."""
        before = self.clock()
        for _ in range(10):
            self.wall_ns += int(seconds * SECOND / 10)
            self.monotonic_ns += int(seconds * SECOND / 10)
            self.clock()
        return self.clock() - before


def test_it_goes_with_a_wall_clock_that_is_left_alone() -> None:
    sources = Sources()
    assert sources.clock() == 1_700_000_000_000
    assert sources.pass_seconds(100) == 100_000


def test_a_step_does_not_make_time_pass_le_1() -> None:
    """Seed 60 of the simulation: set an hour ahead, the leader gave up a node that was silent for two seconds."""
    for step in (3600, -3600):
        sources = Sources()
        sources.wall_ns += step * SECOND
        passed = sources.pass_seconds(20)
        assert abs(passed - 20_000) <= 1_000
        assert (passed - 20_000) * step > 0


def test_it_comes_back_to_the_wall_clock() -> None:
    sources = Sources()
    sources.wall_ns += 2 * SECOND
    assert sources.pass_seconds(10) < 11_000
    sources.pass_seconds(100)
    assert sources.clock() * 1_000_000 == sources.wall_ns
    assert sources.pass_seconds(10) == 10_000
