"""What goes from this node once the store has it, VERIFIED: pins, and local checkpoints."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptsync.checkpoint_dirs import ASIDE, checkpoint_dir_at
from ckptsync.errors import StoreError
from ckptsync.records.io import encode, record_name
from ckptsync.records.report import Report
from ckptsync.records.save_decisions import Tombstone
from ckptsync.spool.pins import create_pin, link_files
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.walk import walk
from ckptsync.worker import scanner
from ckptsync.worker.cleanup import LocalCheckpoint, choose_cleanable, is_open, remove_by_rename
from ckptsync.worker.options import Clean, RunDir, WorkerOptions
from ckptsync.worker.store_view import StoreView
from ckptsync.worker.worker import Worker
from tests.support.filled_stores import put
from tests.support.waiting import until
from tests.support.worker_in_process import (
    EIGHT,
    ONE,
    Overtaken,
    lay,
    manifests,
    pinned,
    progress,
    settle,
    tick,
    verify,
    worker,
)


def local(n: int, *, verified: bool = True, busy: bool = False, at: int = -1) -> LocalCheckpoint:
    return LocalCheckpoint(f"c-{n}", (n, n if at < 0 else at), verified, busy)


def test_all_but_the_newest_few_that_are_verified_may_go_oldest_first() -> None:
    assert choose_cleanable([local(n) for n in (3, 1, 4, 2)], (), 2) == ("c-1", "c-2")
    assert choose_cleanable([local(1, verified=False), local(2), local(3)], (), 1) == ("c-2",)
    assert choose_cleanable([local(n) for n in (1, 2, 3)], {"c-1"}, 1) == ("c-2",)


def test_the_newest_by_step_and_by_time_stay_whatever_is_asked_for() -> None:
    assert choose_cleanable([local(1), local(2)], (), 0) == ("c-1",)
    assert choose_cleanable([local(1)], (), 0) == ()
    resumed_from_an_old_one = [local(1, at=9), local(2, at=2), local(3, at=3)]
    assert choose_cleanable(resumed_from_an_old_one, (), 1) == ("c-2",)


def test_nothing_goes_that_is_younger_than_what_is_still_on_its_way() -> None:
    assert choose_cleanable([local(1), local(2, busy=True), local(3), local(4)], (), 1) == ("c-1",)
    # younger by its step alone, or by its time alone, where a clock was wrong
    by_step = [local(1), local(2, busy=True, at=5), local(3, at=4), local(9)]
    assert choose_cleanable(by_step, (), 1) == ("c-1",)
    by_time = [local(1, at=5), local(2, busy=True, at=4), local(9)]
    assert choose_cleanable(by_time, (), 1) == ()


def save(out: Path, n: int, best: str | None = None) -> None:
    """A save of the n-th step, of which the trainer calls ``best`` its best."""
    state = json.dumps({"global_step": n, "best_model_checkpoint": best}).encode()
    files = {"trainer_state.json": state, "w": b"weights"}
    lay(out / "x", files, float(n)).rename(out / f"checkpoint-{n}")


def run(
    out: Path,
    store: MemoryStore,
    steps: int = 3,
    *,
    clean: bool = True,
    exclude: tuple[str, ...] = (),
) -> Worker:
    """A worker that has sent some steps of which the trainer calls none its best."""
    for n in range(1, steps + 1):
        save(out, n)
    cleanup: Clean = "verified" if clean else "off"
    run_dir = RunDir("run", out)
    w = Worker(WorkerOptions("n0", run_dir, clean=cleanup, keep_local=1, exclude=exclude), store)
    settle(w)
    return w


def names_in(out: Path) -> list[str]:
    return sorted(p.name for p in out.glob("checkpoint-*"))


def test_what_is_verified_goes_with_its_pin_and_the_rest_stays(tmp_path: Path) -> None:
    store = MemoryStore()
    w = run(tmp_path, store)
    tick(w, 1000.0)
    assert names_in(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    verify(store, "checkpoint-1")
    verify(store, "checkpoint-3")
    result = tick(w, 1001.0)
    assert [p.checkpoint for p in result.progress if p.phase == "cleaned"] == ["checkpoint-1"]
    assert result.failures == ()
    assert names_in(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert pinned(tmp_path) == ["checkpoint-2.0", "checkpoint-3.0"]
    assert not [p for p in (tmp_path / "_ckptsync").iterdir() if p.name.startswith(".gone")]
    assert progress(tick(w, 1002.0))["checkpoint-3.0"].phase == "stored"


def lose(store: MemoryStore, out: Path) -> None:
    store.delete("run/checkpoint-1/w")


def cut(store: MemoryStore, out: Path) -> None:
    store.write("run/checkpoint-1/w", [b"weight"])


def edit(store: MemoryStore, out: Path) -> None:
    (out / "checkpoint-1" / "w").write_bytes(b"WEIGHTS")


def add(store: MemoryStore, out: Path) -> None:
    (out / "checkpoint-1" / "notes.txt").write_bytes(b"mine")


def link(store: MemoryStore, out: Path) -> None:
    (out / "checkpoint-1" / "notes").symlink_to("/dev/null")


def retire(store: MemoryStore, out: Path) -> None:
    names = tuple(k.name for k in manifests(store) if k.manifest.location == "checkpoint-1")
    put(store, Tombstone("run", "checkpoint-1", "checkpoint-1", 0, names, "old"))


def retire_shards(store: MemoryStore, out: Path) -> None:
    names = tuple(k.name for k in manifests(store) if k.manifest.location == "checkpoint-1")
    put(store, Tombstone("run", "checkpoint-1", "checkpoint-1", 0, names, "old", "shards"))


def report_in_a_newer_format(store: MemoryStore, out: Path) -> None:
    newer = Report("run", "checkpoint-1", "checkpoint-1", 9, "digest", "damaged", (), "", 1, ())
    data = encode(newer).replace(b'"format":', b'"format":9')
    store.create(record_name(newer, data), [data])


def break_a_report(store: MemoryStore, out: Path) -> None:
    newer = Report("run", "checkpoint-1", "checkpoint-1", 9, "digest", "damaged", (), "", 1, ())
    store.create(record_name(newer, encode(newer)), [b"x"])


def do_nothing(store: MemoryStore, out: Path) -> None: ...


@pytest.mark.parametrize(
    ("happens", "options"),
    [
        *((happens, {}) for happens in (lose, cut, edit, add, link, retire, retire_shards)),
        *((happens, {}) for happens in (report_in_a_newer_format, break_a_report)),
        (do_nothing, {"clean": False}),
        (do_nothing, {"exclude": ("w",)}),  # it has no other copy
    ],
)
def test_what_the_store_lacks_in_any_way_stays(
    tmp_path: Path, happens: Callable[[MemoryStore, Path], None], options: dict[str, Any]
) -> None:
    store = MemoryStore()
    w = run(tmp_path, store, **options)
    verify(store, "checkpoint-1")
    happens(store, tmp_path)
    assert [f.checkpoint for f in tick(w, 1000.0).failures if f.error != "Unsupported"] == []
    assert "checkpoint-1" in names_in(tmp_path)


def begin_to_write(store: MemoryStore, out: Path) -> None:
    (out / "checkpoint-1" / ".tmpAbC123").touch()


def pin_another_save(store: MemoryStore, out: Path) -> None:
    pin = create_pin(out, "checkpoint-1", 7, "n0")
    assert pin is not None
    link_files(pin, out / "checkpoint-2", ["w", "trainer_state.json"])


@pytest.mark.parametrize(
    ("happens", "stays"), [(retire, True), (begin_to_write, True), (pin_another_save, False)]
)
def test_what_comes_after_the_scan_counts(
    tmp_path: Path, happens: Callable[[MemoryStore, Path], None], *, stays: bool
) -> None:
    store = Overtaken()
    w = run(tmp_path, store)
    verify(store, "checkpoint-1")
    store.nth, store.meanwhile = 1, partial(happens, store, tmp_path)
    assert tick(w, 1000.0).failures == ()
    assert ("checkpoint-1" in names_in(tmp_path)) == stays
    assert ("checkpoint-1.7" in pinned(tmp_path)) != stays


def overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(b"WEIGHTS")


def replace_file(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(b"WEIGHTS")
    other.replace(file)


@pytest.mark.parametrize(
    ("change", "is_restarted", "is_pinned"),
    [
        (overwrite, False, True),
        (overwrite, True, False),
        (replace_file, False, False),
        (replace_file, True, True),
    ],
)
def test_bytes_that_changed_while_size_and_time_stayed_are_in_no_store(
    tmp_path: Path, change: Callable[[Path], None], *, is_restarted: bool, is_pinned: bool
) -> None:
    store = MemoryStore()
    w = run(tmp_path, store, 4)
    file = tmp_path / "checkpoint-1/w"
    times = file.stat()
    change(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    if not is_pinned:
        shutil.rmtree(tmp_path / "_ckptsync/pins")
    if is_restarted:
        w = run(tmp_path, store, 0)
    for n in (1, 2):
        verify(store, f"checkpoint-{n}")
    for now in (1000.0, 1001.0):
        [failure] = tick(w, now).failures
        assert "checkpoint-1/w: its bytes are not those in the store" in failure.text
        assert "touch" in failure.hint
    assert names_in(tmp_path) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    os.utime(file)
    settle(w, 2000.0)
    stored = [read_all(store, e.name) for e in store.names("run/") if e.name.endswith("/w")]
    assert b"WEIGHTS" in stored
    assert tick(w, 3000.0).failures == ()


def test_what_the_trainer_calls_its_best_stays(tmp_path: Path) -> None:
    store = MemoryStore()
    w = run(tmp_path, store, 2)
    save(tmp_path, 3, "out/checkpoint-1")
    for name in ("checkpoint-1", "checkpoint-2"):
        verify(store, name)
    settle(w, 1000.0)
    tick(w, 3000.0)
    assert names_in(tmp_path) == ["checkpoint-1", "checkpoint-3"]


def test_the_best_of_a_trial_stays_though_its_name_is_a_longer_one(tmp_path: Path) -> None:
    store = MemoryStore()
    w = run(tmp_path, store, 0)
    for n, trial in ((1, "run-0"), (2, "run-0"), (3, "run-1")):
        (tmp_path / trial).mkdir(exist_ok=True)
        save(tmp_path / trial, n, "out/run-0/checkpoint-1")
    settle(w, 1000.0)
    for n in (1, 2):
        verify(store, f"run-0.checkpoint-{n}")
    tick(w, 3000.0)
    assert [p.name[-1] for p in sorted(tmp_path.glob("run-*/checkpoint-*"))] == ["1", "3"]


def test_one_that_may_not_go_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    w = run(tmp_path, store)
    for n in (1, 2):
        verify(store, f"checkpoint-{n}")
    rename = os.rename

    def refused(path: str, target: str, **where: int) -> None:
        if path == "checkpoint-1":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        rename(path, target, **where)

    monkeypatch.setattr(os, "rename", refused)
    result = tick(w, 1000.0)
    assert [(f.checkpoint, f.error) for f in result.failures] == [("checkpoint-1", "ConfigError")]
    assert names_in(tmp_path) == ["checkpoint-1", "checkpoint-3"]


def test_nothing_is_deleted_beside_a_spool_on_another_disk_where_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    w = run(tmp_path, store)
    verify(store, "checkpoint-1")
    rename, left_by_a_kill = os.rename, tmp_path / ".gone-cleaned-checkpoint-0"
    left_by_a_kill.mkdir()

    def within_a_disk(path: str, target: str, **where: int) -> None:
        if Path(f"/proc/self/fd/{where['dst_dir_fd']}").readlink().name == "_ckptsync":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(path, target, **where)

    monkeypatch.setattr(os, "rename", within_a_disk)
    for mode, errors in ((0o775, ["ConfigError", "ConfigError"]), (0o755, [])):
        tmp_path.chmod(mode)
        assert [f.error for f in tick(w, 1000.0).failures] == errors
        assert left_by_a_kill.exists() == ("checkpoint-1" in names_in(tmp_path)) == bool(errors)


def test_what_somebody_reads_stays_until_he_is_done(tmp_path: Path) -> None:
    store = MemoryStore()
    w = run(tmp_path, store)
    verify(store, "checkpoint-1")
    with (tmp_path / "checkpoint-1" / "w").open("rb"):
        if not is_open(tmp_path / "checkpoint-1", walk(tmp_path / "checkpoint-1").files):
            pytest.skip("no leases on this file system")
        tick(w, 1000.0)
        assert "checkpoint-1" in names_in(tmp_path)
    tick(w, 1001.0)
    assert "checkpoint-1" not in names_in(tmp_path)


@pytest.mark.parametrize("clean", [True, False])
def test_what_was_moved_aside_goes_after_a_later_verified_save(
    tmp_path: Path, *, clean: bool
) -> None:
    store = MemoryStore()
    w = run(tmp_path, store, clean=clean)
    weights = {"w": b"torn"}
    left_by_a_kill = tmp_path / "_ckptsync" / ".gone-cleaned-checkpoint-0"
    shutil.copytree(tmp_path / "checkpoint-1", left_by_a_kill)
    (tmp_path / ASIDE).mkdir()

    def aside() -> list[str]:
        return sorted(path.name for path in (tmp_path / ASIDE).iterdir())

    for name in ("2", "2.2", "1", "3", "4"):
        lay(tmp_path / "x", weights, 9.0 if name == "1" else 1.5).rename(
            tmp_path / ASIDE / f"checkpoint-{name}"
        )
    (tmp_path / ASIDE / "mine").write_bytes(b"mine")
    everything = aside()
    tick(w, 1000.0)
    assert aside() == everything, "nothing is verified"
    assert not left_by_a_kill.exists() or not clean
    verify(store, "checkpoint-3")
    half = tmp_path / "checkpoint-3" / ".tmpAbC123"
    half.touch()
    tick(w, 1000.5)
    assert aside() == everything, "somebody writes to the later one"
    half.unlink()
    with (tmp_path / ASIDE / "checkpoint-2.2" / "w").open("rb"):
        result = tick(w, 1001.0)
        assert ("checkpoint-2" in aside()) is not clean
    # written after it, of its step or an earlier one, or of no series: these stay
    cleaned_names = [p.checkpoint for p in result.progress if p.phase == "cleaned"]
    assert cleaned_names == ([f"{ASIDE}/checkpoint-2"] if clean else [])
    tick(w, 1002.0)
    left = ["checkpoint-1", "checkpoint-3", "checkpoint-4", "mine"]
    assert aside() == (left if clean else everything)


def test_what_changed_in_the_last_moment_comes_back(tmp_path: Path) -> None:
    source = lay(tmp_path, {"w": b"weights"})
    (tmp_path / "_ckptsync").mkdir()
    checkpoint_dir = checkpoint_dir_at(source)
    assert checkpoint_dir is not None
    before = walk(source)
    [file] = before.files

    def is_rewritten() -> bool:
        (source / "w").write_bytes(b"WEIGHTS")
        os.utime(source / "w", ns=(file.mtime, file.mtime))
        return (source / "w").stat().st_ctime_ns != file.ctime

    assert until(is_rewritten)
    assert not remove_by_rename(tmp_path, checkpoint_dir, before), "by its ctime"
    before = walk(source)
    (source / "w").write_bytes(b"weights")
    assert not remove_by_rename(tmp_path, checkpoint_dir, before)
    before = walk(source)
    (source / ".tmpAbC123").write_bytes(b"half")
    assert not remove_by_rename(tmp_path, checkpoint_dir, before), "somebody is writing"
    (source / ".tmpAbC123").unlink()
    assert (source / "w").read_bytes() == b"weights"
    assert remove_by_rename(tmp_path, checkpoint_dir, walk(source))
    assert not source.exists()


def test_copies_of_a_checkpoint_that_cannot_be_scanned_now_stay(tmp_path: Path) -> None:
    store = MemoryStore()
    source = lay(tmp_path, ONE)
    w = worker(tmp_path, store, keep=0)
    settle(w)
    verify(store)
    tick(w, 1000.0)
    copies = tmp_path / "_ckptsync/manifests"
    assert [path.name for path in copies.iterdir()] == ["checkpoint-4"]
    (copies / "checkpoint-4~aaaaaaaa").mkdir(mode=0o700)  # of another save of the name
    deep = source.joinpath(*["d"] * 40)
    deep.mkdir(parents=True)  # an error of this one checkpoint
    assert [f.checkpoint for f in tick(w, 1001.0).failures] == ["checkpoint-4"]
    shutil.rmtree(source / "d")
    strange = tmp_path / "_ckptsync/pins/checkpoint-9.0"
    strange.joinpath("files", *["d"] * 40).mkdir(parents=True)  # and one of the whole run
    assert {f.checkpoint for f in tick(w, 1002.0).failures} == {""}
    shutil.rmtree(strange)
    names = ["checkpoint-4", "checkpoint-4~aaaaaaaa"]
    assert sorted(path.name for path in copies.iterdir()) == names
    shutil.rmtree(source)
    tick(w, 1003.0)
    assert list(copies.iterdir()) == []


def test_a_scan_that_fails_meanwhile_costs_no_copy_of_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay(tmp_path / "checkpoint-4", EIGHT)
    w = worker(tmp_path, MemoryStore())
    settle(w)
    copies = tmp_path / "_ckptsync" / "manifests" / "checkpoint-4"
    assert list(copies.iterdir())
    w.scan(700.0)
    real = StoreView.refresh

    def refresh(view: StoreView) -> object:
        with monkeypatch.context() as broken:
            broken.setattr(scanner, "list_and_pin_saves", fails)
            w.scan(701.0)
        return real(view)

    def fails(*_: object) -> None:
        raise StoreError("stale file handle")

    monkeypatch.setattr(StoreView, "refresh", refresh)
    w.plan(701.0)
    assert list(copies.iterdir())
