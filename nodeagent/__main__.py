"""The agent's process: reads its options, connects the parts, and runs until it is told to end.

    python -m nodeagent --node n1 --etcd http://10.0.0.1:2379
    python -m nodeagent --node n1 --etcd ... --gpus simulated:8x80GiB:A100 --runner process     a trial

SIGTERM and SIGINT end the agent and no task. One JSON line on standard output says that it is ready:
{"event": "ready", "role": "agent", "node": ..., "address": ...}.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import IO

import aiohttp
import yaml
from aiohttp import web
from attrs import evolve, frozen

from coordinator.clock import SteadyClock
from coordinator.config import SettingInvalid, Settings, from_mapping
from coordinator.etcd_store import EtcdSettings, EtcdStore
from coordinator.records import Endpoint
from coordinator.signals import tell_stacks, tell_tasks
from coordinator.store import Store
from nodeagent.agent import Agent, NodeIdentity
from nodeagent.containers import DEFAULT_SOCKET, DockerRunner
from nodeagent.endpoint import ExpiredOutput, make_log_app
from nodeagent.gpu_source import GpuReader, GpuSource
from nodeagent.isolation_steps import CONTROL
from nodeagent.machine import Machine, read_machine
from nodeagent.nvml import NvmlSource
from nodeagent.presence import NodeNameTaken, Presence
from nodeagent.process_cleanup import stop_all
from nodeagent.processes import ProcessRunner
from nodeagent.runner import Runner
from nodeagent.simulated import BadDescription, SimulatedSource, parse_description
from vgpu.inventory import Gpu

log = logging.getLogger("serai.agent")

VERSION = "0.1.0"
NODE_NAME = re.compile(r"[a-z0-9._-]{1,63}")
NOMAD_SECONDS = 5
SIMULATED = "simulated:"
TASKS = "tasks"


@frozen
class Options:
    """What one agent is told. `machine` overrides what may be given out (several agents on one machine in a trial)."""

    node: str
    etcd: EtcdSettings
    gpus: str
    runner: str
    data_folder: Path
    listen: str
    advertise: str
    docker_socket: Path
    labels: dict[str, str]
    isolations: tuple[str, ...]
    nomad: str
    engine_node_id: str
    machine: Machine
    settings: Settings


class OptionInvalid(ValueError):
    """An option cannot be used; the message names it, the value and what is allowed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 ended as asked, 1 failed, 2 usage, 4 refused (the node's name is taken)."""
    parsed = _parser().parse_args(argv)
    tell_stacks()
    logging.basicConfig(
        level=parsed.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        if parsed.stop_tasks:
            stop_all(parsed.data_folder / TASKS)
            return 0
        options = _options(parsed)
        return asyncio.run(run(options))
    except (OptionInvalid, SettingInvalid, BadDescription) as error:
        print(f"serai agent: {error}", file=sys.stderr)
        return 2
    except NodeNameTaken as error:
        print(f"serai agent: {error}", file=sys.stderr)
        return 4
    except (OSError, RuntimeError) as error:
        print(f"serai agent: {error}", file=sys.stderr)
        return 1


async def run(options: Options) -> int:
    """Until SIGTERM or SIGINT."""
    tell_tasks()
    lock = _lock(options.data_folder)
    store = EtcdStore(options.etcd)
    runner = _runner(options)
    token = secrets.token_urlsafe(24)
    expired = ExpiredOutput(options.data_folder / "expired")
    server = web.AppRunner(make_log_app(runner, token, expired), access_log=None)
    try:
        endpoint = Endpoint(options.node, await _listen(server, options), token)
        await _until_told(_serve(options, store, runner, expired, endpoint))
    finally:
        await server.cleanup()
        await runner.close()
        await store.close()
        lock.close()
    return 0


async def _serve(
    options: Options, store: Store, runner: Runner, expired: ExpiredOutput, endpoint: Endpoint
) -> None:
    lease_seconds = options.settings.node_lease_seconds
    presence = Presence(store, options.node, options.machine.id, lease_seconds, endpoint)
    inventory = await presence.claim_when_reached()
    known = inventory.gpus if inventory is not None else ()
    gpus = GpuReader(_source(options, known))
    node_id = _nomad_node_id(options.nomad, options.engine_node_id)
    agent = Agent(
        NodeIdentity(options.node, options.labels, options.isolations, VERSION, node_id),
        options.machine,
        presence,
        store,
        runner,
        gpus,
        options.settings,
        expired,
        SteadyClock(),
        known=known,
    )
    ready = {"event": "ready", "role": "agent", "node": options.node, "address": endpoint.address}
    print(json.dumps(ready), flush=True)
    try:
        await agent.run()
    finally:
        await gpus.close()


async def _until_told(work: Awaitable[None]) -> None:
    running = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        log.info("the agent ends; its tasks run on")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _lock(folder: Path) -> IO[str]:
    """One agent for one data folder: two would each take the other's tasks for their own."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise OptionInvalid(f"--data-folder {folder} is in use by another agent on this machine") from None
    return file


def _runner(options: Options) -> Runner:
    if options.runner == "docker":
        return DockerRunner(options.node, options.settings.cluster, options.docker_socket)
    return ProcessRunner(options.node, options.settings.cluster, options.data_folder / TASKS)


def _source(options: Options, known: tuple[Gpu, ...]) -> GpuSource:
    if options.gpus == "nvml":
        return NvmlSource(known)
    return SimulatedSource(options.node, options.gpus.removeprefix(SIMULATED))


async def _listen(server: web.AppRunner, options: Options) -> str:
    """The address under which a coordinator reaches this node's logs."""
    host, port = _host_port(options.listen)
    await server.setup()
    await web.TCPSite(server, host, port).start()
    bound = server.addresses[0][1]
    if options.advertise:
        return options.advertise
    if host in ("0.0.0.0", "::", ""):
        host = socket.getfqdn()
    return f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"


def _host_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise OptionInvalid(
            f"--listen must be HOST:PORT with a port from 0 (any free one) to 65535, not {text!r}"
        )
    return host.strip("[]"), int(port)


def _nomad_node_id(address: str, known: str) -> Callable[[], Awaitable[str]]:
    """Asks the Nomad client of this machine for its id until it is known."""

    async def ask() -> str:
        nonlocal known
        if known or not address:
            return known
        headers = {"X-Nomad-Token": os.environ["NOMAD_TOKEN"]} if "NOMAD_TOKEN" in os.environ else {}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=NOMAD_SECONDS)) as session,
                session.get(f"{address.rstrip('/')}/v1/agent/self", headers=headers) as response,
            ):
                response.raise_for_status()
                known = (await response.json())["stats"]["client"]["node_id"]
        except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as error:
            log.warning("the Nomad client at %s does not say its node id: %s", address, error)
        return known

    return ask


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="serai agent", description="Tells the cluster about this machine, and runs what is placed on it."
    )
    add = parser.add_argument
    add("--node", default=socket.gethostname().lower(), help="name of this node (default: the host name)")
    add(
        "--etcd",
        default=os.environ.get("SERAI_ETCD", "http://127.0.0.1:2379"),
        help="endpoints, separated by commas (SERAI_ETCD)",
    )
    add("--etcd-ca", default="", help="certificate authority of etcd, a PEM file")
    add("--etcd-cert", default="", help="client certificate, a PEM file")
    add("--etcd-key", default="", help="client key, a PEM file")
    add("--etcd-user", default="", help="name:password-file")
    add("--gpus", default="nvml", help="nvml, or simulated:DESCRIPTION such as simulated:8x80GiB:A100")
    add("--runner", choices=("docker", "process"), default="docker", help="what runs the tasks")
    add("--docker-socket", type=Path, default=DEFAULT_SOCKET)
    add("--data-folder", type=Path, default=Path("/var/lib/serai"))
    add(
        "--stop-tasks",
        action="store_true",
        help="end the plain processes that agents with this --data-folder left running, and nothing else",
    )
    add("--listen", default="0.0.0.0:7711", metavar="HOST:PORT", help="where logs are served")
    add("--advertise", default="", metavar="URL", help="address of --listen as the coordinator reaches it")
    add(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="label of this node, such as rack=r1",
    )
    add("--isolations", default="", metavar="NAME[,NAME]", help="ways to cut a GPU (default: what is found)")
    add("--nomad", default="", metavar="URL", help="the Nomad client of this machine, if Nomad runs the jobs")
    add(
        "--engine-node-id", default="", metavar="ID", help="id of this node in Nomad, if --nomad is not asked"
    )
    add("--cpu-milli", type=int, help="CPU to give out, in thousandths of a core (default: all)")
    add("--memory-mib", type=int, help="memory to give out (default: all)")
    add("--config", type=Path, help="YAML file with the settings that the coordinator has too")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def _options(parsed: argparse.Namespace) -> Options:
    if not NODE_NAME.fullmatch(parsed.node):
        raise OptionInvalid(
            f"--node must be 1 to 63 lower-case letters, digits, '.', '-' or '_', not {parsed.node!r}"
        )
    if parsed.gpus.startswith(SIMULATED):
        parse_description(parsed.gpus.removeprefix(SIMULATED))
    elif parsed.gpus != "nvml":
        raise OptionInvalid(f"--gpus must be nvml or simulated:DESCRIPTION, not {parsed.gpus!r}")
    _host_port(parsed.listen)
    labels = {}
    for text in parsed.label:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise OptionInvalid(f"--label must be KEY=VALUE, not {text!r}")
        labels[key] = value
    machine = read_machine()
    for name, value in (("cpu_milli", parsed.cpu_milli), ("memory_mib", parsed.memory_mib)):
        if value is not None and value < 1:
            raise OptionInvalid(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        machine = machine if value is None else evolve(machine, **{name: value})
    return Options(
        node=parsed.node,
        etcd=_etcd(parsed),
        gpus=parsed.gpus,
        runner=parsed.runner,
        data_folder=parsed.data_folder,
        listen=parsed.listen,
        advertise=parsed.advertise,
        docker_socket=parsed.docker_socket,
        labels=labels,
        isolations=tuple(filter(None, parsed.isolations.split(","))) or _isolations(parsed.gpus),
        nomad=parsed.nomad,
        engine_node_id=parsed.engine_node_id,
        machine=machine,
        settings=_settings(parsed.config),
    )


def _isolations(gpus: str) -> tuple[str, ...]:
    found = ("exclusive", "timeslice")
    return (*found, "mps") if gpus == "nvml" and shutil.which(CONTROL) else found


def _settings(path: Path | None) -> Settings:
    if path is None:
        return Settings()
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise OptionInvalid(f"--config {path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise OptionInvalid(f"--config {path} must hold a mapping of settings")
    try:
        return from_mapping(values)
    except TypeError as error:
        raise OptionInvalid(f"--config {path}: {error}") from error


def _etcd(parsed: argparse.Namespace) -> EtcdSettings:
    user, _, password_file = parsed.etcd_user.partition(":")
    password = Path(password_file).read_text().strip() if password_file else ""
    try:
        return EtcdSettings.from_url(
            parsed.etcd,
            ca_file=parsed.etcd_ca,
            cert_file=parsed.etcd_cert,
            key_file=parsed.etcd_key,
            user=user,
            password=password,
        )
    except ValueError as error:
        raise OptionInvalid(f"--etcd {parsed.etcd}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
