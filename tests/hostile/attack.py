"""What an attack is, and what may come of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

INCOMPLETE, UNSUPPORTED, CORRUPT = 3, 5, 10


@dataclass(frozen=True)
class Sparse:
    """A file of ``size`` bytes, zeros but for pieces at offsets: it claims much and costs
    nothing.
    """

    size: int
    pieces: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Attack:
    """``files`` of a checkpoint directory, ``links`` in it (name → target), and the exit codes that
    are a right answer.

    ``harmless``: an answer without an error is right too, since the trick has no effect (a canary
    or a wrong read is still a failure).
    """

    name: str
    files: Mapping[str, bytes | Sparse]
    codes: tuple[int, ...]
    links: Mapping[str, str] = field(default_factory=dict)
    harmless: bool = False

    def build(self, root: Path) -> None:
        """Write it below ``root``."""
        for name, content in self.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                _write_sparse(path, content)
        for name, target in self.links.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(target)


def _write_sparse(path: Path, content: Sparse) -> None:
    with path.open("wb") as file:
        os.truncate(file.fileno(), content.size)
        for at, piece in content.pieces.items():
            file.seek(at)
            file.write(piece)
