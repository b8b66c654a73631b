"""Units: the whole file, each byte once, in few reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.merge import units as module
from ckptsync.merge.plan import FilePlan, Options, plan
from ckptsync.merge.units import Unit, of_copy, runs, units
from ckptsync.model import Copy, Extent, Part, Tensor
from tests.boxes import stored


def planned(*copies: Copy) -> FilePlan:
    (found,) = plan([Tensor(f"t{n:06d}", c.dtype, c.grid, (c,)) for n, c in enumerate(copies)], Options("keep"))
    return found


def flat(count: int, file: str = "f", start: int = 0) -> Copy:
    return Copy("F32", (count,), (Part((0,), (count,), Extent(file, start, 4 * count)),))


def ranked(count: int, ranks: int, start: int) -> Copy:
    """Cut evenly over files, at the same place in each."""
    own = count // ranks
    return Copy("F32", (count,), tuple(Part((r * own,), (own,), Extent(f"{r}", start, 4 * own)) for r in range(ranks)))


def whole(found: list[Unit], plan_: FilePlan) -> None:
    assert b"".join(unit.text for unit in found) == plan_.header
    shares = [share for unit in found for share in unit.shares]
    for number, tensor in enumerate(plan_.tensors):
        assert sum(s.size for s in shares if s.number == number) == tensor.size
    assert [s.number for s in shares] == sorted(s.number for s in shares)
    assert all(unit.stored == sum(s.size for s in unit.shares) for unit in found)


@given(st.lists(st.integers(0, 40), max_size=20), st.sampled_from([2, 6, 16, 2 << 20]))
def test_units_make_up_the_file(sizes: list[int], window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW", window)
        patch.setattr(module, "MOST", 2 * window)
        plan_ = planned(*(flat(n, start=100 * i) for i, n in enumerate(sizes)), flat(1))
        found = list(units(plan_))
        whole(found, plan_)
        assert max(unit.stored for unit in found) <= max(4, 2 * window)


def test_a_large_tensor_is_cut_into_windows_that_follow_each_other() -> None:
    (copy,) = [flat(5 << 20)]
    _, *found = units(planned(copy))
    assert [unit.stored for unit in found] == [4 << 20] * 5
    assert [r.start for unit in found for r in unit.reads] == [*range(0, 20 << 20, 4 << 20)]


def test_small_tensors_that_lie_as_they_are_written_are_one_read() -> None:
    _, unit = units(planned(*(flat(100, start=400 * n) for n in range(50))))
    assert [(r.start, r.size) for r in unit.reads] == [(0, 20_000)]


def test_many_ranks_with_little_each_make_units_larger_so_that_reads_are() -> None:
    tensors, ranks = 64, 128
    plan_ = planned(*(ranked(1 << 18, ranks, 4 * n * (1 << 18) // ranks) for n in range(tensors)))
    sizes = [unit.stored for unit in units(plan_) if unit.stored]
    assert sizes == [8 << 20] * 8
    few = planned(*(ranked(1 << 18, 4, n << 18) for n in range(tensors)))
    assert {unit.stored for unit in units(few) if unit.stored} == {4 << 20}


def test_many_columns_make_blocks_larger_so_that_reads_are() -> None:
    rows, columns, ranks = 1024, 4096, 128
    own = columns // ranks
    parts = tuple(Part((0, own * r), (rows, own), Extent(f"{r}", 0, 4 * rows * own)) for r in range(ranks))
    reads = [r for unit in units(planned(Copy("F32", (rows, columns), parts))) for r in unit.reads]
    assert {r.size for r in reads} == {64 << 10}


def test_memory_for_reads_is_bounded_where_they_bring_next_to_nothing() -> None:
    plan_ = planned(*(flat(1, start=20_000 * n) for n in range(20_000)))
    assert max(len(unit.reads) for unit in units(plan_)) <= module.MOST_READS


@given(stored())
def test_ranges_are_found_exactly_where_there_are_some(held: tuple[object, Copy, object]) -> None:
    _, copy, _ = held
    found = runs(copy)
    if found is not None:
        at = 0
        for read in found:
            assert read.at == at
            at += read.size
        assert at == 2 * max(0, *[0, sum(p.extent.size for p in copy.parts) // 2])


def test_a_copy_alone_is_cut_as_in_a_file() -> None:
    copy = flat(5 << 20)
    assert list(of_copy(copy)) == list(units(planned(copy)))[1:]
