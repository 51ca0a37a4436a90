"""Sizes, compute, CPU and durations as users write them, and back. A unit is parsed here, once, and nowhere else.

Everything is stored as a whole number, so what cannot be stored exactly is an error and never rounded away. A number
without a unit is refused where it could mean two things. `ValueInvalid` says what is wrong and what may be written.
"""

from __future__ import annotations

import re
from decimal import Context, Decimal, Inexact, InvalidOperation, Overflow

MIN_COMPUTE_MILLI = 1
MAX_COMPUTE_MILLI = 1000
MAX_SIZE_MIB = 2**30  # 1 PiB: above any machine, and far below where whole numbers in JSON lose digits
MAX_DURATION_SECONDS = 10 * 366 * 86_400
MIN_CPU_MILLI = 10  # the Docker Engine's least
MAX_CPU_MILLI = 4_096_000
_LONGEST_TEXT = 40
# More digits than any text above can bring, so that a product is never rounded behind our back.
_EXACT = Context(prec=100, traps=[Inexact, InvalidOperation, Overflow])

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[A-Za-z]+)", re.ASCII)
_MIB = {"MiB": 1, "M": 1, "GiB": 1024, "G": 1024}
# Units people bring from elsewhere, each with ours for the same size where there is one.
_FOREIGN_UNITS = {
    "mi": "MiB", "m": "MiB", "mib": "MiB", "gi": "GiB", "g": "GiB", "gib": "GiB",
}  # fmt: skip
_DECIMAL_UNITS = {"mb": "MiB", "gb": "GiB"}

_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_SIGNED = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_DAYS_CLOCK = re.compile(r"(\d+)-(\d{2}):(\d{2}):(\d{2})", re.ASCII)
_CLOCK = re.compile(r"\d+:\d{2}(:\d{2})?", re.ASCII)
_PART = r"(?:(\d+(?:\.\d+)?)%s)?"
_DURATION = re.compile("".join(_PART % unit for unit in "dhms"), re.ASCII)
_SECONDS = (86_400, 3600, 60, 1)


