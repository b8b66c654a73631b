"""How a save that lies in the wrong location goes home."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import ckptsync.worker
from ckptsync.records.coding import encode, record_name
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.plan import draft
from ckptsync.worker.push import push_now
from ckptsync.worker.saving import told
from ckptsync.worker.snapshot import Hold, take
from ckptsync.worker.upload import settle, upload
from tests.test_worker_push import ONE, TWO, kept, lay, manifests
from tests.test_worker_send import on_the_way


@pytest.mark.parametrize("is_held", [True, False])
def test_a_save_that_lies_in_a_location_taken_before_it_moves_and_its_bytes_with_it(tmp_path: Path, *, is_held: bool) -> None:
    store = MemoryStore()
    held, seen, road = on_the_way(tmp_path, store)
    planned = draft(told(seen, "n0"), take(held))
    upload(planned, held, road)
    early = replace(planned, node="m", files=(), started=0, ended=1, location="checkpoint-4", ranks=(7,))
    store.write(record_name(early, encode(early)), [encode(early)])

    location = settle("n0", "checkpoint-4", held if is_held else Hold("checkpoint-4", "trainer", {}), road)

    assert location.startswith("checkpoint-4~")
    assert kept(store)[location] == {"n0": ONE}
    assert [k.manifest.location for k in manifests(store) if k.manifest.node == "n0"] == [location]


class Unclaimable(MemoryStore):
    """A store that cannot tell whether somebody else has just written the name."""

    is_exclusive = False


def test_a_file_that_lies_beside_stays_there_when_the_plain_name_is_free_again(tmp_path: Path) -> None:
    store = MemoryStore()
    sources = {"a": lay(tmp_path / "a" / "run", ONE), "b": lay(tmp_path / "b" / "run", TWO, 0.5)}
    for node in "ab":
        push_now(sources[node], store, node)
    (mine,) = (k for k in manifests(store) if k.manifest.node == "a")
    gone = replace(mine.manifest, location="checkpoint-4~else", supersedes=(mine.name,), save="else")
    store.write(record_name(gone, encode(gone)), [encode(gone)])
    before = {e.name: e.mtime for e in store.names("run/")}
    push_now(sources["b"], store, "b")
    assert {e.name: e.mtime for e in store.names("run/")} == before
    assert read_all(store, "run/.ckptsync/checkpoint-4/files/b/x") == TWO["x"]


def test_of_two_nodes_that_named_one_file_each_ends_with_its_own(tmp_path: Path) -> None:
    for order in ("ab", "ba"):
        store = Unclaimable()
        sources = {"a": lay(tmp_path / "a" / "run", ONE), "b": lay(tmp_path / "b" / "run", TWO, 0.5)}
        for node in order:  # neither saw the other's manifest: the last to write has the name
            alone = MemoryStore()
            push_now(sources[node], alone, node)
            for name in [e.name for e in alone.names("run/")]:
                store.write(name, [read_all(alone, name)])
        for node in (*order, *order):
            push_now(sources[node], store, node)
        assert kept(store) == {"checkpoint-4": {"a": ONE, "b": TWO}}


def test_no_module_of_the_worker_deletes_anything_in_a_store() -> None:
    (folder,) = ckptsync.worker.__path__
    assert [path.name for path in Path(folder).glob("*.py") if ".delete(" in path.read_text()] == []
