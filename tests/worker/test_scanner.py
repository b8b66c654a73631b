"""Scanning again and again: what is due and when, what is remembered, and nothing that asks the
store.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckptsync.spool import pins as spool
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.finished import Rule
from ckptsync.worker.observation import was_at_rest
from ckptsync.worker.options import RunDir
from ckptsync.worker.pinning import Pinner
from ckptsync.worker.scanner import ScannedSave, Scanner
from tests.support.hook_pins import commit
from tests.support.worker_in_process import EIGHT, ONE, T, lay, worker


def scanner(out: Path, *, done: bool = False) -> Scanner:
    return Scanner(RunDir("run", out), Pinner("n0", lambda *_: False), Rule(), lambda _: done)


def test_due_counts_down_from_scan_to_scan_until_it_is_planned(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    planned: list[ScannedSave] = []
    pinner = Pinner("n0", lambda *_: False)
    its = Scanner(RunDir("run", tmp_path), pinner, Rule(), is_planned=planned.__contains__)
    assert [its.scan(now).due for now in (100.0, 103.0, 109.0, 110.0)] == [10.0, 7.0, 1.0, 0.0]
    assert its.due(110.5) == 0.0
    (scanned,) = its.saves()
    assert (scanned.verdict.finished, scanned.first) == (True, 100.0)
    planned += its.saves()
    assert its.due(111.0) is None
    lay(tmp_path, {"y": b"more"}, 1.0)
    assert its.scan(113.0).due == 60.0  # newer than trainer_state.json


def test_a_file_that_is_still_written_begins_the_wait_anew(tmp_path: Path) -> None:
    lay(tmp_path, ONE | {".tmpAb3xYz": b"half"}, 1.0)
    its = scanner(tmp_path)
    its.scan(0.0)
    lay(tmp_path, {".tmpAb3xYz": b"more"}, 2.0)
    assert its.scan(500.0).due == 600.0


def test_files_are_read_once_more_before_a_save_is_called_finished(tmp_path: Path) -> None:
    source = lay(tmp_path, ONE)
    its = scanner(tmp_path)
    for now in (0.0, 9.5):
        its.scan(now)
    with (source / "x").open("ab"):
        its.scan(10.0)
        assert its.saves()[0].verdict.reason == "x is open for writing"


def test_who_had_to_wait_for_anothers_look_knows_no_earlier_time(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    its = scanner(tmp_path)
    assert [its.scan(now).due for now in (100.0, 99.0, 109.5)] == [10.0, 10.0, 0.5]


def test_what_may_never_be_whole_is_due_ever_more_seldom(tmp_path: Path) -> None:
    lay(tmp_path, {"model.safetensors": b"torn"})
    its = scanner(tmp_path)
    assert [its.scan(now).due for now in (0.0, 50.0, 1000.0)] == [10.0, 10.0, 100.0]


def test_what_is_refused_is_noted_once_it_does_not_change(tmp_path: Path) -> None:
    lay(tmp_path, {"model.safetensors": b"torn"})
    its = scanner(tmp_path)
    told = (
        (
            "run/checkpoint-4: not uploaded: model.safetensors does not end as its format does:"
            " torn, or still being written"
        ),
    )
    assert [its.scan(now).notes for now in (0.0, 59.0, 60.0, 1e6)] == [(), (), told, told]
    lay(tmp_path, {"model.safetensors": b"more"}, 1.0)
    assert its.scan(1e6 + 1).notes == ()
    lay(tmp_path, ONE, 2.0)
    assert [its.scan(1e6 + after).notes for after in (2, 61, 63, 1000)] == [(), (), told, told]
    shutil.rmtree(tmp_path / "checkpoint-4")
    assert its.scan(1e6 + 2000).notes == ()  # that is missed, which is said elsewhere


def test_weights_that_no_worker_knows_are_said_once_they_do_not_change(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    for name in ("step-2", "step-4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.npz").write_bytes(b"x")
    (tmp_path / "deep/checkpoint-4").mkdir(parents=True)
    (tmp_path / "deep/checkpoint-4/model.safetensors").write_bytes(b"x")
    its = scanner(tmp_path, done=True)
    assert [its.scan(now).notes for now in (0.0, 59.0)] == [(), ()]
    nested, unknown = its.scan(61.0).notes
    assert nested == (
        f"run: not uploaded: deep in {tmp_path}: an output directory in this one: name it in"
        " worker.runs"
    )
    assert unknown.startswith(f"run: not uploaded: step-2, step-4 in {tmp_path}: weights, in no")
    assert unknown.endswith(f": ckptsync push {tmp_path}/step-2 --as step-2")
    (tmp_path / "step-2/weights.npz").write_bytes(b"more")
    assert "step-2" not in "".join(its.scan(122.0).notes)
    assert "step-2" in "".join(its.scan(183.0).notes)
    (tmp_path / "step-2").rename(tmp_path / "_gone")
    assert "step-2" not in "".join(its.scan(244.0).notes)


def test_what_is_known_to_be_done_is_not_judged_and_never_due(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    its = scanner(tmp_path, done=True)
    assert [its.scan(now).due for now in (0.0, 1000.0)] == [None, None]
    assert its.saves()[0].observation is None


def test_what_was_at_rest_is_remembered_for_the_next_worker(tmp_path: Path) -> None:
    source = lay(tmp_path, ONE)
    its = scanner(tmp_path)
    its.scan(0.0)
    its.scan(0.5)
    shutil.rmtree(source)
    (local_save,) = its.scan(0.6).saves
    assert was_at_rest(local_save)
    assert scanner(tmp_path).scan(0.0).due == 0.0


def test_when_it_was_finished_is_said_once(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    its = scanner(tmp_path)
    its.scan(0.0)
    assert spool.list_pins(tmp_path)[0].notes.finished == 0
    its.scan(10.0)
    finished = spool.list_pins(tmp_path)[0].notes.finished
    assert finished > T
    scanner(tmp_path).scan(20.0)
    assert spool.list_pins(tmp_path)[0].notes.finished == finished


def test_the_wait_goes_on_though_a_reflink_has_taken_the_location_of_a_link(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    its = scanner(tmp_path)
    its.scan(0.0)
    pinned = tmp_path / "_ckptsync/pins/checkpoint-4.0/files/x"
    shutil.copy2(pinned, tmp_path / "clone")
    (tmp_path / "clone").replace(pinned)
    assert its.scan(9.0).due == pytest.approx(1.0)


def test_a_look_asks_no_store(tmp_path: Path) -> None:
    class Silent(MemoryStore):
        def __getattribute__(self, name: str) -> object:
            if name in ("names", "read_into", "size", "write", "create", "delete"):
                raise AssertionError(name)
            return super().__getattribute__(name)

    lay(tmp_path, ONE)
    lay(tmp_path / "x", EIGHT, 50.0).rename(tmp_path / "checkpoint-8")
    w = worker(tmp_path, Silent())
    assert [len(w.scan(now).saves) for now in (0.0, 10.0, 600.0)] == [2, 2, 2]


def test_what_cannot_be_remembered_keeps_nothing_from_being_judged(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    commit(tmp_path / "checkpoint-4")
    (tmp_path / "_ckptsync/pins/checkpoint-4.0/notes.json").mkdir()
    scan = scanner(tmp_path).scan(0.0)
    assert scan.due == 0.0
    assert [f.checkpoint for f in scan.failures] == ["checkpoint-4"]


def test_what_was_not_all_pinned_when_rotation_came_is_not_thought_whole(tmp_path: Path) -> None:
    source = lay(tmp_path, ONE)
    scanner(tmp_path).scan(0.0)
    (
        spool.list_pins(tmp_path)[0].root / "m" / "__0_0.distcp"
    ).unlink()  # a full disk, or somebody who tidied up
    shutil.rmtree(source)
    its = scanner(tmp_path)
    assert its.scan(0.0).due != 0.0
    assert "before the worker knew that it was complete" in its.saves()[0].verdict.reason


def write(out: Path, told: dict[str, bytes], at: float = 0.0) -> None:
    """Laid there by its trainer: names in a directory change both of its times."""
    os.utime(lay(out, told, at))


def lay_torn(out: Path) -> Path:
    """One that a resumed training had begun to write over when it was killed."""
    lay(out, ONE)
    write(out, {"m/__0_0.distcp": b"another"}, 5000.0)
    return out / "checkpoint-4"


def is_fresh(its: Scanner) -> bool:
    (scanned,) = its.saves()
    return scanned.observation is not None and scanned.observation.is_new


def test_a_save_that_was_seen_to_begin_is_fresh_until_it_is_written_over(tmp_path: Path) -> None:
    its, known = scanner(tmp_path), scanner(tmp_path)
    its.scan(100.0)
    write(tmp_path, ONE)
    # the clock was set back meanwhile
    write(tmp_path, {"trainer_state.json": ONE["trainer_state.json"]}, -3600.0)
    its.scan(101.0)
    os.utime(tmp_path / "checkpoint-4", ns=(T, T))  # nothing has come or gone since
    assert (its.scan(101.0).due, known.scan(101.0).due) == (10.0, 10.0)
    assert [one.saves()[0].verdict.remaining for one in (its, known)] == [10.0, None]
    assert its.scan(111.0).due == 0.0
    write(tmp_path, {"m/__0_0.distcp": b"another"}, 100.0)
    its.scan(112.0)
    assert its.saves()[0].verdict.remaining is None


def test_a_torn_save_is_fresh_no_more_once_another_writes_over_it(tmp_path: Path) -> None:
    its = scanner(tmp_path)
    its.scan(0.0)
    write(tmp_path, {"m/__0_0.distcp": b"half"})
    told = []
    for now, wrote in ((1.0, b"half"), (30.0, b"whole"), (100.0, b"other")):
        write(tmp_path, {"m/__0_0.distcp": wrote}, now)
        its.scan(now)
        evidence = its.saves()[0].observation
        told.append(evidence is not None and evidence.is_new)
    assert told == [True, True, False]


def test_what_comes_with_a_mount_was_not_seen_to_begin(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for away in (tmp_path / "empty", tmp_path / "away"):
        its = scanner(out)
        its.scan(0.0)
        if away.name == "empty":  # as the location of a mount is before it
            lay_torn(tmp_path / "disk")
            out.rename(away)
            (tmp_path / "disk").rename(out)
        else:
            out.rename(away)
            its.scan(1.0)
            away.rename(out)
        its.scan(2.0)
        assert not is_fresh(its), away.name
        assert "was overwritten" in its.saves()[0].verdict.reason


def test_a_checkpoint_that_is_moved_in_was_not_seen_to_begin(tmp_path: Path) -> None:
    torn = lay_torn(tmp_path / "other")
    os.utime(torn, ns=(T, T))  # a while ago
    (tmp_path / "out").mkdir()
    its = scanner(tmp_path / "out")
    its.scan(0.0)
    torn.rename(tmp_path / "out" / torn.name)
    its.scan(1.0)
    assert not is_fresh(its)


def test_what_could_not_be_looked_at_for_once_was_there_before(tmp_path: Path) -> None:
    its = scanner(tmp_path)
    its.scan(0.0)
    torn = lay_torn(tmp_path)
    deep = torn.joinpath(*["d"] * 40)
    deep.mkdir(parents=True)
    assert its.scan(1.0).failures
    shutil.rmtree(torn / "d")
    its.scan(2.0)
    assert not is_fresh(its)


def test_what_was_done_before_is_fresh_no_more(tmp_path: Path) -> None:
    done = [True]
    its = Scanner(
        RunDir("run", tmp_path), Pinner("n0", lambda *_: False), Rule(), lambda _: done[0]
    )
    its.scan(0.0)
    write(tmp_path, ONE)
    its.scan(1.0)
    write(tmp_path, {"trainer_state.json": ONE["trainer_state.json"]}, -3600.0)
    done[0] = False
    its.scan(2.0)
    assert its.saves()[0].verdict.remaining is None


def test_a_finished_save_is_fresh_no_more_once_another_writes_over_it(tmp_path: Path) -> None:
    its = scanner(tmp_path)
    its.scan(0.0)
    write(tmp_path, ONE)
    assert its.scan(1.0).due == 10.0
    write(tmp_path, {"late": b""}, 2.0)
    assert its.scan(2.0).due == 10.0
    write(tmp_path, {"m/__0_0.distcp": b"another"}, 9.0)
    its.scan(9.0)
    (scanned,) = its.saves()
    assert "was overwritten" in scanned.verdict.reason
