"""Quantised tensors are refused by name, whatever file they are in."""

from __future__ import annotations

import warnings

import pytest
import torch

from ckptsync.errors import Unsupported
from ckptsync.formats import quantised
from ckptsync.layouts import rank_files, whole_bin
from ckptsync.layouts.table import Source, tensors
from tests.plain_files import MemoryFiles
from tests.torch_files import saved


def test_torchs_own_quantised_tensors_are_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 0, torch.qint8)
        data = saved({"w": weight})
    with pytest.raises(Unsupported, match=r"pytorch_model\.bin: .*quantized tensors") as e:
        tensors(MemoryFiles({"pytorch_model.bin": data}), Source("bin", "pytorch_model"))
    assert "dequantised" in e.value.hint


@pytest.mark.parametrize("name", quantised.REFUSED, ids=str)
def test_every_known_kind_refuses_when_it_is_made(name: object) -> None:
    with pytest.raises(Unsupported):
        quantised.REFUSED[name](name, ())  # type: ignore[index,call-arg,arg-type]


def test_the_layouts_that_read_torchs_pickles_know_them() -> None:
    assert quantised.ALLOWED.items() <= whole_bin.ALLOWED.items()
    assert quantised.ALLOWED.items() <= rank_files.ALLOWED.items()


def test_sparse_tensors_are_named() -> None:
    data = saved({"w": torch.eye(3).to_sparse()})
    with pytest.raises(Unsupported, match="sparse"):
        tensors(MemoryFiles({"pytorch_model.bin": data}), Source("bin", "pytorch_model"))
