"""What `ckptsync.doctor` says of the nodes of a Ray run, from what their workers told of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptsync.doctor.checks import compare
from ckptsync.doctor.facts import Finding

LEVELS = ("fail", "warn", "off")


@dataclass(frozen=True, slots=True)
class Examined:
    """A line for each finding: what, where, why it matters, what to do."""

    failures: tuple[str, ...]
    warnings: tuple[str, ...]


def examine(facts: Iterable[Mapping[str, Any]]) -> Examined:
    """Of all workers: `compare` lets the first of a node speak for it.  Who could not tell anything is a warning."""
    told = list(facts)
    mute = [str(one["error"]) for one in told if "error" in one]
    findings = compare([one for one in told if "error" not in one])
    failures = tuple(_line(f) for f in findings if f.level == "fail")
    warnings = (
        *(_line(f) for f in findings if f.level != "fail"),
        *(f"a worker could not tell of itself: {text}" for text in mute),
    )
    return Examined(failures, warnings)


def _line(finding: Finding) -> str:
    return f"{finding.where}: {finding.what} ({finding.why}; {finding.hint})"
