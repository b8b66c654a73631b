from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import Incomplete, StoreError
from ckptsync.hooks import pin_checkpoint as pinning
from ckptsync.hooks.pin_checkpoint import pin_checkpoint
from ckptsync.spool.markers import Commit
from ckptsync.spool.pins import Pin
from ckptsync.walk import Listing, Stat, walk
from tests.hooks.training import Said, commits, other_disk
from tests.support.stand_in_programs import ROOT, ran

__all__ = ["other_disk"]  # a fixture


LONG = 64 * 1024 * 1024  # bytes: its copy takes longer than the test's next line
COMMIT = Commit("t", "s", "checkpoint-1", 1, 1, (0,), "h", "transformers 5", 1.0, {})


def source(output_dir: Path, **files: str) -> Path:
    folder = output_dir / "checkpoint-1"
    folder.mkdir(parents=True)
    (output_dir / "_ckptsync" / "pins").mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def hidden(output_dir: Path) -> list[str]:
    return [p.name for p in (output_dir / "_ckptsync" / "pins").glob(".*")]


def copied() -> None:
    for thread in threading.enumerate():
        if thread.name in ("ckptsync-copy", "ckptsync-remove"):
            thread.join()


def test_a_pin_holds_every_file_and_says_which(tmp_path: Path) -> None:
    said = Said()
    pin_checkpoint(source(tmp_path, a="1", b="22"), tmp_path, COMMIT, said)
    commit = commits(tmp_path)["checkpoint-1.0"]
    root = tmp_path / "_ckptsync" / "pins" / "checkpoint-1.0" / "files"
    assert commit.files == {f.path: (f.size, f.mtime) for f in walk(root).files}
    assert [f.size for f in walk(root).files] == [1, 2]
    assert said == []


