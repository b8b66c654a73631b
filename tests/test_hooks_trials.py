from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

from ckptsync.hooks.saver import Saver
from ckptsync.hooks.trials import named, place, trial_of
from ckptsync.scan import spots
from tests.hooking import Said, Table, commits, ranks, write_part

TIMES = itertools.count(10**18)


def state(out: Path, trial: str, **said: object) -> None:
    """A trial's ``trainer_state.json`` of step 4, newer than all before."""
    path = out / trial / "checkpoint-4" / "trainer_state.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"global_step": 4, **said}))
    os.utime(path, ns=(at := next(TIMES), at))


def test_a_trial_is_where_this_rank_has_written_last(tmp_path: Path) -> None:
    assert trial_of(tmp_path, "checkpoint-4", "trainer_state.json") == ""
    for trial in ("run-1", "run-0"):
        state(tmp_path, trial)
        assert trial_of(tmp_path, "checkpoint-4", "trainer_state.json") == trial
    assert trial_of(tmp_path, "checkpoint-5", "trainer_state.json") == ""


def test_of_trials_at_the_same_time_it_is_the_one_whose_state_is_ours(tmp_path: Path) -> None:
    for number in range(3):
        state(tmp_path, f"run-{number}", trial_params={"rate": number / 3, "other": float("nan")})
    (tmp_path / "run-9" / "checkpoint-4").mkdir(parents=True)
    (tmp_path / "run-9" / "checkpoint-4" / "trainer_state.json").write_text('{"global')
    said = {"global_step": 4, "trial_params": {"rate": 1 / 3, "other": float("nan")}}
    assert trial_of(tmp_path, "checkpoint-4", "trainer_state.json", said) == "run-1"
    assert trial_of(tmp_path, "checkpoint-4", "trainer_state.json", {"global_step": 5}) == ""


@pytest.mark.parametrize("name", ["_ckptsync", ".hidden", "with space", "x" * 70])
def test_a_name_that_no_store_could_keep_is_no_trial_s(tmp_path: Path, name: str) -> None:
    state(tmp_path, name)
    assert trial_of(tmp_path, "checkpoint-4", "trainer_state.json") == ""


def test_a_checkpoint_s_name_says_where_it_lies_as_a_scan_says_it(tmp_path: Path) -> None:
    for trial in ("", "run-0"):
        (tmp_path / trial / "checkpoint-4").mkdir(parents=True)
        name = named(trial, "checkpoint-4")
        assert place(tmp_path, name) == tmp_path / trial / "checkpoint-4"
        assert name in {s.name for s in spots(tmp_path)}
    assert place(tmp_path, "lr0.1.checkpoint-4") == tmp_path / "lr0.1" / "checkpoint-4"


def saved(savers: list[Saver], step: int) -> None:
    for saver in savers:
        write_part(saver, step)


def test_two_ranks_of_a_trial_pin_each_step_and_a_save_of_which_nobody_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    savers = ranks(Table(), Said(), out, out)
    (out / "run-0").mkdir()
    for saver in savers:
        saver.follow("run-0")
    for step in (1, 2):
        saved(savers, step)
        shutil.rmtree(out / "run-0" / f"checkpoint-{step - 1}", ignore_errors=True)
        for saver in savers:
            saver.remember(step)
        for saver in savers:
            saver.commit(step)
    saved(savers, 3)  # of a SIGTERM
    for saver in savers:
        saver.end()
    assert list(commits(out)) == [f"run-0.checkpoint-{step}.0" for step in (1, 2, 3)]
    assert all(len(commit.files) == 4 for commit in commits(out).values())
