"""Items of a distributed checkpoint that are zstd streams: their virtual names, and their reader.

torch's ``_extensions=[ZStandard()]`` makes every item a zstd stream of its own
(``torch/distributed/checkpoint/_extension.py``, 2.13). Such an item gets a virtual name, so that an
extent can say where in the unpacked stream a tensor lies. The name begins with a byte that no
file's name has (`ckptsync.safe_names.checked_path`). `Unpacked` reads under real and under virtual
names.

A zstd stream is read forward only. A merge reads forward too, so an item is mostly decompressed
once; going back begins again. Nothing is decompressed beyond what is read, which the item's own
metadata bounds.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

from ckptsync.digest import crc32
from ckptsync.errors import Corrupt, Unsupported, name_in_errors
from ckptsync.formats import torch_pickle
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.pickles import brief
from ckptsync.formats.torch_pickle import StoredTensor, plain_tensor
from ckptsync.tensors import Extent, Files, FilesWrapper, Part, expect, read

ZSTD = "stream.zstd/1"
MOST_OPEN = 16  # decompressors; each has a window
# bytes that every zstd decoder is to support (RFC 8878, 3.1.1.1.2); zstandard's default levels use
# 2 MiB
WINDOW = 8 << 20
_PREFIX = "\0zstd\0"
_PIECE = 128 << 10
# a tensor's pickle has a few hundred bytes, and the padding before its record at most 64
_HEAD = 64 << 10
_LOCAL = struct.Struct("<4s5H3L2H")
_DESCRIPTOR = struct.Struct("<4s3L")
_DESCRIPTOR_MAGIC = b"PK\x07\x08"


@dataclass(frozen=True, slots=True)
class PackedItem:
    """A zstd stream in a real file.

    The record in it whose CRC32 is known has ``length`` bytes from ``first`` (0: none).
    """

    item: Extent
    first: int = 0
    length: int = 0


def check_transforms(descriptors: object) -> None:
    """Raise Unsupported, by name, for any transform of an item but zstd alone."""
    if type(descriptors) not in (tuple, list) or not all(type(d) is str for d in descriptors):  # type: ignore[attr-defined]
        raise Corrupt(f"transform_descriptors: {brief(descriptors)} is no list of names")
    names = list(descriptors)  # type: ignore[call-overload]
    if [".".join(name.split(".")[:2]) for name in names] != [ZSTD]:
        raise Unsupported(
            f"transform_descriptors: items went through {brief(tuple(names))}, only {ZSTD} is"
            " known",
            hint="save them without extensions",
        )


def virtual_name(packed: PackedItem) -> str:
    """Return the name under which the unpacked bytes are read."""
    item = packed.item
    return f"{_PREFIX}{item.start}\0{item.size}\0{packed.first}\0{packed.length}\0{item.file}"


@lru_cache(maxsize=4096)  # needed for every part of a model, whose files are few
def parse_name(name: str) -> PackedItem | None:
    """Return the item that a virtual name stands for; None for a real file's name."""
    if not name.startswith(_PREFIX):
        return None
    start, size, first, length, file = name.removeprefix(_PREFIX).split("\0", 4)
    return PackedItem(Extent(file, int(start), int(size)), int(first), int(length))


def real_extent(extent: Extent) -> Extent:
    """Return ``extent`` itself, or all of the packed item that it needs."""
    packed = parse_name(extent.file)
    return packed.item if packed else extent


