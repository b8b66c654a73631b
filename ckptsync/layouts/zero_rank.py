"""What one model-parallel rank of DeepSpeed holds: parameters, buffers and tied names, each with all its stored copies.

Which files hold the masters differs (partitions, experts, universal); what else a model file says does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.formats.dtypes import MOST_AXES
from ckptsync.formats.pickles import brief
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts import zero_masters
from ckptsync.layouts.zero_files import StateFile, buffers
from ckptsync.model import Copy, Files, Shape, Tensor

Held = Mapping[str, tuple[StateFile, Stored]]


@dataclass(frozen=True, slots=True)
class Rank:
    """``models``: its model file, at stage 3 one of each data-parallel rank.

    These repeat the first but for fragments of frozen parameters.  ``own``: the tensors of the model itself, at stage 3 empty placeholders of the right dtype.  ``optim``: the
    optimizer files, unless ``absent`` names one that is not here.
    """

    files: Files
    stage: int
    models: Sequence[StateFile]
    optim: Sequence[StateFile]
    own: Held
    absent: str = ""

    @property
    def first(self) -> StateFile:
        """Data-parallel rank 0's model file."""
        return self.models[0]

    def own_copies(self, name: str, shape: Shape) -> tuple[Copy, ...]:
        """The model's own copy, if it has one of that shape."""
        file, own = self.own.get(name, (None, None))
        if file is None or own is None or own.shape != shape:
            return ()
        return (Copy(own.dtype, own.shape, (file.part(self.files, own),) if own.numel else ()),)


def own_of(file: StateFile) -> dict[str, tuple[StateFile, Stored]]:
    """The tensors of a model file's ``module``."""
    return {name: (file, value) for name, value in file.get("module", dict).items() if isinstance(value, Stored)}


def groups_of(file: StateFile) -> list[dict[str, Shape]] | None:
    """``param_shapes``: shapes of the trained parameters by group, in the order of their elements; ``None`` without ZeRO."""
    if file.content.get("param_shapes") is None:
        return None
    found: list[dict[str, Shape]] = []
    known: set[str] = set()
    for group in file.get("param_shapes", list):
        found.append(_shapes(group, file.name))
        if not known.isdisjoint(group):
            raise Corrupt(f"{file.name}: a parameter is in two parameter groups")
        known.update(group)
    return found


def tensors_of(rank: Rank, trained: Mapping[str, Shape], masters: Mapping[str, Copy]) -> tuple[Tensor, ...]:
    """All tensors of the rank, of which those that are ``trained`` have ``masters``, unless their files are absent."""
    found = {tensor.name: tensor for tensor in (*_trained(rank, trained, masters), *_frozen(rank))}
    found |= {tensor.name: tensor for tensor in _others(rank, found)}
    found |= {tensor.name: tensor for tensor in _tied(rank, found)}
    return tuple(found.values())


def _shapes(value: Any, name: str) -> dict[str, Shape]:
    if not isinstance(value, dict) or not all(isinstance(k, str) and _is_shape(v) for k, v in value.items()):
        raise Corrupt(f"{name}: param_shapes are not shapes by name")
    return value


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= MOST_AXES and all(type(n) is int and n >= 0 for n in value)


def _trained(rank: Rank, trained: Mapping[str, Shape], masters: Mapping[str, Copy]) -> Iterator[Tensor]:
    """What the optimizer holds: fp32 masters, and at stages 1 and 2 the model's own copy too."""
    for name, shape in trained.items():
        _, own = rank.own.get(name, (None, None))
        stored = rank.own_copies(name, shape) if rank.stage < 3 else ()
        if own is not None and rank.stage < 3 and not stored:
            raise Corrupt(f"{rank.own[name][0].name}: {name} has the shape {own.shape}, {shape} told", hint="it is of another save")
        if rank.absent and not stored:
            raise Incomplete(f"{rank.absent}: not there; it holds some of {name}", hint="give the other nodes' directories too")
        master = masters.get(name) or Copy("F32", (prod(shape),), (), rank.absent or rank.first.name)
        yield Tensor(name, own.dtype if own else master.dtype, shape, (master, *stored))


def _frozen(rank: Rank) -> Iterator[Tensor]:
    """Parameters without an optimizer state: at stage 3 a fragment a rank, padded; else whole in the model file."""
    shapes = _shapes(rank.first.get("frozen_param_shapes", dict), rank.first.name)
    for name, shape in shapes.items():
        yield _with_copies(name, shape, _whole(rank, name, shape) if rank.stage < 3 else (_fragments(rank, name, shape),))


def _whole(rank: Rank, name: str, shape: Shape) -> tuple[Copy, ...]:
    """What the model file has of a frozen parameter: in ``module``, and again as its fragment."""
    held = [rank.own.get(name, (None, None)), (rank.first, rank.first.get("frozen_param_fragments", dict).get(name))]
    found = [(file, value) for file, value in held if file is not None and isinstance(value, Stored)]
    odd = next((value for _, value in found if value.shape != shape), None)
    if odd is not None or not found:
        told = f"has the shape {odd.shape}, {shape} told" if odd else "is not there"
        raise Corrupt(f"{rank.first.name}: frozen {name} {told}", hint="the file is damaged: fetch it again")
    return tuple(Copy(value.dtype, shape, (file.part(rank.files, value),) if value.numel else ()) for file, value in found)


def _fragments(rank: Rank, name: str, shape: Shape) -> Copy:
    held = [file.get("frozen_param_fragments", dict).get(name) for file in rank.models]
    if not all(isinstance(fragment, Stored) for fragment in held):
        raise Corrupt(f"{rank.first.name}: frozen {name} has no fragment in some rank's file")
    if len({fragment.dtype for fragment in held}) > 1:
        raise Corrupt(f"{rank.first.name}: frozen {name} has fragments of different element types")
    parts = [file.part(rank.files, fragment) for file, fragment in zip(rank.models, held, strict=True)]
    return zero_masters.from_fragments(name, shape, held[0].dtype, parts)


def _others(rank: Rank, found: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Buffers, and at stage 1 the frozen parameters, which only the model file holds."""
    named = buffers(rank.first)
    tied = rank.first.get("shared_params", dict)
    for name, (_, value) in rank.own.items():
        if name in found or name in tied:
            continue
        if rank.stage == 3 and not value.numel and name not in named:
            raise Incomplete(f"{rank.first.name}: {name} is an empty placeholder, and no rank holds its values")
        yield _with_copies(name, value.shape, rank.own_copies(name, value.shape))


def _with_copies(name: str, shape: Shape, copies: tuple[Copy, ...]) -> Tensor:
    return Tensor(name, copies[0].dtype, shape, copies)


def _tied(rank: Rank, found: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """``shared_params``: name that is not stored → name that is.

    Where frozen parameters were excluded (Trainer does so with LoRA), names tied to one of them are still mentioned, and left out.
    """
    is_subset = rank.first.content.get("frozen_param_shapes") is None
    for name, stored in rank.first.get("shared_params", dict).items():
        is_there = isinstance(stored, str) and stored in found
        if not isinstance(name, str) or not (is_there or (is_subset and isinstance(stored, str))):
            raise Corrupt(f"{rank.first.name}: {brief(name)} shares its values with {brief(stored)}, which is not there")
        if is_there:
            yield replace(found[stored], name=name, tied=stored)
