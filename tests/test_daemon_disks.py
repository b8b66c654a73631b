"""How full disks are, and what only pins hold."""

import os
from pathlib import Path

from ckptsync.daemon.disks import disks, room


def test_what_only_a_pin_still_holds_is_counted_and_what_the_trainer_has_too_is_not(tmp_path: Path) -> None:
    files = tmp_path / "_ckptsync" / "pins" / "checkpoint-1.0" / "files"
    files.mkdir(parents=True)
    (tmp_path / "kept").write_bytes(os.urandom(100_000))
    (files / "kept").hardlink_to(tmp_path / "kept")
    (files / "removed").write_bytes(os.urandom(50_000))
    [disk] = disks([str(tmp_path)], 10**9)
    assert 50_000 <= disk.spool < 100_000
    assert (disk.path, disk.budget) == (str(tmp_path), 10**9)
    assert 0 < disk.free < disk.total


def test_a_directory_that_is_gone_is_left_out_and_one_without_pins_holds_nothing(tmp_path: Path) -> None:
    assert [disk.spool for disk in disks([str(tmp_path), str(tmp_path / "gone")], 0)] == [0]


def test_the_room_of_a_store_is_known_where_it_is_a_path(tmp_path: Path) -> None:
    there = room(f"file://{tmp_path}")
    assert there
    assert 0 < there.free < there.total
    assert room(str(tmp_path / "gone")) is None
    assert room("s3://bucket/prefix") is None
