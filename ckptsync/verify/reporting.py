"""Writing a report, last of all; and whether a report says more of a location than those that are there."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from ckptsync.errors import Exists
from ckptsync.records.coding import LIMITS, encode, record_name
from ckptsync.records.names import parse_record_name, records_prefix
from ckptsync.records.report import LEVELS, Finding, Report
from ckptsync.records.state import DIGEST, Snapshot
from ckptsync.stores.contract import Store
from ckptsync.verify.findings import DAMAGE


def write_report(store: Store, report: Report) -> str:
    """Give it the highest number seen plus one, and write it; the record's name.  Raises StoreError."""
    listed = (parse_record_name(entry.name) for entry in store.names(records_prefix(report.run, report.location)))
    highest = max((p.n for p in listed if p and p.kind == "report"), default=0)
    last = replace(fitting(report), n=highest + 1)
    data = encode(last)
    name = record_name(last, data)
    with contextlib.suppress(Exists):  # named by its own bytes: it is this very report
        store.create(name, [data])
    return name


def fitting(report: Report) -> Report:
    """Return the report, without the last of its findings where a record could not hold them: what is repaired first is verified again."""
    if sum(map(_length, report.findings)) <= _ROOM:
        return report
    found = [replace(f, ranges=f.ranges[:_MOST], tensors=f.tensors[:_MOST]) for f in report.findings]
    kept = sum(length <= _ROOM for length in accumulate(map(_length, found)))
    note = Finding(
        "note", report.location, f"{len(found) - kept} further findings are left out: verify again when these are repaired"
    )
    return replace(report, findings=(*found[:kept], note))


_MOST = 1000  # ranges, and tensors, of one finding in a report that is too large
_ROOM = LIMITS["report"] // 4  # characters, each of which may take as many bytes; the rest of a report is small


def _length(finding: Finding) -> int:
    return 200 + len(finding.name) + len(finding.detail) + 50 * len(finding.ranges) + sum(len(t) + 4 for t in finding.tensors)


def is_news(report: Report, seen: Snapshot, mtimes: Mapping[str, float]) -> bool:
    """Return whether ``report`` changes what the store says of a location, so that verifying it ten times by hand writes one report.

    ``seen``: the location as it was when it was verified; ``mtimes``: store name → seconds, of its files and records.

    Damage is news unless the newest report that stands names the same damage, and no damaged file was written since: then a node has
    sent it again, and has to be told that it is still damaged.  Anything else is news if it answers damage, or proves
    the location at a level (digest or above) at which no report has proven it yet.
    """
    standing = seen.conditions.proof.damage
    if report.verdict == "damaged":
        if not standing:
            return True
        last, wrong = seen.records.reports[standing[-1]], damage(report)
        is_same = damage(last) == damage(fitting(report)) and (last.manifests, last.model_record) == (
            report.manifests,
            report.model_record,
        )
        said = mtimes.get(standing[-1], 0.0)
        return not is_same or any(mtimes.get(f"{seen.run}/{f.name}", 0.0) > said for f in wrong)
    level = LEVELS.index(report.level)
    if any(LEVELS.index(seen.records.reports[name].level) <= level for name in standing):
        return True
    is_proof = report.verdict == "ok" and level >= DIGEST
    return is_proof and not any(_proves(old, report) for old in seen.records.reports.values())


def damage(report: Report) -> frozenset[Finding]:
    """Return the findings that are damage."""
    return frozenset(f for f in report.findings if f.kind in DAMAGE)


def _proves(old: Report, report: Report) -> bool:
    is_as_close = LEVELS.index(old.level) >= LEVELS.index(report.level)
    return (
        old.verdict == "ok"
        and is_as_close
        and old.model_record == report.model_record
        and set(report.manifests) <= set(old.manifests)
    )
