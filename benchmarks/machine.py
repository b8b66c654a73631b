"""The machine in words, without its name."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

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


def described() -> Iterator[str]:
    """Processor, memory, disk, kernel, Python and packages, a line each."""
    model = _first("/proc/cpuinfo", r"model name\s*: (.*)") or platform.machine()
    memory = int(_first("/proc/meminfo", r"MemTotal:\s*(\d+)") or 0)
    yield f"{model}, {len(os.sched_getaffinity(0))} cores, {memory / 2**20:.0f} GiB of memory"
    yield f"file system {file_system(Path.cwd())}, Linux {platform.release()}"
    yield f"Python {platform.python_version()}; " + ", ".join(map(_version, PACKAGES))


def _first(path: str, pattern: str) -> str | None:
    found = re.search(pattern, Path(path).read_text())
    return found[1].strip() if found else None


def _version(name: str) -> str:
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"no {name}"


def file_system(where: Path) -> str:
    """The type of the mount that is nearest above."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    return max(
        (m for m in mounts if where.is_relative_to(m[0])),
        key=lambda m: len(m[0]),
        default=["", "unknown"],
    )[1]
