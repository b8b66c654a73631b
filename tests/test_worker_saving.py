"""One save on its way: what is remembered is no more than a shortcut."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import Incomplete
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.options import RunDir
from ckptsync.worker.pinning import Pinner
from ckptsync.worker.saving import Desk, Memory, hardened, known_already, save
from ckptsync.worker.scanner import scan_run
from ckptsync.worker.snapshot import Seen
from ckptsync.worker.store_view import RunRecords, read_records
from ckptsync.worker.upload import Destination
from tests.test_worker_push import ONE, kept, lay


def seen(out: Path) -> Seen:
    (one,) = scan_run(RunDir("run", out), Pinner("n0", lambda *_: False)).seen
    return one


def desk(store: MemoryStore, memory: Memory) -> Desk:
    known = read_records(store, "run", RunRecords())
    road = Destination(store, "n0", lambda: read_records(store, "run", RunRecords()).manifests("checkpoint-4"))
    return Desk("n0", road, known, lambda: 0, memory)


def test_a_save_is_unknown_until_it_is_stored_and_then_it_is_known_without_reading_it(tmp_path: Path) -> None:
    store, memory = MemoryStore(), Memory()
    lay(tmp_path, ONE)
    assert known_already(seen(tmp_path), desk(store, memory)) is None
    assert save(seen(tmp_path), desk(store, memory)).phase == "sent"
    found = known_already(seen(tmp_path), desk(store, Memory()))
    assert found is not None
    assert (found.phase, found.location) == ("stored", "checkpoint-4")


def test_what_was_taken_is_taken_once_while_it_stays_the_same(tmp_path: Path) -> None:
    store, memory = MemoryStore(), Memory()
    lay(tmp_path, ONE)
    save(seen(tmp_path), desk(store, memory))
    (first,) = memory.taken.values()
    save(seen(tmp_path), desk(store, memory))
    assert next(iter(memory.taken.values())) is first
    lay(tmp_path, {"x": b"Z"}, 5000.0)
    save(seen(tmp_path), desk(store, memory))
    assert next(iter(memory.taken.values())) is not first
    assert len(kept(store)) == 2


def test_digests_of_files_that_changed_are_forgotten_though_no_time_says_so(tmp_path: Path) -> None:
    store, memory = MemoryStore(), Memory()
    meta = lay(tmp_path, ONE) / "m" / "meta.txt"

    def strike(count: int) -> None:
        if count == len(ONE["trainer_state.json"]):  # the largest, and so the last
            meta.write_bytes(b"ATEM")
            os.utime(meta, ns=(before.st_atime_ns, before.st_mtime_ns))

    before, its = meta.stat(), desk(store, memory)
    with pytest.raises(Incomplete):
        save(seen(tmp_path), replace(its, to=replace(its.to, passed=strike, threads=1)))
    assert save(seen(tmp_path), its).phase == "sent"
    assert kept(store) == {"checkpoint-4": {"n0": ONE | {"m/meta.txt": b"ATEM"}}}


def test_a_pin_that_is_gone_is_taken_from_the_next_look_on(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    one = seen(tmp_path)
    assert hardened(one).hold.held == one.hold.held  # no reflinks here, or others of the same bytes
    shutil.rmtree(tmp_path / "_ckptsync")
    with pytest.raises(Incomplete):
        save(one, desk(MemoryStore(), Memory()))
