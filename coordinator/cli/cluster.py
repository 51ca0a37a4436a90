"""`serai cluster`, `version`, `completion`, and the two servers, `coordinator` and `agent`."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING

import click

from coordinator.cli import exits, figures
from coordinator.cli.output import Shape, print_one
from coordinator.cli.session import ask, shaped

if TYPE_CHECKING:
    from coordinator.client import Client
    from coordinator.client.views import ClusterView


@click.command()
@shaped(lists=False)
def cluster(shape: Shape) -> None:
    """The cluster in a few lines."""

    async def work(client: Client) -> ClusterView:
        return await client.cluster()

    found = ask(work)
    leader = found["leader"]
    memory = f"{figures.size(found['memory_granted_mib'])} of {figures.size(found['memory_mib'])} granted"
    compute = (
        f"{figures.gpus(found['compute_granted_milli'])} of {figures.gpus(found['compute_milli'])} granted"
    )
    lines = [
        ("nodes", _counts(found["nodes"])),
        ("gpus", f"{found['gpus']}, {compute}"),
        ("gpu memory", memory),
        ("jobs", _counts(found["jobs"])),
        ("leader", f"{leader['id']} at {leader['address']}" if leader else "none: nothing is started now"),
        ("engine", found["engine"]),
        ("version", found["version"]),
        ("revision", str(found["revision"])),
    ]
    if found.get("unreadable"):  # an older coordinator does not tell
        lines.append(
            ("unreadable", f"{found['unreadable']} records in etcd; the coordinator's log names them")
        )
    if found.get("silent_together"):
        lines.append(
            (
                "silent together",
                f"{found['silent_together']} nodes, so none of them is given up: look at etcd and the network; "
                "one that is known to be down is given up once it is cordoned",
            )
        )
    if found.get("clocks_off"):
        off = ", ".join(f"{node} {seconds:+d} s" for node, seconds in found["clocks_off"].items())
        lines.append(("clocks", f"off on {off}; set them by NTP: times that they tell are wrong"))
    print_one(found, lines, shape, name="version")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items() if number) or "none"


@click.command()
@shaped(lists=False)
def version(shape: Shape) -> int:
    """Versions of this command and of the coordinator; exit code 8 if they do not fit."""
    from coordinator.client import ApiError, Unreachable

    ours = _own_version()
    theirs: str | None = None

    async def work(client: Client) -> str:
        return (await client.cluster())["version"]

    try:
        theirs = ask(work, retry_seconds=0)
    except (Unreachable, ApiError):
        theirs = None
    if shape.is_data:
        click.echo(json.dumps({"serai": ours, "coordinator": theirs}))
    else:
        click.echo(f"serai {ours}\ncoordinator {theirs or figures.UNKNOWN}")
    return exits.DONE if theirs is None or _series(ours) == _series(theirs) else exits.VERSIONS


def _own_version() -> str:
    try:
        return installed_version("serai")
    except PackageNotFoundError:
        return "0"


def _series(version: str) -> list[str]:
    """What must be equal: the first number, and before 1.0 the second as well."""
    parts = version.split(".")
    return parts[:2] if parts[0] == "0" else parts[:1]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  source <(serai completion bash)        (in ~/.bashrc)
    zsh:   source <(serai completion zsh)         (in ~/.zshrc)
    fish:  serai completion fish > ~/.config/fish/completions/serai.fish
    """
    from click.shell_completion import get_completion_class

    from coordinator.cli import serai

    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(found(serai, {}, "serai", "_SERAI_COMPLETE").source())


# The servers replace this process, so that their signals, exit codes and memory are their own.
_PASS_ON = {"ignore_unknown_options": True, "help_option_names": list[str]()}


@click.command(context_settings=_PASS_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def coordinator(arguments: tuple[str, ...]) -> None:
    """Start a coordinator: the API and the scheduler."""
    _become("coordinator", arguments)


@click.command(context_settings=_PASS_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def agent(arguments: tuple[str, ...]) -> None:
    """Start the agent of this node."""
    _become("nodeagent", arguments)


def _become(module: str, arguments: tuple[str, ...]) -> None:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
