"""The demo's nodes: real processes of the service, and the files that two trainings would write."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from ckptsync.errors import CkptsyncError, StoreError

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


DATA = Path(__file__).parent.parent / "demo_data"
BASE = DATA / "base"  # config and tokenizer of the model: what FSDP's shards do not bring
PAUSE = 0.05  # seconds between two files

# facts/training-writes: shards of all ranks, then what says that they are there, then the small states; trainer_state.json is last
_ORDER = (
    re.compile(r".*\.json|.*\.jinja"),
    re.compile(r".*\.distcp|.*_states\.pt"),
    re.compile(r".*\.metadata|latest"),
    re.compile(r"scheduler\.pt"),
    re.compile(r"rng_state_[0-9]+\.pth"),
    re.compile(r"trainer_state\.json"),
)


@dataclass(frozen=True, slots=True)
class Write:
    """One file that a trainer writes on one node."""

    node: str
    source: Path
    target: Path


def script(run: str, data: Path, output: Callable[[str], Path]) -> tuple[Write, ...]:
    """Every file of a run in the order of writing; ``output(node)`` is the run's output directory there."""
    writes = [
        Write(node.name, path, output(node.name) / path.relative_to(node))
        for node in sorted(data.iterdir())
        for path in sorted(node.rglob("*"))
        if path.is_file()
    ]
    if not writes:
        raise StoreError(f"{data}: no demo data for {run}", hint="the installation is not complete: install ckptsync again")
    return tuple(sorted(writes, key=lambda w: (_rank(w.target.name), w.target.name, w.node)))


def _rank(name: str) -> int:
    return max(i for i, pattern in enumerate(_ORDER) if pattern.fullmatch(name))


def play(writes: tuple[Write, ...], pause: float = PAUSE) -> Iterator[Write]:
    """Write one file after the other, and tell of each."""
    for write in writes:
        write.target.parent.mkdir(parents=True, exist_ok=True)
        write.target.write_bytes(write.source.read_bytes())
        yield write
        time.sleep(pause)


def flip(path: Path, at: int) -> None:
    """Turn one bit of one byte over, in place, as a disk would."""
    path.chmod(path.stat().st_mode | 0o200)
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))
