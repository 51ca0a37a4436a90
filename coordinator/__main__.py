"""The coordinator process: reads its settings, connects the parts, and runs one role or both.

    api         serves /v1; any number of replicas
    scheduler   waits to lead, then plans; one leads, the others stand by with everything already read
    both        starts the two as processes of their own, since two busy event loops in one process slow each other
                down, and ends when either cannot be kept alive

One JSON line on standard output says when a role is ready: {"event": "ready", "role": ..., "address": ...}.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path

import yaml
from aiohttp import web
from attrs import evolve

from coordinator.api.app import make_app
from coordinator.clock import SteadyClock
from coordinator.cluster import Cluster
from coordinator.commit import LeadershipLost
from coordinator.config import SettingInvalid, Settings, from_mapping
from coordinator.cycle_metrics import CycleMetrics, listener
from coordinator.engines import Engine
from coordinator.engines.agent import AgentEngine
from coordinator.engines.nomad import NomadEngine, NomadSettings
from coordinator.etcd_store import EtcdSettings, EtcdStore
from coordinator.index import Index
from coordinator.leader import campaign
from coordinator.records import DONE, Endpoint, decode, endpoint_key
from coordinator.rehearsal import load_compiled, rehearse
from coordinator.replica import Replica
from coordinator.scheduler import serve_term
from coordinator.stacks import tell_stacks, tell_tasks
from coordinator.store import Store, StoreUnavailable

log = logging.getLogger("serai.coordinator")

VERSION = "0.1.0"
# A child that dies this often in a row is not going to live; the supervisor of the machine should know.
RESTARTS_IN_A_ROW = 5
HEALTHY_AFTER_SECONDS = 30


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    tell_stacks()
    logging.basicConfig(
        level=options.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        settings = _settings(options)
    except (SettingInvalid, OSError, yaml.YAMLError, TypeError) as error:
        print(f"coordinator: {error}", file=sys.stderr)
        return 2
    if options.role != "both" or options.compile:
        hold_the_collector()
        load_compiled(is_installing=options.compile)
    if options.compile:
        return 0
    role = {"both": _run_both, "api": _run_api, "scheduler": _run_scheduler}[options.role]
    with suppress(KeyboardInterrupt):
        return asyncio.run(role(options, settings))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="serai coordinator", description="Serves the API and plans, over etcd."
    )
    parser.add_argument("--role", choices=("both", "api", "scheduler"), default="both")
    parser.add_argument(
        "--etcd",
        default=os.environ.get("SERAI_ETCD", "http://127.0.0.1:2379"),
        help="endpoints, separated by commas (SERAI_ETCD)",
    )
    parser.add_argument("--etcd-ca", default="", help="certificate authority of etcd, a PEM file")
    parser.add_argument("--etcd-cert", default="", help="client certificate, a PEM file")
    parser.add_argument("--etcd-key", default="", help="client key, a PEM file")
    parser.add_argument("--etcd-user", default="", help="name:password-file")
    parser.add_argument(
        "--listen", default="127.0.0.1:8765", help="host:port of the API; port 0 picks a free one"
    )
    parser.add_argument(
        "--metrics-listen",
        default="",
        help="host:port where the scheduler serves /metrics of its cycles; off by default (the API has its own)",
    )
    parser.add_argument("--engine", choices=("agent", "nomad"), default=None)
    parser.add_argument(
        "--nomad", default=os.environ.get("NOMAD_ADDR", "http://127.0.0.1:4646"), help="address (NOMAD_ADDR)"
    )
    parser.add_argument(
        "--config", default="", help="settings as YAML; see coordinator/config.py for their names"
    )
    parser.add_argument("--id", default="", help="name of this coordinator; host and process by default")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile what placement runs on, and end: a part of installing, so that no start has to wait for it",
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    options = parser.parse_args(argv)
    options.argv = list(sys.argv[1:] if argv is None else argv)
    return options


def _settings(options: argparse.Namespace) -> Settings:
    values = yaml.safe_load(Path(options.config).read_text()) if options.config else None
    settings = from_mapping(values or {})
    return evolve(settings, engine=options.engine) if options.engine else settings


clock_ms = SteadyClock()


def _identity(options: argparse.Namespace) -> str:
    return options.id or f"{socket.gethostname()}-{os.getpid()}"


def _etcd(options: argparse.Namespace) -> EtcdStore:
    extra = {"ca_file": options.etcd_ca, "cert_file": options.etcd_cert, "key_file": options.etcd_key}
    if options.etcd_user:
        extra["user"], _, password_file = options.etcd_user.partition(":")
        extra["password"] = Path(password_file).read_text().strip()
    return EtcdStore(EtcdSettings.from_url(options.etcd, **extra))


def _engine(options: argparse.Namespace, settings: Settings, store: Store, replica: Replica) -> Engine:
    if settings.engine == "nomad":

        def nomad_id(node: str) -> str | None:
            inventory = replica.cluster.inventory_of(node)
            return inventory.engine_node_id or None if inventory else None

        return NomadEngine(
            NomadSettings.from_environment(options.nomad, os.environ),
            settings,
            nomad_id,
            clock_ms,
            lambda: replica.cluster,
        )

    async def endpoint(node: str) -> Endpoint | None:
        item = await store.get(endpoint_key(node))
        return decode(Endpoint, item.value) if item else None

    return AgentEngine(endpoint)


def _ready(role: str, address: str, **more: str) -> None:
    print(json.dumps({"event": "ready", "role": role, "address": address, **more}), flush=True)


def _stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    tell_tasks()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def hold_the_collector() -> None:
    """While a process loads and reads the store almost everything that it makes is to stay."""
    gc.set_threshold(1_000_000, 50, 1_000)


def spare_the_collector() -> None:
    """What was read at the start lives as long as the process: let it look only at what came later. And most of that
    lives long too: the collector's defaults would walk all of it again and again."""
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)


