"""Reading packed items: a `Files` that has them under their virtual names, and a decompressor's memory for each that is being read.

A zstd stream can only be read forward.  A merge reads forward too, so that an item is mostly decompressed once; going back begins again.
Nothing is decompressed beyond what is asked for, which the item's own metadata bounds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any, Protocol

from ckptsync.digest import crc32
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.packed import Packed, parse
from ckptsync.model import Extent, Files, expect, read

MOST_OPEN = 16  # decompressors; each has a window
WINDOW = 8 << 20  # bytes that every zstd decoder is to support (RFC 8878, 3.1.1.1.2); zstandard's default levels use 2 MiB
_PIECE = 128 << 10
_DESCRIPTOR = b"PK\x07\x08"


class Unpacker(Protocol):
    """A decompressor of one stream; both libraries have one of this shape, or are given it here."""

    def read(self, count: int) -> bytes:
        """At most ``count`` bytes, none at the end; raises ValueError where the stream is damaged."""
        ...


class Unpacked:
    """``files``, and the unpacked streams of their packed items; any number of threads may read."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._streams: OrderedDict[str, _Stream] = OrderedDict()
        self._lock = Lock()

    def sizes(self) -> Mapping[str, int]:
        """The real files'; a stream does not tell its length."""
        return self._files.sizes()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Files` says; raises Corrupt also where the stream, or the CRC32 behind the record that was read to its end, is wrong."""
        packed = parse(name)
        if packed is None:
            self._files.read_into(name, start, out)
        else:
            self._stream(name, packed).read_into(start, out)

    def expect(self, extents: Iterable[Extent]) -> None:
        """As `Expecting` says, of real files."""
        expect(self._files, (extent for extent in extents if parse(extent.file) is None))

    def head(self, name: str, count: int) -> bytes:
        """At most ``count`` bytes of an unpacked stream from its start, fewer where it ends."""
        packed = parse(name)
        assert packed is not None
        return self._stream(name, packed).head(count)

    def _stream(self, name: str, packed: Packed) -> _Stream:
        with self._lock:
            found = self._streams.pop(name, None) or _Stream(self._files, packed)
            self._streams[name] = found
            while len(self._streams) > MOST_OPEN:
                self._streams.popitem(last=False)
            return found


def opened(files: Files) -> Unpacked:
    """``files`` themselves if they have the virtual names already."""
    return files if isinstance(files, Unpacked) else Unpacked(files)


class _Stream:
    """One item, read forward from wherever it is."""

    def __init__(self, files: Files, packed: Packed) -> None:
        self._files, self._packed = files, packed
        self._lock = Lock()
        self._begin()

    def _begin(self) -> None:
        self._source = unpacker()(_Source(self._files, self._packed.item))
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
            self._check()

    def _exactly(self, count: int) -> bytes:
        data = self._take(count)
        if len(data) < count:
            item = self._packed.item
            raise Corrupt(
                f"{item.file} at {item.start}: the packed item ends at byte {self._at}, more expected", hint="fetch it again"
            )
        return data

    def _take(self, count: int) -> bytes:
        pieces, left = [], count
        while left:
            try:
                data = self._source.read(left)
            except ValueError as e:
                item = self._packed.item
                raise Corrupt(
                    f"{item.file} at {item.start}: no zstd stream: {e}", hint="the shard is damaged: fetch it again"
                ) from e
            if not data:
                break
            pieces.append(data)
            left -= len(data)
        found = b"".join(pieces)
        self._sum(found)
        return found

    def _sum(self, data: bytes) -> None:
        first, end = self._packed.first, self._packed.first + self._packed.length
        low, high = max(self._at, first), min(self._at + len(data), end)
        if low < high:
            self._crc = crc32(data[low - self._at : high - self._at], self._crc)
        self._at += len(data)

    def _check(self) -> None:
        """At the record's end, compare it with the data descriptor that follows; the stream goes on behind that."""
        if not self._packed.length or self._at != self._packed.first + self._packed.length:
            return
        told = self._exactly(8)
        if told[:4] != _DESCRIPTOR or int.from_bytes(told[4:], "little") != self._crc:
            item = self._packed.item
            raise Corrupt(
                f"{item.file} at {item.start}: the unpacked tensor does not have its CRC32",
                hint="the shard is damaged: fetch it again",
            )


class _Source:
    """The packed bytes as a file to be read once."""

    def __init__(self, files: Files, item: Extent) -> None:
        self._files, self._item, self._at = files, item, 0

    def read(self, count: int = -1) -> bytes:
        left = self._item.size - self._at
        count = min(left, _PIECE) if count < 0 else min(left, count)
        data = read(self._files, Extent(self._item.file, self._item.start + self._at, count))
        self._at += count
        return data


def unpacker() -> Callable[[_Source], Unpacker]:
    """The decompressor that this Python has; raises Unsupported where it has none."""
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
        return lambda source: _OfPackage(zstandard, source)
    return lambda source: _OfPython(zstd, source)


class _OfPackage:
    """By the package ``zstandard``."""

    def __init__(self, library: Any, source: _Source) -> None:
        self._error = library.ZstdError
        try:
            self._reader = library.ZstdDecompressor(max_window_size=WINDOW).stream_reader(source, read_size=_PIECE)
        except library.ZstdError as e:
            raise ValueError(str(e)) from e

    def read(self, count: int) -> bytes:
        try:
            data: bytes = self._reader.read(count)
        except self._error as e:
            raise ValueError(str(e)) from e
        return data


class _OfPython:
    """By ``compression.zstd`` of Python 3.14."""

    def __init__(self, library: Any, source: _Source) -> None:
        self._error, self._source = library.ZstdError, source
        options = {library.DecompressionParameter.window_log_max: WINDOW.bit_length() - 1}
        self._decoder = library.ZstdDecompressor(options=options)

    def read(self, count: int) -> bytes:
        try:
            while not self._decoder.eof:
                packed = self._source.read(_PIECE) if self._decoder.needs_input else b""
                is_at_end = self._decoder.needs_input and not packed
                data: bytes = self._decoder.decompress(packed, count)
                if data or is_at_end:
                    return data
        except self._error as e:
            raise ValueError(str(e)) from e
        return b""
