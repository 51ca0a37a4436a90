"""How lists and single things are printed: table, wide, json, jsonl, csv, name.

A table on a terminal is cut to its width and coloured; anywhere else nothing is cut and nothing is coloured, and
`NO_COLOR` is honoured. JSON is the API's JSON.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

import click
from attrs import frozen

from coordinator.cli import exits
from coordinator.cli.exits import Stop
from coordinator.cli.figures import UNKNOWN

FORMATS = ("table", "wide", "json", "jsonl", "csv", "name")

_COLOURS = {
    "RUNNING": "32",
    "STARTING": "36",
    "ALLOCATED": "36",
    "PENDING": "33",
    "CANCELLING": "35",
    "EVICTING": "35",
    "SUCCEEDED": "2;32",
    "FAILED": "31",
    "LOST": "31",
    "CANCELLED": "2",
    "ready": "32",
    "unknown": "33",
    "lost": "31",
    "closed": "31",
}
_FILTER = re.compile(r"^([A-Za-z_][\w.]*)(!=|=|~)(.*)$", re.DOTALL)


@frozen
class Column:
    """`field` is the API's (dotted where nested), for csv; `show` makes the text of a table."""

    title: str
    field: str
    show: Callable[[Mapping[str, Any]], str] | None = None
    wide: bool = False
    right: bool = False

    def text(self, item: Mapping[str, Any]) -> str:
        if self.show is not None:
            return self.show(item)
        value = value_at(item, self.field)
        return UNKNOWN if value is None else str(value)


@frozen
class Shape:
    """What the user asked of the output."""

    format: str = "table"
    sort: str = ""
    filters: tuple[str, ...] = ()
    no_trunc: bool = False

    @property
    def is_table(self) -> bool:
        return self.format in ("table", "wide")

    @property
    def is_data(self) -> bool:
        return self.format in ("json", "jsonl")


def is_terminal(stream: TextIO | None = None) -> bool:
    found = stream if stream is not None else sys.stdout
    return bool(found.isatty())


def has_colour(stream: TextIO | None = None) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def value_at(item: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None where there is none."""
    value: Any = item
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def sentence(reason: Mapping[str, Any] | None) -> str:
    """What a reason view says; empty where there is none."""
    return str(reason.get("sentence") or reason.get("code")) if reason else ""


def say(text: str) -> None:
    """A remark for people: on stderr, and only when somebody looks."""
    if is_terminal(sys.stderr):
        print(text, file=sys.stderr)


def print_list(
    items: Sequence[Mapping[str, Any]],
    columns: Sequence[Column],
    shape: Shape,
    *,
    name: str,
    envelope: Mapping[str, Any] | None = None,
    empty: str = "",
) -> None:
    """Prints a list in the wanted format. `name` is the field that `-q` prints; `envelope` what the API's answer
    holds beside the items."""
    chosen = select(items, shape)
    if shape.format == "json":
        click.echo(json.dumps({"items": chosen, **(envelope or {})}, indent=2 if is_terminal() else None))
    elif shape.format == "jsonl":
        for item in chosen:
            click.echo(json.dumps(item))
    elif shape.format == "csv":
        _print_csv(chosen, columns)
    elif shape.format == "name":
        for item in chosen:
            click.echo(str(value_at(item, name)))
    elif chosen:
        shown = [column for column in columns if shape.format == "wide" or not column.wide]
        rows = [[column.text(item) for column in shown] for item in chosen]
        print_table(shown, rows, cut=not shape.no_trunc)
    elif empty:
        say(empty)


def print_one(item: Mapping[str, Any], lines: Iterable[tuple[str, str]], shape: Shape, *, name: str) -> None:
    """Prints one thing: as `title  value` lines, or as data."""
    if shape.format == "json":
        click.echo(json.dumps(item, indent=2 if is_terminal() else None))
    elif shape.format == "jsonl":
        click.echo(json.dumps(item))
    elif shape.format == "name":
        click.echo(str(value_at(item, name)))
    elif shape.format == "csv":
        _print_csv([item], [Column(field, field) for field in item])
    else:
        pairs = list(lines)
        width = max((len(title) for title, _ in pairs), default=0)
        for title, text in pairs:
            click.echo(f"{title:<{width}}  {painted(text)}" if title else f"{'':<{width}}  {text}")


def select(items: Sequence[Mapping[str, Any]], shape: Shape) -> list[Mapping[str, Any]]:
    """The items that pass all filters, sorted. Unknown fields are a usage error that names those there are."""
    chosen = list(items)
    for text in shape.filters:
        found = _FILTER.match(text)
        if found is None:
            raise Stop(
                exits.USAGE,
                f"--filter {text!r} is not FIELD=VALUE, FIELD!=VALUE or FIELD~TEXT",
                field="--filter",
                value=text,
            )
        field, operator, wanted = found.groups()
        _check_field(items, field, "--filter")
        chosen = [item for item in chosen if _passes(value_at(item, field), operator, wanted)]
    if shape.sort:
        field = shape.sort.lstrip("+-")
        _check_field(items, field, "--sort")
        chosen.sort(key=lambda item: _sort_key(value_at(item, field)), reverse=shape.sort.startswith("-"))
    return chosen


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, cut: bool) -> None:
    """Columns as wide as they need; on a terminal the last one is cut to what is left of the line."""
    titles = [column.title for column in columns]
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    limit = shutil.get_terminal_size().columns if cut and is_terminal() else None
    for number, row in enumerate([titles, *rows]):
        cells = [
            text.rjust(width) if column.right else text.ljust(width)
            for column, text, width in zip(columns, row, widths, strict=True)
        ]
        line = "  ".join(cells).rstrip()
        if limit is not None and len(line) > limit:
            line = line[: limit - 1] + "…"
        click.echo(_bold(line) if number == 0 else painted(line))


def painted(line: str) -> str:
    """Known state words in their colour."""
    if not has_colour():
        return line
    return re.sub(
        r"\b(" + "|".join(_COLOURS) + r")\b",
        lambda word: f"\x1b[{_COLOURS[word[0]]}m{word[0]}\x1b[0m",
        line,
        count=1,
    )


def _bold(line: str) -> str:
    return f"\x1b[1m{line}\x1b[0m" if has_colour() else line


def _print_csv(items: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([column.field for column in columns])
    for item in items:
        writer.writerow([_csv_cell(value_at(item, column.field)) for column in columns])


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _check_field(items: Sequence[Mapping[str, Any]], field: str, option: str) -> None:
    first = field.split(".")[0]
    if items and not any(first in item for item in items):
        known = ", ".join(sorted({name for item in items for name in item}))
        raise Stop(exits.USAGE, f"{option}: no field {field!r}; there are {known}", field=option, value=field)


def _passes(value: Any, operator: str, wanted: str) -> bool:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if operator == "~":
        return wanted.lower() in text.lower()
    return (text == wanted) is (operator == "=")


def _sort_key(value: Any) -> tuple[int, float, str]:
    if value is None:
        return (2, 0.0, "")
    if isinstance(value, int | float):
        return (0, float(value), "")
    return (1, 0.0, str(value))
