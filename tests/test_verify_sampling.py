"""What is said of a sample is its coverage."""

from __future__ import annotations

from ckptsync.records.report import Reading
from ckptsync.verify.sampling import said


def test_coverage_is_said_in_bytes_and_files_and_nothing_of_the_rest() -> None:
    text = said(Reading("digest", 3, 125, 10, 1000))
    assert "125 of 1000 bytes (12.5 %), in 3 of 10 files" in text
    assert "nothing is known of the others" in text
    assert " ok" not in text


def test_of_nothing_all_is_covered() -> None:
    assert "100.0 %" in said(Reading("digest", 0, 0, 0, 0))
