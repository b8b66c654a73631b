"""What was seen whole and at rest before rotation took it, as values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.worker.observed import Evidence, Rule, Sighting, TrainerState
from ckptsync.worker.resting import at_rest, mark, was_at_rest
from tests.test_worker_settle import DONE, SHARDS, S, files, trainer

NEWEST = int(101.2 * S)
MARK = mark(files(DONE))


def rest(evidence: Evidence, seen_for: float = 0.0) -> int:
    return at_rest(evidence, Sighting(evidence.files, 1000.0), 1000.0 + seen_for, Rule())


def test_two_looks_that_see_the_same_whole_save_are_enough() -> None:
    assert rest(trainer(DONE), 0.3) == 0
    assert rest(trainer(DONE), 0.45) == MARK


def test_one_look_is_enough_where_nothing_came_or_went_for_a_second() -> None:
    quiet = trainer(DONE, folders=int(101.1 * S))
    assert rest(replace(quiet, pulse=int(102.1 * S))) == 0
    assert rest(replace(quiet, pulse=int(102.2 * S))) == MARK
    assert rest(replace(quiet, pulse=int(105.0 * S), folders=0)) == 0  # a file system that does not tell
    assert rest(replace(quiet, pulse=int(103.0 * S), folders=int(102.1 * S))) == 0


def test_a_directory_that_rotation_has_begun_to_empty_is_never_at_rest() -> None:
    half = {name: at for name, at in DONE.items() if name != "model.safetensors"}
    assert rest(trainer(half, folders=int(103.0 * S), pulse=int(105.0 * S)), 9.0) == 0


def test_a_clock_that_was_set_is_told_from_rotation_where_the_save_was_seen_to_begin() -> None:
    jumped = trainer(DONE, folders=int(3700.0 * S), fresh=True)
    assert (rest(jumped, 1.9), rest(jumped, 2.0)) == (0, MARK)


@pytest.mark.parametrize(
    "evidence",
    [
        trainer({name: at for name, at in DONE.items() if name != "trainer_state.json"}),
        trainer(DONE, writing=("optimizer.pt",)),
        trainer(DONE, unclosed=("model.safetensors",)),
        trainer(DONE, partial=files({".tmpAb3xYz": 102.0})),
        trainer(DONE, state=TrainerState(None, NEWEST)),
        trainer(DONE, state=TrainerState(8, NEWEST)),
        trainer(DONE | {"model.safetensors": 102.0}),
        trainer(DONE | {"m/__0_0.distcp": 100.0, "m/__1_0.distcp": 100.0}),  # and no random state of rank 1
        trainer(DONE, gone=True),
        trainer(SHARDS),
        trainer({}),
    ],
)
def test_what_may_still_be_written_to_is_not_at_rest(evidence: Evidence) -> None:
    assert rest(evidence, 9.0) == 0


def test_what_is_finished_is_at_rest() -> None:
    assert rest(trainer(SHARDS), 60.0) == mark(files(SHARDS))
    assert rest(trainer(SHARDS, hook="committed")) == mark(files(SHARDS))


def test_where_nothing_proves_it_every_rank_s_last_file_does_in_time() -> None:
    saved = {"model.safetensors": 1.0, "random_states_0.pkl": 2.0, "random_states_1.pkl": 2.0}
    found = Evidence("accelerate", 4, files(saved))
    assert (rest(found, 1.9), rest(found, 2.0)) == (0, mark(found.files))
    assert rest(Evidence("accelerate", 4, files({"random_states_1.pkl": 1.0})), 9.0) == 0  # the first of all
    assert rest(Evidence("accelerate", 4, files(saved | {"model.safetensors": 3.0})), 9.0) == 0  # random states of the save before
    assert rest(Evidence("accelerate", 4, files(saved | {"custom_checkpoint_0.pkl": 3.0})), 2.0) > 0


def test_what_might_be_cut_short_is_at_rest_when_nobody_can_be_writing_it_any_more() -> None:
    bare = trainer({"config.json": 1.0, "model.safetensors": 2.0})
    assert (rest(bare, 599.9), rest(bare, 600.0)) == (0, mark(bare.files))
    assert rest(replace(bare, awaited=True), 600.0) == 0
    assert rest(replace(bare, partial=files({".tmpAb3xYz": 1.0})), 600.0) == 0


def test_it_holds_until_something_is_added_taken_or_written_again() -> None:
    assert was_at_rest(MARK, files(DONE))
    assert was_at_rest(MARK, (replace(f, inode=9, device=9) for f in files(DONE)))  # a reflink of each
    assert not was_at_rest(MARK, files(DONE | {"value_head.safetensors": 1.0}))
    assert not was_at_rest(MARK, files(DONE)[1:])
    assert not was_at_rest(MARK, files(DONE, size=2))
    assert not was_at_rest(0, ())
