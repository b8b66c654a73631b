"""Pins: what rotation cannot take, whose they are, and how they stand to their source."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from ckptsync.errors import Incomplete
from ckptsync.spool.pins import Pin, claim, compare, drop, grow, harden, open_pin, pins, pulse, sweep, trim
from ckptsync.walk import Stat, walk


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoint-4"
    (root / "sub").mkdir(parents=True)
    (root / "a").write_bytes(b"aaa")
    (root / "sub" / "b").write_bytes(b"bb")
    return root


def pinned(source: Path, node: str = "n0") -> Pin:
    pin = open_pin(source.parent, source.name, 0, node)
    assert pin is not None
    assert grow(pin, source, [f.path for f in walk(source).files]) == ()
    return pins(source.parent)[0]


def test_a_pin_survives_rotation(source: Path) -> None:
    pinned(source)
    shutil.rmtree(source)
    (pin,) = pins(source.parent)
    assert [(f.path, f.size) for f in pin.files] == [("a", 3), ("sub/b", 2)]
    assert (pin.root / "sub" / "b").read_bytes() == b"bb"


def test_pinning_changes_nothing_in_the_checkpoint(source: Path) -> None:
    before = (source.stat().st_mtime_ns, (source / "sub").stat().st_mtime_ns, walk(source))
    pin = pinned(source)
    harden(pin)
    drop(pin)
    assert (source.stat().st_mtime_ns, (source / "sub").stat().st_mtime_ns, walk(source)) == before


def test_a_pin_grows_as_names_appear_and_growing_twice_is_growing_once(source: Path) -> None:
    pin = pinned(source)
    (source / "late").write_bytes(b"l")
    assert grow(pin, source, ["a", "late", "vanished", "sub/vanished", "gone/x"]) == ()
    assert [f.path for f in pins(source.parent)[0].files] == ["a", "late", "sub/b"]
    assert (pin.root / "late").stat().st_ino == (source / "late").stat().st_ino


def test_links_are_not_pinned(source: Path) -> None:
    pin = pinned(source)
    (source / "link").symlink_to("/etc/passwd")
    (source / "folder").symlink_to("/etc")
    grow(pin, source, ["link", "folder/passwd"])
    assert not os.path.lexists(pin.root / "link")
    assert not os.path.lexists(pin.root / "folder" / "passwd")


def test_a_pin_appears_with_its_owner_and_only_one_gets_it(source: Path) -> None:
    assert pinned(source, "n0").node == "n0"
    assert open_pin(source.parent, source.name, 0, "n1") is None
    assert [p.node for p in pins(source.parent)] == ["n0"]
    assert open_pin(source.parent, source.name, 1, "n1") is not None


def test_the_pin_of_a_dead_node_is_claimed_once_with_its_files(source: Path) -> None:
    pin = pinned(source)
    mine = claim(pin, "n1")
    assert mine is not None
    assert (mine.node, mine.files) == ("n1", pin.files)
    shutil.rmtree(pin.path)
    assert claim(pin, "n2") is None


def test_a_pulse_shows_without_touching_what_is_pinned(source: Path) -> None:
    pin = pinned(source)
    time.sleep(0.01)
    pulse(pin)
    (after,) = pins(source.parent)
    assert after.pulse > pin.pulse
    assert after.files == pin.files
    drop(pin)
    pulse(pin)


def test_a_deleted_spool_is_not_half_made_again(source: Path) -> None:
    pin = pinned(source)
    shutil.rmtree(source.parent / "_ckptsync")
    with pytest.raises(Incomplete):
        grow(pin, source, ["a"])
    assert pins(source.parent) == ()
    assert not (source.parent / "_ckptsync").exists()
    drop(pin)
    trim(pin, ["a"])


def test_what_a_killed_node_left_half_done_is_swept_and_others_are_let_be(source: Path) -> None:
    folder = source.parent / "_ckptsync" / "pins"
    for name in (".new-n0-checkpoint-4", ".gone-n0-checkpoint-4.0", ".new-n1-checkpoint-4", "checkpoint-5.0"):
        (folder / name / "files").mkdir(parents=True)
    sweep(source.parent, "n0")
    assert sorted(p.name for p in folder.iterdir()) == [".new-n1-checkpoint-4", "checkpoint-5.0"]
    assert pins(source.parent) == ()


def stat(path: str, inode: int, size: int = 1, mtime: int = 1) -> Stat:
    return Stat(path, size, mtime, inode, 0)


def test_a_comparison_puts_every_name_in_one_of_four() -> None:
    ours = [stat("same", 1), stat("grown", 2, size=1), stat("other", 3), stat("vanished", 4), stat("clone", 5, mtime=7)]
    theirs = [stat("same", 1), stat("grown", 2, size=9), stat("other", 9, mtime=2), stat("new", 6), stat("clone", 8, mtime=7)]
    relation = compare(ours, theirs)
    assert relation.same == ("clone", "grown", "same")
    assert (relation.changed, relation.new, relation.vanished) == (("other",), ("new",), ("vanished",))
