"""Streams: read ahead by threads or through a small buffer, and compared with digests."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, Corrupt, Exists, NotFound, Transient
from ckptsync.stores import progress_signs
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import open_any
from ckptsync.stores.retry import Persistence, Retrying
from ckptsync.stores.stream import (
    StoredCopy,
    create_same,
    has_same_bytes,
    read_ahead,
    stored_digest,
    stream,
    verified,
)
from ckptsync.tensors import Extent
from tests.support.flaky_store import FailsAt
from tests.support.scripted_s3 import Asked, Say, scripted
from tests.support.seaweedfs import weed

CONTENT = bytes(range(251)) * 20


class Source:
    """Says which reads have begun."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.begun: list[int] = []
        self.has_begun = threading.Condition()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        with self.has_begun:
            self.begun.append(start)
            self.has_begun.notify_all()
        if start == self.fails_at:
            raise Transient(f"no answer at {start}")
        out[:] = CONTENT[start : start + len(out)]

    def wait_for(self, count: int) -> bool:
        with self.has_begun:
            return self.has_begun.wait_for(lambda: len(self.begun) >= count, 60)


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("ckptsync-ahead")]


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 500, 501, 5020])
@pytest.mark.parametrize("depth", [0, 1, 4, 100])
def test_a_file_comes_whole_and_in_order(size: int, depth: int) -> None:
    pieces = [bytes(piece) for piece in read_ahead(Source(), "a", size, 100, depth)]
    assert b"".join(pieces) == CONTENT[:size]
    assert all(len(piece) == 100 for piece in pieces[:-1])
    assert not readers()


def test_the_next_pieces_are_being_read_while_one_is_used_and_no_more_than_that() -> None:
    source = Source()
    pieces = read_ahead(source, "a", 5000, 100, 3)
    next(pieces)
    assert source.wait_for(4)
    assert sorted(source.begun) == [0, 100, 200, 300]
    next(pieces)
    assert source.wait_for(5)
    assert sorted(source.begun) == [0, 100, 200, 300, 400]
    pieces.close()


def test_memory_is_so_many_buffers_whatever_the_file() -> None:
    buffers: list[object] = []  # kept, so that no id is used twice

    class Keeping(Source):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            buffers.append(out.obj)
            super().read_into(name, start, out)

    assert sum(map(len, read_ahead(Keeping(), "a", 5020, 10, 4))) == 5020
    assert len({id(buffer) for buffer in buffers}) == 5


def test_an_error_comes_in_its_turn_as_it_is_and_no_thread_stays() -> None:
    pieces = read_ahead(Source(fails_at=200), "a", 5000, 100, 4)
    assert [len(next(pieces)) for _ in range(2)] == [100, 100]
    with pytest.raises(Transient, match="no answer at 200"):
        next(pieces)
    assert not readers()


@pytest.mark.parametrize("depth", [0, 4])
def test_nothing_is_read_to_its_end_once_the_process_is_to_end(depth: int) -> None:
    pieces = read_ahead(Source(), "a", 200, 100, depth, first=300)
    assert bytes(next(pieces)) == CONTENT[300:400]
    progress_signs.announce_shutdown()
    with pytest.raises(Transient, match="a: not read"):
        next(pieces)


def streamed(store: Store, extent: Extent, buffer: int = 100) -> list[bytes]:
    got: list[bytes] = []
    stream(store, extent, memoryview(bytearray(buffer)), lambda view: got.append(bytes(view)))
    return got


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "memory":
        store: Store = MemoryStore()
    else:
        store = open_any(f"s3://{weed().bucket()}", weed().options())
    store.write("a", [CONTENT])
    return store


def test_a_range_comes_in_full_buffers_and_a_rest(store: Store) -> None:
    got = streamed(store, Extent("a", 7, 1050))
    assert b"".join(got) == CONTENT[7:1057]
    assert [len(each) for each in got] == [100] * 10 + [50]
    assert streamed(store, Extent("a", 5, 0)) == []
    with pytest.raises(Corrupt):
        streamed(store, Extent("a", 5000, 100))


def test_what_the_taker_raises_is_raised_as_it_is_and_nothing_is_tried_again(store: Store) -> None:
    taken: list[int] = []

    def full(view: memoryview) -> None:
        taken.append(len(view))
        raise Transient("no space")

    with pytest.raises(Transient, match="no space"):
        stream(store, Extent("a", 0, 1000), memoryview(bytearray(100)), full)
    assert taken == [100]
    assert streamed(store, Extent("a", 0, 10)) == [CONTENT[:10]], (
        "the connection that was left is not used again"
    )


