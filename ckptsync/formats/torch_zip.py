"""Find the records in the zip archive of ``torch.save``, without reading or unpacking them.

``<prefix>/data.pkl`` is the pickle, ``<prefix>/data/<key>`` one storage each, stored and never
compressed, so that a storage is an extent of the file. Local headers carry no sizes (a data
descriptor follows), so the central directory decides. An item of a DCP is such an archive inside a
larger file. Source: PKWARE APPNOTE 4.3; ``caffe2/serialize/inline_container.cc`` of torch 2.13.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.tensors import Checksum, Extent, Files, read

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
CRC_AT = 16  # bytes into an entry of the central directory
_ONES = 0xFFFFFFFF  # in place of a number that is in a zip64 field
_NEAR = 4 << 10  # bytes between two local headers that cost less than another read
_AHEAD = 256 << 10
_MAX_DIRECTORY = 64 << 20
_MAX_PICKLE = 256 << 20
_MAX_SMALL = 1 << 10
# as C++'s ``stoull`` reads it, which ignores what follows the number
_VERSION = re.compile(rb"\s*\+?([0-9]+)")
_NEWEST = 10  # ``kMaxSupportedFileFormatVersion``


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A stored record.

    ``header``: where its local header begins, counted from the archive's first byte. ``entry``:
    where its entry in the central directory begins, counted from the directory's first byte.
    """

    name: str
    header: int
    size: int
    crc: int
    entry: int


class _ReadAhead:
    """Bytes of one file; the more small reads follow each other, the farther it reads ahead."""

    __slots__ = ("data", "last", "reach", "start")

    def __init__(self) -> None:
        self.data, self.start, self.last, self.reach = b"", 0, -_NEAR, 0

    def read(self, files: Files, archive: Extent, start: int, size: int) -> bytes:
        """Return ``size`` bytes from ``start`` of the archive.

        If ``data`` does not have them, they are read and replace it.  A read that begins within
        `_NEAR` bytes behind the last one also reads ahead: twice as far each time, up to `_AHEAD`.
        Not for two threads.  Raises what `tensors.read` raises.
        """
        position = start - self.start
        if position < 0 or position + size > len(self.data):
            is_near = 0 <= start - self.last <= _NEAR
            self.reach = min(2 * self.reach + _LOCAL.size, _AHEAD) if is_near else 0
            count = max(size, min(self.reach, archive.size - start))
            self.data, self.start, position = (
                read(files, Extent(archive.file, archive.start + start, count)),
                start,
                0,
            )
        self.last = start + size
        return self.data[position : position + size]


@dataclass(frozen=True, slots=True)
class Archive:
    """The records by their names without the prefix (``data.pkl``, ``data/0``), inside one extent.

    ``summed``: whether the CRC32s are real. ``torch.serialization.set_crc32_options(False)`` leaves
    junk in their place.
    """

    where: Extent
    directory: Extent
    records: Mapping[str, ZipRecord]
    summed: bool = False
    ahead: _ReadAhead = field(default_factory=_ReadAhead, compare=False)


def has_end(files: Files, span: Extent) -> bool:
    """Return whether the archive is finished: a zip's end record is its last bytes."""
    return span.size >= _END.size and read(files, _last(span, _END.size))[:4] == b"PK\x05\x06"


def open_archive(files: Files, span: Extent) -> Archive:
    """Return the archive in ``span``; its directory and one small record are read.

    Raise Corrupt if these are damaged, if two records have one name, or if there is not exactly one
    ``data.pkl``; Unsupported if something is compressed or the byte order is big-endian.
    """
    directory = _directory(files, span)
    entries = _entries(read(files, directory), span)
    prefixes = {name.removesuffix("data.pkl") for name, _ in entries if name.endswith("/data.pkl")}
    if len(prefixes) != 1:
        raise Corrupt(f"{_at(span)}: {len(prefixes)} data.pkl in the archive, 1 expected")
    prefix = prefixes.pop()
    records = {name.removeprefix(prefix): record for name, record in entries}
    if len(records) != len(entries):
        raise Corrupt(f"{_at(span)}: two records of one name")
    archive = Archive(span, directory, records)
    return replace(archive, summed=_check_byteorder(files, archive))


