"""Files of one rank each: names, and what may lie in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts.rank_files import RankFile, is_model, load, of_stem, rank_file
from ckptsync.layouts.wrapped import Share
from tests.plain_files import MemoryFiles, tree
from tests.torch_files import saved
from tests.vector import vector

NAMES = {
    "pytorch_model_fsdp_0_rank12.bin": RankFile("pytorch_model_fsdp_0", 12, None),
    "pytorch_model_fsdp_rank1.bin": RankFile("pytorch_model_fsdp", 1, None),
    "c/optimizer_0_rank0.bin": RankFile("c/optimizer_0", 0, None),
    "actor/model_world_size_8_rank_3.pt": RankFile("actor/model", 3, 8),
    "optim_world_size_8_rank_3.pt": RankFile("optim", 3, 8),
    "a/extra_state_world_size_2_rank_0.pt": RankFile("a/extra_state", 0, 2),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_taken_apart_and_put_together(name: str) -> None:
    found = rank_file(name)
    assert found == NAMES[name]
    assert found.of(found.rank) == name
    assert is_model(found.stem) == ("model" in found.stem)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model_fsdp.bin",
        "model_rank_0.pt",
        "pytorch_model_rank0.bin",
        "xmodel_world_size_2_rank_0.pt",
        "random_states_0.pkl",
    ],
)
def test_other_names_are_not_of_a_rank(name: str) -> None:
    assert rank_file(name) is None


def test_the_files_of_a_stem_come_in_the_order_of_ranks() -> None:
    names = [f"a/model_world_size_11_rank_{rank}.pt" for rank in (10, 2, 0)]
    assert [
        name for _, name in of_stem([*names, "model_world_size_11_rank_1.pt", "a/optim_world_size_11_rank_0.pt"], "a/model")
    ] == [*reversed(names)]


def test_a_real_file_holds_shares_and_plain_tensors() -> None:
    found = load(tree(*vector("verl-mesh").sources), "actor/model_world_size_4_rank_2.pt", 2)
    assert isinstance(found.tensors["odd.seen"], Stored)
    grid = found.tensors["grid"]
    assert isinstance(grid, Share)
    assert (grid.rank, grid.world, grid.shape) == (2, 4, (5, 7))


def test_a_file_under_another_ranks_name_is_told_by_what_it_says() -> None:
    files = tree(*vector("acc-ranks-fsdp1").sources)
    files.content["pytorch_model_fsdp_0_rank0.bin"] = files.content["pytorch_model_fsdp_0_rank1.bin"]
    with pytest.raises(Corrupt, match="rank 1 wrote it"):
        load(files, "pytorch_model_fsdp_0_rank0.bin", 0)


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        ({"a._flat_param": torch.ones(3)}, Unsupported, "LOCAL_STATE_DICT"),
        ({"model": {"w": torch.ones(3)}}, Unsupported, "is a dictionary"),
        ({3: torch.ones(3)}, Corrupt, "a text expected"),
        ([torch.ones(3)], Corrupt, "a state dict expected"),
    ],
)
def test_what_is_no_state_dict_of_a_sharded_model_is_refused(value: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        load(MemoryFiles({"m": saved(value)}), "m", 0)


def test_a_missing_file_is_incomplete() -> None:
    with pytest.raises(Incomplete, match="m: not there"):
        load(MemoryFiles({}), "m", 0)


def test_nothing_but_the_known_names_is_read() -> None:
    with pytest.raises(Unsupported, match="pathlib"):
        load(MemoryFiles({"m": saved({"p": Path("x")})}), "m", 0)
