"""How full disks are, and what only pins hold."""

from pathlib import Path

from ckptsync.daemon.disks import disks, room


def test_a_disk_is_told_with_what_only_pins_hold_there_and_one_that_is_gone_is_left_out(tmp_path: Path) -> None:
    [disk] = disks([(str(tmp_path), 50_000), (str(tmp_path / "gone"), 1)], 10**9)
    assert (disk.path, disk.spool, disk.budget) == (str(tmp_path), 50_000, 10**9)
    assert 0 < disk.free < disk.total


def test_the_room_of_a_store_is_known_where_it_is_a_path(tmp_path: Path) -> None:
    there = room(f"file://{tmp_path}")
    assert there
    assert 0 < there.free < there.total
    assert room(str(tmp_path / "gone")) is None
    assert room("s3://bucket/prefix") is None
