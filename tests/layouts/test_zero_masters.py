"""Partitions that do not add up are found out; those that do are tested whole in ``test_layouts_zero``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt
from ckptsync.layouts.zero_files import StateFile, load
from ckptsync.layouts.zero_masters import Flat, concatenate, copies, from_fragments
from ckptsync.model import Checksum, Copy, Extent, Part, Shape
from tests.plain_files import MemoryFiles
from tests.torch_files import saved

SHAPES: dict[str, Shape] = {"a": (2, 3), "b": (4,)}


def ranks(*states: dict[str, object]) -> tuple[MemoryFiles, list[StateFile]]:
    files = MemoryFiles({str(n): saved({"optimizer_state_dict": state}) for n, state in enumerate(states)})
    return files, [load(files, name) for name in files.content]


def stage2(*sizes: int, **more: object) -> dict[str, Copy]:
    states: list[dict[str, object]] = [{"single_partition_of_fp32_groups": [torch.zeros(n)], **more} for n in sizes]
    return copies(*_with(2, *states))


def stage3(*sizes: list[int]) -> dict[str, Copy]:
    states: list[dict[str, object]] = [{"fp32_flat_groups": [torch.zeros(n) for n in groups]} for groups in sizes]
    return copies(*_with(3, *states))


def _with(stage: int, *states: dict[str, object]) -> tuple[MemoryFiles, int, list[StateFile], list[dict[str, Shape]]]:
    files, optim = ranks(*states)
    return files, stage, optim, [SHAPES]


def pieces(copy: Copy) -> list[tuple[str, int, int]]:
    return [(p.extent.file, p.offsets[0], p.sizes[0]) for p in copy.parts]


def test_a_parameter_may_lie_across_partitions() -> None:
    found = stage2(4, 4, 2)
    assert pieces(found["a"]) == [("0", 0, 4), ("1", 4, 2)]
    assert pieces(found["b"]) == [("1", 0, 2), ("2", 2, 2)]


def test_a_parameter_may_lie_across_sub_groups() -> None:
    found = stage3([2, 1, 2], [1, 4])
    assert pieces(found["a"]) == [("0", 0, 2), ("0", 2, 1), ("1", 3, 1), ("1", 4, 2)]
    assert pieces(found["b"]) == [("0", 0, 2), ("1", 2, 2)]


@pytest.mark.parametrize("sizes", [(4, 4, 1), (3, 3, 3), (0, 0, 0)])
def test_partitions_that_end_too_early_are_corrupt(sizes: tuple[int, ...]) -> None:
    with pytest.raises(Corrupt, match="ends at element"):
        stage2(*sizes)


def test_partitions_that_are_longer_than_padding_explains_are_corrupt() -> None:
    stage2(4, 4, 4)
    with pytest.raises(Corrupt, match="has 10 elements, its partitions 21"):
        stage2(7, 7, 7)
    files, stage, optim, groups = _with(
        2, *({"single_partition_of_fp32_groups": [torch.zeros(7)], "group_paddings": [n]} for n in (0, 4, 7))
    )
    assert copies(files, stage, optim, groups).keys() == SHAPES.keys()


@pytest.mark.parametrize("sizes", [([5], [4]), ([5, 1], [6]), ([5], [5, 1]), ([4], [4])])
def test_ranks_of_stage_three_hold_exactly_what_the_parameters_take(sizes: tuple[list[int], ...]) -> None:
    with pytest.raises(Corrupt, match="elements"):
        stage3(*sizes)


@pytest.mark.parametrize("gaps", [[[1]], [[1, 2, 3]], [[-1, 0]], [[1, None]], [5]])
def test_alignments_that_do_not_fit_are_corrupt(gaps: object) -> None:
    with pytest.raises(Corrupt, match="param_alignment_paddings"):
        stage2(5, 5, param_alignment_paddings=gaps)


def test_alignments_are_skipped() -> None:
    found = stage2(5, 5, 5, param_alignment_paddings=[[2, 1]])
    assert pieces(found["a"]) == [("0", 0, 5), ("1", 5, 1)]
    assert pieces(found["b"]) == [("1", 0, 2), ("2", 2, 2)]


@pytest.mark.parametrize(
    "held", [None, [], torch.zeros(10), [torch.zeros(2, 5)], [5], [torch.zeros(5), torch.zeros(5).half()], {"a": 1}, "text"]
)
def test_what_is_no_list_of_flat_tensors_of_one_element_type_is_corrupt(held: object) -> None:
    for stage, key in [(2, "single_partition_of_fp32_groups"), (3, "fp32_flat_groups")]:
        with pytest.raises(Corrupt, match=key):
            copies(*_with(stage, {key: held}))


def test_a_strided_partition_is_not_read_as_if_it_were_not() -> None:
    for stage, key in [(2, "single_partition_of_fp32_groups"), (3, "fp32_flat_groups")]:
        with pytest.raises(Corrupt, match="do not follow each other"):
            copies(*_with(stage, {key: [torch.zeros(20)[::2]]}))


def fragment(file: str, count: int) -> Part:
    return Part((0,), (count,), Extent(file, 0, 2 * count))


def test_fragments_follow_each_other_and_their_padding_is_left_out() -> None:
    found = from_fragments("f", (7,), "BF16", [fragment(str(n), 2) for n in range(4)])
    assert pieces(found) == [("0", 0, 2), ("1", 2, 2), ("2", 4, 2), ("3", 6, 1)]
    assert pieces(from_fragments("f", (2,), "BF16", [fragment(str(n), 1) for n in range(3)])) == [("0", 0, 1), ("1", 1, 1)]


def test_a_fragment_that_is_too_short_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="fragments of \\[2, 3\\] elements, 3 expected"):
        from_fragments("f", (7,), "BF16", [fragment("0", 3), fragment("1", 2), fragment("2", 3)])


def laid_out(sizes: list[int], item: int) -> list[Part]:
    """Runs in one file, each 3 bytes behind the one before, the later ones first."""
    at, found = 0, []
    for size in reversed(sizes):
        extent = Extent("f", at, size * item)
        found.append(Part((0,), (size,), extent, None, Checksum(extent, at)))
        at += size * item + 3
    return found[::-1]


def elements(flat: Flat, start: int, count: int, into: int = 0) -> list[tuple[int, Extent]]:
    return [
        (p.offsets[0] + n, Extent(p.extent.file, p.extent.start + 2 * n, 2))
        for p in flat.cut(start, count, into)
        for n in range(p.sizes[0])
    ]


@given(st.lists(st.integers(0, 5), max_size=6), st.data())
def test_a_cut_is_the_slice_of_the_runs_end_to_end(sizes: list[int], data: st.DataObject) -> None:
    runs = laid_out(sizes, 2)
    flat = concatenate("BF16", runs)
    every = [Extent("f", run.extent.start + 2 * n, 2) for run in runs for n in range(run.sizes[0])]
    assert flat.numel == len(every)
    start = data.draw(st.integers(0, len(every)))
    count, into = data.draw(st.integers(0, len(every) - start)), data.draw(st.integers(0, 9))
    assert elements(flat, start, count, into) == list(enumerate(every[start : start + count], into))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_a_cut_has_no_more_parts_than_there_are_runs_with_something_in_them(sizes: list[int]) -> None:
    flat = concatenate("F32", laid_out(sizes, 4))
    parts = list(flat.cut(0, flat.numel))
    assert len(parts) == len([s for s in sizes if s])
    assert all(part.extent.size == 4 * part.sizes[0] for part in parts)
    assert np.cumsum([0, *(p.sizes[0] for p in parts)])[:-1].tolist() == [p.offsets[0] for p in parts]


def test_a_piece_of_a_run_keeps_the_checksum_of_all_of_it() -> None:
    runs = laid_out([3, 5], 4)
    assert [part.checksum for part in concatenate("F32", runs).cut(2, 4)] == [run.checksum for run in runs]


def test_nothing_has_no_elements() -> None:
    assert concatenate("F32", []) == Flat("F32", (), (), 0)
    assert list(concatenate("F32", [Part((0,), (0,), Extent("f", 9, 0))]).cut(0, 0)) == []


def test_a_run_with_gaps_is_refused() -> None:
    with pytest.raises(Corrupt, match="do not follow each other"):
        concatenate("F32", [Part((0,), (2,), Extent("f", 0, 12), (2,))])
