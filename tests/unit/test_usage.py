"""The ledger against an integral that is summed up the slow way."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from coordinator.model import UsageHour
from coordinator.usage import BUCKET_MS, HOUR_MS, MINUTE_MS, UsageLedger, Use

WINDOW_MS = 24 * HOUR_MS


def test_use_counts_from_its_start_to_its_end_and_leaves_the_window():
    ledger = UsageLedger(10_000)
    ledger.change("a", 1000, Use(500, 20))
    assert ledger.window(1000) == {}
    assert ledger.window(3000) == {"a": Use(1_000_000, 40_000)}
    ledger.change("a", 5000, Use(-500, -20))
    assert ledger.window(9000) == {"a": Use(2_000_000, 80_000)}
    assert ledger.window(13_000) == {"a": Use(1_000_000, 40_000)}, "two of four seconds have left the window"
    assert ledger.window(15_000) == {}


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(0, 900),
            st.integers(0, 300),
            st.integers(1, 2000),
            st.booleans(),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 400),
)
def test_the_window_is_the_integral_summed_second_by_second(stays, window):
    """Each stay is (tenant, start, length, compute, whether its end is told before its start)."""
    ledger = UsageLedger(1000 * window)
    changes = []
    for tenant, start, length, compute, is_late in stays:
        first, second = (start, compute), (start + length, -compute)
        for at, rate in (second, first) if is_late else (first, second):
            changes.append((tenant, at, rate))
    for tenant, at, rate in changes:
        ledger.change(tenant, 1000 * at, Use(rate, 0))
    for now in (1200, 1300, 1500):
        expected: dict[str, int] = {}
        for tenant, start, length, compute, _ in stays:
            overlap = min(start + length, now) - max(start, now - window)
            if overlap > 0:
                expected[tenant] = expected.get(tenant, 0) + 1000 * overlap * compute
        assert {t: use.compute for t, use in ledger.window(1000 * now).items()} == expected


BASE_MS = 1000 * HOUR_MS
SEEN: Counter[str] = Counter()


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.integers(0, 20 * 3600), st.integers(0, 9000), st.integers(1, 2000)
        ),
        min_size=1,
        max_size=40,
    ),
    st.lists(
        st.tuples(st.integers(0, 48 * 60), st.just(0) | st.integers(0, 59_999)), min_size=1, max_size=12
    ),
)
def test_a_window_of_a_day_is_exact_from_a_whole_minute_on_property(
    stays: list[tuple[str, int, int, int]], readings: list[tuple[int, int]]
):
    """Against the sum over all stays, however often it is read between; off the minute, within what changed in that minute."""
    ledger = UsageLedger(WINDOW_MS)
    changes = sorted(
        (at, tenant, rate)
        for tenant, start, length, compute in stays
        for at, rate in ((start, compute), (start + length, -compute))
    )
    for minute, rest_ms in sorted(readings):
        now_ms = BASE_MS + MINUTE_MS * minute + rest_ms
        while changes and BASE_MS + 1000 * changes[0][0] <= now_ms:
            at, tenant, rate = changes.pop(0)
            ledger.change(tenant, BASE_MS + 1000 * at, Use(rate, 3 * rate))
        window, start_ms = ledger.window(now_ms), now_ms - WINDOW_MS
        for tenant in "ab":
            expected, open_milli = 0, 0
            for owner, start, length, compute in stays:
                from_ms, until_ms = BASE_MS + 1000 * start, BASE_MS + 1000 * (start + length)
                if owner != tenant or from_ms > now_ms:
                    continue
                expected += compute * max(0, min(until_ms, now_ms) - max(from_ms, start_ms))
                bounds = (from_ms, until_ms) if until_ms <= now_ms else (from_ms,)
                open_milli += sum(compute for at_ms in bounds if 0 < start_ms - at_ms < MINUTE_MS)
            found = window.get(tenant, Use())
            allowed = 0 if start_ms % MINUTE_MS == 0 else open_milli * MINUTE_MS
            assert abs(found.compute - expected) <= allowed
            assert abs(found.memory - 3 * expected) <= 3 * allowed
            SEEN["whole minute"] += allowed == 0 and expected > 0 and now_ms > BASE_MS + WINDOW_MS


def test_the_property_above_was_not_vacuous():
    if SEEN:
        assert SEEN["whole minute"] > 0


def test_a_day_of_many_jobs_is_kept_in_minutes():
    """A thousand short jobs an hour: what is kept are the minutes of a day."""
    ledger, most = UsageLedger(WINDOW_MS), 0
    for number in range(26_000):
        at_ms = BASE_MS + number * HOUR_MS // 1000
        ledger.change("a", at_ms, Use(1000, 10))
        ledger.change("a", at_ms + 500, Use(-1000, -10))
        if number % 100 == 0:
            assert ledger.window(at_ms)["a"].compute >= 0
            most = max(most, len(ledger))
    assert 23 * 60 <= most <= 24 * 60 + 2
    assert ledger.window(at_ms + 2 * WINDOW_MS) == {}
    assert len(ledger) == 0


def test_hours_hold_what_was_used_in_their_buckets():
    ledger = UsageLedger(WINDOW_MS)
    start_ms = 10 * HOUR_MS
    ledger.change("a", start_ms + BUCKET_MS // 2, Use(1000, 10))
    now_ms = start_ms + 3 * BUCKET_MS
    [hour] = ledger.hours(now_ms)
    half, whole = 1000 * BUCKET_MS // 2, 1000 * BUCKET_MS
    assert hour.compute_milli_ms == (half, whole, whole) + (0,) * 9
    assert hour.memory_mib_ms[:3] == (half // 100, whole // 100, whole // 100)
    assert (hour.hour_ms, hour.until_ms) == (start_ms, now_ms)
    assert ledger.hours(now_ms) == (), "nothing changed since"
    [hour] = ledger.hours(now_ms + 1)
    assert hour.compute_milli_ms[3] == 1000


@given(
    st.lists(
        st.tuples(st.integers(0, 1500), st.integers(1, 1500), st.integers(1, 1999), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.lists(st.integers(0, 3000), max_size=4),
)
def test_the_buckets_are_the_integral_summed_second_by_second(stays, asked):
    """Each stay is (start, length, compute, whether its end is told before its start), in no order; hours are taken at
    any time in between, and never tell of less than nothing, nor of anything twice."""
    ledger, base_ms = UsageLedger(WINDOW_MS), 10 * HOUR_MS
    looks = sorted(asked)
    for number, (start, length, compute, is_late) in enumerate(stays):
        told = [(start, compute), (start + length, -compute)]
        for at, rate in reversed(told) if is_late else told:
            ledger.change("a", base_ms + 1000 * at, Use(rate, 2 * rate))
        if number < len(looks):
            ledger.hours(base_ms + 1000 * looks[number])
    ledger.change("a", base_ms, Use(1, 2))  # so that there is something to write
    [hour] = ledger.hours(base_ms + 3_000_000)
    expected = [300_000 for _ in range(10)]
    for start, length, compute, _ in stays:
        for second in range(start, start + length):
            expected[second // 300] += 1000 * compute
    assert hour.compute_milli_ms == (*expected, 0, 0)
    assert hour.memory_mib_ms == tuple(2 * milli for milli in hour.compute_milli_ms)
    assert hour.until_ms == base_ms + 3_000_000


def test_hours_taken_in_the_middle_tell_what_was_held_until_then():
    ledger, base_ms = UsageLedger(WINDOW_MS), 10 * HOUR_MS
    ledger.change("a", base_ms + 1000, Use(500, 0))
    ledger.change("a", base_ms + 3000, Use(700, 0))
    [hour] = ledger.hours(base_ms + 4000)
    assert (hour.compute_milli_ms[0], hour.until_ms) == (1000 * 500 * 2 + 1000 * 1200, base_ms + 4000)
    ledger.change("a", base_ms + 5000, Use(-1200, 0))
    [hour] = ledger.hours(base_ms + 4500)  # as by a clock that was set back
    assert (hour.compute_milli_ms[0], hour.until_ms) == (1000 * 500 * 2 + 1000 * 1200 * 2, base_ms + 5000)
    assert ledger.hours(base_ms + 9000) == ()


def test_a_use_across_the_hour_is_two_records():
    ledger = UsageLedger(WINDOW_MS)
    ledger.change("a", 11 * HOUR_MS - BUCKET_MS, Use(1000, 0))
    hours = ledger.hours(11 * HOUR_MS + BUCKET_MS)
    assert [(hour.hour_ms, sum(hour.compute_milli_ms)) for hour in hours] == [
        (10 * HOUR_MS, 1000 * BUCKET_MS),
        (11 * HOUR_MS, 1000 * BUCKET_MS),
    ]
    assert [hour.until_ms for hour in hours] == [11 * HOUR_MS, 11 * HOUR_MS + BUCKET_MS]


@given(st.lists(st.tuples(st.integers(0, 6000), st.integers(1, 6000), st.integers(1, 1999)), max_size=12))
def test_a_new_leader_reads_the_past_back_exactly(stays):
    """What one ledger wrote, another one reads: over the whole window they agree to the last millisecond."""
    first = UsageLedger(WINDOW_MS)
    base_ms = 100 * HOUR_MS
    for start, length, compute in stays:
        first.change("a", base_ms + 1000 * start, Use(compute, 3 * compute))
        first.change("a", base_ms + 1000 * (start + length), Use(-compute, -3 * compute))
    now_ms = base_ms + 4 * HOUR_MS
    second = UsageLedger(WINDOW_MS)
    for hour in first.hours(now_ms):
        second.past(hour)
    assert second.window(now_ms) == first.window(now_ms)
    later_ms = base_ms + WINDOW_MS + 2 * BUCKET_MS
    assert (
        abs(second.window(later_ms).get("a", Use()).compute - first.window(later_ms).get("a", Use()).compute)
        <= sum(c for _, _, c in stays) * BUCKET_MS
    ), "inside a bucket the past is taken for even"
    assert second.window(base_ms + 2 * WINDOW_MS) == {}


def test_what_was_read_back_is_written_on():
    ledger = UsageLedger(WINDOW_MS)
    hour_ms = 50 * HOUR_MS
    ledger.past(UsageHour("a", hour_ms, hour_ms + BUCKET_MS, (777,) + (0,) * 11, (5,) + (0,) * 11))
    ledger.change("a", hour_ms + BUCKET_MS, Use(1000, 0))
    [hour] = ledger.hours(hour_ms + 2 * BUCKET_MS)
    assert hour.compute_milli_ms[:2] == (777, 1000 * BUCKET_MS)
    assert hour.memory_mib_ms[0] == 5


def test_hours_that_no_window_needs_are_forgotten():
    ledger = UsageLedger(2 * HOUR_MS)
    ledger.change("a", 10 * HOUR_MS, Use(1000, 0))
    ledger.change("a", 11 * HOUR_MS, Use(-1000, 0))
    assert len(ledger.hours(11 * HOUR_MS)) == 1
    assert ledger.hours(20 * HOUR_MS) == ()
    assert ledger.window(20 * HOUR_MS) == {}
