"""From findings to a report: its order, verdict, exit code and size, and when it is written.

A report is written if it says what the store does not say yet. A scheduled verification always
writes one, since the schedule knows only from reports when a location was last read, and how often
its damage was found again. A verification by hand follows no schedule, so `is_news` decides:
verifying a store ten times by hand writes one report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import get_args

from ckptsync.records.io import LIMITS, append_record, create_record
from ckptsync.records.location_status import DIGEST, proof
from ckptsync.records.report import DAMAGE, LEVELS, FindingKind, Report, Verdict, VerifyFinding
from ckptsync.stores.contract import Store

_ORDER: tuple[FindingKind, ...] = get_args(FindingKind)  # worst first
_MOST = 1000  # harmless findings of a report; ranges and tensors of a finding, if it is too large
_ROOM = LIMITS["report"] // 4  # characters of findings; each may take four bytes


def worst_first(findings: Iterable[VerifyFinding]) -> tuple[VerifyFinding, ...]:
    """Return each finding once, by kind, then by name: all damage, and the first `_MOST` others.

    A note counts the further ones.
    """
    ordered = sorted(
        set(findings), key=lambda f: (_ORDER.index(f.kind), f.name, f.detail, f.ranges)
    )
    damage = tuple(f for f in ordered if f.kind in DAMAGE)
    harmless = tuple(f for f in ordered if f.kind not in DAMAGE)
    if len(harmless) > _MOST:
        more = f"{len(harmless) - _MOST} more findings that are no damage"
        harmless = (*harmless[:_MOST], VerifyFinding("note", "", more))
    return (*damage, *harmless)


def verdict(findings: Iterable[VerifyFinding], *, is_incomplete: bool) -> Verdict:
    """Return "damaged" if any finding is damage, else "incomplete" or "ok"."""
    if any(f.kind in DAMAGE for f in findings):
        return "damaged"
    return "incomplete" if is_incomplete else "ok"


def exit_code(reports: Iterable[Report]) -> int:
    """Return 10 for damage, else 3 for an incomplete plain directory (no run), else 0."""
    kinds = {(r.verdict, bool(r.run)) for r in reports}
    if any(v == "damaged" for v, _ in kinds):
        return 10
    return 3 if ("incomplete", False) in kinds else 0


def write_report(store: Store, report: Report) -> str:
    """Write a report, shortened if it is too long (`fit`); return its name. Raise StoreError.

    A damaged one gets the next number. Any other keeps the number from before it read, so it does
    not answer damage that was reported since.
    """
    fitting = fit(report)
    if report.verdict == "damaged":
        return append_record(store, fitting)
    return create_record(store, fitting)[0]


def fit(report: Report) -> Report:
    """Return the report itself, or a shorter one if a record cannot hold its findings.

    Then each finding has at most `_MOST` ranges and tensors, the last findings are left out, and a
    note counts those.
    """
    if sum(map(_length, report.findings)) <= _ROOM:
        return report
    cut_findings = ((f, f.ranges[:_MOST], f.tensors[:_MOST]) for f in report.findings)
    shortened = [replace(f, ranges=ranges, tensors=tensors) for f, ranges, tensors in cut_findings]
    count = sum(length <= _ROOM for length in accumulate(map(_length, shortened)))
    more = (
        f"{len(shortened) - count} further findings are left out: repair these, then verify again"
    )
    return replace(
        report, findings=(*shortened[:count], VerifyFinding("note", report.location, more))
    )


def _length(finding: VerifyFinding) -> int:
    """Return about how many characters a finding takes in a record."""
    names = sum(len(tensor) + 4 for tensor in finding.tensors)
    return 200 + len(finding.name) + len(finding.detail) + 50 * len(finding.ranges) + names


def is_news(report: Report, reports: Mapping[str, Report], mtimes: Mapping[str, float]) -> bool:
    """Return whether a report changes what the store says of a location.

    Damage is news unless the newest unanswered report names the same damage and no damaged file was
    written since; if one was, a node uploaded it again and must learn that it is still damaged.
    Anything else is news if it answers damage, or is the first proof at its level.

    ``reports``: the stored ones, by name; ``mtimes``: of the location's files and records.
    """
    unanswered = proof(reports, set(), "").damage
    if report.verdict == "damaged":
        if not unanswered:
            return True
        newest = reports[unanswered[-1]]
        if _claim(newest) != _claim(fit(report)):
            return True
        reported_at = mtimes.get(unanswered[-1], 0.0)
        files = (f.name for f in report.findings if f.kind in DAMAGE)
        return any(mtimes.get(f"{report.run}/{name}", 0.0) > reported_at for name in files)
    level = LEVELS.index(report.level)
    if any(LEVELS.index(reports[name].level) <= level for name in unanswered):
        return True
    if report.verdict != "ok" or level < DIGEST:
        return False
    manifests = set(report.manifests)
    without_damage = (old for old in reports.values() if old.verdict == "ok")
    of_this_model = (old for old in without_damage if old.model_record == report.model_record)
    as_deep = (old for old in of_this_model if LEVELS.index(old.level) >= level)
    return not any(manifests <= set(old.manifests) for old in as_deep)


def _claim(report: Report) -> tuple[object, ...]:
    """Return what a report says is damaged, and of what."""
    damage = frozenset(f for f in report.findings if f.kind in DAMAGE)
    return damage, report.manifests, report.model_record
