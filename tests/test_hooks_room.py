from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ckptsync.hooks import room
from ckptsync.spool.marks import Commit
from ckptsync.spool.pins import Pin
from ckptsync.walk import Stat

COMMIT = Commit("t", "s", "c", 1, 1, (0,), "h", "", 1.0, {})


def pin(k: int, size: int, *, links: int = 1, at: float | None = None, stored: bool = False) -> Pin:
    file = Stat("a", size, 1, 1, 1, links=links)
    commit = replace(COMMIT, at=at) if at is not None else None
    return Pin("c", k, "", k * 10**9, Path(f"/pins/c.{k}"), (file,), commit=commit, stored=stored)


def chosen(found: tuple[Pin, ...], wanted: int, newest: str = "none") -> list[int]:
    return [p.k for p in room.given_up(found, Path("/pins", newest), wanted)]


def test_what_is_stored_goes_first_and_then_the_oldest() -> None:
    found = (pin(0, 10, at=5.0), pin(1, 10, at=2.0), pin(2, 10, at=9.0, stored=True), pin(3, 10))
    assert chosen(found, 40) == [2, 1, 3, 0]
    assert chosen(found, 11) == [2, 1]
    assert chosen(found, 1) == [2]


def test_nothing_goes_while_there_is_room() -> None:
    assert chosen((pin(0, 10),), 0) == []
    assert chosen((pin(0, 10),), -5) == []


def test_what_would_gain_nothing_stays() -> None:
    assert chosen((pin(0, 10, links=2), pin(1, 10)), 10) == [1]


def test_the_newest_never_goes() -> None:
    assert chosen((pin(0, 10), pin(1, 10)), 100, "c.1") == [0]


def spool(tmp_path: Path) -> Path:
    for k in range(3):
        files = tmp_path / "_ckptsync" / "pins" / f"c.{k}" / "files"
        files.mkdir(parents=True)
        (files / "a").write_bytes(b"x" * 1000)
        os.utime(files.parent, ns=(k, k))
    return tmp_path


def test_on_a_disk_with_room_all_stays(tmp_path: Path) -> None:
    assert room.make_room(spool(tmp_path), tmp_path / "c.2", 1000) == ()


def test_on_a_full_disk_all_but_the_newest_goes_out_of_sight_and_then_away(tmp_path: Path) -> None:
    output_dir = spool(tmp_path)
    given = room.make_room(output_dir, Path("c.2"), 10**18)  # no disk has room for such a save
    pins = output_dir / "_ckptsync" / "pins"
    assert [p.k for p in given] == [0, 1]
    assert [p.name for p in pins.glob("[!.]*")] == ["c.2"]
    room.remove(given)
    assert [p.name for p in pins.iterdir()] == ["c.2"]
