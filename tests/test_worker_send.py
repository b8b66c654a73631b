"""The pieces of sending: what is checked as it passes, and how a save that lies in the wrong place goes home."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from ckptsync.digest import digest
from ckptsync.errors import Incomplete
from ckptsync.records.coding import encode, record_name
from ckptsync.records.manifest import FileEntry
from ckptsync.scan import found, spots
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.deciding import draft
from ckptsync.worker.hold import Hold, hold
from ckptsync.worker.known import Known, read_known
from ckptsync.worker.looking import Seen
from ckptsync.worker.saving import told
from ckptsync.worker.send import Road, checked, is_stored, send, stored_chunks, tidy
from ckptsync.worker.take import CHUNK, take
from tests.test_worker_push import ONE, kept, lay, manifests


def entry(content: bytes) -> FileEntry:
    return FileEntry("x", len(content), digest(content), 1 << 14, (), 0)


@pytest.mark.parametrize("chunks", [[b"ab", b"d"], [b"ab"], [b"abc", b"d"], []])
def test_other_bytes_than_those_taken_never_get_a_name(chunks: list[bytes]) -> None:
    store = MemoryStore()
    with pytest.raises(Incomplete, match="not the bytes that were taken"):
        store.write("x", checked(map(memoryview, chunks), entry(b"abc"), "x"))
    assert list(store.names("")) == []
    store.write("x", checked(map(memoryview, [b"a", b"bc"]), entry(b"abc"), "x"))
    assert is_stored(store, "x", entry(b"abc"))


def test_a_large_file_passes_in_pieces() -> None:
    store, content = MemoryStore(), bytes(range(256)) * ((CHUNK + 5) // 256 + 1)
    store.write("x", [content])
    seen = [blake3(piece).hexdigest() for piece in stored_chunks(store, "x", len(content))]
    assert seen == [digest(content[:CHUNK]), digest(content[CHUNK:])]
    assert list(stored_chunks(store, "x", 0)) == []


def test_what_is_stored_is_told_by_its_bytes() -> None:
    store = MemoryStore()
    assert is_stored(store, "x", entry(b"abc")) is None
    for content, is_it in ((b"abc", True), (b"abd", False), (b"ab", False)):
        store.write("x", [content])
        assert is_stored(store, "x", entry(b"abc")) is is_it


def on_the_way(tmp_path: Path, store: MemoryStore) -> tuple[Hold, Seen, Road]:
    lay(tmp_path, ONE)
    (spot,) = spots(tmp_path)
    held = hold(found(spot), None, spot.family, spot.name)
    return held, Seen("run", spot, held, None), Road(store, lambda: read_known(store, "run", Known()).manifests("checkpoint-4"))


def test_sending_twice_is_sending_once(tmp_path: Path) -> None:
    store = MemoryStore()
    held, seen, road = on_the_way(tmp_path, store)
    planned = draft(told(seen, "n0"), take(held))
    first, second = send(planned, held, road), send(planned, held, road)
    assert (first.files, first.size) == (len(ONE), sum(map(len, ONE.values())))
    assert (second.place, second.files) == (first.place, 0)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_save_that_lies_in_a_place_taken_before_it_moves_and_its_bytes_with_it(tmp_path: Path, *, is_held: bool) -> None:
    store = MemoryStore()
    held, seen, road = on_the_way(tmp_path, store)
    planned = draft(told(seen, "n0"), take(held))
    send(planned, held, road)
    early = replace(planned, node="m", files=(), started=0, ended=1, place="checkpoint-4", ranks=(7,))
    store.write(record_name(early, encode(early)), [encode(early)])

    place = tidy("n0", "checkpoint-4", held if is_held else Hold("checkpoint-4", "trainer", {}), road, {})

    assert place.startswith("checkpoint-4~")
    assert kept(store)[place] == {"n0": ONE}
    assert [k.manifest.place for k in manifests(store) if k.manifest.node == "n0"] == [place]
