"""What is left of a save whose trainer was killed in its middle: however long it lies there, it is
never thought whole.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.checkpoint_dirs import CheckpointDir, Family
from ckptsync.spool.markers import TrainingProcess
from ckptsync.worker.finished import Rule, is_stable, judge
from ckptsync.worker.local_save import LocalFile, LocalFiles, LocalSave
from ckptsync.worker.observation import Observation, is_trainer_at_work
from ckptsync.worker.torn_saves import (
    TRAINER_STATE,
    awaits_trainer_state,
    half_written,
    is_of_a_rank,
    is_random_state,
    lacking_file,
    rank_of,
    two_saves,
)
from tests.support.replays import Stage, others, trainers, unproven
from tests.worker.test_finished import RULE, S, trainer
from tests.worker.test_finished import files as of
from tests.worker.test_replays import played

MIB = 1 << 20
A = {
    "config.json": 100.0,
    "model.safetensors": 100.1,
    "training_args.bin": 100.2,
    "optimizer.pt": 100.3,
    "rng_state_0.pth": 100.4,
    "trainer_state.json": 100.5,
}


def is_ever_finished(evidence: Observation) -> bool:
    return judge(evidence, 1e9, RULE).finished


def killed(evidence: Observation) -> Observation:
    """The same after its writer was killed: nobody has a file open any more."""
    return replace(evidence, writing=())


def over(*names: str) -> dict[str, float]:
    """The old save, and what another wrote of it ten minutes later before it was killed."""
    return A | {name: 700.0 + n / 10 for n, name in enumerate(names)}


NAMES = [name for name in trainers() if name != "only the model"]


@pytest.mark.parametrize("name", trainers())
def test_what_a_kill_leaves_of_a_first_save_is_never_taken(tmp_path: Path, name: str) -> None:
    """Also where nothing but these files tells who trains."""
    *before, (_, last) = played(tmp_path, trainers()[name])
    begun = [
        (done, observation)
        for done, observation in before
        if observation.state is None and awaits_trainer_state(observation.files, has_trainer=True)
    ]
    taken = [
        done
        for done, observation in begun
        for awaited in (True, False)
        if is_ever_finished(replace(killed(observation), has_trainer=awaited))
    ]
    assert begun
    assert taken == []
    assert is_ever_finished(last)


@pytest.mark.parametrize("name", ["llama-factory v1", "accelerate"])
def test_what_a_kill_leaves_of_other_trainers_first_saves_is_never_taken(
    tmp_path: Path, name: str
) -> None:
    *before, (_, last) = played(tmp_path, (others() | unproven())[name])
    assert [
        done
        for done, observation in before
        if is_ever_finished(observation)
        and not all(is_of_a_rank(f.path) for f in observation.files)
    ] == []
    assert is_ever_finished(last)


ACCELERATE = ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl")


@pytest.mark.parametrize("family", ["accelerate", "trainer"])
def test_accelerate_s_first_rank_writes_its_random_state_last(family: Family) -> None:
    """In checkpoint_K as ``save_state`` names it, in checkpoint-N as diffusers does."""
    told = {name: 1.0 + n for n, name in enumerate(ACCELERATE)} | {"random_states_1.pkl": 0.5}
    observation = Observation(family, 4, of(told))
    assert is_ever_finished(observation)
    for n in range(1, len(ACCELERATE)):
        written = dict.fromkeys((*ACCELERATE[:n], "random_states_1.pkl"), 1.0)
        torn = Observation(family, 4, of(written))
        assert not is_ever_finished(torn), n
        assert is_ever_finished(replace(torn, has_similar=True)), n
    # all that every rank writes
    of_node_1 = dict.fromkeys(("random_states_1.pkl", "scaler.pt", "dl_state_dict.bin"), 1.0)
    assert is_ever_finished(Observation(family, 4, of(of_node_1)))
    unet = {"unet/diffusion_pytorch_model.safetensors": 1.0, "random_states_1.pkl": 1.0}
    assert not is_ever_finished(Observation(family, 4, of(unet)))
    assert not is_ever_finished(Observation(family, 4, of({"optimizer.bin": 1.0})))


def test_a_save_of_accelerate_s_over_an_old_one_that_was_cut_short_is_never_taken() -> None:
    old = {name: 1.0 + n / 10 for n, name in enumerate(ACCELERATE)}
    old |= {"random_states_1.pkl": 0.9, "custom_checkpoint_0.pkl": 1.4}

    def is_taken(*newer: str) -> bool:
        over = old | {name: 30.0 + n for n, name in enumerate(newer)}
        return is_ever_finished(Observation("accelerate", 4, of(over)))

    assert is_taken()
    assert not is_taken("random_states_1.pkl", "model.safetensors")
    assert not is_taken("model.safetensors", "optimizer.bin")
    assert is_taken("model.safetensors"), "somebody's `save_model`"
    assert is_taken("custom_checkpoint_0.pkl")
    # a model in two parts
    del old["model.safetensors"]
    old |= dict(zip(PARTS, (1.0, 1.1), strict=True))
    assert is_taken()
    assert not is_taken(PARTS[0])
    assert is_taken(*PARTS)


def test_accelerate_s_shards_want_the_random_states_of_their_ranks() -> None:
    shards = {"pytorch_model_fsdp_0/__2_0.distcp": 1.0, "optimizer_0/__2_0.distcp": 1.0}
    of_ray_train = {"model.pt": 1.0, "optimizer.pt": 1.0}
    assert not is_ever_finished(Observation("accelerate", 4, of(shards)))
    assert is_ever_finished(Observation("accelerate", 4, of(shards | {"random_states_2.pkl": 1.0})))
    assert is_ever_finished(Observation("accelerate", 4, of(of_ray_train)))


@pytest.mark.parametrize("name", NAMES)
def test_a_kill_s_rest_over_an_old_save_is_never_taken(tmp_path: Path, name: str) -> None:
    script, stage = trainers()[name], Stage(tmp_path)
    played(tmp_path, script, stage)
    old, stage.now = stage.now, stage.now + 1000 * S
    *before, (_, last) = played(tmp_path, script, stage)
    taken = [
        done
        for done, observation in before
        if is_ever_finished(killed(observation)) and not is_whole_but_for_texts(observation, old)
    ]
    assert taken == []
    assert is_ever_finished(last)


def is_whole_but_for_texts(one: Observation, old: int) -> bool:
    """Whether nothing but whole texts are of the later save: of one training they say what they
    said before.
    """
    newer = [f.path for f in one.files if f.mtime > old]
    return (
        not one.unclosed
        and all(f.size for f in one.files)
        and all(n.endswith((".json", ".jinja")) for n in newer)
        and TRAINER_STATE not in newer
    )


PARTS = [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]
ADAPTER = ("adapter_model.safetensors", "adapter_config.json")
ALL_BUT_RANDOM = [name for name in A if name != "rng_state_0.pth"]


def soon_over(*names: str) -> Observation:
    """The same, begun eight seconds after the old one: a script that is killed is often started
    again at once.
    """
    told = A | dict(zip(PARTS, (100.1, 100.15), strict=True)) | {"rng_state_1.pth": 100.0}
    return trainer(told | {name: 108.5 + n / 10 for n, name in enumerate(names)})


@pytest.mark.parametrize(
    ("observation", "why"),
    [
        (trainer(over("optimizer.pt")), "optimizer.pt was overwritten"),
        (trainer(over("rng_state_0.pth")), "rng_state_0.pth was overwritten"),
        (trainer(over("config.json", "model.safetensors")), "model.safetensors was overwritten"),
        (trainer(over(*ADAPTER)), "adapter_model.safetensors was overwritten"),
        (trainer(over(*ALL_BUT_RANDOM)), "rng_state_0.pth is of an older save"),
        (soon_over("config.json", PARTS[0]), f"{PARTS[0]} was overwritten"),
        (
            soon_over("rng_state_1.pth", "config.json", "model.safetensors"),
            "rng_state_1.pth was overwritten",
        ),
        (soon_over("rng_state_1.pth"), "rng_state_1.pth was overwritten"),
        (
            soon_over("config.json", "model.safetensors", "training_args.bin"),
            "training_args.bin was overwritten",
        ),
    ],
)
def test_a_save_over_an_old_one_that_was_cut_short_says_which_file_tells(
    observation: Observation, why: str
) -> None:
    verdict = judge(observation, 1e9, RULE)
    assert not verdict.finished
    assert verdict.reason.startswith(why)


def test_what_people_and_callbacks_do_to_a_finished_checkpoint_only_delays_it() -> None:
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "notes.pt"):
        assert is_ever_finished(trainer(over(name)))
    assert is_ever_finished(trainer(over("config.json", "tokenizer.json")))
    # a callback that evaluates, and saves once more
    assert is_ever_finished(trainer(A | {"config.json": 130.0, "model.safetensors": 130.1}))
    assert not is_ever_finished(trainer(A | {"config.json": 130.0, "optimizer.pt": 130.1}))
    assert is_ever_finished(trainer(over("optimizer.pt"), hook="marked"))
    assert is_ever_finished(trainer(over("optimizer.pt"), stable=True))
    # a clock was set while we looked on
    assert is_ever_finished(trainer(over("optimizer.pt"), is_new=True))


def test_what_callbacks_and_late_ranks_do_to_one_that_had_just_ended_is_no_other_save() -> None:
    assert is_ever_finished(soon_over("config.json", *PARTS))
    assert is_ever_finished(soon_over("config.json", "model.safetensors", "value_head.safetensors"))
    late = {"pytorch_model_fsdp_0/__1_0.distcp": 100.2, "rng_state_1.pth": 108.5}
    assert is_ever_finished(trainer(A | late))
    assert not is_ever_finished(trainer(A | late | {"model.safetensors": 108.6}))
    assert is_ever_finished(trainer(A | {"rng_state_1.pth": 105.0}))


def test_a_copy_without_times_is_no_mixture_however_slow_it_was() -> None:
    at, told = 0.0, {}
    for name in reversed(A):
        at += 1000 * MIB / (50 << 20) if name.endswith((".pt", ".safetensors")) else 0.1
        told[name] = at
    files = tuple(
        replace(f, size=1000 * MIB if f.path.endswith((".pt", ".safetensors")) else 9)
        for f in of(told)
    )
    assert two_saves(files, files[0].mtime, 60.0) == ""


def test_shards_of_two_saves_are_told_by_the_time_between_them_on_any_node() -> None:
    shards = {
        "global_step4/zero_pp_rank_2_mp_rank_00_optim_states.pt": 100.0,
        "global_step4/zero_pp_rank_3_mp_rank_00_optim_states.pt": 700.0,
    }
    assert "is of an older save" in two_saves(of(shards), None, 60.0)
    assert two_saves(of(dict.fromkeys(shards, 100.0)), None, 60.0) == ""
    told = {"step-4/.metadata": 100.0, "step-4/__0_0.distcp": 700.0, "step-4/__1_0.distcp": 700.1}
    why = "step-4/__0_0.distcp was overwritten, and step-4/.metadata was not"
    assert two_saves(of(told), None, 60.0) == why
    one_by_one = {
        f"{kind}/{name}": at
        for kind, at in (("model", 100.0), ("optimizer", 130.0))
        for name in ("__0_0.distcp", ".metadata")
    }
    assert two_saves(of(one_by_one), None, 60.0) == ""


def test_a_shard_that_is_newer_than_what_its_ranks_write_last_is_of_another_save() -> None:
    node1 = {f"optimizer_0/__{r}_0.distcp": 100.0 for r in (2, 3)} | {
        "rng_state_2.pth": 100.3,
        "rng_state_3.pth": 100.2,
    }
    assert two_saves(of(node1), None, 60.0) == ""
    again = node1 | {"optimizer_0/__2_0.distcp": 120.0}
    why = "optimizer_0/__2_0.distcp was overwritten after rng_state_3.pth"
    assert two_saves(of(again), None, 60.0) == why
    killed_rank_3 = again | {"optimizer_0/__3_0.distcp": 120.1, "rng_state_2.pth": 120.2}
    assert two_saves(of(killed_rank_3), None, 60.0)
    assert not two_saves(of(killed_rank_3 | {"rng_state_3.pth": 180.0}), None, 60.0)
    # of a rank without shards: it need not wait
    assert not two_saves(of(node1 | {"rng_state_1.pth": 20.0}), None, 99.0)
    slow = tuple(
        replace(f, size=1000 * MIB) if f.path.endswith(".distcp") else f for f in of(again)
    )
    assert two_saves(slow, None, 60.0) == ""  # so long it may take to copy


def test_large_shards_much_newer_than_their_metadata_wait_ten_times_as_long() -> None:
    """A copy without times takes so long, and so may a save over an old one that is not done."""
    told = {"step-4/.metadata": 100.0, "step-4/__0_0.distcp": 300.0, "step-4/__1_0.distcp": 300.1}
    large = tuple(replace(f, size=10_000 * MIB if f.size else 0) for f in of(told))
    observation = Observation("dcp", 4, large)
    assert two_saves(large, None, 60.0) == ""
    assert not judge(observation, 599.9, RULE).finished
    assert judge(observation, 600.0, RULE).finished
    followed = replace(observation, later=True)
    assert not is_stable(followed, 599.9, RULE, judge(observation, 599.9, RULE))
    # a second of `cp -r` proves nothing
    at_once = tuple(replace(f, mtime=min(f.mtime, 130 * S)) for f in large)
    assert judge(Observation("dcp", 4, at_once), RULE.unmarked, RULE).finished


def test_a_wait_for_other_nodes_is_no_gap() -> None:
    """Ranks whose own shards are written wait at a barrier for those of a slow disk elsewhere."""
    names = ("optimizer_0/.metadata", "scheduler.pt", "rng_state_0.pth", "trainer_state.json")
    late = {"optimizer_0/__0_0.distcp": 100.0} | dict(zip(names, range(1900, 1904), strict=True))
    assert two_saves(of(late), 1903 * S, 60.0) == ""


def test_weights_alone_are_taken_beside_a_similar_checkpoint_without_a_trainer() -> None:
    model = {"config.json": 1.0, "model.safetensors": 1.1}
    assert is_ever_finished(trainer(model, has_similar=True))
    assert is_ever_finished(trainer(model, hook="marked"))
    assert not is_ever_finished(trainer(model))
    assert not is_ever_finished(trainer(model, has_similar=True, has_trainer=True))
    assert not is_ever_finished(trainer({"README.md": 1.0}, has_similar=True, has_trainer=True))
    assert not is_ever_finished(trainer(model | {"training_args.bin": 1.2}, has_similar=True))
    # somebody pushes it by hand
    assert judge(trainer(model, has_trainer=True), 1.0, Rule(0, 0, 0)).finished


def test_a_node_without_rank_0_has_no_end_of_its_own() -> None:
    part = {"pytorch_model_fsdp_0/__2_0.distcp": 1.0, "rng_state_2.pth": 1.1, "notes.txt": 1.2}
    assert is_ever_finished(trainer(part, has_trainer=True))
    assert not is_ever_finished(trainer(part | {"pytorch_model_fsdp_0/.metadata": 1.0}))
    assert not is_ever_finished(trainer(part | {"model.safetensors": 1.0}))


def test_a_final_model_whose_training_was_killed_ends_with_the_trainer_s_arguments() -> None:
    names = ("config.json", "model.safetensors", "tokenizer.json", "training_args.bin", "README.md")
    told = {name: 1.0 + n / 10 for n, name in enumerate(names)}
    model = Observation("final", None, of(told), hook="killed")
    assert judge(model, 1.0, RULE).finished  # nobody is left who could write to it
    at_once = told | {"model.safetensors": told["training_args.bin"]}
    assert is_ever_finished(replace(model, files=of(at_once)))
    assert not is_ever_finished(replace(model, files=of(told | {"model.safetensors": 1.5})))
    # LLaMA-Factory's reward models
    rewritten = told | {"model.safetensors": 1.5, "value_head.safetensors": 1.6}
    assert is_ever_finished(replace(model, files=of(rewritten | {"trainer_state.json": 1.8})))
    # an earlier training's
    assert not is_ever_finished(replace(model, files=of(rewritten | {"trainer_state.json": 0.8})))
    del told["training_args.bin"]
    short = replace(model, files=of(told))
    assert judge(short, 1e9, RULE).reason.startswith("no training_args.bin")
    assert is_ever_finished(replace(short, hook="marked"))
    assert is_ever_finished(replace(short, hook=""))


def test_a_final_model_of_which_some_parts_are_of_an_older_one_is_never_taken() -> None:
    names = ("config.json", *PARTS, "training_args.bin", "README.md")
    told = {name: 1.0 + n / 10 for n, name in enumerate(names)}
    assert is_ever_finished(Observation("final", None, of(told)))
    told |= {"config.json": 9.0, PARTS[0]: 9.1}
    assert not is_ever_finished(Observation("final", None, of(told)))
    merged_by_hand = told | {PARTS[1]: 9.2}
    assert is_ever_finished(Observation("final", None, of(merged_by_hand)))


def test_a_text_of_the_trainer_s_own_that_was_emptied_is_half_written() -> None:
    assert half_written(of({"config.json": 1.0}), ("config.json", "metrics.json")) == "config.json"
    assert half_written(of({"chat_template.jinja": 1.0}, size=0), ()) == "chat_template.jinja"
    assert half_written(of({"metrics.json": 1.0}, size=0), ("metrics.json",)) == ""


def test_what_was_cut_short_is_not_at_rest_either() -> None:
    observation = trainer(over("optimizer.pt"), later=True)
    assert not is_stable(observation, 30.0, RULE, judge(observation, 30.0, RULE))
    assert is_stable(trainer(A), 5.0, RULE, judge(trainer(A), 5.0, RULE))


def test_a_checkpoint_beside_it_or_the_hook_tells_who_trains(tmp_path: Path) -> None:
    state = {TRAINER_STATE: LocalFile(of(A)[0], tmp_path, is_pinned=False)}
    files = LocalFiles("checkpoint-1", "trainer", state)
    directory = CheckpointDir("checkpoint-1", "trainer", tmp_path)
    local_save = LocalSave("run", directory, files, None)
    bare = replace(local_save, files=replace(files, by_path={}))
    process = TrainingProcess("t", 0, 1, 1, "h", 1, "1", "boot", 1.0, trainer="transformers 5.23.0")
    assert is_trainer_at_work([local_save], ())
    assert is_trainer_at_work([], [process])
    assert not is_trainer_at_work([bare], [replace(process, trainer="mine 1")])


FSDP = (
    "pytorch_model_fsdp_0/__0_0.distcp",
    "pytorch_model_fsdp_0/__1_0.distcp",
    "optimizer_0/__0_0.distcp",
    "optimizer_0/__1_0.distcp",
)
RANDOM = ("rng_state_0.pth", "rng_state_1.pth")
ZERO = tuple(
    f"global_step4/zero_pp_rank_{r}_mp_rank_00_{kind}_states.pt"
    for r in (2, 3)
    for kind in ("model", "optim")
)
VERL = tuple(
    f"actor/{kind}_world_size_4_rank_{r}.pt"
    for r in (0, 1)
    for kind in ("model", "optim", "extra_state")
)
V1 = (
    "model/__0_0.distcp",
    "model/__1_0.distcp",
    "dataloader/rank_0.pt",
    "dataloader/rank_1.pt",
    "rng_state/rank_0.pt",
    "rng_state/rank_1.pt",
)


TWO_OF_THREE = [f"model-0000{n}-of-00003.safetensors" for n in (1, 3)]


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        *((names, "") for names in (FSDP + RANDOM, FSDP, ZERO, VERL, V1, RANDOM[:1], ())),
        (("model.safetensors", "rng_state.pth"), ""),
        # a rank that left its random state had nothing else to write: a hybrid sharding's replica
        ((*FSDP, *RANDOM, "rng_state_2.pth", "rng_state_3.pth"), ""),
        # ranks write such parts on their own nodes
        (("shard-00003-model-00003-of-00004.safetensors",), ""),
        ((*FSDP, "rng_state_1.pth"), "the random state of rank 0"),
        (FSDP[:-1], "optimizer_*/__*_*.distcp of rank 1"),
        (TWO_OF_THREE, "model-00002-of-00003.safetensors"),
        (("pytorch_model-00001-of-00002.bin", *RANDOM), "pytorch_model-00002-of-00002.bin"),
    ],
)
def test_what_the_other_ranks_files_show_to_be_missing(names: list[str], missing: str) -> None:
    assert lacking_file(names) == missing


@pytest.mark.parametrize("names", [FSDP + RANDOM, FSDP, ZERO, VERL, V1])
def test_each_rank_s_last_file_is_missed(names: tuple[str, ...]) -> None:
    last = [n for n in names if is_random_state(n)] or [n for n in names if rank_of(n) is not None]
    for gone in last:
        assert lacking_file(n for n in names if n != gone)


def test_adapters_in_directories_of_their_names_await_the_trainers_last_file() -> None:
    own = {"policy/adapter_config.json": 100.0, "policy/adapter_model.safetensors": 100.1}
    ranks = {"rng_state_0.pth": 100.2, "rng_state_1.pth": 100.2}
    second = {"rng_state_1.pth": 100.2, **own}
    assert awaits_trainer_state(of(second), has_trainer=True)
    assert awaits_trainer_state(of({"config.json": 1.0, "__0_0.distcp": 1.0}), has_trainer=True)
    torn = of(dict.fromkeys(own, 700.0) | ranks)
    assert two_saves(torn, int(100.3 * S), 60.0).startswith("policy/adapter_model.safetensors")
