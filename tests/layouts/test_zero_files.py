"""DeepSpeed's files: their names, what one of them says of all, and files of two saves under the names of one."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import table, zero
from ckptsync.layouts.zero_files import (
    MODEL,
    MODEL_OF_RANK,
    OPTIM,
    Setup,
    StateFile,
    check_agreement,
    is_ours,
    load,
    of_rank,
    optimizer_state,
    refuse_what_is_elsewhere,
    setup,
)
from tests.deepspeed_files import TAG, held
from tests.plain_files import Call, Global, MemoryFiles, torch_pickle, torch_zip_file, tree
from tests.torch_files import saved
from tests.vector import vector

OPTIM_0 = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL_0 = "mp_rank_00_model_states.pt"
STATE = {"zero_stage": 2, "partition_count": [3, 3]}


def one(state: object, name: str = OPTIM_0) -> MemoryFiles:
    return MemoryFiles({name: saved({"optimizer_state_dict": state})})


@pytest.mark.parametrize("prefix", ["", "bf16_", "fp16_"])
def test_the_names_that_deepspeed_gives_are_ours(prefix: str) -> None:
    assert OPTIM.fullmatch(f"{prefix}zero_pp_rank_12_mp_rank_00_optim_states.pt")
    assert MODEL_OF_RANK.fullmatch(f"{prefix}zero_pp_rank_12_mp_rank_00_model_states.pt")
    assert MODEL.fullmatch(MODEL_0)
    assert all(map(is_ours, (OPTIM_0, MODEL_0, f"{prefix}{OPTIM_0}")))


def test_other_names_are_not() -> None:
    others = [
        "latest",
        "zero_to_fp32.py",
        f"{OPTIM_0}.tmp",
        f"x{OPTIM_0}",
        "rng_state_0.pth",
        "expp_rank_0_mp_rank_00_optim_states.pt",
    ]
    assert not any(map(is_ours, others))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("hf-zero1", Setup(1, 3)),
        ("hf-zero2", Setup(2, 2)),
        ("hf-zero3-2node", Setup(3, 4)),
        ("raw-ds-zero1-bf16-fp32acc", Setup(1, 2, "bf16_")),
        ("raw-ds-zero3-odd", Setup(3, 3, "bf16_")),
    ],
)
def test_real_files_say_stage_world_and_prefix(name: str, wanted: Setup) -> None:
    files = tree(*vector(name).sources)
    (root,) = {n.rpartition("/")[0] for n in files.sizes() if is_ours(n.rpartition("/")[2])}
    for node in [*vector(name).sources]:
        assert setup(tree(node), root) == setup(files, root) == wanted


def test_the_stage_may_be_a_number_an_enum_or_missing() -> None:
    enum = Call(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), 3)
    data = torch_zip_file(
        {"data.pkl": torch_pickle({"optimizer_state_dict": {"zero_stage": enum, "partition_count": 5}}), "version": b"3\n"}
    )
    assert setup(MemoryFiles({OPTIM_0: data}), "") == Setup(3, 5)
    assert setup(one(STATE), "") == Setup(2, 3)
    assert setup(one({"partition_count": [2]}), "") == Setup(1, 2)


def test_experts_may_be_cut_over_fewer_ranks_than_the_rest() -> None:
    for counts in ([2, 4], [4, 2], (4, 2)):
        assert setup(one(STATE | {"partition_count": counts}), "") == Setup(2, 4)


@pytest.mark.parametrize("stage", [0, 4, None, "3", [3], 2.5])
def test_a_stage_that_nobody_knows_is_unsupported(stage: object) -> None:
    with pytest.raises(Unsupported, match="ZeRO stage"):
        setup(one(STATE | {"zero_stage": stage}), "")


@pytest.mark.parametrize("count", [0, -1, None, [], [0], ["3"], 2.0, 1 << 20, [[1]], {"a": 1}])
def test_a_world_that_cannot_be_is_corrupt(count: object) -> None:
    with pytest.raises(Corrupt, match="partition_count is"):
        setup(one(STATE | {"partition_count": count}), "")


def test_the_model_file_alone_says_stage_and_world_too() -> None:
    told = {"dp_world_size": 4, "ds_config": {"zero_optimization": {"stage": 2}}}
    assert setup(MemoryFiles({f"a/{MODEL_0}": saved(told)}), "a") == Setup(2, 4)
    assert setup(MemoryFiles({MODEL_0: saved({"dp_world_size": 4})}), "") == Setup(0, 4)
    for bad in ({}, {"dp_world_size": "4"}, told | {"ds_config": {"zero_optimization": {"stage": 3}}}):
        with pytest.raises(Corrupt, match="dp_world_size"):
            setup(MemoryFiles({MODEL_0: saved(bad)}), "")


def test_a_node_whose_files_do_not_tell_is_incomplete() -> None:
    with pytest.raises(Incomplete, match="how many ranks"):
        setup(MemoryFiles({"zero_pp_rank_1_mp_rank_00_model_states.pt": b""}), "")


def test_files_are_found_by_rank_in_their_own_directory() -> None:
    names = [f"t/zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (10, 2)]
    assert of_rank([*names, OPTIM_0, "t/deeper/" + OPTIM_0], "t", OPTIM) == {(0, 10): names[0], (0, 2): names[1]}
    assert of_rank(["zero_pp_rank_3_mp_rank_10_optim_states.pt"], "", OPTIM).keys() == {(10, 3)}
    assert of_rank(["mp_rank_07_model_states.pt"], "", MODEL).keys() == {(7, 0)}
    with pytest.raises(Unsupported, match="not known"):
        of_rank(["t/mp_rank_00_000_model_states.pt"], "t", OPTIM)
    with pytest.raises(Corrupt, match="a rank of 1048576"):
        of_rank([f"zero_pp_rank_{1 << 20}_mp_rank_00_optim_states.pt"], "", OPTIM)


def test_a_file_that_is_not_there_is_named_with_what_to_do() -> None:
    with pytest.raises(Incomplete, match=f"t/{OPTIM_0}: not there") as e:
        load(MemoryFiles({}), f"t/{OPTIM_0}")
    assert "add the directory" in e.value.hint


def test_a_file_that_holds_something_else_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="a list, a dictionary expected"):
        load(MemoryFiles({"a": saved([1])}), "a")
    with pytest.raises(Corrupt, match="no optimizer_state_dict"):
        optimizer_state(load(one([]), OPTIM_0))


def test_entries_are_of_the_kind_that_is_asked_for_or_empty() -> None:
    file = load(MemoryFiles({"a": saved({"x": [1], "none": None})}), "a")
    assert (file.get("x", list), file.get("none", dict), file.get("absent", list)) == ([1], {}, [])
    with pytest.raises(Corrupt, match="x is a list, dict expected"):
        file.get("x", dict)


def test_a_part_is_where_a_tensor_lies() -> None:
    files = MemoryFiles({"a": saved({"x": torch.arange(3.0), "y": 5})})
    file = load(files, "a")
    assert file.part(files, file.content["x"]).extent.size == 12
    with pytest.raises(Corrupt, match="something else where a tensor is due"):
        file.part(files, file.content["y"])


def test_a_pickle_in_a_state_file_runs_nothing() -> None:
    data = torch_zip_file({"data.pkl": torch_pickle({"x": Call(Global("os", "system"), "true")}), "version": b"3\n"})
    with pytest.raises(Unsupported, match=r"os\.system"):
        load(MemoryFiles({"a": data}), "a")


class Mine:
    """A class of a training script's."""


