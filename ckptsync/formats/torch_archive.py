"""Write the zip archive that ``torch.save`` writes: a pickled value and the bytes of its tensors.

`archive` returns a whole file. `streamed` returns what surrounds the bytes of one tensor, which the
caller streams: their CRC32 follows them, as in torch's own files, since it is known only then. The
value is made of what `torch_save.load` returns: plain values, `StoredTensor` (whose storage's key
names a record ``data/<key>``), `Name` and `PickledObject`. Nothing is compressed, and each tensor's
record begins at a multiple of `ALIGN` bytes.

Source: PKWARE APPNOTE 4.3; ``caffe2/serialize/inline_container.cc`` of torch 2.13; the pickle
protocol, 2.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptsync.digest import crc32
from ckptsync.errors import Unsupported
from ckptsync.formats.dtypes import STORAGES
from ckptsync.formats.pickles import Name, PickledObject, Unknown, brief
from ckptsync.formats.torch_pickle import Storage, StoredTensor
from ckptsync.tensors import Shape, row_major

ALIGN = 64
_PREFIX = "archive/"
_FAR = 0xFFFFFFFF  # in place of a number that does not fit into 32 bits: a zip64 field has it
_FLAGS = 0x0800  # names are UTF-8
_BEHIND = 0x0008  # the CRC32 stands behind the bytes
_DATE = 0x0021  # 1980-01-01: the bytes depend on the value alone
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_DEEPEST = 100
_LARGEST = 16 << 20  # bytes of a pickle: what values share is written again for each
_LONGEST = 1000  # bits of an integer
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}
_REBUILD = Name("torch._utils", "_rebuild_tensor_v2")


# Pickles


def pickled(value: Any, tensor: Callable[[StoredTensor], StoredTensor] = lambda t: t) -> bytes:
    """Return the pickle of a value.

    ``tensor`` returns the tensor, with the key of its record, that is written in place of each
    tensor. Raise Unsupported for a value that `torch_save.load` does not return, for an `Unknown`,
    for an integer of `_LONGEST` bits or more, and for more than `_DEEPEST` levels or `_LARGEST`
    bytes.
    """
    out = bytearray(b"\x80\x02")
    _encode(value, out, tensor, 0)
    return bytes(out + b".")


def _encode(
    value: Any, out: bytearray, tensor: Callable[[StoredTensor], StoredTensor], depth: int
) -> None:
    """Append the opcodes of a value at ``depth`` to ``out``; raise Unsupported as `pickled`."""

    def add(inner: Any) -> None:
        """Append a value inside of the value."""
        _encode(inner, out, tensor, depth + 1)

    def call(name: Name, args: tuple[Any, ...], code: bytes) -> None:
        """Append a call of ``name``; ``code`` is its opcode."""
        add(name)
        add(args)
        out.extend(code)

    if depth > _DEEPEST:
        raise Unsupported(
            f"values nested more than {_DEEPEST} deep cannot be written to another file"
        )
    if len(out) > _LARGEST:
        raise Unsupported(f"values that take more than {_LARGEST >> 20} MiB to write")
    if isinstance(value, StoredTensor):
        stored = tensor(value)
        args = (stored.offset, stored.shape, stored.strides, False)
        add(_REBUILD)
        out.extend(b"(")
        add(_identity(stored.storage))
        out.extend(b"Q")
        for arg in args:
            add(arg)
        call(Name("collections", "OrderedDict"), (), b"R")
        out.extend(b"tR")
    elif isinstance(value, Name):
        out.extend(f"c{value.module}\n{value.name}\n".encode())
    elif isinstance(value, PickledObject) and not isinstance(value, Unknown):
        # an object with a state is made without its class's own constructor
        call(value.name, value.args, b"R" if value.state is None else b"\x81")
        if value.state is not None:
            add(value.state)
            out.extend(b"b")
    elif type(value) is tuple:
        out.extend(b"(")
        for inner in value:
            add(inner)
        out.extend(b"t")
    elif type(value) is list:
        out.extend(b"](")
        for inner in value:
            add(inner)
        out.extend(b"e")
    elif type(value) is dict:
        out.extend(b"}(")
        for pair in value.items():
            for inner in pair:
                add(inner)
        out.extend(b"u")
    else:
        out.extend(_plain(value))


def _plain(value: Any) -> bytes:
    """Return the opcodes of a text, number, bool or None; raise Unsupported for other values."""
    if type(value) is str:
        text = value.encode("utf-8", "surrogatepass")
        return b"X" + len(text).to_bytes(4, "little") + text
    if type(value) is float:
        return b"G" + struct.pack(">d", value)
    if type(value) is int and value.bit_length() < _LONGEST:
        number = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(number)]) + number
    if value is None or type(value) is bool:
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    raise Unsupported(f"{brief(value)} cannot be written to another file")


def _identity(storage: Storage) -> tuple[Any, ...]:
    """Return the persistent id of a storage; raise Unsupported if torch has no such storage."""
    if storage.dtype not in _STORAGE_OF:
        raise Unsupported(f"a tensor of {storage.dtype}, which torch has no storage of")
    kind = Name("torch", _STORAGE_OF[storage.dtype])
    return "storage", kind, storage.key, "cpu", storage.numel


def new_tensor(dtype: str, shape: Shape, key: str = "0") -> StoredTensor:
    """Return a contiguous tensor of all elements of the record ``data/<key>``."""
    return StoredTensor(dtype, Storage(dtype, key, prod(shape)), 0, shape, row_major(shape))


# Archives


@dataclass(frozen=True, slots=True)
class _Entry:
    """A record: its name, where its local header begins, its size, its CRC32, and its flags."""

    name: bytes
    header_start: int
    size: int
    crc: int
    flags: int = _FLAGS


@dataclass(frozen=True, slots=True)
class Ending:
    """The bytes of an archive after those of its last record.

    The CRC32 of that is given to `encoded`.

    ``start``: the offset at which they begin.
    """

    entries: tuple[_Entry, ...]
    start: int

    @property
    def size(self) -> int:
        """The number of these bytes."""
        return len(self.encoded(0))

    def encoded(self, crc: int) -> bytes:
        """Return these bytes, if the last record has the CRC32 ``crc``."""
        *earlier, last = self.entries
        form = "<4sL2Q" if last.size >= _FAR else "<4s3L"
        behind = struct.pack(form, b"PK\x07\x08", crc, last.size, last.size)
        return behind + _directory([*earlier, replace(last, crc=crc)], self.start + len(behind))


def streamed(value: Any, size: int) -> tuple[bytes, Ending]:
    """Return the bytes of an archive before those of its one tensor, and the archive's ending.

    The tensor has ``size`` bytes. Raises Unsupported as `pickled`.
    """
    out, entries = _opened(pickled(value))
    header_start = len(out)
    entries.append(_Entry(f"{_PREFIX}data/0".encode(), header_start, size, 0, _FLAGS | _BEHIND))
    out += _header(entries[-1], ALIGN)
    return bytes(out), Ending(tuple(entries), len(out) + size)


def archive(value: Any, data: Callable[[StoredTensor], bytes]) -> bytes:
    """Return a whole archive; ``data`` returns the bytes of each tensor, row by row.

    All is in memory. Each mention of a tensor gets a record of its own. Raises Unsupported as
    `pickled`, and what ``data`` raises.
    """
    records: list[bytes] = []

    def tensor(stored: StoredTensor) -> StoredTensor:
        """Read a tensor's bytes, and return the tensor with the key of their record."""
        records.append(data(stored))
        return new_tensor(stored.dtype, stored.shape, str(len(records) - 1))

    out, entries = _opened(pickled(value, tensor))
    for number, content in enumerate(records):
        _add(out, entries, f"data/{number}", content, ALIGN)
    return bytes(out) + _directory(entries, len(out))


