"""The demo's nodes and its head: real processes, ``python -m ckptsync run -c …``, that always end with the demo."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from ckptsync.errors import CkptsyncError

PATIENCE = 8.0  # seconds that a child has to end after SIGTERM


@dataclass(frozen=True, slots=True)
class Child:
    """A running service and its log."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def running(directory: Path, configurations: Mapping[str, dict[str, object]]) -> Iterator[tuple[Child, ...]]:
    """One process a configuration, until the block ends; configurations and logs lie in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    children: list[Child] = []
    try:
        for name, configuration in configurations.items():
            children.append(_start(directory, name, configuration))
        yield tuple(children)
    finally:
        for child in children:
            child.process.terminate()
        for child in children:
            _end(child.process)


def check(children: tuple[Child, ...]) -> None:
    """Raises if one of them has ended."""
    for child in children:
        code = child.process.poll()
        if code is not None:
            last = child.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise CkptsyncError(f"{child.name} ended with exit code {code}: {''.join(last)}", hint=f"read {child.log}")


def _start(directory: Path, name: str, configuration: dict[str, object]) -> Child:
    config, log = directory / f"{name}.yaml", directory / f"{name}.log"
    config.write_text(yaml.safe_dump(configuration, sort_keys=False))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CKPTSYNC_")}
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "ckptsync", "run", "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
        )
    return Child(name, log, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
