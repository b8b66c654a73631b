"""Compare the stored copies of each tensor: if they differ, the files are of several saves.

DeepSpeed keeps the model's 16-bit weights beside the fp32 masters, the Trainer a whole model beside
the shards.  Each copy is the most precise one, rounded to nearest: so a rank's file of another run
shows, also where names, sizes, steps and times are the same.  Of every file all values are compared
if they are few, else `WINDOWS` ranges, evenly spaced.

Replicas, which several ranks store of one part of a tensor, are compared so, too; and in full while
a merge reads them (`ComparedFiles`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE, PRECISION
from ckptsync.merger.cast import FLOATS, RAW, Array, cast
from ckptsync.merger.container_crcs import CrcCheckedFiles
from ckptsync.merger.plan import FilePlan, PlannedTensor
from ckptsync.merger.read_units import Box, Read, Unit, box_reads, gather
from ckptsync.tensors import Copy, Extent, Files, FilesWrapper, Part, Shape, Tensor

WINDOWS = 16  # of a file
ELEMENTS = 4 << 10  # of a window; a file of no more than all windows' elements is compared whole
_TENSORS = 64  # in a window at most: many small ones tell as much as one large one
_BATCH = 512 << 10  # elements that are compared at once


class _Pair(NamedTuple):
    """Two copies of a tensor that must agree.

    ``narrow`` is ``wide`` rounded to its element type.
    """

    tensor: Tensor
    wide: Copy
    narrow: Copy

    @property
    def dtypes(self) -> tuple[str, str]:
        """Return the element types of both copies, the wider one first."""
        return self.wide.dtype, self.narrow.dtype


@dataclass(frozen=True, slots=True, eq=False)
class _Range:
    """A box of a tensor that is a range of the flattened one: its first element and its length."""

    pair: _Pair
    box: Box
    start: int
    count: int

    def files(self, element: int) -> tuple[str, str]:
        """Return the files that hold this element of the wide and of the narrow copy."""
        index = self.start + element
        return _find_file(self.pair.wide, index), _find_file(self.pair.narrow, index)


def check_copies(files: Files, tensors: Iterable[Tensor]) -> None:
    """Raise Corrupt if stored copies of a tensor differ, with the file that agrees least.

    Reads what has several copies: of each file all if that is little, else `WINDOWS` samples of it.
    Tied tensors are left out.
    Raises Unsupported for replicas that differ where nothing else says that they are replicas.
    """
    pairs = [pair for tensor in tensors if not tensor.tied for pair in _pairs(tensor)]
    ranges = {
        (id(range_.pair.narrow), range_.start, range_.count): range_ for range_ in _ranges(pairs)
    }
    agreeing: set[tuple[str, str]] = set()
    disagreeing: dict[tuple[str, str], _Pair] = {}
    for batch in _batches(ranges.values()):
        differs, position = _find_differing(files, batch), 0
        for range_ in batch:
            differing = np.flatnonzero(differs[position : position + range_.count])
            agreeing |= {range_.files(0), range_.files(range_.count - 1)}
            for element in {int(differing[0]), int(differing[-1])} if len(differing) else ():
                disagreeing.setdefault(range_.files(element), range_.pair)
            position += range_.count
    if not disagreeing:
        return
    agrees = Counter(name for names in agreeing - disagreeing.keys() for name in names)
    differs_from = Counter(name for names in disagreeing for name in names)
    names = min(
        disagreeing, key=lambda names: min((agrees[name], -differs_from[name]) for name in names)
    )
    odd_file, second_file = sorted(names, key=lambda name: (agrees[name], -differs_from[name]))
    pair = disagreeing[names]
    parts = [part for part in (*pair.wide.parts, *pair.narrow.parts) if part.extent.file in names]
    # else a part is a piece of a record of any length
    is_replica = any(part.replicas for part in pair.wide.parts)
    raise _difference_error(
        files,
        pair.tensor.name,
        pair.wide.doubt,
        parts if is_replica else (),
        (odd_file, second_file),
    )


def _pairs(tensor: Tensor) -> Iterator[_Pair]:
    """Yield copies that must agree: the most precise, and each that can be cast to it or from it.

    None of these if ``unlike`` is set.  Then each copy and its n-th replicas, as far as all of its
    parts have such.
    """
    stored = [copy for copy in tensor.copies if copy.parts]
    if not tensor.unlike and len(stored) > 1:
        wide = max(stored, key=lambda copy: PRECISION.get(copy.dtype, 0))
        for narrow in stored:
            is_castable = {narrow.dtype, wide.dtype} <= PRECISION.keys()
            if narrow is not wide and (narrow.dtype == wide.dtype or is_castable):
                yield _Pair(tensor, wide, narrow)
    for copy in tensor.copies:
        for nth in range(min((len(part.replicas) for part in copy.parts), default=0)):
            yield _Pair(
                tensor, copy, replace(copy, parts=tuple(part.replicas[nth] for part in copy.parts))
            )


def _difference_error(
    files: Files, name: str, doubt: str, parts: Iterable[Part], names: tuple[str, str]
) -> CkptsyncError:
    """Return the error of a tensor that two files differ in: Unsupported with a ``doubt``.

    Else Corrupt.  Reads all of ``parts``' records that have CRC32s; raises Corrupt if one differs.
    ``doubt``: why the parts may be no replicas.  ``names``: the file to suspect, and the other one.
    """
    odd_file, second_file = names
    CrcCheckedFiles(files, {part.checksum for part in parts if part.checksum}).finish()
    if doubt:
        return Unsupported(
            f"{name} {doubt}, its values in {odd_file} differ from those in {second_file}, and no"
            " metadata says how to combine them",
            hint=(
                "are the files of one save? if so, save it on a mesh of all ranks, or with"
                " torch.distributed.checkpoint"
            ),
        )
    return Corrupt(
        f"{odd_file}: values of {name} differ from those in {second_file}",
        hint="the files are of different saves: give those that one save wrote",
    )


def _ranges(pairs: Sequence[_Pair]) -> Iterator[_Range]:
    """Yield the ranges to compare, file by file: all of a small one, else `WINDOWS` spread ones.

    Of one window at most `_TENSORS` parts; of a part that is no range of its tensor one element's.
    """
    parts_by_file: defaultdict[str, list[tuple[_Pair, Copy, Part]]] = defaultdict(list)
    for pair in pairs:
        for copy in (pair.wide, pair.narrow):
            for part in copy.parts:
                if prod(part.sizes):
                    parts_by_file[part.extent.file].append((pair, copy, part))
    for parts in parts_by_file.values():
        ends = list(accumulate(prod(part.sizes) for _, _, part in parts))
        starts, size, most = [0], ends[-1], len(parts)
        if size > WINDOWS * ELEMENTS:
            starts = [n * (size - ELEMENTS) // (WINDOWS - 1) for n in range(WINDOWS)]
            size, most = ELEMENTS, _TENSORS
        for start in starts:
            first = bisect_right(ends, start)
            for (pair, copy, part), end in zip(
                parts[first : first + most], ends[first : first + most], strict=True
            ):
                begin = end - prod(part.sizes)
                if begin >= start + size:
                    break
                low, high = max(start - begin, 0), min(start + size, end) - begin
                # of a part that is no range of the tensor, what follows its first element in the
                # tensor
                index = _flat_index(copy.grid, part, low)
                stop = index + high - low if part.sizes[1:] == copy.grid[1:] else index + 1
                while index < stop:
                    range_ = _range_at(pair, index, stop - index)
                    yield range_
                    index = range_.start + range_.count


def _flat_index(grid: Shape, part: Part, element: int) -> int:
    """Return which element of the flattened tensor element number ``element`` of a part is."""
    number = 0
    for index, offset, whole in zip(_indices(element, part.sizes), part.offsets, grid, strict=True):
        number = number * whole + offset + index
    return number


def _range_at(pair: _Pair, element: int, most: int) -> _Range:
    """Return whole rows, or a piece of one, that hold ``element``: at most ``most`` elements.

    At most `ELEMENTS`, too.  They begin at ``element`` or at its row, and end with the axis.
    """
    shape, most = pair.tensor.shape, max(1, min(most, ELEMENTS))
    if not shape:
        return _Range(pair, Box((), ()), 0, 1)
    axis = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) <= most)
    behind = shape[axis + 1 :]
    tail = prod(behind)
    indices = _indices(element // tail, shape[: axis + 1])
    rows = min(max(1, most // tail), shape[axis] - indices[-1])
    box = Box((*indices, *(0,) * len(behind)), (*(1,) * axis, rows, *behind))
    return _Range(pair, box, element // tail * tail, rows * tail)


def _indices(element: int, shape: Shape) -> tuple[int, ...]:
    """Return the indices of an element of a flattened tensor."""
    indices: list[int] = []
    for size in reversed(shape):
        element, index = divmod(element, size)
        indices.insert(0, index)
    return tuple(indices)


def _find_file(copy: Copy, element: int) -> str:
    """Return the file that has an element of a copy; the first part's if no part has it."""
    indices = _indices(element, copy.grid)
    for part in copy.parts:
        if all(
            o <= n < o + size for n, o, size in zip(indices, part.offsets, part.sizes, strict=True)
        ):
            return part.extent.file
    return copy.parts[0].extent.file


