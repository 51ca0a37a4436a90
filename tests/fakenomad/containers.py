"""What the Docker driver of a fake client does with a task: reads its config as HCL, and runs a very small shell.

The commands that it knows mean the same to a real shell, so that the engine's contract tests can run against both:
`true`, `false`, `sleep N`, and `sh -c` with statements of echo, sleep, exit, kill -N $$, trap '...' TERM, and
`tail /dev/zero`, which no memory limit survives. A sleeping task goes on when the test moves the fake's clock.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field

_TEMPLATE = re.compile(r"\$\$\{|%%\{|\$\{([^}]*)\}|\$\{|%\{")
_KNOWN_NAME = re.compile(r"\$\{((?:node|attr|meta)\.[\w.-]+|NOMAD_\w+)\}")
_SUM = re.compile(r"(\d+)\s*\+\s*(\d+)$")
_SIGNALS = {"INT": 2, "KILL": 9, "SEGV": 11, "TERM": 15}


class FailedValidation(Exception):
    """The task's config is no valid template: the client fails the task before it has a driver."""


class DriverFailure(Exception):
    """Docker refused; the text is Docker's."""


def hcl(value: Any, known: Mapping[str, str]) -> Any:
    """The value with every string read as an HCL template, as the client does with a task's Config."""
    if isinstance(value, str):
        return _TEMPLATE.sub(lambda match: _template(match, known), value)
    if isinstance(value, list):
        return [hcl(item, known) for item in value]
    if isinstance(value, dict):
        return {key: hcl(item, known) for key, item in value.items()}
    return value


def _template(match: re.Match[str], known: Mapping[str, str]) -> str:
    text = match.group(0)
    if text in ("$${", "%%{"):
        return text[1:]
    name = match.group(1)
    if name is None:
        raise FailedValidation(f"failed to parse config: unterminated template {text!r}")
    if name in known:
        return known[name]
    if total := _SUM.match(name):
        return str(int(total.group(1)) + int(total.group(2)))
    raise FailedValidation(f"failed to parse config: unknown variable; there is no variable named {name!r}")


def environment(env: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """Env values: only names that Nomad knows are replaced, and there is no escape."""
    return {key: _KNOWN_NAME.sub(lambda m: known.get(m.group(1), ""), value) for key, value in env.items()}


@define
class Container:
    """One container. `exit_code` is None while it runs; `oom` tells that the memory limit ended it."""

    alloc: str
    node: str
    image: str
    command: list[str]
    env: dict[str, str]
    devices: tuple[str, ...]
    labels: dict[str, str]
    memory_mib: int
    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int | None = None
    oom: bool = False
    on_term: int | None = None
    wakes_in_seconds: float | None = None
    _rest: list[list[str]] = field(factory=list)

    @property
    def running(self) -> bool:
        return self.exit_code is None

    def start(self) -> None:
        self._rest = statements(self.command)
        self._run()

    def advance(self, seconds: float) -> None:
        """Lets a sleeping task live on for so long."""
        while self.running and self.wakes_in_seconds is not None and seconds >= self.wakes_in_seconds:
            seconds -= self.wakes_in_seconds
            self._run()
        if self.running and self.wakes_in_seconds is not None:
            self.wakes_in_seconds -= seconds

    def kill(self) -> None:
        """SIGTERM, then SIGKILL: a first process without a handler ignores the one and dies of the other."""
        if self.running:
            self.exit_code = 137 if self.on_term is None else self.on_term

    def _run(self) -> None:
        self.wakes_in_seconds = None
        while self._rest:
            statement = self._rest.pop(0)
            if statement[0] in _COMMANDS:  # ls, env, cat: their output is of no interest here
                _COMMANDS[statement[0]](self, statement)
            if self.exit_code is not None or self.wakes_in_seconds is not None:
                return
        self.exit_code = 0

    def _echo(self, words: list[str]) -> None:
        line = " ".join(words[1:]).removesuffix(">&2").rstrip()
        if words[-1] == ">&2":
            self.stderr += line.encode() + b"\n"
        else:
            self.stdout += re.sub(r"\$(\w+)", lambda m: self.env.get(m.group(1), ""), line).encode() + b"\n"

    def _exit(self, words: list[str]) -> None:
        self.exit_code = int(words[1])

    def _kill(self, words: list[str]) -> None:
        name = words[1].lstrip("-")
        self.exit_code = 128 + (int(name) if name.isdigit() else _SIGNALS[name])

    def _sleep(self, words: list[str]) -> None:
        self.wakes_in_seconds = float(words[1])

    def _trap(self, words: list[str]) -> None:
        self.on_term = int(words[1].removeprefix("exit "))

    def _tail(self, words: list[str]) -> None:
        self.exit_code, self.oom = 137, True


_COMMANDS: dict[str, Callable[[Container, list[str]], None]] = {
    "echo": Container._echo,
    "exit": Container._exit,
    "kill": Container._kill,
    "sleep": Container._sleep,
    "trap": Container._trap,
    "tail": Container._tail,
    "true": lambda container, words: None,
    "false": lambda container, words: container._exit(["exit", "1"]),
}


def statements(command: list[str]) -> list[list[str]]:
    """The statements of a command line. Raises `DriverFailure` for a program that the image does not have."""
    if command[0] in ("sh", "/bin/sh") and command[1:2] == ["-c"]:
        return [words for part in command[2].split(";") if (words := shlex.split(part))]
    if command[0] not in _COMMANDS:
        raise DriverFailure(
            "Failed to start container 07f93b34: API error (400): failed to create shim task: OCI runtime create failed: runc "
            f'create failed: unable to start container process: exec: "{command[0]}": stat {command[0]}: '
            "no such file or directory: unknown"
        )
    return [command]


def create(
    alloc: str,
    node: str,
    task: Mapping[str, Any],
    known: Mapping[str, str],
    images: set[str],
    devices: set[str],
) -> Container:
    """What `docker run` makes of a task. Raises `FailedValidation` or `DriverFailure` with the client's text."""
    config = hcl(task["Config"], known)
    image = config["image"]
    if image not in images:
        raise DriverFailure(
            f'Failed to pull `{image}`: API error (500): Get "https://registry.example/v2/": dial tcp: lookup '
            "registry.example on 192.0.2.53:53: no such host"
        )
    for device in config.get("devices", []):
        if device["host_path"] not in devices:
            raise DriverFailure(
                "Failed to start container 2ef93315: API error (500): error gathering device information while adding "
                f'custom device "{device["host_path"]}": no such file or directory'
            )
    words = [config["command"]] if config.get("command") else list(config.get("entrypoint") or [])
    command = words + list(config.get("args", []))
    statements(command or ["true"])
    return Container(
        alloc=alloc,
        node=node,
        image=image,
        command=command or ["true"],
        env=environment(task.get("Env") or {}, known),
        devices=tuple(device["container_path"] for device in config.get("devices", [])),
        labels={key: value for labels in config.get("labels", []) for key, value in labels.items()},
        memory_mib=task["Resources"]["MemoryMB"],
    )
