"""Join the tensor-parallel ranks of DeepSpeed, by ``universal_checkpoint_info`` of the model files.

AutoTP writes an ``affine_map`` (which block of the parameter each rank holds) and, like
Megatron-DeepSpeed, lists of patterns by kind. A parameter that neither describes is refused.
Sources: ``merge_tp_slices`` of ``deepspeed/checkpoint/ds_to_universal.py``,
``deepspeed/checkpoint/affine.py``, 0.19.8.

In reading order: joining ranks (`join_ranks`), the rules (`JoinRules`), patterns of names, boxes of
flat tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.pickles import brief
from ckptsync.formats.torch_pickle import span
from ckptsync.layouts.zero_files import (
    StateFile,
    are_naturals,
    buffer_names,
    section,
    trained_shapes,
)
from ckptsync.tensors import Copy, Extent, Part, Shape, Tensor, is_row_major, row_major

Box = tuple[Shape, Shape]  # offsets, sizes
_HINT = "convert it with DeepSpeed's ds_to_universal, or save the gathered model"
_FORMAT = 1  # of affine maps
_READ = (
    "tp_replicated_parameter_patterns",
    "parameter_with_row_parallelism_patterns",
    "vocabulary_parameter_patterns",
)
_UNREAD = (
    "parameter_to_average_patterns",
    "parameter_with_2_sub_params_cat_dim_0",
    "parameter_with_sub_params",
)
_REFUSED = "autotp_unsupported_parameter_patterns"


@dataclass(frozen=True, slots=True)
class ShardBlock:
    """A block of a parameter: ``box`` of a rank's shard, which begins at ``into`` in the whole.

    ``nth`` counts the ranks that have the same block: the first one's makes the parameter, the
    others are replicas.
    """

    rank: int
    box: Box
    into: Shape
    nth: int = 0


Blocks = tuple[Shape, list[ShardBlock]]
"""A parameter's whole shape, and the blocks that make it."""


def join_ranks(ranks: Sequence[Sequence[Tensor]], model: StateFile) -> tuple[Tensor, ...]:
    """Return the joined tensors, in the order of rank 0's; buffers are those of rank 0.

    ``ranks``: each rank's tensors; ``model``: rank 0's model file. Raise Unsupported if nothing
    says how to join one, or a buffer differs; Corrupt if ranks have tensors of different names.
    """
    rules = JoinRules(model)
    shards = [{tensor.name: tensor for tensor in tensors} for tensors in ranks]
    if any(by_name.keys() != shards[0].keys() for by_name in shards):
        odd = min(name for by_name in shards for name in by_name.keys() ^ shards[0].keys())
        raise Corrupt(
            f"{model.name}: {odd} is not in every tensor-parallel rank",
            hint="the files are of different saves",
        )
    names_of_buffers = buffer_names(model)
    joined = []
    for name in shards[0]:
        each = [by_name[name] for by_name in shards]
        joined.append(equal_buffer(each) if name in names_of_buffers else _joined(each, rules))
    return tuple(joined)