def extent(files: Files, archive: Archive, name: str) -> Extent:
    """Return where the bytes of a record lie in the file, by its local header, which is read.

    The read changes ``archive.ahead``, so only one thread may call it for an archive. Raise Corrupt
    if the archive has no such record, or if its local header does not confirm it.
    """
    record = archive.records.get(name)
    if record is None:
        raise Corrupt(f"{_at(archive.where)}: no record {name}")
    if record.header + _LOCAL.size > archive.where.size:
        raise Corrupt(f"{_at(archive.where)}: record {name} begins behind the end")
    name_bytes = record.name.encode("utf-8", "replace")
    size = min(_LOCAL.size + len(name_bytes), archive.where.size - record.header)
    head = archive.ahead.read(files, archive.where, record.header, size)
    magic, _, _, method, *_, name_size, extra_size = _LOCAL.unpack_from(head)
    start = record.header + _LOCAL.size + name_size + extra_size
    has_name = name_size == len(name_bytes) and head[_LOCAL.size :] == name_bytes
    if (
        magic != b"PK\x03\x04"
        or method != 0
        or not has_name
        or start + record.size > archive.where.size
    ):
        raise Corrupt(f"{_at(archive.where)}: record {name} is not where the directory says")
    return Extent(archive.where.file, archive.where.start + start, record.size)


def pickle_of(files: Files, archive: Archive) -> bytes:
    """Return the bytes of ``data.pkl``.

    Raise Corrupt as `extent`, if they are more than `_MAX_PICKLE`, or if ``archive.summed`` and
    they do not have their CRC32.
    """
    record_extent = extent(files, archive, "data.pkl")
    if record_extent.size > _MAX_PICKLE:
        raise Corrupt(
            f"{_at(archive.where)}: data.pkl of {record_extent.size} bytes,"
            f" at most {_MAX_PICKLE} expected"
        )
    data = read(files, record_extent)
    if archive.summed and zlib.crc32(data) != archive.records["data.pkl"].crc:
        raise Corrupt(
            f"{_at(archive.where)}: data.pkl does not have its CRC32",
            hint="the file is damaged: fetch it again",
        )
    return data


def checksum(archive: Archive, name: str, record_extent: Extent) -> Checksum | None:
    """Return the CRC32 of the record at ``record_extent``; None if the CRC32s are not real."""
    return Checksum(record_extent, archive.records[name].crc) if archive.summed else None


def witness(archive: Archive) -> str | None:
    """Return the name of a small record of known content, None if there is none.

    Its CRC32 shows whether the CRC32s of the archive are real.
    """
    return next((name for name in ("byteorder", "version") if name in archive.records), None)


def _last(span: Extent, size: int) -> Extent:
    """Return the last ``size`` bytes of an extent."""
    return Extent(span.file, span.start + span.size - size, size)


def _at(span: Extent) -> str:
    """Return the place of an archive for an error."""
    return f"{span.file} at {span.start}" if span.start else span.file


def _directory(files: Files, span: Extent) -> Extent:
    """Return where the central directory lies, by the end record: the last 22 bytes.

    Raise Corrupt if the archive does not end so, or if the directory does not fit into it or has
    more than `_MAX_DIRECTORY` bytes.
    """
    if span.size < _END.size:
        raise Corrupt(f"{_at(span)}: {span.size} bytes are too few for an archive")
    magic, _, _, _, _, size, start, comment = _END.unpack(read(files, _last(span, _END.size)))
    if magic != b"PK\x05\x06" or comment:
        raise Corrupt(f"{_at(span)}: no end record where the archive should end")
    if _ONES in (start, size):
        size, start = _directory64(files, span)
    if start + size > span.size or size > _MAX_DIRECTORY:
        raise Corrupt(f"{_at(span)}: directory of {size} bytes at {start}, archive of {span.size}")
    return Extent(span.file, span.start + start, size)


def _directory64(files: Files, span: Extent) -> tuple[int, int]:
    """Read zip64 records; return the central directory's size and start; raise Corrupt if none."""
    locator_start = span.size - _END.size - _LOCATOR.size
    if locator_start < _END64.size:
        raise Corrupt(f"{_at(span)}: no room for a zip64 end record")
    magic, _, start, _ = _LOCATOR.unpack(
        read(files, Extent(span.file, span.start + locator_start, _LOCATOR.size))
    )
    if magic != b"PK\x06\x07" or start + _END64.size > locator_start:
        raise Corrupt(f"{_at(span)}: no zip64 end record")
    fields = _END64.unpack(read(files, Extent(span.file, span.start + start, _END64.size)))
    if fields[0] != b"PK\x06\x06":
        raise Corrupt(f"{_at(span)}: no zip64 end record")
    return fields[8], fields[9]


