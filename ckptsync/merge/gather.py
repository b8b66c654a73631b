"""Gathering: the bytes of one unit, by few and large reads in file order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ckptsync.merge.cast import RAW, Array
from ckptsync.merge.cut import Fill
from ckptsync.merge.units import NEAR, WORTH, Place, Read, Unit, of_copy
from ckptsync.model import Copy, Extent, Files, expect

SPAN = 1 << 20  # bytes that are read at once for several small ranges


def gather(files: Files, unit: Unit, out: memoryview) -> None:
    """Fill ``out`` with the stored bytes of a unit.  Raises what ``files`` raises."""
    together = [*groups(unit.reads)]
    if len(together) > 1:
        expect(files, (Extent(g[0].file, g[0].start, g[-1].start + g[-1].size - g[0].start) for g in together))
    for group in together:
        if len(group) == 1:
            _read(files, group[0], out)
        else:
            _read_together(files, group, out)


def stored(files: Files, copy: Copy) -> Iterator[memoryview]:
    """The bytes of one stored copy, in order."""
    for unit in of_copy(copy):
        out = np.empty(unit.stored, "u1").data
        gather(files, unit, out)
        yield out


def groups(reads: Sequence[Read]) -> Iterator[list[Read]]:
    """Reads by file and in its order; small ones that lie near each other together."""
    group: list[Read] = []
    for read in sorted(reads, key=itemgetter(0, 1)):
        if group and not _is_near(group, read):
            yield group
            group = []
        group.append(read)
    if group:
        yield group


def _is_near(group: Sequence[Read], read: Read) -> bool:
    last = group[-1]
    return (
        last.file == read.file
        and 0 <= read.start - last.start - last.size <= NEAR
        and read.size < WORTH
        and last.size < WORTH
        and read.start + read.size - group[0].start <= SPAN
    )


def _read(files: Files, read: Read, out: memoryview) -> None:
    if read.place is None:
        files.read_into(read.file, read.start, out[read.at : read.at + read.size])
        return
    target = _target(read.place, read.at, out)
    if target.flags.c_contiguous and read.size == target.nbytes and _is_row_major(read.place.fill):
        files.read_into(read.file, read.start, target.reshape(-1).view("u1").data)
        return
    held = np.empty(read.size, "u1").data
    files.read_into(read.file, read.start, held)
    _spread(held, read.place, target)


def _read_together(files: Files, group: Sequence[Read], out: memoryview) -> None:
    first, last = group[0].start, group[-1].start + group[-1].size
    held = np.empty(last - first, "u1").data
    files.read_into(group[0].file, first, held)
    for _, start, size, at, place in group:
        found = held[start - first : start - first + size]
        if place is None:
            out[at : at + size] = found
        else:
            _spread(found, place, _target(place, at, out))


def _target(place: Place, at: int, out: memoryview) -> Array:
    """The elements of ``out`` that a read is for."""
    block: Array = np.frombuffer(out, RAW[place.item], prod(place.sizes), at).reshape(place.sizes)
    box = [slice(o, o + n) for o, n in zip(place.fill.into.offsets, place.fill.into.sizes, strict=True)]
    index: tuple[Any, ...] = (*box, ...)  # with the dots a 0-d array is a view too, not a number
    target: Array = block[index]
    return target


def _spread(held: memoryview, place: Place, target: Array) -> None:
    values: Array = np.frombuffer(held, RAW[place.item])
    target[...] = as_strided(values, place.fill.into.sizes, [s * place.item for s in place.fill.strides], writeable=False)


def _is_row_major(fill: Fill) -> bool:
    sizes = fill.into.sizes
    return all(n == 1 or s == prod(sizes[d + 1 :]) for d, (n, s) in enumerate(zip(sizes, fill.strides, strict=True)))