def _joined(shards: Sequence[Tensor], rules: JoinRules) -> Tensor:
    """Return one parameter, joined from its shards; empty ones are left out.

    Each copy of the shards makes one copy, whose replicas follow the first. A copy that is absent
    in one shard is absent. Raise Corrupt if dtypes differ; else as `JoinRules.joining`.
    """
    first = shards[0]
    shape, blocks = rules.joining(first.tied or first.name, [shard.shape for shard in shards])
    # the optimizer has no copy of an empty shard
    filled = {rank: shard for rank, shard in enumerate(shards) if 0 not in shard.shape}
    if len({(s.dtype, *(c.dtype for c in s.copies)) for s in filled.values()}) > 1:
        raise Corrupt(f"{first.name}: the tensor-parallel ranks have it in different element types")
    sample_shard = next(iter(filled.values()), first)

    def copy(number: int, pieces: Iterable[ShardBlock]) -> Copy:
        """Return the parameter, made of copy ``number`` of the shards; absent if one of them is."""
        shard_copies = {rank: shard.copies[number] for rank, shard in filled.items()}
        absent = next(
            (shard_copy.absent for shard_copy in shard_copies.values() if shard_copy.absent), ""
        )
        parts = (
            part
            for piece in pieces
            if piece.rank in shard_copies and not absent
            for part in cut_box(
                shard_copies[piece.rank], filled[piece.rank].shape, piece.box, piece.into
            )
        )
        return Copy(sample_shard.copies[number].dtype, shape, tuple(parts), absent)

    # the pieces that make the parameter, and those of each further set of replicas
    blocks_by_replica = [
        {(b.into, b.box[1]): b for b in blocks if b.nth == nth}
        for nth in range(max((b.nth for b in blocks), default=0) + 1)
    ]
    first_copies, *replicas = (
        [
            copy(n, [replica_blocks.get(box, b) for box, b in blocks_by_replica[0].items()])
            for n in range(len(sample_shard.copies))
        ]
        for replica_blocks in blocks_by_replica
    )
    # replicas lie between the first and the last copy, which are those that a merge chooses from
    copies = (*first_copies[:1], *(copy for each in replicas for copy in each), *first_copies[1:])
    return Tensor(first.name, sample_shard.dtype, shape, copies, first.tied)


def equal_buffer(shards: Sequence[Tensor]) -> Tensor:
    """Return rank 0's buffer, which no rule names, if its bytes have one CRC32 on all ranks.

    Raise Unsupported if CRC32s, sizes, shapes or dtypes differ, or there is no CRC32.
    """
    sums = [
        [(p.extent.size, p.checksum and p.checksum.crc32) for p in shard.copies[0].parts]
        for shard in shards
    ]
    if any(s.shape != shards[0].shape or s.dtype != shards[0].dtype for s in shards) or any(
        s != sums[0] for s in sums
    ):
        raise Unsupported(
            f"{shards[0].name}: a buffer that is not the same on all tensor-parallel ranks",
            hint=_HINT,
        )
    if any(crc is None for _, crc in sums[0]):
        raise Unsupported(
            f"{shards[0].name}: nothing tells whether this buffer is the same on all"
            " tensor-parallel ranks",
            hint=_HINT,
        )
    return shards[0]


