"""One tick of sending: the order, what is given up, what a manifest says, and a store that does not answer while steps come and go."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptsync.errors import StoreError
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.options import Order, RunDir, Superseded, WorkerOptions
from ckptsync.worker.queue import UploadQueues
from ckptsync.worker.worker import Worker
from tests.dying import Crash, Dying
from tests.test_worker_push import ONE, kept, lay, manifests
from tests.test_worker_tick import progress, settle
from tests.worker.test_scanner import commit


def step(out: Path, n: int) -> Path:
    """A checkpoint of the ``n``-th step, written at second ``n``."""
    files = {"trainer_state.json": f'{{"global_step": {n}}}'.encode(), "x": f"weights {n}".encode()}
    made = lay(out / f"making-{n}", files, float(n)).rename(out / f"checkpoint-{n}")
    (out / f"making-{n}").rmdir()
    return made


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


def worker(
    out: Path, store: Store, *, order: Order = "oldest", superseded: Superseded = "keep", exclude: tuple[str, ...] = ()
) -> Worker:
    options = WorkerOptions("n0", (RunDir("run", out),), order=order, superseded=superseded, exclude=exclude)
    return Worker(options, store)


@pytest.mark.parametrize(("order", "first"), [("oldest", [1, 2, 3]), ("newest", [3, 2, 1])])
def test_finished_saves_go_in_the_operators_order(tmp_path: Path, order: Order, first: list[int]) -> None:
    store = Recording()
    for n in (1, 2, 3):
        step(tmp_path, n)
    settle(worker(tmp_path, store, order=order))
    assert store.created == [f"checkpoint-{n}" for n in first]


def test_a_newer_save_that_was_finished_meanwhile_goes_before_the_rest(tmp_path: Path) -> None:
    def meanwhile() -> None:
        step(tmp_path, 9)
        w.look(20.0)
        w.look(700.0)

    store = Recording(meanwhile)
    for n in (1, 2, 3):
        step(tmp_path, n)
    w = worker(tmp_path, store, order="newest")
    w.tick(0.0)
    found = w.tick(10.0)
    assert (found.due, [p.phase for p in found.progress]) == (0.0, ["waiting", "waiting", "sent"])
    w.tick(701.0)
    assert store.created == ["checkpoint-3", "checkpoint-9", "checkpoint-2", "checkpoint-1"]


def test_what_is_written_over_while_others_are_sent_waits_again(tmp_path: Path) -> None:
    def meanwhile() -> None:
        (tmp_path / "checkpoint-2" / "x").write_bytes(b"other weights")
        w.look(20.0)

    store = Recording(meanwhile)
    for n in (1, 2):
        step(tmp_path, n)
    w = worker(tmp_path, store)
    w.tick(0.0)
    found = progress(w.tick(10.0))
    assert [found[f"checkpoint-{n}.0"].phase for n in (1, 2)] == ["sent", "waiting"]
    assert store.created == ["checkpoint-1"]


def test_superseded_saves_are_given_up_where_the_operator_says_so_and_it_is_said(tmp_path: Path) -> None:
    store = MemoryStore()
    paths = [step(tmp_path, n) for n in (1, 2, 3)]
    w = worker(tmp_path, store, superseded="drop")
    w.tick(0.0)
    w.tick(0.5)
    shutil.rmtree(paths[0])
    found = progress(w.tick(10.0))
    assert [found[f"checkpoint-{n}.0"].phase for n in (1, 2, 3)] == ["superseded", "superseded", "sent"]
    assert set(kept(store)) == {"checkpoint-3"}
    assert sorted(p.name for p in (tmp_path / "_ckptsync/pins").iterdir()) == ["checkpoint-2.0", "checkpoint-3.0"]
    assert w.tick(11.0).due is None


def test_a_manifest_says_who_wrote_it_and_when_and_is_written_again_byte_for_byte(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    commit(tmp_path, added={"config.json": b"{}"})
    assert progress(worker(tmp_path, store).tick(0.0))["checkpoint-4.0"].phase == "sent"
    ((name, manifest),) = ((k.name, k.manifest) for k in manifests(store))
    assert (manifest.save, manifest.trainer) == ("5a5e", "transformers 5.2.0")
    assert 0 < manifest.times["finished"] <= manifest.times["sending"]
    store.write(name, [b"damaged"])
    worker(tmp_path, store).tick(5000.0)
    assert [k.name for k in manifests(store)] == [name]


def test_without_a_hook_a_manifest_says_what_is_known(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    settle(worker(tmp_path, store))
    (found,) = (k.manifest for k in manifests(store))
    assert (found.save, found.trainer, sorted(found.times)) == ("", "trainer", ["finished", "sending"])


def test_what_the_hook_added_is_sent_beside_the_trainers_own_files_and_does_not_stretch_their_span(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    commit(tmp_path, added={"config.json": b"{}", "x": b"not the trainer's", "evil.sh": b"nothing that a model needs"})
    w = worker(tmp_path, store)
    w.tick(0.0)
    (found,) = (k.manifest for k in manifests(store))
    assert kept(store) == {"checkpoint-4": {"n0": ONE | {"config.json": b"{}"}}}
    assert found.ended - found.started < 10**9
    assert progress(w.tick(1.0))["checkpoint-4.0"].phase == "stored"
    assert (tmp_path / "_ckptsync/pins/checkpoint-4.0/stored").exists()


def test_what_is_left_out_by_choice_is_missed_by_nobody_but_who_resumes(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    w = worker(tmp_path, store, exclude=("x",))
    settle(w)
    assert progress(w.tick(1000.0))["checkpoint-4.0"].phase == "stored"
    assert kept(store)["checkpoint-4"]["n0"].keys() == ONE.keys() - {"x"}
    assert progress(worker(tmp_path, store, exclude=("x",)).tick(0.0))["checkpoint-4.0"].phase == "stored"


def test_what_was_removed_before_it_was_known_whole_is_called_missed(tmp_path: Path) -> None:
    source = lay(tmp_path, {"trainer_state.json": b'{"global_step": 4}', "x": b"A"})
    lay(tmp_path, {"y": b"written later"}, 1.0)
    w = worker(tmp_path, MemoryStore())
    w.tick(0.0)
    shutil.rmtree(source)
    found = w.tick(1.0)
    assert [p.phase for p in found.progress] == ["missed"]
    assert "missed run/checkpoint-4" in found.notes[0]
    assert w.tick(2.0).notes == found.notes


def test_a_save_is_due_when_it_settles_also_after_ticks_that_found_it_unsettled(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    w = worker(tmp_path, MemoryStore())
    assert [w.tick(now).due for now in (0.0, 4.0)] == [10.0, 6.0]
    assert w.look(10.0).due == 0.0
    assert (progress(w.tick(10.0))["checkpoint-4.0"].phase, w.look(10.5).due) == ("sent", None)


class Away(MemoryStore):
    """A store that refuses everything."""

    def names(self, prefix: str) -> Iterator[Entry]:
        raise StoreError("away")


def test_what_could_not_be_sent_is_not_due_at_once_again(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    w = worker(tmp_path, Away())
    w.look(0.0)
    found = w.tick(10.0)
    assert ([f.text for f in found.failures], found.due) == (["away"], None)
    assert w.look(10.5).due is None


class Talking(MemoryStore):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def names(self, prefix: str) -> Iterator[Entry]:
        self.asked.append("names")
        return iter(super().names(prefix))

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self.asked.append("write")
        super().write(name, chunks, about)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self.asked.append("create")
        super().create(name, chunks, about)


def test_before_the_first_byte_of_a_save_the_store_is_asked_three_times(tmp_path: Path) -> None:
    store = Talking()
    w = worker(tmp_path, store)
    w.tick(0.0)  # nothing is there yet: it has time to compare clocks
    lay(tmp_path, ONE)
    commit(tmp_path)
    assert w.look(10.0).due == 0.0
    store.asked.clear()
    w.tick(10.0)
    assert store.asked[: store.asked.index("create")] == ["names", "write", "names"]  # what is known, "I am sending", and once more


@contextmanager
def looking(w: Worker) -> Iterator[None]:
    """Somebody looks all the while, as a daemon's other thread does."""
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            w.look(0.0)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        yield
    finally:
        done.set()
        looker.join()


