"""How far a node's clock is from the store's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.worker.clock import Clock, jumped, measure, offset


@pytest.mark.parametrize(
    ("before", "after", "told", "expected"),
    [
        (100.0, 100.2, 100.15, 0),  # within the error of measuring
        (100.0, 100.02, 95.01, 5.0),
        (100.0, 100.02, 130.01, -30.0),
        (100.9, 100.95, 100.0, 0),  # a store that cuts to the second
        (100.9, 100.95, 90.0, 10.42),
        (1.7e9, 1.7e9, 3.0, 0),  # no clock at all
    ],
)
def test_an_offset_is_told_only_where_it_is_more_than_its_error(before: float, after: float, told: float, expected: float) -> None:
    assert offset(before, after, told) == pytest.approx(expected * 1e9, abs=2e7)


def test_one_machine_has_one_clock_and_measuring_it_again_leaves_nothing_more(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "store"))
    for _ in range(2):
        assert measure(store, "n0") == 0
        assert [e.name for e in store.names("")] == [".ckptsync/clocks/n0", ".ckptsync/store.json"]
    assert measure(MemoryStore(), "n0") == 0


class Told(MemoryStore):
    """A store whose listings give the times that it is told to, one after the other."""

    def __init__(self, *times: float) -> None:
        super().__init__()
        self.write(".ckptsync/clocks/n0", [b"?"])
        self._times = iter(times)

    def names(self, prefix: str) -> Iterator[Entry]:
        return iter([replace(e, mtime=next(self._times)) for e in super().names(prefix)])


def test_a_listing_that_is_late_tells_nothing_of_the_clock() -> None:
    now = time.time()
    assert measure(Told(now - 3600.5, now - 3600.5), "n0") == 0
    assert measure(Told(now - 3600.5, now - 50.5), "n0") == pytest.approx(50.5e9, abs=1e9)


@pytest.mark.parametrize("told", [100.0, 101.0])
def test_whole_seconds_are_no_offset_whether_cut_or_just_begun(told: float) -> None:
    assert offset(100.98, 101.01, told) == 0


def test_only_who_sets_a_clock_makes_it_jump() -> None:
    assert jumped(1000.0, 1001.5) == 0.0
    assert jumped(1000.0, 4600.0) == 3600.0
    assert jumped(4600.0, 1000.0) == -3600.0


class Counted(MemoryStore):
    """Counts measurements."""

    measured = 0

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self.measured += 1
        super().write(name, chunks, about)


def test_a_clock_is_compared_once_an_hour_before_anybody_waits_for_it_and_not_while_nothing_is_to_do() -> None:
    store = Counted()
    clock = Clock(store, "n0")
    clock.measure_in_time(0.0, is_idle=True)
    assert store.measured == 0
    clock.measure_in_time(1.0, is_idle=False)
    assert (clock.offset(2.0), clock.offset(3500.0), store.measured) == (clock.last, clock.last, 1)
    clock.offset(3602.0)
    assert store.measured == 2


def test_a_clock_that_was_set_is_compared_anew_and_said_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Counted()
    clock = Clock(store, "n0")
    clock.offset(0.0)
    really = time.time
    monkeypatch.setattr(time, "time", lambda: really() - 3600)
    clock.notice(10.0)
    assert list(clock.notes) == ["this node's clock was set back by 3600 s"]
    clock.offset(11.0)
    assert store.measured == 2
    clock.notice(3000.0)
    assert len(clock.notes) == 1
    clock.notice(3611.0)
    assert not clock.notes


def test_threads_that_ask_at_once_or_late_have_one_measurement() -> None:
    class Counting(MemoryStore):
        written = 0

        def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
            self.written += 1
            time.sleep(0.01)  # so that they meet
            super().write(name, chunks, about)

    store = Counting()
    clock = Clock(store, "n0")
    clock.notice(5000.0)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(clock.offset, (5000.0, 4000.0, 10.0, 0.0)))) == 1
    assert store.written == 1


def test_who_asks_what_is_wrong_is_told_of_years_too() -> None:
    ahead = 3 * 365 * 86400.0
    assert offset(ahead, ahead + 0.01, 0.5) == 0
    assert offset(ahead, ahead + 0.01, 0.5, farthest=10 * ahead) == pytest.approx(ahead * 1e9, abs=1e9)
