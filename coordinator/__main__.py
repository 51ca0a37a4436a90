"""The coordinator process: reads its settings, and runs one role (`coordinator.roles`) or both.

    api         serves /v1; any number of replicas
    scheduler   waits to lead, then plans; one leads, the others stand by with everything already read
    both        starts the two as processes of their own, since two busy event loops in one process slow each other
                down, and ends when either cannot be kept alive

One JSON line on standard output says when a role is ready: {"event": "ready", "role": ..., "address": ...}.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml
from attrs import evolve

from coordinator.config import SettingInvalid, Settings, from_mapping
from coordinator.signals import first, stop_event, tell_stacks

log = logging.getLogger("serai.coordinator")

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
    with suppress(KeyboardInterrupt):
        return _run(options, settings)
    return 0


def _run(options: argparse.Namespace, settings: Settings) -> int:
    if options.role == "both" and not options.compile:
        return asyncio.run(_run_both(options))
    # Only now: who starts the two roles needs nothing of it, and is there sooner.
    from coordinator import roles

    roles.load(is_installing=options.compile)
    return 0 if options.compile else asyncio.run(roles.run(options, settings))


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


async def _run_both(options: argparse.Namespace) -> int:
    """Starts each role as a process, starts it again when it dies, and passes a stop on."""
    listen, held = _hold_port(options.listen)
    options.argv += ["--listen", listen]
    stop = stop_event()
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
        await first(ended, stop.wait())
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