class JoinRules:
    """The rules of ``universal_checkpoint_info`` for each parameter.

    Raises Unsupported without them, or for an unknown version.
    """

    def __init__(self, model: StateFile) -> None:
        info = section(model.content, "universal_checkpoint_info")
        if not info:
            raise Unsupported(
                f"{model.name}: tensor parallel ranks, and no universal_checkpoint_info that says"
                " how to join them",
                hint=_HINT,
            )
        self._trained = trained_shapes(model).keys()
        maps = section(info, "affine_map")
        if maps and maps.get("version", _FORMAT) != _FORMAT:
            raise Unsupported(
                f"{model.name}: an affine_map of version {brief(maps.get('version'))}, {_FORMAT} is"
                " known"
            )
        self._maps = NamePatterns(section(maps, "params"), model.name)
        self._kinds = {
            key: NamePatterns(_patterns(info, key), model.name)
            for key in (*_READ, *_UNREAD, _REFUSED)
        }
        self._rows: Any = info.get("original_vocab_size")

    def joining(self, name: str, shapes: Sequence[Shape]) -> Blocks:
        """Return how the shards of one parameter, of these shapes by rank, make the whole.

        An affine map counts before patterns; a vocabulary loses its padding. Raise Unsupported
        without a rule, or for one that cannot be followed; Corrupt if shapes do not fit it.
        """
        if self._kinds[_REFUSED].find(name):
            raise Unsupported(f"{name}: AutoTP says that its shards cannot be joined", hint=_HINT)
        maps = self._maps.find(name)
        blocks = _by_map(name, maps[0], shapes) if maps else self._by_kind(name, shapes)
        if self._kinds["vocabulary_parameter_patterns"].find(name):
            return self._without_padding(name, *blocks)
        return blocks

    def _by_kind(self, name: str, shapes: Sequence[Shape]) -> Blocks:
        """Return what `joining` does, by the patterns of the parameter's name; raise as it does.

        Shards are replicas, or are joined on axis 1 (row parallelism). A trained parameter that no
        pattern matches is joined on axis 0.
        """
        odd = next((key for key in _UNREAD if self._kinds[key].find(name)), None)
        if odd:
            raise Unsupported(f"{name}: {odd}, which cannot be joined yet", hint=_HINT)
        if self._kinds["tp_replicated_parameter_patterns"].find(name):
            if len(set(shapes)) != 1:
                raise Corrupt(
                    f"{name}: the tensor-parallel ranks hold replicas of {len(set(shapes))}"
                    " different shapes"
                )
            zeros = (0,) * len(shapes[0])
            box = zeros, shapes[0]
            return shapes[0], [ShardBlock(rank, box, zeros, rank) for rank in range(len(shapes))]
        is_row = self._kinds["parameter_with_row_parallelism_patterns"].find(name)
        # a trained parameter without a pattern is cut along its first axis
        if not is_row and name not in self._trained:
            raise Unsupported(f"{name}: nothing says how its shards are to be joined", hint=_HINT)
        return _along(name, 1 if is_row else 0, shapes)

    def _without_padding(self, name: str, shape: Shape, blocks: Sequence[ShardBlock]) -> Blocks:
        """Return a vocabulary cut to ``original_vocab_size`` rows, without blocks behind them.

        Raise Corrupt if that is missing, or more than the rows of ``shape``.
        """
        rows = self._rows
        if type(rows) is not int or not shape or not 0 < rows <= shape[0]:
            raise Corrupt(
                f"{name}: a vocabulary of {brief(rows)} rows, at most {shape[:1]} expected"
            )
        blocks_and_rows = ((b, min(b.box[1][0], rows - b.into[0])) for b in blocks)
        cut = [replace(b, box=(b.box[0], (n, *b.box[1][1:]))) for b, n in blocks_and_rows if n > 0]
        return (rows, *shape[1:]), cut


def _patterns(info: Mapping[str, Any], key: str) -> dict[Any, Any]:
    """Return the patterns of one kind as the keys of a dictionary; {} if there are none.

    They may be a dictionary, which is returned, a text, a list of texts, or of dictionaries with
    ``patterns``. Raise Unsupported for anything else.
    """
    value = info.get(key) or {}
    if isinstance(value, dict):
        return value
    patterns: dict[Any, Any] = {}
    for entry in value if isinstance(value, list) else [value]:
        each = entry.get("patterns") if isinstance(entry, dict) else [entry]
        if not isinstance(each, list) or not all(isinstance(p, str) for p in each):
            raise Unsupported(f"{key}: patterns of a kind that is not known", hint=_HINT)
        patterns |= dict.fromkeys(each)
    return patterns


def _along(name: str, axis: int, shapes: Sequence[Shape]) -> Blocks:
    """Return how shards that follow each other on one axis make the whole.

    Raise Corrupt if a shard lacks that axis, or differs from the first in another.
    """
    if any(
        len(shard_shape) <= axis
        or shard_shape[:axis] + shard_shape[axis + 1 :] != shapes[0][:axis] + shapes[0][axis + 1 :]
        for shard_shape in shapes
    ):
        raise Corrupt(
            f"{name}: shards of {brief(tuple(map(str, shapes)))} do not follow each other on axis"
            f" {axis}"
        )
    pieces, end = [], 0
    for rank, shape in enumerate(shapes):
        zeros = (0,) * len(shape)
        pieces.append(ShardBlock(rank, (zeros, shape), (*zeros[:axis], end, *zeros[axis + 1 :])))
        end += shape[axis]
    return (*shapes[0][:axis], end, *shapes[0][axis + 1 :]), pieces


