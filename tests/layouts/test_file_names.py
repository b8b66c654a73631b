from __future__ import annotations

import pytest

from ckptsync.errors import Incomplete
from ckptsync.layouts.file_names import (
    Within,
    file_kind,
    holds_weights,
    home,
    inside,
    is_of_optimizer,
    join,
    may_run,
    rank,
    ranks,
    use_of,
)
from ckptsync.tensors import read_whole
from tests.support.files_in_memory import MemoryFiles


def test_the_root_itself_has_no_name() -> None:
    assert join("", "latest") == "latest"
    assert join("a/b", "latest") == "a/b/latest"


def test_a_model_lies_at_the_top_or_in_the_first_directory_of_those_that_frameworks_use() -> None:
    found = [
        home(names, {"m"}.intersection)
        for names in (["m", "model/m"], ["hf_model/m", "model/m", "a/m"], ["a/m", "a/model/m"], [])
    ]
    assert found == [("",), ("model",), (), ()]


def test_what_lies_deeper_or_elsewhere_is_not_inside() -> None:
    names = ["latest", "a/latest", "a/b/latest", "aa/latest", "a"]
    assert inside(names, "a") == {"latest": "a/latest"}
    assert inside(names, "") == {"latest": "latest", "a": "a"}
    assert inside(names, "b") == {}


def test_a_directory_is_seen_as_if_it_were_all() -> None:
    files = Within(
        MemoryFiles({"a/config.json": b"{}", "a/b/config.json": b"[]", "config.json": b"3"}), "a"
    )
    assert files.sizes() == {"config.json": 2}
    assert read_whole(files, "config.json") == b"{}"
    with pytest.raises(Incomplete, match="b: not found"):
        files.read_into("b", 0, memoryview(bytearray(1)))


NAMES = {
    "m/__3_0.distcp": 3,
    "rng_state_7.pth": 7,
    "random_states_2.pkl": 2,
    "g/bf16_zero_pp_rank_11_mp_rank_00_optim_states.pt": 11,
    "x_rank_5.pt": 5,
    "rng_state/rank_9.pt": 9,
    "a/dataloader/rank_12.pt": 12,
    "pytorch_model_fsdp_0_rank4.bin": 4,
    "actor/model_world_size_8_rank_6.pt": 6,
    "shard-00001-model-00001-of-00001.safetensors": 0,
    "sharded/shard-00016-model-00003-of-00004.safetensors": 15,
    "shard-123456-model-00003-of-00004.safetensors": 123455,
}
NOBODYS = (
    "rng_state.pth",
    "scheduler.pt",
    "g/mp_rank_00_model_states.pt",
    "model-00001-of-00002.safetensors",
    "rng_state_1.pth.tmp",
    "x_rank_20261121.pt",
    "rank_0.pt",
    "model/rank_0.pt",
)


def test_a_rank_is_seen_in_the_name_of_its_file_and_nobodys_in_others() -> None:
    assert {name: rank(name) for name in NAMES} == NAMES
    assert {rank(name) for name in NOBODYS} == {None}


USES = {
    "optimizer": [
        "optimizer.pt",
        "optimizer_0.bin",
        "optimizer_0_rank4.bin",
        "g/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "g/expp_rank_0_mp_rank_00_optim_states.pt",
        "actor/optim_world_size_8_rank_6.pt",
    ],
    "resuming": [
        "rng_state.pth",
        "rng_state_7.pth",
        "scaler.pt",
        "scheduler.pt",
        "sampler_1.bin",
        "rng_state/rank_0.pt",
        "custom_checkpoint_0.pkl",
        "actor/extra_state_world_size_8_rank_6.pt",
    ],
    "describing": ["m/.metadata", "latest", "model.safetensors.index.json", "trainer_state.json"],
    "": ["m/__3_0.distcp", "m/__0.metadata", "g/zero_pp_rank_1_mp_rank_00_model_states.pt"],
}


@pytest.mark.parametrize("use", USES)
def test_a_files_name_says_what_it_is_good_for(use: str) -> None:
    assert {use_of(name) for name in USES[use]} == {use}
    assert {is_of_optimizer(name) for name in USES[use]} == {use == "optimizer"}
    assert (use_of("model.safetensors"), use_of("optimizer_0/.metadata")) == ("", "describing")
    assert is_of_optimizer("optimizer_0/.metadata")
    assert is_of_optimizer("optim/__0_0.distcp")  # NeMo Automodel's
    assert not is_of_optimizer("model/optim.safetensors")


def test_shards_are_files_that_ranks_write_side_by_side() -> None:
    names = [*NAMES, *NOBODYS, "g/zero_pp_rank_1_mp_rank_00_model_states.pt"]
    kinds = {name: file_kind(name) for name in names}
    assert [name for name, kind in kinds.items() if kind and kind.is_shard] == [
        "m/__3_0.distcp",
        "g/bf16_zero_pp_rank_11_mp_rank_00_optim_states.pt",
        "g/zero_pp_rank_1_mp_rank_00_model_states.pt",
    ]
    assert may_run("a/B.PT")


def test_ranks_are_told_once_and_in_order() -> None:
    assert ranks([*NAMES, *NAMES, *NOBODYS]) == (0, 2, 3, 4, 5, 6, 7, 9, 11, 12, 15, 123455)


def test_optimizers_and_other_states_are_no_weights_and_every_other_root_is() -> None:
    assert not any(map(holds_weights, ("optimizer_0", "a/optimizer", "optim", "a/extra_state")))
    others = ("", "optimizers/x", "pytorch_model_fsdp_0", "a/model", "optimizer.ckpt", "sharded")
    assert all(map(holds_weights, others))
