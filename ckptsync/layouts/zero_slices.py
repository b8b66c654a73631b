"""``param_slice_mappings``: which elements of which parameter each rank says that its partition holds.

Written by stages 1 and 2 and by ``BF16_Optimizer`` since DeepSpeed 0.8 (``deepspeed/runtime/bf16_optimizer.py``,
``deepspeed/utils/tensor_fragment.py``, 0.19.8).  It names parameters where nothing else does, and shows that a rank's file is its own.

With ``round_robin_gradients`` the elements lie as parameters were dealt out to the ranks, which is the order of ``param_shapes``, but
``_link_all_hp_params`` (``deepspeed/runtime/zero/stage_1_and_2.py``) goes by the order before that, and so do the slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeVar

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.pickles import Made, brief
from ckptsync.layouts.zero_files import MASTERS, StateFile, optimizer_state
from ckptsync.model import Copy, Files, Shape

T = TypeVar("T")
Slices = dict[str, tuple[int, int]]  # parameter → (first element in the partition, elements)


def slices(file: StateFile, group: int) -> Slices | None:
    """What one rank's file says of one parameter group; ``None`` if it says nothing."""
    groups = optimizer_state(file).get("param_slice_mappings")
    if groups is None:
        return None
    if not isinstance(groups, (list, tuple)) or group >= len(groups) or not isinstance(groups[group], dict):
        raise Corrupt(f"{file.name}: param_slice_mappings do not fit parameter group {group}")
    return {name: _slice(file, name, value) for name, value in groups[group].items()}


def _slice(file: StateFile, name: Any, value: Any) -> tuple[int, int]:
    """A ``fragment_address(numel, start)``: a dataclass."""
    told = value.state if isinstance(value, Made) and isinstance(value.state, dict) else {}
    start, numel = told.get("start"), told.get("numel")
    if not isinstance(name, str) or type(start) is not int or type(numel) is not int or start < 0 or numel < 0:
        raise Corrupt(f"{file.name}: param_slice_mappings give {brief(name)} no elements")
    return start, numel


def count(file: StateFile) -> range:
    """The numbers of the parameter groups."""
    held = optimizer_state(file).get(MASTERS)
    return range(len(held) if isinstance(held, (list, tuple)) else 0)


def groups(optim: Sequence[Sequence[StateFile]], shapes: Mapping[str, Shape], *, dealt: bool = False) -> list[dict[str, Shape]]:
    """``param_shapes`` of a checkpoint that has none: names in the order of their elements, ``shapes`` from the model itself.

    ``optim``: for each group, the files of the ranks that it is cut over.  ``dealt``: with ``round_robin_gradients``.
    """
    found = [_group(files, group, shapes) for group, files in enumerate(optim)]
    if not dealt:
        return found
    return [{name: one[name] for name in _dealt(list(one), len(files))} for one, files in zip(found, optim, strict=True)]


def _dealt(names: Sequence[T], ranks: int) -> list[T]:
    """``_round_robin_reorder``: what is dealt to the first rank, then to the next."""
    return [name for rank in range(ranks) for name in names[rank::ranks]]


def _group(optim: Sequence[StateFile], group: int, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    held: dict[str, int] = {}
    for file in optim:
        told = slices(file, group)
        if told is None:
            raise Unsupported(
                f"{file.name}: names no parameters, and the model file has no param_shapes", hint="written by an old DeepSpeed?"
            )
        for name, (_, numel) in told.items():
            held[name] = held.get(name, 0) + numel
    odd = next((name for name, numel in held.items() if name not in shapes or prod(shapes[name]) != numel), None)
    if odd is not None:
        raise Corrupt(f"{optim[0].name}: {odd} has {held[odd]} elements in the optimizer, {shapes.get(odd)} in the model")
    return {name: shapes[name] for name in held}


def check(files: Files, optim: Sequence[StateFile], group: int, copies: Mapping[str, Copy]) -> None:
    """Raise Corrupt unless every rank's partition holds what its own file says that it does, or said before parameters were dealt."""
    held: dict[str, Slices] = {file.name: {} for file in optim}
    starts = {file.name: file.part(files, optimizer_state(file)[MASTERS][group]).extent.start for file in optim}
    for name, copy in copies.items():
        for part in copy.parts:
            item, file = ITEMSIZE[copy.dtype], part.extent.file
            held[file][name] = ((part.extent.start - starts[file]) // item, part.sizes[0])
    told = {file.name: _filled(found) for file in optim if (found := slices(file, group)) is not None}
    odd = next((file for file, found in told.items() if found != held[file]), None)
    if odd is not None and not _are_before_dealing(told, [file.name for file in optim], copies):
        name = min(dict(told[odd].items() ^ held[odd].items()))
        raise Corrupt(
            f"{odd}: its slice of {name} is {told[odd].get(name)}, {held[odd].get(name)} expected",
            hint="the file is of another rank, or of another save",
        )


def _filled(told: Slices) -> Slices:
    return {name: found for name, found in told.items() if found[1]}


def _are_before_dealing(told: Mapping[str, Slices], ranks: Sequence[str], copies: Mapping[str, Copy]) -> bool:
    """Whether all ranks' slices are those of ``copies`` in the order before ``_round_robin_reorder``, flattened without gaps."""
    names = list(copies)
    order = sorted(zip(_dealt(range(len(names)), len(ranks)), names, strict=True))
    each = 2 * -(-sum(prod(copy.grid) for copy in copies.values()) // (2 * len(ranks)))
    held: dict[str, Slices] = {file: {} for file in ranks}
    at = 0
    for _, name in order:
        end = at + prod(copies[name].grid)
        for rank in range(at // each, -(-end // each)) if each else ():
            begin, behind = max(at, rank * each), min(end, (rank + 1) * each)
            held[ranks[rank]][name] = (begin - rank * each, behind - begin)
        at = end
    return all(found == held[file] for file, found in told.items())
