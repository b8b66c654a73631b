"""The demo's trainer: real shards, written file after file on two nodes, in the order in which the Trainer writes them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptsync.errors import StoreError

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
