"""CRC32 arithmetic: the sum of two stretches of bytes out of the sums of each, so that they may be summed in any order.

A CRC is a remainder of polynomials over GF(2); bytes that follow multiply it by a power of x.  As ``crc32_combine`` in zlib, which
Python does not offer.  Polynomials are bit-reversed, as zlib has them: the highest bit is the power 0.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def joined(first: int, second: int, size: int) -> int:
    """The CRC32 of ``a + b``, from ``crc32(a)``, ``crc32(b)`` and ``len(b)``."""
    return _product(_shift(size), first) ^ second


def _product(a: int, b: int) -> int:
    result = 0
    while a:
        if a & _ONE:
            result ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


@lru_cache(1024)
def _shift(size: int) -> int:
    """``x ** (8 * size)``."""
    result = _ONE
    for bit in range(size.bit_length()):
        if size >> bit & 1:
            result = _product(result, _power(bit))
    return result


@lru_cache(64)
def _power(bit: int) -> int:
    """``x ** (8 << bit)``."""
    return _product(_power(bit - 1), _power(bit - 1)) if bit else _ONE >> 8
