from __future__ import annotations

import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import Incomplete
from ckptsync.hooks import ranks as hook_ranks
from ckptsync.hooks.hf_saves import TrainerRank, TrainerSaves, UncalledSaves, find_trial
from ckptsync.hooks.ranks import path_of
from ckptsync.scan import spots
from ckptsync.spool import marks
from tests.hooks.training import Said, Table, commits, here, ranks, state, write_part


def saved(*savers: TrainerSaves, step: int) -> None:
    for saver in savers:
        write_part(saver, step)
        saver.remember(state(step))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_rank_to_mark_a_save_pins_it(tmp_path: Path, order: tuple[int, ...]) -> None:
    savers = ranks(Table(), Said(), *[tmp_path] * 3)
    saved(*savers, step=7)
    for n in order[:2]:
        savers[n].commit(7)
        assert commits(tmp_path) == {}
    savers[order[2]].commit(7)
    commit = commits(tmp_path)["checkpoint-7.0"]
    assert commit.ranks == (0, 1, 2)
    assert set(commit.files) == {"model.safetensors", "trainer_state.json", *(f"rng_state_{r}.pth" for r in range(3))}


def test_every_step_is_kept_though_rotation_leaves_one(tmp_path: Path) -> None:
    savers = ranks(Table(), Said(), tmp_path, tmp_path)
    for step in range(1, 6):
        saved(*savers, step=step)
        shutil.rmtree(tmp_path / f"checkpoint-{step - 1}", ignore_errors=True)
        for saver in savers:
            saver.commit(step)
    for step in range(1, 6):
        pin = tmp_path / "_ckptsync" / "pins" / f"checkpoint-{step}.0"
        assert (pin / "files" / "model.safetensors").read_text() == f"weights {step} "
        assert len(commits(tmp_path)[pin.name].files) == 4


def test_ranks_that_write_elsewhere_are_not_waited_for(tmp_path: Path) -> None:
    """Two nodes without a shared disk, though they have one name, as containers may."""
    savers = ranks(Table(), Said(), tmp_path / "a", tmp_path / "a", tmp_path / "b")
    saved(*savers, step=1)
    savers[2].commit(1)
    assert commits(tmp_path / "b")["checkpoint-1.0"].ranks == (2,)
    savers[0].commit(1)
    savers[1].commit(1)
    assert commits(tmp_path / "a")["checkpoint-1.0"].ranks == (0, 1)
    assert commits(tmp_path / "a")["checkpoint-1.0"].save == commits(tmp_path / "b")["checkpoint-1.0"].save != ""


def test_a_save_waits_for_a_rank_that_has_not_begun(tmp_path: Path) -> None:
    table, said = Table(), Said()
    first = TrainerSaves(here(tmp_path, 0, 2), {}, said, table.meet)
    saved(first, step=1)
    first.commit(1)
    assert marks.marks(tmp_path / "_ckptsync", "checkpoint-1") == ()
    second = TrainerSaves(here(tmp_path, 1, 2), {}, said, table.meet)
    saved(second, step=1)
    first.commit(1)
    second.commit(1)
    assert set(commits(tmp_path)) == {"checkpoint-1.0"}


def test_what_was_not_committed_in_time_is_marked_and_never_pinned(tmp_path: Path) -> None:
    said = Said()
    (saver,) = ranks(Table(), said, tmp_path)
    saved(saver, step=1)
    saver.mark_late()
    saver.commit(1)
    assert commits(tmp_path) == {}
    assert [m.rank for m in marks.marks(tmp_path / "_ckptsync", "checkpoint-1")] == [0]
    assert "judges it by its files" in said[0]


def test_a_commit_at_a_later_step_pins_nothing(tmp_path: Path) -> None:
    (saver,) = ranks(Table(), Said(), tmp_path)
    saved(saver, step=1)
    saver.commit(2)
    assert commits(tmp_path) == {}


