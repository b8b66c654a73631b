"""Which reports request a file of a node, and what is sent again: the very bytes that a manifest
names, or nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.digest import digest
from ckptsync.errors import StoreError, Transient
from ckptsync.records import io
from ckptsync.records.location_status import LocationRecords
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.manifest_groups import StoredManifest
from ckptsync.records.progress import Progress
from ckptsync.records.report import FindingKind, Level, Report, Verdict, VerifyFinding
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.tensors import Demands
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.queue import QueueCapacity, UploadJob, UploadQueues, split_threads
from ckptsync.worker.repair import find_copies, list_requests, send_again
from ckptsync.worker.upload_sources import Transfer
from ckptsync.worker.worker import Worker
from tests.support.filled_stores import put
from tests.support.hook_pins import commit
from tests.support.small_store import flip
from tests.support.vector import ROOT
from tests.support.worker_in_process import (
    EIGHT,
    ONE,
    T,
    damaged,
    is_drained,
    kept,
    lay,
    manifests,
    seen,
    settle,
    tick,
    verify,
    worker,
)

NAME = "run/checkpoint-4/x"
LACKED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
CONFIG = "run/checkpoint-4/config.json"


# Which reports request what.


def manifest(node: str, content: str) -> StoredManifest:
    entry = FileEntry("x", len(content), digest(content.encode()), 1 << 14, (), 0)
    return StoredManifest(
        f"manifest-{node}", Manifest("run", "c-1", "c-1", node, 0, (entry,), (), 0, 0, Demands())
    )


def report(
    n: int,
    verdict: Verdict = "damaged",
    name: str = "c-1/x",
    kind: FindingKind = "digest",
    level: Level = "digest",
) -> Report:
    findings = () if verdict == "ok" else (VerifyFinding(kind, name, ""),)
    return Report("run", "c-1", "c-1", n, level, verdict, (), "", 0, findings)


def requested(
    *reports: Report, node: str = "n0", known: tuple[StoredManifest, ...] = (manifest("n0", "a"),)
) -> list[tuple[str, str]]:
    records = LocationRecords(reports={f"report-{r.n}": r for r in reports})
    return [(r.report, r.name) for r in list_requests(records, node, "c-1", known)]


def test_the_newest_unanswered_report_requests() -> None:
    assert requested(report(0)) == [("report-0", "run/c-1/x")]
    assert requested(report(0), report(1)) == [("report-1", "run/c-1/x")]
    assert requested(report(0), report(1, "ok")) == []
    assert requested(report(0), report(1, "ok", level="stat")) == [("report-0", "run/c-1/x")]


def test_only_files_that_this_node_has_named_and_that_are_damaged_are_requested() -> None:
    assert requested(report(0), node="n1") == []
    for name in ("x", "../c-1/x", "c-1/y", "consolidated/c-1/x", ".ckptsync/c-1/files/n0/x"):
        assert requested(report(0, name=name)) == []
    assert requested(report(0, kind="nonfinite")) == []
    assert requested(report(0), known=()) == []


def test_a_copy_of_anothers_file_is_known_by_its_time_or_by_a_digest_that_was_read(
    tmp_path: Path,
) -> None:
    path = lay(tmp_path, {"x": b"a"}) / "x"
    records = LocationRecords(reports={"r": report(0)})
    for mtime, digests, is_known in (
        (T + 5, {}, True),
        (T, {}, False),  # a time without a fraction may be chance
        (T, {("x", 1, T): digest(b"a")}, True),
        (T, {("x", 1, T): digest(b"b"), ("y", 1, T): digest(b"a")}, False),
    ):
        os.utime(path, ns=(mtime, mtime))
        has_copy = find_copies([seen(tmp_path)], digests)
        stored = manifest("n0", "a")
        files = (replace(stored.manifest.files[0], mtime=mtime),)
        known = [replace(stored, manifest=replace(stored.manifest, files=files))]
        assert bool(list_requests(records, "n1", "c-1", known, has_copy)) == is_known


def test_each_of_two_nodes_is_requested_its_own_copy_and_both_a_shared_one() -> None:
    beside = ".ckptsync/c-1/files/n1/x"
    other = manifest("n1", "b")
    lying = replace(
        other.manifest, files=(replace(other.manifest.files[0], stored_as=f"run/{beside}"),)
    )
    two = (manifest("n0", "a"), replace(other, manifest=lying))
    same = (manifest("n0", "a"), manifest("n1", "a"))
    # the name may have the other's bytes
    assert requested(report(0), known=(manifest("n0", "a"), other)) == []
    own = [("report-0", f"run/{beside}")]
    assert requested(report(0, name=beside), node="n1", known=two) == own
    assert requested(report(0, name=beside), node="n0", known=two) == []
    assert requested(report(0), node="n1", known=two) == []
    assert requested(report(0), node="n1", known=same) == [("report-0", "run/c-1/x")]


def test_what_was_broken_before_it_was_sent_is_not_sent_again() -> None:
    records = LocationRecords(reports={"r": report(0, kind="parse")})
    (request,) = list_requests(records, "n0", "c-1", [manifest("n0", "a")])
    store = MemoryStore()
    store.write("run/c-1/x", [b"a"])
    assert "damaged before" in send_again(request, [], store, "n0")
    # it lies there again, or the disk has it right this time
    assert "no longer" in send_again(replace(request, kind="digest"), [], store, "n0")
    store.write("run/c-1/x", [b"b"])
    assert "no longer" in send_again(request, [], store, "n0")


def unreadable(monkeypatch: pytest.MonkeyPatch, error: Exception, *roots: Path) -> None:
    """Reading files below these directories fails."""
    read = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if any(root in Path(f"/proc/self/fd/{fd}").readlink().parents for root in roots):
            raise error
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize("error", [Transient("the process ends"), OSError(errno.EIO, "broken")])
def test_a_copy_that_cannot_be_read_is_passed_over_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    outs = tmp_path / "pinned", tmp_path / "pulled"
    for out in outs:
        lay(out, {"x": b"a"})
    holds = [seen(out).files for out in outs]
    records = LocationRecords(reports={"r": report(0)})
    (request,) = list_requests(records, "n0", "c-1", [manifest("n0", "a")])
    store = MemoryStore()
    with monkeypatch.context() as patch:
        unreadable(patch, error, *outs)
        with pytest.raises(StoreError, match=r"the process ends|broken"):
            send_again(request, holds, store, "n0")
    unreadable(monkeypatch, error, outs[0])
    assert send_again(request, holds, store, "n0") == ""
    assert read_all(store, "run/c-1/x") == b"a"


# Files are sent by the upload queues.


WIDE, NARROW = split_threads(4)


def begin(queues: UploadQueues, capacity: QueueCapacity = WIDE) -> UploadJob:
    """Take the next job, as a queue does."""
    job = queues.take(capacity)
    assert job is not None
    return job


def end(queues: UploadQueues, job: UploadJob, capacity: QueueCapacity = WIDE) -> None:
    job.work(capacity)
    queues.end(capacity, job)


def plan(w: Worker, now: float) -> None:
    w.scan(now)
    w.plan(now)


class Refusing(MemoryStore):
    """Takes nothing while it is away."""

    is_away = False

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        if self.is_away:
            raise Transient("away")
        super().write(name, chunks, about)


def hurt(tmp_path: Path, store: MemoryStore) -> tuple[Worker, UploadQueues]:
    """A worker whose stored file was damaged, and reported."""
    lay(tmp_path, ONE)
    settle(worker(tmp_path, store))
    damaged(store, 0, "checkpoint-4/x")
    store.write(NAME, [b"spoilt"])
    queues = UploadQueues(4)
    return Worker(WorkerOptions("n0", RunDir("run", tmp_path)), store, queues), queues


def test_a_new_save_is_sent_while_a_file_is_sent_again(tmp_path: Path) -> None:
    store = MemoryStore()
    w, queues = hurt(tmp_path, store)
    plan(w, 1000.0)
    again = begin(queues)
    assert (again.name, again.size) == (("run", "checkpoint-4"), len(ONE["x"]))
    assert w.result().repairs == ()
    plan(w, 1000.5)
    assert is_drained(queues), "it is not queued twice"
    lay(tmp_path / "later", EIGHT, 50.0).rename(tmp_path / "checkpoint-8")
    plan(w, 1001.0)
    plan(w, 2000.0)
    end(queues, begin(queues, NARROW), NARROW)
    assert read_all(store, NAME) == b"spoilt"
    end(queues, again)
    assert kept(store) == {"checkpoint-4": {"n0": ONE}, "checkpoint-8": {"n0": EIGHT}}
    assert [r.name for r in w.result().repairs] == ["checkpoint-4/x"]
    assert w.result().lacks == {}
    plan(w, 2001.0)  # until then it is reported
    assert (is_drained(queues), w.result().repairs) == (True, ())
    queues.post("another save", [UploadJob(1, ("run", "checkpoint-4"), 1, lambda _: None)])
    another = begin(queues)
    plan(w, 2002.0)
    end(queues, another)
    plan(w, 2003.0)
    assert is_drained(queues), "it is not sent twice"


def test_a_failed_repair_is_tried_again_and_a_missing_file_reported(tmp_path: Path) -> None:
    store = Refusing()
    w, queues = hurt(tmp_path, store)
    plan(w, 1000.0)
    store.is_away = True
    end(queues, begin(queues))
    assert [f.may_pass for f in w.result().failures] == [True]
    store.is_away = False
    (tmp_path / "checkpoint-4" / "x").unlink()
    for pin in (tmp_path / "_ckptsync" / "pins").rglob("x"):
        pin.unlink()
    plan(w, 1001.0)
    end(queues, begin(queues))
    result = w.result()
    assert [r.reason for r in result.repairs] == ["this node no longer has the file"]
    assert list(result.lacks.values()) == [("checkpoint-4/x",)], "the next heartbeat says so"


# Manifests.


def stored(out: Path) -> tuple[MemoryStore, str, bytes, Worker]:
    """A store with one save in it, its manifest's name, and its bytes."""
    store = MemoryStore()
    lay(out, ONE)
    w = Worker(WorkerOptions("n0", RunDir("run", out), 0.0, 0.0, keep_pins=0), store)
    settle(w)
    (name,) = (k.name for k in manifests(store))
    return store, name, read_all(store, name), w


