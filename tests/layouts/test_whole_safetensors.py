"""Whole models: one file, or numbered ones with an index that must be right."""

from __future__ import annotations

import json

import pytest

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.layouts import registry, whole_safetensors
from ckptsync.layouts.registry import WeightsSource
from ckptsync.tensors import read
from tests.support.files_in_memory import MemoryFiles, safetensors_file

ONE = safetensors_file({"a": ("U8", (2,), b"xy")})
TWO = safetensors_file({"b": ("U8", (3,), b"123"), "c": ("U8", (1,), b"4")})
NAMES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
MAP = {"a": NAMES[0], "b": NAMES[1], "c": NAMES[1]}


def sharded(weight_map: object = MAP, **files: bytes) -> MemoryFiles:
    index = {
        whole_safetensors.INDEX: json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    }
    return MemoryFiles({NAMES[0]: ONE, NAMES[1]: TWO, **index, **files})


def content(files: MemoryFiles) -> dict[str, bytes]:
    return {
        t.name: read(files, t.copies[0].parts[0].extent)
        for t in registry.tensors(files, WeightsSource("whole", ""))
    }


def test_a_model_is_claimed_at_the_top_only() -> None:
    for name in ("model.safetensors", whole_safetensors.INDEX, NAMES[1]):
        assert whole_safetensors.roots([name]) == ("",)
    others = ["sub/model.safetensors", "adapter_model.safetensors", "model-1-of-2.safetensors"]
    assert whole_safetensors.roots([*others, "model.safetensors.tmp"]) == ()


def test_the_files_of_the_index_are_demanded_and_no_others() -> None:
    files = sharded(**{"model-00003-of-00003.safetensors": ONE})
    assert whole_safetensors.demands(files, "") == dict.fromkeys([whole_safetensors.INDEX, *NAMES])
    assert content(files) == {"a": b"xy", "b": b"123", "c": b"4"}


def test_without_an_index_the_numbers_say_how_many_there_are() -> None:
    files = MemoryFiles({NAMES[1]: TWO})
    assert whole_safetensors.demands(files, "") == dict.fromkeys(NAMES)
    with pytest.raises(Incomplete, match=NAMES[0]):
        content(files)
    files.content[NAMES[0]] = ONE
    assert content(files) == {"a": b"xy", "b": b"123", "c": b"4"}
    files.content["model.safetensors"] = ONE
    assert whole_safetensors.demands(files, "") == {"model.safetensors": None}


def test_numbered_files_of_two_sets_are_not_guessed_at() -> None:
    with pytest.raises(Corrupt, match="2 different sets"):
        whole_safetensors.demands(
            MemoryFiles({NAMES[0]: ONE, "model-00001-of-00003.safetensors": TWO}), ""
        )


def test_one_name_in_two_files_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="b is also in"):
        content(sharded(**{NAMES[0]: TWO}))


@pytest.mark.parametrize(
    "weight_map",
    [
        {**MAP, "d": NAMES[0]},
        {**MAP, "a": NAMES[1], "b": NAMES[0]},
        {k: v for k, v in MAP.items() if k != "c"},
    ],
)
def test_an_index_that_does_not_fit_its_files_is_corrupt(weight_map: object) -> None:
    with pytest.raises(Corrupt, match="not where it says"):
        content(sharded(weight_map))
