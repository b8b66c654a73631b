"""Upload queues: a large save holds up no small one, and no two threads send one save."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.stores.contract import UNKNOWN, About, Chunk
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker import queue, upload
from ckptsync.worker.options import RunDir, Superseded, WorkerOptions
from ckptsync.worker.queue import (
    PendingSave,
    QueueCapacity,
    UploadJob,
    UploadQueue,
    UploadQueues,
    order_saves,
    split_threads,
)
from ckptsync.worker.upload import small_at_once
from ckptsync.worker.worker import Worker
from tests.support import waiting
from tests.support.worker_in_process import is_drained, kept, lay

SMALL = 5000
until = partial(waiting.until, seconds=30)
LARGE, TINY = b"L" * 2 * SMALL, b"t" * 100


class Gate(MemoryStore):
    """Holds up files of more than a kilobyte until it is told to let them pass, and remembers what
    began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open, self.begun, self.most, self._within = threading.Event(), list[str](), 0, 0
        self._count = threading.Lock()

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self.begun.append(name)
        if (about.size or 0) > 1000:
            with self._count:
                self._within += 1
                self.most = max(self.most, self._within)
            assert self.open.wait(60)
            with self._count:
                self._within -= 1
        super().create(name, chunks, about)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "SMALL_SAVE", SMALL)


def step(out: Path, n: int, weights: bytes, more: dict[str, bytes] | None = None) -> Path:
    """A checkpoint of the ``n``-th step, written at second ``n``."""
    made = lay(
        out / "making",
        {"trainer_state.json": f'{{"global_step": {n}}}'.encode(), "x": weights} | (more or {}),
        float(n),
    )
    made.rename(out / f"checkpoint-{n}")
    return out / f"checkpoint-{n}"


class Serving:
    """A worker for each run, and a thread for each queue."""

    def __init__(
        self,
        out: Path,
        store: MemoryStore,
        *runs: str,
        superseded: Superseded = "keep",
    ) -> None:
        self.queues = UploadQueues()
        self.workers = {
            run: Worker(
                WorkerOptions("n0", RunDir(run, out / run), 0, 0, superseded=superseded),
                store,
                self.queues,
            )
            for run in runs
        }
        self._wakes = [threading.Semaphore(0) for _ in self.queues.queues]
        self._is_over = False
        for one, wake in zip(self.queues.queues, self._wakes, strict=True):
            one.wake = wake.release
        self._threads = [
            threading.Thread(target=self._carry, args=pair)
            for pair in zip(self.queues.queues, self._wakes, strict=True)
        ]

    def __enter__(self) -> Serving:  # noqa: PYI034 - Python 3.10 has no Self
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for wake, thread in zip(self._wakes, self._threads, strict=True):
            wake.release()
            thread.join(60)

    def plan(self, now: float) -> None:
        for worker in self.workers.values():
            worker.scan(now)
            worker.plan(now)

    def phases(self) -> dict[str, str]:
        return {
            f"{p.run}/{p.checkpoint}": p.phase
            for w in self.workers.values()
            for p in w.result().progress
        }

    def _carry(self, one: UploadQueue, wake: threading.Semaphore) -> None:
        while wake.acquire() and not self._is_over:
            one.run_next()


def test_a_small_save_of_another_run_is_sent_while_a_large_one_is_held_up(tmp_path: Path) -> None:
    store = Gate()
    step(tmp_path / "full", 1, LARGE)
    with Serving(tmp_path, store, "full", "lora") as serving:
        serving.plan(0.0)
        assert until(lambda: "full/checkpoint-1/x" in store.begun)
        step(tmp_path / "lora", 2, TINY)
        serving.plan(1.0)
        assert until(lambda: serving.phases().get("lora/checkpoint-2") == "sent")
        assert serving.phases() == {"full/checkpoint-1": "sending", "lora/checkpoint-2": "sent"}
        store.open.set()
        assert until(lambda: serving.phases()["full/checkpoint-1"] == "sent")
    serving.plan(2.0)
    assert set(serving.phases().values()) == {"stored"}


