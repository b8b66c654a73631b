"""Read JSON as values of our types: records, heartbeats, and every other file of ckptsync's own.

Anyone who can write to a store may have written the bytes, and a bit may have flipped. So `Decoder`
catches every way in which decoding can fail, and a caller expects one error only: Corrupt, with the
name of the file.
"""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

import msgspec

from ckptsync.errors import Corrupt, not_parsed

T = TypeVar("T")

# Ranges of numbers, which msgspec checks while it decodes: without them a number of 4,000 digits
# would be accepted, and fail wherever it is first divided or printed.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""A duration, or a time since the epoch: no later than a calendar can show."""
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e19)]
FormatNumber = Annotated[int, msgspec.Meta(ge=1, le=2**31)]

SHORT_RECORD = 4 << 20
"""Bytes of a file that no count of files or tensors makes longer."""


class Decoder(Generic[T]):
    """Decodes JSON as one type.

    ``expected`` is the type's name in messages ("a heartbeat"), ``limit`` the bytes that a file may
    have. Make it when the module is imported: msgspec 0.22 crashes if two threads meet a type for
    the first time together.
    """

    def __init__(self, kind: type[T], expected: str, limit: int = SHORT_RECORD) -> None:
        self.limit = limit
        self._expected = expected
        self._decoder = msgspec.json.Decoder(kind)

    def decode(self, data: bytes, name: str, hint: str = "") -> T:
        """Return the value; raise Corrupt, and nothing else, for wrong data or above `limit` bytes.

        ``name`` and ``hint`` are for the error. Fields that the type does not have are skipped
        without being built. Of a repeated field the last one counts.
        """
        if len(data) > self.limit:
            most = f"at most {self.limit} expected of {self._expected}"
            raise Corrupt(f"{name}: {len(data)} bytes, {most}", hint=hint)
        return _decoded(self._decoder, data, name, self._expected, hint)


def _decoded(
    decoder: msgspec.json.Decoder[T], data: bytes, name: str, expected: str, hint: str = ""
) -> T:
    """Return the value of ``data``; raise Corrupt, with ``name``, for any failure."""
    try:
        return decoder.decode(data)
    # UnicodeDecodeError and all of msgspec's errors are ValueErrors
    except (ValueError, RecursionError, MemoryError) as e:
        raise not_parsed(e, name, expected, hint) from e


class _Numbered(msgspec.Struct):
    """A JSON object of which only the format number is read."""

    format: FormatNumber


_NUMBERED = msgspec.json.Decoder(_Numbered)


def format_number(data: bytes, name: str, expected: str) -> int:
    """Return the ``format`` of a JSON object without building it; raise Corrupt without one."""
    return _decoded(_NUMBERED, data, name, expected).format
