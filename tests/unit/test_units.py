import contextlib
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobspecs.units import (
    MAX_CPU_MILLI,
    MAX_DURATION_SECONDS,
    MAX_SIZE_MIB,
    ValueInvalid,
    compute_text,
    cpu_text,
    duration_text,
    parse_compute,
    parse_cpu,
    parse_duration,
    parse_size,
    size_text,
)


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("8GiB", 8192), ("8G", 8192), ("8192MiB", 8192), ("8192M", 8192), ("8 GiB", 8192), ("1.5GiB", 1536),
        ("8000MiB", 8000), ("0.5G", 512), ("600000M", 600_000), ("1MiB", 1),
    ],
)  # fmt: skip
def test_sizes(text, mib):
    """FR-6, AP-4: equal values give equal records."""
    assert parse_size(text) == mib


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (8000, "8000MiB or 8000GiB?"), ("8000", "8000MiB or 8000GiB?"), (Decimal("1.5"), "1.5MiB or 1.5GiB?"),
        ("8000Mi", "write 8000MiB"), ("8g", "write 8GiB"), ("8gib", "write 8GiB"), ("512m", "write 512MiB"),
        ("8GB", "decimal"), ("8gb", "decimal"), ("100MB", "decimal"), ("8kB", "unknown unit"), ("1TiB", "unknown unit"),
        ("0.3GiB", "whole MiB"), ("1.0001MiB", "whole MiB"), ("0GiB", "between"), ("9999999999GiB", "between"),
        (-5, "positive"), ("-5GiB", "positive"), (0, "0MiB"), ("", "positive"), ("GiB", "positive"), (True, "positive"),
        (None, "positive"), ([], "positive"), ("1e3GiB", "positive"), ("8GiB ", "positive"), ("٨GiB", "positive"),
        (float("nan"), "positive"), (float("inf"), "positive"), ("1" * 5000 + "GiB", "positive"), (10**400, "positive"),
    ],
)  # fmt: skip
def test_sizes_refused(value, said):
    """FR-6, FR-9: nothing is guessed, clamped or rounded, and the message says what to write."""
    with pytest.raises(ValueInvalid) as error:
        parse_size(value)
    assert said in error.value.message


@pytest.mark.parametrize(
    ("value", "milli"),
    [
        ("50%", 500), ("0.5", 500), (0.5, 500), (Decimal("0.5"), 500), ("500m", 500), ("100%", 1000), (1, 1000),
        ("1.0", 1000), ("1m", 1), ("0.1%", 1), ("12.5%", 125), ("0.125", 125), ("50 %", 500), (0.1, 100),
    ],
)  # fmt: skip
def test_compute(value, milli):
    assert parse_compute(value) == milli


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("-1%", "above 0"), (-1, "above 0"), ("0%", "above 0"), (0, "above 0"), ("101%", "at most 100%"),
        ("150%", "at most 100%"), ("100", "100%"), (50, "50%"), (150, "above 0"), ("1001m", "at most"),
        ("0.3333", "more digits"), ("33.33%", "more digits"), ("0.5m", "more digits"), (1 / 3, "more digits"),
        ("", "50%, 0.5 or 500m"), ("half", "50%, 0.5 or 500m"), (True, "50%"), (None, "50%"), ("%", "50%"),
        (float("nan"), "50%"), ("1e9999", "at most"), ("1e999999999", "50%"), ("1e99999999999999999999999999", "50%"),
        ("-1e9999", "above 0"), ("0.50000000000000000000000000000000001", "more digits"),
    ],
)  # fmt: skip
def test_compute_refused(value, said):
    """FR-9: -1, 0, 101 and 150 percent are refused, never clamped."""
    with pytest.raises(ValueInvalid) as error:
        parse_compute(value)
    assert said in error.value.message


@pytest.mark.parametrize(
    ("value", "milli"), [(2, 2000), ("2", 2000), ("0.5", 500), ("500m", 500), (1.5, 1500)]
)
def test_cpu(value, milli):
    assert parse_cpu(value) == milli


@pytest.mark.parametrize("value", [0, -1, "0", "9m", "0.0001", "2 cores", "", None, True, 10**9, "1e99", [1]])
def test_cpu_refused(value):
    with pytest.raises(ValueInvalid):
        parse_cpu(value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1h", 3600), ("5-00:00:00", 432_000), ("30m", 1800), ("36h", 129_600), ("90s", 90), ("1h30m", 5400),
        ("5d", 432_000), ("1.5h", 5400), ("0-00:00:01", 1), ("0-23:59:59", 86_399),
    ],
)  # fmt: skip
def test_durations(text, seconds):
    """CT-4, AP-4"""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "needs units"), ("0", "0s, 0m or 0h?"), ("-5", "needs units"), (60, "60s, 60m or 60h?"),
        (Decimal("1e99"), "needs units"), (1e99, "needs units"), ("60s ", "needs units"), ("0s", "between"),
        ("0-00:00:00", "between"), ("00:30:00", "0-00:30:00"), ("10:30", "0-10:30:00"), ("1-24:00:00", "needs units"),
        ("1-00:60:00", "needs units"), ("-5m", "needs units"), ("30m1h", "needs units"), ("5 days", "needs units"),
        ("0.5s", "whole seconds"), ("99999d", "between"), (True, "needs units"), (None, "needs units"),
        ("1" * 39 + "d", "between"), ("m", "needs units"),
    ],
)  # fmt: skip
def test_durations_refused(value, said):
    """CT-4: what is no duration is an error, and never "no limit"."""
    with pytest.raises(ValueInvalid) as error:
        parse_duration(value)
    assert said in error.value.message


@given(
    st.integers(1, MAX_SIZE_MIB),
    st.integers(1, 1000),
    st.integers(10, MAX_CPU_MILLI),
    st.integers(1, MAX_DURATION_SECONDS),
)
def test_what_is_shown_can_be_read_back_property(mib, compute_milli, cpu_milli, seconds):
    assert parse_size(size_text(mib)) == mib
    assert parse_compute(compute_text(compute_milli)) == compute_milli
    assert parse_cpu(cpu_text(cpu_milli)) == cpu_milli
    assert parse_duration(duration_text(seconds)) == seconds


@given(
    st.one_of(
        st.text(max_size=50), st.integers(), st.floats(), st.decimals(), st.booleans(), st.none(), st.binary()
    )
)
def test_a_reader_answers_or_refuses_property(value):
    for parse in (parse_size, parse_compute, parse_cpu, parse_duration):
        with contextlib.suppress(ValueInvalid):  # and nothing else
            assert type(parse(value)) is int


def test_a_number_longer_than_python_writes_out_is_refused():
    for parse in (parse_size, parse_compute, parse_cpu, parse_duration):
        with pytest.raises(ValueInvalid):
            parse(10**5000)
