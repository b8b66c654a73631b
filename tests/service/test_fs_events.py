"""Hints of what was written below directories: by events, and by polling."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from watchdog.observers.api import BaseObserver, EventEmitter

from ckptsync.mounts import find_mount, is_blind
from ckptsync.service import fs_events as module
from ckptsync.service.directory_changes import directory_states
from ckptsync.service.fs_events import MOST, Watch
from tests.support.waiting import until


class Ear:
    """Counts hints, and waits for them."""

    def __init__(self) -> None:
        self.count, self.path = 0, ""
        self._heard = threading.Condition()

    def __call__(self, path: str = "") -> None:
        with self._heard:
            self.count += 1
            self.path = path
            self._heard.notify_all()

    def hears(self, change: Callable[[], object], within: float = 60.0) -> bool:
        with self._heard:
            before = self.count
        change()
        with self._heard:
            return self._heard.wait_for(lambda: self.count > before, within)

    def settle(self) -> None:
        """Wait until hints of what was done before have come."""
        while self.hears(lambda: None, 1.0):
            pass


@pytest.fixture
def ear() -> Ear:
    return Ear()


@pytest.fixture
def watching(ear: Ear) -> Iterator[Callable[[Path], Watch]]:
    made: list[Watch] = []

    def start(path: Path) -> Watch:
        made.append(Watch([str(path)], ear, poll_s=1))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("nfs nfs4 cifs smb3 9p fuse.sshfs fuse lustre", True),
        ("ext4 xfs btrfs zfs tmpfs overlay fusectl f2fs", False),
    ],
)
def test_inotify_is_blind_where_other_machines_write(kinds: str, *, expected: bool) -> None:
    assert {is_blind(kind) for kind in kinds.split()} == {expected}
    assert not is_blind(find_mount([], "/a").kind), "where nothing is known, events are believed"


def test_new_files_renames_and_finished_writes_at_any_depth_hint(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch]
) -> None:
    assert watching(tmp_path).modes() == {str(tmp_path): "events"}
    assert ear.hears((tmp_path / "checkpoint-1").mkdir)
    ear.settle()
    assert ear.hears(lambda: (tmp_path / "checkpoint-1/.tmpabcdef").write_bytes(b"x"))
    ear.settle()
    model = tmp_path / "checkpoint-1/model.safetensors"
    assert ear.hears(lambda: (tmp_path / "checkpoint-1/.tmpabcdef").rename(model))
    ear.settle()
    assert ear.hears(lambda: model.write_bytes(b"overwritten in place"))


def test_a_long_write_does_not_hint_at_every_piece(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch]
) -> None:
    watching(tmp_path)
    made: list[FileIO] = []
    assert ear.hears(lambda: made.append((tmp_path / "big").open("wb", buffering=0)))
    [file] = made
    ear.settle()
    before = ear.count
    for _ in range(50):
        file.write(b"x" * 1000)
    ear.settle()
    assert ear.count < before + 5, "those of its creation may be late"
    assert ear.hears(file.close)


def test_a_path_that_comes_later_is_watched_from_the_next_refresh(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch]
) -> None:
    path = tmp_path / "runs" / "out"
    found = watching(path)
    assert found.modes() == {str(path): "waiting"}
    path.mkdir(parents=True)
    found.refresh()
    assert found.modes() == {str(path): "events"}
    ear.settle()
    assert ear.hears(lambda: (path / "a").write_bytes(b"x"))


@pytest.mark.parametrize("inode", ["another", "the same"])
def test_a_path_deleted_and_made_again_is_watched_again(
    tmp_path: Path,
    ear: Ear,
    watching: Callable[[Path], Watch],
    inode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if inode == "the same":
        states = directory_states
        monkeypatch.setattr(
            module,
            "directory_states",
            lambda paths: tuple(state and (*state[:-1], 7) for state in states(paths)),
        )
    path = tmp_path / "out"
    path.mkdir()
    found = watching(path)
    path.rmdir()
    (tmp_path / "takes the inode").mkdir()
    path.mkdir()

    def is_heard() -> bool:
        found.refresh()
        return ear.hears(lambda: (path / "a").write_bytes(b"x"), 1.0)

    assert until(is_heard)
    path.joinpath("a").unlink()
    path.rmdir()
    found.refresh()
    assert found.modes() == {str(path): "waiting"}


def test_a_path_through_a_link_is_watched_where_it_leads(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch]
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    watching(tmp_path / "link")
    assert ear.hears(lambda: (tmp_path / "real/a").write_bytes(b"x"))


def test_where_inotify_is_blind_a_poll_hints(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table").write_text(f"1 0 0:1 / {tmp_path} rw - nfs4 server:/ rw\n")
    monkeypatch.setattr("ckptsync.mounts.TABLE", str(tmp_path / "table"))
    (tmp_path / "loop").symlink_to("/")
    assert watching(tmp_path).modes() == {str(tmp_path): "polling"}
    assert ear.hears(lambda: (tmp_path / "a").write_bytes(b"x"))
    assert ear.hears(lambda: (tmp_path / "a").write_bytes(b"overwritten"))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOSPC])
def test_at_inotifys_limits_a_poll_hints(
    tmp_path: Path,
    ear: Ear,
    watching: Callable[[Path], Watch],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    class AtLimit(BaseObserver):
        def __init__(self) -> None:
            super().__init__(EventEmitter)

        def start(self) -> None:
            raise OSError(code, "inotify limit reached")

    monkeypatch.setattr(module, "Observer", AtLimit)
    assert watching(tmp_path).modes() == {str(tmp_path): "polling"}
    assert ear.hears(lambda: (tmp_path / "a").write_bytes(b"x"))


def test_nothing_is_heard_after_closing_and_closing_twice_is_fine(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch]
) -> None:
    found = watching(tmp_path)
    threads = threading.active_count()
    found.close()
    found.close()
    assert threading.active_count() < threads
    assert found.modes() == {str(tmp_path): "none"}
    assert not ear.hears(lambda: (tmp_path / "a").write_bytes(b"x"), 0.5)


TASKS = 256  # systemd/ckptsync-worker@.service


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    made = []
    for n in range(2 * MOST):
        path = tmp_path / f"run-{n}"
        path.mkdir()
        os.utime(path, (1000 + n, 1000 + n))
        made.append(str(path))
    return made


@pytest.fixture
def heard() -> list[str]:
    return []


@pytest.fixture
def many(runs: list[str], heard: list[str]) -> Iterator[Watch]:
    found = Watch(runs, heard.append)
    yield found
    found.close()


def test_of_many_those_are_watched_that_changed_last(runs: list[str], many: Watch) -> None:
    assert many.modes() == {
        **dict.fromkeys(runs[:MOST], "scanned"),
        **dict.fromkeys(runs[MOST:], "events"),
    }
    assert threading.active_count() < TASKS / 2, "the rest is for sending"


def test_one_in_which_something_happens_is_watched_from_the_next_refresh(
    runs: list[str], many: Watch, heard: list[str]
) -> None:
    (Path(runs[0]) / "checkpoint-1").mkdir()
    many.refresh()
    assert (many.modes()[runs[0]], many.modes()[runs[MOST]]) == ("events", "scanned")
    (Path(runs[0]) / "checkpoint-1" / "model.safetensors").write_bytes(b"x")
    assert until(lambda: runs[0] in heard)


def test_without_threads_nothing_is_watched_nothing_raised_and_nothing_left(
    tmp_path: Path, many: Watch, heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service may have so many tasks, and a user: Python says RuntimeError then, of each thread
    that watchdog has for a directory.
    """
    before, path = {*threading.enumerate()}, tmp_path / "late"
    path.mkdir()
    for more in range(2):
        with monkeypatch.context() as patch:
            _allow(patch, more)
            late = Watch([str(path)], heard.append)
            assert late.modes() == {str(path): "none"}
        assert until(lambda: before.issuperset(threading.enumerate()))
        late.refresh()
        assert late.modes() == {str(path): "events"}, "as soon as there are some again"
        (path / f"checkpoint-{more}").mkdir()
        assert until(lambda: str(path) in heard)
        heard.clear()
        late.close()


def _allow(patch: pytest.MonkeyPatch, most: int) -> None:
    """Let so many threads begin from now on: how many there are changes as others end."""
    real: Any = threading._start_new_thread  # type: ignore[attr-defined]
    begun = itertools.count()

    def start(*args: Any) -> int:
        if next(begun) >= most:
            raise RuntimeError("can't start new thread")
        return int(real(*args))

    patch.setattr(threading, "_start_new_thread", start)
