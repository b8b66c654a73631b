"""The worker as a whole, plan by plan: what trainers and stores do to it, and what it never
does.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ckptsync.digest import digest
from ckptsync.errors import StoreError
from ckptsync.records.progress import Progress
from ckptsync.records.report import Report
from ckptsync.spool.pins import list_pins
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker import pinning
from ckptsync.worker.options import Order, RunDir, Superseded, WorkerOptions
from ckptsync.worker.queue import UploadQueues, split_threads
from ckptsync.worker.worker import Worker
from tests.support.crashing_store import Crash, Dying
from tests.support.exhaustive import sampled
from tests.support.filled_stores import put
from tests.support.hook_pins import commit
from tests.support.interleaving import raced
from tests.support.waiting import until
from tests.support.worker_in_process import (
    EIGHT,
    ONE,
    TWO,
    kept,
    lay,
    manifests,
    pinned,
    progress,
    send_all,
    settle,
    tick,
    verify,
    worker,
)


def test_a_checkpoint_is_sent_when_it_is_quiet_and_then_left_alone(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE | {"rng_state_0.pth": b"random"})
    lay(tmp_path, {"trainer_state.json": ONE["trainer_state.json"]}, 1.0)
    w = worker(tmp_path, store)
    first = progress(tick(w, 100.0))["checkpoint-4.0"]
    why = "trainer_state.json is the newest of its files; finished if nothing changes for 10 s"
    assert (first.phase, first.detail) == ("waiting", why)
    assert tick(w, 109.9).queue == ("run/checkpoint-4",)
    result = tick(w, 110.0)
    assert (progress(result)["checkpoint-4.0"].phase, result.queue) == ("sent", ())
    assert progress(tick(w, 111.0))["checkpoint-4.0"].phase == "stored"
    assert kept(store)["checkpoint-4"]["n0"].keys() == ONE.keys() | {"rng_state_0.pth"}


def test_a_save_says_why_it_waits_from_the_first_scan_on_and_how_far_it_is(tmp_path: Path) -> None:
    class Telling(MemoryStore):
        def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
            progress_seen.extend(w.running(0.0))
            super().create(name, chunks, about)

    progress_seen: list[Progress] = []
    store = Telling()
    lay(tmp_path, ONE)
    w = worker(tmp_path, store)
    w.scan(0.0)
    size = sum(map(len, ONE.values()))
    [waits] = w.running(1000.0)
    assert (waits.subject, waits.state, waits.total) == ("run/checkpoint-4", "waiting", size)
    assert (waits.since, waits.until) == (1000.0, 1010.0)
    assert waits.reason == "trainer_state.json is the newest of its files"
    tick(w, 10.0)
    assert {(sends.state, sends.total) for sends in progress_seen} == {("uploading", size)}
    assert (progress_seen[0].done, progress_seen[-1].done) == (0, size), "then the manifest"
    assert w.running(0.0) == []


def test_a_failure_keeps_the_time_of_its_first_try(tmp_path: Path) -> None:
    deep = lay(tmp_path, ONE).joinpath(*["d"] * 40)
    deep.mkdir(parents=True)
    w = worker(tmp_path, MemoryStore())
    w.scan(0.0)
    first, again = w.running(0.0), w.running(0.0)
    assert first == again
    assert first[-1].reason
    assert first[-1].since > 0


def test_rotation_before_it_is_finished_takes_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    source = lay(tmp_path, ONE)
    w = worker(tmp_path, store)
    phases = [progress(tick(w, now))["checkpoint-4.0"].phase for now in (0.0, 0.5)]
    assert phases == ["waiting", "waiting"]
    shutil.rmtree(source)
    assert progress(tick(worker(tmp_path, store), 1.0))["checkpoint-4.0"].phase == "sent"
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}


class Recording(MemoryStore):
    """Remembers in which order checkpoints' files were created; does something at the first."""

    def __init__(self, first: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.created: list[str] = []
        self._first = first

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        checkpoint = name.split("/")[1]
        if checkpoint.startswith("checkpoint") and checkpoint not in self.created:
            self.created.append(checkpoint)
            if len(self.created) == 1:
                self._first()
        super().create(name, chunks, about)


def test_a_node_of_shards_follows_a_mate_of_the_same_save_at_once(tmp_path: Path) -> None:
    store = MemoryStore()
    shards = {name: content for name, content in TWO.items() if name != "x"}
    for n, (node, files) in enumerate({"a": ONE, "b": shards}.items()):
        lay(tmp_path / node, files, n / 2)
    settle(worker(tmp_path / "a", store, "a"))
    w = worker(tmp_path / "b", store, "b")
    tick(w, 0.0)
    assert "another node has stored its part" in progress(tick(w, 1.0))["checkpoint-4.0"].detail
    assert progress(tick(w, 10.0))["checkpoint-4.0"].phase == "sent"
    assert kept(store) == {"checkpoint-4": {"a": ONE, "b": shards}}


def test_what_is_written_over_after_the_last_scan_is_not_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    w = worker(tmp_path, store)
    for now in (0.0, 600.0):
        w.scan(now)
    lay(tmp_path, {"x": b"Z"}, 5000.0)
    w.plan(600.0)
    send_all(w.queues)
    assert manifests(store) == []
    settle(w, 1000.0)
    assert kept(store) == {"checkpoint-4": {"n0": ONE | {"x": b"Z"}}}


def test_bytes_that_change_under_their_time_while_they_are_sent_are_sent_anew(
    tmp_path: Path,
) -> None:
    path = lay(tmp_path, ONE) / "x"

    class Overtaken(MemoryStore):
        def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
            super().create(name, chunks, about)
            if name.endswith("/x") and path.read_bytes() == ONE["x"]:
                assert until(overwrite)

    def overwrite() -> bool:
        before = path.stat()
        path.write_bytes(b"Z")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return path.stat().st_ctime_ns != before.st_ctime_ns

    store = Overtaken()
    settle(worker(tmp_path, store))
    assert kept(store) == {"checkpoint-4": {"n0": ONE | {"x": b"Z"}}}


def test_a_pin_waits_for_the_node_that_owns_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    commit(lay(tmp_path, ONE))
    monkeypatch.setattr(pinning, "adopt", lambda *_: None)
    (waits,) = settle(worker(tmp_path, store)).progress
    assert (waits.phase, waits.detail) == ("waiting", "no node owns its pin yet")
    assert kept(store) == {}


def test_a_stored_save_moves_in_a_queue_and_holds_up_no_plan(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    w = worker(tmp_path, store)
    settle(w)
    (mine,) = (k.manifest for k in manifests(store))
    put(store, replace(mine, node="m", files=(), started=0, ended=1, ranks=(7,), save=""))

    w.scan(700.0)
    w.plan(700.0)
    assert {k.manifest.location for k in manifests(store)} == {"checkpoint-4"}
    assert progress(w.result())["checkpoint-4.0"].phase == "waiting"

    send_all(w.queues)
    moved = progress(w.result())["checkpoint-4.0"]
    assert (moved.phase, moved.location.startswith("checkpoint-4~")) == ("stored", True)
    assert kept(store)[moved.location] == {"n0": ONE}
    assert progress(tick(w, 710.0))["checkpoint-4.0"].location == moved.location


def test_killed_at_any_moment_and_begun_again_with_nothing_it_is_finished(tmp_path: Path) -> None:
    for lives in itertools.count():
        out, store = tmp_path / str(lives), MemoryStore()
        lay(out, ONE)
        try:
            w = worker(out, Dying(store, lives))
            w.scan(0.0)
            w.scan(0.5)
            settle(w, 1.0)
        except Crash:
            kept(store)
            if lives % 2:
                shutil.rmtree(out / "_ckptsync")
            else:
                shutil.rmtree(out / "checkpoint-4")
            settle(worker(out, store))
        else:
            break
        assert kept(store) == {"checkpoint-4": {"n0": ONE}}
        assert len(manifests(store)) == 1
    assert lives > 3 * len(ONE)


def test_a_restarted_worker_reads_no_file_of_what_is_stored(tmp_path: Path) -> None:
    store = MemoryStore()
    source = lay(tmp_path, ONE)
    settle(worker(tmp_path, store))
    shutil.rmtree(tmp_path / "_ckptsync")
    before = list(store.names(""))
    for path in source.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0)
        os.utime(path, ns=(0, path.stat().st_mtime_ns))
    assert progress(tick(worker(tmp_path, store), 0.0))["checkpoint-4.0"].phase == "stored"
    assert list_pins(tmp_path)[0].stored
    assert list(store.names("")) == before
    assert all(
        p.stat().st_atime_ns == 0 for p in source.rglob("*") if p.is_file() and p.suffix != ".json"
    )  # no head to look at


def test_of_two_nodes_on_one_directory_one_sends(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    a, b = (worker(tmp_path, store, node, keep=0) for node in "ab")
    for now in (0.0, 10.0, 60.0):
        tick(a, now)
        assert progress(tick(b, now))["checkpoint-4.0"].phase == "elsewhere"
        assert list_pins(tmp_path)[0].stored == (now > 0)
    assert kept(store) == {"checkpoint-4": {"a": ONE}}
    verify(store)
    tick(b, 61.0)
    assert pinned(tmp_path) == ["checkpoint-4.0"], "a's own"
    shutil.rmtree(tmp_path / "_ckptsync")
    assert progress(settle(b, 100.0))["checkpoint-4.0"].phase == "elsewhere"
    assert kept(store) == {"checkpoint-4": {"a": ONE}}


@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_two_nodes_that_send_one_save_at_once_both_end(tmp_path: Path, apart: float) -> None:
    for seed in sampled(range(20), 3):
        store, outs = MemoryStore(), {node: tmp_path / str(seed) / node for node in "ab"}
        for at, out in enumerate(outs.values()):
            lay(out, ONE, at * apart)

        def life(store: Store, node: str, out: Path) -> list[str]:
            return [p.phase for p in settle(worker(out, store, node, keep=0, threads=1)).progress]

        work = {node: partial(life, node=node, out=out) for node, out in outs.items()}
        raced(seed, store, work, is_exclusive=True)
        after = {node: worker(out, store, node, keep=0) for node, out in outs.items()}
        final = [progress(settle(w, 1000.0))["checkpoint-4.0"] for w in after.values()]
        assert {p.phase for p in final} <= {"stored", "elsewhere"}
        assert {p.location for p in final} == {"checkpoint-4"}, seed
        assert all(files == ONE for files in kept(store)["checkpoint-4"].values()), seed
        verify(store)
        for node, out in outs.items():
            settle(after[node], 2000.0)
            assert not pinned(out), seed


def test_only_the_pin_of_a_dead_node_is_taken_over(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE | {"model.safetensors": b"torn"})
    a, b = worker(tmp_path, store, "a"), worker(tmp_path, store, "b")
    for now in range(0, 5000, 400):
        tick(a, 0.0)
        for later in (0, 399):
            assert progress(tick(b, float(now + later)))["checkpoint-4.0"].phase == "elsewhere"
    (tmp_path / "checkpoint-4" / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "_ckptsync/pins/checkpoint-4.0/files")
    for now in range(5000, 7500, 400):
        tick(b, float(now))
    assert kept(store) == {"checkpoint-4": {"b": ONE}}


@pytest.mark.parametrize(("keep", "left"), [(1, ["checkpoint-4.0"]), (0, [])])
def test_pins_stay_until_verified_then_the_newest(
    tmp_path: Path, keep: int, left: list[str]
) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    w = worker(tmp_path, store, keep=keep)
    settle(w)
    names = tuple(k.name for k in manifests(store))
    report = Report("run", "checkpoint-4", "checkpoint-4", 0, "digest", "ok", names, "", 1, ())
    put(store, report)  # of the shards alone
    tick(w, 1000.0)
    assert pinned(tmp_path) == ["checkpoint-4.0"]
    verify(store)
    newer = b'{"format":2}\n'
    unreadable = f"run/.ckptsync/checkpoint-4/report-9-{digest(newer)[:16]}.json"
    store.write(unreadable, [newer])
    tick(w, 1000.5)
    assert pinned(tmp_path) == ["checkpoint-4.0"]
    store.delete(unreadable)
    for now in (1001.0, 1002.0):
        assert progress(tick(w, now))["checkpoint-4.0"].phase == "stored"
        assert pinned(tmp_path) == left


class Refusing(MemoryStore):
    """A store that takes all but one checkpoint."""

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        if "/checkpoint-8/" in name:
            raise StoreError("full")
        super().create(name, chunks, about)


@pytest.mark.parametrize(
    ("free", "left"), [(10**9, ["checkpoint-4.0", "checkpoint-8.0"]), (0, ["checkpoint-8.0"])]
)
def test_stored_pins_give_way_to_the_next_save_and_unstored_ones_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, left: list[str]
) -> None:
    store = Refusing()
    source = lay(tmp_path, ONE)
    w = worker(tmp_path, store)
    settle(w)
    shutil.rmtree(source)
    lay(tmp_path / "x", EIGHT, 50.0).rename(tmp_path / "checkpoint-8")
    monkeypatch.setattr(pinning, "free_bytes", lambda _: free)
    tick(w, 1000.0)
    tick(w, 1000.5)
    shutil.rmtree(tmp_path / "checkpoint-8")
    tick(w, 1001.0)
    assert pinned(tmp_path) == left


@pytest.mark.parametrize("wrong", ["a file's name", "a record"])
def test_one_checkpoint_that_cannot_be_sent_keeps_no_other_back(tmp_path: Path, wrong: str) -> None:
    store, record = MemoryStore(), "run/.ckptsync/checkpoint-2/manifest-n0-0-0123456789abcdef.json"
    bad = lay(tmp_path, ONE).rename(tmp_path / "checkpoint-2")
    lay(tmp_path, ONE, 50.0)
    if wrong == "a record":
        store.write(record, [b"{"])
    else:
        (bad / "a\nb").write_text("hostile")
    result = settle(worker(tmp_path, store))
    assert [(f.checkpoint, f.error) for f in result.failures] == [("checkpoint-2", "Corrupt")]
    store.delete(record)
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}


