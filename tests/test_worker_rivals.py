"""Who else is sending, by what the store says."""

from __future__ import annotations

import pytest

from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.snapshot import nothing
from ckptsync.worker.store_view import GRACE, RunRecords, read_records
from ckptsync.worker.upload import announced


def known(store: MemoryStore) -> RunRecords:
    return read_records(store, "run", RunRecords())


def test_another_node_is_a_rival_as_long_as_it_says_so_and_of_that_checkpoint_only() -> None:
    store = MemoryStore()
    with announced(store, "n1", "run", "checkpoint-4", nothing):
        assert known(store).is_contended("n0", "run", "checkpoint-4")
        assert not known(store).is_contended("n1", "run", "checkpoint-4")
        assert not known(store).is_contended("n0", "run", "checkpoint-40")
        assert not known(store).is_contended("n0", "run", "checkpoint-8")
    assert not known(store).is_contended("n0", "run", "checkpoint-4")


def test_one_that_failed_is_none_and_one_that_was_killed_is_none_after_a_while() -> None:
    store = MemoryStore()
    with pytest.raises(ZeroDivisionError), announced(store, "n1", "run", "checkpoint-4", nothing):
        raise ZeroDivisionError
    assert not known(store).is_contended("n0", "run", "checkpoint-4")
    killed = announced(store, "n1", "run", "checkpoint-4", nothing)
    killed.__enter__()
    for _ in range(int(GRACE) - 1):  # each write is a second on this store's clock
        store.write("run/.ckptsync/checkpoint-4/sending/n0", [b"sending"])
    assert known(store).is_contended("n0", "run", "checkpoint-4")
    store.write("run/.ckptsync/checkpoint-4/sending/n0", [b"sending"])
    assert not known(store).is_contended("n0", "run", "checkpoint-4")
