"""A node's own manifest is written again where its files still give the very same bytes; nothing else is."""

from __future__ import annotations

from pathlib import Path

from ckptsync.records import coding
from ckptsync.records.manifest import Manifest
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.restoring import restore
from ckptsync.worker.saving import Memory, save
from ckptsync.worker.tick import Worker
from tests.test_worker_push import ONE, kept, lay, manifests
from tests.test_worker_saving import desk, seen


def stored(out: Path) -> tuple[MemoryStore, str, bytes]:
    """A store with one save in it, its manifest's name, and its bytes."""
    store = MemoryStore()
    lay(out, ONE)
    save(seen(out), desk(store, Memory()))
    (name,) = (k.name for k in manifests(store))
    return store, name, read_all(store, name)


def test_a_damaged_manifest_is_written_again(tmp_path: Path) -> None:
    store, name, data = stored(tmp_path)
    for damaged in (b"", data[:-3], data.replace(b"n0", b"n9")):
        store.write(name, [damaged])
        assert restore(seen(tmp_path), desk(store, Memory())) == (name,)
        assert read_all(store, name) == data


def test_files_that_changed_give_another_manifest_and_that_one_is_not_written(tmp_path: Path) -> None:
    store, name, _ = stored(tmp_path)
    store.write(name, [b"damaged"])
    lay(tmp_path, {"x": b"Z"}, 5000.0)
    assert restore(seen(tmp_path), desk(store, Memory())) == ()
    assert read_all(store, name) == b"damaged"


def test_other_nodes_manifests_and_those_of_newer_programs_are_left_alone(tmp_path: Path) -> None:
    store, name, data = stored(tmp_path)
    other = name.replace("manifest-n0-", "manifest-n1-")
    newer = data.replace(b'"format":1', b'"format":2')
    manifest = coding.decode(name, data, Manifest)
    names = {other: b"damaged", coding.record_name(manifest, newer): newer}
    for wrong, its in names.items():
        store.write(wrong, [its])
    assert restore(seen(tmp_path), desk(store, Memory())) == ()


def test_a_later_manifest_of_a_save_is_told_from_the_first(tmp_path: Path) -> None:
    store, first, _ = stored(tmp_path)
    lay(tmp_path, {"y": b"more"})
    save(seen(tmp_path), desk(store, Memory()))
    (second,) = (k.name for k in manifests(store) if k.name != first)
    data = read_all(store, second)
    store.write(second, [b"damaged"])
    assert restore(seen(tmp_path), desk(store, Memory())) == (second,)
    assert read_all(store, second) == data


def test_a_worker_notices_what_happens_to_a_manifest_that_it_has_read(tmp_path: Path) -> None:
    out = tmp_path / "out"
    store, name, data = stored(out)
    worker = Worker(WorkerOptions("n0", (RunDir("run", out),), 0.0, 0.0), store)
    assert [p.phase for p in worker.tick(0.0).progress] == ["stored"]
    store.write(name, [b"damaged"])
    worker.tick(1.0)
    assert read_all(store, name) == data
    assert [p.phase for p in worker.tick(2.0).progress] == ["stored"]
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}
