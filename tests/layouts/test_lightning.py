"""Lightning's and Fabric's checkpoints of one file."""

from __future__ import annotations

import collections
import enum
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.layouts import lightning, registry
from ckptsync.layouts.registry import WeightsSource
from tests.support.files_in_memory import MemoryFiles, safetensors_file
from tests.support.gather_tensors import assembled
from tests.support.torch_bytes import raw, saved

NAME = "epoch=0-step=10.ckpt"
WEIGHTS = {
    "model.w": torch.arange(6.0).reshape(2, 3),
    "model.b": torch.ones(3, dtype=torch.bfloat16),
}
BITS = {
    k: ({torch.float32: "F32", torch.bfloat16: "BF16"}[t.dtype], tuple(t.shape), raw(t))
    for k, t in WEIGHTS.items()
}
ADAM = {"state": {0: {"exp_avg": torch.zeros(2, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


class Kind(enum.Enum):
    A = 1


class Options(dict):  # type: ignore[type-arg]
    pass


class Rows(list):  # type: ignore[type-arg]
    pass


ODD = {  # what scripts keep in a checkpoint beside its tensors
    "counter": collections.Counter("abc"),
    "deque": collections.deque([1, 2], maxlen=3),
    "default": collections.defaultdict(list, {"a": [1]}),
    "options": Options(lr=1.0),
    "rows": Rows([1, 2]),
    "path": Path("/data"),
    "partial": functools.partial(int, base=2),
    "kind": Kind.A,
    "class": Options,
    "range": range(3),
    "set": {1, 2},
    "bytes": b"x",
    "complex": 1j,
}


def of(**more: Any) -> dict[str, Any]:
    """As Lightning's ``dump_checkpoint`` lays it out."""
    told = {
        "epoch": 0,
        "global_step": 10,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": WEIGHTS,
        "loops": {},
        "callbacks": {},
    }
    return {**told, "optimizer_states": [ADAM], "lr_schedulers": [], **more}


def one(value: Any, **options: Any) -> MemoryFiles:
    return MemoryFiles({NAME: saved(value, **options)})


def read(files: MemoryFiles) -> Any:
    return registry.tensors(files, WeightsSource("lightning", NAME))


@pytest.mark.parametrize(
    "value", [of(), of(hyper_parameters=ODD, callbacks={"Own": ODD})], ids=["plain", "odd"]
)
def test_the_state_dict_is_read_whatever_else_a_script_keeps(value: Any) -> None:
    files = one(value)
    assert str(registry.choose(files, None)) == f"lightning:{NAME}"
    assert assembled(files, read(files)) == BITS
    assert registry.demands(files).model == {NAME: len(files.content[NAME])}


@pytest.mark.parametrize("key", ["model", "module", "model_state_dict"])
def test_what_fabric_saves_has_the_scripts_own_key(key: str) -> None:
    files = one({key: WEIGHTS, "optimizer": ADAM, "iter": 3})
    assert assembled(files, read(files)) == BITS


@pytest.mark.parametrize(
    "value",
    [
        {"generator": WEIGHTS, "critic": WEIGHTS},
        {"model": WEIGHTS, "module": WEIGHTS},
        [1],
        of(state_dict={}),
    ],
)
def test_where_nothing_says_which_is_the_model_it_is_stored_and_not_guessed(value: Any) -> None:
    files = one(value)
    with pytest.raises(Unsupported, match="nothing in it says"):
        read(files)
    assert registry.demands(files).model


def test_a_tensor_of_another_kind_is_never_left_out_in_silence() -> None:
    with pytest.raises(Unsupported, match=r"'model\.q' is a .*Counter"):
        read(one(of(state_dict={**WEIGHTS, "model.q": collections.Counter("ab")})))
    extra = {**WEIGHTS, "model._extra_state": collections.Counter("ab")}
    first, *others = read(one(of(state_dict=extra, average=WEIGHTS)))
    assert len(others) == len(WEIGHTS) - 1
    assert re.search("extra state of a module.*'average': other values", first.remark)


@pytest.mark.parametrize("container", ["zip", "older"])
def test_a_file_cut_short_anywhere_demands_nothing_and_is_not_closed(container: str) -> None:
    data = saved(of(), _use_new_zipfile_serialization=container == "zip")
    for size in range(0, len(data), 7):
        files = MemoryFiles({NAME: data[:size]})
        assert not registry.demands(files).model, size
        assert not registry.closed(NAME, files), size
    assert registry.closed(NAME, MemoryFiles({NAME: data}))


def test_a_changed_pickle_is_corrupt_and_an_odd_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = one(of())
    data = bytearray(files.content[NAME])
    data[data.index(b"global_step")] ^= 1
    files.content[NAME] = bytes(data)
    with pytest.raises(Corrupt, match="CRC32"):
        read(files)
    keys = {((1, (2,)),): 3}
    odd = one(of(hyper_parameters=keys))
    with pytest.raises(Unsupported, match="pickle"):
        read(odd)
    assert registry.demands(odd).model
    monkeypatch.setattr("torch.serialization.get_crc32_options", lambda: False)
    with pytest.raises(Corrupt, match="pickle"):  # nothing shows that it is intact
        read(one(of(hyper_parameters=keys)))


def test_what_torch_never_wrote_is_of_no_layout_that_demands_anything() -> None:
    files = MemoryFiles({NAME: b"a table of TensorFlow's"})
    assert not registry.demands(files).model
    with pytest.raises(CkptsyncError):
        read(files)
    with pytest.raises(Incomplete, match="not found"):
        lightning.demands(MemoryFiles({}), NAME)


def test_a_damaged_directory_of_the_archive_is_damage_and_not_a_lack() -> None:
    files = one(of())
    data = bytearray(files.content[NAME])
    data[data.index(b"PK\x01\x02")] ^= 1
    files.content[NAME] = bytes(data)
    assert registry.demands(files).model
    with pytest.raises(Corrupt, match="directory entry"):
        read(files)


def test_of_several_files_none_is_guessed_and_beside_other_weights_it_gives_way() -> None:
    files = MemoryFiles({"a.ckpt": saved(of()), "last.ckpt": saved(of())})
    with pytest.raises(Unsupported, match="2 sets of weights") as e:
        registry.choose(files, None)
    assert e.value.hint == "--source lightning:a.ckpt or lightning:last.ckpt"
    files.content["model.safetensors"] = safetensors_file({"w": ("U8", (1,), b"x")})
    assert str(registry.choose(files, None)) == "whole:."
    beside = MemoryFiles(
        {"own.ckpt": saved(of()), "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt": b""}
    )
    assert registry.choose(beside, None).layout == "zero"


def test_only_files_of_the_checkpoints_own_directory_are_claimed() -> None:
    assert lightning.roots([NAME, "deeper/b.ckpt", ".ckpt", "c.ckpt.tmp"]) == (NAME,)


@pytest.mark.parametrize(
    ("value", "resumes"),
    [
        ({"state_dict": WEIGHTS, "optimizer_states": [ADAM]}, True),
        ({"model": WEIGHTS, "optimizer": ADAM, "step": 3}, True),
        ({"state_dict": WEIGHTS, "global_step": 3}, False),  # save_weights_only
    ],
)
def test_a_file_with_an_optimizer_is_all_that_a_resumed_training_needs(
    value: dict[str, Any], *, resumes: bool
) -> None:
    files = one(value)
    needed = registry.demands(files)
    assert needed.model == {NAME: files.sizes()[NAME]}
    assert needed.resume == (needed.model if resumes else {})
