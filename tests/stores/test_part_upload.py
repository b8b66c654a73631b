from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptsync.errors import Incomplete, StoreError, Transient
from ckptsync.stores import progress_signs
from ckptsync.stores.contract import UNKNOWN, About
from ckptsync.stores.part_upload import MIB, FilePart, UploadPool, part_size
from tests.support.waiting import until


class Shelf:
    """A server that keeps parts until they are committed.

    ``failing`` part numbers are refused once.
    """

    def __init__(self, failing: set[int] | None = None) -> None:
        self.parts: dict[int, bytes] = {}
        self.puts: list[int] = []
        self.file: bytes | None = None
        self.failing = failing or set()
        self.abandoned = self.begun = 0
        self.lock = threading.Lock()

    def put_whole(self, data: memoryview) -> None:
        self.file = bytes(data)

    def begin(self) -> Shelf:
        self.begun += 1
        return self

    def reuse_part(self, part: FilePart) -> bool:
        return self.parts.get(part.number) == bytes(part.data)

    def put(self, part: FilePart) -> None:
        with self.lock:
            self.puts.append(part.number)
            if part.number in self.failing:
                self.failing.discard(part.number)
                raise Transient("the server said 503")
            self.parts[part.number] = bytes(part.data)

    def commit(self, size: int) -> None:
        self.file = b"".join(self.parts[n] for n in sorted(self.parts))
        assert len(self.file) == size

    def abandon(self) -> None:
        self.abandoned += 1
        self.parts.clear()


