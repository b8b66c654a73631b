"""Make a tensor of pieces of others: by splits, fusions and transpositions.  Pure.

No byte moves: a piece of a tensor is parts of the same extents, several pieces are the parts of
all, swapped axes are strides.  So the engine reads the new tensor as it reads any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ckptsync.errors import Unsupported
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.tensors import Copy, Extent, Part, Shape, Tensor, is_row_major, row_major


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of ``source``, and where it lies in the new tensor.

    ``offsets``, ``sizes``: the box.  ``at``: its first element in the new tensor.  ``axes``: for
    each axis of the new tensor that of the source, None for a new one; what is left out has size 1.
    """

    source: Tensor
    offsets: Shape
    sizes: Shape
    at: Shape
    axes: tuple[int | None, ...]

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the source, as it is."""
        rank = len(self.source.shape)
        is_same = self.axes == tuple(range(rank)) and not any(self.at)
        return is_same and self.sizes == self.source.shape


def assemble(name: str, shape: Shape, pieces: Sequence[Piece]) -> Tensor:
    """Return the tensor of that name and shape that the pieces make up.

    Raises Unsupported if the sources are of several dtypes, or share no stored copy.
    """
    if len(pieces) == 1 and pieces[0].is_whole and pieces[0].source.shape == shape:
        return replace(pieces[0].source, name=name, tied=None)
    sources = [piece.source for piece in pieces]
    dtypes = {source.dtype for source in sources}
    copies = tuple(_shared_copies(shape, pieces)) if len(dtypes) == 1 else ()
    if not copies:
        kinds = {copy.dtype for source in sources for copy in source.copies} | dtypes
        raise Unsupported(
            f"{name}: its pieces, such as {sources[0].name} and {sources[-1].name}, are stored in"
            f" different dtypes ({', '.join(sorted(kinds))})",
            hint="merge without --names-of and --fill-from",
        )
    return Tensor(
        name,
        sources[0].dtype,
        shape,
        copies,
        remark=next((source.remark for source in sources if source.remark), ""),
        unlike=next((source.unlike for source in sources if source.unlike), ""),
    )


def box_of(copy: Copy, offsets: Shape, sizes: Shape) -> Copy:
    """Return a box of a stored copy's grid as a copy of its own."""
    source = Tensor("", copy.dtype, copy.grid, (copy,))
    axes = tuple(range(len(sizes)))
    piece = Piece(source, offsets, sizes, (0,) * len(sizes), axes)
    return Copy(copy.dtype, sizes, tuple(_place_parts([piece], [copy])))


def _shared_copies(shape: Shape, pieces: Sequence[Piece]) -> Iterator[Copy]:
    """Yield the copies that all sources have, told apart by their dtypes and their order."""
    keyed = [_number_copies(piece.source) for piece in pieces]
    for key, first in keyed[0].items():
        if not all(key in copies for copies in keyed):
            continue
        copies = [copies_of_source[key] for copies_of_source in keyed]
        absent = next((copy.absent for copy in copies if copy.absent), "")
        doubt = next((copy.doubt for copy in copies if copy.doubt), "")
        parts = () if absent else tuple(_place_parts(pieces, copies))
        yield Copy(first.dtype, shape, parts, absent, doubt)


def _number_copies(tensor: Tensor) -> dict[tuple[str, int], Copy]:
    """Return a tensor's copies by dtype, and by their number among those of that dtype."""
    numbered: dict[tuple[str, int], Copy] = {}
    for copy in tensor.copies:
        number = sum(dtype == copy.dtype for dtype, _ in numbered)
        numbered[copy.dtype, number] = copy
    return numbered


