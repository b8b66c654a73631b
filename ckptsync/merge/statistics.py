"""Statistics of a tensor's values as they are written, gathered block by block.  Pure.

Sums are float64 and added in the order of the blocks, which depend on the plan alone: the same model has the same statistics.
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
    """Of ``count`` elements.

    ``low`` and ``high`` are of the finite ones, None if there are none; ``squares`` is the sum of their squares, of floating types;
    ``banded`` counts zeros in runs of at least `RUN`.
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
            _chosen(min, self.low, other.low),
            _chosen(max, self.high, other.high),
            _chosen(sum, self.squares, other.squares),
            self.nans + other.nans,
            self.infinities + other.infinities,
            self.zeros + other.zeros,
            self.banded + other.banded,
        )


def is_told(dtype: str) -> bool:
    """Whether elements of this type have an order and a size here: fp8 and complex numbers have neither in numpy."""
    return is_floating(dtype) or dtype in _INTEGERS


def is_floating(dtype: str) -> bool:
    """Types that have a norm, NaNs and infinities."""
    return dtype == "BF16" or dtype in FLOATS


def statistics(data: memoryview, dtype: str) -> Statistics | None:
    """Of the elements whose bytes these are; None if the type has none."""
    if not is_told(dtype):
        return None
    raw: Array = np.frombuffer(data, RAW[2] if dtype == "BF16" else FLOATS.get(dtype) or np.dtype(_INTEGERS[dtype]))
    total = Statistics()
    for at in range(0, len(raw), _PIECE):
        total += _of_piece(raw[at : at + _PIECE], dtype)
    return total


def remarks(name: str, found: Statistics) -> Iterable[str]:
    """What hints at a shard that was never filled in."""
    if found.count > 1 and found.zeros == found.count:
        yield f"{name}: all {found.count} values are zero"
    elif found.banded > BAND * found.count:
        yield f"{name}: {found.banded} of {found.count} values are zeros in long runs, as a missing shard leaves them"


def _of_piece(raw: Array, dtype: str) -> Statistics:
    values = (raw.astype("<u4") << 16).view("<f4") if dtype == "BF16" else raw
    zeros = values == 0
    count = int(np.count_nonzero(zeros))
    found = _extremes(values) if not is_floating(dtype) else _of_floats(values)
    return replace(found, count=len(values), zeros=count, banded=_banded(zeros) if count >= RUN else 0)


def _of_floats(values: Array) -> Statistics:
    finite = np.isfinite(values)
    if finite.all():
        return _measured(values)
    nans = int(np.count_nonzero(np.isnan(values)))
    kept = values[finite]
    return replace(_measured(kept), nans=nans, infinities=len(values) - len(kept) - nans)


def _measured(values: Array) -> Statistics:
    wide = values.astype("<f8")
    with np.errstate(over="ignore"):  # a float64's square may be infinite, and then the norm is
        return replace(_extremes(values), squares=float(np.square(wide).sum()))


def _extremes(values: Array) -> Statistics:
    return Statistics(low=values.min().item(), high=values.max().item()) if len(values) else Statistics()


def _banded(zeros: Array) -> int:
    edges = np.flatnonzero(np.diff(zeros, prepend=False, append=False))
    lengths = edges[1::2] - edges[::2]
    return int(lengths[lengths >= RUN].sum())


def _chosen(choose: Callable[[Iterable[Number]], Number], *found: Number | None) -> Number | None:
    there = [n for n in found if n is not None]
    return choose(there) if there else None
