"""Ranks, by the names of files alone."""

from __future__ import annotations

import pytest

from ckptsync.layouts.rank_names import rank, ranks

NAMES = {
    "m/__3_0.distcp": 3,
    "rng_state_7.pth": 7,
    "random_states_2.pkl": 2,
    "g/bf16_zero_pp_rank_11_mp_rank_00_optim_states.pt": 11,
    "x_rank_5.pt": 5,
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
)


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_is_seen_in_the_name_of_its_file(name: str) -> None:
    assert rank(name) == NAMES[name]


@pytest.mark.parametrize("name", NOBODYS)
def test_a_file_that_is_nobodys_own_has_no_rank(name: str) -> None:
    assert rank(name) is None


def test_ranks_are_told_once_and_in_order() -> None:
    assert ranks([*NAMES, *NAMES, *NOBODYS]) == (0, 2, 3, 4, 5, 6, 7, 11, 15, 123455)