def witnessed(store: MemoryStore, *names: str) -> None:
    """A report that names them, so that they are missed."""
    put(store, Report("run", "checkpoint-4", "checkpoint-4", 0, "digest", "ok", names, "", 0, ()))


@pytest.mark.parametrize("how", ["empty", "short", "other", "gone"])
def test_a_manifest_that_is_damaged_or_gone_is_written_again(tmp_path: Path, how: str) -> None:
    store, name, data, _ = stored(tmp_path)
    witnessed(store, name)
    damage = {"empty": b"", "short": data[:-3], "other": data.replace(b"n0", b"n9")}
    if how == "gone":
        store.delete(name)
    else:
        store.write(name, [damage[how]])
    w = Worker(WorkerOptions("n0", RunDir("run", tmp_path)), store)
    assert [p.phase for p in tick(w, 0.0).progress] == ["stored"]
    assert (read_all(store, name), [k.name for k in manifests(store)]) == (data, [name])


def test_a_manifest_s_copy_outlives_its_pin_but_not_the_checkpoint(tmp_path: Path) -> None:
    store, name, data, w = stored(tmp_path)
    verify(store)
    tick(w, 1000.0)
    assert not list((tmp_path / "_ckptsync/pins").iterdir())
    store.write(name, [b"damaged"])
    tick(w, 1001.0)
    assert read_all(store, name) == data
    shutil.rmtree(tmp_path / "checkpoint-4")
    tick(w, 1002.0)
    assert not list((tmp_path / "_ckptsync/manifests").iterdir())


