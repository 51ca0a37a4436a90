"""The `serai` command. Each subcommand is imported when it is used, so that `serai --help` stays fast."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from coordinator.cli import exits
from coordinator.cli.session import connection_options

# name -> where the command is, and its line in the help. Grouped as the help shows them.
_SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Jobs": {
        "submit": ("coordinator.cli.submit:submit", "Submit jobs from files, or one from flags"),
        "run": ("coordinator.cli.submit:run", "Submit, follow the output, exit with the job's code"),
        "jobs": ("coordinator.cli.jobs:jobs", "List jobs"),
        "job": ("coordinator.cli.jobs:job", "Show one job: where it is and why"),
        "logs": ("coordinator.cli.jobs:logs", "Show what a job printed"),
        "cancel": ("coordinator.cli.jobs:cancel", "Cancel jobs"),
        "wait": ("coordinator.cli.jobs:wait", "Wait until jobs have ended"),
        "queue": ("coordinator.cli.queue:queue", "Who goes next, and what the others wait for"),
    },
    "Cluster": {
        "nodes": ("coordinator.cli.nodes:nodes", "List nodes; show, cordon, uncordon one"),
        "tenants": ("coordinator.cli.tenants:tenants", "Tenants, their quotas and shares; apply for a quota"),
        "cluster": ("coordinator.cli.cluster:cluster", "The cluster in a few lines"),
        "top": ("coordinator.cli.top:top", "Live view of nodes, queue and shares"),
        "events": ("coordinator.cli.queue:events", "Follow what changes"),
        "simulate": ("coordinator.cli.simulate:simulate", "What a policy would have made of a trace"),
        "tokens": ("coordinator.cli.tokens:tokens", "Tokens: who may do what"),
    },
    "Set-up": {
        "dev": ("coordinator.dev.command:dev", "Try everything on this machine, with simulated GPUs"),
        "coordinator": ("coordinator.cli.cluster:coordinator", "Start a coordinator (API and scheduler)"),
        "agent": ("coordinator.cli.cluster:agent", "Start the agent of this node"),
        "bootstrap": ("coordinator.cli.tokens:bootstrap", "Write the first admin token into etcd"),
        "backup": ("coordinator.cli.backup:backup", "Write all records of the cluster to a file"),
        "restore": ("coordinator.cli.backup:restore", "Fill an empty etcd from such a file"),
        "completion": ("coordinator.cli.cluster:completion", "Completion for bash, zsh or fish"),
        "version": ("coordinator.cli.cluster:version", "Versions of this command and of the coordinator"),
    },
}
COMMANDS = {name: entry for section in _SECTIONS.values() for name, entry in section.items()}

# Words of Slurm and Docker, and ours.
WORDS = {
    "sbatch": "submit",
    "create": "submit",
    "srun": "run",
    "squeue": "jobs",
    "sacct": "jobs",
    "ps": "jobs",
    "ls": "jobs",
    "inspect": "job",
    "status": "job",
    "scontrol": "job",
    "attach": "logs",
    "scancel": "cancel",
    "kill": "cancel",
    "stop": "cancel",
    "rm": "cancel",
    "sinfo": "nodes",
    "node": "nodes",
    "tenant": "tenants",
    "sacctmgr": "tenants",
    "sshare": "tenants",
    "sprio": "queue",
    "stats": "top",
    "info": "cluster",
}


class SeraiGroup(click.Group):
    """Loads subcommands when they are used, and turns every error into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{attribute} is not a command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0] if args else ""
        ours = WORDS.get(word)
        if ours is not None and word not in COMMANDS:
            if sys.stderr.isatty():
                print(f"{word} is called `serai {ours}` here", file=sys.stderr)
            args = [ours, *args[1:]]
        elif word not in COMMANDS and not word.startswith("-"):
            raise click.UsageError(f"there is no command {word!r}{_nearest(word)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_, text) in commands.items()])

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        words = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        try:
            code = super().main(args=words, prog_name=prog_name or "serai", **extra)
        except BrokenPipeError:
            # The reader of our output has gone (`serai jobs | head`): nothing to say, and nothing to flush.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(exits.DONE)
        except (Exception, KeyboardInterrupt) as error:
            if os.environ.get("SERAI_DEBUG"):
                raise
            stop = exits.as_stop(error)
            exits.show(stop, as_json=_wants_json(words))
            sys.exit(stop.code)
        sys.exit(code if isinstance(code, int) else exits.DONE)


@click.group(
    cls=SeraiGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@connection_options
def serai() -> None:
    """Serai shares a GPU cluster fairly between tenants.

    \b
    Try it:      serai dev
    First job:   serai run --image busybox:1.36 --gpus 1 -- sh -c 'echo hello'
    """


def main() -> NoReturn:
    serai.main(prog_name="serai")


def _nearest(word: str) -> str:
    import difflib

    near = difflib.get_close_matches(word, COMMANDS, n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def _wants_json(words: list[str]) -> bool:
    ours = words[: words.index("--")] if "--" in words else words
    pairs = zip(ours, [*ours[1:], ""], strict=True)
    return any(
        word in ("--json", "-ojson", "-ojsonl", "--output=json", "--output=jsonl")
        or (word in ("-o", "--output") and following in ("json", "jsonl"))
        for word, following in pairs
    )
