"""What the results of the head and the verifier say in the log and to `ckptsync status`.  Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ckptsync.catalogue.fresh import Fresh
from ckptsync.daemon.phases import Line, pairs
from ckptsync.head.consolidate import HeadResult
from ckptsync.head.sealing import Made
from ckptsync.records.report import Finding
from ckptsync.verify.tick import VerifyResult


def head(result: HeadResult) -> Iterator[Line]:
    """The word of each place, models that were made, failures."""
    yield from catalogue(result.catalogue)
    yield from map(made, result.made)
    for failed in result.failed:
        text = pairs(phase="failed", run=failed.run, place=failed.place, error=failed.error, hint=failed.error.hint)
        yield Line(f"failed {failed.run}/{failed.place}", text, is_error=True)


def made(one: Made) -> Line:
    """A model that was made, mended or completed."""
    counts = {"files": len(one.files), "bytes": one.size}
    text = pairs(phase="sealed", run=one.run, place=one.place, **counts, notes="; ".join(one.notes))
    return Line(f"made {one.seal} {len(one.files)}", text)


def head_errors(result: HeadResult) -> tuple[str, ...]:
    """A line for each place that could not be consolidated, and each record that cannot be read."""
    failed = [f"{f.run}/{f.place}: {f.error}" for f in result.failed]
    return (*failed, *(f"{fault.name}: {fault.error}" for fault in result.catalogue.faults))


def catalogue(found: Fresh) -> Iterator[Line]:
    """The word of each place; what is wrong with the records of others."""
    for snapshot in found.readable:
        detail = "; ".join(snapshot.evidence) if snapshot.word in ("AMBIGUOUS", "RETIRED") else ""
        text = pairs(phase=snapshot.word.lower(), run=snapshot.run, place=snapshot.place, detail=detail)
        yield Line(f"place {snapshot.run}/{snapshot.place}", text)
    for fault in found.faults:
        yield Line(f"fault {fault.name}", pairs(phase="unreadable", record=fault.name, error=fault.error), is_error=True)


def verifier(result: VerifyResult) -> Iterator[Line]:
    """The report that was made, and each of its findings that is damage."""
    report = result.report
    if report is None:
        return
    key = f"report {report.run}/{report.place} {result.written}"
    text = pairs(phase="proved", run=report.run, place=report.place, level=report.level, verdict=report.verdict, read=report.read)
    yield Line(key, text, is_error=report.verdict == "damaged")
    for finding in report.findings if report.verdict == "damaged" else ():
        yield Line(f"{key} {finding}", pairs(phase="found", run=report.run, **_finding(finding)), is_error=True)


def _finding(finding: Finding) -> dict[str, object]:
    return {"kind": finding.kind, "file": finding.name, "detail": finding.detail, "tensors": ",".join(finding.tensors)}


def verifier_errors(result: VerifyResult) -> tuple[str, ...]:
    """What is damaged, and what cannot be read."""
    report = result.report
    damaged = [f"{report.run}/{report.place}: damaged"] if report and report.verdict == "damaged" else []
    return (*damaged, *(f"{fault.name}: {fault.error}" for fault in result.faults))
