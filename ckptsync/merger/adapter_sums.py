"""Sum what an adapter changes into its base's tensors, stretch by stretch as they are written.

A merge makes its output in pieces, so a sum must be computed for any range of a tensor, with little
memory.  Everything is computed in float32 and rounded once, to the type that is written; with
several adapters after each, as peft does.  A stretch is summed block by block: of the product of
the two factors only the rows that the stretch needs are computed, while the caches have them.
Factors are read when a stretch needs them: small ones whole, and kept while they are used; of a
large one the rows or columns that are needed.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from ckptsync.errors import Corrupt
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.merger.cast import FLOATS, RAW, Array, cast, cast_to, round_to_bf16
from ckptsync.merger.change_types import (
    BiasDelta,
    Change,
    Factor,
    LowRank,
    Replacement,
    Rows,
)
from ckptsync.merger.completeness import first_names
from ckptsync.merger.plan import PlannedTensor
from ckptsync.merger.read_units import stored_bytes
from ckptsync.merger.tensor_pieces import box_of
from ckptsync.tensors import Checksum, Copy, Files, Shape, Tensor

BLOCK = 256 << 10  # elements that are summed at once: more leave the caches
_WHOLE = 4 << 20  # bytes of a factor that is read whole
_STEPPED = 16 << 20  # the same, where its columns are needed in steps: each row has some of them
WINDOW = 6 << 20  # bytes in flight for each thread of a merge, beside the factors
_CACHE_SIZE = 32 << 20  # bytes of factors that are kept, and of those that are in use


@dataclass(frozen=True, slots=True)
class TensorSum:
    """What becomes of one tensor: ``steps``, the changes of each adapter in turn.

    ``base``: the base's own copy, which DoRA's norms are of, or what is there instead of it.
    """

    base: Tensor
    steps: tuple[tuple[Change, ...], ...]

    @property
    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the adapters that is read, but for replacements."""
        for change in (change for step in self.steps for change in step):
            if isinstance(change, LowRank):
                yield from (change.a.tensor, change.b.tensor)
                if change.magnitude is not None:
                    yield change.magnitude
            elif not isinstance(change, Replacement):
                yield change.tensor

    @property
    def checksums(self) -> Iterator[Checksum]:
        """The checksums that the adapters' containers have of what is read."""
        parts = (part for tensor in self.tensors for part in tensor.copies[0].parts)
        return (part.checksum for part in parts if part.checksum)


@dataclass(frozen=True, slots=True)
class ChangeTotals:
    """What the changes of a tensor add up to.

    ``base`` and ``change`` are sums of squares, before and of what was added; ``product`` is the
    scalar product of both.  ``count``: elements with a plain low-rank change, which ``product``
    and ``plain`` (its sum of squares) are of.  ``magnitudes``: of DoRA, and how many of them are
    ``odd``: not near the norm that they belong to.  ``modules``: those whose change is not zero.
    """

    base: float = 0.0
    change: float = 0.0
    product: float = 0.0
    plain: float = 0.0
    plain_base: float = 0.0
    count: int = 0
    magnitudes: int = 0
    odd: int = 0
    modules: tuple[str, ...] = ()

    @property
    def relative(self) -> float | None:
        """The norm of the change relative to that of the base; None without a base."""
        return math.sqrt(self.change / self.base) if self.base > 0 else None

    def __add__(self, totals: ChangeTotals) -> ChangeTotals:
        return ChangeTotals(
            self.base + totals.base,
            self.change + totals.change,
            self.product + totals.product,
            self.plain + totals.plain,
            self.plain_base + totals.plain_base,
            self.count + totals.count,
            self.magnitudes + totals.magnitudes,
            self.odd + totals.odd,
            tuple(dict.fromkeys((*self.modules, *totals.modules))),
        )


