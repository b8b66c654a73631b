"""Read JSON as values of our types: records, heartbeats, and every other file of ours.

Whoever can write to a store, and every bit that flips there, decides what is read here. So one
class knows every way in which decoding can fail, and a caller has to expect one error only:
Corrupt, about this one file.
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
    """A type, what messages call it ("a heartbeat"), and how many bytes it may have.

    Make it when the module is imported: msgspec 0.22 crashes if two threads meet a type for the
    first time together.
    """

    def __init__(self, kind: type[T], what: str, limit: int = SHORT_RECORD) -> None:
        self.limit = limit
        self._what = what
        self._decoder = msgspec.json.Decoder(kind)

    def decode(self, data: bytes, name: str, hint: str = "") -> T:
        """Return the value; raise Corrupt, and nothing else. ``name`` is for the message.

        Fields that the type does not have are skipped without being built. Of a field given twice
        the last one counts.
        """
        if len(data) > self.limit:
            most = f"at most {self.limit} expected of {self._what}"
            raise Corrupt(f"{name}: {len(data)} bytes, {most}", hint=hint)
        return _decoded(self._decoder, data, name, self._what, hint)


def _decoded(
    decoder: msgspec.json.Decoder[T], data: bytes, name: str, what: str, hint: str = ""
) -> T:
    try:
        return decoder.decode(data)
    # UnicodeDecodeError and all of msgspec's errors are ValueErrors
    except (ValueError, RecursionError, MemoryError) as e:
        raise not_parsed(e, name, what, hint) from e


class _Numbered(msgspec.Struct):
    format: FormatNumber


_NUMBERED = msgspec.json.Decoder(_Numbered)


def format_number(data: bytes, name: str, what: str) -> int:
    """Return the ``format`` of a JSON object, of which nothing else is built.

    Raise Corrupt if it has none.
    """
    return _decoded(_NUMBERED, data, name, what).format
