"""Flattened tensors, as DeepSpeed keeps them: runs of elements, end to end, in one or several extents."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from ckptsync.errors import Corrupt
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.model import Extent, Part


@dataclass(frozen=True, slots=True)
class Flat:
    """Elements 0 to ``numel`` of one dtype; run ``i`` holds those from ``starts[i]``."""

    dtype: str
    runs: tuple[Part, ...]
    starts: tuple[int, ...]
    numel: int

    def cut(self, start: int, count: int, into: int = 0) -> list[Part]:
        """Elements ``start`` to ``start + count`` as boxes of a flattened tensor in which they begin at ``into``."""
        item = ITEMSIZE[self.dtype]
        at, end = start, start + count
        index = bisect_right(self.starts, at) - 1
        found: list[Part] = []
        while at < end:
            run = self.runs[index]
            skip = at - self.starts[index]
            size = min(end - at, run.extent.size // item - skip)
            if size > 0:
                extent = Extent(run.extent.file, run.extent.start + skip * item, size * item)
                found.append(Part((into + at - start,), (size,), extent, None, run.checksum))
                at += size
            index += 1
        return found


def concatenate(dtype: str, runs: Iterable[Part]) -> Flat:
    """The runs end to end; empty ones are dropped.  Raises Corrupt for a run whose elements do not follow each other."""
    kept = tuple(run for run in runs if run.extent.size)
    if any(run.strides for run in kept):
        raise Corrupt(f"{kept[0].extent.file}: a flat tensor whose elements do not follow each other")
    ends = tuple(accumulate(run.extent.size // ITEMSIZE[dtype] for run in kept))
    return Flat(dtype, kept, (0, *ends[:-1]) if ends else (), ends[-1] if ends else 0)
