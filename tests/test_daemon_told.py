"""What the results of ticks say in the log."""

from ckptsync.daemon.told import worker
from ckptsync.worker.result import Failure, Progress, Repaired, WorkerResult


def test_a_worker_tells_phases_and_nothing_that_counts_down() -> None:
    waiting = [Progress("a", "checkpoint-1", 0, "waiting", f"finished if nothing changes for {s} s") for s in (9, 8)]
    texts = {line.text for progress in waiting for line in worker(WorkerResult("n0", (progress,)))}
    assert texts == {"phase=waiting run=a checkpoint=checkpoint-1"}
    sent = Progress("a", "checkpoint-1", 0, "sent", "sent", "checkpoint-1~ab", 7, 1000, ("odd name",))
    [line] = worker(WorkerResult("n0", (sent,)))
    assert line.text == 'phase=sent run=a checkpoint=checkpoint-1 location=checkpoint-1~ab files=7 bytes=1000 notes="odd name"'
    assert not list(worker(WorkerResult("n0", (Progress("a", "checkpoint-1", 0, "stored", "stored"),))))


def test_what_was_missed_is_an_error_and_a_note_is_none() -> None:
    missed = Progress("a", "checkpoint-1", 0, "missed", "removed before it was whole")
    lines = list(worker(WorkerResult("n0", (missed,), notes=("the spool is full",))))
    assert [line.is_error for line in lines] == [True, False]
    assert lines[0].text == 'phase=missed run=a checkpoint=checkpoint-1 detail="removed before it was whole"'
    assert lines[1].text == 'phase=note detail="the spool is full"'


def test_a_worker_tells_repairs_and_failures() -> None:
    repairs = (Repaired("a", "r1", "checkpoint-1/x"), Repaired("a", "r1", "checkpoint-1/y", "these bytes are gone"))
    failure = Failure("a", "checkpoint-1", "StoreError", "away", "look", 4)
    lines = list(worker(WorkerResult("n0", repairs=repairs, failures=(failure,))))
    assert [line.text.split()[0] for line in lines] == ["phase=repaired", "phase=not-repaired", "phase=failed"]
    assert [line.is_error for line in lines] == [False, False, True]
    assert len({line.key for line in lines}) == 3
