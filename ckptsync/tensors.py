"""The types that formats, layouts and merging share: where bytes lie, and what they mean.

A `Tensor` has a name, a dtype, a shape and stored copies; a copy is made of boxes, and a box lies
in an `Extent` of a file. So a layout describes a model without reading it. `Files` is all that a
layout may read.

Shapes and offsets count elements; starts and sizes count bytes. A dtype is safetensors' name for it
(``F32``, ``BF16``, ``F8_E4M3``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol, runtime_checkable

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.typed_json import Count

Shape = tuple[int, ...]


def row_major(sizes: Shape) -> Shape:
    """Return the strides, in elements, of a box that is stored row by row."""
    return tuple(prod(sizes[d + 1 :]) for d in range(len(sizes)))


def is_row_major(sizes: Shape, strides: Shape) -> bool:
    """Return whether a box with these strides is stored row by row.

    Strides of axes of size 1 do not matter.
    """
    plain = row_major(sizes)
    return all(n <= 1 or s == p for n, s, p in zip(sizes, strides, plain, strict=True))


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """The ``size`` bytes of ``file`` from ``start`` on."""

    file: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Checksum:
    """The CRC32 of all bytes of ``extent``, as the source's own container records it."""

    extent: Extent
    crc32: int


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, and the bytes that hold it.

    ``strides`` (in elements) are those of the stored box; ``None`` is row-major, the usual case.
    ``checksum``: that of the record in which ``extent`` lies, if it has one. ``replicas``: the same
    box as other ranks stored it; they must have the same bytes.
    """

    offsets: Shape
    sizes: Shape
    extent: Extent
    strides: Shape | None = None
    checksum: Checksum | None = None
    replicas: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """One stored copy of a tensor: boxes that cover ``grid``, each element once.

    ``grid`` is the tensor's shape, or ``(numel,)`` if the framework cuts the flattened tensor.
    ``absent`` names a missing file that holds some of it; then there are no parts. ``doubt`` says
    why the parts' replicas may not be replicas: then only equal bytes prove that the tensor is
    whole.
    """

    dtype: str
    grid: Shape
    parts: tuple[Part, ...]
    absent: str = ""
    doubt: str = ""

    def stored(self) -> Iterator[Part]:
        """Yield every part, each followed by its replicas."""
        for part in self.parts:
            yield part
            yield from part.replicas


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor, in the dtype that the model itself has, and its stored copies.

    ``tied`` names the tensor whose bytes this one shares, if the framework says so. ``remark`` is a
    warning for the user; a merge shows equal ones once. Every copy must be the most precise one
    rounded to the copy's own dtype, unless ``unlike`` says why it need not be.
    """

    name: str
    dtype: str
    shape: Shape
    copies: tuple[Copy, ...]
    tied: str | None = None
    remark: str = ""
    unlike: str = ""


@dataclass(frozen=True, slots=True)
class Demands:
    """The files that a layout's own metadata demands, with their sizes (``None`` if unknown).

    ``model``: what consolidation needs; empty if nothing here says what a whole model is.
    ``resume``: what a resumed training needs besides, or the same files if they hold the optimizer
    too; empty if nothing here has an optimizer's state. ``world``: how many ranks wrote, if known.
    ``remarks``: why the tensors here are no whole model, if ``model`` is empty; else doubts.
    """

    model: dict[str, Count | None] = field(default_factory=dict)
    resume: dict[str, Count | None] = field(default_factory=dict)
    world: Count | None = None
    remarks: tuple[str, ...] = ()


class Files(Protocol):
    """The files of one checkpoint under their relative POSIX names: all that a layout may read.

    Whoever makes one has checked the names (`ckptsync.safe_names.checked_path`).
    """

    def sizes(self) -> Mapping[str, int]:
        """Return every file's size in bytes."""
        ...

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from ``start``; raise Incomplete (no such file) or Corrupt (too short)."""
        ...


@runtime_checkable
class Expecting(Protocol):
    """Files that read ahead if they know what will be read.

    A read of a distant file takes a round trip.
    """

    def expect(self, extents: Iterable[Extent]) -> None:
        """Announce the extents that will be read next, in about this order."""
        ...

    def foresee(self, reads: Iterable[tuple[Extent, int]]) -> None:
        """Announce all reads of a merge, each with its byte offset in the output."""
        ...


def expect(files: Files, extents: Iterable[Extent]) -> None:
    """Announce the extents that will be read next; do nothing if ``files`` do not read ahead."""
    if isinstance(files, Expecting):
        files.expect(extents)


def foresee(files: Files, reads: Iterable[tuple[Extent, int]]) -> None:
    """Announce all reads of a merge, each with its byte offset in the output.

    Do nothing, and do not iterate over ``reads``, if ``files`` do not read ahead.
    """
    if isinstance(files, Expecting):
        files.foresee(reads)


class FilesWrapper:
    """Delegate to other files; a subclass defines only the methods that it changes."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def sizes(self) -> Mapping[str, int]:
        """See `Files`."""
        return self._files.sizes()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Files`."""
        self._files.read_into(name, start, out)

    def expect(self, extents: Iterable[Extent]) -> None:
        """See `Expecting`; does nothing if the wrapped files do not read ahead."""
        expect(self._files, extents)

    def foresee(self, reads: Iterable[tuple[Extent, int]]) -> None:
        """See `Expecting`."""
        foresee(self._files, reads)


class MemoryFiles:
    """Files in memory."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = dict(files)

    def sizes(self) -> Mapping[str, int]:
        """See `Files`."""
        return {name: len(data) for name, data in self._files.items()}

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Files`."""
        out[:] = self._files[name][start : start + out.nbytes]


def read(files: Files, extent: Extent) -> bytes:
    """Return the bytes of one small extent (a header, a pickle, an index), all read into memory.

    Raises as `Files.read_into`.
    """
    out = bytearray(extent.size)
    files.read_into(extent.file, extent.start, memoryview(out))
    return bytes(out)


def read_whole(files: Files, name: str, limit: int = 64 << 20) -> bytes:
    """Return all bytes of a small file.

    Raise Incomplete if it does not exist, Corrupt, without reading, if it has more than ``limit``
    bytes.
    """
    size = files.sizes().get(name)
    if size is None:
        raise Incomplete(f"{name}: not found")
    if size > limit:
        raise Corrupt(f"{name}: {size} bytes, at most {limit} expected")
    return read(files, Extent(name, 0, size))