def _batches(ranges: Iterable[_Range]) -> Iterator[list[_Range]]:
    """Yield lists of ranges to read together, in their order.

    The copies of all ranges of a list have the same two element types, and the list has at most
    `_BATCH` elements, unless it is a single range.
    """
    batch: list[_Range] = []
    elements = 0
    for range_ in ranges:
        if batch and (
            elements + range_.count > _BATCH or range_.pair.dtypes != batch[0].pair.dtypes
        ):
            yield batch
            batch, elements = [], 0
        batch.append(range_)
        elements += range_.count
    if batch:
        yield batch


def _find_differing(files: Files, batch: Sequence[_Range]) -> Array:
    """Return for each element whether the narrow copy differs from the wide one, cast to its type.

    Two NaNs do not differ.  ``batch``: at least one range, of the same two types, see `_batches`.
    """
    wide = _read_ranges(files, [(range_, range_.pair.wide) for range_ in batch])
    narrow = _read_ranges(files, [(range_, range_.pair.narrow) for range_ in batch])
    dtype = batch[0].pair.narrow.dtype
    rounded, _ = cast(wide, batch[0].pair.wide.dtype, dtype)
    differs: Array = (rounded != narrow) & ~(_is_nan(rounded, dtype) & _is_nan(narrow, dtype))
    return differs


