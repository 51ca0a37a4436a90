"""The nodes of a Nomad cluster that is there already, as nodes of a trial: each gets simulated GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from attrs import evolve

from coordinator.dev.scenario import NODES, TrialNode


class NomadUnusable(Exception):
    """Nomad does not answer, or has no node that could run a container."""


async def nomad_nodes(
    address: str, env: Mapping[str, str] = os.environ
) -> tuple[list[TrialNode], dict[str, str]]:
    """The ready nodes with a Docker driver, and Nomad's id of each by name. Raises `NomadUnusable`."""
    headers = {"X-Nomad-Token": env["NOMAD_TOKEN"]} if env.get("NOMAD_TOKEN") else {}
    timeout = aiohttp.ClientTimeout(total=10.0)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{address.rstrip('/')}/v1/nodes") as answer,
        ):
            if answer.status != 200:
                raise NomadUnusable(
                    f"Nomad at {address} answers HTTP {answer.status}: {(await answer.text())[:200]}"
                )
            listed = await answer.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise NomadUnusable(f"Nomad at {address} cannot be asked: {error}") from error
    nodes, ids = as_trial_nodes(listed)
    if not nodes:
        raise NomadUnusable(f"Nomad at {address} has no ready node with a healthy docker driver")
    return nodes, ids


def as_trial_nodes(listed: Sequence[Mapping[str, Any]]) -> tuple[list[TrialNode], dict[str, str]]:
    """Each usable node under its own name (made fit for Serai, and unique), with the GPUs of the trial's nodes in turn."""
    nodes: list[TrialNode] = []
    ids: dict[str, str] = {}
    usable = (each for each in listed if each.get("Status") == "ready" and _runs_docker(each))
    for each in sorted(usable, key=lambda node: (str(node.get("Name")), str(node["ID"]))):
        name = re.sub(r"[^a-z0-9._-]", "-", str(each.get("Name") or "node").lower())[:54] or "node"
        if name in ids:
            name = f"{name}-{str(each['ID'])[:8]}"
        nodes.append(evolve(NODES[len(nodes) % len(NODES)], name=name))
        ids[name] = str(each["ID"])
    return nodes, ids


def _runs_docker(node: Mapping[str, Any]) -> bool:
    driver = (node.get("Drivers") or {}).get("docker") or {}
    return (
        bool(driver.get("Detected"))
        and bool(driver.get("Healthy"))
        and node.get("SchedulingEligibility") != "ineligible"
    )
