"""Is a checkpoint finished?  Every trap that a real trainer sets, as values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.checkpoint_dirs import Family
from ckptsync.walk import Stat
from ckptsync.worker.finished import Rule, is_lost, is_stable, judge
from ckptsync.worker.observation import Observation, TrainerState

RULE = Rule(quiet=10, unmarked=60, doubtful=600)
S = 10**9


def files(told: dict[str, float], size: int = 1) -> tuple[Stat, ...]:
    """Names and their mtimes in seconds."""
    return tuple(Stat(name, size, int(at * S), n, 0) for n, (name, at) in enumerate(told.items()))


def trainer(told: dict[str, float], **more: object) -> Observation:
    state = (
        TrainerState(4, int(told["trainer_state.json"] * S))
        if "trainer_state.json" in told
        else None
    )
    return replace(Observation("trainer", 4, files(told), state=state), **more)  # type: ignore[arg-type]


def wait(evidence: Observation) -> float | None:
    """Seconds from the first sight until it is finished; ``None``: never."""
    for after in (0.0, 10.0, 60.0, 600.0):
        if judge(evidence, after, RULE).finished:
            return after
        if after:
            assert not judge(evidence, after - 0.1, RULE).finished
    return None


DONE = {
    "model.safetensors": 100.0,
    "optimizer.pt": 101.0,
    "rng_state_0.pth": 101.1,
    "trainer_state.json": 101.2,
}
SHARDS = {"pytorch_model_fsdp_0/__2_0.distcp": 100.0, "rng_state_2.pth": 101.0}


def test_a_trainer_state_that_is_the_newest_needs_only_quiet() -> None:
    assert wait(trainer(DONE)) == 10
    assert wait(trainer(DONE | {"rng_state_1.pth": 105.0})) == 10


def test_no_clock_is_compared_with_another() -> None:
    for at in (-1e6, 0.0, 1e9, 1e12):
        assert wait(trainer({name: at + t for name, t in DONE.items()})) == 10


def test_zero_3_between_its_two_writes_waits_for_the_trainer_state() -> None:
    shards = {
        "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt": 100.0,
        "latest": 100.1,
        "config.json": 99.0,
    }
    assert wait(trainer(shards)) is None
    assert wait(trainer(shards | {"trainer_state.json": 102.0})) == 10


def test_an_old_trainer_state_proves_nothing_of_newer_shards() -> None:
    # written over, and never finished
    assert wait(trainer(DONE | {"optimizer.pt": 5000.0})) is None
    # a callback edits it after the trainer
    assert wait(trainer(DONE | {"model.safetensors": 103.0})) == 60


def test_a_node_of_shards_waits_longer_unless_something_else_tells() -> None:
    assert wait(trainer(SHARDS)) == 60
    assert wait(trainer(SHARDS, other_part=True)) == 10
    assert wait(trainer(SHARDS, later=True)) == 10


@pytest.mark.parametrize(
    "evidence",
    [
        trainer({}),
        trainer(DONE, writing=("optimizer.pt",)),
        trainer(DONE, unclosed=("model.safetensors",)),
        trainer(DONE, partial=files({"checkpoint-is-incomplete.txt": 1.0})),
    ],
)
def test_what_is_surely_unfinished_waits_for_ever_and_says_why(evidence: Observation) -> None:
    verdict = judge(evidence, 1e9, RULE)
    assert not verdict.finished
    assert verdict.remaining is None
    assert verdict.reason


def test_a_partial_file_that_a_crash_left_delays_and_does_not_block() -> None:
    assert wait(trainer(DONE, partial=files({".tmpAb3xYz": 102.0}))) == 600


def test_of_a_save_that_was_seen_to_begin_no_time_is_compared() -> None:
    jumped = DONE | {"trainer_state.json": 101.2 - 3600}
    assert wait(trainer(jumped)) is None
    assert wait(trainer(jumped, is_new=True)) == 10
    sharded = {"m/__0_0.distcp": 4000.0, "m/.metadata": 401.0, "rng_state_0.pth": 402.0}
    assert wait(replace(trainer(sharded | {"trainer_state.json": 403.0}), is_new=True)) == 10
    assert wait(replace(trainer(sharded), is_new=True)) is None
    assert wait(trainer(DONE, is_new=True, state=TrainerState(8, 200 * S))) == 600


def test_a_trainer_state_of_another_step_or_cut_short_is_doubted() -> None:
    assert wait(trainer(DONE, state=TrainerState(8, 200 * S))) == 600
    assert wait(trainer(DONE, state=TrainerState(None, 200 * S))) == 600


def test_empty_shards_are_legal_and_unknown_writers_do_not_block() -> None:
    assert wait(replace(trainer(DONE), files=files(DONE, size=0))) == 10
    assert wait(trainer(DONE, writing=None)) == 10


def test_what_rotation_took_is_finished_at_once_if_it_was_at_rest_before_and_else_never() -> None:
    assert wait(trainer(DONE, is_gone=True, stable=True)) == 0
    assert wait(trainer(SHARDS, is_gone=True, stable=True)) == 0
    for more in (
        {},
        {"later": True},
        {"other_part": True},
        {"hook": "marked"},
        {"hook": "training"},
    ):
        assert wait(trainer(DONE, is_gone=True, **more)) is None
        assert is_lost(trainer(DONE, is_gone=True, **more))


def test_what_is_gone_and_was_at_rest_is_lost_once_its_end_is_known_to_be_missing() -> None:
    kept = trainer({"config.json": 1.0, "model.safetensors": 2.0}, is_gone=True, stable=True)
    assert (is_lost(kept), wait(kept), wait(replace(kept, has_similar=True))) == (False, None, 0)
    assert is_lost(replace(kept, has_trainer=True))
    assert not any(
        is_lost(replace(kept, has_trainer=True, hook=word)) for word in ("committed", "marked")
    )


def test_only_what_is_gone_can_be_hopeless() -> None:
    half = trainer({"config.json": 1.0, "model.safetensors": 2.0})
    assert not is_lost(half)
    assert is_lost(replace(half, is_gone=True))
    assert not is_lost(replace(half, is_gone=True, hook="committed"))
    assert not is_lost(replace(half, is_gone=True, stable=True))


def test_what_the_hook_committed_is_finished_whatever_its_files_say() -> None:
    assert wait(trainer(DONE, hook="committed", is_gone=True)) == 0
    assert (
        wait(
            trainer(
                DONE | {"model.safetensors": 9000.0},
                hook="committed",
                unclosed=("log.json", "x.bin"),
            )
        )
        == 0
    )
    assert wait(trainer(DONE, hook="committed", writing=("model.safetensors",))) is None


def test_a_training_that_lives_is_waited_for_and_not_for_ever() -> None:
    # callbacks may rewrite it after trainer_state.json
    assert wait(trainer(DONE, hook="training")) == 600


def test_marks_of_every_rank_need_a_second_and_do_not_outweigh_a_doubt() -> None:
    observation = trainer(SHARDS, hook="marked")
    assert not judge(observation, 0.9, RULE).finished
    assert judge(observation, 1.0, RULE).finished
    assert wait(trainer(DONE, hook="marked", partial=files({".tmpAb3xYz": 102.0}))) == 600


def test_a_rank_whose_random_state_is_not_here_yet_is_waited_for() -> None:
    sharded = DONE | {"m/__0_0.distcp": 100.0, "m/__1_0.distcp": 100.0, "m/.metadata": 100.5}
    assert wait(trainer(sharded)) == 60
    assert wait(trainer(sharded | {"rng_state_1.pth": 101.5})) == 10
    assert wait(trainer(SHARDS | {"m/__3_0.distcp": 100.0}, other_part=True)) == 60
    assert wait(trainer(sharded | {"rng_state_1.pth": 98.9})) == 60  # of the save before this one


def test_that_training_goes_on_proves_nothing_of_a_save_that_a_crash_cut_short() -> None:
    assert wait(trainer({"model.safetensors": 1.0, "config.json": 1.0}, later=True)) is None
    assert (
        wait(trainer({"model.safetensors": 1.0, "config.json": 1.0}, later=True, has_similar=True))
        == 600
    )
    assert wait(trainer(DONE | {"model.safetensors": 103.0}, later=True)) == 10


def test_accelerate_s_scripts_use_the_trainer_s_names_and_write_no_trainer_state() -> None:
    saved = {"model.safetensors": 1.0, "optimizer.bin": 2.0, "random_states_0.pkl": 3.0}
    assert wait(trainer(saved)) == 60
    assert wait(trainer(saved, later=True)) == 10


def test_json_that_is_none_delays_and_does_not_block() -> None:
    assert wait(trainer(DONE, unclosed=("metrics.json",))) == 60
    assert wait(trainer(DONE, unclosed=("trainer_state.json",))) is None


V1 = {
    "model/__0_0.distcp": 1.0,
    "model/.metadata": 2.0,
    "metadata.json": 3.0,
    "dataloader/rank_0.pt": 3.0,
    "rng_state/rank_0.pt": 4.0,
}


def test_llama_factory_s_marker_is_the_newest_but_for_random_states() -> None:
    assert wait(trainer(V1)) is None
    of_a_script = trainer({name: at for name, at in V1.items() if name.startswith("model/")})
    assert (wait(of_a_script), wait(replace(of_a_script, has_similar=True))) == (None, 600)
    assert wait(trainer(V1 | {"CHECKPOINT_COMPLETE": 3.0})) == 10
    # the save before it, which this one writes over
    assert wait(trainer(V1 | {"CHECKPOINT_COMPLETE": 0.5})) == 600
    assert (
        wait(
            trainer(
                {"model/__2_0.distcp": 1.0, "dataloader/rank_2.pt": 3.0, "rng_state/rank_2.pt": 4.0}
            )
        )
        == 60
    )


def test_the_final_model_waits_for_the_training_to_leave_or_for_long() -> None:
    final = Observation(
        "final",
        None,
        files({"model-00001-of-00002.safetensors": 1.0, "model-00002-of-00002.safetensors": 1.0}),
    )
    assert wait(final) == 60
    assert wait(replace(final, hook="training")) == 600
    assert judge(replace(final, hook="marked"), 1.0, RULE).finished
    assert (
        "model-00002-of-00002.safetensors is missing"
        in judge(replace(final, files=final.files[:1]), 0.0, RULE).reason
    )


def test_verl_s_driver_says_which_step_is_written() -> None:
    saved = files(
        {
            f"actor/{kind}_world_size_2_rank_{r}.pt": 100.0
            for kind in ("model", "optim", "extra_state")
            for r in (0, 1)
        }
    )
    observation = Observation("verl", 4, saved)
    assert wait(observation) == 60
    assert wait(replace(observation, marker=TrainerState(4, 101 * S))) == 10
    assert wait(replace(observation, marker=TrainerState(6, 101 * S))) == 10
    assert wait(replace(observation, later=True)) == 10
    for stale in (TrainerState(3, 101 * S), TrainerState(None, 101 * S), TrainerState(4, 99 * S)):
        assert wait(replace(observation, marker=stale)) == 60


def test_verl_s_sft_ranks_leave_their_loaders_state_beside_the_word_of_rank_0() -> None:
    saved = {
        "model_world_size_2_rank_0.pt": 100.0,
        "model_world_size_2_rank_1.pt": 100.0,
        "data_0.pt": 100.5,
        "data_1.pt": 101.5,
    }
    observation = Observation("verl", 4, files(saved), marker=TrainerState(4, 101 * S))
    assert wait(observation) == 10
    assert (
        wait(replace(observation, files=files(saved | {"model_world_size_2_rank_1.pt": 101.5})))
        == 60
    )


def test_lightning_s_file_is_whole_when_it_appears_and_its_directory_when_meta_is_the_newest() -> (
    None
):
    assert wait(Observation("lightning", 4, files({"epoch=0-step=4.ckpt": 1.0}))) == 10
    assert (
        wait(
            Observation(
                "lightning",
                4,
                files({"epoch=0-step=4.ckpt": 1.0}),
                unclosed=("epoch=0-step=4.ckpt",),
            )
        )
        is None
    )
    sharded = {"__0_0.distcp": 1.0, "__1_0.distcp": 1.0, ".metadata": 2.0}
    assert wait(Observation("lightning", 4, files(sharded))) == 60
    assert wait(Observation("lightning", 4, files(sharded | {"meta.pt": 3.0}))) == 10
    assert wait(Observation("lightning", 4, files(sharded | {"meta.pt": 0.0}))) == 60


@pytest.mark.parametrize(
    ("family", "seconds"), [("dcp", 10), ("accelerate", 60), ("deepspeed", 60), ("trainer", 600)]
)
def test_metadata_is_the_last_word_only_where_nothing_follows_it(
    family: Family, seconds: float
) -> None:
    assert (
        wait(Observation(family, 4, files({".metadata": 100.0, "__0_0.distcp": 100.0}))) == seconds
    )


def test_metadata_older_than_its_shards_is_a_save_in_progress() -> None:
    told = {"step/.metadata": 96.0, "step/__0_0.distcp": 100.0}
    assert wait(trainer(told | {"step/.metadata": 90.0, "trainer_state.json": 101.0})) is None
    # it may be copied, with times as they came
    assert wait(trainer(told | {"trainer_state.json": 101.0})) == 60
    assert wait(trainer(told | {"step/.metadata": 100.0, "trainer_state.json": 101.0})) == 10


def test_a_partial_file_older_than_the_end_of_the_save_is_of_one_that_was_killed_before() -> None:
    left = files({".tmpAb3xYz": 99.0, "optimizer_0/.metadata.tmp": 99.1})
    assert wait(trainer(DONE, partial=left)) == 10
    assert wait(trainer(DONE, partial=left + files({".tmpZz9xYz": 101.3}))) == 600
    assert wait(trainer(DONE, partial=left, state=TrainerState(None, 200 * S))) == 600
    assert wait(trainer(SHARDS, partial=left)) == 600


def rest(evidence: Observation, still: float) -> bool:
    return is_stable(evidence, still, RULE, judge(evidence, still, RULE))


def test_two_looks_that_see_the_same_whole_save_are_enough() -> None:
    assert not rest(trainer(DONE), 0.3)
    assert rest(trainer(DONE), 0.45)


def test_a_directory_that_rotation_has_begun_to_empty_is_never_at_rest() -> None:
    assert not rest(trainer(DONE, was_emptied=True), 9.0)
    assert rest(
        trainer(DONE, was_emptied=True, is_new=True), 9.0
    )  # a clock was set while we looked on


@pytest.mark.parametrize(
    "evidence",
    [
        trainer({name: at for name, at in DONE.items() if name != "trainer_state.json"}),
        trainer(DONE, writing=("optimizer.pt",)),
        trainer(DONE, unclosed=("model.safetensors",)),
        trainer(DONE, partial=files({".tmpAb3xYz": 102.0})),
        trainer(DONE, state=TrainerState(None, int(101.2 * S))),
        trainer(DONE, state=TrainerState(8, int(101.2 * S))),
        # and no random state of rank 1
        trainer(DONE | {"m/__0_0.distcp": 100.0, "m/__1_0.distcp": 100.0}),
        trainer(DONE | {"model.safetensors": 102.0}),
        trainer(DONE, is_gone=True),
        trainer(SHARDS),
        trainer({}),
    ],
)
def test_what_may_still_be_written_to_is_not_at_rest(evidence: Observation) -> None:
    assert not rest(evidence, 9.0)


def test_what_is_finished_is_at_rest() -> None:
    assert rest(trainer(SHARDS), 60.0)
    assert rest(trainer(SHARDS, hook="committed"), 0.0)


def test_every_rank_s_last_file_says_that_accelerate_s_save_is_at_rest() -> None:
    saved = {"model.safetensors": 1.0, "random_states_0.pkl": 2.0, "random_states_1.pkl": 2.0}

    def rests(told: dict[str, float]) -> bool:
        return rest(Observation("accelerate", 4, files(told)), 9.0)

    assert rests(saved)
    assert not rests({"random_states_1.pkl": 1.0})  # the first of all
    assert not rests(saved | {"model.safetensors": 3.0})  # random states of the save before
    assert rests(saved | {"custom_checkpoint_0.pkl": 3.0})


def test_what_might_be_cut_short_is_at_rest_when_nobody_can_be_writing_it_any_more() -> None:
    bare = trainer({"config.json": 1.0, "model.safetensors": 2.0})
    assert (rest(bare, 599.9), rest(bare, 600.0)) == (False, True)
    assert not rest(replace(bare, has_trainer=True), 600.0)
    assert not rest(replace(bare, partial=files({".tmpAb3xYz": 1.0})), 600.0)
