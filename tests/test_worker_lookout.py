"""Looking again and again: what is due and when, what is remembered beside pins, and nothing that asks the store."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptsync.spool import pins as spool
from ckptsync.spool.marks import Commit, write_mark
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker import lookout as module
from ckptsync.worker.looking import Look, Seat, look_at
from ckptsync.worker.lookout import Lookout
from ckptsync.worker.observed import Rule
from ckptsync.worker.options import RunDir
from ckptsync.worker.resting import was_at_rest
from ckptsync.worker.watched import Asked
from tests.test_worker_push import ONE, T, lay
from tests.test_worker_tick import EIGHT, worker


def lookout(out: Path, *, done: bool = False) -> Lookout:
    seat = Seat("n0", lambda *_: (), lambda *_: False)
    return Lookout([RunDir("run", out)], seat, Rule(), Asked(lambda _: done, lambda _: False))


def commit(out: Path, *, trainer: str = "transformers 5.2.0", added: dict[str, bytes] | None = None) -> None:
    """What the hook leaves of a checkpoint: a pin with its word in it, and nobody's yet."""
    fresh = out / "_ckptsync" / "pins" / ".new-hook"
    shutil.copytree(out / "checkpoint-4", fresh / "files", copy_function=os.link)
    files = {str(p.relative_to(fresh / "files")): p.stat() for p in (fresh / "files").rglob("*") if p.is_file()}
    stats = {path: (s.st_size, s.st_mtime_ns) for path, s in files.items()}
    write_mark(fresh / "commit.json", Commit("t", "5a5e", "checkpoint-4", 4, 1, (0,), "h", trainer, 1.0, stats))
    for name, content in (added or {}).items():
        (fresh / "added").mkdir(exist_ok=True)
        (fresh / "added" / name).write_bytes(content)
    spool.publish(out, "checkpoint-4", fresh)


