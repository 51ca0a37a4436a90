"""Reading single fields of a submitted mapping: each reader notes a fault and goes on, so that all are found."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import TypeVar

from attrs import frozen

from jobspecs.units import ValueInvalid

MAX_NAME_CHARACTERS = 128
MAX_TENANT_CHARACTERS = 63
MAX_LABEL_CHARACTERS = 255
MAX_FAULTS = 100
_SHOWN_CHARACTERS = 80

_TENANT = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?", re.ASCII)

# What people write who come from elsewhere.
_OTHER_WORDS = {
    "gpu": "gpus", "num_gpus": "gpus", "gres": "gpus", "gpu_count": "gpus.count", "gpu_memory": "gpus.memory",
    "gpumem": "gpus.memory", "gpu_mem": "gpus.memory", "vram": "gpus.memory", "mem": "memory", "ram": "memory",
    "memory_mib": "memory", "memory_mb": "memory", "cores": "compute", "sm": "compute", "cpus": "cpu",
    "time": "max_runtime", "timeout": "max_runtime", "time_limit": "max_runtime", "walltime": "max_runtime",
    "cmd": "command", "args": "command", "entrypoint": "command", "script": "command", "run": "command",
    "environment": "env", "replicas": "tasks", "ntasks": "tasks", "nodes": "tasks", "shm_size": "shm",
    "type": "model", "number": "count", "labels": "constraints", "node_selector": "constraints",
}  # fmt: skip
# What a job may not ask for at all, since it would reach beyond its slice of the machine.
_DENIED = (
    "privileged",
    "devices",
    "volumes",
    "mounts",
    "runtime",
    "network",
    "network_mode",
    "cap_add",
    "user",
)

T = TypeVar("T")
D = TypeVar("D")


@frozen
class Fault:
    """One thing wrong with a spec. `limit` is the bound or form that holds for `field`, `value` what was written
    (cut short; None where there is none, or where it may be a secret)."""

    field: str
    message: str
    limit: str | int | None = None
    value: str | int | None = None

    @property
    def sentence(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class SpecInvalid(ValueError):
    """A spec is refused. `faults` holds everything that is wrong with it, at least one."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("; ".join(fault.sentence for fault in faults))
        self.faults = faults


