"""Statistics: as numpy and torch's own types count them, however the values are cut."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.merger import tensor_statistics as module
from ckptsync.merger.tensor_statistics import Statistics, count_values, notes_on_values

TYPES = {
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "BF16": ml_dtypes.bfloat16,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
}
INTEGERS = {"I64": "<i8", "U8": "u1", "I16": "<i2", "U64": "<u8", "BOOL": "?"}


def of(values: Any, dtype: str) -> Statistics:
    found = count_values(memoryview(np.ascontiguousarray(values).view("u1").data), dtype)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", TYPES)
@given(raw=st.binary(max_size=800))
def test_any_bits_of_a_floating_type_are_counted_as_numpy_counts_them(
    dtype: str, raw: bytes
) -> None:
    check_against_numpy(np.frombuffer(raw[: len(raw) // 8 * 8], TYPES[dtype]), dtype)


SCALES = {"both": (1e-30, 300.0), "negative": (0.02,), "positive": (1e-6, 1e30)}


@pytest.mark.parametrize("sign", SCALES)
@pytest.mark.parametrize("dtype", TYPES)
def test_plain_values_of_any_size_are_counted_as_numpy_counts_them(dtype: str, sign: str) -> None:
    for scale in SCALES[sign]:
        wide = np.random.default_rng(7).standard_normal(140_001) * scale
        wide = wide if sign == "both" else np.abs(wide) * (1 if sign == "positive" else -1)
        wide[100:200] = 0.0
        wide[300] = -0.0
        with np.errstate(over="ignore"):
            check_against_numpy(wide.astype(TYPES[dtype]), dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_code_of_up_to_16_bits_has_its_value(dtype: str) -> None:
    for code in range(1 << min(16, 8 * np.dtype(TYPES[dtype]).itemsize)):
        data = code.to_bytes(np.dtype(TYPES[dtype]).itemsize, "little")
        if code % 97 == 0 or len(data) == 1:
            check_against_numpy(np.frombuffer(data, TYPES[dtype]), dtype)


def check_against_numpy(values: Any, dtype: str) -> None:
    """Compare with the slow obvious way."""
    found = of(values, dtype)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        wide = values.astype("f8")
    finite = wide[np.isfinite(wide)]
    assert (found.count, found.nans) == (len(values), np.isnan(wide).sum())
    assert (found.infinities, found.zeros) == (np.isinf(wide).sum(), (wide == 0).sum())
    assert (found.low, found.high) == (
        (finite.min(), finite.max()) if len(finite) else (None, None)
    )
    with np.errstate(over="ignore"):
        assert (found.norm or 0) == pytest.approx(float(np.sqrt((finite**2).sum())), rel=2e-6)


@pytest.mark.parametrize("dtype", INTEGERS)
@given(raw=st.binary(min_size=8, max_size=80))
def test_integers_have_extremes_and_zeros_and_no_norm(dtype: str, raw: bytes) -> None:
    held = bytes(b & 1 for b in raw) if dtype == "BOOL" else raw
    values = np.frombuffer(held[: len(held) // 8 * 8], INTEGERS[dtype])
    found = of(values, dtype)
    assert (found.low, found.high, found.zeros, found.norm) == (
        values.min(),
        values.max(),
        (values == 0).sum(),
        None,
    )


def test_a_value_at_a_pieces_border_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([1, np.nan, 3, np.inf, 0, -7], "<f4")
    monkeypatch.setattr(module, "_PIECE", 2)
    assert of(values, "F32") == Statistics(6, -7.0, 3.0, 59.0, 1, 1, 1)


def test_a_shard_that_was_never_filled_is_remarked_on_rows_columns_and_all() -> None:
    values = np.ones((64, 256), "<f4")
    assert not list(notes_on_values("w", of(values, "F32")))
    values[::2, ::2] = 0
    assert not list(notes_on_values("w", of(values, "F32"))), (
        "every other value is a mask, not a gap"
    )
    rows, columns = np.ones_like(values), np.ones_like(values)
    rows[8:16] = columns[:, 64:128] = 0
    for damaged, count in ((rows, 2048), (columns, 4096)):
        assert list(notes_on_values("w", of(damaged, "F32"))) == [
            f"w: {count} of 16384 values are zeros in long runs, as a missing shard leaves them"
        ]
    assert list(notes_on_values("w", of(values * 0, "F32"))) == ["w: all 16384 values are zero"]