def test_a_pin_has_the_added_files_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    it = source(tmp_path, **{"config.json": "its own"})
    added = tmp_path / "_ckptsync" / "added" / "t"
    added.mkdir(parents=True)
    (added / "config.json").write_text("ours")
    (added / "tokenizer.json").write_text("ours")
    pin_checkpoint(it, tmp_path, COMMIT, Said(), added=added)
    pin = tmp_path / "_ckptsync" / "pins" / "checkpoint-1.0"
    assert (pin / "files" / "config.json").read_text() == "its own"
    assert [p.name for p in (pin / "added").iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("has_own", [True, False])
def test_a_pin_has_the_configuration_of_adapters_that_have_no_files_of_their_own(
    tmp_path: Path, *, has_own: bool
) -> None:
    it = source(tmp_path, a="1")
    added = tmp_path / "_ckptsync" / "added" / "t"
    for folder in (added, added / "policy", *([it / "policy"] if has_own else [])):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    pin_checkpoint(it, tmp_path, COMMIT, Said(), added=added)
    pinned = tmp_path / "_ckptsync" / "pins" / "checkpoint-1.0" / "added"
    names_found = {p.relative_to(pinned).as_posix() for p in pinned.rglob("*.json")}
    own = {"adapter_config.json", "policy/adapter_config.json"}
    assert names_found == (set() if has_own else own)


def test_what_the_sentinel_calls_incomplete_is_not_pinned(tmp_path: Path) -> None:
    it = source(tmp_path, **{"a": "1", pinning.SENTINEL: ""})
    with pytest.raises(Incomplete, match="still being written"):
        pin_checkpoint(it, tmp_path, COMMIT, Said())
    assert commits(tmp_path) == {}


def test_a_checkpoint_that_rotation_takes_meanwhile_is_not_called_whole(tmp_path: Path) -> None:
    it = source(tmp_path, a="1", b="2")
    listings: list[Listing] = []

    def look(path: Path) -> Listing:
        if listings:
            (path / "b").unlink()  # it was linked already; another may have gone before
        listings.append(walk(path))
        return listings[-1]

    with pytest.raises(Incomplete, match="changed while"):
        pin_checkpoint(it, tmp_path, COMMIT, Said(), list_files=look)
    assert commits(tmp_path) == {}
    assert hidden(tmp_path) == []


def test_on_another_file_system_a_pin_appears_once_copied(tmp_path: Path, other_disk: Path) -> None:
    (tmp_path / "_ckptsync").symlink_to(other_disk)
    it = source(tmp_path, a="1")
    (it / "a").chmod(0o600)
    pin_checkpoint(it, tmp_path, COMMIT, Said())
    copied()
    pin = tmp_path / "_ckptsync" / "pins" / "checkpoint-1.0"
    assert (pin / "files" / "a").stat().st_mode & 0o777 == 0o600
    assert not (pin / "files" / "a").samefile(it / "a")
    mtime = (it / "a").stat().st_mtime_ns
    assert (pin / "files" / "a").stat().st_mtime_ns == mtime
    assert commits(tmp_path)[pin.name].files["a"][1] == mtime
    assert hidden(tmp_path) == []


def test_links_that_cannot_become_a_pin_hold_no_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = source(tmp_path, a="1")

    def full(*_: object) -> Path:
        raise StoreError("no space left on device")

    monkeypatch.setattr("ckptsync.spool.pins.publish", full)
    with pytest.raises(StoreError):
        pin_checkpoint(it, tmp_path, COMMIT, Said())
    assert ((it / "a").stat().st_nlink, hidden(tmp_path)) == (1, [])


@pytest.mark.parametrize("free", [0, 1])
def test_a_copy_that_the_trainer_overtakes_or_that_has_no_room_is_no_pin(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr("ckptsync.spool.pins.free_bytes", lambda _: free)
    (tmp_path / "_ckptsync").symlink_to(other_disk)
    it, said = source(tmp_path, a="1"), Said()
    before = walk(it)
    os.utime(it / "a", ns=(1, 1))
    pin_checkpoint(it, tmp_path, COMMIT, said, list_files=lambda _: before)
    copied()
    assert commits(tmp_path) == {}
    assert hidden(tmp_path) == []
    assert ("not copied" if free else "not pinned: no room in the spool") in said[0]


@pytest.mark.parametrize("is_written", [False, True])
def test_on_another_file_system_bytes_outlive_rotation_and_a_writer_is_noticed(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch, *, is_written: bool
) -> None:
    """The copy begins when rotation has deleted one file, or a writer has truncated another."""
    (tmp_path / "_ckptsync").symlink_to(other_disk)
    it, said = source(tmp_path, a="a" * 100_000, b="b"), Said()
    begin: list[Callable[[], object]] = []
    monkeypatch.setattr(pinning, "_in_thread", lambda work, _: begin.append(work))
    pin_checkpoint(it, tmp_path, COMMIT, said)
    (it / "a").unlink()
    if is_written:
        os.truncate(it / "b", 0)
    before = len(list(Path("/proc/self/fd").iterdir()))
    begin[0]()
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 2
    files = other_disk.glob("pins/checkpoint-1.0/files/*")
    sizes = {} if is_written else {"a": 100_000, "b": 1}
    assert {path.name: path.stat().st_size for path in files} == sizes
    assert bool(said) == is_written


@pytest.mark.parametrize("is_copied", [False, True])
def test_without_room_older_saves_are_dropped(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch, *, is_copied: bool
) -> None:
    if is_copied:
        (tmp_path / "_ckptsync").symlink_to(other_disk)
    it, said = source(tmp_path, a="1"), Said()
    for _ in range(2):
        pin_checkpoint(it, tmp_path, COMMIT, said)
        copied()
        (it / "a").unlink()
        (it / "a").write_text("2")
    monkeypatch.setattr("ckptsync.hooks.pin_checkpoint.FLOOR", 1e18)
    pin_checkpoint(it, tmp_path, COMMIT, said)
    copied()
    # without a pin the first number is free again
    assert set(commits(tmp_path)) == {"checkpoint-1.0" if is_copied else "checkpoint-1.2"}
    assert [("NOT yet in the store" in s) for s in said] == [True, True]
    assert hidden(tmp_path) == []


def test_two_saves_of_one_name_are_both_copied(tmp_path: Path, other_disk: Path) -> None:
    (tmp_path / "_ckptsync").symlink_to(other_disk)
    it, said = source(tmp_path), Said()
    for size in (LONG, 5):
        with (tmp_path / "fresh").open("wb") as fresh:
            fresh.truncate(size)
        (tmp_path / "fresh").replace(it / "a")  # as safetensors writes
        pin_checkpoint(it, tmp_path, COMMIT, said)
    copied()
    pins = tmp_path / "_ckptsync" / "pins"
    assert sorted(p.stat().st_size for p in pins.glob("checkpoint-1.*/files/a")) == [5, LONG], said
    assert hidden(tmp_path) == []


AT_EXIT = """
import atexit, sys
from pathlib import Path
from tests.hooks.training import Said, commits
from tests.hooks.test_pin_checkpoint import COMMIT, LONG, pin_checkpoint, source
output_dir, spool = map(Path, sys.argv[1:])
(output_dir / "_ckptsync").symlink_to(spool)
it = source(output_dir, a="1")
(it / "a").open("wb").truncate(LONG)
atexit.register(lambda: print(*commits(output_dir)))
atexit.register(pin_checkpoint, it, output_dir, COMMIT, print)
"""


def test_a_copy_is_made_before_the_interpreter_is_gone(tmp_path: Path, other_disk: Path) -> None:
    """It waits for threads before that, and later for none."""
    done = ran("-c", AT_EXIT, str(tmp_path), str(other_disk), cwd=ROOT)
    assert (done.stdout, done.stderr) == ("checkpoint-1.0\n", "")


KEPT = Commit("t", "s", "c", 1, 1, (0,), "h", "", 1.0, {})


def kept(
    k: int, size: int, *, links: int = 1, at: float | None = None, stored: bool = False
) -> Pin:
    file = Stat("a", size, 1, 1, 1, links=links)
    commit = replace(KEPT, at=at) if at is not None else None
    return Pin("c", k, "", k * 10**9, Path(f"/pins/c.{k}"), (file,), commit=commit, stored=stored)


def chosen(found: tuple[Pin, ...], wanted: int, newest: str = "none") -> list[int]:
    return [p.k for p in pinning.choose_pins_to_drop(found, Path("/pins", newest), wanted)]


def test_what_is_stored_goes_first_and_then_the_oldest_but_never_the_newest() -> None:
    found = (*(kept(n, 10, at=at) for n, at in enumerate((5.0, 2.0))), kept(3, 10))
    found += (kept(2, 10, at=9.0, stored=True),)
    assert chosen(found, 40) == [2, 1, 3, 0]
    assert chosen(found, 11) == [2, 1]
    assert chosen(found, 1) == [2]
    assert chosen((kept(0, 10, links=2), kept(1, 10)), 10) == [1], "the other gains nothing"
    assert chosen((kept(0, 10), kept(1, 10)), 100, "c.1") == [0]