def test_other_nodes_manifests_and_those_of_newer_programs_are_left_alone(tmp_path: Path) -> None:
    store, name, data, w = stored(tmp_path)
    other = name.replace("manifest-n0-", "manifest-n1-")
    newer = data.replace(b'"format":1', b'"format":2')
    manifest = io.decode(name, data)
    names = {other: b"damaged", io.record_name(manifest, newer): newer}
    for wrong, its in names.items():
        store.write(wrong, [its])
    tick(w, 1000.0)
    assert {wrong: read_all(store, wrong) for wrong in names} == names


def test_a_manifest_with_a_copy_that_the_store_refuses_is_not_called_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, name, data, w = stored(tmp_path)
    store.write(name, [b"damaged"])

    def refuse(*_: object) -> None:
        raise Transient("away")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", refuse)
        result = tick(w, 1000.0)
        assert [f.error for f in result.failures][:1] == ["Transient"]
        assert result.lacks == {}
    tick(w, 1001.0)
    assert read_all(store, name) == data


@pytest.mark.parametrize("spoil", [b"", b"damaged"])
def test_without_a_copy_only_a_lost_manifest_is_replaced(tmp_path: Path, spoil: bytes) -> None:
    out = tmp_path / "out"
    store, name, _, w = stored(out)
    anothers = name.replace("manifest-n0-", "manifest-n1-")
    witnessed(store, name, anothers)
    store.write(anothers, [b"x"])
    tick(w, 900.0)
    store.delete(anothers)
    (copy,) = (out / "_ckptsync/manifests/checkpoint-4").iterdir()
    if spoil == b"damaged":
        copy.write_bytes(b"torn")
    else:
        copy.unlink()
    if spoil:
        store.write(name, [spoil])
        result = tick(w, 1000.0)
        assert [f.error for f in result.failures] == ["Corrupt"]
        assert result.lacks == {name: ()}
        return
    store.delete(name)
    assert read_state(store).faults
    settle(w, 1000.0)  # the first plan sees that it is gone
    (new,) = manifests(store)
    assert new.manifest.supersedes == (name,)
    assert [f.name for f in read_state(store).faults] == [anothers]
    assert [p.phase for p in tick(w, 2000.0).progress] == ["stored"]


