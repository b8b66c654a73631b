"""One save, looked at again and again: what is known of it from the looks before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ckptsync.worker.looking import Seat
from ckptsync.worker.lookout import Lookout
from ckptsync.worker.observed import Rule
from ckptsync.worker.options import RunDir
from ckptsync.worker.watched import Asked
from tests.test_worker_lookout import lookout
from tests.test_worker_push import ONE, T, lay


def write(out: Path, told: dict[str, bytes], at: float = 0.0) -> None:
    """Laid there by its trainer: names in a directory change both of its times."""
    os.utime(lay(out, told, at))


def lay_torn(out: Path) -> Path:
    """One that a resumed training had begun to write over when it was killed."""
    lay(out, ONE)
    write(out, {"m/__0_0.distcp": b"another"}, 5000.0)
    return out / "checkpoint-4"


def is_fresh(its: Lookout) -> bool:
    (one,) = its.watched()
    return one.evidence is not None and one.evidence.fresh


def test_a_save_that_was_seen_to_begin_is_fresh_until_it_is_written_over(tmp_path: Path) -> None:
    its, known = lookout(tmp_path), lookout(tmp_path)
    its.look(100.0)
    write(tmp_path, ONE)
    write(tmp_path, {"trainer_state.json": ONE["trainer_state.json"]}, -3600.0)  # the clock was set back meanwhile
    its.look(101.0)
    os.utime(tmp_path / "checkpoint-4", ns=(T, T))  # nothing has come or gone since
    assert (its.look(101.0).due, known.look(101.0).due) == (10.0, 600.0)  # what was seen at rest is remembered
    assert its.look(111.0).due == 0.0
    write(tmp_path, {"m/__0_0.distcp": b"another"}, 100.0)
    its.look(112.0)
    assert its.watched()[0].found.left is None


def test_a_save_that_had_come_to_its_end_is_fresh_no_more_when_another_writes_over_it_at_once(tmp_path: Path) -> None:
    its = lookout(tmp_path)
    its.look(0.0)
    write(tmp_path, ONE)
    assert its.look(1.0).due == 10.0
    write(tmp_path, {"late": b""}, 2.0)
    assert its.look(2.0).due == 10.0
    write(tmp_path, {"m/__0_0.distcp": b"another"}, 9.0)
    its.look(9.0)
    (one,) = its.watched()
    assert "was written over" in one.found.reason


def test_what_was_done_before_is_fresh_no_more(tmp_path: Path) -> None:
    done = [True]
    seat = Seat("n0", lambda *_: (), lambda *_: False)
    its = Lookout([RunDir("run", tmp_path)], seat, Rule(), Asked(lambda _: done[0], lambda _: False))
    its.look(0.0)
    write(tmp_path, ONE)
    its.look(1.0)
    write(tmp_path, {"trainer_state.json": ONE["trainer_state.json"]}, -3600.0)
    done[0] = False
    its.look(2.0)
    assert its.watched()[0].found.left is None


def test_what_was_cut_short_is_fresh_no_more_when_another_save_writes_over_it(tmp_path: Path) -> None:
    its = lookout(tmp_path)
    its.look(0.0)
    write(tmp_path, {"m/__0_0.distcp": b"half"})
    told = []
    for now, wrote in ((1.0, b"half"), (30.0, b"whole"), (100.0, b"other")):
        write(tmp_path, {"m/__0_0.distcp": wrote}, now)
        its.look(now)
        evidence = its.watched()[0].evidence
        told.append(evidence is not None and evidence.fresh)
    assert told == [True, True, False]


def test_what_comes_with_a_mount_or_in_a_directory_that_was_away_was_not_seen_to_begin(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for away in (tmp_path / "empty", tmp_path / "away"):
        its = lookout(out)
        its.look(0.0)
        if away.name == "empty":  # as the location of a mount is before it
            lay_torn(tmp_path / "disk")
            out.rename(away)
            (tmp_path / "disk").rename(out)
        else:
            out.rename(away)
            its.look(1.0)
            away.rename(out)
        its.look(2.0)
        assert not is_fresh(its), away.name
        assert "was written over" in its.watched()[0].found.reason


def test_a_checkpoint_that_is_moved_in_was_not_seen_to_begin(tmp_path: Path) -> None:
    torn = lay_torn(tmp_path / "other")
    os.utime(torn, ns=(T, T))  # a while ago
    (tmp_path / "out").mkdir()
    its = lookout(tmp_path / "out")
    its.look(0.0)
    torn.rename(tmp_path / "out" / torn.name)
    its.look(1.0)
    assert not is_fresh(its)


def test_what_could_not_be_looked_at_for_once_was_there_before(tmp_path: Path) -> None:
    its = lookout(tmp_path)
    its.look(0.0)
    torn = lay_torn(tmp_path)
    deep = torn.joinpath(*["d"] * 40)
    deep.mkdir(parents=True)
    assert its.look(1.0).failures
    shutil.rmtree(torn / "d")
    its.look(2.0)
    assert not is_fresh(its)