def test_ranks_that_never_meet_leave_it_to_the_files(tmp_path: Path) -> None:
    saver = TrainerSaves(here(tmp_path, 0, 2), {}, Said(), Table().meet)
    saved(saver, step=1)
    saver.commit(1)
    saver.mark_late()
    assert marks.begun(tmp_path / "_ckptsync") == ()


def test_a_rank_that_cannot_speak_does_not_say_that_it_trains(tmp_path: Path) -> None:
    def lost(rank: int, world: int, word: str) -> None:
        raise ConnectionError("no store")

    with pytest.raises(ConnectionError):
        TrainerSaves(here(tmp_path), {}, Said(), lost)  # type: ignore[arg-type]
    assert marks.begun(tmp_path / "_ckptsync") == ()


def test_a_save_without_on_save_is_found_while_training_stops(tmp_path: Path) -> None:
    (saver,) = ranks(Table(), Said(), tmp_path)
    write_part(saver, 4)
    saver.find_uncalled(4)
    saver.commit(4)
    assert set(commits(tmp_path)) == {"checkpoint-4.0"}


def test_a_just_in_time_save_over_one_that_is_not_pinned_yet_is_one_save(tmp_path: Path) -> None:
    (saver,) = ranks(Table(), Said(), tmp_path)
    saved(saver, step=4)
    write_part(saver, 4, "again")
    os.utime(tmp_path / "checkpoint-4" / "trainer_state.json", ns=(1, 1))  # both may come within one tick
    saver.find_uncalled(4)
    saver.commit(4)
    assert set(commits(tmp_path)) == {"checkpoint-4.0"}


def test_a_save_without_on_save_is_found_at_the_end(tmp_path: Path) -> None:
    savers = ranks(Table(), Said(), tmp_path, tmp_path)
    for saver in savers:
        write_part(saver, 4)
    for saver in savers:
        saver.end()
    assert commits(tmp_path)["checkpoint-4.0"].step == 4


def test_a_step_that_is_saved_twice_is_two_saves(tmp_path: Path) -> None:
    (saver,) = ranks(Table(), Said(), tmp_path)
    for text in ("once", "twice"):
        write_part(saver, 1, text)
        saver.remember(state(1))
        saver.commit(1)
    found = commits(tmp_path)
    assert set(found) == {"checkpoint-1.0", "checkpoint-1.1"}
    assert found["checkpoint-1.0"].save != found["checkpoint-1.1"].save


def test_another_training_gives_the_same_step_another_id(tmp_path: Path) -> None:
    for _ in range(2):
        (saver,) = ranks(Table(), Said(), tmp_path)
        saved(saver, step=1)
        saver.commit(1)
        saver.leave()
    assert len({c.save for c in commits(tmp_path).values()}) == 2


def test_a_process_tells_when_it_trains_has_ended_and_has_left(tmp_path: Path) -> None:
    (saver,) = ranks(Table(), Said(), tmp_path)
    spool = tmp_path / "_ckptsync"
    saver.commit(0)
    assert [(marks.is_running(b), b.local_world, b.train) for b in marks.begun(spool)] == [(True, 1, saver.saves.begun.process)]
    saver.end()
    assert [(marks.is_running(b), b.ended > 0) for b in marks.begun(spool)] == [(True, True)]
    saver.leave()
    assert [marks.is_running(b) for b in marks.begun(spool)] == [False]


def test_a_spool_that_was_deleted_under_way_is_made_again(tmp_path: Path) -> None:
    savers = ranks(Table(), Said(), tmp_path, tmp_path)
    shutil.rmtree(tmp_path / "_ckptsync")
    saved(*savers, step=1)
    for saver in savers:
        saver.commit(1)
    assert commits(tmp_path)["checkpoint-1.0"].ranks == (0, 1)


def test_only_one_of_two_ranks_that_are_last_at_once_pins(tmp_path: Path) -> None:
    savers = ranks(Table(), Said(), tmp_path, tmp_path)
    saved(*savers, step=1)
    kept = [saver._mark(saver._pending[0]) for saver in savers if saver._knows_neighbours()]
    assert [saver.saves.is_last(mark, (0, 1)) for saver, mark in zip(savers, kept, strict=True)] == [True, False]


