"""Statistics of a tensor's values as they are written, gathered unit by unit.  Pure.

Counts, least and greatest values are exact.  A sum of squares is added up in float32 over a few
thousand values, then in float64: a norm is right to about six digits, and its last ones differ
between processors.  Values that are no plain numbers, or so small or large that float32 cannot hold
their squares, are counted and added up in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from ckptsync.merge.cast import FLOATS, RAW, Array

_INTEGERS = {
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

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.count + other.count,
            _combine(min, self.low, other.low),
            _combine(max, self.high, other.high),
            _combine(sum, self.squares, other.squares),
            self.nans + other.nans,
            self.infinities + other.infinities,
            self.zeros + other.zeros,
            self.banded + other.banded,
        )


def has_statistics(dtype: str) -> bool:
    """Return whether elements of this type can be counted and compared: all but complex numbers."""
    return dtype in _HALVES or dtype in FLOATS or dtype in _INTEGERS or dtype in _CODES


def statistics(data: memoryview, dtype: str) -> Statistics | None:
    """Return the statistics of the elements in these bytes, or None if their type has none."""
    if not has_statistics(dtype):
        return None
    if dtype in _CODES:
        return _of_codes(np.frombuffer(data, "u1"), _CODES[dtype])
    is_half, is_integer = dtype in _HALVES, dtype in _INTEGERS
    raw: Array = np.frombuffer(
        data, RAW[2] if is_half else np.dtype(_INTEGERS[dtype]) if is_integer else FLOATS[dtype]
    )
    scratch: Array = np.empty(min(len(raw), _PIECE) // 2 + 1 if is_half else 0, "<u4")
    total = Statistics()
    for at in range(0, len(raw), _PIECE):
        piece = raw[at : at + _PIECE]
        plain = None
        if is_half:
            plain = _of_plain_halves(piece, dtype, scratch)
        elif dtype == "F32":
            plain = _of_plain_floats(piece)
        elif is_integer:
            plain = _extremes(piece), piece == 0
        total += _with_zeros(*(plain or _of_any(_widened(piece, dtype))))
    return total


def remarks(name: str, found: Statistics) -> Iterable[str]:
    """Yield notes on a tensor that hint at a shard that was never filled in."""
    if found.count > 1 and found.zeros == found.count:
        yield f"{name}: all {found.count} values are zero"
    elif found.banded > BAND * found.count:
        yield (
            f"{name}: {found.banded} of {found.count} values are zeros in long runs, as a missing"
            " shard leaves them"
        )


def _extremes(values: Array) -> Statistics:
    return (
        Statistics(low=values.min().item(), high=values.max().item())
        if len(values)
        else Statistics()
    )


def _with_zeros(its: Statistics, is_zero: Array) -> Statistics:
    zeros = int(np.count_nonzero(is_zero))
    banded = _banded(is_zero) if zeros >= RUN else 0
    return replace(its, count=len(is_zero), zeros=zeros, banded=banded)


def _widened(piece: Array, dtype: str) -> Array:
    return (piece.astype("<u4") << 16).view("<f4") if dtype == "BF16" else piece.view(FLOATS[dtype])


def _of_any(values: Array) -> tuple[Statistics, Array]:
    """Return the statistics of any values, and which of them are zero."""
    finite = np.isfinite(values)
    kept = values if finite.all() else values[finite]
    nans = int(np.count_nonzero(np.isnan(values))) if len(kept) < len(values) else 0
    wide = kept.astype("<f8")
    with np.errstate(over="ignore"):  # a float64's square may be infinite, and then the norm is
        squares = float(np.square(wide).sum())
    infinities = len(values) - len(kept) - nans
    return (
        replace(_extremes(kept), squares=squares, nans=nans, infinities=infinities),
        values == 0,
    )


def _of_plain_floats(values: Array) -> tuple[Statistics, Array] | None:
    """Return the same of float32; None unless `_squares` shows that they are plain numbers."""
    squares = _squares(values)
    if not _TINY <= squares < math.inf:
        return None
    return Statistics(0, values.min().item(), values.max().item(), squares), values == 0


def _of_plain_halves(
    bits: Array, dtype: str, scratch: Array
) -> tuple[Statistics, Array] | None:
    """Return the same of values of 16 bits; None unless they are plain numbers.

    Their bits are a sign and a magnitude, and so ordered: integers are compared, which is fast.
    ``scratch``: memory for half as many integers of 32 bits, and one more.
    """
    infinity, signed = _HALVES[dtype], bits.view("<i2")
    high, low = int(signed.max()), int(bits.max())
    if high >= infinity or low >= 0x8000 | infinity:
        return None
    even = len(bits) & ~1
    pairs: Array = bits[:even].view("<u4")
    words = scratch[: len(pairs)]
    squares = _widened(bits[even:], dtype).astype("<f8").dot(_widened(bits[even:], dtype))
    for shift in (0, 16):  # each half of the pairs
        squares += _squares(_half_of(pairs, shift, dtype, words))
    if not _TINY <= squares < math.inf:
        return None
    if high < 0 or low < 0x8000:  # all of one sign: the least magnitude is the other end
        least = int(bits.min())
        high, low = (least, low) if high < 0 else (high, least)
    is_zero = bits == 0
    if signed.min() == -0x8000:  # minus zero
        is_zero |= bits == 0x8000
    ends = _widened(np.array([low, high], "<u2"), dtype)
    return Statistics(0, ends[0].item(), ends[1].item(), float(squares)), is_zero


def _half_of(pairs: Array, shift: int, dtype: str, out: Array) -> Array:
    """Return every other value of 16 bits as float32, in ``out``; of F16 without its sign."""
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
    return np.multiply(values, np.float32(2.0**112), out=values)


def _squares(values: Array) -> float:
    """Return the sum of squares: NaN or infinite unless all are numbers whose squares are few."""
    even = len(values) - len(values) % _BLOCK
    blocks, rest = values[:even].reshape(-1, 1, _BLOCK), values[even:]
    with np.errstate(all="ignore"):
        total = float(np.dot(rest, rest))
        if even:
            total += float(np.matmul(blocks, blocks.transpose(0, 2, 1)).sum(dtype="<f8"))
    return total


def _code_values(mantissa: int, bias: int, infinity: int, nan: int) -> Array:
    """Return the value of each code of a type of 8 bits."""
    codes = np.arange(256)
    magnitude = codes & 0x7F
    exponent, fraction = magnitude >> mantissa, magnitude & ((1 << mantissa) - 1)
    whole = np.where(exponent > 0, 1 << mantissa, 0) + fraction
    values = np.ldexp(whole.astype("<f8"), np.maximum(exponent, 1) - bias - mantissa)
    if nan == 0x80:  # FNUZ: no minus zero, and no other NaN
        values[nan] = math.nan
    else:
        values[magnitude == infinity] = math.inf
        values[magnitude >= nan] = math.nan
    return np.where(codes > 0x7F, -values, values)


_CODES: dict[str, Array] = {name: _code_values(*shape) for name, shape in _FP8.items()}
_CODES["F8_E8M0"] = np.append(np.ldexp(1.0, np.arange(255) - 127), math.nan)


def _of_codes(raw: Array, values: Array) -> Statistics:
    """Return the statistics of codes of 8 bits by their counts."""
    counts: Array = np.zeros(256, "<i8")
    total = Statistics()
    for at in range(0, len(raw), _PIECE):
        counts += np.bincount(raw[at : at + _PIECE], minlength=256)
        if counts[values == 0].sum() >= RUN:
            total += Statistics(banded=_banded(values[raw[at : at + _PIECE]] == 0))
    kept = np.isfinite(values) & (counts > 0)
    return replace(
        _extremes(values[kept]),
        count=len(raw),
        banded=total.banded,
        squares=float((np.square(values[kept]) * counts[kept]).sum()) if len(raw) else None,
        nans=int(counts[np.isnan(values)].sum()),
        infinities=int(counts[np.isinf(values)].sum()),
        zeros=int(counts[values == 0].sum()),
    )


def _banded(is_zero: Array) -> int:
    """Return how many zeros are in runs of at least `RUN`."""
    edges = np.flatnonzero(np.diff(is_zero, prepend=False, append=False))
    lengths = edges[1::2] - edges[::2]
    return int(lengths[lengths >= RUN].sum())


def _combine(choose: Callable[[Iterable[Number]], Number], *found: Number | None) -> Number | None:
    there = [n for n in found if n is not None]
    return choose(there) if there else None
