"""From flat partitions back to parameters: arithmetic on where DeepSpeed puts elements.

Source: ``_zero2_merge_trainable_params`` and ``_zero3_merge_trainable_params`` of ``deepspeed/utils/zero_to_fp32.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from ckptsync.errors import Corrupt
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts.zero_files import MASTERS, StateFile, optimizer_state
from ckptsync.model import Copy, Extent, Files, Part, Shape

Groups = Sequence[dict[str, Shape]]


@dataclass(frozen=True, slots=True)
class Flat:
    """A tensor that DeepSpeed keeps flattened, in one or several extents: elements 0 to ``numel`` of one dtype; run ``i`` holds those from ``starts[i]``."""

    dtype: str
    runs: tuple[Part, ...]
    starts: tuple[int, ...]
    numel: int

    def cut(self, start: int, count: int, into: int = 0) -> list[Part]:
        """Elements ``start`` to ``start + count`` as boxes of a flattened tensor in which they begin at ``into``."""
        item = ITEMSIZE[self.dtype]
        at, end = start, start + count
        index = bisect_right(self.starts, at) - 1
        found: list[Part] = []
        while at < end:
            run = self.runs[index]
            skip = at - self.starts[index]
            size = min(end - at, run.extent.size // item - skip)
            if size > 0:
                extent = Extent(run.extent.file, run.extent.start + skip * item, size * item)
                found.append(Part((into + at - start,), (size,), extent, None, run.checksum))
                at += size
            index += 1
        return found


def concatenate(dtype: str, runs: Iterable[Part]) -> Flat:
    """The runs end to end; empty ones are dropped.  Raises Corrupt for a run whose elements do not follow each other."""
    kept = tuple(run for run in runs if run.extent.size)
    if any(run.strides for run in kept):
        raise Corrupt(f"{kept[0].extent.file}: a flat tensor whose elements do not follow each other")
    ends = tuple(accumulate(run.extent.size // ITEMSIZE[dtype] for run in kept))
    return Flat(dtype, kept, (0, *ends[:-1]) if ends else (), ends[-1] if ends else 0)


def copies(files: Files, stage: int, optim: Sequence[StateFile], groups: Groups) -> dict[str, Copy]:
    """The fp32 master of every trained parameter, as extents of the ranks' optimizer files."""
    if stage == 3:
        return dict(_stage3([_flat(files, file, "fp32_flat_groups", slice(None)) for file in optim], groups))
    found: dict[str, Copy] = {}
    for index, shapes in enumerate(groups):
        found |= group(files, optim, index, shapes)
    return found


def group(files: Files, optim: Sequence[StateFile], index: int, shapes: dict[str, Shape]) -> dict[str, Copy]:
    """The masters of one parameter group at stages 1 and 2, cut over the ranks whose files these are."""
    ranks = [_flat(files, file, MASTERS, slice(index, index + 1)) for file in optim]
    return dict(_stage12(ranks, shapes, _alignments(optim[0], index, len(shapes)), _paddings(optim, index)))


def from_fragments(name: str, shape: Shape, dtype: str, parts: Sequence[Part]) -> Copy:
    """A frozen parameter at stage 3: rank r holds elements from ``r * ceil(numel / W)``; the last ones are padding."""
    flats = [concatenate(dtype, [part]) for part in parts]
    numel = prod(shape)
    each = -(-numel // len(flats))
    if any(flat.numel != each for flat in flats):
        raise Corrupt(f"{name}: fragments of {sorted({flat.numel for flat in flats})} elements, {each} expected")
    return Copy(dtype, (numel,), tuple(_across(flats, 0, numel)))


def _flat(files: Files, file: StateFile, key: str, which: slice) -> Flat:
    """One rank's tensors under ``key``, end to end."""
    held = optimizer_state(file).get(key)
    if not isinstance(held, (list, tuple)) or not all(isinstance(t, Stored) and len(t.shape) == 1 for t in held):
        raise Corrupt(f"{file.name}: no {key} of flat tensors")
    dtypes = {t.dtype for t in held}
    if len(dtypes) != 1 or not held[which]:
        raise Corrupt(f"{file.name}: {key} has {len(held)} tensors of {len(dtypes)} element types")
    return concatenate(dtypes.pop(), [file.part(files, tensor) for tensor in held[which]])


def _stage12(ranks: Sequence[Flat], shapes: dict[str, Shape], gaps: Sequence[int], padding: int) -> Iterator[tuple[str, Copy]]:
    """Partitions in rank order are the flattened group; parameters follow each other, with ``gaps`` behind them."""
    whole = concatenate(_dtype(ranks), [run for flat in ranks for run in flat.runs])
    at = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        numel = prod(shape)
        if at + numel > whole.numel:
            raise Corrupt(f"{name}: ends at element {at + numel}, the partitions of its group have {whole.numel}")
        yield name, Copy(whole.dtype, (numel,), tuple(whole.cut(at, numel)))
        at += numel + gap
    align = 2 * len(ranks)
    if -(-at // align) != -(-whole.numel // align) and whole.numel - at != padding:
        raise Corrupt(f"a parameter group has {at} elements, its partitions {whole.numel}")


def _dtype(ranks: Sequence[Flat]) -> str:
    """The element type of all ranks' partitions; raises Corrupt where they differ."""
    dtypes = {flat.dtype for flat in ranks}
    if len(dtypes) != 1:
        raise Corrupt(f"the ranks' partitions have different element types: {', '.join(sorted(dtypes))}")
    return dtypes.pop()


def _alignments(file: StateFile, group: int, count: int) -> Sequence[int]:
    """Elements of padding behind each parameter (DeepSpeed 0.19; none before)."""
    per_group = optimizer_state(file).get("param_alignment_paddings")
    gaps: Any = per_group[group] if isinstance(per_group, (list, tuple)) and group < len(per_group) else [0] * count
    if not isinstance(gaps, (list, tuple)) or len(gaps) != count or any(type(n) is not int or n < 0 for n in gaps):
        raise Corrupt(f"{file.name}: param_alignment_paddings do not fit {count} parameters")
    return gaps


def _paddings(optim: Sequence[StateFile], group: int) -> int:
    """Padding that the ranks recorded; ``BF16_Optimizer`` leaves it in the partition."""
    told = [optimizer_state(file).get("group_paddings") for file in optim]
    return sum(t[group] for t in told if isinstance(t, (list, tuple)) and group < len(t) and type(t[group]) is int)


def _stage3(ranks: Sequence[Flat], groups: Groups) -> Iterator[tuple[str, Copy]]:
    """Each parameter takes the same ``ceil(numel / W)`` elements of every rank; groups merge into one walk."""
    at, dtype = 0, _dtype(ranks)
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        numel = prod(shape)
        yield name, Copy(dtype, (numel,), tuple(_across(ranks, at, numel)))
        at += -(-numel // len(ranks))
    if any(flat.numel != at for flat in ranks):
        raise Corrupt(f"the parameters take {at} elements of every rank, the ranks have {sorted({flat.numel for flat in ranks})}")


def _across(ranks: Sequence[Flat], at: int, numel: int) -> Iterator[Part]:
    each = -(-numel // len(ranks))
    for rank, flat in enumerate(ranks):
        count = min(each, numel - rank * each)
        if count > 0:
            if at + count > flat.numel:
                raise Corrupt(f"rank {rank} has {flat.numel} elements, {at + count} wanted")
            yield from flat.cut(at, count, rank * each)
