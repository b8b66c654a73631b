"""PEFT adapters: weights and their configuration, both."""

from __future__ import annotations

import pytest

from ckptsync.errors import Incomplete, Unsupported
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


@pytest.mark.parametrize(
    ("names", "roots"),
    [
        (["adapter_model.safetensors"], ("",)),
        (["ref/adapter_model.safetensors", "adapter_model.bin"], ("", "ref")),
        (["b c/adapter_model.bin", "a/adapter_model.safetensors"], ("a", "b c")),
        (["checkpoint/adapter_model.safetensors"], ("checkpoint",)),
        (["checkpoint/p/adapter_model.safetensors"], ("checkpoint/p",)),
        (["actor/lora_adapter/adapter_model.safetensors", "a/adapter_config.json"], ()),
    ],
)
def test_adapters_lie_in_the_checkpoint_and_in_directories_of_their_names(
    names: list[str], roots: tuple[str, ...]
) -> None:
    assert peft.roots(names) == roots


def test_the_adapter_called_default_is_chosen_and_of_named_ones_none_is() -> None:
    named = {f"{above}/{n}": data for above in ("policy", "ref") for n, data in FILES.items()}
    files = MemoryFiles(named)
    with pytest.raises(Unsupported, match="2 sets of weights") as refused:
        registry.choose(files, None)
    assert refused.value.hint.startswith("--source peft:policy or peft:ref;")
    for name in ("policy", "peft:policy"):
        assert registry.choose(files, name) == WeightsSource("peft", "policy")
    assert registry.demands(files).model == {n: len(data) for n, data in named.items()}
    files.content |= FILES
    assert registry.choose(files, None) == WeightsSource("peft", "")
    assert registry.demands(files).model.keys() == files.content.keys()


def test_an_adapter_without_its_configuration_is_named() -> None:
    files = MemoryFiles({"policy/adapter_model.safetensors": WEIGHTS})
    with pytest.raises(Incomplete, match=r"policy/adapter_config\.json"):
        registry.tensors(files, registry.choose(files, None))
