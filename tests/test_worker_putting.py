"""A file where it belongs, out of what still has its bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.digest import digest
from ckptsync.errors import Incomplete
from ckptsync.records.manifest import FileEntry
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.deciding import Parcel
from ckptsync.worker.putting import copy_within, make_room, put
from tests.test_worker_push import ONE
from tests.test_worker_send import on_the_way

THEIRS = FileEntry("x", 3, digest(b"old"), 4096, (), 0)


def test_what_this_node_holds_is_sent_and_what_it_does_not_is_copied_in_the_store(tmp_path: Path) -> None:
    store = MemoryStore()
    held, _, road = on_the_way(tmp_path, store)
    store.write("elsewhere", [b"old"])
    put(
        Parcel(FileEntry("x", len(ONE["x"]), digest(ONE["x"]), 4096, (), held.held["x"].stat.mtime), "mine"),
        held,
        road,
        ["elsewhere"],
    )
    put(Parcel(THEIRS, "theirs"), held, road, ["nowhere", "elsewhere"])
    assert (read_all(store, "mine"), read_all(store, "theirs")) == (ONE["x"], b"old")
    with pytest.raises(Incomplete, match="neither this node nor the store"):
        put(Parcel(replace(THEIRS, digest=digest(b"new")), "lost"), held, road, ["elsewhere"])
    assert "lost" not in {e.name for e in store.names("")}


def test_others_bytes_are_at_their_own_name_before_theirs_becomes_ours(tmp_path: Path) -> None:
    store = MemoryStore()
    _, _, road = on_the_way(tmp_path, store)
    store.write("x", [b"old"])
    make_room(Parcel(replace(THEIRS, digest=digest(b"new")), "x", moves=(("beside", THEIRS), ("too", THEIRS))), road)
    assert (read_all(store, "beside"), read_all(store, "too"), read_all(store, "x")) == (b"old", b"old", b"old")
    assert not copy_within(Parcel(replace(THEIRS, digest=digest(b"gone")), "y"), road, ["x", "beside"])
