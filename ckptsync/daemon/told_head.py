"""What the head and the verifier say in the log and to `ckptsync status`.  Pure, and imports nothing that merges or verifies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ckptsync.catalogue.summary import Catalogue
from ckptsync.daemon.phases import Line, pairs
from ckptsync.records.report import Finding

if TYPE_CHECKING:
    from ckptsync.head.gc import Deed, Failed
    from ckptsync.head.sealing import Made
    from ckptsync.verify.location import VerifyResult


def made(one: Made) -> Line:
    """A model that was made, mended or completed."""
    counts = {"files": len(one.files), "bytes": one.size}
    text = pairs(phase="consolidated", run=one.run, location=one.location, **counts, notes="; ".join(one.notes))
    return Line(f"made {one.model_record} {len(one.files)}", text)


def catalogue(found: Catalogue) -> Iterator[Line]:
    """The word of each location; what is wrong with the records of others."""
    for seen in found.summaries:
        detail = "; ".join(seen.evidence) if seen.status in ("CONFLICT", "RETIRED") else ""
        yield Line(
            f"location {seen.run}/{seen.location}",
            pairs(phase=seen.status.lower(), run=seen.run, location=seen.location, detail=detail),
        )
    for fault in found.faults:
        yield Line(f"fault {fault.name}", pairs(phase="unreadable", record=fault.name, error=fault.error), is_error=True)


def verifier(result: VerifyResult) -> Iterator[Line]:
    """The report that was made, and each of its findings that is damage."""
    report = result.report
    if report is None:
        return
    key = f"report {report.run}/{report.location} {result.written}"
    text = pairs(
        phase="proved", run=report.run, location=report.location, level=report.level, verdict=report.verdict, read=report.read
    )
    yield Line(key, text, is_error=report.verdict == "damaged")
    for finding in report.findings if report.verdict == "damaged" else ():
        yield Line(f"{key} {finding}", pairs(phase="found", run=report.run, **_finding(finding)), is_error=True)


def _finding(finding: Finding) -> dict[str, object]:
    return {"kind": finding.kind, "file": finding.name, "detail": finding.detail, "tensors": ",".join(finding.tensors)}


def verifier_errors(result: VerifyResult) -> tuple[str, ...]:
    """What is damaged."""
    report = result.report
    return (f"{report.run}/{report.location}: damaged",) if report and report.verdict == "damaged" else ()


def let_go(deed: Deed) -> Line:
    """What retention did about a location."""
    phase = deed.outcome.replace(" ", "-")
    text = pairs(
        phase=phase, run=deed.run, location=deed.location, scope=deed.scope, files=deed.files, bytes=deed.size, reason=deed.reason
    )
    return Line(f"{phase} {deed.run}/{deed.location}", text)


def not_let_go(failed: Iterable[Failed]) -> tuple[str, ...]:
    """What it could not do."""
    return tuple(f"{f.run}/{f.location}: {f.error}" if f.location else f"{f.run}: {f.error}" for f in failed)
