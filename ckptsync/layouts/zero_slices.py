"""``param_slice_mappings``: which elements of which parameter each rank says that its partition holds.

Written by stages 1 and 2 and by ``BF16_Optimizer`` since DeepSpeed 0.8 (``deepspeed/runtime/bf16_optimizer.py``,
``deepspeed/utils/tensor_fragment.py``, 0.19.8).  It names parameters where nothing else does, and shows that a rank's file is its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.inert import Made, brief
from ckptsync.layouts.zero_files import MASTERS, StateFile, optimizer_state
from ckptsync.model import Copy, Files, Shape

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


def groups(optim: Sequence[Sequence[StateFile]], shapes: Mapping[str, Shape]) -> list[dict[str, Shape]]:
    """``param_shapes`` of a checkpoint that has none: names in the order of their elements, ``shapes`` from the model itself.

    ``optim``: for each group, the files of the ranks that it is cut over.
    """
    return [_group(files, group, shapes) for group, files in enumerate(optim)]


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
    """Raise Corrupt unless every rank's partition holds what its own file says that it does."""
    held: dict[str, Slices] = {file.name: {} for file in optim}
    starts = {file.name: file.part(files, optimizer_state(file)[MASTERS][group]).extent.start for file in optim}
    for name, copy in copies.items():
        for part in copy.parts:
            item, file = ITEMSIZE[copy.dtype], part.extent.file
            held[file][name] = ((part.extent.start - starts[file]) // item, part.sizes[0])
    for each in optim:
        told = slices(each, group)
        if told is not None and {n: s for n, s in told.items() if s[1]} != held[each.name]:
            odd = next(n for n in [*told, *held[each.name]] if told.get(n) != held[each.name].get(n) and told.get(n, (0, 1))[1])
            raise Corrupt(
                f"{each.name}: its slice of {odd} is {told.get(odd)}, {held[each.name].get(odd)} expected",
                hint="the file is of another rank, or of another save",
            )
