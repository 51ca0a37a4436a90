"""Which coordinator, as whom: flag, then environment, then file, then default.

The file is `serai/config.yaml` under XDG_CONFIG_HOME (~/.config), or what SERAI_CONFIG names:

    address: http://serai.example:7300
    token_file: ~/.config/serai/token
    tenant: team-a
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from coordinator.cli import exits
from coordinator.cli.exits import Stop

DEFAULT_ADDRESS = "http://127.0.0.1:8765"
_KNOWN = ("address", "token", "token_file", "tenant")


@frozen
class Connection:
    address: str = DEFAULT_ADDRESS
    token: str = ""
    tenant: str = ""


def config_path(env: Mapping[str, str]) -> Path:
    if env.get("SERAI_CONFIG"):
        return Path(env["SERAI_CONFIG"]).expanduser()
    home = env.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "serai" / "config.yaml"


def resolve(flags: Mapping[str, str | None], env: Mapping[str, str] = os.environ) -> Connection:
    """`flags` holds address, token, token_file and tenant as given on the command line, None where not given."""
    stored = _read_config(config_path(env), asked=bool(env.get("SERAI_CONFIG")))
    token = ""
    # One source at a time: a token of a nearer source goes before the token file of a farther one.
    sources = (flags, {name: env.get(f"SERAI_{name.upper()}") for name in _KNOWN}, stored)
    for source in sources:
        if source.get("token"):
            token = str(source["token"])
        elif source.get("token_file"):
            token = _read_token(str(source["token_file"]))
        if token:
            break
    return Connection(
        address=_first("address", sources) or DEFAULT_ADDRESS, token=token, tenant=_first("tenant", sources)
    )


def _first(name: str, sources: tuple[Mapping[str, Any], ...]) -> str:
    return next((str(source[name]) for source in sources if source.get(name)), "")


def _read_token(name: str) -> str:
    path = Path(name).expanduser()
    try:
        return path.read_text().strip()
    except OSError as error:
        raise Stop(
            exits.LOGIN, f"token file {path}: {error.strerror}", field="token_file", value=name
        ) from None


def _read_config(path: Path, *, asked: bool) -> Mapping[str, Any]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        if asked:
            raise Stop(
                exits.USAGE, f"there is no file {path}", field="SERAI_CONFIG", value=str(path)
            ) from None
        return {}
    except OSError as error:
        raise Stop(exits.USAGE, f"{path}: {error.strerror}", field="config") from None
    import yaml

    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise Stop(exits.USAGE, f"{path} is not YAML: {error}", field="config") from None
    unknown = sorted(set(values) - set(_KNOWN)) if isinstance(values, dict) else ["(not a mapping)"]
    if unknown:
        raise Stop(
            exits.USAGE,
            f"{path}: unknown setting {unknown[0]!r}",
            field=str(unknown[0]),
            limit=", ".join(_KNOWN),
            hint=f"known are {', '.join(_KNOWN)}",
        )
    return dict(values)
