"""Streams that are read through their virtual names: forward, backward, by many threads, damaged."""

from __future__ import annotations

import builtins
import contextlib
import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats import unpacking
from ckptsync.formats.packed import Packed, name_of
from ckptsync.formats.unpacking import MOST_OPEN, Unpacked, opened
from ckptsync.model import Extent, read
from tests.packing import packed, stream
from tests.plain_files import MemoryFiles

DATA = random.Random(7).randbytes(300_000) + bytes(200_000)


@given(st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, 200_000)), max_size=6))
@settings(max_examples=30, deadline=None)
def test_any_reads_in_any_order_give_the_bytes_that_were_packed(reads: list[tuple[int, int]]) -> None:
    files, name = stream(DATA, before=b"head", behind=b"tail")
    unpacked = Unpacked(files)
    for start, count in reads:
        size = min(count, len(DATA) - start)
        assert read(unpacked, Extent(name, start, size)) == DATA[start : start + size]


def test_real_files_are_read_as_they_are_and_sizes_are_theirs() -> None:
    files, name = stream(DATA)
    unpacked = Unpacked(files)
    assert unpacked.sizes() == files.sizes()
    assert read(unpacked, Extent("__0_0.distcp", 0, 4)) == files.content["__0_0.distcp"][:4]
    assert opened(unpacked) is unpacked
    with pytest.raises(Incomplete):
        read(unpacked, Extent(name.replace("__0_0", "__1_0"), 0, 4))


def test_the_head_ends_where_the_stream_ends() -> None:
    files, name = stream(b"short")
    assert Unpacked(files).head(name, 3) == b"sho"
    assert Unpacked(files).head(name, 4096) == b"short"


def test_reading_behind_the_end_is_corrupt() -> None:
    files, name = stream(DATA)
    with pytest.raises(Corrupt, match="ends at byte 500000"):
        read(Unpacked(files), Extent(name, len(DATA) - 5, 6))


def test_threads_that_share_a_stream_do_not_disturb_each_other() -> None:
    files, name = stream(DATA)
    unpacked = Unpacked(files)
    starts = [n * 1000 for n in range(400)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda at: read(unpacked, Extent(name, at, 1000)), starts)) == [DATA[at : at + 1000] for at in starts]


def test_only_so_many_decompressors_are_kept() -> None:
    one, number = packed(DATA), 3 * MOST_OPEN
    files = MemoryFiles({"f": one * number})
    unpacked = Unpacked(files)
    for n in range(number):
        assert read(unpacked, Extent(name_of(Packed(Extent("f", n * len(one), len(one)))), 9, 9)) == DATA[9:18]
    assert len(unpacked._streams) == MOST_OPEN


def summed(crc: int) -> bytes:
    """A record of all of DATA, its descriptor behind it."""
    return DATA + b"PK\x07\x08" + crc.to_bytes(4, "little") + bytes(8)


@pytest.mark.parametrize("step", [1000, 4096, 130_000, len(DATA)])
def test_a_record_that_is_read_to_its_end_has_its_crc32(step: int) -> None:
    for crc, is_right in ((zlib.crc32(DATA), True), (zlib.crc32(DATA) ^ 1, False)):
        files, name = stream(summed(crc), 0, len(DATA))
        unpacked = Unpacked(files)
        found = [read(unpacked, Extent(name, at, step)) for at in range(0, len(DATA) - step, step)]
        at = step * len(found)
        last = Extent(name, at, len(DATA) - at)
        if is_right:
            assert b"".join([*found, read(unpacked, last)]) == DATA
        else:
            with pytest.raises(Corrupt, match="does not have its CRC32"):
                read(unpacked, last)


def test_a_record_that_is_read_from_its_middle_is_summed_from_its_start() -> None:
    files, name = stream(summed(1), 0, len(DATA))
    with pytest.raises(Corrupt, match="CRC32"):
        read(Unpacked(files), Extent(name, len(DATA) - 9, 9))


@pytest.mark.parametrize("at", [0, 1, 4, 5, 6, 20, 1000])
def test_a_damaged_stream_is_corrupt_or_fails_its_crc32(at: int) -> None:
    files, name = stream(summed(zlib.crc32(DATA)), 0, len(DATA))
    content = bytearray(files.content["__0_0.distcp"])
    content[at] ^= 0x41
    with contextlib.suppress(Corrupt):  # the usual answer; a bit that means nothing may be flipped
        assert read(Unpacked(MemoryFiles({"__0_0.distcp": bytes(content)})), Extent(name, 0, len(DATA))) == DATA


def test_a_stream_that_is_cut_short_is_corrupt() -> None:
    content = packed(DATA)
    name = name_of(Packed(Extent("f", 0, len(content) // 2)))
    with pytest.raises(Corrupt, match="more expected"):
        read(Unpacked(MemoryFiles({"f": content})), Extent(name, 0, len(DATA)))


def test_a_stream_that_wants_a_large_window_is_refused() -> None:
    packed(b"")  # skips where nothing unpacks
    head = bytes.fromhex("28b52ffd") + bytes([0x00, 0xF8]) + b"\x01\x00\x00"  # a window of 2 TiB, and an empty last block
    with pytest.raises(Corrupt, match="no zstd stream"):
        read(Unpacked(MemoryFiles({"f": head})), Extent(name_of(Packed(Extent("f", 0, len(head)))), 0, 1))


def test_a_bomb_costs_no_more_than_what_is_asked_of_it() -> None:
    files, name = stream(bytes(1 << 28))
    unpacked = Unpacked(files)
    assert unpacked.head(name, 1 << 16) == bytes(1 << 16)
    (one,) = unpacked._streams.values()
    assert one._at == 1 << 16


def test_without_a_library_it_is_said_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name in ("zstandard", "compression"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Unsupported, match="packed with zstd") as refused:
        unpacking.unpacker()
    assert "ckptsync[zstd]" in refused.value.hint


class Library:
    """What `compression.zstd` of Python 3.14 has, made of the package: no Python here is so new."""

    class DecompressionParameter:
        window_log_max = 1

    def __init__(self, package: Any) -> None:
        self._package, self.ZstdError = package, package.ZstdError

    def ZstdDecompressor(self, options: object) -> Decoder:  # noqa: N802
        return Decoder(self._package.ZstdDecompressor().decompressobj())


class Decoder:
    """Bounded output, and ``needs_input`` while none is held back."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._held, self._is_over = inner, b"", False

    @property
    def eof(self) -> bool:
        return self._is_over and not self._held

    @property
    def needs_input(self) -> bool:
        return not self._held

    def decompress(self, data: bytes, most: int) -> bytes:
        if data:
            self._held += self._inner.decompress(data)
            self._is_over = self._inner.eof
        found, self._held = self._held[:most], self._held[most:]
        return found


def test_pythons_own_library_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("zstandard")
    monkeypatch.setattr(unpacking, "unpacker", lambda: lambda source: unpacking._OfPython(Library(package), source))
    files, name = stream(summed(zlib.crc32(DATA)), 0, len(DATA))
    assert read(Unpacked(files), Extent(name, 0, len(DATA))) == DATA
    with pytest.raises(Corrupt, match="more expected"):
        read(Unpacked(files), Extent(name, len(DATA), 999))
