"""What passes into a store is what was meant, or it never gets a name; and it is read as often as it must be, and told once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from ckptsync.digest import MOST_OF_ALL, digest, digest_stream
from ckptsync.errors import Incomplete, StoreError, Transient
from ckptsync.records.manifest import FileEntry
from ckptsync.stores import ending
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.writing import BLOCK
from ckptsync.walk import walk
from ckptsync.worker.content import Guarded, Source, Stored, checked, is_stored, stored_chunks
from ckptsync.worker.snapshot import CHUNK, Changed, Held, unread

LARGE = bytes(range(256)) * ((CHUNK + 5) // 256 + 1)


def entry(content: bytes) -> FileEntry:
    return FileEntry("x", len(content), digest(content), 1 << 14, (), 0)


def held(root: Path, content: bytes) -> Held:
    (root / "x").write_bytes(content)
    return Held(walk(root).files[0], root, is_pinned=False)


@pytest.mark.parametrize("chunks", [[b"ab", b"d"], [b"ab"], [b"abc", b"d"], []])
def test_other_bytes_than_those_taken_never_get_a_name(chunks: list[bytes]) -> None:
    store = MemoryStore()
    with pytest.raises(Incomplete, match="not the bytes that were taken"):
        store.write("x", checked(map(memoryview, chunks), entry(b"abc"), "x"))
    assert list(store.names("")) == []
    store.write("x", checked(map(memoryview, [b"a", b"bc"]), entry(b"abc"), "x"))
    assert is_stored(store, "x", entry(b"abc"))


def test_a_large_file_passes_in_pieces() -> None:
    store = MemoryStore()
    store.write("x", [LARGE])
    seen = [blake3(piece).hexdigest() for piece in stored_chunks(store, "x", len(LARGE))]
    assert seen == [digest(LARGE[:CHUNK]), digest(LARGE[CHUNK:])]
    assert list(stored_chunks(store, "x", 0)) == []


def test_what_is_stored_is_told_by_its_bytes() -> None:
    store = MemoryStore()
    assert is_stored(store, "x", entry(b"abc")) is None
    for content, is_it in ((b"abc", True), (b"abd", False), (b"ab", False)):
        store.write("x", [content])
        assert is_stored(store, "x", entry(b"abc")) is is_it


def test_a_file_is_digested_by_the_pass_that_sends_it(tmp_path: Path) -> None:
    store, told = MemoryStore(), list[int]()
    source = Source(held(tmp_path, LARGE), "n0", passed=told.append)
    assert source.entry.digest == ""
    store.create("y", source, source.about)
    found = digest_stream([LARGE], len(LARGE))
    assert (source.entry.digest, source.entry.blocks) == (found.digest, found.blocks)
    assert source.digested() is source.entry
    assert told == [CHUNK, len(LARGE) - CHUNK]


def test_bytes_that_are_read_again_are_told_once(tmp_path: Path) -> None:
    told: list[int] = []
    one = held(tmp_path, LARGE)
    source = Source(one, "n0", passed=told.append)
    broken_off = iter(source)
    for _ in "ab":
        next(broken_off)
    for again in (source, Source(one, "n0", source.digested(), told.append)):
        list(again)
        assert sum(told) == len(LARGE)


def test_a_known_file_that_has_other_bytes_by_now_is_told_from_what_was_read(tmp_path: Path) -> None:
    with pytest.raises(Changed, match="not the bytes"):
        list(Source(held(tmp_path, b"abd"), "n0", entry(b"abc")))


def test_an_upload_is_continued_by_the_same_node_with_the_same_file_and_by_no_other(tmp_path: Path) -> None:
    one = held(tmp_path, b"abc")
    origin = Source(one, "n0").about.origin
    assert Source(one, "n0", entry(b"abc")).about.origin == origin
    os.link(tmp_path / "x", tmp_path / "pin")
    assert Source(Held(replace(walk(tmp_path).files[0], path="x"), tmp_path, is_pinned=True), "n0").about.origin == origin
    assert Source(one, "n1").about.origin != origin
    os.utime(tmp_path / "x", ns=(1, 1))
    assert Source(Held(replace(walk(tmp_path).files[0], path="x"), tmp_path, is_pinned=False), "n0").about.origin != origin


def test_a_copy_within_the_store_is_checked_on_its_way() -> None:
    store = MemoryStore()
    store.write("x", [b"abc"])
    copy = Stored(store, "x", entry(b"abc"), "n0")
    store.write("y", copy, copy.about)
    assert is_stored(store, "y", entry(b"abc"))
    wrong = Stored(store, "x", entry(b"abd"), "n0")
    with pytest.raises(Changed):
        store.write("z", wrong, wrong.about)
    assert copy.about.origin not in ("", Stored(store, "x", entry(b"abc"), "n1").about.origin, wrong.about.origin)


def test_the_last_word_is_asked_for_before_there_is_a_name() -> None:
    store, asked = MemoryStore(), list[str]()

    def last() -> None:
        asked.append("last")
        raise StoreError("no")

    def chunks() -> Iterator[memoryview]:
        asked.append("chunk")
        yield memoryview(b"a")

    with pytest.raises(StoreError):
        store.write("x", Guarded(chunks(), last))
    assert (asked, list(store.names(""))) == (["chunk", "last"], [])


def test_an_entry_that_nobody_has_read_says_so(tmp_path: Path) -> None:
    assert unread(held(tmp_path, b"abc").stat).digest == ""


def test_chunks_begin_where_a_disk_wants_memory_to_begin(tmp_path: Path) -> None:
    """Else no byte of them goes past the page cache, and each costs a second copy."""
    store = MemoryStore()
    store.write("y", [LARGE])
    for stream in (Source(held(tmp_path, LARGE), "n"), stored_chunks(store, "y", len(LARGE))):
        assert {np.frombuffer(chunk, "u1").ctypes.data % BLOCK for chunk in stream} == {0}


def test_nothing_large_is_read_to_its_end_by_a_process_that_is_about_to_end(tmp_path: Path) -> None:
    store = MemoryStore()
    store.write("y", [LARGE])
    for stream in (iter(Source(held(tmp_path, LARGE), "n")), stored_chunks(store, "y", len(LARGE))):
        next(stream)
        ending.announce()
        with pytest.raises(Transient, match="about to end"):
            next(stream)
        ending.begin()


def test_a_file_of_many_has_few_blocks(tmp_path: Path) -> None:
    one = Source(held(tmp_path, LARGE), "n0", files=MOST_OF_ALL // 8)
    assert len(one.digested().blocks) in (3, 4)
    assert one.entry.digest == digest_stream([LARGE], len(LARGE)).digest
