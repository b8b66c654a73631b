from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest

from ckptsync.checkpoint_dirs import FINAL, find_checkpoint_dirs, list_checkpoint
from ckptsync.errors import Incomplete
from ckptsync.hooks import trainer_saves
from ckptsync.hooks.rank_markers import forget_ended
from ckptsync.spool import markers
from tests.hooks.training import Said, Table, commits, ranks, save, trains, write_part


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_rank_to_mark_a_save_pins_it(tmp_path: Path, order: tuple[int, ...]) -> None:
    savers = ranks(*[tmp_path] * 3)
    save(*savers, step=7)
    for n in order[:2]:
        savers[n].commit(7)
        assert commits(tmp_path) == {}
    savers[order[2]].commit(7)
    commit = commits(tmp_path)["checkpoint-7.0"]
    assert commit.ranks == (0, 1, 2)
    assert set(commit.files) == {
        "model.safetensors",
        "trainer_state.json",
        *(f"rng_state_{r}.pth" for r in range(3)),
    }


def test_ranks_that_write_elsewhere_are_not_waited_for(tmp_path: Path) -> None:
    """Two nodes without a shared disk, though they have one name, as containers may."""
    savers = ranks(tmp_path / "a", tmp_path / "a", tmp_path / "b")
    save(*savers, step=1)
    savers[2].commit(1)
    assert commits(tmp_path / "b")["checkpoint-1.0"].ranks == (2,)
    savers[0].commit(1)
    savers[1].commit(1)
    a, b = (commits(tmp_path / name)["checkpoint-1.0"] for name in "ab")
    assert a.ranks == (0, 1)
    assert [saver.begun.local_world for saver in savers] == [2, 2, 1]
    assert a.save == b.save != ""


def test_a_save_waits_for_a_rank_that_has_not_begun(tmp_path: Path) -> None:
    table = Table()
    first = trains(tmp_path, 0, 2, table=table)
    save(first, step=1)
    first.commit(1)
    assert markers.list_rank_marks(tmp_path / "_ckptsync", "checkpoint-1") == ()
    second = trains(tmp_path, 1, 2, table=table)
    save(second, step=1)
    first.commit(1)
    second.commit(1)
    assert set(commits(tmp_path)) == {"checkpoint-1.0"}


@pytest.mark.parametrize("late", ["the next save", "a later step"])
def test_what_was_not_committed_in_time_is_never_pinned(tmp_path: Path, late: str) -> None:
    said = Said()
    (saver,) = ranks(tmp_path, said=said)
    save(saver, step=1)
    if late == "the next save":
        save(saver, step=2)
    saver.commit(2)
    assert "checkpoint-1.0" not in commits(tmp_path)
    assert [m.rank for m in markers.list_rank_marks(tmp_path / "_ckptsync", "checkpoint-1")] == [0]
    assert "the worker judges its files" in said[0]


def test_a_rank_that_cannot_speak_does_not_say_that_it_trains(tmp_path: Path) -> None:
    class Lost(Table):
        def meet(self, *_: object) -> None:  # type: ignore[override]
            raise ConnectionError("no store")

    with pytest.raises(ConnectionError):
        trains(tmp_path, table=Lost())
    assert markers.list_training_processes(tmp_path / "_ckptsync") == ()


def test_a_save_without_on_save_is_left_to_its_files(tmp_path: Path) -> None:
    """The Trainer's just-in-time save on SIGTERM: nothing follows that could delete it."""
    (saver,) = ranks(tmp_path)
    write_part(saver, 4)
    saver.end(4)
    assert commits(tmp_path) == {}
    (begun,) = markers.list_training_processes(tmp_path / "_ckptsync")
    assert begun.ended > 0


def test_a_step_that_is_saved_twice_is_two_saves(tmp_path: Path) -> None:
    (saver,) = ranks(tmp_path)
    for text in ("once", "twice"):
        write_part(saver, 1, text)
        saver.remember(1)
        saver.commit(1)
    pin_commits = commits(tmp_path)
    assert set(pin_commits) == {"checkpoint-1.0", "checkpoint-1.1"}
    assert pin_commits["checkpoint-1.0"].save != pin_commits["checkpoint-1.1"].save


