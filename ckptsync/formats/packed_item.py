"""One packed item: a ``torch.save`` archive of one tensor, read from its head alone, because the tail of a stream is expensive.

Local headers carry no sizes: ``data.pkl`` ends where its pickle ends, a record of a few bytes where its data descriptor follows, and the tensor's
own record is as long as the pickle says.  Source: PKWARE APPNOTE 4.3; ``caffe2/serialize/inline_container.cc``; files of torch 2.13.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats import torch_pickle
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.packed import Packed, name_of
from ckptsync.formats.torch_pickle import Stored
from ckptsync.formats.unpacking import Unpacked
from ckptsync.model import Extent, Part

_HEAD = 64 << 10  # a tensor's pickle has a few hundred bytes, and the padding before its record at most 64
_LOCAL = struct.Struct("<4s5H3L2H")
_DESCRIPTOR = struct.Struct("<4s3L")


@dataclass(frozen=True, slots=True)
class _Record:
    name: str
    start: int


def load(files: Unpacked, item: Extent) -> tuple[Stored, Part]:
    """The tensor in a packed item, and where its bytes lie in the unpacked stream.  Raises Corrupt or Unsupported."""
    head = files.head(name_of(Packed(item)), _HEAD)
    where = f"{item.file} at {item.start}"
    stored: Stored | None = None
    is_summed, at, prefix = False, 0, ""
    while True:
        record = _record(head, at, where)
        kind = record.name.removeprefix(prefix)
        if stored is None:
            if not record.name.endswith("/data.pkl"):
                raise Corrupt(f"{where}: the packed item does not begin with data.pkl")
            prefix = record.name.removesuffix("data.pkl")
            stored, size = _tensor(head, record.start, where)
        elif kind == f"data/{stored.storage.key}":
            return stored, _part(item, stored, record.start, is_summed=is_summed, where=where)
        else:
            size = _size(head, record.start, where)
        content = head[record.start : record.start + size]
        crc = _descriptor(head, record.start + size, size, where)
        if kind == "byteorder":
            if content != b"little":
                raise Unsupported(f"{where}: byte order {content[:20]!r}, only little-endian files are read")
            is_summed = crc == zlib.crc32(content)  # `set_crc32_options(False)` leaves junk
        at = record.start + size + _DESCRIPTOR.size


def _record(head: bytes, at: int, where: str) -> _Record:
    if at + _LOCAL.size > len(head):
        raise Corrupt(f"{where}: the packed item ends before its tensor")
    magic, _, _, method, *_, names, extras = _LOCAL.unpack_from(head, at)
    start = at + _LOCAL.size + names + extras
    if magic != b"PK\x03\x04" or start > len(head):
        raise Corrupt(f"{where}: the packed item is no archive of torch.save")
    if method:
        raise Unsupported(f"{where}: a compressed record within a packed item; torch.save never does that")
    return _Record(head[at + _LOCAL.size : at + _LOCAL.size + names].decode("utf-8", "replace"), start)


def _tensor(head: bytes, start: int, where: str) -> tuple[Stored, int]:
    value, size = torch_pickle.parsed(head[start:])
    if not isinstance(value, Stored):
        raise Corrupt(f"{where}: no tensor in the packed item")
    return value, size


def _size(head: bytes, start: int, where: str) -> int:
    """Of a record of a word: up to the next descriptor that tells the same."""
    for end in _finds(head, start):
        if _DESCRIPTOR.unpack_from(head, end)[3] == end - start:
            return end - start
    raise Corrupt(f"{where}: a record of the packed item does not end")


def _finds(head: bytes, start: int) -> Iterator[int]:
    at = head.find(b"PK\x07\x08", start)
    while 0 <= at <= len(head) - _DESCRIPTOR.size:
        yield at
        at = head.find(b"PK\x07\x08", at + 1)


def _descriptor(head: bytes, at: int, size: int, where: str) -> int:
    """The CRC32 that it tells."""
    if at + _DESCRIPTOR.size > len(head):
        raise Corrupt(f"{where}: the packed item ends before its tensor")
    magic, crc, packed, told = _DESCRIPTOR.unpack_from(head, at)
    if magic != b"PK\x07\x08" or packed != size or told != size:
        raise Corrupt(f"{where}: a record of the packed item has not got the size that it tells")
    return int(crc)


def _part(item: Extent, stored: Stored, start: int, *, is_summed: bool, where: str) -> Part:
    size = stored.storage.numel * ITEMSIZE[stored.storage.dtype]
    first = stored.offset * ITEMSIZE[stored.dtype]
    span = torch_pickle.span(stored.shape, stored.strides) * ITEMSIZE[stored.dtype]
    if first + span > size:
        raise Corrupt(f"{where}: a storage of {size} bytes, {first + span} expected")
    packed = Packed(item)
    if is_summed:
        packed = replace(packed, first=start, length=size)
    strides = None if torch_pickle.is_contiguous(stored) else stored.strides
    return Part((0,) * len(stored.shape), stored.shape, Extent(name_of(packed), start + first, span), strides)
