"""Names of our own for a checkpoint's files, and what killed processes leave of them."""

from __future__ import annotations

import errno
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptsync.errors import Incomplete, StoreError
from ckptsync.spool.markers import PinNotes
from ckptsync.spool.pins import (
    Pin,
    adopt,
    claim,
    clean_abandoned,
    clean_own,
    compare,
    create_pin,
    drop,
    link_files,
    list_pins,
    mark_stored,
    publish,
    renew_ownership,
    replace_links,
    unlink_files,
    write_pin_notes,
)
from ckptsync.walk import Stat, walk
from tests.support.hook_pins import commit, pinned


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoint-4"
    (root / "sub").mkdir(parents=True)
    (root / "a").write_bytes(b"aaa")
    (root / "sub" / "b").write_bytes(b"bb")
    return root


def test_a_file_that_changes_while_it_is_cloned_stays_a_link(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(origin: int, copy: int) -> None:
        os.write(copy, os.pread(origin, 9, 0))
        (source / "a").write_bytes(b"longer")

    pin = pinned(source)
    monkeypatch.setattr("ckptsync.spool.safe_files.clone", clone)
    replace_links(pin)
    assert (pin.root / "a").samefile(source / "a")
    assert not (pin.root / "sub/b").samefile(source / "sub/b")
    assert (pin.root / "sub/b").stat().st_mtime_ns == (source / "sub/b").stat().st_mtime_ns


def test_links_are_not_pinned(source: Path) -> None:
    pin = pinned(source)
    (source / "link").symlink_to("/etc/passwd")
    (source / "folder").symlink_to("/etc")
    link_files(pin, source, ["link", "folder/passwd"])
    assert not os.path.lexists(pin.root / "link")
    assert not os.path.lexists(pin.root / "folder" / "passwd")


def test_a_pin_appears_with_its_owner_and_only_one_gets_it(source: Path) -> None:
    assert pinned(source, "n0").node == "n0"
    assert create_pin(source.parent, source.name, 0, "n1") is None
    assert [p.node for p in list_pins(source.parent)] == ["n0"]
    assert create_pin(source.parent, source.name, 1, "n1") is not None


def test_the_pin_of_a_dead_node_is_claimed_once_with_its_files(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = pinned(source)
    mine = claim(pin, "n1")
    assert mine is not None
    assert (mine.node, mine.files) == ("n1", pin.files)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr("ckptsync.spool.pins.write_json", full)
        with pytest.raises(StoreError):
            claim(mine, "n2")
    assert list_pins(source.parent) == (mine,), "it is not out of sight"
    shutil.rmtree(pin.path)
    assert claim(pin, "n2") is None


def test_a_pulse_shows_without_touching_what_is_pinned(source: Path) -> None:
    pin = pinned(source)
    time.sleep(0.01)
    renew_ownership(pin)
    (after,) = list_pins(source.parent)
    assert after.renewed > pin.renewed
    assert after.files == pin.files
    drop(pin)
    renew_ownership(pin)


def test_a_deleted_spool_is_not_half_made_again(source: Path) -> None:
    pin = pinned(source)
    shutil.rmtree(source.parent / "_ckptsync")
    with pytest.raises(Incomplete):
        link_files(pin, source, ["a"])
    assert list_pins(source.parent) == ()
    assert not (source.parent / "_ckptsync").exists()
    drop(pin)
    unlink_files(pin, ["a"])


def test_a_pin_of_the_hook_is_adopted_by_the_first_worker_of_any_name(source: Path) -> None:
    commit(source)
    (pin,) = list_pins(source.parent)
    assert (pin.node, pin.is_committed, pin.commit and pin.commit.save) == ("", True, "save")
    mine = adopt(pin, "some-other-name")
    assert mine is not None
    assert (mine.node, mine.files, mine.is_committed) == ("some-other-name", pin.files, True)
    assert adopt(pin, "n1") is None
    assert [p.node for p in list_pins(source.parent)] == ["some-other-name"]
    assert sorted(p.name for p in pin.path.iterdir()) == ["commit.json", "files", "owner.json"]
    drop(mine)
    assert adopt(pin, "n1") is None


def test_of_many_workers_one_adopts_a_pin(source: Path) -> None:
    commit(source)
    (pin,) = list_pins(source.parent)
    with ThreadPoolExecutor(8) as pool:
        won = [mine for mine in pool.map(lambda n: adopt(pin, f"n{n}"), range(8)) if mine]
    assert len(won) == 1
    assert [p.node for p in list_pins(source.parent)] == [won[0].node]


def test_an_owner_that_a_crash_left_torn_is_nobody(source: Path) -> None:
    pin = pinned(source)
    (pin.path / "owner.json").write_text("")
    (lost,) = list_pins(source.parent)
    assert lost.node == ""
    mine = adopt(lost, "n1")
    assert mine is not None
    assert (mine.node, mine.files) == ("n1", pin.files)


def test_without_links_a_pin_is_adopted_by_a_rename(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(source)
    (pin,) = list_pins(source.parent)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    mine = adopt(pin, "n0")
    assert mine is not None
    assert (mine.node, mine.files, mine.is_committed) == ("n0", pin.files, True)
    assert sorted(p.name for p in pin.path.iterdir()) == ["commit.json", "files", "owner.json"]
    (source / "late").touch()
    assert link_files(mine, source, ["late"]) == ("late",), "it is to be copied"


def test_a_commit_is_void_once_a_file_is_overwritten_in_location(source: Path) -> None:
    commit(source)
    (source / "a").write_bytes(b"other")
    (pin,) = list_pins(source.parent)
    assert pin.commit is not None
    assert not pin.is_committed


def test_a_pin_is_not_stored_any_more_once_a_file_is_overwritten_in_place(source: Path) -> None:
    """`drain` said that the machine may be shut down."""
    mark_stored(pinned(source))
    assert list_pins(source.parent)[0].stored
    (source / "a").write_bytes(b"AAA")
    (pin,) = list_pins(source.parent)
    assert not pin.stored
    mark_stored(pin)
    assert list_pins(source.parent)[0].stored


def test_the_hooks_pin_takes_the_next_number_whatever_stands_there(source: Path) -> None:
    pinned(source)
    assert commit(source).name == "checkpoint-4.1"
    assert commit(source).name == "checkpoint-4.2"
    with pytest.raises(Incomplete):
        publish(source.parent, source.name, source.parent / "_ckptsync" / "pins" / ".never-made")


def test_what_was_said_once_of_a_pin_stays(source: Path) -> None:
    pin = pinned(source)
    write_pin_notes(pin, PinNotes(finished=5, save="a"))
    write_pin_notes(pin, PinNotes(stable=2, finished=9, sending=7, save="b"))
    write_pin_notes(pin, PinNotes(stable=1))
    mark_stored(pin)
    (after,) = list_pins(source.parent)
    assert (after.notes, after.stored) == (PinNotes(1, 5, 7, "a"), True)
    drop(pin)
    with pytest.raises(Incomplete):
        write_pin_notes(pin, PinNotes(finished=5))
    with pytest.raises(Incomplete):
        mark_stored(pin)
    assert not pin.path.exists()


def stat(path: str, inode: int, size: int = 1, mtime: int = 1) -> Stat:
    return Stat(path, size, mtime, inode, 0)


def test_a_comparison_puts_every_name_in_one_of_four() -> None:
    ours = [
        stat("same", 1),
        stat("grown", 2, size=1),
        stat("other", 3),
        stat("vanished", 4),
        stat("clone", 5, mtime=7),
    ]
    theirs = [
        stat("same", 1),
        stat("grown", 2, size=9),
        stat("other", 9, mtime=2),
        stat("new", 6),
        stat("clone", 8, mtime=7),
    ]
    relation = compare(ours, theirs)
    assert relation.same == ("clone", "grown", "same")
    assert (relation.changed, relation.new, relation.vanished) == (
        ("other",),
        ("new",),
        ("vanished",),
    )


@pytest.mark.parametrize("by", ["a worker", "the hook", "the hook, adopted"])
def test_what_holds_a_dropped_pin_changes_no_later_one_at_its_path(source: Path, by: str) -> None:
    """The queue's thread holds a pin for hours; a scan drops it and pins the next save."""

    def pin_again(content: bytes) -> Pin:
        (source / "a").unlink()
        (source / "a").write_bytes(content)
        if by == "a worker":
            return pinned(source)
        commit(source)
        (pin,) = list_pins(source.parent)
        return adopt(pin, "n0") or pin if by.endswith("adopted") else pin

    old = pin_again(b"old")
    drop(old)
    new = pin_again(b"newer")
    assert new.path == old.path
    with pytest.raises(Incomplete):
        mark_stored(old)
    with pytest.raises(Incomplete):
        write_pin_notes(old, PinNotes(save="old"))
    drop(old)
    assert list_pins(source.parent) == (new,)
    mark_stored(new)
    write_pin_notes(new, PinNotes(save="new"))
    (marked,) = list_pins(source.parent)
    assert marked.stored
    assert marked.notes.save == "new"
    drop(new)
    assert list_pins(source.parent) == ()


@pytest.mark.parametrize("change", ["grow", "trim"])
def test_what_was_said_of_a_pins_files_is_not_said_of_others(tmp_path: Path, change: str) -> None:
    source = tmp_path / "checkpoint-4"
    source.mkdir()
    (source / "a").write_bytes(b"a")
    pin = create_pin(tmp_path, source.name, 0, "n0")
    assert pin
    link_files(pin, source, [f.path for f in walk(source).files])
    write_pin_notes(pin, PinNotes(stable=1, finished=2))
    (pin,) = list_pins(tmp_path)
    mark_stored(pin)
    (before,) = list_pins(tmp_path)
    assert (before.notes.stable, before.stored) == (1, True)
    (source / "late").write_bytes(b"l")
    link_files(before, source, ["late"]) if change == "grow" else unlink_files(before, ["a"])
    (after,) = list_pins(tmp_path)
    assert (after.notes, after.stored) == (PinNotes(), False)


LATER = 7 * 3600.0


def left(out: Path) -> list[str]:
    return sorted(p.name for p in (out / "_ckptsync" / "pins").iterdir())


def test_what_a_killed_node_left_goes_and_others_only_when_long_dead(tmp_path: Path) -> None:
    names = [
        ".gone-hook-7-checkpoint-4.0",
        ".gone-n0-checkpoint-4.0",
        ".new-hook-7.0a-checkpoint-4",
        ".new-n1-checkpoint-4",
    ]
    for name in (*names, ".new-n0-checkpoint-4", "checkpoint-5.0"):
        (tmp_path / "_ckptsync" / "pins" / name / "files").mkdir(parents=True)
    clean_own(tmp_path, "n0")
    assert left(tmp_path) == [
        ".gone-hook-7-checkpoint-4.0",
        ".new-hook-7.0a-checkpoint-4",
        ".new-n1-checkpoint-4",
        "checkpoint-5.0",
    ]
    clean_abandoned(tmp_path, time.time() + 5 * 3600)
    assert len(left(tmp_path)) == 4
    clean_abandoned(tmp_path, time.time() + LATER)
    assert left(tmp_path) == ["checkpoint-5.0"]


def test_what_somebody_still_copies_into_is_let_be(tmp_path: Path) -> None:
    growing = tmp_path / "_ckptsync" / "pins" / ".new-hook-7.0a-checkpoint-4" / "files" / "a"
    growing.parent.mkdir(parents=True)
    growing.touch()
    os.utime(growing, (time.time() + LATER,) * 2)
    clean_abandoned(tmp_path, time.time() + LATER)
    assert growing.exists()


def test_a_claim_that_was_cut_short_is_finished_for_its_files_may_be_the_last(source: Path) -> None:
    pin = pinned(source)
    (pin.path / ".fresh-0123").touch()  # a copy that was cut short
    pin.path.rename(pin.path.with_name(".claim-n1@checkpoint-4.0"))
    shutil.rmtree(source)
    clean_own(source.parent, "n1")
    assert not (pin.path / ".fresh-0123").exists()
    assert [(p.node, p.files) for p in list_pins(source.parent)] == [("n1", pin.files)]


def test_the_claim_of_a_node_that_never_came_back_is_anybodys_to_claim_again(source: Path) -> None:
    pin = pinned(source)
    for each in (pin.path, *pin.path.rglob("*")):
        os.utime(each, (1, 1))  # it was pinned long ago
    (pin,) = list_pins(source.parent)
    pin.path.rename(pin.path.with_name(".claim-n-1@checkpoint-4.0"))
    shutil.rmtree(source)
    clean_own(source.parent, "n2")
    assert left(source.parent) == [".claim-n-1@checkpoint-4.0"], "he may be about to finish it"
    clean_abandoned(source.parent, time.time() + LATER)
    (back,) = list_pins(source.parent)
    assert (back.checkpoint, back.node, back.files) == ("checkpoint-4", "n0", pin.files)
    mine = claim(back, "n2")
    assert mine is not None
    assert (mine.node, mine.files) == ("n2", pin.files)


def test_what_cannot_be_removed_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(2):
        (tmp_path / "_ckptsync" / "pins" / f".new-n{n}-checkpoint-4").mkdir(parents=True)

    def mine(path: Path) -> None:
        if "-n0-" in path.name:
            raise PermissionError(errno.EACCES, "root's")
        path.rmdir()

    monkeypatch.setattr("ckptsync.spool.pins.remove", mine)
    clean_abandoned(tmp_path, time.time() + LATER)
    assert left(tmp_path) == [".new-n0-checkpoint-4"]
