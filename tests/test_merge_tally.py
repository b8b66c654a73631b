"""What is known of each tensor, out of its shares."""

from __future__ import annotations

from blake3 import blake3

from ckptsync.merge.making import Look, Made, Placed, aligned
from ckptsync.merge.plan import Options, PlannedTensor, plan
from ckptsync.merge.statistics import Statistics
from ckptsync.merge.tally import Tally
from ckptsync.merge.units import Unit
from ckptsync.model import Copy, Extent, Part, Tensor


def tensors(*sizes: int) -> tuple[PlannedTensor, ...]:
    copies = [Copy("U8", (n,), (Part((0,), (n,), Extent("f", 0, n)),)) for n in sizes]
    (found,) = plan([Tensor(f"t{n}", "U8", c.grid, (c,)) for n, c in enumerate(copies)], Options())
    return found.tensors


def unit(*looks: tuple[int, bytes, int, Statistics | None]) -> Made:
    made = tuple(Look(number, memoryview(data), overflows, found) for number, data, overflows, found in looks)
    return Made(Placed(Unit(), 0, 0, is_last=False), aligned(1), made)


def test_shares_over_several_units_add_up() -> None:
    tally = Tally(tensors(4, 0, 3), digests=True)
    tally.add(unit((0, b"ab", 1, Statistics(2))))
    tally.add(unit((0, b"cd", 2, Statistics(2)), (2, b"e", 0, None)))
    tally.add(unit((2, b"fg", 0, None)))
    found = list(tally.tensors())
    assert [t.digest for t in found] == [blake3(data).hexdigest() for data in (b"abcd", b"", b"efg")]
    assert [t.overflows for t in found] == [3, 0, 0]
    assert [t.statistics for t in found] == [Statistics(4), None, None]


def test_nothing_is_digested_that_is_not_asked_for() -> None:
    tally = Tally(tensors(2), digests=False)
    tally.add(unit((0, b"ab", 0, None)))
    assert [t.digest for t in tally.tensors()] == [""]
