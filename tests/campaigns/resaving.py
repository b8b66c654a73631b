"""A shard as another save of the same training would have written it: other values, the same sizes,
and checksums that are right.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping

_ENTRY_CRC = 16  # bytes before the CRC32 in an entry of a zip's directory
_ENTRY = struct.Struct("<4s6H3L5H2L")
_DESCRIPTOR = b"PK\x07\x08"


def resaved(name: str, data: bytes, files: Mapping[str, bytes]) -> bytes | None:
    """The file with other values.

    ``None`` where it holds no tensors, or nothing here knows how to change them.
    """
    if name.endswith(".safetensors"):
        return _safetensors(data)
    out = bytearray(data)
    changed = [_archive(out, start, size) for start, size in _archives(name, data, files)]
    return bytes(out) if any(changed) else None


def _other(values: bytes) -> bytes:
    """Another lowest bit in every second byte: what a step of training does to a float32 or
    bfloat16.
    """
    return bytes(b ^ 1 if n % 2 == 0 else b for n, b in enumerate(values))


def _safetensors(data: bytes) -> bytes | None:
    base = 8 + int.from_bytes(data[:8], "little")
    return data[:base] + _other(data[base:]) if json.loads(data[8:base]) and data[base:] else None


def _archives(name: str, data: bytes, files: Mapping[str, bytes]) -> Iterator[tuple[int, int]]:
    """Where the ``torch.save`` archives lie: the whole file, or one item after another."""
    if not name.endswith(".distcp"):
        if zipfile.is_zipfile(io.BytesIO(data)):
            yield 0, len(data)
        return
    start = 0
    while (
        end := data.find(b"PK\x05\x06", start)
    ) >= 0:  # torch writes no comment behind an end record
        yield start, end + 22 - start
        start = end + 22


def _archive(out: bytearray, start: int, size: int) -> bool:
    """Change the storages of one archive in place, and what its directory says of them."""
    try:
        with zipfile.ZipFile(io.BytesIO(out[start : start + size])) as archive:
            entries, at = archive.infolist(), start + archive.start_dir
    except zipfile.BadZipFile:
        return False
    changed = False
    for entry in entries:
        fields = _ENTRY.unpack_from(out, at)
        if entry.filename.rpartition("/")[0].endswith("/data") and entry.file_size > 16:
            changed = True
            _record(out, start + entry.header_offset, entry.file_size, at)
        at += _ENTRY.size + fields[10] + fields[11] + fields[12]
    return changed


def _record(out: bytearray, header: int, size: int, entry: int) -> None:
    names, extras = struct.unpack_from("<2H", out, header + 26)
    begin = header + 30 + names + extras
    values = _other(bytes(out[begin : begin + size]))
    out[begin : begin + size] = values
    crc = zlib.crc32(values)
    struct.pack_into("<L", out, entry + _ENTRY_CRC, crc)
    if out[begin + size : begin + size + 4] == _DESCRIPTOR:
        struct.pack_into("<L", out, begin + size + 4, crc)
