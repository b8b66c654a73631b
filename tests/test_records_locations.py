from __future__ import annotations

from dataclasses import replace

from ckptsync.records.locations import reading_order, record_names, snapshots
from ckptsync.records.tombstone import Tombstone
from tests.test_records_saves import LATER, of_rank

PREFIX = "run/.ckptsync/checkpoint-5"


def test_people_read_by_run_and_step() -> None:
    locations = [("b", "checkpoint-1"), ("a", "checkpoint-10"), ("a", "checkpoint-9~1"), ("a", "checkpoint-9"), ("a", "final")]
    assert sorted(locations, key=lambda p: reading_order(*p)) == [
        ("a", "checkpoint-9"),
        ("a", "checkpoint-9~1"),
        ("a", "checkpoint-10"),
        ("a", "final"),
        ("b", "checkpoint-1"),
    ]
    assert reading_order("run", "step-7\u00b2") > reading_order("run", "step-7")


def test_a_location_knows_its_own_files_and_no_others() -> None:
    listed = (
        "checkpoint-5/a",
        "checkpoint-50/a",
        "checkpoint-5~1/a",
        "consolidated/checkpoint-5/m",
        ".ckptsync/checkpoint-5/files/b/a",
    )
    found = snapshots({"m": of_rank(0, "a")}, {f"run/{name}": 1 for name in listed})
    assert sorted(found[0].sizes) == [
        "run/.ckptsync/checkpoint-5/files/b/a",
        "run/checkpoint-5/a",
        "run/consolidated/checkpoint-5/m",
    ]


def test_every_location_of_a_checkpoint_tells_about_the_others() -> None:
    moved = {"x": of_rank(0, "a"), "y": replace(of_rank(0, "a", location="checkpoint-5~1"), supersedes=("x",))}
    assert [s.location for s in snapshots(moved, {})] == ["checkpoint-5~1"]
    rivals = {"x": of_rank(0, "a"), "y": of_rank(1, "b"), "z": of_rank(1, "c", "second", location="checkpoint-5~1")}
    assert [s.status for s in snapshots(rivals, {})] == ["CONFLICT", "CONFLICT"]
    later = {"x": of_rank(0, "a"), "z": of_rank(1, "c", "second", LATER, location="checkpoint-5~1")}
    assert [s.status for s in snapshots(later, {})] == ["ARRIVING", "ARRIVING"]


def test_records_without_a_manifest_make_no_location() -> None:
    assert snapshots({"t": Tombstone("run", "checkpoint-5", "checkpoint-5", 0, (), "old")}, {}) == ()


def test_nothing_is_said_of_a_location_with_a_record_that_cannot_be_read() -> None:
    assert snapshots({"m": of_rank(0, "a")}, {}, {("run", "checkpoint-5")}) == ()


def test_record_names_are_told_from_others() -> None:
    good = f"{PREFIX}/manifest-a-0-0123456789abcdef.json"
    assert list(record_names([good, f"{PREFIX}/files/a/manifest-a-0-0123456789abcdef.json", "run/checkpoint-5/x", "x"])) == [good]
