"""What is known and not read: claimed, said, and never taken for something else."""

from __future__ import annotations

import pytest

from ckptsync.errors import Unsupported
from ckptsync.layouts import refused, table
from ckptsync.layouts.table import Source
from ckptsync.model import Demands
from tests.plain_files import MemoryFiles

MEGATRON = ["iter_0000010/mp_rank_00/model_optim_rng.pt", "iter_0000010/mp_rank_01_000/model_optim_rng.pt"]
XLA = ["rank0-of-4-final.pth", "ckpt_rank-00000003-of-00000004-pytorch_model.bin"]


@pytest.mark.parametrize(
    ("names", "root", "said", "todo"), [(MEGATRON, "iter_0000010", "Megatron", "torch_dist"), (XLA, "", "torch_xla", "consolidate")]
)
def test_it_is_refused_by_name_with_what_to_do(names: list[str], root: str, said: str, todo: str) -> None:
    files = MemoryFiles(dict.fromkeys(names, b""))
    assert refused.roots(names) == (root,)
    source = table.choose(files, None)
    assert source == Source("refused", root)
    with pytest.raises(Unsupported, match=said) as e:
        table.tensors(files, source)
    assert todo in e.value.hint
    assert table.demands(files) == Demands()


@pytest.mark.parametrize(
    "name", ["mp_rank_00_model_states.pt", "model-00001-of-00002.safetensors", "rank-3.pt", "mp_rank_00/x.pt", "rng.pth"]
)
def test_other_frameworks_files_are_not_claimed(name: str) -> None:
    assert refused.roots([name]) == ()


def test_beside_weights_that_are_read_nothing_is_guessed() -> None:
    files = MemoryFiles({**dict.fromkeys(MEGATRON, b""), "m/.metadata": b""})
    with pytest.raises(Unsupported, match="2 sets of weights"):
        table.choose(files, None)
    with pytest.raises(Unsupported, match="holds nothing"):
        refused.tensors(files, "elsewhere")