def test_marks_of_saves_that_are_gone_do_not_pile_up(tmp_path: Path) -> None:
    (saver,) = ranks(Table(), Said(), tmp_path)
    for step in range(130):
        saved(saver, step=step)
        shutil.rmtree(tmp_path / f"checkpoint-{step - 1}", ignore_errors=True)
        shutil.rmtree(tmp_path / "_ckptsync" / "pins" / f"checkpoint-{step - 1}.0", ignore_errors=True)
        saver.commit(step)
    assert len(list((tmp_path / "_ckptsync" / "saves").iterdir())) <= 65


def test_the_dead_are_forgotten_and_the_living_are_not(tmp_path: Path) -> None:
    (saver,) = ranks(Table(), Said(), tmp_path)
    saver.added.mkdir(parents=True)
    hook_ranks.forget_ended(tmp_path / "_ckptsync")
    assert saver.added.exists()
    assert len(marks.begun(tmp_path / "_ckptsync")) == 1
    saver.leave()
    hook_ranks.forget_ended(tmp_path / "_ckptsync")
    assert not saver.added.exists()
    assert marks.begun(tmp_path / "_ckptsync") == ()


def test_a_save_whose_mark_cannot_be_written_is_tried_again_in_time(tmp_path: Path) -> None:
    (saver,) = ranks(Table(), Said(), tmp_path)
    saved(saver, step=1)
    (tmp_path / "_ckptsync" / "saves").write_text("in the way")
    with pytest.raises(OSError, match="saves"):
        saver.commit(1)
    (tmp_path / "_ckptsync" / "saves").unlink()
    saver.commit(1)
    assert set(commits(tmp_path)) == {"checkpoint-1.0"}


def test_a_save_that_lies_elsewhere_is_said_and_not_passed_over(tmp_path: Path) -> None:
    """A trainer of somebody's own, or a callback that moves what was saved."""
    (saver,) = ranks(Table(), Said(), tmp_path)
    saver.remember(state(1))
    with pytest.raises(Incomplete, match="checkpoint-1: nothing of it"):
        saver.commit(1)


def test_where_only_rank_0_saves_a_node_has_nothing_and_that_is_right(tmp_path: Path) -> None:
    table = Table()
    savers = [
        TrainerSaves(replace(here(tmp_path / name, r, 2), only_model=True), {}, Said(), table.meet) for r, name in enumerate("ab")
    ]
    savers[1].remember(state(1))
    savers[1].commit(1)
    assert commits(tmp_path / "b") == {}


TIMES = itertools.count(10**18)


def written(output_dir: Path, *names: str) -> None:
    (output_dir / "checkpoint-1").mkdir(exist_ok=True)
    for name in names:
        (output_dir / "checkpoint-1" / name).write_text(name)
        at = next(TIMES)  # two writes of a test may come within one tick of the file system's clock
        os.utime(output_dir / "checkpoint-1" / name, ns=(at, at))


def rank(output_dir: Path, number: int) -> TrainerRank:
    return here(output_dir, number, 2)


def test_what_lay_there_before_was_told_of(tmp_path: Path) -> None:
    written(tmp_path, "trainer_state.json")
    uncalled = UncalledSaves(rank(tmp_path, 0))
    assert uncalled.find_new() == []
    written(tmp_path, "trainer_state.json")  # training resumes, and saves the step again
    assert uncalled.find_new() == ["checkpoint-1"]


def test_another_rank_s_files_say_nothing_of_this_rank(tmp_path: Path) -> None:
    """Rank 0 may be quick, and save while rank 1 has not begun to."""
    uncalled = UncalledSaves(rank(tmp_path, 1))
    written(tmp_path, "rng_state_0.pth", "trainer_state.json")
    assert not uncalled.is_new("checkpoint-1")
    written(tmp_path, "rng_state_1.pth")
    assert uncalled.is_new("checkpoint-1")


