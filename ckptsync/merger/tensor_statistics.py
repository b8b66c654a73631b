"""Count a tensor's values as they are written: NaN, infinities, zeros, extremes, norm.

A merge reads every byte anyway, and the counts show a training that diverged or a shard that was
never filled in.  Counts, least and greatest values are exact.  A sum of squares is added up in
float32 over a few thousand values, then in float64: a norm is right to about six digits, and its
last ones differ between processors.  Values that are no plain numbers, or so small or large that
float32 cannot hold their squares, are counted and added up in float64.  Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import add

import numpy as np

from ckptsync.merger.cast import FLOATS, RAW, Array

INTEGERS = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
}
_HALVES = {"BF16": 0x7F80, "F16": 0x7C00}  # types of 16 bits: the bits of infinity
_FP8 = {  # bits of the mantissa, bias of the exponent, the code of infinity and of the first NaN
    "F8_E5M2": (2, 15, 0x7C, 0x7D),
    "F8_E4M3": (3, 7, 0x7F, 0x7F),
    "F8_E5M2FNUZ": (2, 16, 0x80, 0x80),
    "F8_E4M3FNUZ": (3, 8, 0x80, 0x80),
}
Number = float  # or int, which is kept as it is
_PIECE = 128 << 10  # elements whose wider copies stay in the cache
_BLOCK = 8 << 10  # values whose squares are added up in float32; BLAS uses no threads for them
_TINY = 1e-24  # a sum of squares above it lost nothing to float32's smallest number
RUN = 64  # zeros in a row that are not there by chance
BAND = 1 / 64  # of a tensor: so many zeros in such runs are worth a word


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of ``count`` elements.

    ``low`` and ``high`` are of the finite ones, None if there are none; ``squares`` is the sum of
    their squares, of floating types; ``banded`` counts zeros in runs of at least `RUN`.
    """

    count: int = 0
    low: Number | None = None
    high: Number | None = None
    squares: float | None = None
    nans: int = 0
    infinities: int = 0
    zeros: int = 0
    banded: int = 0

    @property
    def norm(self) -> float | None:
        """L2, of the finite elements of a floating type."""
        return None if self.squares is None else math.sqrt(self.squares)

    def __add__(self, statistics: Statistics) -> Statistics:
        if not self.count:
            return statistics
        return Statistics(
            self.count + statistics.count,
            _choose(min, self.low, statistics.low),
            _choose(max, self.high, statistics.high),
            _choose(add, self.squares, statistics.squares),
            self.nans + statistics.nans,
            self.infinities + statistics.infinities,
            self.zeros + statistics.zeros,
            self.banded + statistics.banded,
        )


def has_statistics(dtype: str) -> bool:
    """Return whether elements of this type can be counted and compared: all but complex numbers."""
    return dtype in _HALVES or dtype in FLOATS or dtype in INTEGERS or dtype in _CODES


