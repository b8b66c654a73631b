"""Which indexes of an axis a rank holds, by the placements of a DTensor: arithmetic alone.

Placements act from left to right, each on what the ones before it left: ``Shard`` as ``torch.chunk`` cuts, ``_StridedShard`` on each of
``split_factor`` chunks, whose results are joined.  Source: ``_compute_local_shape_and_global_offset`` of
``torch/distributed/tensor/_utils.py`` and ``_StridedShard._split_tensor`` of ``placement_types.py``, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.model import Shape

MOST_RUNS = 1 << 16  # of one tensor on one rank: real ones have a handful
Run = tuple[int, int]  # first index, how many


@dataclass(frozen=True, slots=True)
class Shard:
    """A cut of axis ``dim``, within each of ``factor`` chunks of it; 1 is the plain cut."""

    dim: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Replicate:
    """The same on every rank along a mesh axis."""


Placement = Shard | Replicate


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the tensor at ``offsets``, which lies at ``local`` in what the rank holds."""

    offsets: Shape
    sizes: Shape
    local: Shape


def held(shape: Shape, mesh: Shape, coordinate: Shape, placements: Sequence[Placement]) -> tuple[tuple[Run, ...], ...]:
    """For every axis, the runs of indexes that the rank at ``coordinate`` holds, in the order in which it holds them."""
    axes: list[list[Run]] = [[(0, n)] if n else [] for n in shape]
    for parts, at, placement in zip(mesh, coordinate, placements, strict=True):
        if isinstance(placement, Shard):
            if not 0 <= placement.dim < len(shape):
                raise Corrupt(f"a placement cuts axis {placement.dim} of a tensor of {len(shape)}")
            axes[placement.dim] = list(_cut(axes[placement.dim], parts, at, placement.factor))
    return tuple(map(tuple, axes))


def local_shape(runs: Sequence[Sequence[Run]]) -> Shape:
    """The shape of what the rank holds."""
    return tuple(sum(count for _, count in axis) for axis in runs)


def boxes(runs: Sequence[Sequence[Run]]) -> Iterator[Box]:
    """The boxes that runs make; usually there is one."""
    count = 1
    for axis in runs:
        count *= len(axis)
    if count > MOST_RUNS:
        raise Unsupported(f"a rank holds {count} separate pieces of a tensor, at most {MOST_RUNS} are read")
    for chosen in product(*(tuple(_with_local(axis)) for axis in runs)):
        yield Box(tuple(c[0] for c in chosen), tuple(c[1] for c in chosen), tuple(c[2] for c in chosen))


def is_even(shape: Shape, mesh: Shape, placements: Sequence[Placement]) -> bool:
    """Whether every cut axis is a multiple of all its cuts: then the order in which they are made does not matter."""
    left = list(shape)
    cut = dict.fromkeys((p.dim for p in placements if isinstance(p, Shard)), 1)
    for parts, placement in zip(mesh, placements, strict=True):
        if isinstance(placement, Shard):
            cut[placement.dim] *= parts
    return all(left[dim] % parts == 0 for dim, parts in cut.items() if dim < len(left))


def _with_local(axis: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    at = 0
    for start, count in axis:
        yield start, count, at
        at += count


def _cut(runs: Sequence[Run], parts: int, at: int, factor: int) -> Iterator[Run]:
    """Chunk ``at`` of ``parts`` of each of ``factor`` chunks, as `torch.chunk` makes them."""
    if not 0 < factor <= MOST_RUNS or not 0 <= at < parts:
        raise Unsupported(f"a placement with a split factor of {factor}, at place {at} of {parts}")
    size = sum(count for _, count in runs)
    each = -(-size // factor)
    for start in range(0, size, each) if size else ():
        end = min(start + each, size)
        piece = -(-(end - start) // parts)
        yield from _slice(runs, min(start + at * piece, end), min(start + (at + 1) * piece, end))


def _slice(runs: Sequence[Run], start: int, end: int) -> Iterator[Run]:
    """Elements ``start`` to ``end`` of the joined runs."""
    seen = 0
    for first, count in runs:
        low, high = max(start, seen), min(end, seen + count)
        if low < high:
            yield first + low - seen, high - low
        seen += count
