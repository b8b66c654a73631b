"""What every store must do, as tests.

A store's own test file says ``class TestMine(StoreContract)`` and gives two fixtures.

``store`` is an empty store; ``again`` a second object on the same place, as another process would
have it.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptsync.errors import Corrupt, Exists, Incomplete, NotFound
from ckptsync.stores.contract import About, Chunk, Store, read_all
from ckptsync.stores.stream import read_ahead

HOSTILE = ["", "..", "/etc/passwd", "a/../b", "a//b", "a/", "a\\b", "a\nb", "x" * 256]


def names(store: Store, prefix: str = "") -> list[str]:
    return [entry.name for entry in store.names(prefix)]


def dies_after(*chunks: Chunk) -> Iterator[Chunk]:
    yield from chunks
    raise RuntimeError("the source is gone")


def content_of(n: int) -> list[bytes]:
    """Return what the nth of several writers writes."""
    return [b"%d" % n] * 1000


def race(step: Callable[[int], object]) -> list[bool]:
    """Take a step in eight threads at once; return of each whether the name was free."""
    at_once = threading.Barrier(8)

    def is_free(n: int) -> bool:
        at_once.wait()
        try:
            step(n)
        except Exists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(is_free, range(8)))


class StoreContract:
    def test_what_was_written_is_read_by_anybody(self, store: Store, again: Store) -> None:
        store.write("run/checkpoint-1/a", [b"one", bytearray(b"two"), memoryview(b"three")])
        assert read_all(again, "run/checkpoint-1/a") == b"onetwothree"
        assert again.size("run/checkpoint-1/a") == 11

    def test_a_file_may_be_empty(self, store: Store) -> None:
        empty: list[list[Chunk]] = [[], [b""], [b"", b"", memoryview(b"")]]
        for n, chunks in enumerate(empty):
            store.write(f"w{n}", chunks)
            store.create(f"c{n}", chunks)
            store.read_into(f"w{n}", 0, memoryview(bytearray(0)))
        assert [(e.name, e.size) for e in store.names("")] == [
            (name, 0) for name in ("c0", "c1", "c2", "w0", "w1", "w2")
        ]

    def test_names_are_sorted_as_whole_paths(self, store: Store) -> None:
        wanted = ["a-b", "a.b/x", "a/b", "a/b.c", "a/b/", "ab", "b/z/y/x", "b/z0", "ä", "日本/語"]
        wanted = sorted(n.removesuffix("/") + "/k" * n.endswith("/") for n in wanted if n != "a/b")
        for name in reversed(wanted):
            store.write(name, [b"x"])
        assert names(store) == wanted

    def test_a_prefix_is_whole_components(self, store: Store) -> None:
        for name in ["run/a", "run/b/c", "run2/a", "runs"]:
            store.write(name, [b"x"])
        assert names(store, "run/") == ["run/a", "run/b/c"]
        assert names(store, "run/b/") == ["run/b/c"]
        assert names(store, "nowhere/") == []
        assert names(store, "runs/") == [], "a file is no prefix"
        for listed in (store.dirs, lambda prefix: names(store, prefix)):
            with pytest.raises(ValueError, match="slash"):
                listed("run")
            with pytest.raises(Corrupt):
                listed("../")

    def test_directories_are_told_without_what_is_in_them(self, store: Store) -> None:
        for name in ["run/a/x/y", "run/a/z", "run/a.b/c", "run/b", "run/ä b/c", "run-2/x", "c"]:
            store.write(name, [b"x"])
        assert [name for name in store.dirs("") if name != ".ckptsync"] == ["run", "run-2"]
        assert store.dirs("run/") == ["a", "a.b", "ä b"]
        assert store.dirs("run/a/") == ["x"]
        assert store.dirs("run/", "a") == ["a", "a.b"]
        assert store.dirs("", "run-") == ["run-2"]
        assert store.dirs("run/b/") == store.dirs("nowhere/") == store.dirs("c/") == []
        assert store.dirs("run/", "b") == []

    def test_a_name_says_its_size_and_later_writes_are_not_older(self, store: Store) -> None:
        store.write("a", [b"xx"])
        store.write("b", [b"yyy"])
        a, b = store.names("")
        assert (a.size, b.size) == (2, 3)
        assert a.mtime <= b.mtime

    def test_a_range_is_exactly_what_was_asked_for_or_corrupt(self, store: Store) -> None:
        store.write("a", [b"0123456789"])
        for start, size in [(0, 10), (0, 3), (4, 6), (9, 1), (10, 0), (0, 0)]:
            out = bytearray(b"#" * size)
            store.read_into("a", start, memoryview(out))
            assert out == b"0123456789"[start : start + size]
        for start, size in [(0, 11), (9, 2), (10, 1), (1000, 1)]:
            with pytest.raises(Corrupt, match="a: ends at byte"):
                store.read_into("a", start, memoryview(bytearray(size)))

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        store.write("dir/file", [b"x"])
        for name in ["a", "dir", "dir/a", "dir/file/a", "a/b/c"]:
            with pytest.raises(NotFound):
                store.size(name)
            with pytest.raises(NotFound):
                store.read_into(name, 0, memoryview(bytearray(1)))

    def test_writing_replaces_also_for_who_has_read_before(
        self, store: Store, again: Store
    ) -> None:
        store.write("a", [b"old bytes"])
        assert read_all(again, "a") == b"old bytes"
        store.write("a", [b"new"])
        assert read_all(again, "a") == b"new"
        assert read_all(store, "a") == b"new"

    def test_creating_refuses_a_taken_name_and_leaves_it_alone(
        self, store: Store, again: Store
    ) -> None:
        store.create("run/a", [b"first"])
        for other in (store, again):
            with pytest.raises(Exists, match="run/a"):
                other.create("run/a", [b"second"])
        assert read_all(store, "run/a") == b"first"
        assert names(store) == ["run/a"]

    def test_of_many_creators_exactly_one_wins(self, store: Store, again: Store) -> None:
        won = race(lambda n: (store, again)[n % 2].create("deep/er/a", content_of(n)))
        assert won.count(True) == 1
        assert read_all(store, "deep/er/a") == b"".join(content_of(won.index(True)))
        assert names(store) == ["deep/er/a"]

    def test_deleting_twice_is_no_error_and_frees_the_name(
        self, store: Store, again: Store
    ) -> None:
        store.write("run/a", [b"x"])
        assert read_all(again, "run/a") == b"x"
        store.delete("run/a")
        store.delete("run/a")
        store.delete("never/there")
        assert names(store) == []
        with pytest.raises(NotFound):
            read_all(again, "run/a")
        store.create("run/a", [b"new"])
        assert read_all(again, "run/a") == b"new"

    def test_deleting_takes_one_file_and_no_neighbour(self, store: Store) -> None:
        for name in ["a/b", "a/b2", "a/c/d"]:
            store.write(name, [b"x"])
        store.delete("a/b")
        store.delete("a/c")
        store.delete("a")
        assert names(store) == ["a/b2", "a/c/d"]

    def test_chunks_that_die_leave_what_was_there(self, store: Store) -> None:
        store.write("run/old", [b"old"])
        for put, name in [
            (store.write, "run/w"),
            (store.create, "run/c"),
            (store.write, "run/old"),
        ]:
            with pytest.raises(RuntimeError, match="the source is gone"):
                put(name, dies_after(b"x" * 1000, b"y"))
        assert names(store) == ["run/old"]
        assert read_all(store, "run/old") == b"old"

    def test_more_or_fewer_bytes_than_were_said_leave_nothing(self, store: Store) -> None:
        for put, name in [(store.write, "run/w"), (store.create, "run/c")]:
            for size in (3, 5):
                with pytest.raises(Incomplete, match=f"expected {size}"):
                    put(name, [b"12", b"34"], About(size))
        assert names(store) == []

    def test_what_has_an_origin_is_whole_after_a_write_that_died(
        self, store: Store, again: Store
    ) -> None:
        content = [bytes([n]) * (1 << 20) for n in range(10)]
        about = About(10 << 20, "node0 a 1")
        with pytest.raises(RuntimeError, match="the source is gone"):
            store.write("a", dies_after(*content[:7]), about)
        again.write("a", content, about)
        assert read_all(store, "a") == b"".join(content)
        assert names(store) == ["a"]

    def test_nothing_shows_until_the_last_chunk(self, store: Store, again: Store) -> None:
        def watched() -> Iterator[bytes]:
            yield b"one"
            assert names(again) == []
            yield b"two"
            assert names(again) == []

        store.write("run/w", watched())
        assert names(again) == ["run/w"]

    def test_a_chunk_is_used_before_the_next_is_asked_for(self, store: Store) -> None:
        buffer = bytearray(4)

        def reused() -> Iterator[memoryview]:
            for n in range(5):
                buffer[:] = b"%04d" % n
                yield memoryview(buffer)

        store.write("w", reused())
        store.create("c", reused())
        assert read_all(store, "w") == read_all(store, "c") == b"00000001000200030004"

    def test_chunks_may_be_views_of_wider_elements(self, store: Store) -> None:
        store.write("a", [memoryview(b"\1\0\0\0\2\0\0\0").cast("I")])
        out = memoryview(bytearray(8)).cast("I")
        store.read_into("a", 0, out)
        assert out.tolist() == [1, 2]

    def test_names_may_be_deep_and_long(self, store: Store) -> None:
        name = "/".join([*"abcdefghijklmnopqrstuvwxyz", "n" * 230, " spaces and ünïcödé.bin"])
        store.create(name, [b"x"])
        assert names(store) == [name]
        assert read_all(store, name) == b"x"

    def test_a_name_that_reaches_elsewhere_is_refused(self, store: Store) -> None:
        uses: list[Callable[[str], object]] = [
            lambda name: store.write(name, [b"x"]),
            lambda name: store.create(name, [b"x"]),
            lambda name: store.read_into(name, 0, memoryview(bytearray(1))),
            store.size,
            store.delete,
        ]
        for name in HOSTILE:
            for use in uses:
                with pytest.raises(Corrupt):
                    use(name)
        assert names(store) == []

    def test_twenty_megabytes_in_uneven_chunks_come_back(self, store: Store) -> None:
        content = random.Random(1).randbytes(20 << 20)
        cuts = [0, 1, 4096, 5 << 20, (5 << 20) + 1, 17 << 20, len(content)]
        store.write("big", (memoryview(content)[a:b] for a, b in itertools.pairwise(cuts)))
        assert read_all(store, "big") == content
        store.create("elsewhere/big", read_ahead(store, "big", len(content)))
        assert read_all(store, "elsewhere/big") == content

    def test_threads_may_read_one_file_at_once(self, store: Store) -> None:
        content = bytes(range(256)) * 64
        store.write("a", [content])

        def is_right(n: int) -> bool:
            out = bytearray(100)
            store.read_into("a", n, memoryview(out))
            return out == content[n : n + 100]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(is_right, range(32)))
