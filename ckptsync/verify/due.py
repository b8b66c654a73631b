"""Which place to verify next, and how closely.  Pure; times are seconds on the store's clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ckptsync.records.report import LEVELS, Level, Report
from ckptsync.records.state import Snapshot
from ckptsync.verify.expected import expected, stat
from ckptsync.verify.structure import UNPARSED

Why = Literal["changed", "never", "again", "old"]
_ORDER: tuple[Why, ...] = ("changed", "never", "again", "old")
RETRY = 600.0
"""s until a damaged place in which nothing changed is looked at again; doubled with each report, so that reports do not pile up."""
SEALING = 300.0
"""s in which a complete checkpoint may still be consolidated: verified before, its shards would be read twice."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How closely each place is verified, and after how many seconds again."""

    level: Level = "digest"
    every: float = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Due:
    """A place, the level that it is due at, and why."""

    place: Snapshot
    level: Level
    why: Why


def due(places: Iterable[Snapshot], schedule: Schedule, mtimes: Mapping[str, float], now: float) -> tuple[Due, ...]:
    """All that are due: repairs first, then what was never verified, then the rest; the newest checkpoint first."""
    found = [d for seen in places if (d := _due(seen, schedule, mtimes, now))]
    return tuple(sorted(found, key=lambda d: (_ORDER.index(d.why), -_newest(d.place, mtimes), d.place.run, d.place.place)))


def _due(seen: Snapshot, schedule: Schedule, mtimes: Mapping[str, float], now: float) -> Due | None:
    if seen.facets.retired or seen.facets.ambiguous:
        return None
    if seen.facets.proof.damage:
        return _damaged(seen, schedule, mtimes, now)
    if not seen.facets.model.holds:
        return Due(seen, "stat", "never") if any(stat(expected(seen), seen.sizes)) else None
    proofs = [mtimes.get(name, now) for name, report in seen.records.reports.items() if _proves(report, seen, schedule.level)]
    if proofs:
        return Due(seen, schedule.level, "old") if now - max(proofs) >= schedule.every else None
    is_waiting = not seen.facets.sealed.holds and now - _newest(seen, mtimes) < min(SEALING, schedule.every)
    return None if is_waiting else Due(seen, schedule.level, "never")


def _damaged(seen: Snapshot, schedule: Schedule, mtimes: Mapping[str, float], now: float) -> Due | None:
    """Only a report at the level that found the damage, or above, answers it."""
    reports = {name: seen.records.reports[name] for name in seen.facets.proof.damage}
    level = max((schedule.level, *(r.level for r in reports.values())), key=LEVELS.index)
    last = max(mtimes.get(name, now) for name in reports)
    names = {f"{seen.run}/{finding.name}" for report in reports.values() for finding in report.findings}
    if any(mtimes.get(name, last) > last for name in names):
        return Due(seen, level, "changed")
    patience = min(schedule.every, RETRY * 2 ** min(len(reports) - 1, 20))
    return Due(seen, level, "again") if now - last >= patience else None


def _proves(report: Report, seen: Snapshot, level: Level) -> bool:
    """Says "ok" at this level, or as close to it as can be reached, of these manifests and this seal."""
    names = {known.name for known in seen.manifests}
    is_close = LEVELS.index(report.level) >= LEVELS.index(level) or _is_short(report)
    return report.verdict == "ok" and is_close and names.issubset(report.manifests) and report.seal == seen.seal_name


def _is_short(report: Report) -> bool:
    return report.level == "digest" and any(finding.detail.startswith(UNPARSED) for finding in report.findings)


def _newest(seen: Snapshot, mtimes: Mapping[str, float]) -> float:
    return max(mtimes.get(known.name, 0.0) for known in seen.manifests)
