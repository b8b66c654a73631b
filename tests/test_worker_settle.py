"""Is a checkpoint finished?  Every trap that a real trainer sets, as values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.walk import Stat
from ckptsync.worker.observed import Evidence, Rule, Sighting, TrainerState
from ckptsync.worker.settle import is_hopeless, judge

RULE = Rule(quiet=10, unmarked=60, doubtful=600)
S = 10**9


def files(told: dict[str, float], size: int = 1) -> tuple[Stat, ...]:
    """Names and their mtimes in seconds."""
    return tuple(Stat(name, size, int(at * S), n, 0) for n, (name, at) in enumerate(told.items()))


def trainer(told: dict[str, float], **more: object) -> Evidence:
    state = TrainerState(4, int(told["trainer_state.json"] * S)) if "trainer_state.json" in told else None
    return replace(Evidence("trainer", 4, files(told), state=state), **more)  # type: ignore[arg-type]


def wait(evidence: Evidence) -> float | None:
    """Seconds from the first sight until it is finished; ``None``: never."""
    seen = Sighting(evidence.files, 1000.0)
    for after in (0.0, 10.0, 60.0, 600.0):
        if judge(evidence, seen, 1000.0 + after, RULE).finished:
            return after
        if after:
            assert not judge(evidence, seen, 1000.0 + after - 0.1, RULE).finished
    return None


DONE = {"model.safetensors": 100.0, "optimizer.pt": 101.0, "rng_state_0.pth": 101.1, "trainer_state.json": 101.2}
SHARDS = {"pytorch_model_fsdp_0/__2_0.distcp": 100.0, "rng_state_2.pth": 101.0}


def test_a_trainer_state_that_is_the_newest_needs_only_quiet() -> None:
    assert wait(trainer(DONE)) == 10
    assert wait(trainer(DONE | {"rng_state_1.pth": 105.0})) == 10


def test_no_clock_is_compared_with_another() -> None:
    for at in (-1e6, 0.0, 1e9, 1e12):
        assert wait(trainer({name: at + t for name, t in DONE.items()})) == 10


def test_zero_3_between_its_two_writes_waits_for_the_trainer_state() -> None:
    shards = {"global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt": 100.0, "latest": 100.1, "config.json": 99.0}
    assert wait(trainer(shards)) is None
    assert wait(trainer(shards | {"trainer_state.json": 102.0})) == 10


def test_an_old_trainer_state_proves_nothing_of_newer_shards() -> None:
    assert wait(trainer(DONE | {"optimizer.pt": 5000.0})) is None  # written over, and never finished
    assert wait(trainer(DONE | {"model.safetensors": 103.0})) == 60  # a callback edits it after the trainer


def test_a_node_of_shards_waits_longer_unless_something_else_tells() -> None:
    assert wait(trainer(SHARDS)) == 60
    assert wait(trainer(SHARDS, mates=True)) == 10
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
def test_what_is_surely_unfinished_waits_for_ever_and_says_why(evidence: Evidence) -> None:
    verdict = judge(evidence, Sighting(evidence.files, 0.0), 1e9, RULE)
    assert not verdict.finished
    assert verdict.left is None
    assert verdict.reason


def test_a_partial_file_that_a_crash_left_delays_and_does_not_block() -> None:
    assert wait(trainer(DONE, partial=files({".tmpAb3xYz": 102.0}))) == 600


def test_of_a_save_that_was_seen_to_begin_no_time_is_compared() -> None:
    jumped = DONE | {"trainer_state.json": 101.2 - 3600}
    assert wait(trainer(jumped)) is None
    assert wait(trainer(jumped, fresh=True)) == 10
    sharded = {"m/__0_0.distcp": 4000.0, "m/.metadata": 401.0, "rng_state_0.pth": 402.0}
    assert wait(replace(trainer(sharded | {"trainer_state.json": 403.0}), fresh=True)) == 10
    assert wait(replace(trainer(sharded), fresh=True)) is None
    assert wait(trainer(DONE, fresh=True, state=TrainerState(8, 200 * S))) == 600


def test_a_trainer_state_of_another_step_or_cut_short_is_doubted() -> None:
    assert wait(trainer(DONE, state=TrainerState(8, 200 * S))) == 600
    assert wait(trainer(DONE, state=TrainerState(None, 200 * S))) == 600


def test_empty_shards_are_legal_and_unknown_writers_do_not_block() -> None:
    assert wait(replace(trainer(DONE), files=files(DONE, size=0))) == 10
    assert wait(trainer(DONE, writing=None)) == 10


def test_what_rotation_took_is_finished_at_once_if_it_was_at_rest_before_and_else_never() -> None:
    assert wait(trainer(DONE, gone=True, stable=True)) == 0
    assert wait(trainer(SHARDS, gone=True, stable=True)) == 0
    for more in ({}, {"later": True}, {"mates": True}, {"hook": "marked"}, {"hook": "training"}):
        assert wait(trainer(DONE, gone=True, **more)) is None
        assert is_hopeless(trainer(DONE, gone=True, **more))


def test_what_is_gone_and_was_at_rest_is_hopeless_all_the_same_once_its_end_is_known_to_be_missing() -> None:
    kept = trainer({"config.json": 1.0, "model.safetensors": 2.0}, gone=True, stable=True)
    assert (is_hopeless(kept), wait(kept), wait(replace(kept, alike=True))) == (False, None, 0)
    assert is_hopeless(replace(kept, awaited=True))
    assert not any(is_hopeless(replace(kept, awaited=True, hook=word)) for word in ("committed", "marked"))


def test_only_what_is_gone_can_be_hopeless() -> None:
    half = trainer({"config.json": 1.0, "model.safetensors": 2.0})
    assert not is_hopeless(half)
    assert is_hopeless(replace(half, gone=True))
    assert not is_hopeless(replace(half, gone=True, hook="committed"))
    assert not is_hopeless(replace(half, gone=True, stable=True))


def test_what_the_hook_committed_is_finished_whatever_its_files_say() -> None:
    assert wait(trainer(DONE, hook="committed", gone=True)) == 0
    assert wait(trainer(DONE | {"model.safetensors": 9000.0}, hook="committed", unclosed=("log.json", "x.bin"))) == 0
    assert wait(trainer(DONE, hook="committed", writing=("model.safetensors",))) is None


def test_a_training_that_lives_is_waited_for_and_not_for_ever() -> None:
    assert wait(trainer(DONE, hook="training")) == 600  # callbacks may rewrite it after trainer_state.json


def test_marks_of_every_rank_need_a_second_and_do_not_outweigh_a_doubt() -> None:
    found = trainer(SHARDS, hook="marked")
    assert not judge(found, Sighting(found.files, 0.0), 0.9, RULE).finished
    assert judge(found, Sighting(found.files, 0.0), 1.0, RULE).finished
    assert wait(trainer(DONE, hook="marked", partial=files({".tmpAb3xYz": 102.0}))) == 600


def test_a_rank_whose_random_state_is_not_here_yet_is_waited_for() -> None:
    sharded = DONE | {"m/__0_0.distcp": 100.0, "m/__1_0.distcp": 100.0, "m/.metadata": 100.5}
    assert wait(trainer(sharded)) == 60
    assert wait(trainer(sharded | {"rng_state_1.pth": 101.5})) == 10
    assert wait(trainer(SHARDS | {"m/__3_0.distcp": 100.0}, mates=True)) == 60
    assert wait(trainer(sharded | {"rng_state_1.pth": 98.9})) == 60  # of the save before this one


def test_that_training_goes_on_proves_nothing_of_a_save_that_a_crash_cut_short() -> None:
    assert wait(trainer({"model.safetensors": 1.0, "config.json": 1.0}, later=True)) is None
    assert wait(trainer({"model.safetensors": 1.0, "config.json": 1.0}, later=True, alike=True)) == 600
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
    assert (wait(of_a_script), wait(replace(of_a_script, alike=True))) == (None, 600)
    assert wait(trainer(V1 | {"CHECKPOINT_COMPLETE": 3.0})) == 10
    assert wait(trainer(V1 | {"CHECKPOINT_COMPLETE": 0.5})) == 600  # the save before it, which this one writes over
    assert wait(trainer({"model/__2_0.distcp": 1.0, "dataloader/rank_2.pt": 3.0, "rng_state/rank_2.pt": 4.0})) == 60


def test_the_final_model_waits_for_the_training_to_leave_or_for_long() -> None:
    final = Evidence("final", None, files({"model-00001-of-00002.safetensors": 1.0, "model-00002-of-00002.safetensors": 1.0}))
    assert wait(final) == 60
    assert wait(replace(final, hook="training")) == 600
    assert judge(replace(final, hook="marked"), Sighting(final.files, 0.0), 1.0, RULE).finished
    assert (
        "model-00002-of-00002.safetensors is missing"
        in judge(replace(final, files=final.files[:1]), Sighting((), 0.0), 0.0, RULE).reason
    )
