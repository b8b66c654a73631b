"""Casts are torch's, bit for bit; a NaN stays a NaN of its sign."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ckptsync.merger.cast import RAW, cast

Bits = npt.NDArray[Any]
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NUMPY: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
TARGETS = ("BF16", "F16", "F32")
PAIRS = [(s, t) for s in SIZES for t in TARGETS if s != t]
INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000}


def patterns(source: str) -> st.SearchStrategy[Bits]:
    whole = st.integers(0, 2 ** (8 * SIZES[source]) - 1)
    most = 65504 if source == "F16" else 70000
    near = st.floats(-most, most, width=32).map(
        lambda x: int(np.array(x, NUMPY[source]).view(RAW[SIZES[source]]))
    )
    return arrays(RAW[SIZES[source]], st.integers(0, 40), elements=whole | near)


def by_torch(bits: Bits, source: str, target: str) -> Bits:
    signed = {2: np.int16, 4: np.int32, 8: np.int64}
    values = torch.from_numpy(bits.view(signed[SIZES[source]]).copy()).view(TORCH[source])
    narrow = values.to(TORCH[target]).view({2: torch.int16, 4: torch.int32}[SIZES[target]])
    return narrow.numpy().view(RAW[SIZES[target]])


def magnitude(bits: Bits, dtype: str) -> Bits:
    return np.asarray(bits & ((1 << (8 * SIZES[dtype] - 1)) - 1))


def is_nan(bits: Bits, dtype: str) -> npt.NDArray[np.bool_]:
    return np.asarray(magnitude(bits, dtype) > INFINITY[dtype])


def sign(bits: Bits, dtype: str) -> Bits:
    return np.asarray(bits >> (8 * SIZES[dtype] - 1)).astype(bool)


def agree(bits: Bits, source: str, target: str, wanted: Bits) -> None:
    found, overflowed = cast(bits, source, target)
    assert found.dtype == RAW[SIZES[target]]
    nan = is_nan(bits, source)
    assert np.array_equal(found[~nan], wanted[~nan])
    assert is_nan(found[nan], target).all()
    assert np.array_equal(sign(found[nan], target), sign(bits[nan], source))
    before = magnitude(bits, source) < INFINITY[source]
    after = magnitude(wanted, target) == INFINITY[target]
    assert overflowed == int((before & after).sum())


@pytest.mark.parametrize(("source", "target"), PAIRS)
@given(data=st.data())
def test_any_bits_become_what_torch_makes_of_them(
    source: str, target: str, data: st.DataObject
) -> None:
    bits = data.draw(patterns(source))
    agree(bits, source, target, by_torch(bits, source, target))


@pytest.mark.parametrize(("source", "target"), [p for p in PAIRS if SIZES[p[0]] == 2])
def test_every_pattern_of_sixteen_bits_is_right(source: str, target: str) -> None:
    bits = np.arange(65536, dtype="<u2")
    agree(bits, source, target, by_torch(bits, source, target))


@pytest.mark.parametrize("target", ["BF16", "F16"])
def test_every_value_and_every_middle_between_two_is_right(target: str) -> None:
    """Each value of the target, and the float32s just below, at and above each halfway point: all
    that rounding can get wrong, among infinities and alone.
    """
    narrow = np.arange(65536, dtype="<u2")
    wide = by_torch(narrow[~is_nan(narrow, target)], target, "F32")
    step = (1 << 15) if target == "BF16" else (1 << 12)
    bits = np.concatenate([wide + np.uint32(step + d) for d in (-1, 0, 1)] + [wide])
    finite = bits[magnitude(by_torch(bits, "F32", target), target) < INFINITY[target]]
    for some in (bits, finite):
        agree(some, "F32", target, by_torch(some, "F32", target))


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF800001, 0x7FFF8000])
def test_one_nan_among_numbers_stays_a_nan(bits: int) -> None:
    """Also one whose payload a carry would turn into a number."""
    for at in (0, 500, 999):
        values = np.linspace(-3, 3, 1000, dtype="<f4").view("<u4")
        values[at] = bits
        agree(values, "F32", "BF16", by_torch(values, "F32", "BF16"))


@pytest.mark.parametrize("target", ["BF16", "F16"])
@pytest.mark.parametrize("away", [2.0**-40, -(2.0**-40), 0.0])
def test_a_double_next_to_the_middle_of_two_values_is_rounded_as_torch_does(
    target: str, away: float
) -> None:
    half = 2.0**-8 if target == "BF16" else 2.0**-11
    bits = np.array([1 + half + away, 1 + 3 * half + away, -1 - half - away], "<f8").view("<u8")
    agree(bits, "F64", target, by_torch(bits, "F64", target))


@pytest.mark.parametrize(
    ("source", "bits", "target"),
    [("F32", 0x7F7F8000, "BF16"), ("F32", 0x477FF000, "F16"), ("F64", 0x47EFFFFFF0000000, "F32")],
)
def test_the_least_value_that_becomes_infinite_is_counted_and_the_one_below_is_not(
    source: str, bits: int, target: str
) -> None:
    for sign_ in (0, 1 << (8 * SIZES[source] - 1)):
        assert [
            cast(np.array([sign_ | each], RAW[SIZES[source]]), source, target)[1]
            for each in (bits - 1, bits)
        ] == [0, 1]


def test_the_same_element_type_is_the_same_bits() -> None:
    bits = np.array([0x7F800001, 0xFFFFFFFF], "<u4")
    found, overflowed = cast(bits, "F32", "F32")
    assert found is bits
    assert overflowed == 0