def test_a_process_tells_when_it_trains_has_ended_and_has_left(tmp_path: Path) -> None:
    (saver,) = ranks(tmp_path)
    spool = tmp_path / "_ckptsync"
    saver.commit(0)
    [begun] = markers.list_training_processes(spool)
    assert (begun.local_world, begun.train, begun.trainer) == (1, begun.process, "transformers 5")
    assert markers.is_training(begun)
    saver.end(0)
    [ended] = markers.list_training_processes(spool)
    assert markers.is_training(ended)
    assert ended.ended > 0
    saver.leave()
    [left] = markers.list_training_processes(spool)
    assert not markers.is_training(left)


def test_a_spool_that_is_deleted_costs_no_later_save(tmp_path: Path) -> None:
    savers = ranks(tmp_path, tmp_path)
    for saver in savers:
        saver.commit(0)
    shutil.rmtree(tmp_path / "_ckptsync")
    save(*savers, step=1)
    for saver in savers:
        saver.commit(1)
    assert commits(tmp_path)["checkpoint-1.0"].ranks == (0, 1)


def test_a_spool_that_is_deleted_before_ranks_meet_leaves_it_to_the_files(tmp_path: Path) -> None:
    savers = ranks(tmp_path, tmp_path)
    shutil.rmtree(tmp_path / "_ckptsync")
    save(*savers, step=1)
    for saver in savers:
        with pytest.raises(Incomplete, match="deleted"):
            saver.commit(1)
    assert (commits(tmp_path), markers.list_training_processes(tmp_path / "_ckptsync")) == ({}, ())


def test_only_one_of_two_ranks_that_are_last_at_once_pins(tmp_path: Path) -> None:
    first, second = ranks(tmp_path, tmp_path)
    for saver in (first, second):
        saver.mark("checkpoint-1", "save", 1)
    assert first.claim_pinning("checkpoint-1", "save", (0, 1))
    assert not second.claim_pinning("checkpoint-1", "save", (0, 1))


def test_marks_of_saves_that_are_gone_do_not_pile_up(tmp_path: Path) -> None:
    (saver,) = ranks(tmp_path)
    for step in range(70):
        save(saver, step=step)
        shutil.rmtree(tmp_path / f"checkpoint-{step - 1}", ignore_errors=True)
        shutil.rmtree(
            tmp_path / "_ckptsync" / "pins" / f"checkpoint-{step - 1}.0", ignore_errors=True
        )
        saver.commit(step)
    assert len(list((tmp_path / "_ckptsync" / "saves").iterdir())) <= 65


def test_the_dead_are_forgotten_and_the_living_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks(tmp_path, tmp_path)
    for saver in (first, second):
        saver.commit(0)
    first.added.mkdir(parents=True)
    first.leave()
    forget_ended(first.spool)
    assert first.added.exists(), "it is the training's, which goes on in the second rank"
    assert [b.rank for b in markers.list_training_processes(first.spool)] == [1]
    second.leave()
    begins, listed = first.spool / "added" / "new", markers.list_training_processes

    def begin_meanwhile(spool: Path) -> tuple[markers.TrainingProcess, ...]:
        processes = listed(spool)
        begins.mkdir()
        return processes

    with monkeypatch.context() as patch:
        patch.setattr(markers, "list_training_processes", begin_meanwhile)
        forget_ended(first.spool)
    assert [*begins.parent.iterdir()] == [begins]
    assert markers.list_training_processes(first.spool) == ()


def test_a_save_whose_mark_cannot_be_written_is_tried_again_in_time(tmp_path: Path) -> None:
    (saver,) = ranks(tmp_path)
    save(saver, step=1)
    (tmp_path / "_ckptsync" / "saves").write_text("in the way")
    with pytest.raises(OSError, match="saves"):
        saver.commit(1)
    (tmp_path / "_ckptsync" / "saves").unlink()
    saver.commit(1)
    assert set(commits(tmp_path)) == {"checkpoint-1.0"}


