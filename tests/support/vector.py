"""The vectors: small checkpoints written by the real frameworks, with references that they gathered
themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent / "vectors"

Bits = Mapping[str, tuple[str, tuple[int, ...], bytes]]


@dataclass(frozen=True)
class Vector:
    """One folder: the directories to merge, and files that ``--dtype keep`` and ``auto`` must equal
    bit for bit.
    """

    name: str
    sources: tuple[Path, ...]
    keep: Path
    auto: Path


def vectors() -> list[Vector]:
    """Return all vectors, by name."""
    return [_vector(path.parent) for path in sorted(ROOT.glob("*/vector.json"))]


def vector(name: str) -> Vector:
    return _vector(ROOT / name)


def _vector(folder: Path) -> Vector:
    description = json.loads((folder / "vector.json").read_text())
    return Vector(
        folder.name,
        tuple(folder / s for s in description["sources"]),
        folder / description["keep"],
        folder / description["auto"],
    )


def bits(*files: Path) -> Bits:
    """Return every tensor of safetensors files as ``(dtype, shape, bytes)``, read by hand."""
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for file in files:
        data = file.read_bytes()
        base = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:base]).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                tensors[name] = (
                    entry["dtype"],
                    tuple(entry["shape"]),
                    data[base + start : base + end],
                )
    return tensors
