"""DeepSpeed's files of two saves under the names of one, and weights that lie elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.layouts import zero
from ckptsync.layouts.zero_files import (
    StateFile,
    ZeroFiles,
    ZeroSetup,
    check_agreement,
    load,
    refuse_offloaded,
)
from tests.support.deepspeed_in_memory import TAG, held
from tests.support.files_in_memory import Call, Global, MemoryFiles, torch_pickle, torch_zip_file
from tests.support.torch_bytes import saved


def state_file(name: str, content: dict[str, Any]) -> StateFile:
    return load(MemoryFiles({name: saved(content)}), name)


def model(name: str = "m0", **more: Any) -> StateFile:
    told = {
        "module": {},
        "global_steps": 4,
        "global_samples": 16,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }
    return state_file(name, told | more)


def optim(name: str = "o0", **more: Any) -> StateFile:
    base = {"param_groups": [{"lr": 0.01, "params": [0]}], "state": {0: {"step": 4}}}
    state = {
        "single_partition_of_fp32_groups": [],
        "partition_count": [2],
        "base_optimizer_state": base,
    }
    return state_file(name, {"optimizer_state_dict": state | more, "ds_version": "0.19.8"})


TWO = ZeroSetup(2, 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [("global_steps", 5), ("global_samples", 8), ("mp_world_size", 2), ("ds_version", "0.18")],
)
def test_model_files_of_two_saves_are_corrupt(key: str, value: object) -> None:
    check_agreement(ZeroSetup(3, 2), [model("m0"), model("m1")], [])
    with pytest.raises(Corrupt, match=f"m1: {key} is .*, .* in m0") as e:
        check_agreement(ZeroSetup(3, 2), [model("m0"), model("m1", **{key: value})], [])
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
    first: dict[str, Any] = {
        "base_optimizer_state": {
            "param_groups": [{"lr": 0.01, "step": 4}],
            "state": {0: {"step": 4}},
        }
    }
    first |= {"zero_stage": 2, "base_optimizer_state_step": 4}
    check_agreement(TWO, [model()], [[optim("o0", **first), optim("o1", **first)]])
    with pytest.raises(Corrupt, match=r"o1: .* in o0"):
        check_agreement(TWO, [model()], [[optim("o0", **first), optim("o1", **(first | other))]])


def test_what_one_of_them_does_not_record_is_no_contradiction() -> None:
    check_agreement(
        TWO, [model(ds_version=None)], [[optim("o0"), optim("o1", base_optimizer_state=None)]]
    )
    check_agreement(
        TWO,
        [model()],
        [
            [
                optim("o0", base_optimizer_state={"state": {0: {"step": torch.tensor(4.0)}}}),
                optim("o1"),
            ]
        ],
    )


def test_learning_rates_may_differ_by_how_machines_round() -> None:
    near = {"param_groups": [{"lr": 0.01 * (1 + 1e-15)}], "state": {}}
    check_agreement(TWO, [model()], [[optim("o0"), optim("o1", base_optimizer_state=near)]])


def test_a_loss_scaler_that_has_come_further_tells_of_another_save() -> None:
    def scaler(steps: int) -> StateFile:
        made = Call(Global("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"))
        state = {
            "single_partition_of_fp32_groups": [],
            "partition_count": [2],
            "loss_scaler": made,
            "n": steps,
        }
        data = torch_zip_file(
            {"data.pkl": torch_pickle({"optimizer_state_dict": state}), "version": b"3\n"}
        )
        found = load(MemoryFiles({f"o{steps}": data}), f"o{steps}")
        found.content["optimizer_state_dict"]["loss_scaler"].state = {
            "cur_iter": steps,
            "cur_scale": 16.0,
        }
        return found

    check_agreement(TWO, [model()], [[scaler(4), scaler(4)]])
    with pytest.raises(Corrupt, match="loss_scaler cur_iter is 5, 4"):
        check_agreement(TWO, [model()], [[scaler(4), scaler(5)]])


def test_a_model_file_of_another_world_is_corrupt_and_one_of_parallel_ranks_unsupported() -> None:
    with pytest.raises(Corrupt, match="dp_world_size is 3"):
        check_agreement(TWO, [model(dp_world_size=3)], [[optim()]])
    with pytest.raises(Unsupported, match="2 tensor or pipeline parallel ranks, 1 expected"):
        check_agreement(TWO, [model(mp_world_size=2)], [[optim()]])
    with pytest.raises(Corrupt, match="not an optimizer state of ZeRO stage 3"):
        check_agreement(ZeroSetup(3, 2), [model()], [[optim()]])


def test_partitions_of_autoep_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="AutoEP"):
        check_agreement(
            TWO, [model()], [[optim(ds_zero_partition_groups=[{"partition_count": 1}])]]
        )


def refuse(config: Any, root: str = "t", swap: str = "latest") -> None:
    zero_files = ZeroFiles(MemoryFiles({swap: b""}), root)
    refuse_offloaded(zero_files, model(ds_config={"zero_optimization": config}))


def test_weights_in_swap_files_are_refused_by_name() -> None:
    for root in ("t", ""):
        swap = f"{root}/offloaded_tensors/rank00/0.swp".removeprefix("/")
        with pytest.raises(Unsupported, match="NVMe"):
            refuse(None, root, swap)
    with pytest.raises(Unsupported, match="NVMe"):
        refuse({"offload_optimizer": {"device": "nvme"}})
    on_cpu = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    refuse(on_cpu, swap="u/offloaded_tensors/rank00/0.swp")


def test_mics_is_refused_by_name_and_hpz_is_not() -> None:
    with pytest.raises(Unsupported, match="MiCS"):
        refuse({"mics_shard_size": 2})
    refuse({"mics_shard_size": -1, "zero_hpz_partition_size": 2})
    refuse("ds_config.json")


def test_a_real_checkpoint_agrees_with_itself_and_not_with_a_rank_that_claims_another_version() -> (
    None
):
    files = held("raw-ds-zero3-odd")
    assert zero.tensors(files, TAG)
    name = next(n for n in files.content if n.endswith("rank_1_mp_rank_00_model_states.pt"))
    other = MemoryFiles({**files.content, name: files.content[name].replace(b"0.19.8", b"0.19.7")})
    with pytest.raises(Corrupt):
        zero.tensors(other, TAG)
