"""What the trial came to: one row for each job, whether it ended as it should, as a table and as data. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from coordinator.dev.scenario import TrialJob


@frozen
class Outcome:
    """`job` is the job's view once it was accepted, `refusal` the problem when it was refused."""

    trial: TrialJob
    job: Mapping[str, Any] | None = None
    refusal: Mapping[str, Any] = field(factory=dict)

    @property
    def state(self) -> str:
        if self.job is not None:
            return str(self.job["state"])
        return "REFUSED" if self.refusal else "NOT SUBMITTED"

    @property
    def nodes(self) -> list[str]:
        tasks = self.job["tasks"] if self.job is not None else ()
        return sorted({str(task["node"]) for task in tasks if task["node"]})

    @property
    def is_as_wanted(self) -> bool:
        wanted = self.trial.wanted
        if self.state != wanted.state:
            return False
        if self.job is None:
            return bool(self.refusal.get("detail")) and self.refusal.get("code") == wanted.code
        if wanted.exit_code is not None and self.job["exit_code"] != wanted.exit_code:
            return False
        return wanted.nodes is None or len(self.nodes) == wanted.nodes

    @property
    def why(self) -> str:
        """Why it was placed there, or why not."""
        if self.job is None:
            return str(self.refusal.get("detail", ""))
        return _sentence(self.job["placed"]) or _sentence(self.job["reason"])

    def gpus(self) -> list[dict[str, Any]]:
        tasks = self.job["tasks"] if self.job is not None else ()
        return [
            {
                "node": task["node"],
                "task": task["task"],
                "gpu": piece["gpu"],
                "index": piece["index"],
                "model": piece["model"],
                "memory_mib": piece["memory_mib"],
                "compute_milli": piece["compute_milli"],
                "isolation": piece["isolation"],
            }
            for task in tasks
            for piece in task["slices"]
        ]

    def data(self) -> dict[str, Any]:
        job = self.job or {}
        return {
            "name": self.trial.name,
            "file": self.trial.file,
            "id": job.get("id"),
            "tenant": self.trial.tenant,
            "wanted": self.trial.wanted.text,
            "state": self.state,
            "exit_code": job.get("exit_code"),
            "as_wanted": self.is_as_wanted,
            "nodes": self.nodes,
            "gpus": self.gpus(),
            "submitted_at": job.get("submitted_at"),
            "started_at": job.get("started_at"),
            "ended_at": job.get("ended_at"),
            "waited_seconds": job.get("waited_seconds"),
            "ran_seconds": job.get("ran_seconds"),
            "chosen": job.get("chosen"),
            "placed": job.get("placed"),
            "reason": job.get("reason"),
            "why_chosen": _sentence(job.get("chosen")),
            "why_placed": self.why,
        }


def fairness(outcomes: Sequence[Outcome]) -> str | None:
    """What the trial shows of fairness, None when it does not show: which jobs of a tenant below its quota started before
    one that was submitted earlier by a tenant above its own."""
    times = {
        each.trial.name: (str(each.job["submitted_at"]), str(each.job["started_at"]))
        for each in outcomes
        if each.job is not None and each.job["started_at"]
    }
    if "train-c" not in times:
        return None
    submitted, started = times["train-c"]
    ahead = [
        name
        for name in ("train-d", "train-e")
        if name in times and times[name][0] > submitted and times[name][1] < started
    ]
    if not ahead:
        return None
    return f"train-c of vision, which was above its quota, was submitted first; {' and '.join(ahead)} of speech went ahead"


def document(
    outcomes: Sequence[Outcome], *, seconds: float, engine: str, left_out: Sequence[str] = ()
) -> dict[str, Any]:
    """Everything as data, for `--json-file`."""
    return {
        "ok": all(each.is_as_wanted for each in outcomes),
        "seconds": round(seconds, 1),
        "engine": engine,
        "left_out": list(left_out),
        "fairness": fairness(outcomes),
        "jobs": [each.data() for each in outcomes],
    }


def _sentence(reason: Mapping[str, Any] | None) -> str:
    return str(reason.get("sentence") or reason.get("code") or "") if reason else ""