def test_a_save_that_lies_elsewhere_is_said_and_not_passed_over(tmp_path: Path) -> None:
    """A trainer of somebody's own, or a callback that moves what was saved."""
    (saver,) = ranks(tmp_path)
    saver.remember(1)
    with pytest.raises(Incomplete, match="checkpoint-1: not found in"):
        saver.commit(1)


def test_where_only_rank_0_saves_a_node_has_nothing_and_that_is_right(tmp_path: Path) -> None:
    table = Table()
    savers = [
        trains(tmp_path / name, r, 2, table=table, only_model=True) for r, name in enumerate("ab")
    ]
    savers[1].remember(1)
    savers[1].commit(1)
    assert commits(tmp_path / "b") == {}


# --- the final model


def write_model(output_dir: Path, text: str) -> None:
    (output_dir / "fresh").write_text(text)
    (output_dir / "fresh").replace(output_dir / "model.safetensors")  # as safetensors writes


def test_the_final_model_is_pinned_by_the_first_rank_at_the_end(tmp_path: Path) -> None:
    savers = ranks(tmp_path, tmp_path)
    write_model(tmp_path, "final")
    for saver in reversed(savers):
        saver.end(3)
        saver.leave()
    commit = commits(tmp_path)["final.0"]
    assert (set(commit.files), commit.ranks, commit.step) == ({"model.safetensors"}, (0,), 3)


@pytest.mark.parametrize("why", ["not ended", "failed", "of a training before"])
def test_a_model_that_may_not_be_finished_is_not_pinned(tmp_path: Path, why: str) -> None:
    if why == "of a training before":
        write_model(tmp_path, "final")
    (saver,) = ranks(tmp_path)
    if why != "of a training before":
        write_model(tmp_path, "final")
    if why != "not ended":
        saver.end(3)
    saver.leave(has_failed=why == "failed")
    assert commits(tmp_path) == {}
    assert [b.left > 0 for b in markers.list_training_processes(saver.spool)] == [True]


def test_a_final_model_that_another_training_has_pinned_is_pinned_once(tmp_path: Path) -> None:
    (first,), (second,) = ranks(tmp_path), ranks(tmp_path)
    write_model(tmp_path, "final")
    for saver in (first, second):
        saver.end(3)
        saver.leave()
    assert set(commits(tmp_path)) == {"final.0"}


NAMES = (
    *("model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"),
    *("adapter_model.safetensors", "adapter_model.bin", "config.json", "vocab.txt", "merges.txt"),
    *("README.md", "train.log", "trainer_log.jsonl", ".hidden.json", "chat_template.jinja"),
    *("model.bin", "notes.txt", ".tmpabcdef", "tokenizer.model", "training_args.bin"),
    *("modeling_x.py", "events.out", "source.spm", "bpe.codes", "dict.txt"),
)


def test_the_final_model_is_what_the_worker_takes_it_to_be(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_text(name)
    (tmp_path / "checkpoint-1").mkdir()
    (final,) = (s for s in find_checkpoint_dirs(tmp_path) if s.name == FINAL)
    files = trainer_saves.list_final_model(tmp_path).files
    assert [f.path for f in files] == [f.path for f in list_checkpoint(final).files]


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_what_the_worker_takes_them_to_be(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(name)
    is_final = any(s.name == FINAL for s in find_checkpoint_dirs(tmp_path))
    assert bool(trainer_saves.list_weights(tmp_path)) == is_final


def test_weights_that_are_written_again_are_others(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("1")
    before = trainer_saves.list_weights(tmp_path)
    assert trainer_saves.list_weights(tmp_path) == before
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    written_in_place = trainer_saves.list_weights(tmp_path)
    assert written_in_place != before
    write_model(tmp_path, "1")
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert trainer_saves.list_weights(tmp_path) != written_in_place, "another file of the same time"
    assert trainer_saves.list_weights(tmp_path / "nowhere") == frozenset()


def test_ranks_that_never_meet_leave_it_to_the_files(tmp_path: Path) -> None:
    said = Said()
    saver = trains(tmp_path, 0, 2, said=said)
    for step in (1, 2):
        save(saver, step=step)
        saver.commit(step)
    assert markers.list_training_processes(tmp_path / "_ckptsync") == ()
    assert "not all ranks have a hook" in said[0]
