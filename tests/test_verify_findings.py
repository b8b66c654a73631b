"""From findings to verdicts and exit codes."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from ckptsync.records.report import Finding, Kind, Report
from ckptsync.verify.findings import DAMAGE, exit_code, verdict, worst_first

REPORT = Report("run", "c-1", "c-1", 0, "digest", "ok", (), "", 0, ())


def test_the_worst_comes_first_and_nothing_twice() -> None:
    kinds: list[Kind] = ["note", "load", "nonfinite", "missing", "digest", "parse", "size", "note"]
    found = worst_first(Finding(kind, "f", "") for kind in kinds)
    assert [f.kind for f in found] == ["missing", "size", "digest", "parse", "load", "nonfinite", "note"]


@pytest.mark.parametrize("kind", get_args(Kind))
def test_only_notes_and_values_that_are_not_finite_damage_nothing(kind: Kind) -> None:
    assert (verdict([Finding(kind, "f", "")], is_arriving=False) == "ok") == (kind in ("note", "nonfinite"))


def test_damage_to_what_has_arrived_is_damage() -> None:
    assert verdict([Finding("digest", "f", "")], is_arriving=True) == "damaged"
    assert verdict([Finding("note", "f", "")], is_arriving=True) == "arriving"


def test_a_report_stays_small_and_keeps_all_damage() -> None:
    found = worst_first(Finding(kind, f"f{i}", "") for i in range(2000) for kind in ("digest", "nonfinite"))
    assert sum(f.kind in DAMAGE for f in found) == 2000
    assert len(found) == 3001
    assert "1000 more" in found[-1].detail


def test_exit_codes() -> None:
    ok, damaged, arriving = (replace(REPORT, verdict=v) for v in ("ok", "damaged", "arriving"))
    assert exit_code([]) == exit_code([ok, arriving]) == 0
    assert exit_code([ok, damaged, arriving]) == 10
    assert exit_code([replace(arriving, run="")]) == 3
    assert exit_code([replace(arriving, run=""), damaged]) == 10
