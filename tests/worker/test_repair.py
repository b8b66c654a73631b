"""Which reports request a file of a node, and what is sent again: the very bytes that a manifest
names, or nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.digest import digest
from ckptsync.errors import StoreError, Transient
from ckptsync.head.consolidate import HeadOptions
from ckptsync.records import io
from ckptsync.records.location_status import LocationRecords
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.manifest_groups import StoredManifest
from ckptsync.records.progress import Progress
from ckptsync.records.report import FindingKind, Level, Report, Verdict, VerifyFinding
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.tensors import Demands
from ckptsync.verifier.verification import VerifyOptions, verify_location
from ckptsync.verifier.write_reports import write_report
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.queue import QueueCapacity, UploadJob, UploadQueues, split_threads
from ckptsync.worker.repair import list_requests, send_again
from ckptsync.worker.upload_sources import Transfer
from ckptsync.worker.worker import Worker
from tests.support.head_in_process import consolidate_due
from tests.support.hook_pins import commit
from tests.support.small_store import flip
from tests.support.vector import ROOT, vector
from tests.support.worker_in_process import (
    EIGHT,
    ONE,
    damaged,
    is_drained,
    kept,
    lay,
    manifests,
    put,
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


def test_each_of_two_nodes_is_requested_its_own_copy_and_both_a_shared_one() -> None:
    beside = ".ckptsync/c-1/files/n1/x"
    other = manifest("n1", "b")
    lying = replace(
        other.manifest, files=(replace(other.manifest.files[0], stored_as=f"run/{beside}"),)
    )
    two = (manifest("n0", "a"), replace(other, manifest=lying))
    assert requested(report(0), known=(manifest("n0", "a"), other)) == [], (
        "the name may have the other's bytes"
    )
    assert requested(report(0, name=beside), node="n1", known=two) == [
        ("report-0", f"run/{beside}")
    ]
    assert requested(report(0, name=beside), node="n0", known=two) == []
    assert requested(report(0), node="n1", known=two) == []
    assert requested(report(0), node="n1", known=(manifest("n0", "a"), manifest("n1", "a"))) == [
        ("report-0", "run/c-1/x")
    ]


def test_what_was_broken_before_it_was_sent_is_not_sent_again() -> None:
    records = LocationRecords(reports={"r": report(0, kind="parse")})
    (request,) = list_requests(records, "n0", "c-1", [manifest("n0", "a")])
    store = MemoryStore()
    store.write("run/c-1/x", [b"a"])
    assert "damaged before" in send_again(request, [], store, "n0")
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
def test_a_copy_that_the_disk_cannot_read_is_passed_over_and_tried_again_if_no_other_is_well(
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
    assert (again.name, again.size, w.result().repairs) == (
        ("run", "checkpoint-4"),
        len(ONE["x"]),
        (),
    )
    lay(tmp_path / "later", EIGHT, 50.0).rename(tmp_path / "checkpoint-8")
    plan(w, 1001.0)
    plan(w, 2000.0)
    end(queues, begin(queues, NARROW), NARROW)
    assert read_all(store, NAME) == b"spoilt"
    end(queues, again)
    assert kept(store) == {"checkpoint-4": {"n0": ONE}, "checkpoint-8": {"n0": EIGHT}}
    assert [r.name for r in w.result().repairs] == ["checkpoint-4/x"]
    plan(w, 2001.0)
    assert (is_drained(queues), w.result().repairs) == (True, ()), (
        "it is reported until the next plan, and sent once"
    )


def test_what_is_in_hand_is_not_queued_again(tmp_path: Path) -> None:
    w, queues = hurt(tmp_path, MemoryStore())
    plan(w, 1000.0)
    again = begin(queues)
    for now in (1001.0, 1002.0):
        plan(w, now)
        assert is_drained(queues)
    end(queues, again)
    plan(w, 1003.0)
    assert is_drained(queues)


def test_a_failed_upload_is_tried_again_with_the_next_plan_and_a_missing_file_is_reported_at_once(
    tmp_path: Path,
) -> None:
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


def witnessed(store: MemoryStore, name: str) -> None:
    """A report that names it, so that it is missed."""
    (known,) = (k.manifest for k in manifests(store) if k.name == name)
    put(
        store,
        Report(known.run, known.checkpoint, known.location, 0, "digest", "ok", (name,), "", 0, ()),
    )


@pytest.mark.parametrize("how", ["empty", "short", "other", "gone"])
def test_a_manifest_that_is_damaged_or_gone_is_written_again_also_by_a_new_worker(
    tmp_path: Path, how: str
) -> None:
    store, name, data, _ = stored(tmp_path)
    witnessed(store, name)
    if how == "gone":
        store.delete(name)
    else:
        store.write(
            name, [{"empty": b"", "short": data[:-3], "other": data.replace(b"n0", b"n9")}[how]]
        )
    w = Worker(WorkerOptions("n0", RunDir("run", tmp_path)), store)
    assert [p.phase for p in tick(w, 0.0).progress] == ["stored"]
    assert (read_all(store, name), [k.name for k in manifests(store)]) == (data, [name])


def test_a_manifest_is_written_again_after_its_pin_has_gone_and_forgotten_with_the_checkpoint(
    tmp_path: Path,
) -> None:
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
def test_without_a_copy_a_new_one_replaces_a_manifest_that_is_gone_and_a_damaged_one_is_reported(
    tmp_path: Path, spoil: bytes
) -> None:
    out = tmp_path / "out"
    store, name, _, w = stored(out)
    witnessed(store, name)
    shutil.rmtree(out / "_ckptsync/manifests")
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
    assert not read_state(store).faults
    assert [p.phase for p in tick(w, 2000.0).progress] == ["stored"]


def test_another_save_that_comes_to_lie_where_a_manifest_is_gone_does_not_take_it_back(
    tmp_path: Path,
) -> None:
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


def test_a_damaged_file_that_the_hook_added_is_sent_again(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    w = sent(tmp_path, store)
    data = read_all(store, CONFIG)
    store.write(CONFIG, [b"damaged"])
    damaged(store, 1, "checkpoint-4/config.json")
    (repaired,) = tick(w, 1001.0).repairs
    assert (repaired.name, repaired.reason, read_all(store, CONFIG)) == (
        "checkpoint-4/config.json",
        "",
        data,
    )


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


def test_other_bytes_of_the_same_size_are_never_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    w = sent(tmp_path, store)
    for path in (tmp_path / "_ckptsync/pins/checkpoint-4.0/added").iterdir():
        times = path.stat().st_mtime_ns
        flip(path)
        os.utime(path, ns=(times, times))
    store.write(CONFIG, [b"damaged"])
    damaged(store, 1, "checkpoint-4/config.json")
    (repaired,) = tick(w, 1001.0).repairs
    assert (repaired.reason, read_all(store, CONFIG)) == (
        "this node no longer has the file",
        b"damaged",
    )


@pytest.mark.parametrize(
    "plant", [lambda path: path.symlink_to(ROOT / "base" / path.name), os.mkfifo, os.mkdir]
)
def test_what_is_no_file_is_neither_followed_nor_waited_for(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    store = MemoryStore()
    w = sent(tmp_path, store)
    path = tmp_path / "_ckptsync/pins/checkpoint-4.0/added/config.json"
    path.unlink()
    plant(path)
    store.write(CONFIG, [b"damaged"])
    damaged(store, 1, "checkpoint-4/config.json")
    (repaired,) = tick(w, 1001.0).repairs
    assert (repaired.reason, read_all(store, CONFIG)) == (
        "this node no longer has the file",
        b"damaged",
    )


def test_the_same_file_of_another_save_does_as_well(tmp_path: Path) -> None:
    store = MemoryStore()
    w = sent(tmp_path, store)
    for folder in ("checkpoint-4", "_ckptsync/pins/checkpoint-4.0"):
        shutil.rmtree(tmp_path / folder)
    source = lay(tmp_path / "later", ONE, 50.0).rename(tmp_path / "checkpoint-8")
    add(commit(source))
    data = read_all(store, CONFIG)
    store.write(CONFIG, [b"damaged"])
    damaged(store, 1, "checkpoint-4/config.json")
    assert [r.reason for r in tick(w, 1001.0).repairs] == [""]
    assert read_all(store, CONFIG) == data


def test_a_real_sharded_location_is_whole_again_though_only_the_spool_has_what_was_lost(
    tmp_path: Path,
) -> None:
    store = create_store(str(tmp_path / "store"))
    outs = [tmp_path / f"n{n}" for n in range(2)]
    pins = []
    for out, source in zip(outs, vector("hf-fsdp2-2node").sources, strict=True):
        shutil.copytree(source, out / "checkpoint-4", copy_function=shutil.copyfile)
        pins.append(commit(out / "checkpoint-4"))
    add(pins[0])
    workers = [worker(out, store, out.name) for out in outs]
    for w in workers:
        settle(w)

    def findings() -> list[tuple[str, str]]:
        (location_records,) = read_state(store).locations
        verify_results = verify_location(store, location_records, VerifyOptions("digest"))
        write_report(store, verify_results)
        return [
            (f.kind, f.name) for f in verify_results.findings if verify_results.verdict == "damaged"
        ]

    assert [m.location for m in consolidate_due(store, HeadOptions()).made] == ["checkpoint-4"]
    assert findings() == []
    for w in workers:
        tick(w, 1000.0)
    shutil.rmtree(outs[0] / "_ckptsync/added")
    flip(tmp_path / "store" / CONFIG)
    assert findings() == [("digest", "checkpoint-4/config.json")]
    assert [r.reason for w in workers for r in tick(w, 1001.0).repairs] == [""]
    assert findings() == []
    assert read_state(store).locations[0].status == "VERIFIED"