def test_due_counts_down_from_look_to_look_and_stays_nothing_once_it_was_tried(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    its = lookout(tmp_path)
    assert [its.look(now).due for now in (100.0, 103.0, 109.0, 110.0)] == [10.0, 7.0, 1.0, 0.0]
    assert its.due(110.5) == 0.0
    (one,) = its.watched()
    assert (one.found.finished, one.first) == (True, 100.0)
    its.tried(one)
    assert (its.due(111.0), its.look(112.0).due) == (None, None)
    lay(tmp_path, {"y": b"more"}, 1.0)
    assert its.look(113.0).due == 60.0  # newer than trainer_state.json


def test_who_had_to_wait_for_anothers_look_knows_no_earlier_time(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    its = lookout(tmp_path)
    assert [its.look(now).due for now in (100.0, 99.0, 109.5)] == [10.0, 10.0, 0.5]


def test_what_may_never_be_whole_is_due_ever_more_seldom(tmp_path: Path) -> None:
    lay(tmp_path, {"model.safetensors": b"torn"})
    its = lookout(tmp_path)
    assert [its.look(now).due for now in (0.0, 50.0, 1000.0)] == [10.0, 10.0, 100.0]


def test_what_is_refused_and_does_not_change_is_said_and_what_is_on_its_way_is_not(tmp_path: Path) -> None:
    lay(tmp_path, {"model.safetensors": b"torn"})
    its = lookout(tmp_path)
    told = ("run/checkpoint-4: not taken: model.safetensors does not end as its format does: torn, or still being written",)
    assert [its.look(now).notes for now in (0.0, 59.0, 60.0, 1e6)] == [(), (), told, told]
    lay(tmp_path, {"model.safetensors": b"more"}, 1.0)
    assert its.look(1e6 + 1).notes == ()
    lay(tmp_path, ONE, 2.0)
    assert [its.look(1e6 + after).notes for after in (2, 61, 63, 1000)] == [(), (), told, told]
    shutil.rmtree(tmp_path / "checkpoint-4")
    assert its.look(1e6 + 2000).notes == ()  # that is missed, which is said elsewhere


def test_what_is_known_to_be_done_is_not_judged_and_never_due(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    its = lookout(tmp_path, done=True)
    assert [its.look(now).due for now in (0.0, 1000.0)] == [None, None]
    assert its.watched()[0].evidence is None


def test_what_the_hook_committed_is_due_at_once(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    commit(tmp_path)
    assert lookout(tmp_path).look(0.0).due == 0.0


def test_what_was_seen_at_rest_is_remembered_for_whoever_comes_after_and_for_the_time_after_rotation(tmp_path: Path) -> None:
    source = lay(tmp_path, ONE)
    lookout(tmp_path).look(0.0)
    shutil.rmtree(source)
    (pin,) = spool.pins(tmp_path)
    assert was_at_rest(pin.took.stable, pin.files)
    assert lookout(tmp_path).look(0.0).due == 0.0


def test_when_it_was_finished_is_said_once(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    its = lookout(tmp_path)
    its.look(0.0)
    assert spool.pins(tmp_path)[0].took.finished == 0
    its.look(10.0)
    finished = spool.pins(tmp_path)[0].took.finished
    assert finished > T
    lookout(tmp_path).look(20.0)
    assert spool.pins(tmp_path)[0].took.finished == finished


def test_the_wait_goes_on_though_a_reflink_has_taken_the_location_of_a_link(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    its = lookout(tmp_path)
    its.look(0.0)
    pinned = tmp_path / "_ckptsync/pins/checkpoint-4.0/files/x"
    shutil.copy2(pinned, tmp_path / "clone")
    (tmp_path / "clone").replace(pinned)
    assert its.look(9.0).due == pytest.approx(1.0)


def test_a_look_asks_no_store(tmp_path: Path) -> None:
    class Silent(MemoryStore):
        def __getattribute__(self, name: str) -> object:
            if name in ("names", "read_into", "size", "write", "create", "delete"):
                raise AssertionError(name)
            return super().__getattribute__(name)

    lay(tmp_path, ONE)
    lay(tmp_path / "x", EIGHT, 50.0).rename(tmp_path / "checkpoint-8")
    w = worker(tmp_path, Silent())
    assert [len(w.look(now).seen) for now in (0.0, 10.0, 600.0)] == [2, 2, 2]


def test_what_cannot_be_remembered_keeps_nothing_from_being_judged(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    commit(tmp_path)
    (tmp_path / "_ckptsync/pins/checkpoint-4.0/took.json").mkdir()
    found = lookout(tmp_path).look(0.0)
    assert found.due == 0.0
    assert [f.checkpoint for f in found.failures] == ["checkpoint-4"]


def test_two_runs_are_told_apart(tmp_path: Path) -> None:
    for name in "ab":
        lay(tmp_path / name, ONE)
    seat = Seat("n0", lambda *_: (), lambda *_: False)
    its = Lookout([RunDir(n, tmp_path / n) for n in "ab"], seat, Rule(), Asked(lambda s: s.run == "a", lambda _: False))
    its.look(0.0)
    assert [(w.key, w.evidence is None) for w in its.watched()] == [
        (("a", "checkpoint-4", 0), True),
        (("b", "checkpoint-4", 0), False),
    ]
    assert its.latest(("b", "checkpoint-4", 0)) == its.watched()[1]
    assert its.latest(("c", "checkpoint-4", 0)) is None
    assert replace(its.watched()[0]) == its.watched()[0]


def test_what_was_not_all_pinned_when_rotation_came_is_not_thought_whole(tmp_path: Path) -> None:
    source = lay(tmp_path, ONE)
    lookout(tmp_path).look(0.0)
    (spool.pins(tmp_path)[0].root / "m" / "__0_0.distcp").unlink()  # a full disk, or somebody who tidied up
    shutil.rmtree(source)
    its = lookout(tmp_path)
    assert its.look(0.0).due != 0.0
    assert "before it was known whole" in its.watched()[0].found.reason


def test_a_checkpoint_of_very_many_files_keeps_no_small_one_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CROWD", len(ONE))
    lay(tmp_path, ONE | {"one more": b"1"})
    its = lookout(tmp_path)
    its.look(0.0)
    slow, go_on = threading.Event(), threading.Event()

    def look_slowly(*args: Any) -> Look:
        slow.set()
        go_on.wait()
        return look_at(*args)

    monkeypatch.setattr(module, "look_at", look_slowly)
    lay(tmp_path / "x", EIGHT, 50.0).rename(tmp_path / "checkpoint-8")
    its.look(10.0)
    slow.wait()
    assert [(w.seen.spot.name, w.seen.pin is not None) for w in its.watched()] == [("checkpoint-4", True), ("checkpoint-8", True)]
    shutil.rmtree(tmp_path / "checkpoint-4")
    assert not its.look(11.0).seen[0].hold.gone
    go_on.set()
    while not its.look(12.0).seen[0].hold.gone:
        pass
    assert len(its.watched()[0].seen.hold.held) == len(ONE) + 1


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("done", [True, False])
def test_a_directory_that_somebody_removes_is_left_alone_so_that_it_can_be_removed(
    tmp_path: Path, *, ours_first: bool, done: bool
) -> None:
    out, now = tmp_path / "out", itertools.count(1)
    for n in (1, 2, 3):
        lay(out / f"{n}", ONE).rename(out / f"checkpoint-{n}")
        (out / f"{n}").rmdir()
    its = lookout(out, done=done)
    its.look(0.0)
    assert len(list((out / "_ckptsync/pins").iterdir())) == 3

    def remove(directory: Path) -> None:
        """As `rm -rf` does: what was there when it came to a directory, then the directory."""
        for entry in sorted(directory.iterdir(), key=lambda path: ((path.name == "_ckptsync") != ours_first, path.name)):
            if entry.is_dir():
                remove(entry)
            else:
                entry.unlink()
            its.look(next(now) / 10)
        directory.rmdir()  # fails where something was made meanwhile

    remove(out)
    assert not out.exists()


def test_pins_that_somebody_removed_are_made_again_when_nothing_changes_any_more(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    its = lookout(tmp_path)
    its.look(0.0)
    shutil.rmtree(tmp_path / "_ckptsync")
    assert ["left alone" in note for note in its.look(1.0).notes] == [True]
    lay(tmp_path, {"y": b"more"})
    found = its.look(6.0)
    assert (["left alone" in note for note in found.notes], (found.due or 99) <= 10) == ([True], True)
    its.look(15.9)
    assert not (tmp_path / "_ckptsync").exists()
    assert its.look(16.1).notes == ()
    (pin,) = spool.pins(tmp_path)
    assert {file.path for file in pin.files} == {*ONE, "y"}


def test_a_pin_that_rotation_or_another_worker_ends_holds_up_nothing(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    its = lookout(tmp_path)
    its.look(0.0)
    shutil.rmtree(tmp_path / "checkpoint-4")
    assert its.look(1.0).notes == ()
    (pin,) = spool.pins(tmp_path)
    spool.drop(pin)
    assert its.look(2.0).notes == ()
    lay(tmp_path, ONE)
    its.look(3.0)
    assert len(spool.pins(tmp_path)) == 1
