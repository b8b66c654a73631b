"""What is read from a checkpoint as evidence, from real files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckptsync.errors import Incomplete
from ckptsync.scan import Spot, spots
from ckptsync.scan import found as scanned
from ckptsync.walk import Stat
from ckptsync.worker import evidence
from ckptsync.worker.evidence import gather, is_later, trainer_state, writing
from ckptsync.worker.hold import Hold, hold
from ckptsync.worker.settle import Rule, Sighting, judge
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


def test_later_is_what_was_written_wholly_later() -> None:
    def at(*times: int) -> list[Stat]:
        return [Stat(str(t), 1, t, t, 0) for t in times]

    assert is_later(at(1, 5), at(5, 9))
    assert not is_later(at(1, 5), at(4, 9))
    assert not is_later(at(1, 5), [])
