"""Pins go when the store has proven that it has their files, and not before."""

from __future__ import annotations

from pathlib import Path

from ckptsync.stores.memory import MemoryStore
from tests.test_worker_push import ONE, lay
from tests.test_worker_tick import EIGHT, pinned, settle, verify, worker


def test_of_what_is_proven_the_newest_pins_stay(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    lay(tmp_path / "x", EIGHT, 50.0).rename(tmp_path / "checkpoint-8")
    w = worker(tmp_path, store, keep=0)
    settle(w)
    w.tick(1000.0)
    assert pinned(tmp_path) == ["checkpoint-4.0", "checkpoint-8.0"]
    verify(store, "checkpoint-4")
    w.tick(1001.0)
    assert pinned(tmp_path) == ["checkpoint-8.0"]
