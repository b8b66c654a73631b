"""Copies and replicas of a tensor must agree: by samples before a merge, in full while it reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.merger import read_units
from ckptsync.merger.cast import cast
from ckptsync.merger.copy_consistency import ELEMENTS, WINDOWS, ComparedFiles, check_copies
from ckptsync.merger.plan import MergeOptions, plan
from ckptsync.merger.read_units import stored_bytes
from ckptsync.tensors import Copy, Extent, Part, Shape, Tensor
from tests.support.files_in_memory import MemoryFiles

COUNT = WINDOWS * ELEMENTS + 1000  # more than is compared
WIDE = np.linspace(-3, 3, COUNT, dtype="<f4")
WIDE[5] = np.nan
NARROW = cast(WIDE.view("<u4"), "F32", "BF16")[0]
NARROW[5] ^= 1  # a NaN, too


def part(file: str, size: int, shape: Shape = (COUNT,)) -> Part:
    return Part((0,) * len(shape), shape, Extent(file, 0, size * COUNT))


def two_copies(grid: Shape = (COUNT,)) -> Tensor:
    master = Copy("F32", (COUNT,), (part("master", 4),))
    return Tensor("w", "BF16", grid, (master, Copy("BF16", grid, (part("own", 2, grid),))))


def stored(narrow: np.ndarray) -> MemoryFiles:
    return MemoryFiles({"master": WIDE.tobytes(), "own": narrow.tobytes()})


@pytest.mark.parametrize("grid", [(COUNT,), (COUNT // 8, 8)])
@pytest.mark.parametrize("at", [0, COUNT - 1])
def test_the_ends_of_large_copies_are_compared(at: int, grid: Shape) -> None:
    check_copies(stored(NARROW), [two_copies(grid)])
    damaged = NARROW.copy()
    damaged[at] ^= 1
    with pytest.raises(Corrupt, match="values of w differ from those in"):
        check_copies(stored(damaged), [two_copies(grid)])
    check_copies(stored(damaged), [replace(two_copies(grid), unlike="another average")])
    check_copies(stored(damaged), [replace(two_copies(grid), tied="v")])


def test_the_file_that_agrees_with_none_is_named() -> None:
    """Two ranks have a half each, one of them is of another run."""
    half = COUNT // 2
    halves = [
        Part((0,), (half,), Extent("rank0", 0, 4 * half)),
        Part((half,), (COUNT - half,), Extent("rank1", 0, 4 * (COUNT - half))),
    ]
    own = Copy("BF16", (COUNT,), (part("own", 2),))
    tensor = Tensor("w", "BF16", (COUNT,), (Copy("F32", (COUNT,), tuple(halves)), own))
    content = stored(NARROW).content
    content |= {"rank0": WIDE[:half].tobytes(), "rank1": (WIDE[half:] + 1).tobytes()}
    with pytest.raises(Corrupt, match=r"^rank1: values of w differ from those in own"):
        check_copies(MemoryFiles(content), [tensor])


@pytest.mark.parametrize("at", [0, COUNT // 3, COUNT - 1])
@pytest.mark.parametrize("window", [4096, read_units.WINDOW])
def test_each_replica_is_read_in_full(
    at: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_units, "WINDOW", window)
    replicas = tuple(part(file, 2) for file in ("b", "c"))
    copy = Copy("BF16", (COUNT,), (replace(part("a", 2), replicas=replicas),))
    good = MemoryFiles(dict.fromkeys("abc", NARROW.tobytes()))
    plans = plan([Tensor("w", "BF16", (COUNT,), (copy,))], MergeOptions("keep"))
    assert b"".join(stored_bytes(ComparedFiles(good, plans), copy)) == NARROW.tobytes()
    damaged = NARROW.copy()
    damaged[at] ^= 1
    for file in "bc":
        files = MemoryFiles({**good.content, file: damaged.tobytes()})
        with pytest.raises(Corrupt, match=rf"^{file}: values of w differ from those in a"):
            b"".join(stored_bytes(ComparedFiles(files, plans), copy))
        doubtful = replace(copy, doubt="is on a mesh that nothing names")
        tensor = Tensor("w", "BF16", (COUNT,), (doubtful,))
        if at != COUNT // 3:  # which no sample has
            with pytest.raises(Unsupported, match="w is on a mesh that nothing names"):
                check_copies(files, [tensor])
