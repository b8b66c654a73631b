"""Which values are not finite, told by their bits: numpy has no BF16 and no fp8, and this costs no conversion.

Pure.  IEEE types and BF16: all exponent bits are set.  The OCP fp8 types: E5M2 as IEEE, E4M3 has one NaN for each sign and no
infinity, E8M0 one NaN; the FNUZ types use what would be minus zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_CHUNK = 4 << 20

# dtype → unsigned integer of its width, mask, and what is left of a value that is not finite
_TESTS: dict[str, tuple[Any, int, int]] = {
    "F16": (np.uint16, 0x7C00, 0x7C00),
    "BF16": (np.uint16, 0x7F80, 0x7F80),
    "F32": (np.uint32, 0x7F800000, 0x7F800000),
    "C64": (np.uint32, 0x7F800000, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000, 0x7FF0000000000000),
    "F8_E5M2": (np.uint8, 0x7C, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),
    "F8_E5M2FNUZ": (np.uint8, 0xFF, 0x80),
    "F8_E4M3FNUZ": (np.uint8, 0xFF, 0x80),
}


def nonfinite(dtype: str, data: npt.NDArray[np.uint8]) -> int:
    """How many values in ``data``, contiguous bytes of ``dtype``, are NaN or infinite; of a complex number each part counts.

    Reads every byte, also where the type has no such values, so that a mapped file was really there.
    """
    kind, mask, pattern = _TESTS.get(dtype, (np.uint8, 0, 1))
    found = 0
    for at in range(0, data.size, _CHUNK):
        values = data[at : at + _CHUNK].view(kind)
        found += int(np.count_nonzero((values & kind(mask)) == kind(pattern)))
    return found
