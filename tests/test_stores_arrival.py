"""One file, range by range: it is there after the last one, and what an earlier try has left is not asked for again."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from ckptsync.digest import digest_stream
from ckptsync.errors import Corrupt, Transient
from ckptsync.stores.arrival import RANGE, Arrival, Wanted
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.posix.store import PosixStore

CONTENT = bytes(range(251)) * 4200  # a little more than a MiB: blocks of 4 KiB
DIGEST = digest_stream([CONTENT], len(CONTENT))
WANTED = Wanted("run/a", "a", len(CONTENT), DIGEST)


class Source(MemoryStore):
    """Remembers what was asked of it."""

    def __init__(self, content: bytes = CONTENT) -> None:
        super().__init__()
        self.write("run/a", [content])
        self.asked: list[tuple[int, int]] = []

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.asked.append((start, start + len(out)))
        super().read_into(name, start, out)


def bring(source: Source, target: PosixStore, wanted: Wanted, *spans: tuple[int, int]) -> list[bool]:
    arrival = Arrival(source, target, wanted)
    buffer = memoryview(bytearray(100 << 10))
    try:
        return [arrival.bring(span, buffer, lambda _: None) for span in spans or wanted.ranges()]
    except BaseException as e:
        arrival.give_up(e)
        raise


def test_ranges_are_whole_blocks_and_together_the_file() -> None:
    for size in (0, 1, RANGE, RANGE + 1, 5 * RANGE - 7):
        spans = Wanted("a", "a", size, None).ranges()
        assert spans[0][0] == 0
        assert spans[-1][1] == size
        assert all(a[1] == b[0] and a[1] % RANGE == 0 for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("wanted", [WANTED, Wanted("run/a", "a", len(CONTENT), None)])
def test_a_file_is_there_after_its_last_range(tmp_path: Path, wanted: Wanted) -> None:
    target = PosixStore(str(tmp_path))
    assert bring(Source(), target, wanted) == [True]
    assert read_all(target, "a") == CONTENT


def test_other_bytes_than_recorded_are_not_there(tmp_path: Path) -> None:
    target = PosixStore(str(tmp_path))
    with pytest.raises(Corrupt, match="run/a: digest"):
        bring(Source(CONTENT[:-1] + b"!"), target, WANTED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("killed", [Transient("cut"), KeyboardInterrupt()])
def test_blocks_that_an_earlier_try_left_are_not_asked_for_again(tmp_path: Path, killed: BaseException) -> None:
    target, first = PosixStore(str(tmp_path)), 256 << 10
    placing = target.place("a", WANTED.size, DIGEST.digest)
    placing.write_at(0, memoryview(CONTENT)[:first])
    placing.write_at(5000, memoryview(b"?"))  # its block is wrong
    placing.write_at(first + 8192, memoryview(CONTENT)[first + 8192 : first + 16384])
    if isinstance(killed, Transient):
        placing.give_up(killed)
    else:
        placing._draft.release()
    source = Source()
    assert bring(source, target, WANTED) == [True]
    assert read_all(target, "a") == CONTENT
    assert source.asked[:2] == [(4096, 8192), (first, first + 8192)]
    assert sum(end - start for start, end in source.asked) == len(CONTENT) - first + 4096 - 8192
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_two_threads_may_bring_two_ranges_at_once(tmp_path: Path) -> None:
    size = RANGE + 5000
    content = bytes(size)
    source, target = Source(content), PosixStore(str(tmp_path))
    wanted = Wanted("run/a", "a", size, digest_stream([content], size))
    arrival, ends = Arrival(source, target, wanted), []

    def one(span: tuple[int, int]) -> None:
        ends.append(arrival.bring(span, memoryview(bytearray(1 << 20)), lambda _: None))

    threads = [threading.Thread(target=one, args=(span,)) for span in wanted.ranges()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == [False, True]
    assert target.size("a") == size