class Fields:
    """The fields of one mapping at `path`; `faults` is shared by all levels of a spec. The names in `inherited` were
    written one level up, at the root, and faults name them there."""

    def __init__(
        self,
        values: Mapping[str, object],
        path: str,
        faults: list[Fault],
        inherited: frozenset[str] = frozenset(),
    ) -> None:
        self.values = values
        self.path = path
        self.faults = faults
        self._inherited = inherited

    @classmethod
    def of(cls, value: object, path: str, faults: list[Fault] | None = None) -> Fields:
        """Of anything: what is no mapping is a fault and reads like an empty one."""
        fields = cls({}, path, [] if faults is None else faults)
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            fields.values = value
        else:
            fields.fault("", "must be a mapping of field names to values", "a mapping", _kind(value))
        return fields

    def get(self, name: str) -> object:
        """The value as written; None where it is missing or null, which means the same."""
        return self.values.get(name)

    def at(self, name: str) -> str:
        if self._inherited and re.split(r"[.\[]", name, maxsplit=1)[0] in self._inherited:
            return name
        return f"{self.path}.{name}" if self.path and name else self.path or name

    def fault(self, name: str, message: str, limit: str | int | None = None, value: object = None) -> None:
        fault = Fault(self.at(name), message, limit, shown(value))
        # What several tasks inherit is read once for each of them, and told once.
        if len(self.faults) < MAX_FAULTS and fault not in self.faults:
            self.faults.append(fault)

    def refuse_unknown(self, known: Sequence[str]) -> None:
        for name in self.values:
            if name not in known:
                self.fault(name[:_SHOWN_CHARACTERS], _unknown(name, known), ", ".join(sorted(known)))

    def text(self, name: str, *, most: int, default: str | None = None) -> str:
        """Printable text of 1 to `most` characters, kept byte for byte."""
        value = self.get(name)
        limit = f"1 to {most} printable characters"
        if value is None and default is not None:
            return default
        if value is None:
            self.fault(name, "required", limit)
        elif not isinstance(value, str):
            self.fault(name, f"must be text, not {_kind(value)}{_quote_hint(value)}", limit, value)
        elif not value.strip() or len(value) > most:
            self.fault(name, f"must have 1 to {most} characters, not {len(value)}", limit, value)
        elif not value.isprintable():
            self.fault(name, "must have no control characters", limit, value)
        else:
            return value
        return ""

    def whole(self, name: str, least: int, most: int, *, default: int) -> int:
        value = self.get(name)
        limit = f"{least} to {most}"
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.fault(name, f"must be a whole number, not {_kind(value)}", limit, value)
        elif not least <= value <= most:
            self.fault(name, f"must be between {least} and {most}", limit, value)
        else:
            return value
        return default

    def parsed(self, name: str, parse: Callable[[object], T], default: D) -> T | D:
        """A value with a unit; `parse` raises `ValueInvalid`."""
        value = self.get(name)
        if value is None:
            return default
        try:
            return parse(value)
        except ValueInvalid as error:
            self.fault(name, error.message, error.limit or None, value)
            return default

    def texts(self, name: str, *, most: int) -> dict[str, str]:
        """A mapping of labels to values."""
        value = self.get(name)
        if value is None:
            return {}
        inner = Fields.of(value, self.at(name), self.faults)
        if len(inner.values) > most:
            self.fault(name, f"has {len(inner.values)} entries, at most {most} are taken", most)
            return {}
        for key in inner.values:
            if not key.strip() or not key.isprintable() or len(key) > MAX_LABEL_CHARACTERS:
                limit = f"1 to {MAX_LABEL_CHARACTERS} printable characters"
                self.fault(name, "a label name is empty, too long or not printable", limit, key)
        read = {}
        for key, item in inner.values.items():
            as_text = plain_text(item)
            read[key] = as_text if as_text is not None else inner.text(key, most=MAX_LABEL_CHARACTERS)
            if as_text is not None and (not as_text.isprintable() or len(as_text) > MAX_LABEL_CHARACTERS):
                inner.text(key, most=MAX_LABEL_CHARACTERS)
        return read


def plain_text(value: object) -> str | None:
    """Text of a value that has one form only: text, a whole number, a fraction as it was written. None for others
    (`true`, null, exponents, floats that lost their digits): the user must put those in quotes."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return None
    if isinstance(value, int) and abs(value) < 10**40:
        return str(value)
    if isinstance(value, Decimal) and "E" not in str(value):
        return str(value)
    return None


def tenant_fault(name: object) -> Fault | None:
    """Why this is no name of a tenant (or of a node, which keeps the same rule); None if it is one."""
    limit = f"1 to {MAX_TENANT_CHARACTERS} of a-z 0-9 . - _, beginning and ending with a letter or digit"
    if isinstance(name, str) and len(name) <= MAX_TENANT_CHARACTERS and _TENANT.fullmatch(name):
        return None
    return Fault("tenant", f"must have {limit}", limit, shown(name))


def shown(value: object) -> str | int | None:
    """A value as a fault shows it: short, and safe to print."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53):
        return value
    if isinstance(value, Mapping | list | tuple):
        return _kind(value)
    text = str(value).lower() if isinstance(value, bool) else str(value)[: _SHOWN_CHARACTERS + 1]
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int):
        return "a whole number"
    if isinstance(value, float | Decimal):
        return "a fraction"
    return "a mapping" if isinstance(value, Mapping) else "a list"


def _quote_hint(value: object) -> str:
    return "; put it in quotes" if isinstance(value, bool | int | float | Decimal) else ""


def _unknown(name: str, known: Sequence[str]) -> str:
    if name in _DENIED:
        return "may not be asked for: a job gets its slices, and nothing else of the machine"
    word = _OTHER_WORDS.get(name.lower().replace("-", "_"), "")
    if word.partition(".")[0] in known:
        return f"unknown field; did you mean {word}?"
    if word.rpartition(".")[2] in known:
        return f"unknown field; did you mean {word.rpartition('.')[2]}?"
    close = difflib.get_close_matches(name[:_SHOWN_CHARACTERS], known, n=1)
    return f"unknown field; did you mean {close[0]}?" if close else "unknown field"
