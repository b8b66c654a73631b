"""DeepSpeed's files: their names, what they hold, and what one of them says of all."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import registry, zero
from ckptsync.layouts.zero_files import (
    MODEL,
    OPTIM,
    ZeroFiles,
    ZeroSetup,
    expert_counts,
    load,
    param_shapes,
    trained_dtype,
)
from ckptsync.tensors import Files
from tests.support.files_in_memory import (
    Call,
    Global,
    MemoryFiles,
    torch_pickle,
    torch_zip_file,
    tree,
)
from tests.support.torch_bytes import saved
from tests.support.vector import vector

OPTIM_0 = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL_0 = "mp_rank_00_model_states.pt"
STATE = {"zero_stage": 2, "partition_count": [2, 3]}  # experts are cut over fewer ranks


def setup(files: Files, root: str) -> ZeroSetup:
    return ZeroFiles(files, root).setup


def one(state: object, name: str = OPTIM_0) -> MemoryFiles:
    return MemoryFiles({name: saved({"optimizer_state_dict": state})})


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("hf-zero1", ZeroSetup(1, 3)),
        ("hf-zero2", ZeroSetup(2, 2)),
        ("hf-zero3-2node", ZeroSetup(3, 4)),
        ("raw-ds-zero1-bf16-fp32acc", ZeroSetup(1, 2, "bf16_")),
        ("raw-ds-zero3-odd", ZeroSetup(3, 3, "bf16_")),
    ],
)
def test_real_files_say_stage_world_and_prefix(name: str, wanted: ZeroSetup) -> None:
    files = tree(*vector(name).sources)
    (root,) = zero.roots(files.sizes())
    for node in [*vector(name).sources]:
        assert setup(tree(node), root) == setup(files, root) == wanted


def test_the_stage_may_be_a_number_an_enum_or_missing() -> None:
    enum = Call(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), 3)
    data = torch_zip_file(
        {
            "data.pkl": torch_pickle(
                {"optimizer_state_dict": {"zero_stage": enum, "partition_count": 5}}
            ),
            "version": b"3\n",
        }
    )
    assert setup(MemoryFiles({OPTIM_0: data}), "") == ZeroSetup(3, 5)
    assert setup(one(STATE), "") == ZeroSetup(2, 3)
    assert setup(one({"partition_count": [2]}), "") == ZeroSetup(1, 2)
    assert setup(one(STATE, OPTIM_0.replace("mp_rank_00", "mp_rank_01")), "").mp == 2


def test_a_stage_that_nobody_knows_is_unsupported_and_a_world_that_cannot_be_corrupt() -> None:
    for stage in (0, 4, None, "3", [3], 2.5):
        with pytest.raises(Unsupported, match="ZeRO stage"):
            setup(one(STATE | {"zero_stage": stage}), "")
    for count in (0, -1, None, [], [0], ["3"], 2.0, 1 << 20, [[1]], {"a": 1}):
        with pytest.raises(Corrupt, match="partition_count is"):
            setup(one(STATE | {"partition_count": count}), "")


def test_the_model_file_alone_says_stage_and_world_too() -> None:
    told = {"dp_world_size": 4, "ds_config": {"zero_optimization": {"stage": 2}}}
    assert setup(MemoryFiles({f"a/{MODEL_0}": saved(told)}), "a") == ZeroSetup(2, 4)
    assert setup(MemoryFiles({MODEL_0: saved({"dp_world_size": 4})}), "") == ZeroSetup(0, 4)
    without_zero = {"dp_world_size": 4, "optimizer": {"single_partition_of_fp32_groups": []}}
    assert setup(MemoryFiles({MODEL_0: saved(without_zero)}), "") == ZeroSetup(1, 4)
    for bad in (
        {},
        {"dp_world_size": "4"},
        told | {"ds_config": {"zero_optimization": {"stage": 3}}},
    ):
        with pytest.raises(Corrupt, match=r"dp_world_size|ZeRO stage 3"):
            setup(MemoryFiles({MODEL_0: saved(bad)}), "")


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"bf16": {"enabled": True}}, "BF16"),
        ({"bfloat16": {"enabled": True}}, "BF16"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "F16"),
        ({"fp16": {"enabled": "auto"}}, "F32"),
    ],
)
def test_the_configuration_says_in_which_dtype_a_model_is_trained(
    config: dict[str, object], dtype: str
) -> None:
    model = load(MemoryFiles({"m": saved({"ds_config": config})}), "m")
    assert trained_dtype(model) == dtype


def test_a_node_whose_files_do_not_tell_is_incomplete() -> None:
    with pytest.raises(Incomplete, match="how many ranks"):
        setup(MemoryFiles({"latest": b""}), "")


def test_ranks_that_cannot_be_are_refused() -> None:
    for name, error in (
        ("mp_rank_00_000_model_states.pt", Unsupported),
        (f"zero_pp_rank_{1 << 20}_mp_rank_00_optim_states.pt", Corrupt),
    ):
        with pytest.raises(error, match=r"not known|a rank of 1048576"):
            ZeroFiles(MemoryFiles({f"t/{name}": b""}), "t").by_rank(OPTIM)


class Mine:
    """A class of a training script's."""


