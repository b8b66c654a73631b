"""Runs of elements against numpy slicing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt
from ckptsync.layouts.flat import Flat, concatenate
from ckptsync.model import Checksum, Extent, Part


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
