"""Checkpoints as Ray Train hands them around, without Ray: a path on a file system that has
pyarrow's four calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO


class Disk:
    """What we use of `pyarrow.fs.LocalFileSystem`."""

    def create_dir(self, path: str, *, recursive: bool) -> None:
        Path(path).mkdir(parents=recursive, exist_ok=True)

    def open_output_stream(self, path: str) -> BinaryIO:
        return Path(path).open("wb")

    def open_input_stream(self, path: str) -> BinaryIO:
        return Path(path).open("rb")


@dataclass(frozen=True)
class Checkpoint:
    """What we use of `ray.train.Checkpoint`."""

    path: str
    filesystem: Disk = field(default_factory=Disk)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        yield self.path
