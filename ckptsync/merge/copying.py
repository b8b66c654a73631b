"""Copying: a planned file as a stream of chunks, through a window whose size does not depend on the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.lib.stride_tricks import as_strided

from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.merge.cast import RAW, Array, cast
from ckptsync.merge.cut import Box, Fill, blocks, fills
from ckptsync.merge.plan import FilePlan, PlannedTensor
from ckptsync.model import Files

WINDOW = 2 << 20  # bytes of a block as it is stored: large enough for a disk, small enough for the cache
CAST_ELEMENTS = 128 << 10  # a cast's temporary arrays stay in the second-level cache


@dataclass(frozen=True, slots=True)
class Copied:
    """What was written: the file's BLAKE3, each tensor's, and how many finite values a cast made infinite, by tensor."""

    digest: str
    tensors: tuple[tuple[str, str], ...]
    overflows: tuple[tuple[str, int], ...]


class Copying:
    """One output file: `chunks` yields its bytes front to back, `result` says afterwards what they were.

    A chunk is valid until the next one is asked for.
    """

    def __init__(self, plan: FilePlan, files: Files, progress: Callable[[int], None]) -> None:
        self._plan, self._files, self._progress = plan, files, progress
        self._digester = blake3()
        self._tensors: list[tuple[str, str]] = []
        self._overflows: list[tuple[str, int]] = []

    def chunks(self) -> Iterator[memoryview]:
        """The header, then every tensor, block by block."""
        header = memoryview(self._plan.header)
        self._digester.update(header)
        yield header
        for tensor in self._plan.tensors:
            yield from self._tensor(tensor)

    def result(self) -> Copied:
        """Call after the last chunk."""
        return Copied(self._digester.hexdigest(), tuple(self._tensors), tuple(self._overflows))

    def _tensor(self, tensor: PlannedTensor) -> Iterator[memoryview]:
        digester = blake3()
        overflows = 0
        for block in blocks(tensor.copy.grid, WINDOW // ITEMSIZE[tensor.copy.dtype]):
            values, infinite = _cast(gather(self._files, tensor, block), tensor.copy.dtype, tensor.dtype)
            overflows += infinite
            chunk = values.data.cast("B")
            digester.update(chunk)
            self._digester.update(chunk)
            yield chunk
            self._progress(len(chunk))
        self._tensors.append((tensor.name, digester.hexdigest()))
        if overflows:
            self._overflows.append((tensor.name, overflows))


def gather(files: Files, tensor: PlannedTensor, block: Box) -> Array:
    """The raw bits of one block, flat, in row-major order."""
    item = ITEMSIZE[tensor.copy.dtype]
    out = np.empty(block.sizes, RAW[item])
    for part in tensor.copy.parts:
        for fill in fills(block, part, item):
            _fill(files, fill, out)
    return out.reshape(-1)


def _fill(files: Files, fill: Fill, out: Array) -> None:
    box = [slice(o, o + n) for o, n in zip(fill.into.offsets, fill.into.sizes, strict=True)]
    index: tuple[Any, ...] = (*box, ...)
    target = out[index]  # with the dots a 0-d array is a view too, not a number
    if target.flags.c_contiguous and fill.extent.size == target.nbytes and _is_row_major(fill):
        files.read_into(fill.extent.file, fill.extent.start, target.reshape(-1).data.cast("B"))
        return
    held = np.empty(fill.extent.size // out.itemsize, out.dtype)
    files.read_into(fill.extent.file, fill.extent.start, held.data.cast("B"))
    target[...] = as_strided(held, fill.into.sizes, [s * out.itemsize for s in fill.strides], writeable=False)


def _is_row_major(fill: Fill) -> bool:
    sizes = fill.into.sizes
    return all(n == 1 or s == prod(sizes[d + 1 :]) for d, (n, s) in enumerate(zip(sizes, fill.strides, strict=True)))


def _cast(values: Array, source: str, target: str) -> tuple[Array, int]:
    if source == target:
        return values, 0
    out = np.empty(len(values), RAW[ITEMSIZE[target]])
    overflows = 0
    for at in range(0, len(values), CAST_ELEMENTS):
        out[at : at + CAST_ELEMENTS], infinite = cast(values[at : at + CAST_ELEMENTS], source, target)
        overflows += infinite
    return out, overflows
