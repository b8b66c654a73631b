"""Partitions that do not add up are found out.

What a rank says of its partition, against where its elements are. Whole checkpoints: ``test_zero``.
"""

from __future__ import annotations

import pytest
import torch

from ckptsync.errors import Corrupt
from ckptsync.formats.pickles import Name, PickledObject
from ckptsync.layouts import zero
from ckptsync.layouts.zero_files import StateFile, load, optimizer_state
from ckptsync.layouts.zero_partitions import (
    concatenate,
    cut_flat,
    from_fragments,
    group_masters,
    stage3_masters,
)
from ckptsync.tensors import Checksum, Copy, Extent, Part, Shape
from tests.support.deepspeed_in_memory import TAG, held
from tests.support.files_in_memory import MemoryFiles
from tests.support.torch_bytes import saved
from tests.support.zero_writer import Zero, merged, values
from tests.support.zero_writer import files as checkpoint

SHAPES: dict[str, Shape] = {"a": (2, 3), "b": (4,)}


def ranks(*states: dict[str, object]) -> list[StateFile]:
    files = MemoryFiles(
        {str(n): saved({"optimizer_state_dict": state}) for n, state in enumerate(states)}
    )
    return [load(files, name) for name in files.content]


def stage2(*sizes: int, **more: object) -> dict[str, Copy]:
    states: list[dict[str, object]] = [
        {"single_partition_of_fp32_groups": [torch.zeros(n)], **more} for n in sizes
    ]
    return masters(2, *states)


def stage3(*sizes: list[int]) -> dict[str, Copy]:
    states: list[dict[str, object]] = [
        {"fp32_flat_groups": [torch.zeros(n) for n in groups]} for groups in sizes
    ]
    return masters(3, *states)


def masters(stage: int, *states: dict[str, object]) -> dict[str, Copy]:
    optim = ranks(*states)
    return stage3_masters(optim, [SHAPES]) if stage == 3 else group_masters(optim, 0, SHAPES)


@pytest.mark.parametrize("sizes", [(4, 4, 1), (3, 3, 3), (0, 0, 0)])
def test_partitions_that_end_too_early_are_corrupt(sizes: tuple[int, ...]) -> None:
    with pytest.raises(Corrupt, match="ends at element"):
        stage2(*sizes)


def test_partitions_that_are_longer_than_padding_explains_are_corrupt() -> None:
    stage2(4, 4, 4)
    stage2(6, 6)  # padded to twice the number of ranks
    with pytest.raises(Corrupt, match="has 10 elements, its partitions 21"):
        stage2(7, 7, 7)
    padded = (
        {"single_partition_of_fp32_groups": [torch.zeros(7)], "group_paddings": [n]}
        for n in (0, 4, 7)
    )
    assert masters(2, *padded).keys() == SHAPES.keys()


@pytest.mark.parametrize("sizes", [([5], [4]), ([5, 1], [6]), ([5], [5, 1]), ([4], [4])])
def test_ranks_of_stage_three_hold_exactly_what_the_parameters_take(
    sizes: tuple[list[int], ...],
) -> None:
    with pytest.raises(Corrupt, match="elements"):
        stage3(*sizes)


@pytest.mark.parametrize("gaps", [[[1]], [[1, 2, 3]], [[-1, 0]], [[1, None]], [5]])
def test_alignments_that_do_not_fit_are_corrupt(gaps: object) -> None:
    with pytest.raises(Corrupt, match="param_alignment_paddings"):
        stage2(5, 5, param_alignment_paddings=gaps)


FLAT: list[object] = [None, [], torch.zeros(10), [torch.zeros(2, 5)], [5], {"a": 1}, "text"]


@pytest.mark.parametrize("held", [*FLAT, [torch.zeros(5), torch.zeros(5).half()]])
def test_what_is_no_list_of_flat_tensors_of_one_element_type_is_corrupt(held: object) -> None:
    for stage, key in [(2, "single_partition_of_fp32_groups"), (3, "fp32_flat_groups")]:
        with pytest.raises(Corrupt, match=key):
            masters(stage, {key: held})
        with pytest.raises(Corrupt, match="do not follow each other"):
            masters(stage, {key: [torch.zeros(20)[::2]]})
        with pytest.raises(Corrupt, match="different element types"):
            masters(stage, {key: [torch.zeros(5)]}, {key: [torch.zeros(5).half()]})


def fragment(file: str, count: int) -> Part:
    return Part((0,), (count,), Extent(file, 0, 2 * count))


@pytest.mark.parametrize(("count", "counts"), [(2, "2, 3"), (4, "3, 4")])
def test_a_fragment_of_another_length_is_corrupt(count: int, counts: str) -> None:
    fragments = [fragment("0", 3), fragment("1", count), fragment("2", 3)]
    with pytest.raises(Corrupt, match=f"fragments of \\[{counts}\\] elements, 3 expected"):
        from_fragments("f", (7,), "BF16", fragments)


def test_a_piece_of_a_run_keeps_the_checksum_of_all_of_it() -> None:
    extents = [Extent("f", 0, 12), Extent("f", 15, 20)]
    runs = [Part((0,), (e.size // 4,), e, None, Checksum(e, e.start)) for e in extents]
    assert [part.checksum for part in cut_flat(concatenate("F32", runs), 2, 4)] == [
        run.checksum for run in runs
    ]


def test_a_run_with_gaps_is_refused() -> None:
    with pytest.raises(Corrupt, match="do not follow each other"):
        concatenate("F32", [Part((0,), (2,), Extent("f", 0, 12), (2,))])


VECTORS = ["raw-ds-zero1-bf16", "raw-ds-zero2-odd", "raw-ds-zero1-bf16-fp32acc", "raw-ds-experts"]
VECTORS += ["raw-ds-zero2-aligned", "raw-ds-zero2-dealt"]


def optim(files: MemoryFiles) -> list[str]:
    return sorted(name for name in files.content if "optim" in name)


@pytest.mark.parametrize("name", VECTORS)
def test_real_ranks_say_what_is_found_and_ranks_under_each_others_names_do_not(name: str) -> None:
    files = held(name)
    assert zero.tensors(files, TAG)
    one, other, *_ = optim(files)
    swapped = MemoryFiles({**files.content, one: files.content[other], other: files.content[one]})
    with pytest.raises(Corrupt, match=r"slice of|padding|elements"):
        merged(swapped, "keep")


@pytest.mark.parametrize("junk", [5, [], [5], [{"w": 5}], [{"w": None}], {"a": 1}, [{5: 5}]])
def test_slices_that_are_none_are_corrupt(junk: object) -> None:
    with pytest.raises(Corrupt, match="param_slice_mappings"):
        stage2(5, 5, param_slice_mappings=junk)


@pytest.mark.parametrize("numel", [0, 1])
def test_a_slice_of_no_elements_where_the_partition_has_some_is_corrupt(numel: int) -> None:
    held = checkpoint(Zero(2, 2, [{"w": values((8,), 0)}]))
    files_of_ranks = [load(held, n) for n in optim(held)]
    fragment = PickledObject(
        Name("deepspeed.utils.tensor_fragment", "fragment_address"),
        (),
        {"start": 0, "numel": numel},
    )
    optimizer_state(files_of_ranks[1])["param_slice_mappings"] = [{"w": fragment}]
    with pytest.raises(Corrupt, match=r"optim_states\.pt: its slice of w is"):
        group_masters(files_of_ranks, 0, {"w": (8,)})
