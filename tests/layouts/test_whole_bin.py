"""Models by torch.save, in one file or several."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import registry, whole_bin
from ckptsync.layouts.registry import WeightsSource
from tests.support.files_in_memory import MemoryFiles, safetensors_file
from tests.support.torch_bytes import saved

SHARED = torch.arange(6.0).reshape(2, 3)
STATE = {"a": SHARED, "b": SHARED, "c": SHARED[1], "n": torch.tensor(3)}
INDEX = "pytorch_model.bin.index.json"
NAMES = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]


def one(value: Any, name: str = "pytorch_model") -> MemoryFiles:
    return MemoryFiles({f"{name}.bin": saved(value)})


def read(files: MemoryFiles, root: str = "pytorch_model") -> Any:
    return registry.tensors(files, WeightsSource("bin", root))


def test_names_that_view_the_same_elements_are_tied_and_others_not() -> None:
    found = {t.name: (t.tied, t.shape) for t in read(one(STATE))}
    assert found == {"a": (None, (2, 3)), "b": ("a", (2, 3)), "c": (None, (3,)), "n": (None, ())}
    empty = torch.zeros(0)
    assert [t.tied for t in read(one({"a": empty, "b": empty}))] == [None, None]


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "module", "model_state_dict"])
def test_a_state_dict_may_lie_in_the_only_dictionary_of_tensors(wrapper: str) -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert len(read(one({wrapper: STATE, "epoch": 3, "args": {"lr": endless}}))) == len(STATE)


@pytest.mark.parametrize(
    "value",
    [
        {"model": STATE, "optimizer": {"state": {0: {"exp_avg": SHARED}}}},
        {"model": STATE, "extra": SHARED},
        {"model": STATE, "module": STATE},
        {"ema": STATE},
        {0: SHARED},
        [SHARED],
        SHARED,
        3,
    ],
)
def test_where_nothing_says_which_tensors_are_the_model_it_is_not_guessed(value: Any) -> None:
    with pytest.raises(Unsupported, match=r"pytorch_model\.bin"):
        read(one(value))


def test_models_are_claimed_at_the_top_only_and_training_states_never() -> None:
    assert whole_bin.roots(["pytorch_model.bin", "pytorch_model_fsdp_1.bin", INDEX]) == (
        "pytorch_model",
        "pytorch_model_fsdp_1",
    )
    assert whole_bin.roots([NAMES[1]]) == ("pytorch_model",)
    nobodys = [
        "optimizer.bin",
        "scheduler.bin",
        "training_args.bin",
        "x/pytorch_model.bin",
        "pytorch_model_fsdp_0_rank1.bin",
    ]
    assert whole_bin.roots([*nobodys, "adapter_model.bin", "pytorch_model.bin.tmp"]) == ()


def test_safetensors_win_over_them_and_two_of_them_are_never_guessed_between() -> None:
    files = one(STATE)
    files.content["model.safetensors"] = safetensors_file({"w": ("U8", (1,), b"x")})
    assert str(registry.choose(files, None)) == "whole:."
    both = MemoryFiles({**one(STATE).content, **one(STATE, "pytorch_model_fsdp").content})
    with pytest.raises(Unsupported, match="2 sets of weights"):
        registry.choose(both, None)


def test_several_files_are_read_by_their_index_or_else_by_their_numbers() -> None:
    files = MemoryFiles({NAMES[0]: saved({"a": SHARED}), NAMES[1]: saved({"n": STATE["n"]})})
    assert {t.name for t in read(files)} == {"a", "n"}
    files.content[INDEX] = json.dumps({"weight_map": {"a": NAMES[1], "n": NAMES[1]}}).encode()
    with pytest.raises(Corrupt, match="not where it says"):
        read(files)
    del files.content[NAMES[0]], files.content[INDEX]
    with pytest.raises(Incomplete, match=NAMES[0]):
        read(files)