def _opened(data: bytes) -> tuple[bytearray, list[_Entry]]:
    """Return the beginning of an archive with the pickle ``data``, and its records so far."""
    out, entries = bytearray(), list[_Entry]()
    for name, content in (("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")):
        _add(out, entries, name, content)
    return out, entries


def _add(out: bytearray, entries: list[_Entry], name: str, content: bytes, align: int = 1) -> None:
    """Append a record to the archive, and its entry to ``entries``.

    Its bytes begin at a multiple of ``align``.
    """
    entry = _Entry(f"{_PREFIX}{name}".encode(), len(out), len(content), crc32(content))
    entries.append(entry)
    out += _header(entry, align) + content


def _header(entry: _Entry, align: int) -> bytes:
    """Return a record's local header, padded so that its bytes begin at a multiple of ``align``."""
    is_far = entry.size >= _FAR
    extra = struct.pack("<2H2Q", 1, 16, entry.size, entry.size) if is_far else b""
    bare = entry.header_start + _LOCAL.size + len(entry.name) + len(extra)
    if bare % align:
        # a field of torch's own, of at least its four bytes
        count = -(bare + 4) % align
        extra += struct.pack("<2sH", b"FB", count) + b"Z" * count
    size = _FAR if is_far else entry.size
    return (
        _LOCAL.pack(
            b"PK\x03\x04",
            *(45 if is_far else 20, entry.flags, 0, 0, _DATE),
            *(entry.crc, size, size, len(entry.name), len(extra)),
        )
        + entry.name
        + extra
    )


def _directory(entries: Iterable[_Entry], start: int) -> bytes:
    """Return the central directory, which begins at byte ``start``, and the end records."""
    out, count = bytearray(), 0
    for entry in entries:
        wide_numbers = [n for n in (entry.size, entry.size, entry.header_start) if n >= _FAR]
        extra = (
            struct.pack(f"<2H{len(wide_numbers)}Q", 1, 8 * len(wide_numbers), *wide_numbers)
            if wide_numbers
            else b""
        )
        version = 45 if wide_numbers else 20
        size, header_start = (min(n, _FAR) for n in (entry.size, entry.header_start))
        out += _ENTRY.pack(
            b"PK\x01\x02",
            *(version, version, entry.flags, 0, 0, _DATE),
            *(entry.crc, size, size, len(entry.name), len(extra), 0, 0, 0, 0, header_start),
        )
        out += entry.name + extra
        count += 1
    size, end = len(out), start + len(out)
    if start >= _FAR:
        out += struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
        out += struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
    out += struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, size, min(start, _FAR), 0)
    return bytes(out)
