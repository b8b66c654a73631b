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
SHARDED = DONE | {"m/__0_0.distcp": 100.0, "m/__1_0.distcp": 100.0, "m/.metadata": 100.5}
BARE = {"config.json": 1.0, "model.safetensors": 1.0}
ZERO_3 = {
    "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt": 100.0,
    "latest": 100.1,
    "config.json": 99.0,
}
JUMPED = DONE | {"trainer_state.json": 101.2 - 3600}
LATE = {"m/__0_0.distcp": 4000.0, "m/.metadata": 401.0, "rng_state_0.pth": 402.0}
ACCELERATE = {"model.safetensors": 1.0, "optimizer.bin": 2.0, "random_states_0.pkl": 3.0}
V1 = {
    "model/__0_0.distcp": 1.0,
    "model/.metadata": 2.0,
    "metadata.json": 3.0,
    "dataloader/rank_0.pt": 3.0,
    "rng_state/rank_0.pt": 4.0,
}
V1_SHARDS = {"model/__2_0.distcp": 1.0, "dataloader/rank_2.pt": 3.0, "rng_state/rank_2.pt": 4.0}
SCRIPT = {name: at for name, at in V1.items() if name.startswith("model/")}
STEP = {"step/.metadata": 96.0, "step/__0_0.distcp": 100.0, "trainer_state.json": 101.0}
FAMILIES: dict[Family, float] = {"dcp": 10, "accelerate": 60, "deepspeed": 60, "trainer": 600}
TMP = files({".tmpAb3xYz": 102.0})
OLD_TMP = files({".tmpAb3xYz": 99.0, "optimizer_0/.metadata.tmp": 99.1})
TORN_STATE = TrainerState(None, 200 * S)


@pytest.mark.parametrize(
    ("evidence", "seconds"),
    [
        # trainer_state.json is the newest: only quiet is needed
        (trainer(DONE), 10),
        (trainer(DONE | {"rng_state_1.pth": 105.0}), 10),
        # no clock is compared with another
        *((trainer({n: at + t for n, t in DONE.items()}), 10) for at in (-1e6, 0.0, 1e9, 1e12)),
        # ZeRO-3 between its two writes
        (trainer(ZERO_3), None),
        (trainer(ZERO_3 | {"trainer_state.json": 102.0}), 10),
        # an old trainer_state.json proves nothing of newer shards
        (trainer(DONE | {"optimizer.pt": 5000.0}), None),
        # a callback edits a file after the trainer
        (trainer(DONE | {"model.safetensors": 103.0}), 60),
        # a node of shards waits longer unless something else tells
        (trainer(SHARDS), 60),
        (trainer(SHARDS, other_part=True), 10),
        (trainer(SHARDS, later=True), 10),
        # a partial file delays and does not block, unless it is older than the end of the save
        (trainer(DONE, partial=TMP), 600),
        (trainer(DONE, partial=OLD_TMP), 10),
        (trainer(DONE, partial=OLD_TMP + files({".tmpZz9xYz": 101.3})), 600),
        (trainer(DONE, partial=OLD_TMP, state=TORN_STATE), 600),
        (trainer(SHARDS, partial=OLD_TMP), 600),
        # of a save that was seen to begin no time is compared
        (trainer(JUMPED), None),
        (trainer(JUMPED, is_new=True), 10),
        (trainer(LATE | {"trainer_state.json": 403.0}, is_new=True), 10),
        (trainer(LATE, is_new=True), None),
        (trainer(DONE, is_new=True, state=TrainerState(8, 200 * S)), 600),
        # a trainer_state.json of another step, or torn
        (trainer(DONE, state=TrainerState(8, 200 * S)), 600),
        (trainer(DONE, state=TORN_STATE), 600),
        # empty shards are legal, and unknown writers do not block
        (replace(trainer(DONE), files=files(DONE, size=0)), 10),
        (trainer(DONE, writing=None), 10),
        # what rotation took is finished at once if it was at rest before
        (trainer(DONE, is_gone=True, stable=True), 0),
        (trainer(SHARDS, is_gone=True, stable=True), 0),
        # what the hook committed is finished whatever its files say
        (trainer(DONE, hook="committed", is_gone=True), 0),
        (
            trainer(
                DONE | {"model.safetensors": 9e3}, hook="committed", unclosed=("a.json", "x.bin")
            ),
            0,
        ),
        (trainer(DONE, hook="committed", writing=("model.safetensors",)), None),
        # a training that lives may rewrite it after trainer_state.json
        (trainer(DONE, hook="training"), 600),
        (trainer(DONE, hook="marked", partial=TMP), 600),
        # a rank whose random state is not here yet, or of the save before this one
        (trainer(SHARDED), 60),
        (trainer(SHARDED | {"rng_state_1.pth": 101.5}), 10),
        (trainer(SHARDED | {"rng_state_1.pth": 98.9}), 60),
        (trainer(SHARDS | {"m/__3_0.distcp": 100.0}, other_part=True), 60),
        # that training goes on proves nothing of a save that a crash cut short
        (trainer(BARE, later=True), None),
        (trainer(BARE, later=True, has_similar=True), 600),
        (trainer(DONE | {"model.safetensors": 103.0}, later=True), 10),
        # accelerate's scripts write no trainer_state.json
        (trainer(ACCELERATE), 60),
        (trainer(ACCELERATE, later=True), 10),
        # JSON that is none delays
        (trainer(DONE, unclosed=("metrics.json",)), 60),
        (trainer(DONE, unclosed=("trainer_state.json",)), None),
        # LLaMA-Factory's marker is the newest but for random states
        (trainer(V1), None),
        (trainer(SCRIPT), None),
        (trainer(SCRIPT, has_similar=True), 600),
        (trainer(V1 | {"CHECKPOINT_COMPLETE": 3.0}), 10),
        (trainer(V1 | {"CHECKPOINT_COMPLETE": 0.5}), 600),
        (trainer(V1_SHARDS), 60),
        # metadata is the last word only where nothing follows it
        *(
            (Observation(family, 4, files({".metadata": 100.0, "__0_0.distcp": 100.0})), seconds)
            for family, seconds in FAMILIES.items()
        ),
        *(
            (
                Observation(
                    "dcp", 4, files({".metadata": 99.0, "__0_0.distcp": 99.0}), marker=told
                ),
                s,
            )
            for told, s in ((TrainerState(4, 100 * S), 10), (TrainerState(3, 100 * S), 60))
        ),
        # metadata older than its shards: a copy may have such times
        (trainer(STEP | {"step/.metadata": 90.0}), None),
        (trainer(STEP), 60),
        (trainer(STEP | {"step/.metadata": 100.0}), 10),
    ],
)
def test_seconds_without_a_change_until_a_save_is_finished(
    evidence: Observation, seconds: float | None
) -> None:
    assert wait(evidence) == seconds


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


