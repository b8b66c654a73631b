"""What the results of the head and the verifier say in the log."""

from ckptsync.catalogue.fresh import Fresh
from ckptsync.daemon.phases import Line
from ckptsync.daemon.told_head import head, head_errors, verifier, verifier_errors
from ckptsync.errors import Unsupported
from ckptsync.head.consolidate import Failed, HeadResult
from ckptsync.head.sealing import Made
from ckptsync.records.report import Finding, Report
from ckptsync.verify.tick import VerifyResult


def test_a_head_tells_what_it_made_and_what_it_could_not() -> None:
    failed = Failed("a", "checkpoint-2", Unsupported("odd", hint="try b"), is_new=True)
    result = HeadResult((Made("a", "checkpoint-1", "seal", ("m", "i"), 30),), (failed,), Fresh((), (), {}))
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
