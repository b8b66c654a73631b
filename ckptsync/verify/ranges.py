"""Which bytes differ, and which tensors lie there.  Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

from ckptsync.digest import FileDigest
from ckptsync.model import Extent

Ranges = tuple[tuple[int, int], ...]
"""``(start, end)`` in bytes, ascending, apart from each other."""


def differing(wanted: FileDigest, got: FileDigest) -> Ranges:
    """The blocks that differ, neighbours joined; the whole file where the blocks cannot tell.  Empty if the bytes are the same."""
    if (wanted.size, wanted.digest) == (got.size, got.digest):
        return ()
    size = max(wanted.size, got.size)
    if wanted.block_size != got.block_size or wanted.block_size < 1:
        return ((0, size),)
    block = wanted.block_size
    odd = [i for i, (a, b) in enumerate(zip_longest(wanted.blocks, got.blocks)) if a != b]
    return joined([(i * block, min((i + 1) * block, size)) for i in odd]) or ((0, size),)


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, with those that touch made one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Row:
    """The tensors of one file by ``starts``; ``reach[i]`` is the furthest end of the first ``i + 1``."""

    starts: Sequence[int]
    reach: Sequence[int]
    ends: Sequence[int]
    names: Sequence[str]


class Spans:
    """Where tensors lie, for many questions: a range costs a search and the tensors that it finds.

    Tensors may overlap each other: tied ones share their bytes, strided ones interleave.
    """

    def __init__(self, tensors: Iterable[tuple[str, Extent]]) -> None:
        by_file: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for name, extent in tensors:
            if extent.size:
                by_file[extent.file].append((extent.start, extent.start + extent.size, name))
        self._rows = {file: _row(sorted(spans)) for file, spans in by_file.items()}

    def overlapping(self, file: str, ranges: Ranges) -> tuple[str, ...]:
        """Names of the tensors that have a byte in one of the ranges, sorted, each once."""
        row = self._rows.get(file)
        return tuple(sorted({name for start, end in ranges for name in _in(row, start, end)})) if row else ()


def _row(spans: Sequence[tuple[int, int, str]]) -> _Row:
    starts, ends, names = zip(*spans, strict=True)
    return _Row(starts, list(accumulate(ends, max)), ends, names)


def _in(row: _Row, start: int, end: int) -> list[str]:
    first, last = bisect_right(row.reach, start), bisect_left(row.starts, end)
    return [row.names[i] for i in range(first, last) if row.ends[i] > start]