def test_in_one_run_a_large_upload_holds_up_only_those_behind_large_ones(tmp_path: Path) -> None:
    store = Gate()
    with Serving(tmp_path, store, "run") as serving:
        for n, weights in enumerate((LARGE, TINY, LARGE, TINY), 1):
            step(tmp_path / "run", n, weights)
        serving.plan(0.0)
        assert until(lambda: serving.phases()["run/checkpoint-2"] == "sent")
        assert [serving.phases()[f"run/checkpoint-{n}"] for n in (1, 3, 4)] == [
            "sending",
            "waiting",
            "waiting",
        ]
        store.open.set()
        assert until(lambda: serving.phases()["run/checkpoint-4"] == "sent")


class Silent(Gate):
    """Holds up what a node says before it sends."""

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        if "checkpoint-1/" in name:
            self.begun.append(name)
            assert self.open.wait(60)
        super().write(name, chunks, about)


def test_an_upload_is_not_given_up_and_a_newer_one_gives_up_those_between(tmp_path: Path) -> None:
    store = Silent()
    with Serving(tmp_path, store, "run", superseded="drop") as serving:
        step(tmp_path / "run", 1, LARGE)
        serving.plan(0.0)
        assert until(lambda: store.begun)
        for n in (2, 3):
            step(tmp_path / "run", n, TINY)
        serving.plan(1.0)
        assert until(lambda: serving.phases()["run/checkpoint-3"] == "sent")
        assert [serving.phases()[f"run/checkpoint-{n}"] for n in (1, 2)] == [
            "sending",
            "superseded",
        ]
        store.open.set()
        assert until(lambda: serving.phases()["run/checkpoint-1"] == "sent")
    assert store.begun.count("run/checkpoint-1/x") == 1
    assert set(kept(store)) == {"checkpoint-1", "checkpoint-3"}


def test_queues_together_send_no_more_large_files_at_once_than_threads_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "SMALL_FILE", 500)
    store = Gate()
    with Serving(tmp_path, store, "full", "lora") as serving:
        step(tmp_path / "full", 1, LARGE, {f"y{n}": LARGE for n in range(9)})
        step(tmp_path / "lora", 2, TINY, {f"y{n}": LARGE[: SMALL // 4] for n in range(3)})
        serving.plan(0.0)
        assert until(
            lambda: store.most >= 4 and any("lora/checkpoint-2/y" in n for n in store.begun)
        )
        store.open.set()
        assert until(lambda: set(serving.phases().values()) == {"sent"})
    assert store.most == 4


@pytest.mark.parametrize("is_over", [True, False])
def test_between_chunks_an_upload_waits_a_second_for_a_scan(*, is_over: bool) -> None:
    class Lock:
        calls: list[object] = []  # noqa: RUF012

        def acquire(self, timeout: float) -> bool:
            self.calls.append(timeout)
            return is_over

        def release(self) -> None:
            self.calls.append("release")

    queues = UploadQueues(1)
    queues.scan_lock = Lock()  # type: ignore[assignment]
    queues.give_way(1)
    assert Lock.calls == [1.0, *(["release"] if is_over else [])]


def test_lines_take_turns_and_one_that_is_gone_waits_no_more() -> None:
    queues, sent = UploadQueues(1), list[str]()
    for line in "ab":
        queues.post(
            line,
            [
                UploadJob(n, (line, str(n)), 1, lambda _, told=f"{line}{n}": sent.append(told))  # type: ignore[misc]
                for n in range(3)
            ],
        )
    for _ in range(3):
        queues.queues[0].run_next()
    queues.retain("b")
    for _ in range(9):
        queues.queues[0].run_next()
    assert sent == ["a0", "b0", "a1", "b1", "b2"]


def test_what_was_posted_before_is_withdrawn_and_what_is_in_hand_is_told() -> None:
    queues = UploadQueues()
    first, second = (
        UploadJob(n, ("r", str(n)), queue.SMALL_SAVE + 1, lambda _: None) for n in (1, 2)
    )
    queues.post("a", [first, second])
    wide = queue.split_threads(4)[0]
    assert queues.take(wide) is first
    assert queues.withdraw("a") == (first,)
    assert is_drained(queues)
    queues.end(wide, first)
    assert (queues.withdraw("a"), queues.take(wide)) == ((), None)


def test_a_queue_that_ends_by_a_bug_lets_go_of_what_it_had() -> None:
    queues, ended = UploadQueues(), list[int]()
    queues.ended = lambda: ended.append(1)

    def bug(_: QueueCapacity) -> None:
        queues.queues[0].wake = lambda: ended.append(0)
        raise ZeroDivisionError

    queues.post("a", [UploadJob(1, ("r", "1"), 1, bug)])
    with pytest.raises(ZeroDivisionError):
        queues.queues[1].run_next()
    assert (queues.withdraw("a"), ended) == ((), [0, 1]), "what waited for its name is begun"


def turn(
    name: str, at: int, *, run: str = "run", written: int = -1, is_begun: bool = False
) -> PendingSave[str]:
    return PendingSave(name, run, (float(at), at, 0), at if written < 0 else written, is_begun)


def test_what_is_begun_goes_before_all_that_is_not() -> None:
    assert order_saves([turn("a", 1), turn("b", 2, is_begun=True), turn("c", 3)], "newest", "keep")[
        0
    ] == ["b", "c", "a"]


def test_what_a_newer_save_of_its_run_has_overtaken_is_dropped_but_not_what_is_begun() -> None:
    ordered = order_saves(
        [turn("a", 1), turn("b", 2, is_begun=True), turn("c", 3), turn("d", 1, run="other")],
        "oldest",
        "drop",
    )
    assert ordered == (["b", "d", "c"], ["a"])


def test_a_clock_that_was_set_back_makes_nobody_old() -> None:
    for written in (9000, 5000):
        saves = [turn("before", 1, written=written), turn("after", 2, written=5000)]
        assert order_saves(saves, "oldest", "drop") == (["before", "after"], [])


SIZES = st.sampled_from([0, 1, SMALL, SMALL + 1, 100 * SMALL])
LINES = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), SIZES), max_size=6), max_size=3
)
Lines = dict[object, list[UploadJob]]


