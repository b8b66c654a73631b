"""What trainers leave that says that a save is finished, and what says that it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.scan import Family
from ckptsync.worker.observed import Evidence, TrainerState
from tests.test_worker_settle import DONE, SHARDS, S, files, trainer, wait


def test_verl_s_driver_says_which_step_is_written() -> None:
    saved = files({f"actor/{kind}_world_size_2_rank_{r}.pt": 100.0 for kind in ("model", "optim", "extra_state") for r in (0, 1)})
    found = Evidence("verl", 4, saved)
    assert wait(found) == 60
    assert wait(replace(found, marker=TrainerState(4, 101 * S))) == 10
    assert wait(replace(found, marker=TrainerState(6, 101 * S))) == 10
    assert wait(replace(found, later=True)) == 10
    for stale in (TrainerState(3, 101 * S), TrainerState(None, 101 * S), TrainerState(4, 99 * S)):
        assert wait(replace(found, marker=stale)) == 60


def test_verl_s_sft_ranks_leave_their_loaders_state_beside_the_word_of_rank_0() -> None:
    saved = {"model_world_size_2_rank_0.pt": 100.0, "model_world_size_2_rank_1.pt": 100.0, "data_0.pt": 100.5, "data_1.pt": 101.5}
    found = Evidence("verl", 4, files(saved), marker=TrainerState(4, 101 * S))
    assert wait(found) == 10
    assert wait(replace(found, files=files(saved | {"model_world_size_2_rank_1.pt": 101.5}))) == 60


def test_lightning_s_file_is_whole_when_it_appears_and_its_directory_when_meta_is_the_newest() -> None:
    assert wait(Evidence("lightning", 4, files({"epoch=0-step=4.ckpt": 1.0}))) == 10
    assert wait(Evidence("lightning", 4, files({"epoch=0-step=4.ckpt": 1.0}), unclosed=("epoch=0-step=4.ckpt",))) is None
    sharded = {"__0_0.distcp": 1.0, "__1_0.distcp": 1.0, ".metadata": 2.0}
    assert wait(Evidence("lightning", 4, files(sharded))) == 60
    assert wait(Evidence("lightning", 4, files(sharded | {"meta.pt": 3.0}))) == 10
    assert wait(Evidence("lightning", 4, files(sharded | {"meta.pt": 0.0}))) == 60


@pytest.mark.parametrize(("family", "seconds"), [("dcp", 10), ("accelerate", 60), ("deepspeed", 60), ("trainer", 600)])
def test_metadata_is_the_last_word_only_where_nothing_follows_it(family: Family, seconds: float) -> None:
    assert wait(Evidence(family, 4, files({".metadata": 100.0, "__0_0.distcp": 100.0}))) == seconds


def test_metadata_older_than_its_shards_is_a_save_in_progress() -> None:
    told = {"step/.metadata": 96.0, "step/__0_0.distcp": 100.0}
    assert wait(trainer(told | {"step/.metadata": 90.0, "trainer_state.json": 101.0})) is None
    assert wait(trainer(told | {"trainer_state.json": 101.0})) == 60  # it may be copied, with times as they came
    assert wait(trainer(told | {"step/.metadata": 100.0, "trainer_state.json": 101.0})) == 10


def test_a_partial_file_that_is_older_than_the_end_of_the_save_is_of_one_that_was_killed_before() -> None:
    left = files({".tmpAb3xYz": 99.0, "optimizer_0/.metadata.tmp": 99.1})
    assert wait(trainer(DONE, partial=left)) == 10
    assert wait(trainer(DONE, partial=left + files({".tmpZz9xYz": 101.3}))) == 600
    assert wait(trainer(DONE, partial=left, state=TrainerState(None, 200 * S))) == 600
    assert wait(trainer(SHARDS, partial=left)) == 600
