"""YAML and JSON text to plain values, for text that nobody vouches for. Pure: no file is opened here.

Both readers refuse what would be read differently elsewhere or costs more than its length: a key that stands twice,
NaN and infinity, deep nesting, aliases, explicit tags. Fractions become `Decimal`, so that no digit is lost.
YAML is read by the rules of YAML 1.2's core schema, narrowed to forms that can be written back: `no`, `010`, `1:30`
and `2024-01-01` stay the text they look like, only `true`, `false`, `null` and plain decimal numbers are more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import yaml

MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 16

if TYPE_CHECKING:
    _Base = yaml.SafeLoader
else:  # the C parser where the wheel has it: some ten times as fast
    _Base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class DocumentInvalid(ValueError):
    """The text is no document that could hold a job spec. `line` counts from 1, 0 where it is not known."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(f"line {line}: {message}" if line else message)
        self.message = message
        self.line = line


def parse_json(text: str | bytes, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> object:
    """The value of a JSON document. Raises `DocumentInvalid`."""
    document = _decoded(text, max_bytes)
    _check_json_depth(document)
    try:
        value = json.loads(
            document,
            object_pairs_hook=_unique,
            parse_float=Decimal,
            parse_constant=_no_constant,
        )
    except json.JSONDecodeError as error:
        raise DocumentInvalid(f"not JSON: {error.msg}", error.lineno) from error
    except (ValueError, ArithmeticError, RecursionError) as error:
        if isinstance(error, DocumentInvalid):
            raise
        raise DocumentInvalid("a number has too many digits") from error  # Python's bound for whole numbers
    _check_text(value)
    return value


def parse_yaml(text: str | bytes, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> object:
    """The value of a YAML document with one document in it. Raises `DocumentInvalid`."""
    document = _decoded(text, max_bytes)
    try:
        _check_events(document)
        value = yaml.load(document, Loader=_Loader)  # our loader makes only plain values
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise DocumentInvalid(f"not YAML: {error.problem or error.context}", line) from error
    except yaml.YAMLError as error:
        raise DocumentInvalid("not YAML: it contains a character that may not stand there") from error
    except (ValueError, ArithmeticError) as error:
        if isinstance(error, DocumentInvalid):
            raise
        raise DocumentInvalid("a number has too many digits") from error
    _check_text(value)
    return value


def _decoded(text: str | bytes, max_bytes: int) -> str:
    size = len(text)
    if size > max_bytes:
        raise DocumentInvalid(f"the document has {size} bytes, at most {max_bytes} are taken")
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentInvalid(f"not UTF-8: byte {error.start + 1} cannot be read") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DocumentInvalid(f"the key {key!r} stands twice")
            seen.add(key)
    return mapping


def _check_text(value: object) -> None:
    """Half of a surrogate pair can be written as an escape, and then never be written out again."""
    if isinstance(value, str):
        if not value.isascii() and _SURROGATE.search(value):
            raise DocumentInvalid("half of a surrogate pair (\\ud800 to \\udfff) is no character")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key)
            _check_text(item)
    elif isinstance(value, list):
        for item in value:
            _check_text(item)


def _no_constant(name: str) -> object:
    raise DocumentInvalid(f"{name} is no number")


_SURROGATE = re.compile("[\ud800-\udfff]")
# A string that is not closed reaches to the end, so that no text makes the search start over and over.
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*\\?(?:"|\Z)', re.DOTALL)


def _check_json_depth(text: str) -> None:
    """Before the parser, which recurses: brackets outside strings are counted."""
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", _JSON_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_DEPTH:
            raise DocumentInvalid(f"nested deeper than {MAX_DEPTH} levels")


def _check_events(text: str) -> None:
    """One pass over the events, which need no stack, before the tree is built."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=_Base):
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent):
            raise DocumentInvalid("aliases (*name) are not taken: write the value out", line)
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise DocumentInvalid("one document is taken: write several jobs as a list", line)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise DocumentInvalid(f"nested deeper than {MAX_DEPTH} levels", line)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if getattr(event, "tag", None) not in (None, "!"):
            raise DocumentInvalid("tags (!name) are not taken", line)


class _Loader(_Base):
    """Makes text, whole numbers, `Decimal`, booleans, None, lists and mappings with text keys; nothing else."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    yaml_constructors = dict(_Base.yaml_constructors)  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise DocumentInvalid("a key must be text: put it in quotes", line)
            if key in mapping:
                raise DocumentInvalid(f"the key {key!r} stands twice", line)
            mapping[key] = self.construct_object(value_node, deep=deep)
        return mapping


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Decimal:
    return Decimal(str(node.value))


def _whole(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(node.value))


_Loader.add_constructor("tag:yaml.org,2002:float", _decimal)
_Loader.add_constructor("tag:yaml.org,2002:int", _whole)
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^-?(?:0|[1-9][0-9]*)$"), list("-0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?$"),
    list("-0123456789"),
)
