"""What the Docker Engine says of a container and of itself, read into our own words. Pure but for looking at its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from nodeagent.runner import LABEL_NODE, Observed, ObservedTask, TaskKey, slices_of


def observed_task(found: Mapping[str, Any], key: TaskKey, node: str) -> ObservedTask:
    state, labels = found["State"], found["Config"].get("Labels") or {}
    observed = Observed.EXITED
    if state["Status"] == "created":
        observed = Observed.CREATED
    elif state["Running"]:
        observed = Observed.RUNNING
    has_ended = observed is Observed.EXITED
    return ObservedTask(
        key,
        observed,
        exit_code=state["ExitCode"] if has_ended else None,
        oom_killed=bool(state["OOMKilled"]) and has_ended,
        started_at_ms=_at_ms(state["StartedAt"]),
        ended_at_ms=_at_ms(state["FinishedAt"]) if has_ended else None,
        slices=slices_of(labels),
        detail=state.get("Error") or "",
        container=found["Name"].removeprefix("/"),
        foreign=labels.get(LABEL_NODE) != node,
    )


def _at_ms(text: str) -> int | None:
    """From RFC 3339 with nanoseconds; the year 1 is Docker's way to say "not yet"."""
    if text.startswith("0001-"):
        return None
    moment = re.sub(r"(\.\d{1,6})\d*", r"\1", text)
    return round(datetime.fromisoformat(moment).timestamp() * 1000)


def has_dropped(found: Mapping[str, Any]) -> bool:
    """Whether the oldest of the rotated log files is there, so that what came before it may be gone."""
    config = found["HostConfig"].get("LogConfig", {}).get("Config") or {}
    files = int(config.get("max-file", "1"))
    path = found.get("LogPath") or ""
    return bool(path) and files > 1 and Path(f"{path}.{files - 1}").exists()


def has_cdi_spec(folders: list[str]) -> bool:
    """The engine names its CDI folders also on a machine where nobody wrote a specification of GPUs into them."""
    return any(any(Path(folder).glob("*nvidia*")) for folder in folders)
