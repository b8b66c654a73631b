"""Units as they are written: their places, their memory, their casts."""

from __future__ import annotations

import numpy as np
import pytest

from ckptsync.merge import units
from ckptsync.merge.making import ALIGN, Making, aligned, placed, weight
from ckptsync.merge.plan import DType, FilePlan, Options, plan
from ckptsync.model import Copy, Extent, Part, Tensor
from tests.plain_files import MemoryFiles

DATA = np.arange(1, 25, dtype="<f4") * 1e4  # the later half is too large for F16
FILES = MemoryFiles({"f": DATA.tobytes()})


def planned(dtype: DType, *sizes: int) -> FilePlan:
    found, at = [], 0
    for number, size in enumerate(sizes):
        copy = Copy("F32", (size,), (Part((0,), (size,), Extent("f", at, 4 * size)),))
        found.append(Tensor(f"t{number}", "F32", (size,), (copy,)))
        at += 4 * size
    (made,) = plan(found, Options(dtype))
    return made


def test_places_follow_each_other_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "WINDOW", 8)
    plan_ = planned("fp16", 3, 0, 9)
    found = list(placed(plan_))
    assert [p.start for p in found] == [sum(q.size for q in found[:n]) for n in range(len(found))]
    assert sum(p.size for p in found) == plan_.size
    assert [p.is_last for p in found] == [*[False] * (len(found) - 1), True]
    assert all(weight(p) >= p.size for p in found)


def test_overflows_are_those_of_the_share_also_where_neighbours_are_cast_at_once() -> None:
    plan_ = planned("fp16", 5, 4, 15)
    making = Making(plan_, FILES, statistics=True)
    _, last = placed(plan_)
    looks = making.make(last).looks
    assert [look.overflows for look in looks] == [0, 3, 15]
    assert [look.statistics.infinities for look in looks if look.statistics] == [0, 3, 15]
    with np.errstate(over="ignore"):
        assert b"".join(look.data for look in looks) == DATA.astype("<f2").tobytes()


def test_neighbours_of_different_types_each_have_their_own_cast() -> None:
    whole = Copy("U8", (3,), (Part((0,), (3,), Extent("f", 0, 3)),))
    odd = Copy("F32", (4,), (Part((0,), (4,), Extent("f", 16, 16)),))
    tensors = [Tensor(n, c.dtype, c.grid, (c,)) for n, c in (("a", whole), ("b", odd), ("c", whole), ("d", odd))]
    (plan_,) = plan(tensors, Options("fp32"))
    (cast_plan,) = plan(tensors, Options("bf16"))
    for which, size in ((plan_, 16), (cast_plan, 8)):
        *_, last = placed(which)
        data = [bytes(look.data) for look in Making(which, FILES, statistics=False).make(last).looks]
        assert data[0] == data[2] == DATA.tobytes()[:3]
        assert data[1] == data[3]
        assert len(data[1]) == size
    assert data[1] == (DATA[4:8].view("<u4") >> 16).astype("<u2").tobytes() or np.isfinite(DATA[4:8]).all()


def test_memory_begins_where_a_disk_can_write_from_and_is_used_again() -> None:
    making = Making(planned("keep", 24), FILES, statistics=False)
    _, unit = placed(planned("keep", 24))
    first = making.make(unit)
    assert first.held.ctypes.data % ALIGN == aligned(5).ctypes.data % ALIGN == 0
    making.release(first)
    assert making.make(unit).held is first.held


def test_a_chunk_takes_what_was_left_before_it_and_leaves_what_does_not_fill_a_block() -> None:
    plan_ = planned("keep", 24)
    _, unit = placed(plan_)
    made = Making(plan_, FILES, statistics=False).make(unit)
    chunk, rest = made.chunk(plan_.header)
    assert bytes(chunk) == plan_.header + DATA.tobytes()
    assert not rest