def _replica(store: Store, settings: Settings, *, keep_done: bool) -> Replica:
    # A leader decides nothing about jobs that have ended: that one left jobs/ says all.
    unread = () if keep_done else (DONE,)
    return Replica(store, lambda: Cluster(settings, keep_done=keep_done), clock_ms, unread=unread)


# --- the API ---------------------------------------------------------------------------------------------------------


async def _run_api(options: argparse.Namespace, settings: Settings) -> int:
    stop = _stop_event()
    store = _etcd(options)
    replica = _replica(store, settings, keep_done=True)
    engine = _engine(options, settings, store, replica)
    following = asyncio.create_task(replica.run())
    app = make_app(store, replica, settings, engine, clock_ms, random.SystemRandom(), VERSION)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    host, _, port = options.listen.rpartition(":")
    try:
        site = web.TCPSite(runner, host or "127.0.0.1", int(port), reuse_address=True)
        await site.start()
        address = _address(host or "127.0.0.1", runner)
        await _first(replica.ready(), stop.wait(), following)
        _ready("api", address)
        spare_the_collector()
        await _first(stop.wait(), following)
    finally:
        await runner.cleanup()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await engine.close()
        await store.close()
    return 0


def _address(host: str, runner: web.AppRunner) -> str:
    port = runner.addresses[0][1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _first(*waits: Awaitable[object]) -> None:
    """Until the first of them ends; an exception of it is raised. Those that were made here are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for wait, task in zip(waits, tasks, strict=True):
            if wait is not task:
                task.cancel()


# --- the scheduler ---------------------------------------------------------------------------------------------------


async def _run_scheduler(options: argparse.Namespace, settings: Settings) -> int:
    stop = _stop_event()
    store = _etcd(options)
    replica = _replica(store, settings, keep_done=False)
    engine = _engine(options, settings, store, replica)
    following = asyncio.create_task(replica.run())
    metrics = CycleMetrics()
    try:
        async with listener(options.metrics_listen, metrics, replica) as metrics_address:
            await _first(replica.ready(), stop.wait(), following)
            _ready("scheduler", "", metrics=metrics_address)
            spare_the_collector()
            leading = asyncio.create_task(_lead(options, settings, store, replica, engine, metrics))
            try:
                await _first(stop.wait(), following, leading)
            finally:
                leading.cancel()
                await asyncio.gather(leading, return_exceptions=True)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await engine.close()
        await store.close()
    return 0


async def _lead(
    options: argparse.Namespace,
    settings: Settings,
    store: Store,
    replica: Replica,
    engine: Engine,
    metrics: CycleMetrics,
) -> None:
    """One term after another, until cancelled; then the term is handed back at once."""
    memo = Index()
    while True:
        standby = asyncio.create_task(rehearse(replica, settings, clock_ms, memo))
        try:
            term = await campaign(store, settings, _identity(options), clock_ms, address=options.listen)
        finally:
            standby.cancel()
        log.info("leading id=%s", term.token.leadership.id)
        try:
            await serve_term(term, store, replica, engine, settings, clock_ms, metrics, memo)
        except LeadershipLost as lost:
            log.warning("leadership lost: %s", lost)
        except StoreUnavailable as error:
            log.warning("the term ends, the store is unavailable: %s", error)
        finally:
            await asyncio.shield(term.resign())


# --- both ------------------------------------------------------------------------------------------------------------


def _hold_port(listen: str) -> tuple[str, socket.socket | None]:
    """Both processes must know the port: the one listens on it, the other tells who leads and where. One that was
    picked is bound until the end, without listening, so that nobody else is given it before the role has started."""
    host, _, port = listen.rpartition(":")
    if port != "0":
        return listen, None
    name = host.strip("[]") or "127.0.0.1"
    held = socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((name, 0))
    listen = f"{host}:{held.getsockname()[1]}"
    if sys.platform != "linux":
        held.close()  # elsewhere a port that is bound cannot be bound again to listen
    return listen, held


async def _run_both(options: argparse.Namespace, settings: Settings) -> int:
    """Starts each role as a process, starts it again when it dies, and passes a stop on."""
    listen, held = _hold_port(options.listen)
    options.argv += ["--listen", listen]
    stop = _stop_event()
    roles = [asyncio.create_task(_keep_role(options, role, stop)) for role in ("api", "scheduler")]
    done, _ = await asyncio.wait(roles, return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    results = await asyncio.gather(*roles)
    if held is not None:
        held.close()
    return max(results) if done else 0


async def _keep_role(options: argparse.Namespace, role: str, stop: asyncio.Event) -> int:
    """Until `stop`, or until the role died too often in a row; then 1. The argument that comes last wins, so the role
    is simply appended to the command line."""
    failures = 0
    while not stop.is_set() and failures < RESTARTS_IN_A_ROW:
        started_at = asyncio.get_running_loop().time()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "coordinator", *options.argv, "--role", role
        )
        ended = asyncio.create_task(process.wait())
        await _first(ended, stop.wait())
        if stop.is_set():
            with suppress(ProcessLookupError):
                process.terminate()
            await ended
            return 0
        lived = asyncio.get_running_loop().time() - started_at
        failures = 1 if lived > HEALTHY_AFTER_SECONDS else failures + 1
        log.error(
            "role=%s ended with %d after %.1f s, start %d in a row", role, ended.result(), lived, failures + 1
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(failures):
                await stop.wait()
    return 0 if stop.is_set() else 1


if __name__ == "__main__":
    sys.exit(main())
