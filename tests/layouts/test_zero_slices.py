"""What a rank says of its partition, against where its elements were found."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.pickles import Made, Name
from ckptsync.layouts import zero, zero_masters, zero_slices
from ckptsync.layouts.zero_files import StateFile, load, optimizer_state
from tests.deepspeed_files import TAG, held
from tests.plain_files import MemoryFiles
from tests.torch_files import saved
from tests.zero_checkpoint import Zero, merged, values
from tests.zero_checkpoint import files as checkpoint

VECTORS = [
    "raw-ds-zero1-bf16",
    "raw-ds-zero2-odd",
    "raw-ds-zero1-bf16-fp32acc",
    "raw-ds-zero2-aligned",
    "raw-ds-zero2-dealt",
    "raw-ds-experts",
]


def optim(files: MemoryFiles) -> list[str]:
    return sorted(name for name in files.content if "optim" in name)


def first(files: MemoryFiles) -> StateFile:
    return load(files, optim(files)[0])


@pytest.mark.parametrize("name", VECTORS)
def test_real_ranks_say_what_is_found_and_ranks_under_each_others_names_do_not(name: str) -> None:
    files = held(name)
    assert zero.tensors(files, TAG)
    one, other, *_ = optim(files)
    swapped = MemoryFiles({**files.content, one: files.content[other], other: files.content[one]})
    with pytest.raises(Corrupt, match=r"slice of|padding|elements"):
        merged(swapped, "keep")


def test_slices_are_starts_and_elements_in_the_partition() -> None:
    found = zero_slices.slices(first(held("raw-ds-zero2-odd")), 0)
    assert found is not None
    starts = sorted(found.values())
    assert starts[0][0] == 0
    assert all(a + n <= b for (a, n), (b, _) in pairwise(starts))


def test_a_file_that_says_nothing_says_nothing() -> None:
    file = load(MemoryFiles({"o": saved({"optimizer_state_dict": {}})}), "o")
    assert zero_slices.slices(file, 0) is None
    with pytest.raises(Unsupported, match="names no parameters"):
        zero_slices.groups([[file]], {})


@pytest.mark.parametrize("junk", [5, [], [5], [{"w": 5}], [{"w": None}], {"a": 1}, [{5: 5}]])
def test_slices_that_are_none_are_corrupt(junk: object) -> None:
    with pytest.raises(Corrupt, match="param_slice_mappings"):
        zero_slices.slices(load(MemoryFiles({"o": saved({"optimizer_state_dict": {"param_slice_mappings": junk}})}), "o"), 0)


def test_names_and_order_come_from_the_slices_where_no_shapes_are_told() -> None:
    files = held("raw-ds-zero1-bf16-fp32acc")
    ranks = [load(files, name) for name in optim(files)]
    told = load(files, f"{TAG}/mp_rank_00_model_states.pt").content["param_shapes"]
    shapes = {name: shape for group in told for name, shape in group.items()}
    found = zero_slices.groups([ranks for _ in zero_slices.count(ranks[0])], shapes)
    assert [list(group.items()) for group in found] == [list(group.items()) for group in told]
    with pytest.raises(Corrupt, match="elements in the optimizer"):
        zero_slices.groups([ranks], {name: (*shape, 2) for name, shape in shapes.items()})
    assert optimizer_state(ranks[0])


def test_parameters_that_were_dealt_out_are_found_where_they_lie_though_no_shapes_are_told() -> None:
    files = held("raw-ds-zero2-dealt")
    ranks = [load(files, name) for name in optim(files)]
    told = load(files, f"{TAG}/mp_rank_00_model_states.pt").content["param_shapes"]
    shapes = {name: shape for group in told for name, shape in group.items()}
    found = [list(zero_slices.groups([ranks], shapes, dealt=dealt)[0]) for dealt in (True, False)]
    assert found[0] == list(told[0]) != found[1]


@pytest.mark.parametrize("numel", [0, 1])
def test_a_slice_of_no_elements_where_the_partition_has_some_is_corrupt(numel: int) -> None:
    held = checkpoint(Zero(2, 2, [{"w": values((8,), 0)}]))
    ranks = [load(held, n) for n in optim(held)]
    fragment = Made(Name("deepspeed.utils.tensor_fragment", "fragment_address"), (), {"start": 0, "numel": numel})
    optimizer_state(ranks[1])["param_slice_mappings"] = [{"w": fragment}]
    copies = zero_masters.copies(held, 2, ranks, [{"w": (8,)}])
    with pytest.raises(Corrupt, match=r"optim_states\.pt: its slice of w is"):
        zero_slices.check(held, ranks, 0, copies)
