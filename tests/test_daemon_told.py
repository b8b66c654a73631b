"""What the results of ticks say in the log."""

from ckptsync.daemon.phases import Line
from ckptsync.daemon.told import head, head_errors, verifier, verifier_errors, worker
from ckptsync.errors import Unsupported
from ckptsync.head.catalogue import Catalogue
from ckptsync.head.consolidate import Failed, HeadResult
from ckptsync.head.sealing import Made
from ckptsync.records.report import Finding, Report
from ckptsync.verify.tick import VerifyResult
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


def test_a_head_tells_what_it_made_and_what_it_could_not() -> None:
    failed = Failed("a", "checkpoint-2", Unsupported("odd", hint="try b"), is_new=True)
    result = HeadResult((Made("a", "checkpoint-1", "seal", ("m", "i"), 30),), (failed,), Catalogue((), ()))
    assert list(head(result)) == [
        Line("made seal 2", "phase=sealed run=a place=checkpoint-1 files=2 bytes=30"),
        Line("failed a/checkpoint-2", 'phase=failed run=a place=checkpoint-2 error=odd hint="try b"', is_error=True),
    ]
    assert head_errors(result) == ("a/checkpoint-2: odd",)


def test_a_verifier_tells_its_report_and_each_finding_of_damage() -> None:
    finding = Finding("digest", "checkpoint-1/x", "one block differs", ((0, 9),), ("w", "b"))
    report = Report("a", "checkpoint-1", "checkpoint-1", 3, "digest", "damaged", (), "", 99, (finding,))
    lines = list(verifier(VerifyResult(report, "record")))
    assert [line.is_error for line in lines] == [True, True]
    assert lines[0].text == "phase=proved run=a place=checkpoint-1 level=digest verdict=damaged read=99"
    assert lines[1].text.endswith('file=checkpoint-1/x detail="one block differs" tensors=w,b')
    assert verifier_errors(VerifyResult(report)) == ("a/checkpoint-1: damaged",)
    assert list(verifier(VerifyResult())) == []
