"""Plan the output files of a merge: their headers, and which stored copy each tensor is read from.

The bytes of an output file follow from its plan alone, and the plan from the tensors and the
options.  Whether a copy's parts hold each element of its tensor exactly once is checked here,
before anything is written.  Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import attrgetter
from typing import Literal, get_args

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE, PRECISION, is_castable
from ckptsync.formats.safetensors import encode_header
from ckptsync.formats.torch_archive import Ending
from ckptsync.tensors import Checksum, Copy, Part, Shape, Tensor

DType = Literal["auto", "keep", "bf16", "fp16", "fp32"]
DTYPES: tuple[DType, ...] = get_args(DType)
_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
PlanItem = tuple[Tensor, Copy, str]
"""A tensor, the copy that is read, and the element type that is written."""
SHARD_SIZE = 5_000_000_000  # bytes of a file, unless the user gives another size
FORMAT = 1  # of the output: part of what its bytes are a function of


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """What is written.

    ``dtype``: ``auto`` is the model's own, tensor by tensor; ``keep`` the most precise copy stored;
    or one of the three. ``max_shard_size`` in bytes of tensors in one file; ``source`` as
    `ckptsync.layouts.registry.WeightsSource` spells it. ``allow_code``: copy code that lies in the
    checkpoint, too (see `ckptsync.merger.model_files.is_code`).
    """

    dtype: DType = "auto"
    max_shard_size: int = SHARD_SIZE
    source: str | None = None
    allow_code: bool = False


@dataclass(frozen=True, slots=True)
class MergeResources:
    """How a merge is done; what it writes does not depend on it.

    ``jobs``: threads (1: none but the caller's), each with ``window`` bytes in flight.  Digests of
    tensors and statistics cost a pass over every byte, and are made if asked for.
    """

    jobs: int = 1
    tensor_digests: bool = True
    statistics: bool = False
    window: int = 12 << 20


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of an output file.

    ``start`` counts from the file's first byte; ``size`` is in bytes of ``dtype``.
    """

    name: str
    dtype: str
    shape: Shape
    start: int
    size: int
    copy: Copy


@dataclass(frozen=True, slots=True)
class FilePlan:
    """An output file: header, then the tensors' bytes in order, without holes.

    ``ending``: what follows them, where their CRC32 is part of the file.
    """

    name: str
    header: bytes
    tensors: tuple[PlannedTensor, ...]
    ending: Ending | None = None

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        end = self.ending.size if self.ending else 0
        return len(self.header) + sum(t.size for t in self.tensors) + end

    @property
    def checksums(self) -> frozenset[Checksum]:
        """The checksums that the containers have of the records that are read."""
        parts = (part for tensor in self.tensors for part in tensor.copy.parts)
        return frozenset(part.checksum for part in parts if part.checksum)


def plan(
    tensors: Sequence[Tensor], options: MergeOptions, stem: str = "model"
) -> tuple[FilePlan, ...]:
    """Return the plans of a model's files, named as ``save_pretrained`` names them.

    Tensors keep their order; a new file begins where the next tensor would not fit, as
    huggingface_hub splits a state dict.  ``stem``: the files' name without suffix and
    number.  Raises Corrupt if a tensor is not whole, has an invalid name, or shares it;
    Incomplete if the copy to read is missing.
    """
    names = {t.name for t in tensors}
    if len(names) != len(tensors) or not all(map(_is_usable_name, names)):
        raise Corrupt("two tensors have the same name, or a tensor has an invalid name")
    items = []
    for tensor in tensors:
        copy, dtype = choose_copy(tensor, options.dtype), written_dtype(tensor, options.dtype)
        check_tiling(tensor, copy)
        items.append((tensor, copy, dtype))
    return name_files(group_tensors(items, options.max_shard_size), stem)


def group_tensors(items: Iterable[PlanItem], max_shard_size: int) -> list[list[PlanItem]]:
    """Return the tensors of each file: a new file begins where the next tensor would not fit.

    A tensor of more than ``max_shard_size`` bytes as written is alone in a file.
    """
    groups: list[list[PlanItem]] = []
    total = 0
    for tensor, copy, dtype in items:
        size = prod(tensor.shape) * ITEMSIZE[dtype]
        if not groups or total + size > max_shard_size:
            groups.append([])
            total = 0
        groups[-1].append((tensor, copy, dtype))
        total += size
    return groups


def name_files(groups: Sequence[Sequence[PlanItem]], stem: str) -> tuple[FilePlan, ...]:
    """Return a file for each group, with the names that ``save_pretrained`` gives."""
    count = len(groups)
    names = [f"{stem}-{number:05d}-of-{count:05d}" for number in range(1, count + 1)]
    return tuple(
        file_plan(f"{name if count > 1 else stem}.safetensors", group)
        for name, group in zip(names, groups, strict=True)
    )


def file_plan(name: str, group: Sequence[PlanItem]) -> FilePlan:
    """Return the plan of one file with these tensors, in their order."""
    header = encode_header((tensor.name, dtype, tensor.shape) for tensor, _, dtype in group)
    start, planned = len(header), []
    for tensor, copy, dtype in group:
        size = prod(tensor.shape) * ITEMSIZE[dtype]
        planned.append(PlannedTensor(tensor.name, dtype, tensor.shape, start, size, copy))
        start += size
    return FilePlan(name, header, tuple(planned))


def _is_usable_name(name: str) -> bool:
    """Return whether a safetensors header can hold this name.

    The header is UTF-8.  JSON and pickles can spell halves of a surrogate pair; UTF-8 cannot.
    """
    is_text = name.isascii() or not any("\ud800" <= c <= "\udfff" for c in name)
    return is_text and name not in ("", "__metadata__")


def written_dtype(tensor: Tensor, dtype: DType) -> str:
    """Return the element type that a tensor is written in.

    ``dtype``: the user's option.  Types that cannot be cast, such as integers, stay as they are.
    Raises as `choose_copy`.
    """
    stored_dtype = tensor.dtype if is_castable(tensor.dtype) else choose_copy(tensor, dtype).dtype
    if dtype == "auto" or not is_castable(stored_dtype):
        return stored_dtype
    return choose_copy(tensor, dtype).dtype if dtype == "keep" else _DTYPES[dtype]


def choose_copy(tensor: Tensor, dtype: DType) -> Copy:
    """Return the stored copy to read: the last that needs no cast, else the first most precise.

    Raises Incomplete if its file is missing: a less precise copy never takes its place.  Raises
    Corrupt if no copy is stored.
    """
    if not tensor.copies:
        raise Corrupt(f"{tensor.name}: no copy is stored")
    if len(tensor.copies) == 1 and not tensor.copies[0].absent:
        return tensor.copies[0]
    # the first of equals
    chosen = max(tensor.copies, key=lambda c: (PRECISION.get(c.dtype, 0), not c.absent))
    if dtype != "keep" and is_castable(chosen.dtype):
        exact = tensor.dtype if dtype == "auto" else _DTYPES[dtype]
        chosen = next(
            (c for c in reversed(tensor.copies) if c.dtype == exact and not c.absent), chosen
        )
    if chosen.absent:
        raise Incomplete(
            f"{chosen.absent}: not found; it holds the {chosen.dtype} copy of {tensor.name}",
            hint=(
                "give the directory of the node that wrote it, or take the model's own copy with"
                " --dtype auto"
            ),
        )
    return chosen


def check_dtype(dtype: str) -> DType:
    """Return ``dtype`` itself if it is one of `DTYPES`; raise Unsupported otherwise."""
    for supported in DTYPES:
        if dtype == supported:
            return supported
    raise Unsupported(f"dtype {dtype!r}", hint=f"one of: {', '.join(DTYPES)}")


def check_tiling(tensor: Tensor, copy: Copy) -> None:
    """Raise Corrupt unless a copy's parts tile the tensor, flat or not, and dtypes are known."""
    name, grid = tensor.name, copy.grid
    if grid not in (tensor.shape, (prod(tensor.shape),)):
        raise Corrupt(f"{name}: a copy of shape {grid}, {tensor.shape} expected")
    if copy.dtype not in ITEMSIZE or tensor.dtype not in ITEMSIZE:
        raise Corrupt(f"{name}: unknown element type {copy.dtype} or {tensor.dtype}")
    if _are_rows_in_order(copy.parts, grid):
        return
    for offsets, sizes in ((part.offsets, part.sizes) for part in copy.parts):
        fits = len(offsets) == len(sizes) == len(grid) and all(
            o >= 0 and n >= 0 and o + n <= whole
            for o, n, whole in zip(offsets, sizes, grid, strict=True)
        )
        if not fits:
            raise Corrupt(f"{name}: a part at {offsets} of size {sizes} is not inside {grid}")
    stored, count = sum(prod(part.sizes) for part in copy.parts), prod(grid)
    if stored != count or not is_tiled(
        [(p.offsets, p.sizes) for p in copy.parts if prod(p.sizes)], grid
    ):
        fault = (
            "overlap, or are missing"
            if stored == count
            else "are missing"
            if stored < count
            else "are given twice"
        )
        raise Corrupt(f"{name}: {stored} elements found, {count} expected: some {fault}")


def _are_rows_in_order(parts: Sequence[Part], grid: Shape) -> bool:
    """Return whether parts, once sorted, are whole rows without gaps; False for a scalar."""
    if not grid:
        return False
    no_offsets, row_shape, row = (0,) * (len(grid) - 1), grid[1:], 0
    for part in sorted(parts, key=attrgetter("offsets")) if len(parts) > 1 else parts:
        offsets, sizes = part.offsets, part.sizes
        if (
            not sizes
            or sizes[0] <= 0
            or sizes[1:] != row_shape
            or not offsets
            or offsets[0] != row
            or offsets[1:] != no_offsets
        ):
            return False
        row += sizes[0]
    return row == grid[0]


def is_tiled(boxes: Sequence[tuple[Shape, Shape]], grid: Shape) -> bool:
    """Return whether boxes inside ``grid``, with its volume together, cover it without overlap.

    Boxes are grouped by their interval on the first axis; if these follow each other without gap,
    each group must tile the rest.  Otherwise the axis is cut at every border.  The usual cases
    (rows, columns, a mesh of both) never need that.
    """
    if not prod(grid):
        return not boxes
    if not grid:
        return len(boxes) == 1
    groups: defaultdict[tuple[int, int], list[tuple[Shape, Shape]]] = defaultdict(list)
    for offsets, sizes in boxes:
        groups[offsets[0], sizes[0]].append((offsets[1:], sizes[1:]))
    intervals = sorted(groups)
    ends = [0, *(start + size for start, size in intervals)]
    if [start for start, _ in intervals] == ends[:-1]:
        return ends[-1] == grid[0] and all(is_tiled(group, grid[1:]) for group in groups.values())
    borders = sorted({0, grid[0], *(o[0] for o, _ in boxes), *(o[0] + n[0] for o, n in boxes)})
    return all(
        is_tiled(
            [(o[1:], n[1:]) for o, n in boxes if o[0] <= low and high <= o[0] + n[0]], grid[1:]
        )
        for low, high in pairwise(borders)
    )