def with_client_state(more: object) -> tuple[MemoryFiles, str]:
    """A real checkpoint whose script has given more to ``save_checkpoint(client_state=…)``, which
    DeepSpeed puts beside its own entries.
    """
    files = tree(*vector("raw-ds-zero2-odd").sources)
    (name,) = (n for n in files.sizes() if MODEL.fullmatch(n.rpartition("/")[2]))
    state = torch.load(io.BytesIO(files.content[name]), weights_only=False)
    files.content[name] = saved({**state, **(more if isinstance(more, dict) else {})})
    return files, name


def test_what_a_script_keeps_in_its_client_state_hinders_nothing() -> None:
    odd = {
        "args": argparse.Namespace(lr=1.0),
        "rng": np.random.default_rng(0),
        "own": [{"x": (Mine(),)}],
        "sparse": torch.eye(2).to_sparse(),
        "epoch": 3,
        "path": Path("/"),
    }
    files, name = with_client_state(odd)
    assert load(files, name).content.keys() & odd.keys() == {"epoch", "sparse"}
    plain = tree(*vector("raw-ds-zero2-odd").sources)
    assert named(files) == named(plain)


def named(files: MemoryFiles) -> list[tuple[str, str, tuple[int, ...]]]:
    found = registry.tensors(files, registry.choose(files, None))
    assert registry.demands(files).model
    return sorted((t.name, t.dtype, t.shape) for t in found)


@pytest.mark.parametrize("key", ["module", "param_shapes", "optimizer", "ds_config"])
def test_where_deepspeeds_own_entries_hold_what_nobody_knows_it_is_refused(key: str) -> None:
    files, name = with_client_state({key: {"w": Mine()}})
    with pytest.raises(Unsupported, match="Mine"):
        load(files, name)


def test_only_a_models_file_has_a_client_state() -> None:
    with pytest.raises(Unsupported, match="Mine"):
        load(MemoryFiles({OPTIM_0: saved({"optimizer_state_dict": {}, "more": Mine()})}), OPTIM_0)
    with pytest.raises(Unsupported, match="Mine"):
        load(
            MemoryFiles({"layer_01-model_states.pt": saved({"w": torch.zeros(1), "v": Mine()})}),
            "layer_01-model_states.pt",
        )


@pytest.mark.parametrize("junk", ["4", 4, [0], [-1], [None], [1 << 40], {}, 0, 2.5])
def test_numbers_of_experts_that_are_none_are_corrupt(junk: object) -> None:
    with pytest.raises(Corrupt, match="num_experts"):
        expert_counts(load(MemoryFiles({"m": saved({"num_experts": junk})}), "m"))


@pytest.mark.parametrize("groups", [[{"w": (2,)}, {"w": (2,)}], [{"w": (1,) * 33}], [{"w": [2]}]])
def test_shapes_that_no_parameters_have_are_corrupt(groups: object) -> None:
    with pytest.raises(Corrupt, match=r"two parameter groups|are not shapes by name"):
        param_shapes(load(MemoryFiles({"m": saved({"param_shapes": groups})}), "m"))
