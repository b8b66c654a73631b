"""What a node says of itself while it sends, without ever needing to delete it."""

from __future__ import annotations

import pytest

from ckptsync.errors import StoreError
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker import upload
from ckptsync.worker.upload import announced

NAME = "run/.ckptsync/checkpoint-4/sending/n0"


def test_it_is_said_before_and_taken_back_after_and_said_again_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "ANNOUNCE_EVERY", -1.0)
    store, told = MemoryStore(), list[int]()
    with announced(store, "n0", "run", "checkpoint-4", told.append) as passed:
        (first,) = store.names("")
        passed(7)
        (again,) = store.names("")
        assert first.name == again.name == NAME
        assert first.mtime < again.mtime
    assert (read_all(store, NAME), told) == (b"", [7])


def test_that_it_cannot_be_taken_back_is_no_error() -> None:
    store = MemoryStore()

    def write(*_: object) -> None:
        raise StoreError("away")

    with announced(store, "n0", "run", "checkpoint-4", lambda _: None):
        store.write = write  # type: ignore[method-assign,assignment]
    assert read_all(store, NAME) == b"sending\n"
