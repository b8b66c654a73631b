"""PEFT adapters: weights and their configuration, both."""

from __future__ import annotations

import pytest

from ckptsync.errors import Incomplete
from ckptsync.layouts import peft, registry
from ckptsync.layouts.registry import WeightsSource
from tests.support.files_in_memory import MemoryFiles, safetensors_file, tree
from tests.support.gather_tensors import assembled
from tests.support.vector import bits, vector

WEIGHTS = safetensors_file({"base_model.model.q.lora_A.weight": ("U8", (2,), b"xy")})
FILES = {"adapter_model.safetensors": WEIGHTS, "adapter_config.json": b"{}"}


def test_an_adapter_by_torch_save_is_read_where_there_is_none_in_safetensors() -> None:
    of = vector("bin-adapter")
    files = tree(*of.sources)
    assert assembled(files, peft.tensors(files, "")) == bits(of.keep)
    files.content |= FILES
    assert [t.name for t in peft.tensors(files, "")] == ["base_model.model.q.lora_A.weight"]


@pytest.mark.parametrize("name", FILES)
def test_weights_or_configuration_alone_are_incomplete(name: str) -> None:
    rest = MemoryFiles({n: data for n, data in FILES.items() if n != name})
    if peft.roots(rest.sizes()):
        with pytest.raises(Incomplete, match=name):
            registry.tensors(rest, WeightsSource("peft", ""))
    else:
        assert name == peft.WEIGHTS


def test_both_files_are_demanded_with_the_sizes_they_have() -> None:
    assert peft.demands(MemoryFiles(FILES), "") == {n: len(data) for n, data in FILES.items()}
    assert peft.demands(MemoryFiles({}), "") == dict.fromkeys(FILES)


def test_an_adapter_is_claimed_at_the_top_only() -> None:
    assert peft.roots(["adapter_model.safetensors"]) == ("",)
    assert peft.roots(["ref/adapter_model.safetensors", "adapter_config.json"]) == ()