class Away(MemoryStore):
    """A store that does not answer, until it does."""

    is_away = True

    def names(self, prefix: str) -> itertools.chain[Entry]:
        if self.is_away:
            raise StoreError("the network is away", hint="look at it")
        return itertools.chain(super().names(prefix))


def test_without_the_store_it_still_pins_and_later_sends(tmp_path: Path) -> None:
    store = Away()
    source = lay(tmp_path, ONE)
    w = worker(tmp_path, store)
    (failure,) = tick(w, 0.0).failures
    assert (failure.checkpoint, failure.error, failure.hint) == ("", "StoreError", "look at it")
    assert "finished if nothing changes" in tick(w, 0.5).progress[0].detail
    assert tick(w, 11.0).progress[0].detail == "the store's records cannot be read now"
    assert [status.state for status in w.running(0.0)] == ["waiting"]
    shutil.rmtree(source)
    store.is_away = False
    settle(w, 12.0)
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}


def step(out: Path, n: int) -> Path:
    """A checkpoint of the ``n``-th step, written at second ``n``."""
    files = {"trainer_state.json": f'{{"global_step": {n}}}'.encode(), "x": f"weights {n}".encode()}
    made = lay(out / f"making-{n}", files, float(n)).rename(out / f"checkpoint-{n}")
    (out / f"making-{n}").rmdir()
    return made


