"""Which ranks have not written all of their files, by names alone."""

from __future__ import annotations

import pytest

from ckptsync.worker.evenness import has_every_random_state, is_random_state, lacking, rank
from tests.vector import vector

FSDP = (
    "pytorch_model_fsdp_0/__0_0.distcp",
    "pytorch_model_fsdp_0/__1_0.distcp",
    "optimizer_0/__0_0.distcp",
    "optimizer_0/__1_0.distcp",
)
RANDOM = ("rng_state_0.pth", "rng_state_1.pth")
ZERO = tuple(f"global_step4/zero_pp_rank_{r}_mp_rank_00_{kind}_states.pt" for r in (2, 3) for kind in ("model", "optim"))
VERL = tuple(f"actor/{kind}_world_size_4_rank_{r}.pt" for r in (0, 1) for kind in ("model", "optim", "extra_state"))
V1 = (
    "model/__0_0.distcp",
    "model/__1_0.distcp",
    "dataloader/rank_0.pt",
    "dataloader/rank_1.pt",
    "rng_state/rank_0.pt",
    "rng_state/rank_1.pt",
)


@pytest.mark.parametrize(
    "names", [FSDP + RANDOM, FSDP, ZERO, VERL, V1, ("model.safetensors", "rng_state.pth"), ("rng_state_0.pth",), ()]
)
def test_all_of_every_rank_lacks_nothing(names: tuple[str, ...]) -> None:
    assert lacking(names) == ""


@pytest.mark.parametrize("names", [FSDP + RANDOM, FSDP, ZERO, VERL, V1])
def test_each_file_of_the_last_kind_is_missed_where_another_rank_has_one(names: tuple[str, ...]) -> None:
    last = [n for n in names if is_random_state(n)] or [n for n in names if rank(n) is not None]
    for gone in last:
        assert lacking(n for n in names if n != gone)


def test_what_is_missed_is_said() -> None:
    assert lacking((*FSDP, "rng_state_1.pth")) == "the random state of rank 0"
    assert lacking(FSDP[:-1]) == "optimizer_*/__*_*.distcp of rank 1"
    assert lacking(("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")) == "model-00002-of-00003.safetensors"
    assert lacking(("pytorch_model-00001-of-00002.bin", *RANDOM)) == "pytorch_model-00002-of-00002.bin"


def test_a_rank_that_left_its_random_state_had_nothing_else_to_write() -> None:
    assert lacking((*FSDP, *RANDOM, "rng_state_2.pth", "rng_state_3.pth")) == ""  # a replica of a hybrid sharding


def test_parts_that_ranks_write_on_their_own_nodes_are_not_missed() -> None:
    assert lacking(("shard-00003-model-00003-of-00004.safetensors",)) == ""


def test_every_random_state_is_there_or_it_is_not() -> None:
    assert has_every_random_state(FSDP + RANDOM)
    assert has_every_random_state(("model.safetensors", "random_states_0.pkl"))
    assert not has_every_random_state((*FSDP, "rng_state_1.pth"))
    assert not has_every_random_state(("model.safetensors",))


@pytest.mark.parametrize(
    "name", ["hf-fsdp2-2node", "hf-zero3-2node", "hf-ddp", "verl-fsdp2", "titan", "acc-ranks-fsdp1", "raw-ds-tensor", "lightning"]
)
def test_what_real_trainers_write_lacks_nothing_on_any_node(name: str) -> None:
    for source in vector(name).sources:
        assert lacking(p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()) == ""
