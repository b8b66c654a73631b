"""More output directories than may be watched at a time, and fewer threads than they want."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsync.service.watch import MOST, Watch, watch
from tests.support.waiting import until

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
def watching(runs: list[str], heard: list[str]) -> Iterator[Watch]:
    watch_ = watch(runs, heard.append)
    yield watch_
    watch_.close()


def test_of_many_those_are_watched_that_changed_last(runs: list[str], watching: Watch) -> None:
    assert watching.modes() == {
        **dict.fromkeys(runs[:MOST], "scanned"),
        **dict.fromkeys(runs[MOST:], "events"),
    }
    assert threading.active_count() < TASKS / 2, "the rest is for sending"


def test_one_in_which_something_happens_is_watched_from_the_next_refresh(
    runs: list[str], watching: Watch, heard: list[str]
) -> None:
    (Path(runs[0]) / "checkpoint-1").mkdir()
    watching.refresh()
    assert (watching.modes()[runs[0]], watching.modes()[runs[MOST]]) == ("events", "scanned")
    (Path(runs[0]) / "checkpoint-1" / "model.safetensors").write_bytes(b"x")
    assert until(lambda: runs[0] in heard)


def test_without_threads_nothing_is_watched_nothing_raised_and_nothing_left(
    tmp_path: Path, watching: Watch, heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service may have so many tasks, and a user: Python says RuntimeError then, of each thread
    that watchdog has for a directory.
    """
    before, path = threading.active_count(), tmp_path / "late"
    path.mkdir()
    for more in range(2):
        with monkeypatch.context() as patch:
            _allow(patch, before + more)
            late = watch([str(path)], heard.append)
            assert late.modes() == {str(path): "none"}
        assert until(lambda: threading.active_count() == before)
        late.refresh()
        assert late.modes() == {str(path): "events"}, "as soon as there are some again"
        (path / f"checkpoint-{more}").mkdir()
        assert until(lambda: str(path) in heard)
        heard.clear()
        late.close()


def _allow(patch: pytest.MonkeyPatch, most: int) -> None:
    real: Any = threading._start_new_thread  # type: ignore[attr-defined]

    def start(*args: Any) -> int:
        if threading.active_count() > most:  # the one that begins counts itself
            raise RuntimeError("can't start new thread")
        return int(real(*args))

    patch.setattr(threading, "_start_new_thread", start)