def with_client_state(more: object) -> tuple[MemoryFiles, str]:
    """A real checkpoint whose script has given more to ``save_checkpoint(client_state=…)``, which DeepSpeed puts beside its own entries."""
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
    assert load(files, name).content.keys() & odd.keys() == {"epoch"}
    plain = tree(*vector("raw-ds-zero2-odd").sources)
    assert named(files) == named(plain)


def named(files: MemoryFiles) -> list[tuple[str, str, tuple[int, ...]]]:
    found = table.tensors(files, table.choose(files, None))
    assert table.demands(files).model
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
        load(MemoryFiles({"layer_01-model_states.pt": saved({"w": torch.zeros(1), "v": Mine()})}), "layer_01-model_states.pt")


def state_file(name: str, content: dict[str, Any]) -> StateFile:
    return load(MemoryFiles({name: saved(content)}), name)


def model(name: str = "m0", **more: Any) -> StateFile:
    told = {"global_steps": 4, "global_samples": 16, "dp_world_size": 2, "mp_world_size": 1, "ds_version": "0.19.8"}
    return state_file(name, told | more)


def optim(name: str = "o0", **more: Any) -> StateFile:
    base = {"param_groups": [{"lr": 0.01, "params": [0]}], "state": {0: {"step": 4}}}
    state = {"single_partition_of_fp32_groups": [], "partition_count": [2], "base_optimizer_state": base}
    return state_file(name, {"optimizer_state_dict": state | more, "ds_version": "0.19.8"})


TWO = Setup(2, 2)


@pytest.mark.parametrize(
    ("key", "value"), [("global_steps", 5), ("global_samples", 8), ("mp_world_size", 2), ("ds_version", "0.18")]
)
def test_model_files_of_two_saves_are_corrupt(key: str, value: object) -> None:
    check_agreement(Setup(3, 2), [model("m0"), model("m1")], [])
    with pytest.raises(Corrupt, match=f"m1: {key} is .*, .* in m0") as e:
        check_agreement(Setup(3, 2), [model("m0"), model("m1", **{key: value})], [])
    assert "different saves" in e.value.hint