@dataclass(frozen=True, slots=True)
class _Region:
    """A matrix within a flattened tensor: its first element, its rows, and their width."""

    start: int
    rows: int
    width: int

    def within(self, low: int, high: int) -> tuple[int, int]:
        """Return first and end (exclusive) of the rows with elements in ``low`` to ``high``.

        Both count elements of the flattened tensor.  Without such rows, end is not above first.
        """
        first = (low - self.start) // self.width
        last = -((self.start - high) // self.width)
        return max(0, first), max(0, min(self.rows, last))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The elements of a tensor from ``first``, in ``sums``.

    ``is_unmerged``: they are still those of ``base``.
    """

    base: Tensor
    shape: Shape
    first: int
    sums: Array
    is_unmerged: bool

    def part(self, start: int, size: int) -> tuple[int, int]:
        """Return where ``size`` elements from ``start`` overlap the stretch: from and to.

        "To" is not above "from" if they do not overlap.
        """
        return max(self.first, start), min(self.first + len(self.sums), start + size)


@dataclass(slots=True)
class _CachedValues:
    """A factor, or a vector of norms, once a thread has made it; others wait for the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    values: Array | None = None


class AdapterSums:
    """Sums changes into stretches of tensors; several threads may call `write`.

    ``files``: what the sums' tensors are read from.
    """

    def __init__(self, files: Files, sums: Mapping[str, TensorSum]) -> None:
        self._files, self._sums = files, sums
        self._lock = threading.Lock()
        self._factors: OrderedDict[object, _CachedValues] = OrderedDict()
        self._norms: dict[object, _CachedValues] = {}
        self._cached_bytes = 0
        self._thread_buffers = threading.local()

    def has(self, name: str) -> bool:
        """Return whether a tensor is changed."""
        return name in self._sums

    def write(
        self, tensor: PlannedTensor, first: int, stored: memoryview, out: memoryview
    ) -> ChangeTotals:
        """Write a stretch of a tensor, summed, into ``out``; return what was changed.

        Args:
            tensor: Its plan.
            first: The number of its first element in the stretch.
            stored: The stretch as it was read; may be the memory of ``out``.
            out: The stretch as it is written.

        Raises:
            Corrupt: A sum is no finite number of the written type.

        """
        with np.errstate(all="ignore"):  # what is no finite number is refused
            return self._write(tensor, first, stored, out)

    def _write(
        self, tensor: PlannedTensor, first: int, stored: memoryview, out: memoryview
    ) -> ChangeTotals:
        """Do what `write` says, block by block, in this thread's buffers; raises Corrupt, too."""
        source, target = tensor.copy.dtype, tensor.dtype
        values: Array = np.frombuffer(stored, RAW[ITEMSIZE[source]])
        narrow: Array = np.frombuffer(out, RAW[ITEMSIZE[target]])
        tensor_sum = self._sums[tensor.name]
        row = _row_length(tensor.shape, tensor_sum)
        block = max(1, BLOCK // row) * row
        wide = "F64" if source == "F64" else "F32"
        work = self._buffer("work", min(len(values), block), RAW[ITEMSIZE[wide]])
        scratch = self._buffer("scratch", len(work), np.dtype("<u4"))
        totals, position = ChangeTotals(), 0
        while position < len(values):
            # blocks begin with a row, but for the first
            size = min(len(values) - position, block - (first + position) % row)
            bits, block_scratch = work[:size], scratch[:size]
            if source == wide:
                bits[:] = values[position : position + size]
            else:
                cast_to(bits, values[position : position + size], source, wide, block_scratch)
            sums = bits.view(FLOATS[wide])
            for number, step in enumerate(tensor_sum.steps):
                if number and target != wide:  # peft rounds after each adapter
                    bits[:] = cast(cast(bits, wide, target)[0], target, wide)[0]
                for change in step:
                    is_unmerged = not number and change is step[0]
                    stretch = _Stretch(
                        tensor_sum.base, tensor.shape, first + position, sums, is_unmerged
                    )
                    totals += self._apply(change, stretch)
            # the sum of squares tells of nearly all that they are small enough for any type
            is_small = math.isfinite(float(np.dot(sums, sums)))
            if not (is_small or np.isfinite(sums).all()):
                raise _not_finite_error(tensor.name, tensor_sum)
            written = narrow[position : position + size]
            if target == wide:
                written[:] = bits
            elif is_small and (target, wide) == ("BF16", "F32"):
                round_to_bf16(sums, written, block_scratch, is_plain=True)
            elif cast_to(written, bits, wide, target, block_scratch):
                raise _not_finite_error(tensor.name, tensor_sum, target)
            position += size
        return totals

    def _apply(self, change: Change, stretch: _Stretch) -> ChangeTotals:
        """Apply one change to a stretch in place; return what it adds up to.

        Nothing is done for a `Replacement`, whose copy is read instead; its totals, and those of
        `Rows`, are empty.
        """
        if isinstance(change, LowRank):
            return self._add_low_rank(change, stretch)
        first, sums, shape = stretch.first, stretch.sums, stretch.shape
        if isinstance(change, BiasDelta):
            values = self._read_values(change.tensor, (first,), (len(sums),)) * np.float32(
                change.scale
            )
            return _add_in_place(sums, values, change.module)
        if isinstance(change, Rows):
            width = prod(shape[1:])
            for number, row in enumerate(change.rows):
                low, high = stretch.part(row * width, width)
                if low < high:
                    box = (number, *(0,) * (len(shape) - 1)), (1, *shape[1:])
                    row_values = self._read_values(change.tensor, *box)
                    sums[low - first : high - first] = row_values[
                        low - row * width : high - row * width
                    ]
        return ChangeTotals()  # of what is replaced the copy is another

    def _add_low_rank(self, change: LowRank, stretch: _Stretch) -> ChangeTotals:
        """Add a product of factors, with DoRA's scales, in place; return totals.

        They are empty if the stretch has nothing of the change's region.  Reads factors, and for
        DoRA the base's rows or columns, where these are not cached or in the stretch.
        """
        region = region_of(change, stretch.shape)
        low, high = region.within(stretch.first, stretch.first + len(stretch.sums))
        if low >= high:
            return ChangeTotals()
        start, size = region.start + low * region.width, (high - low) * region.width
        is_whole = stretch.part(start, size) == (start, start + size)
        if change.magnitude is None:
            begin, end = stretch.part(start, size)
            delta = self._delta(change, low, high).reshape(-1)[begin - start : end - start]
            return _add_in_place(
                stretch.sums[begin - stretch.first : end - stretch.first], delta, change.module
            )
        scales, totals = None, ChangeTotals()
        if change.is_per_column or not is_whole or not stretch.is_unmerged:
            norms = (
                self._column_norms(change, stretch)
                if change.is_per_column
                else self._row_norms(change, stretch, (low, high))
            )
            scales, totals = self._scales(change, norms, low)
        delta = self._delta(change, low, high)
        if is_whole:
            base_values = stretch.sums[
                start - stretch.first : start - stretch.first + size
            ].reshape(delta.shape)
            if scales is None:
                norms = np.sqrt(_row_squares(np.stack([base_values + delta, base_values])))
                scales, totals = self._scales(change, norms, low)
            return totals + _scale_in_place(base_values, delta, scales, change.module)
        assert scales is not None  # the stretch does not have whole rows
        for row in range(low, high):
            start = region.start + row * region.width
            begin, end = stretch.part(start, region.width)
            if begin >= end:
                continue
            base_values = stretch.sums[begin - stretch.first : end - stretch.first]
            part = slice(begin - start, end - start)
            scale = scales[0, part] if change.is_per_column else scales[row - low]
            totals += _scale_in_place(base_values, delta[row - low][part], scale, change.module)
        return totals

    def _scales(self, change: LowRank, norms: Array, low: int) -> tuple[Array, ChangeTotals]:
        """Return what DoRA multiplies every column with, or the rows from ``low``, and its totals.

        ``norms``: of the sum, and of the base.
        """
        assert change.magnitude is not None
        magnitude = self._cached(id(change.magnitude), change.magnitude)
        if not change.is_per_column:
            magnitude = magnitude[low : low + norms.shape[1]]
        scales, ratios = magnitude / norms[0], magnitude / norms[1]
        totals = ChangeTotals()
        if not (change.is_per_column and low):  # columns are counted once
            odd = np.count_nonzero(~((ratios > ODD[0]) & (ratios < ODD[1])))
            totals = ChangeTotals(magnitudes=len(ratios), odd=int(odd))
        return scales[None, :] if change.is_per_column else scales[:, None], totals

    def _delta(self, change: LowRank, low: int, high: int) -> Array:
        """Return the rows from ``low`` to ``high`` of what is added, of the region as it is stored.

        The memory is used again by this thread's next call.
        """
        rows, columns = (change.a, change.b) if change.is_transposed else (change.b, change.a)
        row_factor = self._factor(rows, rows=not change.is_transposed, low=low, high=high)
        column_factor = self._factor(columns)
        if change.is_transposed:
            row_factor, column_factor = row_factor.T, column_factor.T
        is_exact = math.frexp(change.scale)[0] == 0.5  # a power of two: rounding is the same
        if is_exact:
            row_factor = row_factor * np.float32(change.scale)
        size = row_factor.shape[0], column_factor.shape[1]
        delta = self._buffer("delta", prod(size), FLOATS["F32"]).reshape(size)
        np.matmul(row_factor, column_factor, out=delta)
        if not is_exact:
            delta *= np.float32(change.scale)
        return delta

    def _buffer(self, name: str, size: int, dtype: np.dtype[Any]) -> Array:
        """Return this thread's memory for ``name``, which its next such call uses again."""
        memory: Array | None = getattr(self._thread_buffers, name, None)
        if memory is None or memory.nbytes < size * dtype.itemsize:
            memory = np.empty(size * dtype.itemsize, "u1")
            setattr(self._thread_buffers, name, memory)
        return memory[: size * dtype.itemsize].view(dtype)

    def _row_norms(self, change: LowRank, stretch: _Stretch, rows: tuple[int, int]) -> Array:
        """Return the norms of these rows of the unmerged base, (2, rows): with change and without.

        The rows are read again: a stretch may have a part of one, and other adapters may be summed.
        """
        squares = [_row_squares(values) for values in self._unmerged(change, stretch, rows)]
        norms: Array = np.sqrt(np.concatenate(squares, axis=1))
        return norms

    def _column_norms(self, change: LowRank, stretch: _Stretch) -> Array:
        """Return the norms of the columns of the unmerged base, (2, columns): with change, without.

        The first call reads the whole region; other threads wait, and later calls get the same.
        """
        with self._lock:
            cached = self._norms.setdefault((id(change.magnitude), change.offsets), _CachedValues())
        with cached.lock:
            if cached.values is None:
                region = region_of(change, stretch.shape)
                squares: Array = np.zeros((2, region.width), "<f8")
                for values in self._unmerged(change, stretch, (0, region.rows)):
                    squares += np.square(values).sum(1, dtype="<f8")
                cached.values = np.sqrt(squares).astype("<f4")
            return cached.values

    def _unmerged(
        self, change: LowRank, stretch: _Stretch, rows: tuple[int, int]
    ) -> Iterator[Array]:
        """Read and yield rows of the unmerged base: (2, rows, width), with its change and without.

        At most `BLOCK` elements of the base at once, or one row.
        """
        region = region_of(change, stretch.shape)
        rows_at_once = max(1, BLOCK // region.width)
        for low in range(rows[0], rows[1], rows_at_once):
            high = min(rows[1], low + rows_at_once)
            start, end = (region.start + row * region.width for row in (low, high))
            values = _read_range(self._files, stretch.base, start, end)
            rows_of_base = values.reshape(high - low, region.width)
            yield np.stack([rows_of_base + self._delta(change, low, high), rows_of_base])

    def _factor(
        self, factor: Factor, *, rows: bool = True, low: int = 0, high: int | None = None
    ) -> Array:
        """Return a factor as float32: all of it, or ``low`` to ``high`` of its rows or columns.

        ``rows``: which of the two.  Small factors and whole ones are cached: do not change them.
        """
        tensor = factor.tensor
        own_rows, own_columns = factor.rows, factor.columns
        if high is not None and rows:
            own_rows = own_rows[low:high]
        elif high is not None:
            own_columns = own_columns[low:high]
        size = prod(tensor.shape) * 4
        is_stepped = own_columns.step != 1 or own_rows.step != 1
        width = prod(tensor.shape[1:])
        if size <= (_STEPPED if is_stepped else _WHOLE) or len(tensor.shape) != 2:
            whole = self._cached(id(tensor), tensor)
            matrix: Array = whole.reshape(tensor.shape[0], width)
            return matrix[_as_slice(own_rows), _as_slice(own_columns)]
        low_row, low_column = own_rows[0], own_columns[0]
        sizes = own_rows[-1] + 1 - low_row, own_columns[-1] + 1 - low_column
        if high is None:
            matrix = self._cached(
                (id(tensor), low_row, low_column, sizes), tensor, (low_row, low_column), sizes
            )
        else:
            matrix = self._read_values(tensor, (low_row, low_column), sizes)
        matrix = matrix.reshape(sizes)
        return matrix[:: own_rows.step, :: own_columns.step]

    def _cached(
        self, key: object, tensor: Tensor, offsets: Shape | None = None, sizes: Shape | None = None
    ) -> Array:
        """Return values of a tensor, or of a box of it, from the cache: do not change them.

        The first caller of ``key`` reads them, others wait.  The values used least recently are
        dropped while the cache is larger than `_CACHE_SIZE`.
        """
        with self._lock:
            cached = self._factors.setdefault(key, _CachedValues())
            self._factors.move_to_end(key)
        with cached.lock:
            if cached.values is None:
                cached.values = self._read_values(tensor, offsets, sizes)
                with self._lock:
                    self._cached_bytes += cached.values.nbytes
                    while self._cached_bytes > _CACHE_SIZE and len(self._factors) > 1:
                        oldest, dropped = next(iter(self._factors.items()))
                        if dropped is cached or dropped.values is None:
                            break
                        self._cached_bytes -= dropped.values.nbytes
                        del self._factors[oldest]
            return cached.values

    def _read_values(
        self, tensor: Tensor, offsets: Shape | None = None, sizes: Shape | None = None
    ) -> Array:
        """Read and return a tensor's values, or those of a box of it, as float32, flat."""
        copy = tensor.copies[0]
        if offsets is None or sizes is None:
            return read_floats(self._files, copy)
        if copy.grid == tensor.shape:
            return read_floats(self._files, box_of(copy, offsets, sizes))
        # it is stored flattened: whole rows of it, then these columns
        width = prod(tensor.shape[1:])
        flat = box_of(copy, (offsets[0] * width,), (sizes[0] * width,))
        rows = read_floats(self._files, flat).reshape(sizes[0], *tensor.shape[1:])
        box = [slice(o, o + n) for o, n in zip(offsets[1:], sizes[1:], strict=True)]
        index = (slice(None), *box)
        return np.asarray(rows[index]).reshape(-1)


def notes_on_sums(
    sums: Mapping[str, TensorSum], totals: Mapping[str, ChangeTotals]
) -> Iterator[str]:
    """Yield warnings: modules were not trained, the base has the adapter already, or is another.

    ``totals``: of every tensor of ``sums``.
    """
    adapted = [c for tensor_sum in sums.values() for step in tensor_sum.steps for c in step]
    modules = dict.fromkeys(
        c.module for c in adapted if isinstance(c, LowRank) and c.magnitude is None
    )
    changed = {module for total in totals.values() for module in total.modules}
    unchanged = [module for module in modules if module not in changed]
    if unchanged and len(unchanged) == len(modules):
        whole = "" if len(modules) < len({c.module for c in adapted}) else ": the model is the base"
        yield f"warning: this adapter changes nothing, it was never trained (B is all zero){whole}"
    elif unchanged:
        yield (
            f"warning: {len(unchanged)} of {len(modules)} modules are not changed (B is all zero):"
            f" {first_names(unchanged)}"
        )
    if _is_contained(totals.values()):
        yield (
            "warning: the base seems to contain this adapter already: it was merged before, or an"
            " initialisation such as PiSSA has moved a part of the base into it, which was not"
            " taken out of this base"
        )
    magnitudes = sum(total.magnitudes for total in totals.values())
    odd = sum(total.odd for total in totals.values())
    if odd > MOST_ODD * magnitudes:
        yield (
            f"warning: {odd} of {magnitudes} magnitudes (DoRA) are not near the norms of the"
            " base's rows: is this the base that the adapter was trained on?"
        )


def _is_contained(totals: Iterable[ChangeTotals]) -> bool:
    """Return whether the base seems to contain the adapter: its projection on the change is near 1.

    That is in `CONTAINED`, for at least `MOST` of the tensors whose projection is certain (`SURE`);
    False without such tensors.  For an adapter that the base does not contain it is about 0.
    """
    projections = [
        t.product / t.plain
        for t in totals
        if t.plain > 0 and t.count and math.sqrt(t.plain_base / t.plain / t.count) < SURE
    ]
    contained_count = sum(CONTAINED[0] < rho < CONTAINED[1] for rho in projections)
    return bool(projections) and contained_count >= MOST * len(projections)


CONTAINED, SURE, MOST = (0.7, 1.3), 0.1, 0.75
"""The projection of a base that contains an adapter; its standard deviation by chance, at most; of
so many of the tensors."""
MOST_ODD = 0.1  # of the magnitudes: training moves few of them so far
ODD = 0.5, 2.0
"""Between them a magnitude is to the norm of its row, at least of nearly all: training moves both
little."""


def region_of(change: LowRank, shape: Shape) -> _Region:
    """Return the matrix within the flattened tensor that a change covers.

    Raises Corrupt if the factors do not have its size.
    """
    rows, columns = len(change.b.rows), len(change.a.columns)
    if change.is_transposed:
        rows, columns = columns, rows
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    sizes, start = change.sizes, sum(o * s for o, s in zip(change.offsets, steps, strict=True))
    for axis in range(len(shape)):
        box = prod(sizes[:axis]), sizes[axis], prod(sizes[axis + 1 :])
        if box == (1, rows, columns) and sizes[axis + 1 :] == shape[axis + 1 :]:
            return _Region(start, rows, columns)
    raise Corrupt(f"{change.module}: a change of {sizes} by factors of {rows} and {columns}")


def _row_length(shape: Shape, tensor_sum: TensorSum) -> int:
    """Return how many elements a row of the first product of factors has in the tensor.

    Without a product, a row of the tensor itself. A tensor's blocks are cut at multiples of it.
    """
    strides = (
        region_of(change, shape).width
        for step in tensor_sum.steps
        for change in step
        if isinstance(change, LowRank)
    )
    return next(strides, prod(shape[1:]) if len(shape) > 1 else 1) or 1


def _add_in_place(sums: Array, delta: Array, module: str) -> ChangeTotals:
    """Add ``delta`` in place, and return what that changes."""
    base_values = sums if sums.dtype == delta.dtype else sums.astype(delta.dtype)
    base, change, product = (
        _dot(base_values, base_values),
        _dot(delta, delta),
        _dot(base_values, delta),
    )
    np.add(sums, delta, out=sums)
    modules = (module,) if change or delta.any() else ()
    return ChangeTotals(base, change, product, change, base, len(sums), modules=modules)


def _row_squares(values: Array) -> Array:
    """Return the sums of squares of the rows of several matrices."""
    squares: Array = np.einsum("nij,nij->ni", values, values)
    return squares


def _scale_in_place(sums: Array, delta: Array, scales: Array, module: str) -> ChangeTotals:
    """Add ``delta`` and multiply by ``scales`` in place, and return what that changes."""
    new_values = (sums + delta) * scales
    change_values = (new_values - sums).reshape(-1)
    base, change_squares = (
        _dot(sums.reshape(-1), sums.reshape(-1)),
        _dot(change_values, change_values),
    )
    modules = (module,) if delta.any() else ()
    np.copyto(sums, new_values)
    return ChangeTotals(base, change_squares, modules=modules)


def _dot(first: Array, second: Array) -> float:
    """Return the scalar product of two vectors."""
    return float(np.dot(first, second))


def read_floats(files: Files, copy: Copy) -> Array:
    """Return a stored copy's values, of any floating type, as float32, flat; read all of it."""
    out: Array = np.empty(prod(copy.grid), "<u4")
    position = 0
    for data in stored_bytes(files, copy):
        values: Array = np.frombuffer(data, RAW[ITEMSIZE[copy.dtype]])
        target = out[position : position + len(values)]
        if copy.dtype == "F32":
            target[:] = values
        else:
            cast_to(target, values, copy.dtype, "F32", np.empty(len(values), "<u4"))
        position += len(values)
    return out.view("<f4")


def _read_range(files: Files, tensor: Tensor, low: int, high: int) -> Array:
    """Read and return the values from ``low`` to ``high`` of a flattened tensor, as float32."""
    copy = tensor.copies[0]
    if len(copy.grid) == 1:
        return read_floats(files, box_of(copy, (low,), (high - low,)))
    width = prod(copy.grid[1:])
    rows = low // width, -(-high // width)
    offsets = (rows[0], *(0,) * (len(copy.grid) - 1))
    box = box_of(copy, offsets, (rows[1] - rows[0], *copy.grid[1:]))
    return read_floats(files, box)[low - rows[0] * width : high - rows[0] * width]


def _as_slice(indices: range) -> slice:
    """Return a range of indices as a slice."""
    return slice(indices.start, indices.stop, indices.step)


def _not_finite_error(name: str, tensor_sum: TensorSum, target: str = "") -> Corrupt:
    """Return the error of a sum that is NaN or infinite, or too large for the type ``target``."""
    modules = {change.module for step in tensor_sum.steps for change in step}
    how = f"too large for {target}" if target else "not finite (NaN or infinite)"
    return Corrupt(
        f"{name}: the sum of base and adapter ({min(modules)}) is {how}",
        hint="the training diverged, or the adapter is damaged: take an earlier checkpoint"
        if not target
        else "write it in another type with --dtype bf16 or --dtype fp32",
    )
