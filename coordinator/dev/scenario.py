"""What the trial shows: three nodes, two tenants, and jobs with the end that each of them should come to.

The point to see: `vision` comes first and takes the whole big node, more than its quota, since nobody else wants it.
Then `speech` comes, and waits. As soon as four cards come free the tenant with the highest priority goes first (space share
less time share, see `coordinator.fairness`), so a training of speech starts before vision's third one, although that was
submitted earlier. The gang waits until twelve cards are free at once. One job can never run and is refused at submit,
and one fails as it should.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from attrs import field, frozen


@frozen
class TrialNode:
    """`gpus` is the agent's description of simulated GPUs."""

    name: str
    gpus: str
    labels: Mapping[str, str] = field(factory=dict)


@frozen
class TrialTenant:
    name: str
    quota_memory: str
    weight: int = 1


@frozen
class Wanted:
    """The end that a job should come to. REFUSED: at submit, with this reason code. `nodes`: so many of them."""

    state: str = "SUCCEEDED"
    exit_code: int | None = 0
    code: str = ""
    nodes: int | None = None

    @property
    def text(self) -> str:
        if self.state == "FAILED" and self.exit_code is not None:
            return f"FAILED, exit code {self.exit_code}"
        return f"{self.state} on {self.nodes} nodes" if self.nodes else self.state


@frozen
class TrialJob:
    """An example file, under a name of its own. `gpus` is how many cards it needs, `round` when it is submitted,
    `seconds` how long it sleeps instead of what the file says."""

    file: str
    tenant: str
    name: str
    round: int = 1
    gpus: int = 1
    seconds: int | None = None
    wanted: Wanted = field(factory=Wanted)


NODES = (
    TrialNode("nvlink-8x80", "8x80GiB:A100-SXM4-80GB:nvlink=4", {"zone": "a", "rack": "r1"}),
    TrialNode("pcie-4x40", "4x40GiB:A100-PCIE-40GB", {"zone": "a", "rack": "r1"}),
    TrialNode("small-2x16", "2x16GiB:T4", {"zone": "a", "rack": "r2"}),
)
TENANTS = (TrialTenant("speech", "360GiB"), TrialTenant("vision", "400GiB"))

_REFUSED = Wanted("REFUSED", None, "slice_larger_than_any_gpu")
JOBS = (
    TrialJob("several-gpus.yaml", "vision", "train-a", gpus=4),
    TrialJob("several-gpus.yaml", "vision", "train-b", gpus=4, seconds=6),
    TrialJob("several-gpus.yaml", "vision", "train-c", round=2, gpus=4),
    TrialJob("whole-gpu.yaml", "vision", "notebook", round=2),
    TrialJob("fraction.yaml", "vision", "label-images", round=2),
    TrialJob("never.yaml", "vision", "too-large", round=2, wanted=_REFUSED),
    TrialJob("several-gpus.yaml", "speech", "train-d", round=3, gpus=4),
    TrialJob("several-gpus.yaml", "speech", "train-e", round=3, gpus=4),
    TrialJob("gang.yaml", "speech", "pretrain", round=3, gpus=12, wanted=Wanted(nodes=2)),
    TrialJob("fraction.yaml", "speech", "transcribe", round=3),
    TrialJob("no-gpu.yaml", "speech", "prepare-data", round=3, gpus=0),
    TrialJob("fails.yaml", "speech", "broken", round=3, wanted=Wanted("FAILED", 3)),
)


def spec_of(job: TrialJob) -> dict[str, Any]:
    """The spec of its example file, under its own name and tenant."""
    from jobspecs.documents import parse_yaml

    text = (files("jobspecs") / "examples" / job.file).read_text()
    spec = parse_yaml(text)
    if not isinstance(spec, dict):
        raise TypeError(f"{job.file} is not a mapping")
    if job.seconds is not None:
        spec["command"] = [re.sub(r"sleep \d+", f"sleep {job.seconds}", word) for word in spec["command"]]
    return {**spec, "name": job.name, "tenant": job.tenant}


def rounds(jobs: Sequence[TrialJob]) -> list[list[TrialJob]]:
    """The jobs in the order in which they are submitted."""
    numbers = sorted({job.round for job in jobs})
    return [[job for job in jobs if job.round == number] for number in numbers]


def possible(jobs: Sequence[TrialJob], nodes: Sequence[TrialNode]) -> tuple[list[TrialJob], list[str]]:
    """The jobs that these nodes can show, and the names of the others: someone's own cluster may be smaller."""
    shown = [job for job in jobs if job.gpus <= 4 or len(nodes) >= 2]
    return shown, [job.name for job in jobs if job not in shown]
