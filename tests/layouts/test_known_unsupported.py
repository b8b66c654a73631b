"""What is known and not read: claimed, said, and never taken for something else."""

from __future__ import annotations

import pytest

from ckptsync.errors import Unsupported
from ckptsync.layouts import known_unsupported, registry
from ckptsync.layouts.registry import WeightsSource
from ckptsync.tensors import Demands
from tests.support.files_in_memory import MemoryFiles

MEGATRON = [
    "iter_0000010/mp_rank_00/model_optim_rng.pt",
    "iter_0000010/mp_rank_01_000/model_optim_rng.pt",
]
XLA = ["rank0-of-4-final.pth", "ckpt_rank-00000003-of-00000004-pytorch_model.bin"]


@pytest.mark.parametrize(
    ("names", "root", "said", "todo"),
    [(MEGATRON, "iter_0000010", "Megatron", "torch_dist"), (XLA, "", "torch_xla", "consolidate")],
)
def test_it_is_refused_by_name_with_what_to_do(
    names: list[str], root: str, said: str, todo: str
) -> None:
    files = MemoryFiles(dict.fromkeys(names, b""))
    assert known_unsupported.roots(names) == (root,)
    source = registry.choose(files, None)
    assert source == WeightsSource("refused", root)
    with pytest.raises(Unsupported, match=said) as e:
        registry.tensors(files, source)
    assert todo in e.value.hint
    assert registry.demands(files) == Demands()


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_00_model_states.pt",
        "model-00001-of-00002.safetensors",
        "rank-3.pt",
        "mp_rank_00/x.pt",
        "rng.pth",
    ],
)
def test_other_frameworks_files_are_not_claimed(name: str) -> None:
    assert known_unsupported.roots([name]) == ()


def test_beside_weights_that_are_read_nothing_is_guessed() -> None:
    files = MemoryFiles({**dict.fromkeys(MEGATRON, b""), "m/.metadata": b""})
    with pytest.raises(Unsupported, match="2 sets of weights"):
        registry.choose(files, None)
    with pytest.raises(Unsupported, match="holds nothing"):
        known_unsupported.tensors(files, "elsewhere")
