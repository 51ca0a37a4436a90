"""How every bench tells its result: a table to read, and build/bench/NAME.json for machines."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

FOLDER = Path("build/bench")
Value = str | int | float | None
Row = Mapping[str, Value]


def machine(*packages: str) -> dict[str, Value]:
    """Cores, Python, and the versions of `packages`."""
    found: dict[str, Value] = {"cores": os.cpu_count(), "python": platform.python_version()}
    return found | {package: version(package) for package in packages}


def program_version(program: str) -> str:
    """The first line that `program --version` prints."""
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return answer.stdout.splitlines()[0].strip()


def write(name: str, rows: Sequence[Row], about: Mapping[str, Value]) -> Path:
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({"rows": list(rows), "machine": dict(about)}, indent=1) + "\n")
    return path


def rows(name: str) -> list[Row]:
    """Those of the last run that wrote them, for a bench that makes its rows in parts."""
    path = FOLDER / f"{name}.json"
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Plain text, a line for each row; what a row does not have stays blank."""
    cells = [[_shown(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[n]) for line in (columns, *cells)) for n in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in (columns, *cells)
    ]
    return "\n".join(lines)


def _shown(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value
