"""Archives in the files of distributed checkpoints, as their metadata says."""

from __future__ import annotations

import pytest

from ckptsync.errors import StoreError
from ckptsync.verify.archives import items
from tests.plain_files import MemoryFiles, tree
from tests.vector import vector

FSDP = tree(*vector("hf-fsdp2-2node").sources)


def test_every_shard_has_its_items_one_behind_the_other_weights_or_not() -> None:
    found = items(FSDP)
    assert set(found) == {path for path in FSDP.content if path.endswith(".distcp")}
    for path, its in found.items():
        ends = [start + size for start, size, _ in its.items]
        assert [start for start, _, _ in its.items] == [0, *ends[:-1]]
        assert ends[-1] <= len(FSDP.content[path])
        assert not its.is_packed


def test_what_metadata_cannot_tell_is_left_out() -> None:
    broken = {**FSDP.content, "pytorch_model_fsdp_0/.metadata": b"x"}
    assert {path.partition("/")[0] for path in items(MemoryFiles(broken))} == {"optimizer_0"}


def test_packed_items_are_said_to_be() -> None:
    assert all(its.is_packed for its in items(tree(*vector("dcp-zstd").sources)).values())


def test_a_store_that_does_not_answer_is_no_missing_metadata() -> None:
    class Broken(MemoryFiles):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            raise StoreError("input/output error")

    with pytest.raises(StoreError):
        items(Broken(FSDP.content))
