"""Casts between floating element types, on numpy arrays, as torch does them: round to nearest, ties to even; NaN stays NaN.

bf16 has no numpy type, so its bits travel as ``uint16``.  The usual trick of adding half a unit and shifting turns some NaNs into zeros,
infinities and numbers; they are set apart here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

RAW: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
FLOATS: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8")}
PRECISION = {"BF16": 1, "F16": 2, "F32": 3, "F64": 4}  # which of two stored copies is the more precise


def is_castable(dtype: str) -> bool:
    """Integers, bools, fp8 and complex numbers are never cast."""
    return dtype in PRECISION


def cast(values: Array, source: str, target: str) -> tuple[Array, int]:
    """``values`` (raw bits of ``source``) as raw bits of ``target``, and how many finite ones became infinite."""
    if source == target:
        return values, 0
    wide = _widen(values, source)
    single = wide if wide.dtype.itemsize == 4 else _to_float(wide, "F32").view("<f4")  # as torch: a float64 is rounded twice
    narrow = _to_bf16(single) if target == "BF16" else _to_float(single, target)
    return narrow, _overflowed(wide, narrow, target)


def _widen(values: Array, source: str) -> Array:
    if source == "BF16":
        return (values.astype("<u4") << 16).view("<f4")
    return values.view(FLOATS[source])


def _to_float(wide: Array, target: str) -> Array:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return wide.astype(FLOATS[target]).view(RAW[FLOATS[target].itemsize])


def _to_bf16(wide: Array) -> Array:
    bits = np.ascontiguousarray(wide).view("<u4")
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    narrow = rounded.astype("<u2")
    nan = np.isnan(wide)
    if nan.any():  # sign and upper payload stay, and the quiet bit; torch gives 0x7FC0 or 0xFFFF, by the vector unit it finds
        narrow[nan] = (bits[nan] >> 16).astype("<u2") | 0x40
    return narrow


def _overflowed(wide: Array, narrow: Array, target: str) -> int:
    """Only a cast to a smaller range can overflow; counting costs a pass, so the common case is settled by one comparison."""
    if target not in ("F16", "BF16", "F32"):
        return 0
    infinite = (narrow & 0x7FFF) == 0x7F80 if target == "BF16" else np.isinf(narrow.view(FLOATS[target]))
    return int(np.count_nonzero(infinite & np.isfinite(wide))) if infinite.any() else 0