class ValueInvalid(ValueError):
    """`limit` is the bound or the form that was broken, as text for a person; empty where there is none."""

    def __init__(self, message: str, limit: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.limit = limit


def parse_size(value: object, *, least_mib: int = 1, most_mib: int = MAX_SIZE_MIB) -> int:
    """Whole MiB from `20GiB`, `512MiB`, or `G` and `M`, which are read as binary. Raises `ValueInvalid`."""
    text = _text(value)
    if text is None or _SIGNED.fullmatch(text):
        if text is not None and not text.startswith("-") and _NUMBER.fullmatch(text):
            raise ValueInvalid(f"a size needs a unit: {text}MiB or {text}GiB?", "MiB or GiB")
        raise ValueInvalid("a size is a positive number with a unit, such as 512MiB or 20GiB", "MiB or GiB")
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueInvalid("a size is a positive number with a unit, such as 512MiB or 20GiB", "MiB or GiB")
    unit = match["unit"]
    if unit not in _MIB:
        raise ValueInvalid(_unit_hint(match["number"], unit), "MiB or GiB")
    mib = _EXACT.multiply(Decimal(match["number"]), Decimal(_MIB[unit]))
    if mib != mib.to_integral_value():
        raise ValueInvalid(f"{text} is {mib:f} MiB, and sizes are kept in whole MiB", "whole MiB")
    if not least_mib <= mib <= most_mib:
        limit = f"{size_text(least_mib)} to {size_text(most_mib)}"
        raise ValueInvalid(f"must be between {size_text(least_mib)} and {size_text(most_mib)}", limit)
    return int(mib)


def _unit_hint(number: str, unit: str) -> str:
    lower = unit.lower()
    if lower in _FOREIGN_UNITS:
        return f"unknown unit {unit}: write {number}{_FOREIGN_UNITS[lower]}"
    if lower in _DECIMAL_UNITS:
        binary = _DECIMAL_UNITS[lower]
        return f"{unit} is a decimal unit, and GPUs and memory are counted in binary ones: write {number}{binary}"
    return f"unknown unit {unit}: write MiB or GiB"


def parse_compute(value: object) -> int:
    """Thousandths of one GPU from `50%`, `0.5` or `500m`. Raises `ValueInvalid`."""
    text = _text(value)
    form = "compute is a part of one GPU: 50%, 0.5 or 500m"
    if text is None:
        raise ValueInvalid(form, "0.1% to 100%")
    number, factor = text, 1000
    if text.endswith("%"):
        number, factor = text[:-1].rstrip(" "), 10
    elif text.endswith("m"):
        number, factor = text[:-1], 1
    milli = _exact(number, factor, form, "0.1% to 100%", "thousandths of a GPU")
    if not MIN_COMPUTE_MILLI <= milli <= MAX_COMPUTE_MILLI:
        hint = (
            f"; {text}% is written with its percent sign"
            if factor == 1000 and 1000 < milli <= 100_000
            else ""
        )
        raise ValueInvalid(f"compute of one GPU must be above 0 and at most 100%{hint}", "0.1% to 100%")
    return milli


def parse_cpu(value: object) -> int:
    """Thousandths of a core from `2`, `0.5` or `500m`. Raises `ValueInvalid`."""
    text = _text(value)
    form = "cpu is a number of cores: 2, 0.5 or 500m"
    limit = f"{cpu_text(MIN_CPU_MILLI)} to {cpu_text(MAX_CPU_MILLI)}"
    if text is None:
        raise ValueInvalid(form, limit)
    number, factor = (text[:-1], 1) if text.endswith("m") else (text, 1000)
    milli = _exact(number, factor, form, limit, "thousandths of a core")
    if not MIN_CPU_MILLI <= milli <= MAX_CPU_MILLI:
        raise ValueInvalid(f"cpu must be between {limit.replace(' to ', ' and ')} cores", limit)
    return milli


def parse_duration(value: object, *, least_seconds: int = 1, most_seconds: int = MAX_DURATION_SECONDS) -> int:
    """Whole seconds from `90s`, `30m`, `36h`, `5d`, `1h30m` or `D-HH:MM:SS`. Raises `ValueInvalid`."""
    text = _text(value)
    form = "a duration needs units, such as 90s, 30m, 36h or 1h30m, or is written D-HH:MM:SS"
    if text is None or _SIGNED.fullmatch(text) or text == "":
        if text is not None and _NUMBER.fullmatch(text):
            form = f"a duration needs a unit: {text}s, {text}m or {text}h?"
        raise ValueInvalid(form, "s, m, h, d or D-HH:MM:SS")
    if _CLOCK.fullmatch(text):
        raise ValueInvalid(
            f"write the days too: 0-{text if text.count(':') == 2 else text + ':00'}", "D-HH:MM:SS"
        )
    seconds = _clock_seconds(text) if "-" in text else _unit_seconds(text)
    if seconds is None:
        raise ValueInvalid(form, "s, m, h, d or D-HH:MM:SS")
    if seconds != seconds.to_integral_value():
        raise ValueInvalid(
            f"{text} is {seconds:f} seconds, and durations are kept in whole seconds", "whole seconds"
        )
    if not least_seconds <= seconds <= most_seconds:
        limit = f"{duration_text(least_seconds)} to {duration_text(most_seconds)}"
        raise ValueInvalid(f"must be between {limit.replace(' to ', ' and ')}", limit)
    return int(seconds)


def _clock_seconds(text: str) -> Decimal | None:
    match = _DAYS_CLOCK.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(group) for group in match.groups())
    if hours > 23 or minutes > 59 or seconds > 59:
        return None
    return Decimal(days * 86_400 + hours * 3600 + minutes * 60 + seconds)


def _unit_seconds(text: str) -> Decimal | None:
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    total = Decimal(0)
    for number, seconds in zip(match.groups(), _SECONDS, strict=True):
        if number:
            total = _EXACT.add(total, _EXACT.multiply(Decimal(number), Decimal(seconds)))
    return total


def _text(value: object) -> str | None:
    """The value as it was written; None for what is neither text nor a number, and for what is absurdly long. A
    float came through a reader that has lost its digits, so its shortest form stands for it."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        return None
    if isinstance(value, int) and abs(value) > 10**_LONGEST_TEXT:
        return None
    text = str(value)
    return text if len(text) <= _LONGEST_TEXT else None


def _exact(number: str, factor: int, form: str, limit: str, unit: str) -> int:
    if not _SIGNED.fullmatch(number):
        raise ValueInvalid(form, limit)
    try:
        scaled = _EXACT.multiply(Decimal(number), Decimal(factor))
    except ArithmeticError as error:  # an exponent beyond what can be computed with
        raise ValueInvalid(form, limit) from error
    if abs(scaled) > 10**12:  # before it is written out: 1e999999 has a million digits
        return 10**12 if scaled > 0 else -(10**12)
    if scaled != scaled.to_integral_value():
        raise ValueInvalid(f"{number} has more digits than can be kept: {unit} are the finest step", unit)
    return int(scaled)


def size_text(mib: int) -> str:
    return f"{mib // 1024}GiB" if mib and mib % 1024 == 0 else f"{mib}MiB"


def compute_text(milli: int) -> str:
    return f"{milli // 10}%" if milli % 10 == 0 else f"{milli}m"


def cpu_text(milli: int) -> str:
    return str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"


def duration_text(seconds: int) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds and seconds % length == 0:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
