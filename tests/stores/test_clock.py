"""The store's clock, as listings tell it; and how long others' writes may not be seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsync.stores.clock import measure_offset, offset_of, store_now, wait_until_visible
from ckptsync.stores.contract import Entry
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store


@pytest.mark.parametrize(
    ("before", "after", "told", "expected"),
    [
        (100.0, 100.2, 100.15, 0),  # within the error of measuring
        (100.0, 100.02, 95.01, 5.0),
        (100.0, 100.02, 130.01, -30.0),
        (100.9, 100.95, 100.0, 0),  # a store that cuts to the second
        (100.9, 100.95, 90.0, 10.42),
        (100.98, 101.01, 100.0, 0),
        (100.98, 101.01, 101.0, 0),  # a second that has just begun
        (1.7e9, 1.7e9, 3.0, 0),  # no clock at all
    ],
)
def test_an_offset_is_told_only_where_it_is_more_than_its_error(
    before: float, after: float, told: float, expected: float
) -> None:
    assert offset_of(before, after, told) == pytest.approx(expected * 1e9, abs=2e7)


def test_one_machine_has_one_clock_and_measuring_it_again_leaves_nothing_more(
    tmp_path: Path,
) -> None:
    store = create_store(str(tmp_path / "store"))
    for _ in range(2):
        assert measure_offset(store, ".ckptsync/clocks/n0") == 0
        assert [e.name for e in store.names("")] == [".ckptsync/clocks/n0", ".ckptsync/store.json"]
    assert measure_offset(MemoryStore(), ".ckptsync/clocks/n0") == 0


class Told(MemoryStore):
    """A store whose listings give the times that it is told to, one after the other."""

    def __init__(self, *times: float) -> None:
        super().__init__()
        self.write(".ckptsync/clocks/n0", [b"?"])
        self._times = iter(times)

    def names(self, prefix: str) -> Iterator[Entry]:
        return iter([Entry(e.name, e.size, next(self._times)) for e in super().names(prefix)])


def test_a_listing_that_is_late_tells_nothing_of_the_clock() -> None:
    now = time.time()
    assert measure_offset(Told(now - 3600.5, now - 3600.5), ".ckptsync/clocks/n0") == 0
    assert measure_offset(Told(now - 3600.5, now - 50.5), ".ckptsync/clocks/n0") == pytest.approx(
        50.5e9, abs=20e9
    )
    years = measure_offset(Told(1.5, 2.5), ".ckptsync/clocks/n0", farthest=2 * now)
    assert years == pytest.approx(now * 1e9, abs=20e9)


def test_the_time_is_the_stores_own() -> None:
    store = MemoryStore()
    first = store_now(store)
    store.write("x", [b""])
    assert store_now(store) == first + 2


def test_others_writes_are_waited_for_as_long_as_the_store_may_hide_them() -> None:
    store, waits = MemoryStore(), list[float]()
    wait_until_visible(store, waits.append)
    store.late = 60.0
    wait_until_visible(store, waits.append)
    assert waits == [0.0, 60.0]