def test_the_sentinel_says_that_it_is_not_done(tmp_path: Path) -> None:
    uncalled = UncalledSaves(rank(tmp_path, 0))
    written(tmp_path, "checkpoint-is-incomplete.txt", "trainer_state.json")
    assert not uncalled.is_new("checkpoint-1")
    (tmp_path / "checkpoint-1" / "checkpoint-is-incomplete.txt").unlink()
    assert uncalled.is_new("checkpoint-1")


TIMES = itertools.count(10**18)


def write_state(out: Path, trial: str, **said: object) -> None:
    """A trial's ``trainer_state.json`` of step 4, newer than all before."""
    path = out / trial / "checkpoint-4" / "trainer_state.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"global_step": 4, **said}))
    os.utime(path, ns=(at := next(TIMES), at))


def test_a_trial_is_where_this_rank_has_written_last(tmp_path: Path) -> None:
    assert find_trial(tmp_path, "checkpoint-4", "trainer_state.json") == ""
    for trial in ("run-1", "run-0"):
        write_state(tmp_path, trial)
        assert find_trial(tmp_path, "checkpoint-4", "trainer_state.json") == trial
    assert find_trial(tmp_path, "checkpoint-5", "trainer_state.json") == ""


def test_of_trials_at_the_same_time_it_is_the_one_whose_state_is_ours(tmp_path: Path) -> None:
    for number in range(3):
        write_state(tmp_path, f"run-{number}", trial_params={"rate": number / 3, "other": float("nan")})
    (tmp_path / "run-9" / "checkpoint-4").mkdir(parents=True)
    (tmp_path / "run-9" / "checkpoint-4" / "trainer_state.json").write_text('{"global')
    said = {"global_step": 4, "trial_params": {"rate": 1 / 3, "other": float("nan")}}
    assert find_trial(tmp_path, "checkpoint-4", "trainer_state.json", said) == "run-1"
    assert find_trial(tmp_path, "checkpoint-4", "trainer_state.json", {"global_step": 5}) == ""


@pytest.mark.parametrize("name", ["_ckptsync", ".hidden", "with space", "x" * 70])
def test_a_name_that_no_store_could_keep_is_no_trial_s(tmp_path: Path, name: str) -> None:
    write_state(tmp_path, name)
    assert find_trial(tmp_path, "checkpoint-4", "trainer_state.json") == ""


def test_a_checkpoint_s_name_says_where_it_lies_as_a_scan_says_it(tmp_path: Path) -> None:
    for trial in ("", "run-0"):
        (tmp_path / trial / "checkpoint-4").mkdir(parents=True)
        name = f"{trial}.checkpoint-4" if trial else "checkpoint-4"
        assert path_of(tmp_path, name) == tmp_path / trial / "checkpoint-4"
        assert name in {s.name for s in spots(tmp_path)}
    assert path_of(tmp_path, "lr0.1.checkpoint-4") == tmp_path / "lr0.1" / "checkpoint-4"


def write_parts(savers: list[TrainerSaves], step: int) -> None:
    for saver in savers:
        write_part(saver, step, trial="run-0")


def test_two_ranks_of_a_trial_pin_each_step_and_a_save_of_which_nobody_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    savers = ranks(Table(), Said(), out, out)
    (out / "run-0").mkdir()
    for step in (1, 2):
        write_parts(savers, step)
        shutil.rmtree(out / "run-0" / f"checkpoint-{step - 1}", ignore_errors=True)
        for saver in savers:
            saver.remember(state(step, is_search=True))
        for saver in savers:
            saver.commit(step)
    write_parts(savers, 3)  # of a SIGTERM
    for saver in savers:
        saver.end()
    assert list(commits(out)) == [f"run-0.checkpoint-{step}.0" for step in (1, 2, 3)]
    assert all(len(commit.files) == 4 for commit in commits(out).values())