def content(size: int) -> bytes:
    return bytes(range(251)) * (size // 251 + 1)


def chunks(data: bytes, size: int) -> Iterator[memoryview]:
    """As sources give them: one buffer, used again."""
    buffer = bytearray(size)
    for at in range(0, len(data), size):
        piece = data[at : at + size]
        buffer[: len(piece)] = piece
        yield memoryview(buffer)[: len(piece)]


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 201, 1234])
def test_a_file_arrives_as_it_is(size: int) -> None:
    data = content(size)[:size]
    ways = itertools.product([1, 30, 100, 1000], [1, 3], [About(size), UNKNOWN])
    for chunk, threads, about in ways:
        shelf = Shelf()
        UploadPool(threads, 300).send(shelf, chunks(data, chunk), about, 100)
        assert shelf.file == data
        assert shelf.begun == (size > 100)
        assert sorted(shelf.puts) == (list(range(1, -(-size // 100) + 1)) if size > 100 else [])


def test_what_an_earlier_try_has_left_is_not_sent_again() -> None:
    data, shelf = content(1000)[:1000], Shelf(failing={6})
    about = About(1000, "node0:/a:1000:7")
    with pytest.raises(Transient):
        UploadPool(1, 300).send(shelf, chunks(data, 64), about, 100)
    before = set(shelf.parts)
    assert before >= {1, 2, 3, 4, 5}
    shelf.parts[2] = b"damaged meanwhile"
    shelf.puts.clear()
    UploadPool(2, 300).send(shelf, chunks(data, 64), about, 100)
    assert shelf.file == data
    assert set(shelf.puts) == set(range(1, 11)) - before | {2}


@pytest.mark.parametrize(
    ("error", "origin", "abandoned"),
    [
        (RuntimeError, "here", 1),
        (StoreError, "here", 0),
        (KeyboardInterrupt, "here", 0),
        (StoreError, "", 1),
    ],
)
def test_a_source_that_fails_leaves_what_may_be_continued_and_no_more(
    error: type[BaseException], origin: str, abandoned: int
) -> None:
    class Slow(Shelf):
        here = 0
        released = threading.Event()

        def put(self, part: FilePart) -> None:
            self.here += 1
            assert self.released.wait(60)
            super().put(part)
            self.here -= 1

        def abandon(self) -> None:
            assert self.here == 0
            super().abandon()

    def dying() -> Iterator[bytes]:
        yield b"x" * 250
        assert until(lambda: shelf.here, 60)
        threading.Timer(0.05, shelf.released.set).start()
        raise error("gone")

    shelf = Slow()
    with pytest.raises(error, match="gone"):
        UploadPool(1, 300).send(shelf, dying(), About(1000, origin), 100)
    assert (shelf.here, shelf.file) == (0, None), "no part is being sent any more"
    assert shelf.abandoned == abandoned


@pytest.mark.parametrize("announced", [240, 260, 50, 350])
def test_a_source_of_another_size_than_announced_is_never_committed(announced: int) -> None:
    shelf = Shelf()
    with pytest.raises(Incomplete, match=f"expected {announced}"):
        UploadPool(2, 300).send(
            shelf, chunks(content(250)[:250], 10), About(announced, "here"), 100
        )
    assert shelf.file is None
    assert not shelf.parts


def test_a_write_that_fails_ends_with_its_own_error_and_frees_all_memory() -> None:
    class Refusing(Shelf):
        def begin(self) -> Shelf:
            raise StoreError("denied")

        def put_whole(self, data: memoryview) -> None:
            raise StoreError("denied")

    def dying() -> Iterator[bytes]:
        yield b"x" * 250
        raise RuntimeError("gone")

    parts, shelf, data = UploadPool(1, 100), Shelf(), content(5000)[:5000]
    failures: list[tuple[Shelf, Iterable[bytes | memoryview], type[Exception]]] = [
        (Shelf(failing={1}), chunks(data, 10), Transient),
        (Shelf(failing={2}), chunks(data, 10), Transient),
        (Shelf(), dying(), RuntimeError),
        (Refusing(), [data], StoreError),
        (Refusing(), [b"x"], StoreError),
    ]
    for failing, source, error in failures:
        with pytest.raises(error, match=r"503|gone|denied"):
            parts.send(failing, source, UNKNOWN, 100)
        writing = threading.Thread(
            target=parts.send, args=(shelf, chunks(data, 10), UNKNOWN, 100), daemon=True
        )
        writing.start()
        writing.join(60)
        assert shelf.file == data
        shelf.file = None


def test_bytes_are_counted_for_who_uploads_them_where_they_leave_or_were_kept() -> None:
    class Counting(Shelf):
        def put(self, part: FilePart) -> None:
            progress_signs.count_sent(len(part.data))
            super().put(part)

    counts: list[int] = []
    shelf, data = Counting(), content(300)[:300]
    shelf.parts[1] = data[:100]
    with progress_signs.counted_by(counts.append):
        UploadPool(2, 400).send(shelf, chunks(data, 70), About(300, "here"), 100)
    progress_signs.count_sent(5)  # somebody else's
    assert (counts, sorted(shelf.puts)) == ([100, 100, 100], [2, 3])


def test_no_more_than_the_budget_is_in_flight() -> None:
    class Slow(Shelf):
        most = here = 0

        def put(self, part: FilePart) -> None:
            with self.lock:
                self.here += len(part.data)
                self.most = max(self.most, self.here)
            threading.Event().wait(0.001)
            with self.lock:
                self.here -= len(part.data)
            super().put(part)

    sizes = {100: Slow(), 70: Slow()}
    parts = UploadPool(8, 400)
    data = content(2800)[:2800]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: parts.send(sizes[n], chunks(data, 90), About(2800), n), sizes))
    for size, shelf in sizes.items():
        assert shelf.file == data
        assert {len(part) for part in shelf.parts.values()} == {size}
        assert size < shelf.most <= 400


def test_parts_grow_with_the_file_and_ten_thousand_suffice_for_five_terabytes() -> None:
    assert part_size(0) == part_size(10_000 * 16 * MIB) == 16 * MIB
    for size in (10_000 * 16 * MIB + 1, 10**12, 5 * 10**12, 5 << 40):
        each = part_size(size)
        assert each % MIB == 0
        assert -(-size // each) <= 10_000
    assert part_size(5 << 40) == 525 * MIB
    assert len({part_size(10**12, n) for n in (1, 2, 9000)}) == 1, "a try finds them again"
    assert sum(part_size(None, n) for n in range(1, 10_001)) > 5 << 40


def test_a_small_content_is_written_while_a_large_ones_chunks_are_made_whatever_the_budget() -> (
    None
):
    """A merge writes its record when a file's last chunk was made, and its last part is in a
    buffer.
    """
    parts, large, small = UploadPool(threads=1, budget=MIB), Shelf(), Shelf()

    def chunks_and_record() -> Iterator[bytes]:
        yield bytes(3 * MIB)
        written = threading.Thread(
            target=parts.send, args=(small, [b"record"], About(6), MIB), daemon=True
        )
        written.start()
        written.join(60)

    parts.send(large, chunks_and_record(), About(3 * MIB), MIB)
    assert (small.file, large.file) == (b"record", bytes(3 * MIB))
    assert small.begun == 0