def part(asked: Asked) -> Say:
    """The range, of which not all comes."""
    start, end = map(int, asked.headers["range"].removeprefix("bytes=").split("-"))
    data = CONTENT[start : min(end + 1, start + 400)]
    return Say(
        206,
        data,
        {"ETag": '"1"', "Content-Range": f"bytes {start}-{end}/{len(CONTENT)}"},
        length=end - start + 1,
    )


def test_what_broke_off_goes_on_and_no_byte_comes_twice() -> None:
    with scripted(*[part] * 20) as script:
        assert b"".join(streamed(script.store(), Extent("a", 3, 1000))) == CONTENT[3:1003]
    assert [a.headers.get("if-match") for a in script.asked[:2]] == [None, '"1"']


class Early(MemoryStore):
    """Sees that a name is taken before it asks for a chunk."""

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        if any(entry.name == name for entry in self.names("")):
            raise Exists(name)
        super().create(name, chunks, about)


@pytest.mark.parametrize("store", [MemoryStore(), Early()])
@pytest.mark.parametrize("again", [False, True])
def test_who_creates_second_learns_whether_the_same_bytes_are_there(
    store: MemoryStore, *, again: bool
) -> None:
    def chunks(data: bytes) -> Iterable[bytes]:
        found = [data[:1], data[1:]]
        return found if again else iter(found)

    name = f"x-{again}"
    answers = [
        create_same(store, name, chunks(data)) for data in (b"one", b"two", b"on", b"ones", b"one")
    ]
    assert answers == [True, False, False, False, True]
    assert read_all(store, name) == b"one"


def failing_once(store: Store) -> Store:
    """Fail between two chunks, and try again."""
    return Retrying(FailsAt(store, 2), Persistence(60, sleep=lambda _: None))


def test_an_iterator_that_has_begun_is_not_created_from_again() -> None:
    store = MemoryStore()
    with pytest.raises(Transient):
        create_same(failing_once(store), "x", iter([b"one", b"two"]))
    assert list(store.names("")) == []
    assert create_same(failing_once(store), "x", [b"one", b"two"])
    assert read_all(store, "x") == b"onetwo"


@pytest.mark.parametrize("is_same", [False, True])
def test_what_the_store_compared_is_not_read_back(*, is_same: bool) -> None:
    class Comparing(MemoryStore):
        def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
            raise Exists(name, is_same=is_same)

    assert create_same(Comparing(), "x", [b"one"]) is is_same


def test_what_is_stored_is_known_by_its_size_and_digest() -> None:
    store, read = MemoryStore(), list[int]()
    assert has_same_bytes(store, "x", 5, digest(b"model")) is None
    for data in (b"model", b"nodel", b"mode", b"models"):
        store.write("x", [data])
        is_same = has_same_bytes(store, "x", 5, digest(b"model"), read.append)
        assert is_same == (data == b"model")
    assert read == [5, 5], "a file of another size is not read"
    assert stored_digest(store, "x", 6) == digest(b"models")


@pytest.mark.parametrize(
    ("error", "is_same"), [(NotFound("x"), None), (Corrupt("x: ends at byte 1"), False)]
)
def test_a_file_that_goes_or_becomes_shorter_is_not_stored(
    error: CkptsyncError, *, is_same: bool | None
) -> None:
    class Shrinking(MemoryStore):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            raise error

    store = Shrinking()
    store.write("x", [b"one"])
    assert has_same_bytes(store, "x", 3, digest(b"one")) is is_same


@pytest.mark.parametrize("size", [0, 1, 4 << 20, (4 << 20) + 1])
def test_a_copy_has_the_bytes_of_its_digest_each_time_it_is_read(size: int) -> None:
    store, content = MemoryStore(), b"x" * size
    store.write("a", [content])
    copy = StoredCopy(store, "a", size, digest(content))
    for name in ("b", "c"):
        store.write(name, copy)
        assert read_all(store, name) == content


def test_other_bytes_than_those_of_the_digest_are_never_stored() -> None:
    store = MemoryStore()
    store.write("a", [b"other"])
    with pytest.raises(Corrupt, match=r"a: checksum [0-9a-f]{16}…, recorded"):
        store.write("b", StoredCopy(store, "a", 5, digest(b"right")))
    with pytest.raises(Transient, match="say this"):
        store.write("b", verified([b"other"], "a", digest(b"right"), Transient("say this")))
    assert [e.name for e in store.names("")] == ["a"]
