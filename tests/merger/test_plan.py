"""Which file holds what, which copy is read, and whether its parts tile it."""

from __future__ import annotations

from itertools import chain, combinations_with_replacement
from math import prod

import numpy as np
import pytest
from hypothesis import given

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.merger.plan import (
    DTYPES,
    MergeOptions,
    check_dtype,
    check_tiling,
    choose_copy,
    is_tiled,
    plan,
    written_dtype,
)
from ckptsync.tensors import Copy, Extent, Part, Shape, Tensor
from tests.support.random_boxes import Box, tilings


def copy(dtype: str, shape: Shape = (2,), file: str = "f") -> Copy:
    return Copy(
        dtype,
        shape,
        (Part((0,) * len(shape), shape, Extent(file, 0, prod(shape) * ITEMSIZE[dtype])),),
    )


def tensor(name: str, dtype: str = "F32", *copies: str, shape: Shape = (2,)) -> Tensor:
    return Tensor(name, dtype, shape, tuple(copy(c, shape, c) for c in copies or (dtype,)))


def split(sizes: dict[str, int], most: int) -> list[list[str]]:
    found = plan(
        [tensor(name, "U8", shape=(size,)) for name, size in sizes.items()],
        MergeOptions(max_shard_size=most),
    )
    return [[t.name for t in file.tensors] for file in found]


def test_a_file_ends_where_the_next_tensor_would_not_fit_as_huggingface_hub_does() -> None:
    sizes = {"a": 4, "b": 6, "c": 1, "d": 50, "e": 0, "f": 3, "g": 8}
    assert split(sizes, 10) == [["a", "b"], ["c"], ["d"], ["e", "f"], ["g"]]


@pytest.mark.parametrize("names", [["a", "a"], [""], ["__metadata__"], ["a\ud800"]])
def test_names_that_a_file_cannot_hold_are_corrupt(names: list[str]) -> None:
    with pytest.raises(Corrupt, match="name"):
        plan([tensor(name) for name in names], MergeOptions())


# the model's own element type, and its stored copies: for each of DTYPES the copy that is read, and
# what is written
TABLE = {
    ("BF16", "F32 BF16"): "BF16 BF16, F32 F32, BF16 BF16, F32 F16, F32 F32",
    ("BF16", "F32"): "F32 BF16, F32 F32, F32 BF16, F32 F16, F32 F32",
    ("F32", "F32"): "F32 F32, F32 F32, F32 BF16, F32 F16, F32 F32",
    ("F16", "F32 F16"): "F16 F16, F32 F32, F32 BF16, F16 F16, F32 F32",
    ("BF16", "BF16"): "BF16 BF16, BF16 BF16, BF16 BF16, BF16 F16, BF16 F32",
    ("F64", "F64"): "F64 F64, F64 F64, F64 BF16, F64 F16, F64 F32",
    **{(t, t): ", ".join([f"{t} {t}"] * 5) for t in ("I64", "BOOL", "U8", "F8_E4M3", "C64")},
}


@pytest.mark.parametrize(("own", "copies"), TABLE)
def test_the_copy_that_needs_no_cast_is_read_or_else_the_most_precise(
    own: str, copies: str
) -> None:
    of = tensor("w", own, *copies.split())
    found = [f"{choose_copy(of, asked).dtype} {written_dtype(of, asked)}" for asked in DTYPES]
    assert found == TABLE[own, copies].split(", ")


def test_of_equal_copies_the_master_is_kept_and_the_models_own_is_taken_for_auto() -> None:
    both = Tensor("w", "F32", (2,), (copy("F32", file="master"), copy("F32", file="model")))
    assert choose_copy(both, "keep").parts[0].extent.file == "master"
    assert choose_copy(both, "auto").parts[0].extent.file == "model"