def test_killed_at_any_moment_while_somebody_looks_and_begun_again_it_is_finished(tmp_path: Path) -> None:
    for lives in itertools.count():
        out, store = tmp_path / str(lives), MemoryStore()
        lay(out, ONE)
        commit(out)
        w = worker(out, Dying(store, lives))
        try:
            with looking(w):
                settle(w)
        except Crash:
            if lives % 2:
                shutil.rmtree(out / "checkpoint-4")
            settle(worker(out, store))
        else:
            break
        finally:
            assert kept(store) == {"checkpoint-4": {"n0": ONE}}
            assert [k.manifest.save for k in manifests(store)] == ["5a5e"]
    assert lives > 2 * len(ONE)


class Blocking(MemoryStore):
    """A store that does not answer until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers, self.asked = threading.Event(), threading.Event()

    def names(self, prefix: str) -> Iterator[Entry]:
        self.asked.set()
        assert self.answers.wait(60)
        return iter(super().names(prefix))


def test_while_the_store_does_not_answer_every_step_that_comes_and_goes_is_kept_and_sent_after(tmp_path: Path) -> None:
    store = Blocking()
    w = worker(tmp_path, store)
    sender = threading.Thread(target=w.tick, args=(0.0,))
    sender.start()
    assert store.asked.wait(60)
    for n in range(1, 21):  # and the trainer keeps one
        made = step(tmp_path, n)
        w.look(float(n))
        w.look(n + 0.5)
        shutil.rmtree(made)
    store.answers.set()
    sender.join(60)
    w.tick(100.0)
    assert set(kept(store)) == {f"checkpoint-{n}" for n in range(1, 21)}


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
def test_a_save_that_is_removed_while_it_is_sent_is_said_to_be_lost_once_with_what_is_stored(
    tmp_path: Path, *, whole: bool
) -> None:
    out, store, lanes = tmp_path / "out", Held(), UploadQueues(1)
    out.mkdir()
    lay(out, {"trainer_state.json": b'{"global_step": 4}', "x1": b"1" * 1000, "x2": b"2" * 300_000, "x3": b"3" * 400_000}, 1.0)
    w = Worker(WorkerOptions("n0", (RunDir("run", out),), threads=1), store, lanes)
    settle(w)
    sending = threading.Thread(target=lanes.queues[0].carry)
    sending.start()
    assert store.begun.wait(60)
    for path in [out] if whole else list(out.iterdir()):
        shutil.rmtree(path)
    before = w.tick(700.0)
    store.go.set()
    sending.join()
    result = w.tick(701.0)
    stored = [entry for entry in store.names("run/checkpoint-4/") if entry.size in (18, 1000, 300_000, 400_000)]
    said = f"the store has {len(stored)} of 4 files, {sum(entry.size for entry in stored)} of 701018 bytes, and no manifest of them"
    assert before.notes == ()
    assert [(p.phase, said in p.detail) for p in result.progress] == [("lost", True)]
    assert [said in note for note in result.notes] == [True]
    again = w.tick(702.0)
    assert (again.progress, again.notes) == ((), result.notes)


def test_a_save_that_is_stored_or_overwritten_is_not_said_to_be_lost(tmp_path: Path) -> None:
    store = MemoryStore()
    w = worker(tmp_path, store)
    step(tmp_path, 1)
    settle(w)
    shutil.rmtree(tmp_path / "checkpoint-1")
    shutil.rmtree(tmp_path / "_ckptsync")
    assert w.tick(700.0).notes == ()
    made = step(tmp_path, 2)
    w.tick(701.0)
    shutil.rmtree(made)
    step(tmp_path, 2)
    settle(w, 800.0)
    assert not any("lost" in note for note in w.tick(1500.0).notes)
