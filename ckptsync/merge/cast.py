"""Casts between floating element types, on numpy arrays, as torch does them: round to nearest, ties to even; NaN stays NaN.

bf16 has no numpy type, so its bits travel as ``uint16``.  The usual trick of adding half a unit and shifting turns some NaNs into zeros,
infinities and numbers; they are set apart here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckptsync.formats.dtypes import ITEMSIZE

Array = npt.NDArray[Any]

RAW: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
FLOATS: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8")}
_LARGEST = {
    "F16": 65504.0,
    "BF16": float.fromhex("0x1.fep127"),
    "F32": float.fromhex("0x1.fffffep127"),
    "F64": float.fromhex("0x1.fffffffffffffp1023"),
}


def cast(values: Array, source: str, target: str) -> tuple[Array, int]:
    """``values`` (raw bits of ``source``) as raw bits of ``target``, and how many finite ones became infinite."""
    if source == target:
        return values, 0
    out: Array = np.empty(len(values), RAW[ITEMSIZE[target]])
    return out, cast_to(out, values, source, target, np.empty(len(values), "<u4"))


def cast_to(out: Array, values: Array, source: str, target: str, scratch: Array) -> int:
    """The same for two types that differ, into ``out``; ``scratch`` is memory for 4 bytes a value.

    Every pass over the values counts: nothing is allocated in the usual cases, and what is seldom is looked for by its size alone.
    """
    if not len(values):
        return 0
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if target == "F32" and source == "BF16":
            _widen(values, out)
            return 0
        wide = _widen(values, scratch) if source == "BF16" else values.view(FLOATS[source])
        is_plain = _is_within(wide, _LARGEST[target])
        single = wide if wide.dtype.itemsize == 4 else wide.astype("<f4")  # as torch: a float64 is rounded twice
        if target == "BF16":
            _round_to_bf16(single, out, scratch, is_plain=is_plain)
        else:
            np.copyto(out.view(FLOATS[target]), single, casting="same_kind")
        return 0 if is_plain else _overflowed(wide, out, target)


def _widen(values: Array, out: Array) -> Array:
    np.copyto(out, values)
    np.left_shift(out, 16, out=out)
    return out.view("<f4")


def _is_within(wide: Array, largest: float) -> bool:
    """Whether all are numbers that stay finite; never of a NaN, which `min` hands on."""
    return -largest <= float(wide.min()) and float(wide.max()) <= largest


def _round_to_bf16(single: Array, out: Array, scratch: Array, *, is_plain: bool) -> None:
    bits = single.view("<u4")
    np.right_shift(bits, 16, out=scratch)
    np.bitwise_and(scratch, 1, out=scratch)
    np.add(scratch, 0x7FFF, out=scratch)
    np.add(scratch, bits, out=scratch)
    np.right_shift(scratch, 16, out=scratch)
    np.copyto(out, scratch, casting="unsafe")
    if not is_plain:  # sign and upper payload stay, and the quiet bit; torch gives 0x7FC0 or 0xFFFF, by the vector unit it finds
        nan = np.isnan(single)
        out[nan] = (bits[nan] >> 16).astype("<u2") | 0x40


def _overflowed(wide: Array, narrow: Array, target: str) -> int:
    infinite = (narrow & 0x7FFF) == 0x7F80 if target == "BF16" else np.isinf(narrow.view(FLOATS[target]))
    return int(np.count_nonzero(infinite & np.isfinite(wide)))
