"""What was said and added beside a pin outlives it for as long as the trainer has the files, and is sent again as it was, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsync.catalogue.fresh import fresh
from ckptsync.head.consolidate import HeadOptions
from ckptsync.records.manifest import Manifest
from ckptsync.spool.marks import Took
from ckptsync.spool.pins import Pin, drop, pins
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.verify.location import verify_location
from ckptsync.verify.reporting import write_report
from ckptsync.worker.options import RunDir
from ckptsync.worker.pinning import Pinner, SpoolRule
from ckptsync.worker.remembering import added_here, forget, give_way, kept_of, remember, size
from ckptsync.worker.scanner import scan_run
from ckptsync.worker.worker import Worker
from tests.cli_store import flip
from tests.heads import consolidate_due
from tests.hook_pins import commit
from tests.test_worker_push import ONE, lay, manifests
from tests.test_worker_tick import damaged, settle, verify, worker
from tests.vector import ROOT, vector

LACKED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
CONFIG = "run/checkpoint-4/config.json"


def pin(out: Path, checkpoint: str, k: int, took: Took) -> Pin:
    return Pin(checkpoint, k, "n0", 0, out / "_ckptsync" / "pins" / f"{checkpoint}.{k}", took=took)


def test_it_is_kept_by_checkpoint_until_that_has_gone(tmp_path: Path) -> None:
    assert kept_of(tmp_path, "c-1") == ()
    for k in range(2):
        remember(tmp_path, pin(tmp_path, "c-1", k, Took(finished=k + 1)))
    remember(tmp_path, pin(tmp_path, "c-1.0", 0, Took(finished=9)))
    remember(tmp_path, pin(tmp_path, "c-2", 0, Took()))
    assert [kept.took.finished for kept in kept_of(tmp_path, "c-1")] == [2, 1]
    assert kept_of(tmp_path, "c-2") == ()
    forget(tmp_path, {"c-1.0"})
    assert kept_of(tmp_path, "c-1") == ()
    assert [kept.took.finished for kept in kept_of(tmp_path, "c-1.0")] == [9]


def test_what_was_said_of_one_save_is_not_lost_to_a_later_pin_of_the_same_number(tmp_path: Path) -> None:
    for finished in (1, 2, 2):
        remember(tmp_path, pin(tmp_path, "c-1", 0, Took(finished=finished)))
    assert [kept.took.finished for kept in kept_of(tmp_path, "c-1")] == [2, 1]


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


def committed(out: Path, files: dict[str, bytes] = ONE) -> Path:
    """A save that the hook pinned, with what it lacks."""
    return add(commit(lay(out, files)))


def add(path: Path) -> Path:
    written = path.parents[1] / "added" / "train"
    written.mkdir(parents=True, exist_ok=True)
    (path / "added").mkdir()
    for name in LACKED:
        if not (written / name).exists():
            shutil.copyfile(ROOT / "base" / name, written / name)
        os.link(written / name, path / "added" / name)
    return path


def sent(out: Path, store: Store, *, source: Callable[[Path], object] = committed) -> Worker:
    """A worker that has let go of the pin of a stored save, while the trainer still has its own files; the training is over."""
    source(out)
    w = worker(out, store, keep=0)
    settle(w)
    verify(store)
    w.tick(1000.0)
    assert not list((out / "_ckptsync/pins").iterdir())
    shutil.rmtree(out / "_ckptsync/added", ignore_errors=True)
    return w


def test_an_added_file_that_was_damaged_after_its_pin_had_gone_is_sent_again(tmp_path: Path) -> None:
    store = MemoryStore()
    w = sent(tmp_path, store)
    data = read_all(store, CONFIG)
    store.write(CONFIG, [b"damaged"])
    damaged(store, 1, "checkpoint-4/config.json")
    (repaired,) = w.tick(1001.0).repairs
    assert (repaired.name, repaired.reason, read_all(store, CONFIG)) == ("checkpoint-4/config.json", "", data)


def test_a_manifest_that_names_added_files_is_written_again_after_its_pin_had_gone(tmp_path: Path) -> None:
    store = MemoryStore()
    w = sent(tmp_path, store)
    name, manifest = only(store)
    assert {f.path for f in manifest.files} == {*ONE, *LACKED}
    data = read_all(store, name)
    store.delete(name)
    w.tick(1001.0)
    assert (read_all(store, name), only(store)[0]) == (data, name)


def test_other_bytes_of_the_same_size_are_never_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    w = sent(tmp_path, store)
    (kept,) = kept_of(tmp_path, "checkpoint-4")
    for file in kept.added:
        path, times = kept.root / file.path, (file.mtime, file.mtime)
        flip(path)
        os.utime(path, ns=times)
    name, _ = only(store)
    store.write(CONFIG, [b"damaged"])
    damaged(store, 1, "checkpoint-4/config.json")
    (repaired,) = w.tick(1001.0).repairs
    assert (repaired.reason, read_all(store, CONFIG)) == ("this node no longer has its bytes", b"damaged")
    store.write(name, [b"damaged"])
    worker(tmp_path, store).tick(1002.0)  # one that has never read them
    assert read_all(store, name) == b"damaged"


def linked(path: Path) -> None:
    path.symlink_to(ROOT / "base" / path.name)


def test_a_spool_of_a_version_that_kept_no_added_files_goes_on(tmp_path: Path) -> None:
    store = MemoryStore()
    w = sent(tmp_path, store)
    folder = tmp_path / "_ckptsync/took/checkpoint-4.0"
    shutil.rmtree(folder / "added")
    (folder / "commit.json").unlink()
    store.write(CONFIG, [b"damaged"])
    damaged(store, 1, "checkpoint-4/config.json", "checkpoint-4/x")
    store.write("run/checkpoint-4/x", [b"damaged"])
    assert {r.name: r.reason for r in w.tick(1001.0).repairs} == {
        "checkpoint-4/config.json": "this node no longer has its bytes",
        "checkpoint-4/x": "",
    }


@pytest.mark.parametrize("plant", [linked, os.mkfifo, os.mkdir])
def test_what_is_no_file_is_neither_followed_nor_waited_for(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    store = MemoryStore()
    w = sent(tmp_path, store)
    (kept,) = kept_of(tmp_path, "checkpoint-4")
    (kept.root / "config.json").unlink()
    plant(kept.root / "config.json")
    store.write(CONFIG, [b"damaged"])
    damaged(store, 1, "checkpoint-4/config.json")
    assert [r.reason for r in w.tick(1001.0).repairs] == ["this node no longer has its bytes"]


def test_the_same_file_of_another_save_does_as_well(tmp_path: Path) -> None:
    store = MemoryStore()
    w = sent(tmp_path, store)
    for folder in ("checkpoint-4", "_ckptsync/took"):
        shutil.rmtree(tmp_path / folder)
    source = lay(tmp_path / "later", ONE, 50.0).rename(tmp_path / "checkpoint-8")
    add(commit(source))
    data = read_all(store, CONFIG)
    store.write(CONFIG, [b"damaged"])
    damaged(store, 1, "checkpoint-4/config.json")
    assert [r.reason for r in w.tick(1001.0).repairs] == [""]
    assert read_all(store, CONFIG) == data


def test_many_saves_keep_one_copy_and_none_of_what_the_trainer_removed(tmp_path: Path) -> None:
    one = sum((ROOT / "base" / name).stat().st_size for name in LACKED)
    for step in range(3):
        source = lay(tmp_path / "x", ONE).rename(tmp_path / f"checkpoint-{step}")
        add(commit(source))
    for each in pins(tmp_path):
        remember(tmp_path, each)
        remember(tmp_path, each)
        drop(each)
    assert len(list((tmp_path / "_ckptsync/took").iterdir())) == 3
    assert size(tmp_path) == one
    assert len(list(added_here(tmp_path))) == len(LACKED), "each is read once"
    forget(tmp_path, ())
    assert size(tmp_path) == 0


def test_where_there_are_no_links_they_are_copied_with_their_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(tmp_path)
    (its,) = pins(tmp_path)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    remember(tmp_path, its)
    drop(its)
    (kept,) = kept_of(tmp_path, "checkpoint-4")
    assert [(f.path, f.size, f.mtime) for f in kept.added] == [(f.path, f.size, f.mtime) for f in its.added]
    assert kept.commit == its.commit


def test_a_worker_that_is_killed_at_any_moment_keeps_all_of_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(tmp_path)
    (its,) = pins(tmp_path)
    link = os.link
    for lives in range(len(LACKED) + 1):
        left = iter(range(lives))

        def dying(*given: object, left: object = left, **named: object) -> None:
            if next(left, None) is None:  # type: ignore[call-overload]
                raise KeyboardInterrupt
            link(*given, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "link", dying)
        with pytest.raises(KeyboardInterrupt):
            remember(tmp_path, its)
        assert kept_of(tmp_path, "checkpoint-4") == ()
    monkeypatch.setattr(os, "link", link)
    remember(tmp_path, its)
    assert [p.name for p in (tmp_path / "_ckptsync/took").iterdir()] == ["checkpoint-4.0"]
    assert [f.path for f in kept_of(tmp_path, "checkpoint-4")[0].added] == sorted(LACKED)


def test_a_full_spool_lets_go_of_them_before_any_save(tmp_path: Path) -> None:
    sent(tmp_path, MemoryStore())
    lay(tmp_path / "x", {"model.safetensors": b"x" * 100}).rename(tmp_path / "checkpoint-8")
    seat = Pinner("n0", lambda *_: False, SpoolRule(budget=1))
    scan_run(RunDir("run", tmp_path), seat)
    assert size(tmp_path) == 0
    assert not give_way(tmp_path)
    assert [kept for kept in kept_of(tmp_path, "checkpoint-4") if kept.took.finished], "what was said takes no room"


def sharded(out: Path, source: Path) -> Path:
    shutil.copytree(source, out / "checkpoint-4", copy_function=shutil.copyfile)
    return commit(out / "checkpoint-4")


def report(store: Store) -> list[tuple[str, str]]:
    (seen,) = fresh(store).locations
    found = verify_location(store, seen, "digest")
    write_report(store, found)
    return [(f.kind, f.name) for f in found.findings if found.verdict == "damaged"]


def test_a_real_sharded_location_is_whole_again_though_only_the_spool_has_what_was_lost(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "store"))
    outs = [tmp_path / f"n{n}" for n in range(2)]
    added = [sharded(out, source) for out, source in zip(outs, vector("hf-fsdp2-2node").sources, strict=True)]
    add(added[0])
    workers = [worker(out, store, out.name, keep=0) for out in outs]
    for w in workers:
        settle(w)
    assert [m.location for m in consolidate_due(store, HeadOptions()).made] == ["checkpoint-4"]
    assert report(store) == []
    for w, out in zip(workers, outs, strict=True):
        w.tick(1000.0)
        assert not list((out / "_ckptsync/pins").iterdir())
    shutil.rmtree(outs[0] / "_ckptsync/added")
    flip(tmp_path / "store" / CONFIG)
    assert report(store) == [("digest", "checkpoint-4/config.json")]
    assert [r.reason for w in workers for r in w.tick(1001.0).repairs] == [""]
    assert report(store) == []
    assert fresh(store).locations[0].status == "VERIFIED"
