"""The bytes that pass into a store are those that were meant, read as often as necessary and
counted once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckptsync.digest import MOST_OF_ALL, digest, digest_stream
from ckptsync.errors import Incomplete, StoreError, Transient
from ckptsync.records.manifest import FileEntry
from ckptsync.stores import progress_signs
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.posix.draft import BLOCK
from ckptsync.walk import walk
from ckptsync.worker.local_save import CHUNK, Changed, LocalFile
from ckptsync.worker.upload_sources import (
    FilePool,
    Guarded,
    StoreSource,
    Transfer,
    UploadSource,
    checked,
    is_stored,
)

LARGE = bytes(range(256)) * ((CHUNK + 5) // 256 + 1)


def entry(content: bytes) -> FileEntry:
    return FileEntry("x", len(content), digest(content), 1 << 14, (), 0)


def make_local_file(root: Path, content: bytes) -> LocalFile:
    (root / "x").write_bytes(content)
    return LocalFile(walk(root).files[0], root, is_pinned=False)


@pytest.mark.parametrize("chunks", [[b"ab", b"d"], [b"ab"], [b"abc", b"d"], []])
def test_other_bytes_than_those_taken_never_get_a_name(chunks: list[bytes]) -> None:
    store = MemoryStore()
    with pytest.raises(Incomplete, match="changed since its snapshot"):
        store.write("x", checked(map(memoryview, chunks), entry(b"abc"), "x"))
    assert list(store.names("")) == []
    store.write("x", checked(map(memoryview, [b"a", b"bc"]), entry(b"abc"), "x"))
    assert is_stored(store, "x", entry(b"abc"))


def test_what_is_stored_is_told_by_its_bytes() -> None:
    store = MemoryStore()
    assert is_stored(store, "x", entry(b"abc")) is None
    for content, is_it in ((b"abc", True), (b"abd", False), (b"ab", False)):
        store.write("x", [content])
        assert is_stored(store, "x", entry(b"abc")) is is_it


def test_a_file_is_digested_by_the_pass_that_sends_it(tmp_path: Path) -> None:
    store, told = MemoryStore(), list[int]()
    source = UploadSource(make_local_file(tmp_path, LARGE), "n0", after_chunk=told.append)
    assert source.entry.digest == ""
    store.create("y", source, source.about)
    whole_digest = digest_stream([LARGE], len(LARGE))
    assert (source.entry.digest, source.entry.blocks) == (whole_digest.digest, whole_digest.blocks)
    assert source.digested() is source.entry
    assert told == [CHUNK, len(LARGE) - CHUNK]


def test_bytes_that_are_read_again_are_told_once(tmp_path: Path) -> None:
    told: list[int] = []
    local_file = make_local_file(tmp_path, LARGE)
    source = UploadSource(local_file, "n0", after_chunk=told.append)
    broken_off = iter(source)
    for _ in "ab":
        next(broken_off)
    for again in (source, UploadSource(local_file, "n0", source.digested(), told.append)):
        list(again)
        assert sum(told) == len(LARGE)


def test_an_upload_is_continued_by_the_same_node_and_file_alone(tmp_path: Path) -> None:
    local_file = make_local_file(tmp_path, b"abc")
    origin = UploadSource(local_file, "n0").about.origin
    assert UploadSource(local_file, "n0", entry(b"abc")).about.origin == origin
    os.link(tmp_path / "x", tmp_path / "pin")
    assert (
        UploadSource(
            LocalFile(replace(walk(tmp_path).files[0], path="x"), tmp_path, is_pinned=True), "n0"
        ).about.origin
        == origin
    )
    assert UploadSource(local_file, "n1").about.origin != origin
    for other in (replace(local_file.stat, mtime=1), replace(local_file.stat, size=4)):
        assert UploadSource(replace(local_file, stat=other), "n0").about.origin != origin


def test_a_copy_within_the_store_is_checked_on_its_way() -> None:
    store = MemoryStore()
    store.write("x", [b"abc"])
    told: list[int] = []
    copy = StoreSource(store, "x", entry(b"abc"), "n0", told.append)
    store.write("y", copy, copy.about)
    assert (told, copy.position) == ([0], 3), "no bytes of a node's own"
    assert is_stored(store, "y", entry(b"abc"))
    wrong = StoreSource(store, "x", entry(b"abd"), "n0")
    with pytest.raises(Changed):
        store.write("z", wrong, wrong.about)
    assert copy.about.origin not in (
        "",
        StoreSource(store, "x", entry(b"abc"), "n1").about.origin,
        wrong.about.origin,
    )


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


def test_chunks_begin_where_a_disk_wants_memory_to_begin(tmp_path: Path) -> None:
    """Else no byte of them goes past the page cache, and each costs a second copy."""
    store = MemoryStore()
    store.write("y", [LARGE])
    for stream in (
        UploadSource(make_local_file(tmp_path, LARGE), "n"),
        StoreSource(store, "y", entry(LARGE), "n"),
    ):
        assert {np.frombuffer(chunk, "u1").ctypes.data % BLOCK for chunk in stream} == {0}


def test_nothing_large_is_read_to_its_end_by_a_process_that_is_about_to_end(tmp_path: Path) -> None:
    store = MemoryStore()
    store.write("y", [LARGE])
    for stream in (
        iter(UploadSource(make_local_file(tmp_path, LARGE), "n")),
        iter(StoreSource(store, "y", entry(LARGE), "n")),
    ):
        next(stream)
        progress_signs.announce_shutdown()
        with pytest.raises(Transient, match="about to end"):
            next(stream)
        progress_signs.clear_shutdown()


def test_a_file_of_many_has_few_blocks(tmp_path: Path) -> None:
    source = UploadSource(make_local_file(tmp_path, LARGE), "n0", files=MOST_OF_ALL // 8)
    assert len(source.digested().blocks) in (3, 4)
    assert source.entry.digest == digest_stream([LARGE], len(LARGE)).digest


def test_results_come_in_order_whoever_is_done_first() -> None:
    def work(item: int) -> int:
        time.sleep(0.02 * (item == 0))
        return item * item

    assert FilePool(4).each(work, range(20)) == [n * n for n in range(20)]
    assert FilePool(1).each(work, range(3)) == [0, 1, 4]
    assert FilePool(4).each(work, []) == []


def test_no_more_than_so_many_run_at_once_and_so_many_do() -> None:
    meeting = threading.Barrier(3, timeout=60)
    running, most = [0], [0]

    def work(_: int) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        meeting.wait()
        running[0] -= 1
        meeting.wait()

    FilePool(3).each(work, range(9))
    assert most == [3]


def test_the_first_error_is_raised_when_the_others_have_ended_at_their_next_chunk() -> None:
    together, begun, ended = FilePool(2), list[int](), list[int]()
    both = threading.Barrier(2, timeout=60)

    def work(item: int) -> None:
        begun.append(item)
        both.wait()
        if item == 0:
            raise Incomplete("the source changed")
        try:
            while True:
                together.end_chunk(1)
        finally:
            ended.append(item)

    with pytest.raises(Incomplete, match="the source changed"):
        together.each(work, range(9))
    assert (sorted(begun), ended) == ([0, 1], [1])
    assert together.each(lambda item: item, range(3)) == [0, 1, 2]


def test_what_passes_is_told_by_one_thread_at_a_time() -> None:
    total, inside = [0], threading.Lock()

    def passed(count: int) -> None:
        assert inside.acquire(blocking=False)
        before = total[0]
        time.sleep(0)
        total[0] = before + count
        inside.release()

    together = FilePool(8, passed)

    def work(_: int) -> None:
        for _ in range(50):
            together.end_chunk(1)

    signs = progress_signs.signs()
    together.each(work, range(40))
    assert total == [2000]
    assert progress_signs.signs() == signs + 2000, "the watchdog sees each"


def test_what_is_told_may_fail_and_that_is_an_error_of_its_own() -> None:
    def passed(count: int) -> None:
        if count:
            raise StoreError("asked to stop")

    together = FilePool(2, passed)
    with pytest.raises(StoreError, match="asked to stop"):
        together.each(together.end_chunk, [1, 2, 3])


@pytest.mark.parametrize("kind", [Transient, StoreError])
def test_what_ends_since_another_failed_is_of_its_kind(kind: type[StoreError]) -> None:
    ended: list[StoreError] = []
    together, failed = FilePool(2), threading.Event()

    def work(item: int) -> None:
        if item:
            failed.set()
            raise kind("away")
        failed.wait(60)
        try:
            while True:
                together.end_chunk(1)
        except StoreError as e:
            ended.append(e)
            raise

    with pytest.raises(kind, match="away"):
        together.each(work, [0, 1])
    assert [type(e) for e in ended] == [kind]


def test_bytes_that_a_store_has_read_ahead_are_not_done_before_they_are_sent() -> None:
    file = entry(bytes(100))
    source: Any = SimpleNamespace(entry=file, position=100)
    transfer = Transfer(200)
    with transfer.of(source):
        assert transfer.done == 0
        progress_signs.count_sent(40)
        assert transfer.done == 40
        progress_signs.count_sent(100)  # a part was sent again
        assert transfer.done == 100
    transfer.end(file)
    assert transfer.done == 100
    transfer.restart(200, 150)
    assert transfer.done == 50
    transfer.restart(50, 50)
    transfer.end(file)
    assert transfer.done == 50