class Unpacked(FilesWrapper):
    """``files``, and the unpacked streams of their packed items; any number of threads may read."""

    def __init__(self, files: Files) -> None:
        super().__init__(files)
        self._streams: OrderedDict[str, _Stream] = OrderedDict()
        self._lock = Lock()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Files`; a CRC32 behind a record that was read to its end is checked, too."""
        packed = parse_name(name)
        if packed is None:
            self._files.read_into(name, start, out)
        else:
            self._stream(name, packed).read_into(start, out)

    def expect(self, extents: Iterable[Extent]) -> None:
        """See `Expecting`, of real files."""
        expect(self._files, (extent for extent in extents if parse_name(extent.file) is None))

    def head(self, packed: PackedItem, count: int) -> bytes:
        """Return at most ``count`` bytes from the start of an unpacked stream."""
        return self._stream(virtual_name(packed), packed).head(count)

    def _stream(self, name: str, packed: PackedItem) -> _Stream:
        with self._lock:
            found = self._streams.pop(name, None) or _Stream(self._files, packed)
            self._streams[name] = found
            while len(self._streams) > MOST_OPEN:
                self._streams.popitem(last=False)
            return found


def unpacked(files: Files) -> Unpacked:
    """Return ``files`` with the virtual names: themselves if they have these already."""
    return files if isinstance(files, Unpacked) else Unpacked(files)


class _Stream:
    """One item, read forward from wherever it is."""

    def __init__(self, files: Files, packed: PackedItem) -> None:
        self._files, self._packed = files, packed
        self._where = f"{packed.item.file} at {packed.item.start}"
        self._lock = Lock()
        self._begin()

    def _begin(self) -> None:
        self._decompress, self._error = _decompressor(
            _CompressedBytes(self._files, self._packed.item)
        )
        self._at, self._crc = 0, 0

    def head(self, count: int) -> bytes:
        with self._lock:
            self._begin()
            return self._take(count)

    def read_into(self, start: int, out: memoryview) -> None:
        out = out.cast("B")
        with self._lock:
            if start < self._at:
                self._begin()
            while self._at < start:
                self._exactly(min(_PIECE, start - self._at))
            done = 0
            while done < len(out):
                data = self._exactly(min(_PIECE, len(out) - done))
                out[done : done + len(data)] = data
                done += len(data)
            self._check_crc()

    def _exactly(self, count: int) -> bytes:
        data = self._take(count)
        if len(data) < count:
            raise Corrupt(
                f"{self._where}: the packed item ends at byte {self._at}, more expected",
                hint="fetch it again",
            )
        return data

    def _take(self, count: int) -> bytes:
        pieces, left = [], count
        while left:
            try:
                data = self._decompress(left)
            except self._error as e:
                raise Corrupt(
                    f"{self._where}: no zstd stream: {e}",
                    hint="the shard is damaged: fetch it again",
                ) from e
            if not data:
                break
            pieces.append(data)
            left -= len(data)
        found = b"".join(pieces)
        first, end = self._packed.first, self._packed.first + self._packed.length
        low, high = max(self._at, first), min(self._at + len(found), end)
        if low < high:
            self._crc = crc32(found[low - self._at : high - self._at], self._crc)
        self._at += len(found)
        return found

    def _check_crc(self) -> None:
        """At the record's end, compare its CRC32 with the data descriptor that follows."""
        if not self._packed.length or self._at != self._packed.first + self._packed.length:
            return
        descriptor = self._exactly(8)
        if (
            descriptor[:4] != _DESCRIPTOR_MAGIC
            or int.from_bytes(descriptor[4:], "little") != self._crc
        ):
            raise Corrupt(
                f"{self._where}: the unpacked tensor does not have its CRC32",
                hint="the shard is damaged: fetch it again",
            )


class _CompressedBytes:
    """The packed bytes as a file to be read once."""

    def __init__(self, files: Files, item: Extent) -> None:
        self._files, self._item, self._at = files, item, 0

    def read(self, count: int = -1) -> bytes:
        left = self._item.size - self._at
        count = min(left, _PIECE) if count < 0 else min(left, count)
        data = read(self._files, Extent(self._item.file, self._item.start + self._at, count))
        self._at += count
        return data


def _decompressor(source: _CompressedBytes) -> tuple[Callable[[int], bytes], type[Exception]]:
    """Return a function that unpacks up to N bytes, and the error that it may raise.

    The function is given N. It returns nothing at the end of the stream.

    Raises Unsupported if this Python has no library for it.
    """
    try:
        from compression import zstd  # noqa: PLC0415  Python 3.14's own
    except ImportError:  # an older Python: the package does the same
        try:
            import zstandard  # noqa: PLC0415  an extra, for those who have such checkpoints
        except ImportError as e:
            raise Unsupported(
                "items are packed with zstd, which this Python cannot unpack",
                hint="pip install 'ckptsync[zstd]', or use Python 3.14 or newer",
            ) from e
        library: Any = zstandard
        reader = library.ZstdDecompressor(max_window_size=WINDOW).stream_reader(
            source, read_size=_PIECE
        )
        return reader.read, zstandard.ZstdError
    options = {zstd.DecompressionParameter.window_log_max: WINDOW.bit_length() - 1}
    decoder: Any = zstd.ZstdDecompressor(options=options)

    def decompress(count: int) -> bytes:
        while not decoder.eof:
            packed = source.read(_PIECE) if decoder.needs_input else b""
            is_at_end = decoder.needs_input and not packed
            data: bytes = decoder.decompress(packed, count)
            if data or is_at_end:
                return data
        return b""

    return decompress, zstd.ZstdError


def load_tensor(files: Unpacked, item: Extent) -> tuple[StoredTensor, Part]:
    """Return the tensor in a packed item, and where its bytes lie in the unpacked stream.

    The item is a ``torch.save`` archive.

    Only the head is read, because the tail of a stream is expensive. Local headers carry no sizes:
    ``data.pkl`` ends where its pickle ends, a record of a few bytes where its data descriptor
    follows, and the tensor's own record is as long as the pickle says. Source: PKWARE APPNOTE 4.3;
    ``caffe2/serialize/inline_container.cc``; files of torch 2.13.
    """
    head = files.head(PackedItem(item), _HEAD)
    where = f"{item.file} at {item.start}"
    stored: StoredTensor | None = None
    has_crc, at, prefix = False, 0, ""
    while True:
        name, start = _record(head, at, where)
        kind = name.removeprefix(prefix)
        if stored is None:
            if not name.endswith("/data.pkl"):
                raise Corrupt(f"{where}: the packed item does not begin with data.pkl")
            prefix = name.removesuffix("data.pkl")
            value, size = torch_pickle.parsed(head[start:])
            with name_in_errors(where):
                stored = plain_tensor(value)
            if stored is None:
                raise Corrupt(f"{where}: no tensor in the packed item")
        elif kind == f"data/{stored.storage.key}":
            return stored, _part(item, stored, start, where, has_crc=has_crc)
        else:
            size = _size(head, start, where)
        content = head[start : start + size]
        crc = _crc_behind(head, start + size, size, where)
        if kind == "byteorder":
            if content != b"little":
                raise Unsupported(
                    f"{where}: byte order {content[:20]!r}, only little-endian files are read"
                )
            has_crc = crc == zlib.crc32(content)  # `set_crc32_options(False)` leaves junk
        at = start + size + _DESCRIPTOR.size


def _record(head: bytes, at: int, where: str) -> tuple[str, int]:
    """Return the name, and the start of the content, of the record whose header is at ``at``."""
    if at + _LOCAL.size > len(head):
        raise Corrupt(f"{where}: the packed item ends before its tensor")
    magic, _, _, method, *_, names, extras = _LOCAL.unpack_from(head, at)
    start = at + _LOCAL.size + names + extras
    if magic != b"PK\x03\x04" or start > len(head):
        raise Corrupt(f"{where}: the packed item is no archive of torch.save")
    if method:
        raise Unsupported(
            f"{where}: a compressed record within a packed item; torch.save never does that"
        )
    return head[at + _LOCAL.size : at + _LOCAL.size + names].decode("utf-8", "replace"), start


def _size(head: bytes, start: int, where: str) -> int:
    """Return the size of a short record: up to the next descriptor that says the same size."""
    end = head.find(_DESCRIPTOR_MAGIC, start)
    while 0 <= end <= len(head) - _DESCRIPTOR.size:
        if _DESCRIPTOR.unpack_from(head, end)[3] == end - start:
            return end - start
        end = head.find(_DESCRIPTOR_MAGIC, end + 1)
    raise Corrupt(f"{where}: a record of the packed item does not end")


def _crc_behind(head: bytes, at: int, size: int, where: str) -> int:
    """Return the CRC32 in the data descriptor at ``at``, behind a record of ``size`` bytes."""
    if at + _DESCRIPTOR.size > len(head):
        raise Corrupt(f"{where}: the packed item ends before its tensor")
    magic, crc, *sizes = _DESCRIPTOR.unpack_from(head, at)
    if magic != _DESCRIPTOR_MAGIC or sizes != [size, size]:
        raise Corrupt(
            f"{where}: a record of the packed item does not have the size that its descriptor says"
        )
    return int(crc)


def _part(item: Extent, stored: StoredTensor, start: int, where: str, *, has_crc: bool) -> Part:
    """Return where the elements lie in the stream, whose record begins at ``start``."""
    size = stored.storage.numel * ITEMSIZE[stored.storage.dtype]
    first = stored.offset * ITEMSIZE[stored.dtype]
    span = torch_pickle.span(stored.shape, stored.strides) * ITEMSIZE[stored.dtype]
    if first + span > size:
        raise Corrupt(f"{where}: a storage of {size} bytes, {first + span} expected")
    packed = PackedItem(item, start, size) if has_crc else PackedItem(item)
    strides = None if torch_pickle.is_contiguous(stored) else stored.strides
    return Part(
        (0,) * len(stored.shape),
        stored.shape,
        Extent(virtual_name(packed), start + first, span),
        strides,
    )