@pytest.mark.parametrize(
    "more", [{}, {"later": True}, {"other_part": True}, {"hook": "marked"}, {"hook": "training"}]
)
def test_what_rotation_took_before_it_was_at_rest_is_lost(more: dict[str, object]) -> None:
    assert wait(trainer(DONE, is_gone=True, **more)) is None
    assert is_lost(trainer(DONE, is_gone=True, **more))


def test_what_is_gone_and_was_at_rest_is_lost_once_its_end_is_known_to_be_missing() -> None:
    kept = trainer(BARE, is_gone=True, stable=True)
    assert (is_lost(kept), wait(kept), wait(replace(kept, has_similar=True))) == (False, None, 0)
    assert is_lost(replace(kept, has_trainer=True))
    for hook in ("committed", "marked"):
        assert not is_lost(replace(kept, has_trainer=True, hook=hook))
    assert not is_lost(replace(kept, is_gone=False, stable=False))
    assert is_lost(replace(kept, stable=False))
    assert not is_lost(replace(kept, stable=False, hook="committed"))


def test_marks_of_every_rank_need_a_second() -> None:
    observation = trainer(SHARDS, hook="marked")
    assert not judge(observation, 0.9, RULE).finished
    assert judge(observation, 1.0, RULE).finished


def test_the_final_model_waits_for_the_training_to_leave_or_for_long() -> None:
    parts = [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]
    final = Observation("final", None, files(dict.fromkeys(parts, 1.0)))
    assert wait(final) == 60
    assert wait(replace(final, hook="training")) == 600
    assert judge(replace(final, hook="marked"), 1.0, RULE).finished
    verdict = judge(replace(final, files=final.files[:1]), 0.0, RULE)
    assert f"{parts[1]} is missing" in verdict.reason


def test_verl_s_driver_says_which_step_is_written() -> None:
    kinds = ("model", "optim", "extra_state")
    names = [f"actor/{kind}_world_size_2_rank_{r}.pt" for kind in kinds for r in (0, 1)]
    observation = Observation("verl", 4, files(dict.fromkeys(names, 100.0)))
    assert wait(observation) == 60
    assert wait(replace(observation, marker=TrainerState(4, 100 * S))) == 10
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
    late = files(saved | {"model_world_size_2_rank_1.pt": 101.5})
    assert wait(replace(observation, files=late)) == 60


def test_lightning_s_file_is_whole_when_it_appears_and_its_directory_with_meta() -> None:
    name = "epoch=0-step=4.ckpt"
    assert wait(Observation("lightning", 4, files({name: 1.0}))) == 10
    assert wait(Observation("lightning", 4, files({name: 1.0}), unclosed=(name,))) is None
    sharded = {"__0_0.distcp": 1.0, "__1_0.distcp": 1.0, ".metadata": 2.0}
    assert wait(Observation("lightning", 4, files(sharded))) == 60
    assert wait(Observation("lightning", 4, files(sharded | {"meta.pt": 3.0}))) == 10
    assert wait(Observation("lightning", 4, files(sharded | {"meta.pt": 0.0}))) == 60


def rest(evidence: Observation, still: float) -> bool:
    return is_stable(evidence, still, RULE, judge(evidence, still, RULE))


def test_two_looks_that_see_the_same_whole_save_are_enough() -> None:
    assert not rest(trainer(DONE), 0.3)
    assert rest(trainer(DONE), 0.45)


def test_a_directory_that_rotation_has_begun_to_empty_is_never_at_rest() -> None:
    assert not rest(trainer(DONE, was_emptied=True), 9.0)
    # a clock was set meanwhile
    assert rest(trainer(DONE, was_emptied=True, is_new=True), 9.0)


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
    bare = trainer(BARE)
    assert (rest(bare, 599.9), rest(bare, 600.0)) == (False, True)
    assert not rest(replace(bare, has_trainer=True), 600.0)
    assert not rest(replace(bare, partial=files({".tmpAb3xYz": 1.0})), 600.0)
