"""How far a node's clock is from the store's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.worker.clock import measure, offset


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


def test_one_machine_has_one_clock_and_measuring_leaves_nothing(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "store"))
    before = [e.name for e in store.names("")]
    assert measure(store, "n0") == 0
    assert [e.name for e in store.names("")] == before
    assert measure(MemoryStore(), "n0") == 0
