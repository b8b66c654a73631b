"""Metadata of every rank for itself: put together, or refused where nobody can say that it is all."""

from __future__ import annotations

import pytest

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import dcp, table
from ckptsync.layouts.dcp_local import describing, is_own
from ckptsync.merge.plan import Options, plan
from ckptsync.model import Shape
from tests.dcp_files import DATA, Chunk, found, item, metadata
from tests.plain_files import MemoryFiles

HALVES = {0: ((0,), DATA[:8]), 1: ((2,), DATA[8:])}


def rank(number: int, shape: Shape = (4,), dtype: str = "float32", offset: int | None = None) -> dict[str, bytes]:
    """One rank's half of "w", and its copy of "b"."""
    own, both = item(HALVES[number % 2][1], (2,)), item(DATA, (4,))
    file = f"__{number}_0.distcp"
    at = HALVES[number % 2][0] if offset is None else (offset,)
    chunk, copy = Chunk(at, (2,), file, 0, len(own)), Chunk((0,), (4,), file, len(own), len(both))
    told = metadata({"w": (dtype, shape, (chunk,)), "b": ("float32", (4,), (copy,))})
    return {f"__{number}.metadata": told, file: own + both}


def states(count: int) -> dict[str, bytes]:
    return {f"rng_state_{n}.pth": b"" for n in range(count)}


def test_names_of_ranks_own_metadata() -> None:
    assert [is_own(n) for n in ("__0.metadata", "__12.metadata", ".metadata", "__x.metadata", "__0_0.distcp")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    names = ["a/__10.metadata", "a/__9.metadata", "b/__0.metadata", "a/b/__1.metadata"]
    assert describing(names, "a") == ("a/__9.metadata", "a/__10.metadata")
    assert describing([*names, "a/.metadata"], "a") == ("a/.metadata",)


def test_boxes_of_all_ranks_are_put_together_and_replicas_read_once() -> None:
    files = MemoryFiles({**rank(0), **rank(1), **states(2)})
    assert dcp.roots(files.sizes()) == ("",)
    assert dcp.demands(files, "").keys() == {"__0.metadata", "__1.metadata", "__0_0.distcp", "__1_0.distcp"}
    told = found(files)
    assert [p.offsets for p in told["w"].copies[0].parts] == [(0,), (2,)]
    assert [p.extent.file for p in told["b"].copies[0].parts] == ["__0_0.distcp"]
    plan(dcp.tensors(files, ""), Options())
    assert [t.remark for t in dcp.tensors(files, "")] == ["2 ranks wrote it, as their random states say, and nothing else does", ""]
    assert not any(t.remark for t in dcp.tensors(files, "#world=2"))


def test_every_file_has_its_demanded_size_replicas_and_all() -> None:
    files = MemoryFiles({**rank(0), **rank(1), **states(2)})
    table.require(files, dcp.demands(files, ""))


def test_without_a_word_from_outside_nobody_knows_that_it_is_all() -> None:
    files = MemoryFiles({**rank(0), **rank(1)})
    with pytest.raises(Incomplete, match="nothing says how many ranks") as refused:
        dcp.demands(files, "")
    assert "#world=2" in refused.value.hint
    assert len(dcp.tensors(files, "#world=2")) == 2


def test_random_states_around_the_directory_count_too() -> None:
    held = {f"model/{n}": data for n, data in {**rank(0), **rank(1)}.items()}
    assert found(MemoryFiles({**held, "random_states_0.pkl": b"", "random_states_1.pkl": b""}), "model").keys() == {"w", "b"}


@pytest.mark.parametrize("there", [(0,), (1,), (0, 2), (1, 2)])
def test_a_missing_rank_is_named(there: tuple[int, ...]) -> None:
    files = MemoryFiles({k: v for n in there for k, v in rank(n).items()} | states(3))
    with pytest.raises(Incomplete, match=rf"^__{min(set(range(3)) - set(there))}\.metadata: not there, of 3 ranks"):
        dcp.demands(files, "")


def test_a_rank_beyond_the_world_is_of_another_save() -> None:
    with pytest.raises(Corrupt, match="metadata of rank 1, of 1 ranks"):
        dcp.demands(MemoryFiles({**rank(0), **rank(1), **states(1)}), "")


def test_metadata_of_all_beside_that_of_one_are_two_saves() -> None:
    one = metadata({"b": ("float32", (4,), (Chunk((0,), (4,), "__0_0.distcp", 0, 9),))})
    with pytest.raises(Unsupported, match="two saves in one directory"):
        dcp.demands(MemoryFiles({**rank(0), **states(1), ".metadata": one}), "")


@pytest.mark.parametrize(("shape", "dtype", "word"), [((5,), "float32", "shape"), ((4,), "int32", "shape or dtype")])
def test_ranks_that_disagree_are_of_different_saves(shape: Shape, dtype: str, word: str) -> None:
    files = MemoryFiles({**rank(0), **rank(1, shape, dtype), **states(2)})
    with pytest.raises(Corrupt, match=f"'w': ranks disagree on its {word}"):
        found(files)


def test_boxes_that_overlap_or_leave_a_hole_are_not_a_tensor() -> None:
    for offset in (1, 3):
        files = MemoryFiles({**rank(0), **rank(1, offset=offset), **states(2)})
        with pytest.raises(Corrupt):
            plan(dcp.tensors(files, ""), Options())


def test_a_damaged_metadata_is_named() -> None:
    with pytest.raises(Corrupt, match=r"^__1\.metadata: pickle"):
        found(MemoryFiles({**rank(0), **rank(1), **states(2), "__1.metadata": b"\x80\x04."}))