def _by_map(name: str, blocks: Any, shapes: Sequence[Shape]) -> Blocks:
    """Return the whole shape and the blocks that an affine map, ``blocks``, gives the ranks.

    Raise Corrupt if it is no such map, or does not fit ``shapes``, the shards' by rank; Unsupported
    if a block is scaled or no box.
    """
    try:
        whole = _natural(blocks["logical_shape"])
        pieces: list[ShardBlock] = []
        for rank, shape in enumerate(shapes):
            rank_blocks = blocks["ranks"].get(rank, blocks["ranks"].get(str(rank)))
            if _natural(rank_blocks["shard_shape"]) != shape:
                raise Corrupt(
                    f"{name}: rank {rank} has {shape}, its affine map tells of another shape"
                )
            pieces += [
                p
                for piece in rank_blocks["pieces"]
                for p in _piece(name, rank, piece, whole, shape)
            ]
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as e:
        raise Corrupt(f"{name}: an affine map that is none: {type(e).__name__}") from e
    return whole, pieces


def _piece(name: str, rank: int, block: Any, whole: Shape, shard: Shape) -> Iterator[ShardBlock]:
    """Yield the block of one piece of the map; none if it is empty.

    Raise Unsupported if it is scaled or no box, Corrupt if the map does not give it to this rank. A
    piece of another form raises KeyError, TypeError, AttributeError, ValueError or IndexError.
    """
    shape: Shape = _natural(block["shape"])
    if 0 in shape:
        return  # a rank without any of it
    if block.get("scale", 1.0) != 1.0:
        raise Unsupported(f"{name}: its shards are scaled, and a merge never computes", hint=_HINT)
    in_whole = _corner(name, block["source"], shape, whole)
    in_shard = _corner(name, block["dest"], shape, shard)
    locations = _natural([int(n) for n in block["locations"]])
    if rank not in locations:
        raise Corrupt(f"{name}: rank {rank} has a block that its affine map gives to others")
    yield ShardBlock(rank, (in_shard, shape), in_whole, len({n for n in locations if n < rank}))


