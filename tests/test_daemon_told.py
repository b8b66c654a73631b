"""What the results of ticks say in the log."""

from ckptsync.daemon.told import worker
from ckptsync.worker.result import Failure, Progress, Repaired, WorkerResult


def test_a_worker_tells_phases_and_nothing_that_counts_down() -> None:
    waiting = [Progress("a", "checkpoint-1", 0, "waiting", f"settled if nothing changes for {s} s") for s in (9, 8)]
    texts = {line.text for progress in waiting for line in worker(WorkerResult("n0", (progress,)))}
    assert texts == {"phase=waiting run=a checkpoint=checkpoint-1"}
    sent = Progress("a", "checkpoint-1", 0, "sent", "sent", "checkpoint-1~ab", 7, 1000, ("odd name",))
    [line] = worker(WorkerResult("n0", (sent,)))
    assert line.text == 'phase=sent run=a checkpoint=checkpoint-1 place=checkpoint-1~ab files=7 bytes=1000 notes="odd name"'
    assert not list(worker(WorkerResult("n0", (Progress("a", "checkpoint-1", 0, "stored", "stored"),))))


def test_a_worker_tells_repairs_and_failures() -> None:
    repairs = (Repaired("a", "r1", "checkpoint-1/x"), Repaired("a", "r1", "checkpoint-1/y", "these bytes are gone"))
    failure = Failure("a", "checkpoint-1", "StoreError", "away", "look", 4)
    lines = list(worker(WorkerResult("n0", repairs=repairs, failures=(failure,))))
    assert [line.text.split()[0] for line in lines] == ["phase=repaired", "phase=not-repaired", "phase=failed"]
    assert [line.is_error for line in lines] == [False, False, True]
    assert len({line.key for line in lines}) == 3
