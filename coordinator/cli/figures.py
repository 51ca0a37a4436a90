"""Figures as people read them: sizes, compute, times. Unknown is `n/a`, never 0."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

UNKNOWN = "n/a"


def size(mib: int | None) -> str:
    """40960 -> 40GiB; 1536 -> 1536MiB; from 10 GiB on with one digit."""
    if mib is None:
        return UNKNOWN
    if mib and mib % 1024 == 0:
        return f"{mib // 1024}GiB"
    return f"{mib / 1024:.1f}GiB" if abs(mib) >= 10 * 1024 else f"{mib}MiB"


def compute(milli: int | None) -> str:
    """500 -> 50%; 1000 is one whole GPU."""
    return UNKNOWN if milli is None else f"{milli / 10:g}%"


def gpus(milli: int | None) -> str:
    """Compute in GPUs: 2500 -> 2.5."""
    return UNKNOWN if milli is None else f"{milli / 1000:g}"


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:+.3f}"


def duration(seconds: float | None) -> str:
    """The two largest units: 4.2s, 58s, 3m05s, 2h10m, 3d04h."""
    if seconds is None:
        return UNKNOWN
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def zone() -> str:
    """The name of the local time zone, which a table says once."""
    return time.localtime().tm_zone


def moment(text: str | None) -> str:
    """RFC 3339 into local time; the zone stands in the heading."""
    if text is None:
        return UNKNOWN
    try:
        return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return text


def asked(spec: Mapping[str, Any]) -> str:
    """What a spec asks of GPUs, in the words of the spec: `3 x 2 GPUs`, `20GiB 50%`."""
    tasks = spec.get("tasks", 1)
    if isinstance(tasks, list):
        return " + ".join(_tasks_asked(task.get("count", 1), {**spec, **task}) for task in tasks)
    return _tasks_asked(tasks, spec)


def _tasks_asked(count: Any, task: Mapping[str, Any]) -> str:
    text = _gpus_asked(task.get("gpus"))
    return text if count == 1 else f"{count} x {text}"


def _gpus_asked(request: Any) -> str:
    if not request:
        return "no GPU"
    if isinstance(request, int):
        return "1 GPU" if request == 1 else f"{request} GPUs"
    number = request.get("count", 1)
    piece = " ".join(str(request[name]) for name in ("memory", "compute", "model") if request.get(name))
    if not number:
        return "no GPU"
    if not request.get("memory") and str(request.get("compute") or "100%") in ("100%", "1000m"):
        model = f" {request['model']}" if request.get("model") else ""
        return ("1 GPU" if number == 1 else f"{number} GPUs") + model
    return piece if number == 1 else f"{number} x {piece}"
