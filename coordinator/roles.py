"""What a coordinator's process does: the API, or the scheduler. Connects the parts; decides nothing."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from attrs import frozen

from coordinator.api.app import make_app, make_runner
from coordinator.clock import SteadyClock
from coordinator.cluster import Cluster
from coordinator.commit import LeadershipLost
from coordinator.config import Settings
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
from coordinator.signals import first, stop_event
from coordinator.store import Store, StoreUnavailable

log = logging.getLogger("serai.coordinator")

VERSION = "0.1.0"

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


def hold_the_collector() -> None:
    """While a process loads and reads the store almost everything that it makes is to stay."""
    gc.set_threshold(1_000_000, 50, 1_000)


def spare_the_collector() -> None:
    """What was read at the start lives as long as the process: let it look only at what came later. And most of that
    lives long too: the collector's defaults would walk all of it again and again."""
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)


@frozen
class _Parts:
    """What both roles stand on. `following` keeps the replica a copy of the store, and ends only with an error."""

    store: Store
    replica: Replica
    engine: Engine
    following: asyncio.Task[None]


@asynccontextmanager
async def _parts(
    options: argparse.Namespace, settings: Settings, *, keep_done: bool
) -> AsyncIterator[_Parts]:
    """Closed in the end."""
    store = _etcd(options)
    # A leader decides nothing about jobs that have ended: that one left jobs/ says all.
    unread = () if keep_done else (DONE,)
    replica = Replica(store, lambda: Cluster(settings, keep_done=keep_done), clock_ms, unread=unread)
    engine = _engine(options, settings, store, replica)
    following = asyncio.create_task(replica.run())
    try:
        yield _Parts(store, replica, engine, following)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await engine.close()
        await store.close()


# --- the API ---------------------------------------------------------------------------------------------------------


async def _run_api(options: argparse.Namespace, settings: Settings) -> int:
    stop = stop_event()
    host, _, port = options.listen.rpartition(":")
    async with _parts(options, settings, keep_done=True) as parts:
        random_ids = random.SystemRandom()
        app = make_app(parts.store, parts.replica, settings, parts.engine, clock_ms, random_ids, VERSION)
        runner = make_runner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host or "127.0.0.1", int(port), reuse_address=True)
            await site.start()
            address = _address(host or "127.0.0.1", runner)
            await first(parts.replica.ready(), stop.wait(), parts.following)
            _ready("api", address)
            spare_the_collector()
            await first(stop.wait(), parts.following)
        finally:
            await runner.cleanup()
    return 0


def _address(host: str, runner: web.AppRunner) -> str:
    port = runner.addresses[0][1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# --- the scheduler ---------------------------------------------------------------------------------------------------


async def _run_scheduler(options: argparse.Namespace, settings: Settings) -> int:
    stop = stop_event()
    metrics = CycleMetrics()
    async with (
        _parts(options, settings, keep_done=False) as parts,
        listener(options.metrics_listen, metrics, parts.replica) as metrics_address,
    ):
        await first(parts.replica.ready(), stop.wait(), parts.following)
        _ready("scheduler", "", metrics=metrics_address)
        spare_the_collector()
        leading = asyncio.create_task(_lead(options, settings, parts, metrics))
        try:
            await first(stop.wait(), parts.following, leading)
        finally:
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)
    return 0


async def _lead(
    options: argparse.Namespace, settings: Settings, parts: _Parts, metrics: CycleMetrics
) -> None:
    """One term after another, until cancelled; then the term is handed back at once."""
    memo, store, replica = Index(), parts.store, parts.replica
    while True:
        standby = asyncio.create_task(rehearse(replica, settings, clock_ms, memo))
        try:
            term = await campaign(store, settings, _identity(options), clock_ms, address=options.listen)
        finally:
            standby.cancel()
        log.info("leading id=%s", term.token.leadership.id)
        try:
            await serve_term(term, store, replica, parts.engine, settings, clock_ms, metrics, memo)
        except LeadershipLost as lost:
            log.warning("leadership lost: %s", lost)
        except StoreUnavailable as error:
            log.warning("the term ends, the store is unavailable: %s", error)
        finally:
            await asyncio.shield(term.resign())


def load(*, is_installing: bool) -> None:
    """What has to be there before the event loop runs."""
    hold_the_collector()
    load_compiled(is_installing=is_installing)


async def run(options: argparse.Namespace, settings: Settings) -> int:
    """Until SIGTERM or SIGINT."""
    return await {"api": _run_api, "scheduler": _run_scheduler}[options.role](options, settings)
