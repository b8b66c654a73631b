"""Cast between floating element types as torch does: to nearest, ties to even; NaN stays NaN.

A merge must give the same bits as `Tensor.to`, without torch.  bf16 has no numpy type, so its bits
travel as ``uint16``.  The usual trick of adding half a unit and shifting turns some NaNs into
zeros, infinities and numbers; they are cast separately.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckptsync.formats.dtypes import ITEMSIZE

Array = npt.NDArray[Any]

RAW: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
FLOATS: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
# of fewer, threads wait for each other between numpy's calls; more leave the cache
CAST_ELEMENTS = 256 << 10
_LARGEST = {
    "F16": 65504.0,
    "BF16": float.fromhex("0x1.fep127"),
    "F32": float.fromhex("0x1.fffffep127"),
    "F64": float.fromhex("0x1.fffffffffffffp1023"),
}


def cast(values: Array, source: str, target: str) -> tuple[Array, int]:
    """Return bits cast to ``target``, and how many became infinite; ``values`` for equal types."""
    if source == target:
        return values, 0
    out: Array = np.empty(len(values), RAW[ITEMSIZE[target]])
    return out, cast_to(out, values, source, target, np.empty(len(values), "<u4"))


def cast_to(out: Array, values: Array, source: str, target: str, scratch: Array) -> int:
    """Cast raw bits into ``out``; return how many finite values became infinite.

    ``scratch`` is memory for 4 bytes a value, which is overwritten.  float64 is rounded to float32
    first, as torch does.
    """
    if not len(values):
        return 0
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if source != "BF16":
            wide = values.view(FLOATS[source])
        else:
            bits = out if target == "F32" else scratch
            np.copyto(bits, values)
            np.left_shift(bits, 16, out=bits)
            wide = bits.view("<f4")
            if target == "F32":
                return 0
        # whether all are numbers that stay finite; never of a NaN, which `min` hands on
        is_plain = -_LARGEST[target] <= float(wide.min()) and float(wide.max()) <= _LARGEST[target]
        # as torch: a float64 is rounded twice
        single = wide if wide.dtype.itemsize == 4 else wide.astype("<f4")
        if target == "BF16":
            round_to_bf16(single, out, scratch, is_plain=is_plain)
        else:
            np.copyto(out.view(FLOATS[target]), single, casting="same_kind")
        if is_plain:
            return 0
        infinite = (
            (out & 0x7FFF) == 0x7F80 if target == "BF16" else np.isinf(out.view(FLOATS[target]))
        )
        return int(np.count_nonzero(infinite & np.isfinite(wide)))


def round_to_bf16(single: Array, out: Array, scratch: Array, *, is_plain: bool) -> None:
    """Round float32 into ``out`` as bits of bf16; ``is_plain``: there is no NaN.

    ``scratch``: as many integers of 32 bits.
    """
    bits = single.view("<u4")
    np.right_shift(bits, 16, out=scratch)
    np.bitwise_and(scratch, 1, out=scratch)
    np.add(scratch, 0x7FFF, out=scratch)
    np.add(scratch, bits, out=scratch)
    np.right_shift(scratch, 16, out=scratch)
    np.copyto(out, scratch, casting="unsafe")
    # sign and upper payload stay, and the quiet bit; torch gives 0x7FC0 or 0xFFFF, by the CPU
    if not is_plain:
        nan = np.isnan(single)
        out[nan] = (bits[nan] >> 16).astype("<u2") | 0x40


def cast_bytes(raw: memoryview, out: memoryview, source: str, target: str, scratch: Array) -> int:
    """Cast stored bytes into the beginning of ``out``; return how many finite became infinite.

    ``scratch`` has 4 bytes for each of `CAST_ELEMENTS` elements, and is overwritten.
    """
    if source == target:
        out[: len(raw)] = raw
        return 0
    values: Array = np.frombuffer(raw, RAW[ITEMSIZE[source]])
    narrow: Array = np.frombuffer(out, RAW[ITEMSIZE[target]], len(values))
    overflows = 0
    for start in range(0, len(values), CAST_ELEMENTS):
        piece = values[start : start + CAST_ELEMENTS]
        overflows += cast_to(
            narrow[start : start + CAST_ELEMENTS], piece, source, target, scratch[: len(piece)]
        )
    return overflows
