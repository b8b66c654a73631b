"""DeepSpeed's files of two saves under the names of one, and weights that lie elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.pickles import Name, PickledObject
from ckptsync.layouts import zero
from ckptsync.layouts.zero_files import (
    StateFile,
    ZeroFiles,
    ZeroSetup,
    check_agreement,
    refuse_offloaded,
)
from tests.support.deepspeed_in_memory import TAG, held
from tests.support.files_in_memory import MemoryFiles

TWO = ZeroSetup(2, 2)


def model(name: str = "f0", **more: Any) -> StateFile:
    content = {
        "module": {},
        "global_steps": 4,
        "global_samples": 16,
        "skipped_steps": 1,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }
    return StateFile(MemoryFiles({}), name, {}, content | more)


def scaler(**more: float) -> PickledObject:
    state = {"cur_iter": 4, "cur_scale": 16.0, "last_overflow_iter": 2}
    return PickledObject(Name("deepspeed", "DynamicLossScaler"), (), state | more)


def group(**more: float) -> dict[str, Any]:
    return {"param_groups": [{"lr": 0.01, "step": 4, "weight_decay": 0.1} | more]}


def optim(name: str = "f0", **more: Any) -> StateFile:
    state = {
        "single_partition_of_fp32_groups": [],
        "partition_count": [2, 2],
        "zero_stage": 2,
        "loss_scaler": scaler(),
        "base_optimizer_state_step": 4,
        "base_optimizer_state": {**group(), "state": {0: {"step": 4}}},
    }
    content = {"optimizer_state_dict": state | more, "ds_version": "0.19.8"}
    return StateFile(MemoryFiles({}), name, {}, content)


OF_MODELS: list[dict[str, Any]] = [
    {"global_steps": 5},
    {"global_samples": 8},
    {"skipped_steps": 2},
    {"dp_world_size": 3},
    {"mp_world_size": 2},
    {"ds_version": "0.18"},
]
OF_RANKS: list[dict[str, Any]] = [
    {"partition_count": [2, 3]},
    {"zero_stage": 1},
    {"base_optimizer_state_step": 5},
    {"base_optimizer_state": {"state": {0: {"step": 5}}}},
    *({"base_optimizer_state": group(**{k: 0.01000001})} for k in ("lr", "step", "weight_decay")),
    *({"loss_scaler": scaler(**{k: 5})} for k in ("cur_iter", "cur_scale", "last_overflow_iter")),
]


@pytest.mark.parametrize("change", [*OF_MODELS, *OF_RANKS], ids=str)
def test_files_of_two_saves_are_corrupt(change: dict[str, Any]) -> None:
    def check(changes: dict[str, Any]) -> None:
        if change in OF_MODELS:
            check_agreement(ZeroSetup(3, 2), [model(), model("f1", **changes)], [])
        else:
            check_agreement(TWO, [model()], [[optim(), optim("f1", **changes)]])

    check({})
    with pytest.raises(Corrupt, match=r"^f1: .* in f0") as e:
        check(change)
    assert "different saves" in e.value.hint


@pytest.mark.parametrize(
    "other",
    [
        {"base_optimizer_state": None},
        {"base_optimizer_state": {"state": {0: {"step": torch.tensor(4.0)}}}},
        {"base_optimizer_state": group(lr=0.01 * (1 + 1e-15))},  # as another machine rounds
    ],
    ids=str,
)
def test_what_one_of_them_does_not_record_is_no_contradiction(other: dict[str, Any]) -> None:
    check_agreement(TWO, [model(ds_version=None)], [[optim(), optim("f1", **other)]])


def test_files_of_another_setup_are_refused() -> None:
    with pytest.raises(Corrupt, match="dp_world_size is 3"):
        check_agreement(TWO, [model(dp_world_size=3)], [[optim()]])
    with pytest.raises(Unsupported, match="2 tensor or pipeline parallel ranks, 1 expected"):
        check_agreement(TWO, [model(mp_world_size=2)], [[optim()]])
    with pytest.raises(Corrupt, match="not an optimizer state of ZeRO stage 3"):
        check_agreement(ZeroSetup(3, 2), [model()], [[optim()]])
    with pytest.raises(Corrupt, match=r"ds_version is .*0\.19\.8.*0\.18"):
        check_agreement(TWO, [model(ds_version="0.18")], [[optim("f1")]])
    with pytest.raises(Unsupported, match="AutoEP"):
        check_agreement(TWO, [model()], [[optim(ds_zero_partition_groups=[{}])]])


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


def test_a_real_checkpoint_does_not_agree_with_a_rank_that_claims_another_version() -> None:
    files = held("raw-ds-zero3-odd")
    name = f"{TAG}/zero_pp_rank_1_mp_rank_00_model_states.pt"
    assert b"0.19.8" in files.content[name]
    files.content[name] = files.content[name].replace(b"0.19.8", b"0.19.7")
    with pytest.raises(Corrupt):
        zero.tensors(files, TAG)
