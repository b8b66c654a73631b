"""What a model file says beside its masters. Whole checkpoints: ``test_zero``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.layouts.zero import MpRank, own_tensors, tensors_of
from ckptsync.layouts.zero_files import load
from ckptsync.merger.plan import MergeOptions
from ckptsync.merger.prepare import prepare
from ckptsync.tensors import Copy
from tests.support.deepspeed_in_memory import TAG, changed, held
from tests.support.files_in_memory import MemoryFiles
from tests.support.torch_bytes import saved
from tests.support.zero_writer import merged

TOLD = {
    "module": {"w": torch.ones(2, 3).bfloat16(), "n": torch.arange(4), "text": "x"},
    "param_shapes": [{"w": (2, 3)}],
}
MASTER = Copy("F32", (6,), ())


def rank(stage: int = 2, absent: str = "", **more: object) -> MpRank:
    files = MemoryFiles({"m": saved(TOLD | more)})
    file = load(files, "m")
    return MpRank(stage, [file], [], own_tensors(file), absent)


def test_the_model_itself_has_tensors_alone() -> None:
    assert rank().own.keys() == {"w", "n"}


def test_a_trained_parameter_has_its_master_and_the_models_own_copy() -> None:
    found = {t.name: t for t in tensors_of(rank(), {"w": (2, 3)}, {"w": MASTER})}
    assert [c.dtype for c in found["w"].copies] == ["F32", "BF16"]
    assert (found["w"].dtype, found["n"].dtype) == ("BF16", "I64")


def test_a_master_whose_file_is_absent_is_named_and_the_models_own_remains() -> None:
    (found, _) = tensors_of(rank(absent="o1"), {"w": (2, 3)}, {})
    assert [(c.dtype, c.absent) for c in found.copies] == [("F32", "o1"), ("BF16", "")]
    with pytest.raises(Incomplete, match="o1: not found; it holds some of v"):
        tensors_of(rank(absent="o1"), {"v": (2,)}, {})


def test_a_model_of_another_shape_than_the_optimizers_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="w has the shape"):
        tensors_of(rank(), {"w": (3, 2)}, {"w": MASTER})
    assert tensors_of(replace(rank(3, buffer_names=["n"]), own={}), {"w": (3, 2)}, {"w": MASTER})


@pytest.mark.parametrize("name", ["raw-ds-zero1-bf16-fp32acc", "raw-ds-zero2-dealt"])
def test_without_param_shapes_the_models_own_weights_are_read_and_masters_are_not(
    name: str,
) -> None:
    model = f"{TAG}/mp_rank_00_model_states.pt"
    old = changed(held(name), model, lambda m: m.update(param_shapes=None, ds_config=None))
    wanted, found = merged(held(name), "auto"), merged(old, "auto")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    assert f"param_shapes of {model} is missing" in prepare(old, MergeOptions("auto")).notes[0]
    with pytest.raises(Incomplete, match="param_shapes"):
        merged(old, "keep")