def count_values(data: memoryview, dtype: str) -> Statistics | None:
    """Return the statistics of the elements in these bytes, or None if their type has none."""
    if not has_statistics(dtype):
        return None
    if dtype in _CODES:
        return _count_codes(np.frombuffer(data, "u1"), _CODES[dtype])
    is_half, is_integer = dtype in _HALVES, dtype in INTEGERS
    raw: Array = np.frombuffer(
        data, RAW[2] if is_half else np.dtype(INTEGERS[dtype]) if is_integer else FLOATS[dtype]
    )
    scratch: Array = np.empty(min(len(raw), _PIECE) // 2 if is_half else 0, "<u4")
    total = Statistics()
    with np.errstate(all="ignore"):  # what is no plain number is counted
        for start in range(0, len(raw), _PIECE):
            piece = raw[start : start + _PIECE]
            counted = None
            if is_half:
                counted = _count_plain_halves(piece, dtype, scratch)
            elif dtype == "F32":
                counted = _count_plain_floats(piece)
            elif is_integer:
                counted = _count_integers(piece)
            total += counted or _count_any(_widen(piece, dtype))
    return total


def exact_values(data: Array, dtype: str) -> Array:
    """Return the elements in these bytes as values of a numpy type that holds each exactly."""
    if dtype in _CODES:
        values: Array = _CODES[dtype][data]
        return values
    if dtype == "BOOL":
        return data
    if dtype in INTEGERS:
        return data.view(INTEGERS[dtype])
    if dtype in _HALVES:
        return _widen(data.view(RAW[2]), dtype)
    return data.view(FLOATS.get(dtype, "<c8"))


def notes_on_values(name: str, values: Statistics) -> Iterable[str]:
    """Yield a note if all values are zero, or more than `BAND` of them are zeros in long runs."""
    if values.count > 1 and values.zeros == values.count:
        yield f"{name}: all {values.count} values are zero"
    elif values.banded > BAND * values.count:
        yield (
            f"{name}: {values.banded} of {values.count} values are zeros in long runs, as a missing"
            " shard leaves them"
        )


def _count_integers(values: Array) -> Statistics:
    """Return the statistics of integers, at least one."""
    low, high = values.min().item(), values.max().item()
    return Statistics(len(values), low, high, None, 0, 0, *_count_zeros(values == 0))


def _count_zeros(is_zero: Array) -> tuple[int, int]:
    """Return how many zeros there are, and how many of them are in runs of at least `RUN`."""
    zeros = int(np.count_nonzero(is_zero))
    return zeros, _count_in_runs(is_zero) if zeros >= RUN else 0


def _widen(piece: Array, dtype: str) -> Array:
    """Return raw bits of a floating type as values that numpy can compute with."""
    values: Array
    if dtype == "BF16":
        values = (piece.astype("<u4") << 16).view("<f4")
    else:
        values = piece.view(FLOATS[dtype])
    return values


def _count_any(values: Array) -> Statistics:
    """Return the statistics of any floating values; extremes are None without finite ones."""
    finite = np.isfinite(values)
    finite_values = values if finite.all() else values[finite]
    nans = int(np.count_nonzero(np.isnan(values))) if len(finite_values) < len(values) else 0
    low, high = (
        (finite_values.min().item(), finite_values.max().item())
        if len(finite_values)
        else (None, None)
    )
    squares = float(np.square(finite_values.astype("<f8")).sum())  # of float64 it may be infinite
    infinities = len(values) - len(finite_values) - nans
    zeros = _count_zeros(values == 0)
    return Statistics(len(values), low, high, squares, nans, infinities, *zeros)


def _count_plain_floats(values: Array) -> Statistics | None:
    """Return the statistics of float32; None for NaN, infinities or squares below `_TINY`."""
    squares = _squares(values)
    if not _TINY <= squares < math.inf:
        return None
    low, high = values.min().item(), values.max().item()
    zeros = _count_zeros(values == 0) if low <= 0 <= high else (0, 0)
    return Statistics(len(values), low, high, squares, 0, 0, *zeros)


def _count_plain_halves(bits: Array, dtype: str, scratch: Array) -> Statistics | None:
    """Return the statistics of 16-bit values; None for NaN, infinities or squares below `_TINY`.

    ``bits``, at least one, are a sign and a magnitude, and so ordered: integers are compared,
    which is fast.  ``scratch``: memory for half as many integers of 32 bits.
    """
    infinity, signed = _HALVES[dtype], bits.view("<i2")
    # the greatest value if any is positive, the least one if any is negative
    greatest_bits, least_bits = int(signed.max()), int(bits.max())
    if greatest_bits >= infinity or least_bits >= 0x8000 | infinity:
        return None
    even = len(bits) & ~1
    pairs: Array = bits[:even].view("<u4")
    words, last = scratch[: len(pairs)], _widen(bits[even:], dtype).astype("<f8")
    squares = float(last.dot(last))
    for shift in (0, 16):  # each half of the pairs
        squares += _squares(_every_other(pairs, shift, dtype, words))
    if not _TINY <= squares < math.inf:
        return None
    # the positive one next to zero, if there are any, and the negative one
    positive, negative = int(bits.min()), int(signed.min()) & 0xFFFF
    zeros = (0, 0)
    if positive == 0 or negative == 0x8000:
        zeros = _count_zeros((bits & 0x7FFF) == 0)
    ends = [
        least_bits if least_bits >= 0x8000 else positive,
        greatest_bits if greatest_bits >= 0 else negative,
    ]
    low, high = _widen(np.array(ends, "<u2"), dtype).tolist()
    return Statistics(len(bits), low, high, squares, 0, 0, *zeros)


def _every_other(pairs: Array, shift: int, dtype: str, out: Array) -> Array:
    """Return the low (``shift`` 0) or high (16) halves as float32, in ``out``; F16 without sign."""
    if dtype == "BF16":
        if shift:
            np.bitwise_and(pairs, 0xFFFF0000, out=out)
        else:
            np.left_shift(pairs, 16, out=out)
        return out.view("<f4")
    if shift:
        np.right_shift(pairs, 3, out=out)
        np.bitwise_and(out, 0x7FFF << 13, out=out)
    else:
        np.bitwise_and(pairs, 0x7FFF, out=out)
        np.left_shift(out, 13, out=out)
    values: Array = out.view("<f4")
    # float32's exponent counts from 127, F16's from 15: exact, also of F16's denormals
    np.multiply(values, np.float32(2.0**112), out=values)
    return values


def _squares(values: Array) -> float:
    """Return the sum of squares of float32; NaN or infinite unless all squares are finite."""
    even = len(values) - len(values) % _BLOCK
    blocks, tail = values[:even].reshape(-1, 1, _BLOCK), values[even:]
    total = float(np.dot(tail, tail))
    if even:
        total += float(np.matmul(blocks, blocks.transpose(0, 2, 1)).sum(dtype="<f8"))
    return total


def _code_values(mantissa: int, bias: int, infinity: int, nan: int) -> Array:
    """Return the value of each code of a type of 8 bits, as float64.

    ``mantissa``: its bits; ``infinity`` and ``nan``: codes without sign, or 0x80 for FNUZ's NaN.
    """
    codes = np.arange(256)
    magnitude = codes & 0x7F
    exponent, fraction = magnitude >> mantissa, magnitude & ((1 << mantissa) - 1)
    whole = np.where(exponent > 0, 1 << mantissa, 0) + fraction
    values: Array = np.ldexp(whole.astype("<f8"), np.maximum(exponent, 1) - bias - mantissa)
    values[magnitude == infinity] = math.inf
    values[magnitude >= nan] = math.nan
    values[0x80:] *= -1
    if nan == 0x80:  # FNUZ: where others have minus zero, and there is no infinity
        values[nan] = math.nan
    return values


_CODES: dict[str, Array] = {name: _code_values(*shape) for name, shape in _FP8.items()}
_CODES["F8_E8M0"] = np.append(np.ldexp(1.0, np.arange(255) - 127), math.nan)


def _count_codes(raw: Array, values: Array) -> Statistics:
    """Return the statistics of 8-bit codes, whose values are in ``values``."""
    counts: Array = np.zeros(256, "<i8")
    banded = 0
    for start in range(0, len(raw), _PIECE):
        piece = raw[start : start + _PIECE]
        counts += np.bincount(piece, minlength=256)
        banded += _count_zeros(values[piece] == 0)[1] if counts[values == 0].sum() >= RUN else 0
    is_counted = np.isfinite(values) & (counts > 0)
    counted_values = values[is_counted]
    return Statistics(
        len(raw),
        counted_values.min().item() if len(counted_values) else None,
        counted_values.max().item() if len(counted_values) else None,
        float((np.square(counted_values) * counts[is_counted]).sum()) if len(raw) else None,
        int(counts[np.isnan(values)].sum()),
        int(counts[np.isinf(values)].sum()),
        int(counts[values == 0].sum()),
        banded,
    )


def _count_in_runs(is_zero: Array) -> int:
    """Return how many zeros are in runs of at least `RUN`."""
    edges = np.flatnonzero(np.diff(is_zero, prepend=False, append=False))
    lengths = edges[1::2] - edges[::2]
    return int(lengths[lengths >= RUN].sum())


def _choose(
    choose: Callable[[Number, Number], Number], first: Number | None, second: Number | None
) -> Number | None:
    """Return ``choose`` of two numbers, or the one that is not None."""
    return second if first is None else first if second is None else choose(first, second)
