"""Values that are not finite, told by their bits, against the libraries that know the types."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptsync.verify.bits import nonfinite

TYPES = {
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
}


@pytest.mark.parametrize("dtype", TYPES)
def test_every_pattern_of_the_small_types_is_judged_as_the_library_judges_it(dtype: str) -> None:
    width = np.dtype(TYPES[dtype]).itemsize
    patterns = np.arange(256**width, dtype=np.uint8 if width == 1 else np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = ~np.isfinite(patterns.view(TYPES[dtype]).astype(np.float64))
    assert nonfinite(dtype, patterns.view(np.uint8)) == int(expected.sum()) > 0
    found = [nonfinite(dtype, p.view(np.uint8)) for p in patterns[:: 97 if width == 2 else 1].reshape(-1, 1)]
    assert found == expected[:: 97 if width == 2 else 1].tolist()


@pytest.mark.parametrize(("dtype", "kind"), [("F32", np.float32), ("F64", np.float64), ("C64", np.complex64)])
def test_large_types_count_nan_and_both_infinities(dtype: str, kind: type) -> None:
    values: Any = np.array([0.0, -0.0, 1e-45, np.nan, -np.nan, np.inf, -np.inf, np.finfo(np.float32).max], kind)
    assert nonfinite(dtype, values.view(np.uint8)) == 4


def test_both_parts_of_a_complex_number_count() -> None:
    assert nonfinite("C64", np.array([complex(np.nan, np.inf)], np.complex64).view(np.uint8)) == 2


@pytest.mark.parametrize("dtype", ["I8", "U64", "BOOL", "F4"])
def test_types_without_such_values_have_none(dtype: str) -> None:
    assert nonfinite(dtype, np.full(64, 0xFF, np.uint8)) == 0


def test_a_value_in_the_last_of_several_chunks_is_found() -> None:
    values = np.frombuffer(bytearray(9 << 20), np.float32)
    values[-1] = np.nan
    assert nonfinite("F32", values.view(np.uint8)) == 1
