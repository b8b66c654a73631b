"""How a save that lies in the wrong location goes home."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import ckptsync.worker
from ckptsync.errors import StoreError
from ckptsync.records.coding import encode, record_name
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.deciding import draft
from ckptsync.worker.hold import Hold
from ckptsync.worker.moving import tidy
from ckptsync.worker.push import push_now
from ckptsync.worker.saving import told
from ckptsync.worker.send import send
from ckptsync.worker.take import take
from tests.test_worker_push import ONE, TWO, kept, lay, manifests
from tests.test_worker_send import on_the_way


@pytest.mark.parametrize("is_held", [True, False])
def test_a_save_that_lies_in_a_location_taken_before_it_moves_and_its_bytes_with_it(tmp_path: Path, *, is_held: bool) -> None:
    store = MemoryStore()
    held, seen, road = on_the_way(tmp_path, store)
    planned = draft(told(seen, "n0"), take(held))
    send(planned, held, road)
    early = replace(planned, node="m", files=(), started=0, ended=1, location="checkpoint-4", ranks=(7,))
    store.write(record_name(early, encode(early)), [encode(early)])

    location = tidy("n0", "checkpoint-4", held if is_held else Hold("checkpoint-4", "trainer", {}), road, {})

    assert location.startswith("checkpoint-4~")
    assert kept(store)[location] == {"n0": ONE}
    assert [k.manifest.location for k in manifests(store) if k.manifest.node == "n0"] == [location]


class Keeping(MemoryStore):
    """A store from which this identity may delete nothing."""

    def delete(self, name: str) -> None:
        raise StoreError(f"{name}: access denied")


def moves_away(store: MemoryStore, node: str) -> None:
    """What is left in a location when a node has taken back all that it said there."""
    (mine,) = (k for k in manifests(store) if k.manifest.node == node)
    gone = replace(mine.manifest, location="checkpoint-4~else", supersedes=(mine.name,), save="else")
    store.write(record_name(gone, encode(gone)), [encode(gone)])


def test_a_name_that_its_owner_has_left_goes_back_to_who_has_it_and_nothing_is_ever_deleted(tmp_path: Path) -> None:
    store = Keeping()
    sources = {"a": lay(tmp_path / "a" / "run", ONE), "b": lay(tmp_path / "b" / "run", TWO, 0.5)}
    for node in "bab":
        push_now(sources[node], store, node)
    copy = "run/.ckptsync/checkpoint-4/files/b/x"
    assert store.size(copy) == len(TWO["x"])
    moves_away(store, "a")
    before = {e.name: e.mtime for e in store.names("")}
    push_now(sources["b"], store, "b")
    assert store.size(copy) == 0
    touched = {e.name for e in store.names("") if before.get(e.name) != e.mtime}
    assert {"run/checkpoint-4/x", copy} <= touched
    push_now(sources["b"], store, "b")  # and is not looked at again
    assert {e.name for e in store.names("") if before.get(e.name) != e.mtime} == touched


def test_no_module_of_the_worker_deletes_anything_in_a_store() -> None:
    (folder,) = ckptsync.worker.__path__
    assert [path.name for path in Path(folder).glob("*.py") if ".delete(" in path.read_text()] == []
