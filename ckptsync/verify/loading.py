"""Really loading the tensors of a file, in a limited child process."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptsync.errors import Incomplete, NotFound, StoreError
from ckptsync.model import Extent
from ckptsync.stores import beneath
from ckptsync.stores.opening import directory_of
from ckptsync.stores.tree import LocalFiles
from ckptsync.verify.archives import Item
from ckptsync.verify.process import Died, Loader
from ckptsync.verify.reading import Reads, Told, pieces

HINT = "pip install 'ckptsync[load]'"
Kind = Literal["safetensors", "torch", "items"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child may take: ``memory`` bytes beyond its libraries and the mapped file, ``cpu`` and ``wall`` in seconds."""

    memory: int
    cpu: int
    wall: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """``fault`` and ``refused`` are empty if every tensor was loaded; ``refused``: it is no damage, and cannot be loaded safely, or here.

    ``read`` counts bytes; ``nonfinite`` is ``(name, count)``, ``more`` names left out.
    """

    loader: str
    tensors: int = 0
    read: int = 0
    nonfinite: tuple[tuple[str, int], ...] = ()
    more: int = 0
    fault: str = ""
    refused: str = ""


def limits(size: int) -> Limits:
    """For a file of ``size`` bytes: far more than loading needs, so that only what hangs or blows up meets them."""
    return Limits(memory=1 << 30, cpu=60 + size // (20 << 20), wall=300 + size // (2 << 20))


def loading(told: Told = lambda _: None) -> Loader:
    """The child, for `load`."""
    return Loader("ckptsync.verify.child", HINT, told)


def load(child: Loader, fd: int, kind: Kind, most: Limits, items: Sequence[Item] = ()) -> Loaded:
    """Load the file that ``fd`` has open.  Raises Unsupported where safetensors is not installed, CkptsyncError if the child cannot start, or is killed."""
    request = {"kind": kind, "items": items, "memory": most.memory, "cpu": most.cpu, "wall": most.wall}
    try:
        told = child.ask(request, [fd])
    except Died as e:
        return Loaded(child.loader, fault=str(e))
    if "fault" in told or "refused" in told:
        return Loaded(child.loader, fault=told.get("fault", ""), refused=told.get("refused", ""))
    return Loaded(child.loader, told["tensors"], told["read"], tuple(told["nonfinite"].items()), told["more"])


@contextlib.contextmanager
def descriptor(source: Reads, name: str, size: int) -> Iterator[int]:
    """``name`` as an open file of this machine: itself, or a copy that goes away with it.  Raises Incomplete if it is not there."""
    root = source.root if isinstance(source, LocalFiles) else directory_of(source)
    if root is None:
        with _copy(source, name, size) as fd:
            yield fd
        return
    try:
        fd = beneath.open_file(root, name)
    except OSError as e:
        if beneath.is_absence(e):
            raise Incomplete(f"{name}: not there") from e
        raise StoreError(f"{name}: {(e.strerror or str(e)).lower()}") from e
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _copy(source: Reads, name: str, size: int) -> Iterator[int]:
    """In the directory for temporary files, one at a time."""
    room = shutil.disk_usage(tempfile.gettempdir()).free
    if size > room:
        raise StoreError(
            f"{name}: no room for a copy of {size} bytes to load, {room} are free", hint=f"set TMPDIR, now {tempfile.gettempdir()}"
        )
    with tempfile.TemporaryFile() as file:
        try:
            for piece in pieces(source, Extent(name, 0, size)):
                file.write(piece)
            file.flush()
        except NotFound as e:
            raise Incomplete(f"{name}: not there") from e
        except OSError as e:
            raise StoreError(f"{name}: no room for a copy to load: {(e.strerror or str(e)).lower()}", hint="set TMPDIR") from e
        yield file.fileno()
