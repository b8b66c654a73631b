"""Verification reports as JUnit XML, which CI systems show: a suite for each place, a case for each level, and one for each thing that is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape, quoteattr

from ckptsync.cli import output
from ckptsync.errors import CkptsyncError
from ckptsync.records.report import Finding, Reading, Report
from ckptsync.verify.findings import DAMAGE


def junit(reports: Sequence[Report], stopped: Sequence[tuple[str, CkptsyncError]] = ()) -> str:
    """The document; ``stopped`` are targets that were not verified to their end, and why."""
    suites = [*(_suite(report) for report in reports), *(_stopped(target, error) for target, error in stopped)]
    return "\n".join(
        ['<?xml version="1.0" encoding="UTF-8"?>', '<testsuites name="ckptsync verify">', *suites, "</testsuites>", ""]
    )


def _suite(report: Report) -> str:
    name = f"{report.run}/{report.place}" if report.run else report.place
    wrong = [f for f in report.findings if f.kind in DAMAGE]
    cases = [*(_level(name, reading) for reading in report.readings), *(_failed(name, finding) for finding in wrong)]
    skipped = 0
    if report.verdict == "arriving":
        case = f'<testcase classname={_quoted(name)} name="complete">'
        what = (
            '<skipped message="it is still arriving"/>'
            if report.run
            else '<failure type="incomplete" message="something is missing"/>'
        )
        skipped = int(bool(report.run))
        cases.append(f"{case}{what}</testcase>")
    failures = len(wrong) + (report.verdict == "arriving" and not report.run)
    counts = f'tests="{len(cases)}" failures="{failures}" errors="0" skipped="{skipped}"'
    notes = escape("\n".join(_notes(report)))
    return f"<testsuite name={_quoted(name)} {counts}>\n" + "\n".join(cases) + f"\n<system-out>{notes}</system-out>\n</testsuite>"


def _stopped(target: str, error: CkptsyncError) -> str:
    case = f'<testcase classname={_quoted(target)} name="verified">'
    what = f"<error type={_quoted(type(error).__name__)} message={_quoted(str(error))}/></testcase>"
    return f'<testsuite name={_quoted(target)} tests="1" failures="0" errors="1" skipped="0">\n{case}{what}\n</testsuite>'


def _level(name: str, reading: Reading) -> str:
    said = f"{reading.level}: {reading.files} of {reading.of_files} files, {reading.size} of {reading.of_size} bytes, {reading.tensors} tensors"
    return f"<testcase classname={_quoted(name)} name={_quoted(said)}/>"


def _failed(name: str, finding: Finding) -> str:
    detail = output.clean(finding.detail)
    tensors = escape(output.clean(", ".join(finding.tensors)))
    return (
        f"<testcase classname={_quoted(name)} name={_quoted(finding.name)}>"
        f"<failure type={_quoted(finding.kind)} message={_quoted(detail)}>{tensors}</failure></testcase>"
    )


def _notes(report: Report) -> Iterator[str]:
    yield f"verdict {report.verdict}, level {report.level}, {report.read} bytes read"
    yield from (output.clean(f"{f.kind}: {f.name}: {f.detail}") for f in report.findings if f.kind not in DAMAGE)


def _quoted(text: str) -> str:
    return quoteattr(output.clean(text))
