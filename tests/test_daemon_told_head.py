"""What the results of the head and the verifier say in the log."""

from ckptsync.catalogue.reading import read
from ckptsync.daemon.phases import Line
from ckptsync.daemon.told_head import catalogue, made, verifier, verifier_errors
from ckptsync.head.sealing import Made
from ckptsync.records.report import Finding, Report
from ckptsync.stores.memory import MemoryStore
from ckptsync.verify.location import VerifyResult
from tests.filled import two_nodes


def test_a_head_tells_what_it_made() -> None:
    assert made(Made("a", "checkpoint-1", "model", ("m", "i"), 30)) == Line(
        "made model record 2", "phase=consolidated run=a location=checkpoint-1 files=2 bytes=30"
    )


def test_each_location_is_told_and_what_cannot_be_read() -> None:
    store = MemoryStore()
    two_nodes(store)
    assert [line.text for line in catalogue(read(store))] == ["phase=complete run=run location=checkpoint-4"]
    name = next(e.name for e in store.names("run/.ckptsync/"))
    store.write(name, [b"x"])
    assert any(line.is_error and name in line.text for line in catalogue(read(store)))


def test_a_verifier_tells_its_report_and_each_finding_of_damage() -> None:
    finding = Finding("digest", "checkpoint-1/x", "one block differs", ((0, 9),), ("w", "b"))
    report = Report("a", "checkpoint-1", "checkpoint-1", 3, "digest", "damaged", (), "", 99, (finding,))
    lines = list(verifier(VerifyResult(report, "record")))
    assert [line.is_error for line in lines] == [True, True]
    assert lines[0].text == "phase=proved run=a location=checkpoint-1 level=digest verdict=damaged read=99"
    assert lines[1].text.endswith('file=checkpoint-1/x detail="one block differs" tensors=w,b')
    assert verifier_errors(VerifyResult(report)) == ("a/checkpoint-1: damaged",)
    assert list(verifier(VerifyResult())) == []