def _corner(name: str, place: Any, shape: Shape, tensor_shape: Shape) -> Shape:
    """Return where a block begins in a tensor of shape ``tensor_shape``.

    ``place``: its first element, and its strides there. Raise Unsupported if the block is no box of
    the tensor, Corrupt if it is outside, ValueError if ``place`` has anything but natural numbers.
    """
    offset, strides = place
    plain = row_major(tensor_shape)
    if len(shape) != len(tensor_shape) or any(
        n > 1 and s != p for n, s, p in zip(shape, _natural(strides), plain, strict=True)
    ):
        raise Unsupported(f"{name}: an affine map whose blocks are no boxes", hint=_HINT)
    corner: list[int] = []
    (remainder,) = _natural([offset])
    for stride in plain:
        corner.append(remainder // stride if stride else 0)
        remainder -= corner[-1] * stride
    if remainder or any(
        a + n > whole for a, n, whole in zip(corner, shape, tensor_shape, strict=True)
    ):
        raise Corrupt(f"{name}: an affine map with a block outside its tensor")
    return tuple(corner)


def _natural(values: Any) -> Shape:
    """Return a tuple of natural numbers; raise ValueError for anything else."""
    if not isinstance(values, (list, tuple)) or not are_naturals(values):
        raise ValueError("not natural numbers")
    return tuple(values)


# Patterns of names

_LONGEST_PATTERN = 512
_ONE_NAME = re.compile(r"\^((?:\\[^A-Za-z0-9]|[\w\-:/ ])*)\$")
_REPEAT = r"\\d[+*]|\.[+*]"
_PATTERN = re.compile(rf"\^?(?:{_REPEAT}|\\[^A-Za-z0-9]|[\w\-:/. ])*\$?")
_MOST_REPEATS = 3


class NamePatterns:
    r"""Values by patterns of names; only harmless regular expressions are run.

    AutoTP writes ``^name$`` with escapes; Megatron-DeepSpeed writes a few ``\\d+`` and ``.*``
    (matched from the start, as ``re.match`` does). Any other expression could run for ever, and
    raises Unsupported.
    """

    def __init__(self, values: Mapping[Any, Any], title: str) -> None:
        self._exact: dict[str, Any] = {}
        self._open: list[tuple[re.Pattern[str], Any]] = []
        for pattern, value in values.items():
            if (
                not isinstance(pattern, str)
                or len(pattern) > _LONGEST_PATTERN
                or not _PATTERN.fullmatch(pattern)
                or len(re.findall(_REPEAT, pattern)) > _MOST_REPEATS
            ):
                raise Unsupported(f"{title}: unknown kind of name pattern: {brief(pattern)}")
            if exact := _ONE_NAME.fullmatch(pattern):
                self._exact[re.sub(r"(?s)\\(.)", r"\1", exact[1])] = value
            else:
                self._open.append((re.compile(pattern), value))

    def find(self, name: str) -> list[Any]:
        """Return a list of the value of the one pattern that matches; [] if none does.

        Raise Corrupt if several match.
        """
        values = [self._exact[name]] if name in self._exact else []
        values += [value for pattern, value in self._open if pattern.match(name)]
        if len(values) > 1:
            raise Corrupt(f"{name}: {len(values)} patterns of one kind match it")
        return values


# Boxes of flat tensors


def cut_box(copy: Copy, shape: Shape, source: Box, into: Shape) -> Iterator[Part]:
    """Yield the box ``source`` of a stored tensor as parts of a larger one, from ``into`` on.

    ``shape``: the stored tensor's. ``copy`` has that grid, in one part, or a flat grid in any
    number of parts. A part's extent begins at its own first element; empty parts are left out.
    """
    strides = row_major(shape)
    for part in copy.parts:
        whole = part.strides is not None and ((0,) * len(shape), shape)
        flat = part.offsets[0] if copy.grid != shape or len(shape) == 1 else 0
        for offsets, sizes in [whole] if whole else cut(shape, flat, flat + prod(part.sizes)):
            low = tuple(map(max, offsets, source[0]))
            high = (min(o + n, h + m) for o, n, h, m in zip(offsets, sizes, *source, strict=True))
            box = tuple(b - a for a, b in zip(low, high, strict=True))
            if all(n > 0 for n in box):
                target = tuple(i + a - h for i, a, h in zip(into, low, source[0], strict=True))
                skip = sum(a * s for a, s in zip(low, part.strides or strides, strict=True)) - flat
                moved = replace(part, offsets=target, sizes=box, strides=part.strides or strides)
                yield _skipped(moved, skip * ITEMSIZE[copy.dtype], ITEMSIZE[copy.dtype])


def _skipped(part: Part, skip: int, item: int) -> Part:
    """Return the part that begins ``skip`` bytes later, with the extent that its strides reach."""
    sizes, strides = part.sizes, part.strides or ()
    extent = Extent(part.extent.file, part.extent.start + skip, span(sizes, strides) * item)
    return replace(part, extent=extent, strides=None if is_row_major(sizes, strides) else strides)


def cut(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yield boxes of elements ``start`` to ``stop`` (exclusive) of a row-major tensor, in order."""
    if not shape or (start <= 0 and stop >= prod(shape)):
        if start < stop:
            yield (0,) * len(shape), shape
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        yield from _row(shape, last, 0, stop - last * row)


def _row(shape: Shape, index: int, start: int, stop: int) -> Iterator[Box]:
    """Yield what `cut` does of index ``index`` of the first axis, whose elements count from 0."""
    for offsets, sizes in cut(shape[1:], start, stop):
        yield (index, *offsets), (1, *sizes)
