"""What a worker's results say in the log and to `ckptsync status`.  Pure.

A line's key is what it speaks of; it is logged again when its text changes, so nothing that counts down stands in a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ckptsync.daemon.phases import Line, pairs
from ckptsync.worker.result import Progress, WorkerResult


def worker(result: WorkerResult) -> Iterator[Line]:
    """Phases of checkpoints, repairs, failures."""
    for progress in result.progress:
        if progress.phase != "stored":  # `sent` has said so, or it was before this process began
            yield _progress(progress)
    for repair in result.repairs:
        phase = "not-repaired" if repair.reason else "repaired"
        text = pairs(phase=phase, run=repair.run, file=repair.name, report=repair.report, reason=repair.reason)
        yield Line(f"repair {repair.report} {repair.name}", text)
    yield from notes(result.notes)
    for failure in result.failures:
        text = pairs(phase="failed", run=failure.run, checkpoint=failure.checkpoint, error=failure.text, hint=_steady(failure.hint))
        yield Line(f"failure {failure.run} {failure.checkpoint}", text, is_error=True)


def notes(told: Iterable[str]) -> Iterator[Line]:
    """What is no error, and an operator should know."""
    return (Line(f"note {note}", pairs(phase="note", detail=note)) for note in told)


def _steady(hint: str) -> str:
    """How often it was tried differs each time, and is no news."""
    return re.sub(r"(; )?given up after [0-9]+ tries in [0-9]+ s$", "", hint)


def _progress(p: Progress) -> Line:
    detail = "" if p.phase in ("waiting", "failed", "sent") else p.detail  # waiting counts seconds; a failure has its own line
    notes = "; ".join(p.notes)
    counts = {"files": p.files, "bytes": p.size} if p.phase == "sent" else {}
    text = pairs(phase=p.phase, run=p.run, checkpoint=p.checkpoint, location=p.location, **counts, detail=detail, notes=notes)
    return Line(f"checkpoint {p.run}/{p.checkpoint} {p.k}", text, is_error=p.phase in ("missed", "lost"))
