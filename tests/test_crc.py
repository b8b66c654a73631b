"""CRC32s joined as zlib joins them."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.crc import joined


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_sums_make_the_sum_of_the_whole(first: bytes, second: bytes) -> None:
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("size", [1 << 20, (2 << 20) + 3, 5_000_001])
def test_long_stretches_too(size: int) -> None:
    second = bytes(range(251)) * (size // 251 + 1)
    assert joined(zlib.crc32(b"before"), zlib.crc32(second[:size]), size) == zlib.crc32(b"before" + second[:size])
