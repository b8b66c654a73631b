"""What is read from a checkpoint as evidence, from real files."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import Incomplete
from ckptsync.scan import Spot, spots
from ckptsync.scan import found as scanned
from ckptsync.spool.marks import Took
from ckptsync.spool.pins import open_pin
from ckptsync.worker import evidence
from ckptsync.worker.evidence import gather, trainer_state, writing
from ckptsync.worker.hold import Hold, hold
from ckptsync.worker.observed import Rule, Sighting
from ckptsync.worker.resting import mark
from ckptsync.worker.settle import judge
from tests.vector import vector


def held(path: Path) -> tuple[Hold, Spot]:
    (spot,) = spots(path)
    return hold(scanned(spot), None, spot.family, spot.name), spot


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A node's real output directory, with the checkpoint as the trainer left it."""
    shutil.copytree(vector("hf-fsdp2-2node").sources[0].parent, tmp_path / "out", copy_function=shutil.copyfile)
    (tmp_path / "out" / "checkpoint-4" / "trainer_state.json").touch()
    return tmp_path / "out"


def test_a_real_checkpoint_settles_by_its_trainer_state(out: Path) -> None:
    found = gather(*held(out), later=False, mates=False)
    assert found.state is not None
    assert (found.state.step, found.step, found.unclosed, found.writing) == (4, 4, (), ())
    assert judge(found, Sighting(found.files, 0.0), 10.0, Rule()).reason == "trainer_state.json is the newest of its files"


def test_a_file_open_for_writing_is_seen_and_one_open_for_reading_is_not(out: Path) -> None:
    with (out / "checkpoint-4" / "scheduler.pt").open("rb"), (out / "checkpoint-4" / "rng_state_0.pth").open("ab"):
        assert writing(held(out)[0].held.values()) == ("rng_state_0.pth",)
    assert writing(held(out)[0].held.values()) == ()


@pytest.mark.parametrize("is_leased", [True, False])
def test_a_lease_or_the_list_of_processes_tells_alone(out: Path, monkeypatch: pytest.MonkeyPatch, *, is_leased: bool) -> None:
    if is_leased:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    else:
        monkeypatch.setattr(evidence, "_LEASE_FILE_SYSTEMS", frozenset())
    with (out / "checkpoint-4" / "rng_state_0.pth").open("ab"):
        assert writing(held(out)[0].held.values()) == (("rng_state_0.pth",) if is_leased or os.getuid() == 0 else None)
    assert writing(held(out)[0].held.values()) == (() if is_leased else None)


@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state_1.pth", "trainer_state.json"])
def test_a_torn_file_is_not_closed(out: Path, name: str) -> None:
    torn = out / "checkpoint-4" / name
    torn.write_bytes(torn.read_bytes()[:-9])
    assert gather(*held(out), later=False, mates=False).unclosed == (name,)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', '{"global_step": "4"}', "[" * 10**5, "\xff"])
def test_a_trainer_state_that_says_nothing_is_one_without_a_step(out: Path, text: str) -> None:
    (out / "checkpoint-4" / "trainer_state.json").write_bytes(text.encode("latin-1"))
    state = trainer_state(held(out)[0])
    assert state is not None
    assert state.step is None


def test_files_that_vanish_meanwhile_are_incomplete(out: Path) -> None:
    seen = held(out)
    shutil.rmtree(out / "checkpoint-4")
    with pytest.raises(Incomplete):
        gather(*seen, later=False, mates=False)


def test_what_the_pin_and_its_directories_tell_is_gathered(out: Path) -> None:
    hold, spot = held(out)
    pin = open_pin(out, spot.name, 0, "n0")
    assert pin is not None
    stable = mark(hold.stats)
    found = gather(hold, spot, later=False, mates=False, pin=replace(pin, took=Took(stable=stable)))
    assert (found.stable, found.hook) == (True, "")
    assert found.folders == max(p.stat().st_mtime_ns for p in (spot.path, *spot.path.iterdir()) if p.is_dir())
    assert found.pulse == (pin.path / "owner.json").stat().st_mtime_ns >= found.folders
    assert not gather(hold, spot, later=False, mates=False, pin=replace(pin, took=Took(stable=stable - 1))).stable


def test_a_name_that_goes_shows_in_the_time_of_its_directory(out: Path) -> None:
    hold, spot = held(out)
    before = gather(hold, spot, later=False, mates=False)
    os.utime(spot.path / "optimizer_0", ns=(0, 0))
    (spot.path / "optimizer_0" / "__0_0.distcp").unlink()
    assert gather(*held(out), later=False, mates=False).folders > before.folders


def test_directories_tell_nothing_where_they_are_gone_or_where_the_file_system_says_what_it_likes(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = held(out)[0].stats
    assert evidence.folders(out / "nowhere", stats) == 0
    monkeypatch.setattr(evidence, "_HONEST_FOLDERS", frozenset())
    assert evidence.folders(out / "checkpoint-4", stats) == 0


@pytest.mark.parametrize(
    ("text", "step"), [(b"7", 7), (b"12\n", 12), (b"", None), (b"-1", None), (b"7 or so", None), (b"\xb2", None)]
)
def test_the_step_that_verl_s_driver_says_is_read(tmp_path: Path, text: bytes, step: int | None) -> None:
    (tmp_path / "global_step_7" / "actor").mkdir(parents=True)
    hold_, spot = held(tmp_path)
    assert gather(hold_, spot, later=False, mates=False).marker is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(text)
    marker = gather(hold_, spot, later=False, mates=False).marker
    assert marker is not None
    assert (marker.step, marker.mtime) == (step, (tmp_path / "latest_checkpointed_iteration.txt").stat().st_mtime_ns)


@pytest.mark.parametrize("cut", [1, 100])
def test_a_file_of_lightning_s_that_is_still_copied_is_not_closed(tmp_path: Path, cut: int) -> None:
    whole = (vector("verl-fsdp2").sources[0] / "actor" / "model_world_size_3_rank_0.pt").read_bytes()
    path = tmp_path / "epoch=0-step=4.ckpt"
    path.write_bytes(whole[:-cut])
    assert gather(*held(tmp_path), later=False, mates=False).unclosed == (path.name,)
    path.write_bytes(whole)
    assert gather(*held(tmp_path), later=False, mates=False).unclosed == ()


def test_whose_rank_is_behind_is_worked_out_once(out: Path) -> None:
    (out / "checkpoint-4" / "rng_state_1.pth").unlink()
    found = gather(*held(out), later=False, mates=False)
    assert found.missing == "the random state of rank 1"
    assert "rank 1 is missing" in judge(found, Sighting(found.files, 0.0), 10.0, Rule()).reason
