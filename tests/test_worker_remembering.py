"""What was said beside a pin outlives it for as long as the trainer has the files."""

from __future__ import annotations

import shutil
from pathlib import Path

from ckptsync.records.manifest import Manifest
from ckptsync.spool.marks import Took
from ckptsync.spool.pins import Pin
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.remembering import forget, remember, remembered
from tests.test_worker_push import ONE, lay, manifests
from tests.test_worker_tick import settle, verify, worker


def pin(out: Path, checkpoint: str, k: int, took: Took) -> Pin:
    return Pin(checkpoint, k, "n0", 0, out / "_ckptsync" / "pins" / f"{checkpoint}.{k}", took=took)


def test_it_is_kept_by_checkpoint_until_that_has_gone(tmp_path: Path) -> None:
    assert remembered(tmp_path, "c-1") == ()
    for k in range(2):
        remember(tmp_path, pin(tmp_path, "c-1", k, Took(settled=k + 1)))
    remember(tmp_path, pin(tmp_path, "c-1.0", 0, Took(settled=9)))
    remember(tmp_path, pin(tmp_path, "c-2", 0, Took()))
    assert [t.settled for t in remembered(tmp_path, "c-1")] == [2, 1]
    assert remembered(tmp_path, "c-2") == ()
    forget(tmp_path, {"c-1.0"})
    assert remembered(tmp_path, "c-1") == ()
    assert [t.settled for t in remembered(tmp_path, "c-1.0")] == [9]


def only(store: Store) -> tuple[str, Manifest]:
    ((name, manifest),) = ((k.name, k.manifest) for k in manifests(store))
    return name, manifest


def test_a_manifest_that_was_damaged_after_its_pin_had_gone_is_written_again(tmp_path: Path) -> None:
    store = MemoryStore()
    source = lay(tmp_path, ONE)
    w = worker(tmp_path, store, keep=0)
    settle(w)
    verify(store)
    w.tick(1000.0)
    assert not list((tmp_path / "_ckptsync/pins").iterdir())
    name, told = only(store)
    assert told.times
    data = read_all(store, name)
    store.write(name, [b"damaged"])
    w.tick(1001.0)
    assert read_all(store, name) == data
    shutil.rmtree(source)
    w.tick(1002.0)
    assert not list((tmp_path / "_ckptsync/took").iterdir())
