"""A real mixture of experts, and what must not pass for one."""

from __future__ import annotations

import pytest
import torch

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.layouts import zero
from tests.support.deepspeed_in_memory import TAG, changed, held
from tests.support.files_in_memory import MemoryFiles
from tests.support.torch_bytes import saved
from tests.support.zero_writer import Zero, merged, model, values
from tests.support.zero_writer import files as checkpoint

MODEL = f"{TAG}/mp_rank_00_model_states.pt"
EXPERT = f"{TAG}/layer_1_expert_3_mp_rank_00_model_states.pt"
KEY = "b1.moe.deepspeed_moe.experts.deepspeed_experts.{}.up.bias"


def files() -> MemoryFiles:
    return held("raw-ds-experts")


def test_every_expert_has_its_own_master() -> None:
    keep, auto = merged(files(), "keep"), merged(files(), "auto")
    assert keep.keys() == auto.keys()
    for name in (KEY.format(e) for e in range(4)):
        assert (keep[name].dtype, auto[name].dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(keep[name].bfloat16(), auto[name])
    assert len({tuple(keep[KEY.format(e)].tolist()) for e in range(4)}) == 4


def test_experts_that_ranks_order_otherwise_than_they_say_are_corrupt() -> None:
    other = changed(
        files(), MODEL, lambda m: m["ds_config"].update(use_data_before_expert_parallelism=True)
    )
    with pytest.raises(Corrupt, match="its slice of"):
        merged(other, "keep")


@pytest.mark.parametrize(
    ("told", "error"),
    [([4, 4, 4], Incomplete), ([4], Corrupt), ([4, 3], CkptsyncError), (None, Corrupt)],
)
def test_a_number_of_experts_that_the_files_do_not_have_is_refused(
    told: object, error: type[CkptsyncError]
) -> None:
    with pytest.raises(error):
        merged(changed(files(), MODEL, lambda m: m.update(num_experts=told)), "keep")


def test_autoep_is_refused_by_name() -> None:
    for key in ("ds_autoep_layers", "autoep_layers"):
        with pytest.raises(Unsupported, match="AutoEP"):
            merged(
                changed(files(), MODEL, lambda m, key=key: m.update({key: [{"num_experts": 4}]})),  # type: ignore[misc]
                "keep",
            )


def test_an_expert_under_anothers_name_is_corrupt() -> None:
    other = {**files().content, EXPERT: files().content[EXPERT.replace("expert_3", "expert_2")]}
    with pytest.raises(Corrupt, match="no weight of expert 3"):
        merged(MemoryFiles(other), "auto")


def test_an_expert_with_fewer_weights_than_the_others_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="not all experts"):
        merged(changed(files(), EXPERT, lambda e: e.pop(KEY.format(3))), "auto")


def test_experts_beside_a_model_that_tells_of_none_are_never_passed_over() -> None:
    plain = held("raw-ds-zero2-odd")
    for name in (
        "layer_0_expert_0_mp_rank_00_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
    ):
        with pytest.raises(Corrupt, match="lists no experts"):
            zero.tensors(MemoryFiles({**plain.content, f"{TAG}/{name}": b""}), TAG)


def test_experts_of_stage_three_are_refused() -> None:
    of = Zero(3, 1, [{"w": values((2,), 0)}])
    name = f"{TAG}/zero_pp_rank_0_mp_rank_00_model_states.pt"
    content = {**checkpoint(of).content, name: saved(model(of, 0) | {"num_experts": [1]})}
    with pytest.raises(Unsupported, match="experts of ZeRO-3"):
        zero.tensors(MemoryFiles(content), TAG)
