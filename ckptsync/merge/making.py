"""Making: the bytes of one unit as they are written, gathered, cast and looked at, whatever other threads do meanwhile."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.merge import units
from ckptsync.merge.cast import RAW, Array, cast_to
from ckptsync.merge.copies import Compared
from ckptsync.merge.gather import gather
from ckptsync.merge.plan import FilePlan, PlannedTensor
from ckptsync.merge.statistics import Statistics, statistics
from ckptsync.merge.units import Unit
from ckptsync.model import Files

CAST_ELEMENTS = 256 << 10  # of fewer, threads wait for each other between numpy's calls; more are out of the cache
ALIGN = 4 << 10  # what disks address: chunks begin and end at multiples of it, in the file and in memory


class Look(NamedTuple):
    """A tensor's share of a unit: its number in the file, its bytes, how many values became infinite, statistics if they were asked for."""

    number: int
    data: memoryview
    overflows: int
    statistics: Statistics | None


@dataclass(frozen=True, slots=True)
class Placed:
    """A unit and where it lies in the file: ``size`` bytes as they are written, from ``start``."""

    unit: Unit
    start: int
    size: int
    is_last: bool

    @property
    def lead(self) -> int:
        """Bytes before it, back to the last multiple of `ALIGN`."""
        return self.start % ALIGN


@dataclass(frozen=True, slots=True)
class Made:
    """A unit's bytes, behind room for its lead."""

    placed: Placed
    held: Array
    looks: tuple[Look, ...] = ()

    @property
    def data(self) -> memoryview:
        """The unit's own bytes."""
        return self.held.data[self.placed.lead : self.placed.lead + self.placed.size]

    def chunk(self, lead: bytes) -> tuple[memoryview, memoryview]:
        """What can be written after ``lead``, the bytes before the unit, is filled in; and what is left for the next one."""
        view, end = self.held.data, self.placed.lead + self.placed.size
        view[: self.placed.lead] = lead
        cut = end if self.placed.is_last else end - end % ALIGN
        return view[:cut], view[cut:end]


class Making:
    """Makes the units of one file.  Threads may share it."""

    def __init__(self, plan: FilePlan, files: Files, *, statistics: bool) -> None:
        self._plan, self._files, self._wants_statistics = plan, Compared(files, plan), statistics
        self._buffers: deque[Array] = deque()  # used before

    def make(self, placed: Placed) -> Made:
        """Raises what the files raise."""
        unit = placed.unit
        made = Made(placed, self._buffer(placed.lead + placed.size))
        if unit.text:
            made.data[:] = unit.text
            return made
        return replace(made, looks=tuple(self._looks(unit, made.data, self._fill(unit, made.data))))

    def release(self, made: Made) -> None:
        """Its memory may be used again."""
        self._buffers.append(made.held)

    def _fill(self, unit: Unit, out: memoryview) -> Sequence[int]:
        """Gather and cast; the overflows of each share."""
        if all(t.dtype == t.copy.dtype for t in self._tensors(unit)):
            gather(self._files, unit, out)
            return [0] * len(unit.shares)
        scratch, raw = self._buffer(4 * CAST_ELEMENTS), self._buffer(unit.stored)
        gather(self._files, unit, raw.data[: unit.stored])
        overflows = [*self._cast(unit, raw.data, out, scratch)]
        self._buffers += raw, scratch  # which the next unit takes first, while the caches have them
        return overflows

    def _tensors(self, unit: Unit) -> Iterator[PlannedTensor]:
        return (self._plan.tensors[share.number] for share in unit.shares)

    def _cast(self, unit: Unit, raw: memoryview, out: memoryview, scratch: Array) -> Iterator[int]:
        """Neighbours of the same types are cast at once; gives each share's overflows."""
        at = 0
        pairs = [(t.copy.dtype, t.dtype) for t in self._tensors(unit)]
        for (source, target), group in groupby(zip(pairs, unit.shares, strict=True), itemgetter(0)):
            shares = [share for _, share in group]
            first, size = shares[0].at, sum(share.size for share in shares)
            overflows = cast_into(raw[first : first + size], out[at:], source, target, scratch)
            at += size // ITEMSIZE[source] * ITEMSIZE[target]
            yield from _apportioned(overflows, [raw[s.at : s.at + s.size] for s in shares], source, target, scratch)

    def _looks(self, unit: Unit, data: memoryview, overflows: Sequence[int]) -> Iterator[Look]:
        at = 0
        for share, count in zip(unit.shares, overflows, strict=True):
            tensor = self._plan.tensors[share.number]
            size = share.size // ITEMSIZE[tensor.copy.dtype] * ITEMSIZE[tensor.dtype]
            own = data[at : at + size]
            yield Look(share.number, own, count, statistics(own, tensor.dtype) if self._wants_statistics else None)
            at += size

    def _buffer(self, size: int) -> Array:
        with contextlib.suppress(IndexError):  # there is none to use again
            used = self._buffers.pop()
            if len(used) >= size:
                return used
        return aligned(max(size, units.WINDOW + ALIGN))


def placed(plan: FilePlan) -> Iterator[Placed]:
    """Units with their places."""
    at, end = 0, plan.size  # which adds up all tensors
    for unit in units.units(plan):
        size = len(unit.text)
        for share in unit.shares:
            tensor = plan.tensors[share.number]
            size += share.size // ITEMSIZE[tensor.copy.dtype] * ITEMSIZE[tensor.dtype]
        yield Placed(unit, at, size, at + size == end)
        at += size


def weight(placed: Placed) -> int:
    return placed.size + placed.unit.stored


def aligned(size: int) -> Array:
    """Bytes of memory that begin where a disk can write from."""
    held: Array = np.empty(size + ALIGN, "u1")
    at = -held.ctypes.data % ALIGN
    return held[at : at + size]


def cast_into(raw: memoryview, out: memoryview, source: str, target: str, scratch: Array) -> int:
    """Cast stored bytes into the beginning of ``out``; how many finite values became infinite.  ``scratch``: 4 bytes for `CAST_ELEMENTS`."""
    if source == target:
        out[: len(raw)] = raw
        return 0
    values: Array = np.frombuffer(raw, RAW[ITEMSIZE[source]])
    cast: Array = np.frombuffer(out, RAW[ITEMSIZE[target]], len(values))
    room: Array = np.frombuffer(scratch, "<u4", CAST_ELEMENTS)
    overflows = 0
    for at in range(0, len(values), CAST_ELEMENTS):
        piece = values[at : at + CAST_ELEMENTS]
        overflows += cast_to(cast[at : at + CAST_ELEMENTS], piece, source, target, room[: len(piece)])
    return overflows


def _apportioned(overflows: int, shares: Sequence[memoryview], source: str, target: str, scratch: Array) -> Iterator[int]:
    """Whose they are; casting once more is dear, and seldom."""
    if len(shares) == 1 or not overflows:
        yield from [overflows] * len(shares)
        return
    for share in shares:
        yield cast_into(share, memoryview(bytearray(8 * len(share))), source, target, scratch)
