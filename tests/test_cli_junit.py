"""Reports as JUnit XML, read again with the standard library's parser."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from ckptsync.cli.junit import junit
from ckptsync.records.report import Finding, Reading, Report, Verdict

READINGS = (Reading("stat", 3, 30, 3, 30), Reading("digest", 3, 30, 3, 30))
BAD = Finding("digest", 'c-1/a<b>&"\x1b', "2 of 30 bytes\x00 differ", ((0, 2),), ("w", "v"))


def report(verdict: Verdict = "ok", run: str = "run", *findings: Finding) -> Report:
    return Report(run, "c-1", "c-1", 0, "digest", verdict, (), "", 30, findings, 0.0, READINGS)


def suite(*given: Report) -> ET.Element:
    return next(iter(ET.fromstring(junit(given))))


def test_a_place_that_is_well_has_a_case_for_each_level() -> None:
    found = suite(report("ok", "run", Finding("note", "c-1", "1 byte that no record names")))
    assert found.attrib == {"name": "run/c-1", "tests": "2", "failures": "0", "errors": "0", "skipped": "0"}
    assert [case.attrib["name"] for case in found.iter("testcase")] == [
        f"{level}: 3 of 3 files, 30 of 30 bytes, 0 tensors" for level in ("stat", "digest")
    ]
    assert "no record names" in str(found.findtext("system-out"))


def test_damage_is_a_failure_with_its_tensors_whatever_the_name() -> None:
    found = suite(report("damaged", "run", BAD))
    (failure,) = found.iter("failure")
    assert (found.attrib["tests"], found.attrib["failures"]) == ("3", "1")
    assert (failure.attrib["type"], failure.text) == ("digest", "w, v")
    assert "2 of 30 bytes" in failure.attrib["message"]


@pytest.mark.parametrize(("run", "failures", "skipped"), [("run", "0", "1"), ("", "1", "0")])
def test_what_is_arriving_is_skipped_and_what_lacks_in_a_directory_fails(run: str, failures: str, skipped: str) -> None:
    found = suite(report("arriving", run))
    assert (found.attrib["failures"], found.attrib["skipped"]) == (failures, skipped)


def test_nothing_at_all_is_a_document_too() -> None:
    assert len(ET.fromstring(junit([]))) == 0