def ordered_worker(
    out: Path, store: Store, *, order: Order = "oldest", superseded: Superseded = "keep"
) -> Worker:
    return Worker(
        WorkerOptions("n0", RunDir("run", out), order=order, superseded=superseded), store
    )


@pytest.mark.parametrize(("is_finished", "order"), [(True, "3921"), (False, "3219")])
def test_a_newer_save_goes_before_the_rest_if_it_was_finished_meanwhile(
    tmp_path: Path, *, is_finished: bool, order: str
) -> None:
    def meanwhile() -> None:
        step(tmp_path, 9)
        w.scan(20.0)
        if is_finished:
            w.scan(700.0)

    store = Recording(meanwhile)
    for n in (1, 2, 3):
        step(tmp_path, n)
    w = ordered_worker(tmp_path, store, order="newest")
    tick(w, 0.0)
    phase = "waiting" if is_finished else "sent"
    assert [p.phase for p in tick(w, 10.0).progress] == [phase, phase, "sent"]
    assert w.scan(10.0).due == (0.0 if is_finished else 10.0)
    tick(w, 701.0)
    assert store.created == [f"checkpoint-{n}" for n in order]


def test_superseded_saves_are_given_up_where_the_operator_says_so(tmp_path: Path) -> None:
    store = MemoryStore()
    paths = [step(tmp_path, n) for n in (1, 2, 3)]
    w = ordered_worker(tmp_path, store, superseded="drop")
    tick(w, 0.0)
    tick(w, 0.5)
    shutil.rmtree(paths[0])
    phases = [p.phase for p in tick(w, 10.0).progress]
    assert phases == ["superseded", "superseded", "sent"]
    assert set(kept(store)) == {"checkpoint-3"}
    assert pinned(tmp_path) == ["checkpoint-2.0", "checkpoint-3.0"]
    tick(w, 11.0)
    assert w.scan(11.0).due is None


