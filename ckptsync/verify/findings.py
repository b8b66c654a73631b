"""From findings to a verdict.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ckptsync.records.report import Finding, Kind, Report, Verdict

_ORDER: tuple[Kind, ...] = ("missing", "size", "digest", "parse", "load", "model", "nonfinite", "note")
DAMAGE = frozenset(_ORDER[:6])
_MOST = 1000


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Each once; by kind, then by name.  A report names no more than 1000 of the harmless kinds, and says so."""
    found = sorted(set(findings), key=lambda f: (_ORDER.index(f.kind), f.name, f.detail, f.ranges))
    damage = tuple(f for f in found if f.kind in DAMAGE)
    rest = tuple(f for f in found if f.kind not in DAMAGE)
    more = (Finding("note", "", f"{len(rest) - _MOST} more findings that damage nothing"),) if len(rest) > _MOST else ()
    return (*damage, *rest[:_MOST], *more)


def verdict(findings: Iterable[Finding], *, is_arriving: bool) -> Verdict:
    """Damage to what has arrived is damage, also while the rest arrives."""
    if any(f.kind in DAMAGE for f in findings):
        return "damaged"
    return "arriving" if is_arriving else "ok"


def exit_code(reports: Iterable[Report]) -> int:
    """10 for damage, 3 for a plain directory of which something is missing; what is arriving in a store is no failure."""
    found = [(r.verdict, bool(r.run)) for r in reports]
    if any(v == "damaged" for v, _ in found):
        return 10
    return 3 if ("arriving", False) in found else 0
