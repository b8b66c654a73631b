"""The machine in words, without its name."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from benchmarks.contest import program

PACKAGES = (
    "ckptsync",
    "numpy",
    "blake3",
    "torch",
    "accelerate",
    "deepspeed",
    "transformers",
    "safetensors",
)


def describe() -> Iterator[str]:
    """Yield processor and memory, file system and kernel, Python and packages, a line each."""
    model = _first("/proc/cpuinfo", r"model name\s*: (.*)") or platform.machine()
    memory = int(_first("/proc/meminfo", r"MemTotal:\s*(\d+)") or 0)
    yield f"{model}, {len(os.sched_getaffinity(0))} cores, {memory / 2**20:.0f} GiB of memory"
    yield f"file system {file_system(Path.cwd())}, Linux {platform.release()}"
    yield f"Python {platform.python_version()}; " + ", ".join(map(_package, PACKAGES))


def _first(path: str, pattern: str) -> str | None:
    match = re.search(pattern, Path(path).read_text())
    return match[1].strip() if match else None


def _package(name: str) -> str:
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"no {name}"


def file_system(directory: Path) -> str:
    """Return the type of the mount that holds a directory."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    return max(
        (m for m in mounts if directory.is_relative_to(m[0])),
        key=lambda m: len(m[0]),
        default=["", "unknown"],
    )[1]


def version(command: str) -> str:
    """Return what a program says of its version when it is run with these words."""
    name, *options = command.split()
    path = program(name)
    if not path:
        return f"no {name}"
    result = subprocess.run(
        [path, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    line = result.stdout.splitlines()[0]
    return line if name in line else f"{name} {line.removeprefix('version').strip()}"
