"""Builds the fake libnvidia-ml.so.1 and loads it into this process, so that tests go through the real pynvml."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pynvml
import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
BUILD = Path(__file__).parents[2] / "build" / "fakenvml"
NAME = "libnvidia-ml.so.1"


def build(variant: str = "") -> Path:
    """The folder with the library, for LD_LIBRARY_PATH. `variant` NO_V3 lacks the calls that old drivers lack."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        if os.environ.get("CI") == "true":
            pytest.fail("a C compiler (cc) must be there in CI, for the fake NVML library")
        pytest.skip("no C compiler (cc) for the fake NVML library")
    folder = BUILD / (variant or "full")
    library = folder / NAME
    if library.exists() and library.stat().st_mtime > SOURCE.stat().st_mtime:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{NAME}.{os.getpid()}"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{NAME}"]
    defines = [f"-D{variant}"] if variant else []
    subprocess.run([compiler, *flags, *defines, "-o", str(fresh), str(SOURCE)], check=True)
    fresh.replace(library)  # two test runs at once never see half a file
    return folder


@contextmanager
def loaded() -> Iterator[None]:
    """The dynamic linker finds the library by its soname while it is loaded. Unloaded at the end, so that the tests
    which follow find the machine's own library, or none."""
    library = ctypes.CDLL(str(build() / NAME), mode=ctypes.RTLD_GLOBAL)
    try:
        yield
    finally:
        if pynvml.nvmlLib is not None:
            _ctypes.dlclose(pynvml.nvmlLib._handle)
            pynvml.nvmlLib = None
        pynvml._nvmlGetFunctionPointer_cache.clear()
        _ctypes.dlclose(library._handle)


class FakeMachine:
    """The spec file. `write` replaces all of it at once; the library reads it anew on each call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write()

    def write(self, *lines: str) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in lines))
        fresh.replace(self.path)
