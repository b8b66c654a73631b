"""Extra states of modules, in every layout: left out, and said."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_safetensors
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from ckptsync.layouts import registry
from ckptsync.layouts.state_dict import is_extra_state, without_extra_states
from ckptsync.tensors import Tensor
from tests.support.files_in_memory import MemoryFiles, contents
from tests.support.torch_bytes import saved

W = torch.arange(6.0)
NAMES = ("_extra_state", "layers.0.attention._extra_state")
STATES: dict[str, Any] = {
    "empty": torch.empty(0, dtype=torch.uint8),
    "pickled bytes": torch.arange(9, dtype=torch.uint8),
    "stream": io.BytesIO(b"\x80abc\xff"),
    "none": None,
    "dictionary": {"scale": torch.ones(3), "n": 1},
    "double": torch.ones(2, dtype=torch.complex128),
}
ZERO: dict[str, Any] = {
    **dict.fromkeys(("dp_world_size", "mp_world_size"), 1),
    **dict.fromkeys(("param_shapes", "frozen_param_shapes")),
    "ds_config": {},
    "shared_params": {},
    "buffer_names": [],
}


def at_top(name: str) -> Any:
    return lambda state: {name: saved(state)}


WRITERS: dict[str, Any] = {
    "bin": at_top("pytorch_model.bin"),
    "peft": lambda state: {"adapter_model.bin": saved(state), "adapter_config.json": b"{}"},
    "lightning": lambda state: {"a.ckpt": saved({"state_dict": state})},
    "per_rank": at_top("actor/model_world_size_1_rank_0.pt"),
    "zero": lambda state: {
        "global_step1/mp_rank_00_model_states.pt": saved({**ZERO, "module": state})
    },
}


def found(content: Mapping[str, bytes]) -> tuple[list[str], str]:
    files = MemoryFiles(content)
    tensors = registry.tensors(files, registry.choose(files, None))
    return [tensor.name for tensor in tensors], tensors[0].remark


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("kind", STATES)
def test_an_extra_state_of_any_kind_is_left_out_with_a_remark(kind: str, layout: str) -> None:
    state = {NAMES[0]: STATES[kind], "w": W, NAMES[1]: STATES[kind]}
    names, remark = found(WRITERS[layout](state))
    assert names == ["w"]
    assert "'_extra_state' and 1 more left out: the extra state of a module" in remark
    assert found(WRITERS[layout]({"w": W, "own_extra_state_dim": W}))[1] == ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["empty", "pickled bytes", "stream", "none"])
def test_a_distributed_checkpoint_leaves_them_out_too(kind: str, tmp_path: Path) -> None:
    save_distributed({"w": W, NAMES[1]: STATES[kind]}, checkpoint_id=tmp_path, no_dist=True)
    names, remark = found(contents(tmp_path))
    assert names == ["w"]
    assert "attention._extra_state' left out" in remark


def test_a_whole_model_in_safetensors_leaves_them_out_too() -> None:
    names, remark = found({"model.safetensors": save_safetensors({"w": W, NAMES[1]: W + 1})})
    assert names == ["w"]
    assert NAMES[1] in remark


def test_megatrons_shards_of_extra_states_are_known_by_their_names() -> None:
    assert is_extra_state("decoder.layers.mlp.linear_fc1._extra_state/shard_0_4")
    assert not is_extra_state("decoder.my_extra_state")
    assert not is_extra_state(3)


def test_a_layouts_own_remark_stays() -> None:
    (tensor,) = without_extra_states((Tensor("w", "F32", (), (), remark="own"),), NAMES[:1])
    assert tensor.remark.startswith("own; '_extra_state' left out")