def _place_parts(pieces: Sequence[Piece], copies: Sequence[Copy]) -> Iterator[Part]:
    """Yield the parts of a new tensor: of each piece from its copy, moved into the new tensor."""
    for piece, copy in zip(pieces, copies, strict=True):
        item, shape = ITEMSIZE[copy.dtype], piece.source.shape
        for part in _overlapping_parts(piece, copy):
            for box in (part,) if copy.grid == shape else _cut_range(part, shape, item):
                if placed := _place(box, piece, item):
                    yield placed


def _overlapping_parts(piece: Piece, copy: Copy) -> Iterator[Part]:
    """Yield the parts that may overlap a piece, judged by the first axis of their grid."""
    if copy.grid == piece.source.shape:
        low, size = next(zip(piece.offsets, piece.sizes, strict=True), (0, 1))
        high = low + size
    else:
        steps = row_major(piece.source.shape)
        low = sum(o * s for o, s in zip(piece.offsets, steps, strict=True))
        high = low + 1 + sum((n - 1) * s for n, s in zip(piece.sizes, steps, strict=True))
    for part in copy.parts:
        start = part.offsets[0] if part.offsets else 0
        if start < high and start + (part.sizes[0] if part.sizes else 1) > low:
            yield part


def _place(part: Part, piece: Piece, item: int) -> Part | None:
    """Return what of a part belongs to a piece, placed in the new tensor; None if nothing does."""
    low = tuple(map(max, part.offsets, piece.offsets))
    ends = zip(part.offsets, part.sizes, piece.offsets, piece.sizes, strict=True)
    sizes = tuple(min(a + n, b + m) - o for (a, n, b, m), o in zip(ends, low, strict=True))
    if any(n <= 0 for n in sizes):
        return None
    strides = part.strides or row_major(part.sizes)
    begin = sum((o - p) * s for o, p, s in zip(low, part.offsets, strides, strict=True))
    reach = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    own_sizes = tuple(1 if a is None else sizes[a] for a in piece.axes)
    own_strides = tuple(1 if a is None else strides[a] for a in piece.axes)
    replicas = tuple(_place(replica, piece, item) for replica in part.replicas)
    return Part(
        tuple(
            new_offset if a is None else new_offset + low[a] - piece.offsets[a]
            for new_offset, a in zip(piece.at, piece.axes, strict=True)
        ),
        own_sizes,
        Extent(part.extent.file, part.extent.start + begin * item, reach * item),
        None if is_row_major(own_sizes, own_strides) else own_strides,
        part.checksum,
        tuple(replica for replica in replicas if replica),
    )


def _cut_range(part: Part, shape: Shape, item: int) -> Iterator[Part]:
    """Yield a part that is a range of the flattened tensor as boxes of the tensor, in order."""
    (part_start,), (count,) = part.offsets, part.sizes
    start, end = part_start, part_start + count
    while start < end:
        # the greatest box that begins here: whole rows of the first axis on whose border it lies
        axis = next(
            d
            for d in range(len(shape))
            if start % prod(shape[d + 1 :]) == 0 and end - start >= prod(shape[d + 1 :])
        )
        row = prod(shape[axis + 1 :])
        index = [start // prod(shape[d + 1 :]) % shape[d] for d in range(len(shape))]
        rows = min((end - start) // row, shape[axis] - index[axis])
        sizes = (*(1,) * axis, rows, *shape[axis + 1 :])

        def cut(
            stored: Part, sizes: Shape = sizes, index: Sequence[int] = index, start: int = start
        ) -> Part:
            """Return what of a part, or a replica, is in the box."""
            (stride,) = stored.strides or (1,)
            extent = Extent(
                stored.extent.file,
                stored.extent.start + (start - part_start) * stride * item,
                (1 + (prod(sizes) - 1) * stride) * item,
            )
            strides = None if stride == 1 else tuple(s * stride for s in row_major(sizes))
            return replace(
                stored,
                offsets=tuple(index),
                sizes=sizes,
                extent=extent,
                strides=strides,
                replicas=(),
            )

        yield replace(cut(part), replicas=tuple(map(cut, part.replicas)))
        start += rows * row