def _is_nan(values: Array, dtype: str) -> Array:
    """Return for each raw value whether it is NaN."""
    if dtype == "BF16":
        return (values & 0x7FFF) > 0x7F80
    return np.isnan(values.view(FLOATS[dtype])) if dtype in FLOATS else np.zeros(len(values), bool)


def _read_ranges(files: Files, ranges: Sequence[tuple[_Range, Copy]]) -> Array:
    """Read and return the raw elements of ranges, one or more, of copies of one dtype, in order."""
    item, unit = ITEMSIZE[ranges[0][1].dtype], Unit()
    for range_, copy in ranges:
        box = (
            range_.box
            if copy.grid == range_.pair.tensor.shape
            else Box((range_.start,), (range_.count,))
        )
        for part in copy.parts:
            unit.reads += box_reads(box, part, item, unit.stored)
        unit.stored += range_.count * item
    out = np.empty(unit.stored, "u1")
    gather(files, unit, out.data)
    return out.view(RAW[item])


class _Replica(NamedTuple):
    """A replica of a part; it is read to byte ``at`` of what is read of the part."""

    at: int
    tensor: PlannedTensor
    part: Part
    replica: Part


class ComparedFiles(FilesWrapper):
    """Files that compare each range of planned parts with the same range of their replicas.

    The replicas' bytes are read with every read of a part.
    """

    def __init__(self, files: Files, plans: Iterable[FilePlan]) -> None:
        """Index the parts of ``plans`` that have replicas; nothing is read yet."""
        super().__init__(files)
        parts_by_file: defaultdict[str, list[tuple[int, int, PlannedTensor, Part]]] = defaultdict(
            list
        )
        for tensor in (tensor for plan in plans for tensor in plan.tensors):
            for part in tensor.copy.parts:
                if part.replicas:
                    extent = part.extent
                    parts_by_file[extent.file].append(
                        (extent.start, extent.start + extent.size, tensor, part)
                    )
        self._parts = {
            name: sorted(parts, key=itemgetter(0, 1)) for name, parts in parts_by_file.items()
        }
        self._ends = {
            name: list(accumulate((end for _, end, *_ in parts), max))
            for name, parts in self._parts.items()
        }

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Files`.

        Raises Corrupt or Unsupported, as `check_copies`, if a replica has other bytes.
        """
        self._files.read_into(name, start, out)
        for unit, replicas in self.replicas(name, start, start + out.nbytes):
            bytes_of_replicas = np.empty(unit.stored, "u1")
            gather(self._files, unit, bytes_of_replicas.data)
            for replica_read, (position, tensor, part, replica) in zip(
                unit.reads, replicas, strict=True
            ):
                if not np.array_equal(
                    np.frombuffer(out, "u1", replica_read.size, position),
                    bytes_of_replicas[replica_read.at : replica_read.at + replica_read.size],
                ):
                    names = replica.extent.file, part.extent.file
                    raise _difference_error(
                        self._files, tensor.name, tensor.copy.doubt, (part, replica), names
                    )

    def replicas(self, name: str, start: int, end: int) -> Iterator[tuple[Unit, list[_Replica]]]:
        """Yield the replicas of a range of a file as units to read.

        First come those that are the first replica of their part, then the second ones, and so on.
        """
        if name not in self._parts:
            return
        parts = self._parts[name]
        overlapping = parts[
            bisect_right(self._ends[name], start) : bisect_left(parts, end, key=itemgetter(0))
        ]
        for nth in range(max((len(part.replicas) for *_, part in overlapping), default=0)):
            unit, replicas = Unit(), []
            for first, last, tensor, part in overlapping:
                low, high = max(start, first), min(end, last)
                if low < high and nth < len(part.replicas):
                    extent: Extent = part.replicas[nth].extent
                    unit.reads.append(
                        Read(extent.file, extent.start + low - first, high - low, unit.stored)
                    )
                    unit.stored += high - low
                    replicas.append(_Replica(low - start, tensor, part, part.replicas[nth]))
            yield unit, replicas
