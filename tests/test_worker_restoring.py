"""A node's own manifest is written again where its files still give the very same bytes; nothing else is."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from ckptsync.catalogue.fresh import fresh
from ckptsync.records import coding
from ckptsync.records.manifest import Manifest
from ckptsync.records.report import Report
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.repair import restore
from ckptsync.worker.saving import Memory, save
from ckptsync.worker.worker import Worker
from tests.test_worker_push import ONE, kept, lay, manifests
from tests.test_worker_saving import desk, seen
from tests.verified import put


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


def test_a_manifest_that_says_where_files_lie_is_written_again(tmp_path: Path) -> None:
    store = MemoryStore()
    store.write("run/checkpoint-4/x", [b"Z"])
    store.write("run/.ckptsync/checkpoint-4/sending/n1", [b"sending"])
    lay(tmp_path, ONE)
    save(seen(tmp_path), replace(its := desk(store, Memory()), to=replace(its.to, is_contended=lambda: True)))
    (mine,) = manifests(store)
    data = read_all(store, mine.name)
    assert [f.path for f in mine.manifest.files if f.stored_as] == ["x"]
    store.write(mine.name, [b"damaged"])
    assert restore(seen(tmp_path), desk(store, Memory())) == (mine.name,)
    assert read_all(store, mine.name) == data


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


def witnessed(store: MemoryStore, name: str) -> None:
    """A report that names it, so that it is missed."""
    (known,) = (k.manifest for k in manifests(store) if k.name == name)
    put(store, Report(known.run, known.checkpoint, known.location, 0, "digest", "ok", (name,), "", 0, ()))


def test_a_manifest_that_is_gone_is_written_again_byte_for_byte(tmp_path: Path) -> None:
    out = tmp_path / "out"
    store, name, data = stored(out)
    witnessed(store, name)
    worker = Worker(WorkerOptions("n0", (RunDir("run", out),), 0.0, 0.0), store)
    assert [p.phase for p in worker.tick(0.0).progress] == ["stored"]
    store.delete(name)
    worker.tick(1.0)
    assert read_all(store, name) == data
    assert [k.name for k in manifests(store)] == [name]


def test_where_the_same_cannot_be_said_again_a_new_one_stands_in_its_stead(tmp_path: Path) -> None:
    out = tmp_path / "out"
    store, name, _ = stored(out)
    (old,) = (k.manifest for k in manifests(store))
    store.delete(name)
    name = put(store, replace(old, version="0.0.1"))
    witnessed(store, name)
    store.delete(name)
    assert fresh(store).faults
    worker = Worker(WorkerOptions("n0", (RunDir("run", out),), 0.0, 0.0), store)
    worker.tick(0.0)
    (new,) = manifests(store)
    assert new.manifest.supersedes == (name,)
    assert not fresh(store).faults
    assert [p.phase for p in worker.tick(1.0).progress] == ["stored"]


def test_another_save_that_comes_to_lie_where_a_manifest_is_gone_does_not_take_it_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    store, name, _ = stored(out)
    witnessed(store, name)
    store.delete(name)
    lay(out, {path: content + b" " for path, content in ONE.items()}, 9000.0)
    Worker(WorkerOptions("n0", (RunDir("run", out),), 0.0, 0.0), store).tick(0.0)
    assert [k.manifest.supersedes for k in manifests(store)] == [()]
    assert [f.name for f in fresh(store).faults] == [name]


def test_a_node_says_that_it_cannot_write_one_again_that_is_gone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    store, name, _ = stored(out)
    witnessed(store, name)
    store.delete(name)
    shutil.rmtree(out)
    out.mkdir()
    worker = Worker(WorkerOptions("n0", (RunDir("run", out),), 0.0, 0.0), store)
    assert worker.tick(0.0).lacks == {}
    assert worker.tick(1.0).lacks == {name: ()}
