from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

from ckptsync.hooks.here import Here
from ckptsync.hooks.unheard import Unheard
from tests.hooking import here

TIMES = itertools.count(10**18)


def written(output_dir: Path, *names: str) -> None:
    (output_dir / "checkpoint-1").mkdir(exist_ok=True)
    for name in names:
        (output_dir / "checkpoint-1" / name).write_text(name)
        at = next(TIMES)  # two writes of a test may come within one tick of the file system's clock
        os.utime(output_dir / "checkpoint-1" / name, ns=(at, at))


def rank(output_dir: Path, number: int) -> Here:
    return here(output_dir, number, 2)


def test_a_save_of_which_nobody_told_is_heard_of_once(tmp_path: Path) -> None:
    unheard = Unheard(rank(tmp_path, 0))
    assert not unheard.since("checkpoint-1")
    written(tmp_path, "rng_state_0.pth", "trainer_state.json")
    assert unheard.since("checkpoint-1")
    assert not unheard.since("checkpoint-1")


def test_what_lay_there_before_was_told_of(tmp_path: Path) -> None:
    written(tmp_path, "trainer_state.json")
    unheard = Unheard(rank(tmp_path, 0))
    assert unheard.all_since() == []
    written(tmp_path, "trainer_state.json")  # training resumes, and saves the step again
    assert unheard.all_since() == ["checkpoint-1"]


def test_what_on_save_told_of_is_not_told_again(tmp_path: Path) -> None:
    unheard = Unheard(rank(tmp_path, 0))
    written(tmp_path, "trainer_state.json")
    unheard.hear("checkpoint-1")
    assert unheard.all_since() == []


def test_another_rank_s_files_say_nothing_of_this_rank(tmp_path: Path) -> None:
    """Rank 0 may be quick, and save while rank 1 has not begun to."""
    unheard = Unheard(rank(tmp_path, 1))
    written(tmp_path, "rng_state_0.pth", "trainer_state.json")
    assert not unheard.since("checkpoint-1")
    written(tmp_path, "rng_state_1.pth")
    assert unheard.since("checkpoint-1")


def test_the_sentinel_says_that_it_is_not_done(tmp_path: Path) -> None:
    unheard = Unheard(rank(tmp_path, 0))
    written(tmp_path, "checkpoint-is-incomplete.txt", "trainer_state.json")
    assert not unheard.since("checkpoint-1")
    (tmp_path / "checkpoint-1" / "checkpoint-is-incomplete.txt").unlink()
    assert unheard.since("checkpoint-1")


def test_without_states_of_ranks_the_trainer_s_state_tells(tmp_path: Path) -> None:
    unheard = Unheard(replace(rank(tmp_path, 1), only_model=True))
    written(tmp_path, "trainer_state.json")
    assert unheard.since("checkpoint-1")


def test_one_process_has_a_state_without_a_number(tmp_path: Path) -> None:
    unheard = Unheard(replace(here(tmp_path), has_state=False))
    written(tmp_path, "rng_state.pth")
    assert unheard.since("checkpoint-1")
