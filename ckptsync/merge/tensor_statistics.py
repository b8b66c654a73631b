"""Statistics of a tensor's values as they are written, gathered unit by unit.  Pure.

Sums are float64 and added in the order of the units, which depend on the plan alone: the same
model has the same statistics.
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
Number = float  # or int, which is kept as it is
_PIECE = 128 << 10  # elements whose wider copies stay in the cache
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
    """Return whether elements of this type can be counted and compared here.

    In numpy, fp8 and complex numbers cannot.
    """
    return dtype == "BF16" or dtype in FLOATS or dtype in _INTEGERS


def statistics(data: memoryview, dtype: str) -> Statistics | None:
    """Return the statistics of the elements in these bytes, or None if their type has none."""
    if not has_statistics(dtype):
        return None
    raw: Array = np.frombuffer(
        data, RAW[2] if dtype == "BF16" else FLOATS.get(dtype) or np.dtype(_INTEGERS[dtype])
    )
    total = Statistics()
    for at in range(0, len(raw), _PIECE):
        piece = raw[at : at + _PIECE]
        values = (piece.astype("<u4") << 16).view("<f4") if dtype == "BF16" else piece
        total += _extremes(values) if dtype in _INTEGERS else _of_floats(values)
        is_zero = values == 0
        count = int(np.count_nonzero(is_zero))
        total += Statistics(
            len(values), zeros=count, banded=_banded(is_zero) if count >= RUN else 0
        )
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


def _of_floats(values: Array) -> Statistics:
    finite = np.isfinite(values)
    kept = values if finite.all() else values[finite]
    nans = int(np.count_nonzero(np.isnan(values))) if len(kept) < len(values) else 0
    wide = kept.astype("<f8")
    with np.errstate(over="ignore"):  # a float64's square may be infinite, and then the norm is
        squares = float(np.square(wide).sum())
    return replace(
        _extremes(kept), squares=squares, nans=nans, infinities=len(values) - len(kept) - nans
    )


def _banded(is_zero: Array) -> int:
    """Return how many zeros are in runs of at least `RUN`."""
    edges = np.flatnonzero(np.diff(is_zero, prepend=False, append=False))
    lengths = edges[1::2] - edges[::2]
    return int(lengths[lengths >= RUN].sum())


def _combine(choose: Callable[[Iterable[Number]], Number], *found: Number | None) -> Number | None:
    there = [n for n in found if n is not None]
    return choose(there) if there else None
