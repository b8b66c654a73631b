"""What is sent again is carried as saves are, and is nobody else's business meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ckptsync.errors import Transient
from ckptsync.stores.contract import UNKNOWN, About, Chunk, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker import queue
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.queue import Job
from ckptsync.worker.worker import Worker
from tests.test_worker_push import ONE, kept, lay
from tests.test_worker_tick import EIGHT, damaged, settle, worker

NAME = "run/checkpoint-4/x"


class Held:
    """Keeps what is posted until it is asked to carry it; what it has begun to carry is in hand."""

    def __init__(self) -> None:
        self.waiting: dict[object, Sequence[Job]] = {}
        self.hand: list[Job] = []

    def withdraw(self, line: object) -> Collection[Job]:
        self.waiting[line] = ()
        return tuple(self.hand)

    def post(self, line: object, jobs: Sequence[Job]) -> None:
        self.waiting[line] = jobs

    @property
    def jobs(self) -> list[Job]:
        return [job for jobs in self.waiting.values() for job in jobs]

    def begin(self) -> Job:
        """Take the only one into the hand."""
        (job,) = self.jobs
        self.hand.append(job)
        return job

    def end(self, job: Job) -> None:
        """Carry it."""
        job.work(queue.whole(4))
        self.hand.remove(job)


class Refusing(MemoryStore):
    """Takes nothing while it is away."""

    is_away = False

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        if self.is_away:
            raise Transient("away")
        super().write(name, chunks, about)


def hurt(tmp_path: Path, store: MemoryStore) -> tuple[Worker, Held]:
    """A worker whose stored file was damaged, and reported."""
    lay(tmp_path, ONE)
    settle(worker(tmp_path, store))
    damaged(store, 0, "checkpoint-4/x")
    store.write(NAME, [b"spoilt"])
    carrier = Held()
    return Worker(WorkerOptions("n0", (RunDir("run", tmp_path),)), store, carrier), carrier


def test_a_new_save_is_decided_of_and_sent_while_a_file_is_sent_again(tmp_path: Path) -> None:
    store = MemoryStore()
    w, carrier = hurt(tmp_path, store)
    w.plan(1000.0)
    mend = carrier.begin()
    assert (mend.name, mend.size, w.told(1000.0).repairs) == (("run", "checkpoint-4"), len(ONE["x"]), ())
    lay(tmp_path / "later", EIGHT, 50.0).rename(tmp_path / "checkpoint-8")
    w.plan(1001.0)
    w.plan(2000.0)
    (save,) = carrier.jobs
    carrier.hand.append(save)
    carrier.end(save)
    assert read_all(store, NAME) == b"spoilt"
    carrier.end(mend)
    assert kept(store) == {"checkpoint-4": {"n0": ONE}, "checkpoint-8": {"n0": EIGHT}}
    assert [r.name for r in w.told(2000.0).repairs] == ["checkpoint-4/x"]
    w.plan(2001.0)
    assert (carrier.jobs, w.told(2001.0).repairs) == ([], ()), "it is told until the next plan, and served once"


def test_what_is_in_hand_is_not_asked_for_again(tmp_path: Path) -> None:
    w, carrier = hurt(tmp_path, MemoryStore())
    w.plan(1000.0)
    mend = carrier.begin()
    for now in (1001.0, 1002.0):
        w.plan(now)
        assert carrier.jobs == []
    carrier.end(mend)
    w.plan(1003.0)
    assert carrier.jobs == []


def test_what_could_not_be_sent_again_is_tried_with_the_next_plan_and_what_is_gone_is_said_at_once(tmp_path: Path) -> None:
    store = Refusing()
    w, carrier = hurt(tmp_path, store)
    w.plan(1000.0)
    store.is_away = True
    carrier.end(carrier.begin())
    assert [f.may_pass for f in w.told(1000.0).failures] == [True]
    store.is_away = False
    (tmp_path / "checkpoint-4" / "x").unlink()
    for pin in (tmp_path / "_ckptsync" / "pins").rglob("x"):
        pin.unlink()
    w.plan(1001.0)
    carrier.end(carrier.begin())
    result = w.told(1001.0)
    assert [r.reason for r in result.repairs] == ["this node no longer has its bytes"]
    assert list(result.lacks.values()) == [("checkpoint-4/x",)], "the head hears of it with the next heartbeat"
