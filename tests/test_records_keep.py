from __future__ import annotations

from ckptsync.records.keep import Keep, kept


def said(n: int, *, keeps: bool, reason: str = "") -> Keep:
    return Keep("run", "c-1", "c-1", n, keeps, reason)


def test_the_highest_number_counts() -> None:
    assert kept({}) == ""
    assert kept({"a": said(0, keeps=True, reason="for the paper")}) == "for the paper"
    assert kept({"a": said(0, keeps=True), "b": said(1, keeps=False)}) == ""
    assert kept({"a": said(2, keeps=True), "b": said(1, keeps=False)}) == "kept by hand"


def test_of_two_at_once_the_one_that_keeps_counts() -> None:
    assert kept({"a": said(1, keeps=True), "z": said(1, keeps=False)}) == "kept by hand"