def test_an_unfinished_save_of_a_name_that_is_sent_supersedes_nothing(tmp_path: Path) -> None:
    w = ordered_worker(tmp_path, MemoryStore(), superseded="drop")
    made = step(tmp_path, 1)
    w.scan(0.0)
    w.scan(10.0)
    w.plan(10.0)
    assert w.queues.take(split_threads(4)[0])
    step(tmp_path, 2)
    w.scan(20.0)
    shutil.rmtree(made)
    lay(tmp_path / "making", {"x": b"other weights"}, 100.0).rename(made)
    w.scan(30.0)
    w.plan(30.0)
    progress_by_save = {(p.checkpoint, p.k): (p.phase, p.detail) for p in w.result().progress}
    assert progress_by_save["checkpoint-1", 0] == ("waiting", "others are sent first")
    assert progress_by_save["checkpoint-2", 0] == ("waiting", "others are sent first")
    phase, detail = progress_by_save["checkpoint-1", 1]
    assert (phase, "others" in detail) == ("waiting", False)


def test_a_manifest_says_who_wrote_it_and_is_written_again_byte_for_byte(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    commit(tmp_path / "checkpoint-4", added={"config.json": b"{}"})
    assert progress(tick(worker(tmp_path, store), 0.0))["checkpoint-4.0"].phase == "sent"
    ((name, manifest),) = ((k.name, k.manifest) for k in manifests(store))
    assert (manifest.save, manifest.trainer) == ("save", "hf")
    assert 0 < manifest.times["finished"] <= manifest.times["sending"]
    store.write(name, [b"damaged"])
    tick(worker(tmp_path, store), 5000.0)
    assert [k.name for k in manifests(store)] == [name]


def test_what_the_hook_added_is_sent_and_does_not_stretch_the_saves_span(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    added = {"config.json": b"{}", "x": b"not the trainer's", "evil.sh": b"no model needs it"}
    commit(tmp_path / "checkpoint-4", added=added)
    w = worker(tmp_path, store)
    tick(w, 0.0)
    (manifest,) = (k.manifest for k in manifests(store))
    assert kept(store) == {"checkpoint-4": {"n0": ONE | {"config.json": b"{}"}}}
    assert manifest.ended - manifest.started < 10**9
    assert progress(tick(w, 1.0))["checkpoint-4.0"].phase == "stored"
    assert (tmp_path / "_ckptsync/pins/checkpoint-4.0/stored").exists()


def test_what_was_removed_before_it_was_known_whole_is_called_missed(tmp_path: Path) -> None:
    source = lay(tmp_path, {"trainer_state.json": b'{"global_step": 4}', "x": b"A"})
    lay(tmp_path, {"y": b"written later"}, 1.0)
    w = worker(tmp_path, MemoryStore())
    tick(w, 0.0)
    shutil.rmtree(source)
    result = tick(w, 1.0)
    assert [p.phase for p in result.progress] == ["missed"]
    notes = w.notes
    assert "missed run/checkpoint-4" in notes[0]
    assert (tick(w, 2.0).progress, w.notes, w.scan(3.0).notes) == ((), notes, notes)


class Held(MemoryStore):
    """Waits with one file, until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        if name.endswith("/x2"):
            self.begun.set()
            assert self.go.wait(60)
        super().create(name, chunks, about)


@pytest.mark.parametrize("whole", [True, False])
def test_a_save_that_is_removed_while_it_is_sent_is_lost_once(
    tmp_path: Path, *, whole: bool
) -> None:
    out, store, queues = tmp_path / "out", Held(), UploadQueues(1)
    out.mkdir()
    weights = {"x1": b"1" * 1000, "x2": b"2" * 300_000, "x3": b"3" * 400_000}
    lay(out, {"trainer_state.json": b'{"global_step": 4}', **weights}, 1.0)
    w = Worker(WorkerOptions("n0", RunDir("run", out), threads=1), store, queues)
    for now in (0.0, 10.0, 60.0, 600.0):
        w.scan(now)
        w.plan(now)
    sending = threading.Thread(target=queues.queues[0].run_next)
    sending.start()
    assert store.begun.wait(60)
    for path in [out] if whole else list(out.iterdir()):
        shutil.rmtree(path)
    w.scan(700.0)
    w.plan(700.0)
    before = w.notes
    store.go.set()
    sending.join()
    result = tick(w, 701.0)
    assert before == ()
    assert [p.phase for p in result.progress] == ["lost"]
    assert w.notes == (
        "lost run/checkpoint-4: its files were removed before all of them were stored",
    )
    notes = w.notes
    assert (tick(w, 702.0).progress, w.notes) == ((), notes)


def test_a_save_that_is_stored_or_overwritten_is_not_said_to_be_lost(tmp_path: Path) -> None:
    store = MemoryStore()
    w = worker(tmp_path, store)
    step(tmp_path, 1)
    settle(w)
    shutil.rmtree(tmp_path / "checkpoint-1")
    shutil.rmtree(tmp_path / "_ckptsync")
    tick(w, 700.0)
    assert w.notes == ()
    made = step(tmp_path, 2)
    tick(w, 701.0)
    shutil.rmtree(made)
    step(tmp_path, 2)
    settle(w, 800.0)
    tick(w, 1500.0)
    assert "lost" not in " ".join(w.notes)