def test_a_copy_that_is_not_here_is_never_replaced_by_a_less_precise_one() -> None:
    absent = Copy("F32", (2,), (), absent="rank1.pt")
    of = Tensor("w", "BF16", (2,), (absent, copy("BF16", file="model")))
    assert [choose_copy(of, d).parts[0].extent.file for d in ("auto", "bf16")] == ["model", "model"]
    for asked in ("keep", "fp32", "fp16"):
        with pytest.raises(Incomplete, match=r"rank1\.pt: not found; it holds the F32 copy of w"):
            choose_copy(of, asked)
    same = Tensor("w", "F32", (2,), (absent, copy("F32", file="model")))
    assert [choose_copy(same, d).parts[0].extent.file for d in DTYPES] == ["model"] * 5


def test_only_five_dtypes_can_be_asked_for() -> None:
    assert [check_dtype(d) for d in DTYPES] == list(DTYPES)
    with pytest.raises(Unsupported, match="dtype 'float32'") as e:
        check_dtype("float32")
    assert e.value.hint == "one of: auto, keep, bf16, fp16, fp32"


SOME_WHERE = Extent("file", 0, 0)


def checked(
    shape: Shape, boxes: tuple[Box, ...], grid: Shape | None = None, dtype: str = "F32"
) -> None:
    copy = Copy(
        dtype, shape if grid is None else grid, tuple(Part(o, n, SOME_WHERE) for o, n in boxes)
    )
    check_tiling(Tensor("weight", "F32", shape, (copy,)), copy)


def counts(shape: Shape, boxes: tuple[Box, ...]) -> np.ndarray:
    """The slow obvious way: how often each element is held."""
    found = np.zeros(shape, int)
    for offsets, sizes in boxes:
        found[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    return found


@given(tilings())
def test_what_tiles_is_accepted(tiling: tuple[Shape, tuple[Box, ...]]) -> None:
    checked(*tiling)


def test_every_choice_of_boxes_of_the_right_volume_is_judged_as_by_counting() -> None:
    places = [
        ((r, c), (h, w))
        for r in range(2)
        for c in range(3)
        for h in range(1, 3 - r)
        for w in range(1, 4 - c)
    ]
    seen = set()
    for boxes in chain.from_iterable(combinations_with_replacement(places, n) for n in range(1, 6)):
        if sum(prod(sizes) for _, sizes in boxes) == 6:
            seen.add(right := bool((counts((2, 3), boxes) == 1).all()))
            assert is_tiled(boxes, (2, 3)) == right
    assert seen == {True, False}


def test_a_pinwheel_tiles_and_its_mirror_over_it_does_not() -> None:
    wheel = (
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
    )
    checked((3, 3), wheel)
    with pytest.raises(Corrupt, match="are missing"):
        checked((3, 3), wheel[1:])
    with pytest.raises(Corrupt, match="given twice"):
        checked((3, 3), (*wheel, wheel[0]))
    with pytest.raises(Corrupt, match="overlap, or are missing"):
        checked((3, 3), (((0, 0), (2, 1)), *wheel[1:]))


@pytest.mark.parametrize(
    "box",
    [((1, 0), (3, 2)), ((-1, 0), (3, 2)), ((0,), (6,)), ((0, 0), (3, -2)), ((0, 0, 0), (3, 2, 1))],
)
def test_a_box_that_is_not_inside_is_refused(box: Box) -> None:
    with pytest.raises(Corrupt, match="not inside"):
        checked((3, 2), (box,))


def test_the_grid_is_the_shape_or_its_flattening() -> None:
    checked((3, 2), (((0,), (6,)),), grid=(6,))
    checked((), (((0,), (1,)),), grid=(1,))
    for grid in [(2, 3), (7,), (3, 2, 1)]:
        with pytest.raises(Corrupt, match="expected"):
            checked((3, 2), ((tuple(0 for _ in grid), grid),), grid=grid)


def test_an_element_type_that_nobody_knows_is_refused() -> None:
    with pytest.raises(Corrupt, match="element type"):
        checked((3,), (((0,), (3,)),), dtype="F4")


def test_a_number_alone_is_held_once() -> None:
    checked((), (((), ()),))
    for boxes in [(), (((), ()), ((), ()))]:
        with pytest.raises(Corrupt):
            checked((), boxes)


def test_ten_thousand_ranks_are_checked_at_once() -> None:
    assert is_tiled(tuple(((0, n), (4096, 1)) for n in range(10_000)), (4096, 10_000))
