from __future__ import annotations

import threading

import pytest

from ckptsync.errors import Transient
from ckptsync.stores.ahead import ahead

CONTENT = bytes(range(251)) * 20


class Source:
    """Says which reads are going on; those ``waiting`` for the gate end in whatever order."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.begun: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.has_begun = threading.Condition()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        with self.has_begun:
            self.begun.append(start)
            self.has_begun.notify_all()
        self.gate.wait(10)
        if start == self.fails_at:
            raise Transient(f"no answer at {start}")
        out[:] = CONTENT[start : start + len(out)]

    def wait_for(self, count: int) -> bool:
        with self.has_begun:
            return self.has_begun.wait_for(lambda: len(self.begun) >= count, 10)


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("ckptsync-ahead")]


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 500, 501, 5020])
@pytest.mark.parametrize("depth", [0, 1, 4, 100])
def test_a_file_comes_whole_and_in_order(size: int, depth: int) -> None:
    pieces = [bytes(piece) for piece in ahead(Source(), "a", size, 100, depth)]
    assert b"".join(pieces) == CONTENT[:size]
    assert all(len(piece) == 100 for piece in pieces[:-1])
    assert not readers()


def test_the_next_pieces_are_being_read_while_one_is_used_and_no_more_than_that() -> None:
    source = Source()
    pieces = ahead(source, "a", 5000, 100, 3)
    next(pieces)
    assert source.wait_for(4)
    assert sorted(source.begun) == [0, 100, 200, 300]
    next(pieces)
    assert source.wait_for(5)
    assert sorted(source.begun) == [0, 100, 200, 300, 400]
    pieces.close()


def test_a_piece_is_not_overwritten_while_it_is_used() -> None:
    source, pieces = Source(), None
    pieces = ahead(source, "a", 5000, 100, 4)
    for n, piece in enumerate(pieces):
        source.wait_for(min(50, n + 5))
        assert bytes(piece) == CONTENT[n * 100 : n * 100 + 100]


def test_memory_is_so_many_buffers_whatever_the_file() -> None:
    class Counting(Source):
        buffers: set[int] = set()  # noqa: RUF012 - one source, one set
        held: list[object] = []  # noqa: RUF012 - so that no id is used twice

        def read_into(self, name: str, start: int, out: memoryview) -> None:
            self.held.append(out.obj)
            self.buffers.add(id(out.obj))
            super().read_into(name, start, out)

    source = Counting()
    assert sum(map(len, ahead(source, "a", 5020, 10, 4))) == 5020
    assert len(source.buffers) == 5


def test_an_error_comes_in_its_turn_as_it_is_and_no_thread_stays() -> None:
    pieces = ahead(Source(fails_at=200), "a", 5000, 100, 4)
    assert [len(next(pieces)) for _ in range(2)] == [100, 100]
    with pytest.raises(Transient, match="no answer at 200"):
        next(pieces)
    assert not readers()


def test_closing_early_leaves_no_thread_and_begins_no_more_reads() -> None:
    source = Source()
    pieces = ahead(source, "a", 5000, 10, 4)
    next(pieces)
    pieces.close()
    assert not readers()
    assert len(source.begun) <= 5
