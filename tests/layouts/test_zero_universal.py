"""A real universal checkpoint, whole in ``tests/merger/test_vectors.py``.

Here its traps, and one made of every kind of ZeRO by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.layouts import zero, zero_universal
from tests.support.deepspeed_in_memory import changed, held, without
from tests.support.files_in_memory import MemoryFiles
from tests.support.torch_bytes import saved
from tests.support.zero_writer import Zero, expected, files, merged, model, values

ROOT = "global_step2_universal"
MODEL = f"{ROOT}/mp_rank_00_model_states.pt"
WEIGHT = {"w": values((3, 4), 0), "b": values((5,), 50)}


def real() -> MemoryFiles:
    return held("raw-ds-universal")


def converted(of: Zero, **extra: object) -> MemoryFiles:
    """As ``ds_to_universal`` converts: flat tensors at stage 3, dictionaries else, and a cast of
    everything else in the module.
    """
    content = {n: d for n, d in files(of).content.items() if "model_states" in n}
    held_: dict[str, object] = {}
    for name, tensor in of.trained.items():
        # a view of a larger storage
        larger = torch.cat([tensor.reshape(-1), torch.full((3,), 77.0)])[: tensor.numel()]
        held_[name] = (
            larger if of.stage == 3 else {"cat_dim": 0, "param": larger.view(tensor.shape)}
        )
    if of.stage < 3:
        held_ |= {
            n: {"param": t.float() + 0.5} for n, t in (*of.buffers.items(), *of.frozen.items())
        }
    return MemoryFiles(
        content | {f"{of.root}/zero/{n}/fp32.pt": saved(v) for n, v in {**held_, **extra}.items()}
    )


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[n], other[n]) and one[n].dtype == other[n].dtype for n in one
    )


@pytest.mark.parametrize("dtype", ["keep", "auto"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_are_the_merged_ones_and_all_else_is_the_models_own(stage: int, dtype: Any) -> None:
    frozen = {"f": values((6,), 3, torch.bfloat16)}
    of = Zero(
        stage,
        2,
        [WEIGHT],
        frozen=frozen,
        buffers={"n": values((4,), 1, torch.int64)},
        tied={"head": "w"},
    )
    assert same(merged(converted(of), dtype), expected(of, dtype))


def test_a_directory_with_merged_masters_is_universal_and_not_zero() -> None:
    assert (zero_universal.roots(real().sizes()), zero.roots(real().sizes())) == ((ROOT,), ())
    assert zero_universal.roots(
        ["zero/w/fp32.pt", "a/zero/w.b/fp32.pt", "zero/fp32.pt", "a/w/fp32.pt", "zero/w/step.pt"]
    ) == ("", "a")


def test_a_master_of_another_shape_is_corrupt_and_so_is_none() -> None:
    of = Zero(2, 2, [WEIGHT])
    for junk in (
        torch.ones(11),
        {"param": torch.ones(4, 3)},
        {"param": 5},
        {},
        [1],
        5,
        {"param": WEIGHT["w"], "vocab_tensor": True},
    ):
        with pytest.raises(Corrupt):
            merged(converted(of, w=junk), "keep")


def test_experts_and_a_pipelines_buffers_are_not_in_it_and_it_is_said() -> None:
    with pytest.raises(Unsupported, match="with experts"):
        merged(changed(real(), MODEL, lambda m: m.update(num_experts=[4])), "keep")
    with pytest.raises(Incomplete, match="buffers of a pipeline"):
        merged(changed(real(), MODEL, lambda m: m.update(module=None)), "keep")


def pipeline(*stages: dict[str, torch.Tensor]) -> MemoryFiles:
    content: dict[str, bytes] = {}
    for mp, weights in enumerate(stages):
        told = {
            "module": None,
            "param_shapes": [{n: t.shape for n, t in weights.items()}],
            "buffer_names": [],
        }
        config = {"bf16": {"enabled": True}}
        content[f"u/mp_rank_{mp:02d}_model_states.pt"] = saved(
            {**told, "dp_world_size": 1, "mp_world_size": len(stages), "ds_config": config}
        )
        content |= {
            f"u/zero/{n}/fp32.pt": saved({"param": t, "cat_dim": 0}) for n, t in weights.items()
        }
    return MemoryFiles(content)


def test_a_pipelines_stages_are_joined_and_none_may_be_missing() -> None:
    of = pipeline({"0.w": values((3, 4), 0)}, {"1.w": values((2,), 9)})
    assert same(merged(of, "keep"), {"0.w": values((3, 4), 0), "1.w": values((2,), 9)})
    assert {t.dtype for t in merged(of, "auto").values()} == {torch.bfloat16}
    for name in of.content:
        with pytest.raises(CkptsyncError):
            merged(without(of, name), "keep")


def test_an_untrained_tensor_that_no_rank_holds_whole_is_refused() -> None:
    of = pipeline({"w": values((3, 4), 0)}, {"w": values((3, 4), 0)})
    first, second = sorted(name for name in of.content if "model_states" in name)
    module = {"f": values((2,), 1), "w": values((3, 2), 2)}
    for name in (first, second):
        of = changed(of, name, lambda m: m.update(module=module, buffer_names=["f"]))
    assert same(merged(of, "keep"), {"w": values((3, 4), 0), "f": values((2,), 1)})
    of = changed(of, first, lambda m: m.update(buffer_names=[]))
    with pytest.raises(Unsupported, match="f is not trained"):
        merged(of, "keep")


def test_a_conversion_beside_what_it_was_made_from_is_not_chosen_in_silence() -> None:
    both = MemoryFiles(
        {**real().content, **files(Zero(2, 2, [WEIGHT])).content, "latest": b"global_step2"}
    )
    with pytest.raises(Unsupported, match="2 sets of weights"):
        merged(both, "keep")


def test_model_files_of_two_saves_are_corrupt() -> None:
    of = converted(Zero(3, 2, [WEIGHT]))
    last = "global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt"
    of.content[last] = saved(model(Zero(3, 2, [WEIGHT]), 1) | {"dp_world_size": 3})
    with pytest.raises(Corrupt, match="dp_world_size"):
        merged(of, "keep")


def dealt(content: dict[str, Any]) -> None:
    content["ds_config"]["zero_optimization"]["round_robin_gradients"] = True


def test_masters_that_the_conversion_mixes_up_are_not_taken_though_asked_for() -> None:
    of = changed(real(), MODEL, dealt)
    found = {tensor.name: tensor for tensor in zero_universal.tensors(of, ROOT)}
    assert [t.remark for t in found.values() if "mixes up the masters" in t.remark]
    masters = [
        copy
        for tensor in found.values()
        for copy in tensor.copies
        if any(p.extent.file.endswith("fp32.pt") for p in copy.parts)
    ]
    assert masters == []


@pytest.mark.parametrize("of", [Zero(2, 1, [WEIGHT]), Zero(3, 2, [WEIGHT])])
def test_masters_that_one_rank_had_alone_or_of_stage_three_are_not_mixed_up(of: Zero) -> None:
    held = converted(of)
    name = min(name for name in held.content if "model_states" in name)
    found = zero_universal.tensors(changed(held, name, dealt), "global_step2")
    assert [tensor.remark for tensor in found] == ["" for _ in found]