@lru_cache(maxsize=1)  # a file is read for its demands, and again for its tensors
def _entries(data: bytes, span: Extent) -> Sequence[tuple[str, ZipRecord]]:
    """Return name and record of each entry of the directory ``data``.

    Raise Corrupt if it is damaged, Unsupported if a record is compressed or encrypted.
    """
    entries: list[tuple[str, ZipRecord]] = []
    position = 0
    while position < len(data):
        if position + _ENTRY.size > len(data):
            raise Corrupt(f"{_at(span)}: directory ends in the middle of an entry")
        entry = position
        magic, _, _, flags, method, _, _, crc, packed, size, names, extras, comments, *_, header = (
            _ENTRY.unpack_from(data, position)
        )
        position += _ENTRY.size + names + extras + comments
        if magic != b"PK\x01\x02" or position > len(data):
            raise Corrupt(f"{_at(span)}: directory entry is damaged")
        text = data[position - names - extras - comments : position - extras - comments]
        extra = data[position - extras - comments : position - comments]
        if _ONES in (size, packed, header):
            size, packed, header = _zip64(extra, size, packed, header, span)
        name = text.decode("utf-8", "replace")
        is_packed = bool(method or flags & 1)
        if is_packed and packed != size:
            raise Unsupported(
                f"{_at(span)}: record {name} is compressed or encrypted; torch.save never does that"
            )
        if is_packed or packed != size:  # compression and encryption change the length
            raise Corrupt(
                f"{_at(span)}: record {name} is called compressed or encrypted, and is not",
                hint="the file is damaged: fetch it again",
            )
        entries.append((name, ZipRecord(name, header, size, crc, entry)))
    return entries


def _zip64(extra: bytes, size: int, packed: int, header: int, span: Extent) -> tuple[int, int, int]:
    """Return sizes and offset, with those from the zip64 field that are all ones in the entry.

    Raise Corrupt if the field lacks one.
    """
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1 and position + 4 + length <= len(extra):
            numbers = iter(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
            try:
                return tuple(next(numbers) if n == _ONES else n for n in (size, packed, header))  # type: ignore[return-value]
            except RuntimeError:
                break
        position += 4 + length
    raise Corrupt(f"{_at(span)}: zip64 sizes are missing")


def _check_byteorder(files: Files, archive: Archive) -> bool:
    """Return whether the CRC32s are real: that of the witness matches.  False without a witness.

    Raise Unsupported if the archive is not little-endian, Corrupt if the witness has more than
    `_MAX_SMALL` bytes.
    """
    name = witness(archive)
    if name is None:
        return False
    record_extent = extent(files, archive, name)
    if record_extent.size > _MAX_SMALL:
        raise Corrupt(
            f"{_at(archive.where)}: {name} of {record_extent.size} bytes, a word expected"
        )
    content = read(files, record_extent)
    if name == "byteorder" and content != b"little":
        raise Unsupported(
            f"{_at(archive.where)}: byte order {content[:20]!r}, only little-endian files are read"
        )
    return zlib.crc32(content) == archive.records[name].crc


def check_version(files: Files, archive: Archive) -> None:
    """Raise unless torch opens an archive of that version (``PyTorchStreamReader::init``, 2.13).

    Unsupported for a later version; Corrupt for no number, 0, or a record without its CRC32.
    """
    name = ".data/version" if ".data/version" in archive.records else "version"
    record_extent = extent(files, archive, name)
    content = read(files, record_extent) if record_extent.size <= _MAX_SMALL else b""
    match = _VERSION.match(content)
    is_damaged = archive.summed and zlib.crc32(content) != archive.records[name].crc
    if match is None or is_damaged or not int(match[1]):
        raise Corrupt(
            f"{_at(archive.where)}: {name} is {content[:20]!r}, a number expected",
            hint="torch does not open it: fetch it again",
        )
    if int(match[1]) > _NEWEST:
        raise Unsupported(
            f"{_at(archive.where)}: {name} is {content[:20]!r}, at most {_NEWEST} is known, here"
            " and to torch 2.13"
        )