def job(run: str, checkpoint: str, size: int) -> UploadJob:
    return UploadJob((run, checkpoint, size), (run, checkpoint), size, lambda _: None)


def test_queues_together_take_no_more_than_one_would() -> None:
    for threads in range(2, 40):
        wide, narrow = split_threads(threads)
        assert wide.threads + narrow.threads == threads
        assert wide.small + narrow.small == small_at_once(threads)
        assert (wide.most, narrow.most) == (None, SMALL)
        assert min(wide.threads, narrow.threads, wide.small, narrow.small) > 0


@given(LINES, st.randoms(use_true_random=False), st.integers(1, 5))
def test_all_is_taken_once_each_run_in_its_order_and_no_name_by_two(
    drawn: list[list[tuple[int, int, int]]], dice: random.Random, threads: int
) -> None:
    queues, wanted = (
        UploadQueues(threads),
        [[job(f"{n}.{r}", str(c), size) for r, c, size in line] for n, line in enumerate(drawn)],
    )
    for n, line in enumerate(wanted):
        queues.post(n, line)
    begun: list[UploadJob] = []
    hands: dict[QueueCapacity, UploadJob] = {}
    while not is_drained(queues) or hands:
        share = dice.choice(split_threads(threads))
        if share in hands:
            queues.end(share, hands.pop(share))
        elif (taken := queues.take(share)) is not None:
            assert taken.name not in {held.name for held in hands.values()}
            assert share.most is None or taken.size <= share.most
            hands[share] = taken
            begun.append(taken)
    for line in wanted:
        for run in {j.name[0] for j in line}:
            assert [j for j in begun if j.name[0] == run] == [j for j in line if j.name[0] == run]


def test_two_saves_of_one_name_are_never_in_two_hands(tmp_path: Path) -> None:
    store = Gate()
    with Serving(tmp_path, store, "run") as serving:
        made = step(tmp_path / "run", 1, LARGE)
        serving.plan(0.0)
        assert until(lambda: "run/checkpoint-1/x" in store.begun)
        shutil.rmtree(made)
        step(tmp_path / "run", 1, TINY)
        serving.plan(1.0)
        serving.plan(2.0)
        told = [p.phase for p in serving.workers["run"].result().progress]
        assert told == ["sending", "waiting"]
        store.open.set()
        assert until(lambda: "sending" not in serving.phases().values())
        serving.plan(3.0)
        assert until(
            lambda: is_drained(serving.queues) and "sending" not in serving.phases().values()
        )
        serving.plan(4.0)
        assert [p.phase for p in serving.workers["run"].result().progress] == [
            "stored",
            "stored",
        ]
