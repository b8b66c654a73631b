"""What a model file says beside its masters; whole checkpoints are in ``test_layouts_zero``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.layouts.zero_files import load
from ckptsync.layouts.zero_rank import Rank, groups_of, own_of, tensors_of
from ckptsync.model import Copy
from tests.plain_files import MemoryFiles
from tests.torch_files import saved

TOLD = {"module": {"w": torch.ones(2, 3).bfloat16(), "n": torch.arange(4), "text": "x"}, "param_shapes": [{"w": (2, 3)}]}
MASTER = Copy("F32", (6,), ())


def rank(stage: int = 2, absent: str = "", **more: object) -> Rank:
    files = MemoryFiles({"m": saved(TOLD | more)})
    file = load(files, "m")
    return Rank(files, stage, [file], [], own_of(file), absent)


def test_the_model_itself_has_tensors_alone() -> None:
    assert rank().own.keys() == {"w", "n"}


def test_groups_are_told_or_not() -> None:
    assert groups_of(rank().first) == [{"w": (2, 3)}]
    assert groups_of(rank(param_shapes=None).first) is None


def test_a_trained_parameter_has_its_master_and_the_models_own_copy() -> None:
    found = {t.name: t for t in tensors_of(rank(), {"w": (2, 3)}, {"w": MASTER})}
    assert [c.dtype for c in found["w"].copies] == ["F32", "BF16"]
    assert (found["w"].dtype, found["n"].dtype) == ("BF16", "I64")


def test_a_master_whose_file_is_absent_is_named_and_the_models_own_remains() -> None:
    (found, _) = tensors_of(rank(absent="o1"), {"w": (2, 3)}, {})
    assert [(c.dtype, c.absent) for c in found.copies] == [("F32", "o1"), ("BF16", "")]
    with pytest.raises(Incomplete, match="o1: not there; it holds some of v"):
        tensors_of(rank(absent="o1"), {"v": (2,)}, {})


def test_a_model_of_another_shape_than_the_optimizers_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="w has the shape"):
        tensors_of(rank(), {"w": (3, 2)}, {"w": MASTER})
    assert tensors_of(replace(rank(3, buffer_names=["n"]), own={}), {"w": (3, 2)}, {"w": MASTER})