@pytest.mark.parametrize(
    "other",
    [
        {"base_optimizer_state": {"param_groups": [{"lr": 0.009}], "state": {}}},
        {"base_optimizer_state": {"param_groups": [], "state": {0: {"step": 5}}}},
        {"base_optimizer_state": {"param_groups": [{"step": 5}], "state": {}}},
        {"partition_count": [3]},
        {"zero_stage": 1},
        {"base_optimizer_state_step": 5},
    ],
    ids=str,
)
def test_optimizer_files_of_two_saves_are_corrupt(other: dict[str, Any]) -> None:
    first: dict[str, Any] = {"base_optimizer_state": {"param_groups": [{"lr": 0.01, "step": 4}], "state": {0: {"step": 4}}}}
    first |= {"zero_stage": 2, "base_optimizer_state_step": 4}
    check_agreement(TWO, [model()], [[optim("o0", **first), optim("o1", **first)]])
    with pytest.raises(Corrupt, match=r"o1: .* in o0"):
        check_agreement(TWO, [model()], [[optim("o0", **first), optim("o1", **(first | other))]])


def test_what_one_of_them_does_not_record_is_no_contradiction() -> None:
    check_agreement(TWO, [model(ds_version=None)], [[optim("o0"), optim("o1", base_optimizer_state=None)]])
    check_agreement(TWO, [model()], [[optim("o0", base_optimizer_state={"state": {0: {"step": torch.tensor(4.0)}}}), optim("o1")]])


def test_learning_rates_may_differ_by_how_machines_round() -> None:
    near = {"param_groups": [{"lr": 0.01 * (1 + 1e-15)}], "state": {}}
    check_agreement(TWO, [model()], [[optim("o0"), optim("o1", base_optimizer_state=near)]])


def test_pipeline_stages_need_not_have_the_same_groups() -> None:
    other = {"param_groups": [{"lr": 0.5}], "state": {}}
    check_agreement(Setup(1, 2, "", 2), [model(mp_world_size=2)], [[optim("o0")], [optim("o1", base_optimizer_state=other)]])


def test_a_loss_scaler_that_has_come_further_tells_of_another_save() -> None:
    def scaler(steps: int) -> StateFile:
        made = Call(Global("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"))
        state = {"single_partition_of_fp32_groups": [], "partition_count": [2], "loss_scaler": made, "n": steps}
        data = torch_zip_file({"data.pkl": torch_pickle({"optimizer_state_dict": state}), "version": b"3\n"})
        found = load(MemoryFiles({f"o{steps}": data}), f"o{steps}")
        found.content["optimizer_state_dict"]["loss_scaler"].state = {"cur_iter": steps, "cur_scale": 16.0}
        return found

    check_agreement(TWO, [model()], [[scaler(4), scaler(4)]])
    with pytest.raises(Corrupt, match="loss_scaler cur_iter is 5, 4"):
        check_agreement(TWO, [model()], [[scaler(4), scaler(5)]])


def test_a_model_file_of_another_world_is_corrupt_and_one_of_several_parallel_ranks_unsupported() -> None:
    with pytest.raises(Corrupt, match="dp_world_size is 3"):
        check_agreement(TWO, [model(dp_world_size=3)], [[optim()]])
    with pytest.raises(Unsupported, match="2 tensor or pipeline parallel ranks, 1 expected"):
        check_agreement(TWO, [model(mp_world_size=2)], [[optim()]])
    with pytest.raises(Corrupt, match="not an optimizer state of ZeRO stage 3"):
        check_agreement(Setup(3, 2), [model()], [[optim()]])


def test_partitions_of_autoep_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="AutoEP"):
        check_agreement(TWO, [model()], [[optim(ds_zero_partition_groups=[{"partition_count": 1}])]])


def test_weights_in_swap_files_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="NVMe"):
        refuse_what_is_elsewhere(["t/offloaded_tensors/rank00/0.swp"], "t", [model()])
    with pytest.raises(Unsupported, match="NVMe"):
        refuse_what_is_elsewhere(["offloaded_tensors/rank00/0.swp"], "", [model()])
    swapped = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}
    with pytest.raises(Unsupported, match="NVMe"):
        refuse_what_is_elsewhere([], "t", [model(ds_config=swapped)])
    on_cpu = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
    refuse_what_is_elsewhere(["u/offloaded_tensors/rank00/0.swp"], "t", [model(ds_config=on_cpu)])


def test_mics_is_refused_by_name_and_hpz_is_not() -> None:
    with pytest.raises(Unsupported, match="MiCS"):
        refuse_what_is_elsewhere([], "t", [model(ds_config={"zero_optimization": {"mics_shard_size": 2}})])
    refuse_what_is_elsewhere(
        [], "t", [model(ds_config={"zero_optimization": {"mics_shard_size": -1, "zero_hpz_partition_size": 2}})]
    )
    refuse_what_is_elsewhere([], "t", [model(ds_config="ds_config.json")])


def test_a_real_checkpoint_agrees_with_itself_and_not_with_a_rank_that_claims_another_version() -> None:
    files = held("raw-ds-zero3-odd")
    assert zero.tensors(files, TAG)
    name = next(n for n in files.content if n.endswith("rank_1_mp_rank_00_model_states.pt"))
    other = MemoryFiles({**files.content, name: files.content[name].replace(b"0.19.8", b"0.19.7")})
    with pytest.raises(Corrupt):
        zero.tensors(other, TAG)
