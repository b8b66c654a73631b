"""What no link can hold is kept from rotation by an open file, and copied whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsync.spool.pins import Pin, create_pin, drop, list_pins
from ckptsync.walk import walk
from ckptsync.worker import pinning
from ckptsync.worker.options import RunDir
from ckptsync.worker.pinning import STILL, PinCopies, Pinner
from ckptsync.worker.scanner import Scan, list_and_pin_saves

MEMORY = Path("/dev/shm")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """An output directory whose spool is on another file system."""
    if not MEMORY.is_dir() or MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    with tempfile.TemporaryDirectory(dir=MEMORY) as elsewhere:
        (tmp_path / "_ckptsync").symlink_to(elsewhere)
        yield tmp_path


@pytest.fixture
def source(out: Path) -> Path:
    (out / "checkpoint-4" / "sub").mkdir(parents=True)
    for name in ("a", "sub/b", "c"):
        (out / "checkpoint-4" / name).write_bytes(name.encode() * 100)
    return out / "checkpoint-4"


class Looking:
    """A worker's looks, and its clock."""

    def __init__(self, out: Path) -> None:
        self.clock, self.out = Clock(), out
        self.copies = PinCopies(self.clock)
        self.seat = Pinner("n0", lambda *_: False, copies=self.copies)

    def after(self, seconds: float) -> Scan:
        self.clock.now += seconds
        scan = list_and_pin_saves(RunDir("run", self.out), self.seat)
        self.copies.wait()
        return scan

    def pinned(self) -> list[str]:
        return [f.path for p in list_pins(self.out) for f in p.files]


def descriptors(beneath: Path) -> int:
    """Of files there, also of such as have lost their names: what else a process has open, other
    tests may close.
    """
    links = [fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return sum(str(link).startswith(str(beneath)) for link in links)


def test_what_is_still_is_copied_with_its_time_and_then_pinned(out: Path, source: Path) -> None:
    before = descriptors(source)
    (source / "a").chmod(0o600)
    looking = Looking(out)
    scan = looking.after(0)
    assert (looking.pinned(), scan.saves[0].files.unpinned) == ([], ("a", "c", "sub/b"))
    looking.after(STILL)
    assert looking.pinned() == ["a", "c", "sub/b"]
    (local_save,) = looking.after(0).saves
    assert {f.name: f.stat().st_mode & 0o077 for f in list_pins(out)[0].root.iterdir()}["a"] == 0
    assert (local_save.files.unpinned, [(f.size, f.mtime) for f in local_save.files.stats]) == (
        (),
        [(f.size, f.mtime) for f in walk(source).files],
    )
    shutil.rmtree(source)
    (local_save,) = looking.after(0).saves
    assert (local_save.files.is_gone, sorted(local_save.files.by_path)) == (
        True,
        ["a", "c", "sub/b"],
    )
    assert descriptors(source) == before


def test_what_rotation_takes_before_it_is_copied_is_copied_whole(out: Path, source: Path) -> None:
    looking = Looking(out)
    looking.after(0)
    content = {f.path: (source / f.path).read_bytes() for f in walk(source).files}
    (source / "a").unlink()  # rotation, half way
    assert looking.after(0).saves == ()
    shutil.rmtree(source)
    assert looking.after(0).saves == ()
    (local_save,) = looking.after(0).saves
    assert {
        f.path: (local_save.files.by_path[f.path].root / f.path).read_bytes()
        for f in local_save.files.stats
    } == content
    assert local_save.files.is_gone


def test_what_grows_is_not_copied_until_it_is_still(out: Path, source: Path) -> None:
    looking = Looking(out)
    looking.after(0)
    for _ in range(3):
        with (source / "a").open("ab") as file:
            file.write(b"more")
        looking.after(STILL)
        assert "a" not in looking.pinned()
    again = b"a" * (source / "a").stat().st_size
    (out / "fresh").write_bytes(again)
    (out / "fresh").replace(source / "a")
    looking.after(0)
    assert "a" not in looking.pinned()
    looking.after(STILL)
    assert "a" in looking.pinned()
    assert (list_pins(out)[0].root / "a").read_bytes() == again


def test_a_save_in_place_of_a_copied_one_is_another_pin(out: Path, source: Path) -> None:
    looking = Looking(out)
    looking.after(0)
    looking.after(STILL)
    shutil.rmtree(source)
    source.mkdir()
    (source / "a").write_bytes(b"another save")
    looking.after(0)
    looking.after(STILL)
    assert [(p.k, [f.path for f in p.files]) for p in list_pins(out)] == [
        (0, ["a", "c", "sub/b"]),
        (1, ["a"]),
    ]


def test_a_pin_that_goes_takes_what_was_on_its_way_with_it(
    out: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_MOST", 2)
    before = descriptors(source)
    looking = Looking(out)
    looking.after(0)
    (pin,) = list_pins(out)
    assert descriptors(source) == before + 2
    drop(pin)
    shutil.rmtree(source)
    looking.after(0)
    assert descriptors(source) == before
    assert not pin.path.exists()


def test_what_cannot_be_copied_is_told_and_tried_again(out: Path, source: Path) -> None:
    looking = Looking(out)
    looking.after(0)
    (pin,) = list_pins(out)
    (pin.root / "a").mkdir(parents=True)
    looking.after(STILL)
    assert "not copied, rotation may delete it" in looking.after(0).notes[0]
    (pin.root / "a").rmdir()
    looking.after(0)
    assert (looking.pinned(), looking.after(0).notes) == (["a", "c", "sub/b"], ())
    assert walk(source).files


@pytest.mark.parametrize("happens", ["the pin is dropped", "the trainer writes it again"])
def test_a_copy_that_something_overtakes_is_none(out: Path, source: Path, happens: str) -> None:
    clock = Clock()
    copies = PinCopies(clock)
    pin = create_pin(out, source.name, 0, "n0")
    assert isinstance(pin, Pin)
    copies.keep_open(pin, source, walk(source).files, ["a"])
    is_dropped = happens == "the pin is dropped"
    if is_dropped:
        drop(pin)
    else:
        os.utime(source / "a", ns=(1, 1))
    clock.now += STILL
    copies.begin()
    copies.wait()
    assert (copies.problems(), pin.path.exists()) == ((), not is_dropped)
    assert not (pin.root / "a").exists()
    drop(pin)
    copies.close_dropped()