def test_another_save_does_not_take_back_a_lost_manifest(tmp_path: Path) -> None:
    out = tmp_path / "out"
    store, name, _, _ = stored(out)
    witnessed(store, name)
    store.delete(name)
    shutil.rmtree(out / "_ckptsync")
    lay(out, {path: content + b" " for path, content in ONE.items()}, 9000.0)
    tick(Worker(WorkerOptions("n0", RunDir("run", out), 0.0, 0.0), store), 0.0)
    assert [k.manifest.supersedes for k in manifests(store)] == [()]
    assert [f.name for f in read_state(store).faults] == [name]


# What the hook added.


def add(path: Path) -> Path:
    """Add to a pin what its checkpoint lacks."""
    written = path.parents[1] / "added" / "train"
    written.mkdir(parents=True, exist_ok=True)
    (path / "added").mkdir()
    for name in LACKED:
        if not (written / name).exists():
            shutil.copyfile(ROOT / "base" / name, written / name)
        os.link(written / name, path / "added" / name)
    return path


def sent(out: Path, store: Store) -> Worker:
    """A worker that has stored a save, and still has its pin; the training is over."""
    add(commit(lay(out, ONE)))
    w = worker(out, store)
    settle(w)
    verify(store)
    tick(w, 1000.0)
    shutil.rmtree(out / "_ckptsync/added", ignore_errors=True)
    return w


def test_what_is_to_be_sent_again_says_so_until_it_was_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    w = sent(tmp_path, store)
    size = len(read_all(store, CONFIG))
    store.write(CONFIG, [b"damaged"])
    damaged(store, 1, "checkpoint-4/config.json")
    w.scan(1001.0)
    w.plan(1001.0)
    [waits] = w.running(0.0)
    assert (waits.kind, waits.state, waits.subject) == ("repair", "queued", "run/checkpoint-4")
    assert (waits.done, waits.total) == (0, size)
    assert abs(waits.since - time.time()) < 3600
    tick(w, 1002.0)
    assert w.running(0.0) == []


def test_a_plan_and_a_repair_that_ends_do_not_meet(tmp_path: Path) -> None:
    w = sent(tmp_path, MemoryStore())
    repairs, keys = w._repairs, [("run", f"checkpoint-{n}") for n in range(3)]
    repairs._pending = {key: Progress(kind="repair", state="queued") for key in keys}

    class Ending(dict[tuple[str, str], Transfer]):
        """What the plan asks about ends at that moment, in another thread."""

        def __contains__(self, key: object) -> bool:
            return repairs._pending.pop(next(iter(repairs._pending)), None) is None

    repairs._transfers = Ending()
    repairs.plan([])
    assert w.running(0.0) == []


def write_other_bytes(path: Path) -> None:
    """Of the same size and time."""
    times = path.stat().st_mtime_ns
    flip(path)
    os.utime(path, ns=(times, times))


def replace_by(plant: Callable[[Path], None]) -> Callable[[Path], None]:
    def replace_path(path: Path) -> None:
        path.unlink()
        plant(path)

    return replace_path


def move_to_another_save(path: Path) -> None:
    out = path.parents[4]
    for folder in ("checkpoint-4", "_ckptsync/pins/checkpoint-4.0"):
        shutil.rmtree(out / folder)
    add(commit(lay(out / "later", ONE, 50.0).rename(out / "checkpoint-8")))
    shutil.rmtree(out / "_ckptsync/added")


def leave_to_the_training(path: Path) -> None:
    shutil.copytree(path.parent, path.parents[3] / "added" / "train")
    shutil.rmtree(path.parents[2])


@pytest.mark.parametrize(
    ("happens", "is_repaired"),
    [
        (lambda path: None, True),
        (move_to_another_save, True),
        (leave_to_the_training, True),
        (write_other_bytes, False),
        (replace_by(lambda path: path.symlink_to(ROOT / "base" / path.name)), False),
        (replace_by(os.mkfifo), False),
        (replace_by(os.mkdir), False),
    ],
)
def test_a_damaged_file_is_sent_again_from_the_very_same_file(
    tmp_path: Path, happens: Callable[[Path], None], *, is_repaired: bool
) -> None:
    store = MemoryStore()
    w = sent(tmp_path, store)
    data = read_all(store, CONFIG)
    happens(tmp_path / "_ckptsync/pins/checkpoint-4.0/added/config.json")
    store.write(CONFIG, [b"damaged"])
    damaged(store, 1, "checkpoint-4/config.json")
    (repaired,) = tick(w, 1001.0).repairs
    assert repaired.name == "checkpoint-4/config.json"
    assert repaired.reason == ("" if is_repaired else "this node no longer has the file")
    assert read_all(store, CONFIG) == (data if is_repaired else b"damaged")
