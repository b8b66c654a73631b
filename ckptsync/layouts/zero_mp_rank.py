"""What one model-parallel rank of DeepSpeed (``mp_rank``) holds, with all stored copies.

It holds parameters, buffers and tied names.

``param_shapes`` of the model file names the trained parameters, of which the optimizer has fp32
masters (see `zero_partitions`, `zero_experts`). What else a model file holds lies there alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.formats.pickles import brief
from ckptsync.formats.torch_pickle import StoredTensor
from ckptsync.layouts import zero_experts, zero_partitions
from ckptsync.layouts.zero_experts import Held
from ckptsync.layouts.zero_files import StateFile, buffer_names, param_shapes, shapes_by_name
from ckptsync.tensors import Copy, Shape, Tensor


@dataclass(frozen=True, slots=True)
class MpRank:
    """``models``: its model file, at stage 3 one of each data-parallel rank.

    These repeat the first but for fragments of frozen parameters. ``own``: the tensors of the model
    itself, at stage 3 empty placeholders of the right dtype. ``optim``: the optimizer files, unless
    ``absent`` names what is missing to read them.
    """

    stage: int
    models: Sequence[StateFile]
    optim: Sequence[StateFile]
    own: Held
    absent: str = ""

    @property
    def first(self) -> StateFile:
        """Return data-parallel rank 0's model file."""
        return self.models[0]

    def own_tensor(self, name: str) -> Tensor:
        """Return a tensor of the model itself."""
        file, own = self.own[name]
        return Tensor(name, own.dtype, own.shape, (_stored(file, own),))


def own_tensors(file: StateFile) -> dict[str, tuple[StateFile, StoredTensor]]:
    """Return the tensors of a model file's ``module``."""
    return {
        name: (file, value)
        for name, value in file.get("module", dict).items()
        if isinstance(value, StoredTensor)
    }


def rank_tensors(rank: MpRank) -> tuple[Tensor, ...]:
    """Return one model-parallel rank's tensors; of experts, all ranks'."""
    groups = param_shapes(rank.first) if rank.stage else []
    if groups is None:  # every parameter may be a trained one
        named = buffer_names(rank.first)
        shapes = {name: own.shape for name, (_, own) in rank.own.items() if name not in named}
        return tensors_of(rank, shapes, {})
    trained: dict[str, Shape] = {}
    masters: dict[str, Copy] = {}
    is_read = bool(rank.optim) and not rank.absent
    if is_read and rank.stage == 3:
        masters = zero_partitions.stage3_masters(rank.optim, groups)
    for index, group in enumerate(groups):
        if zero_experts.are_experts(group):
            trained |= zero_experts.all_experts(group, rank.own)
        else:
            trained |= group
            if is_read and rank.stage < 3:
                masters |= zero_partitions.group_masters(rank.optim, index, group)
    if is_read and rank.stage < 3:
        masters |= zero_experts.expert_masters(rank.first, rank.optim, groups, rank.own)
    return tensors_of(rank, trained, masters)


def tensors_of(
    rank: MpRank, trained: Mapping[str, Shape], masters: Mapping[str, Copy]
) -> tuple[Tensor, ...]:
    """Return all tensors of the rank; those that are ``trained`` have ``masters``."""
    found = {tensor.name: tensor for tensor in (*_trained(rank, trained, masters), *_frozen(rank))}
    found |= {tensor.name: tensor for tensor in _others(rank, found)}
    found |= {tensor.name: tensor for tensor in _tied(rank, found)}
    return tuple(found.values())


def _stored(file: StateFile, value: StoredTensor) -> Copy:
    return Copy(value.dtype, value.shape, (file.part(value),) if value.numel else ())


def _trained(
    rank: MpRank, trained: Mapping[str, Shape], masters: Mapping[str, Copy]
) -> Iterator[Tensor]:
    """Yield trained parameters: fp32 masters, and at stages 1 and 2 the model's own copy too."""
    for name, shape in trained.items():
        file, own = rank.own.get(name, (rank.first, None))
        stored = (_stored(file, own),) if own is not None and rank.stage < 3 else ()
        if own is not None and stored and own.shape != shape:
            raise Corrupt(
                f"{file.name}: {name} has the shape {own.shape}, {shape} expected",
                hint="it is of another save",
            )
        if rank.absent and not stored:
            raise Incomplete(
                f"{rank.absent}: not found; it holds some of {name}",
                hint="give the other nodes' directories too",
            )
        master = masters.get(name) or Copy(
            "F32", (prod(shape),), (), rank.absent or rank.first.name
        )
        yield Tensor(name, own.dtype if own else master.dtype, shape, (master, *stored))


def _frozen(rank: MpRank) -> Iterator[Tensor]:
    """Yield parameters without an optimizer state: at stage 3 a fragment a rank, padded.

    Else whole in the model file.
    """
    shapes = shapes_by_name(rank.first.get("frozen_param_shapes", dict), rank.first.name)
    for name, shape in shapes.items():
        copies = _whole(rank, name, shape) if rank.stage < 3 else (_fragments(rank, name, shape),)
        yield Tensor(name, copies[0].dtype, shape, copies)


def _whole(rank: MpRank, name: str, shape: Shape) -> tuple[Copy, ...]:
    """Return the copies of a frozen parameter in a model file: ``module``'s, and its fragment."""
    fragment = rank.first.get("frozen_param_fragments", dict).get(name)
    held = [rank.own[name]] if name in rank.own else []
    held += [(rank.first, fragment)] if isinstance(fragment, StoredTensor) else []
    odd = next((value for _, value in held if value.shape != shape), None)
    if odd is not None or not held:
        what = f"has the shape {odd.shape}, {shape} expected" if odd else "is missing"
        raise Corrupt(
            f"{rank.first.name}: frozen {name} {what}", hint="the file is damaged: fetch it again"
        )
    return tuple(_stored(file, value) for file, value in held)


def _fragments(rank: MpRank, name: str, shape: Shape) -> Copy:
    held = [file.get("frozen_param_fragments", dict).get(name) for file in rank.models]
    if not all(isinstance(fragment, StoredTensor) for fragment in held):
        raise Corrupt(f"{rank.first.name}: frozen {name} has no fragment in some rank's file")
    if len({fragment.dtype for fragment in held}) > 1:
        raise Corrupt(f"{rank.first.name}: frozen {name} has fragments of different element types")
    parts = [file.part(fragment) for file, fragment in zip(rank.models, held, strict=True)]
    return zero_partitions.from_fragments(name, shape, held[0].dtype, parts)


def _others(rank: MpRank, found: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield buffers, and at stage 1 the frozen parameters, which only the model file holds."""
    named = buffer_names(rank.first)
    tied = rank.first.get("shared_params", dict)
    for name, (_, value) in rank.own.items():
        if name in found or name in tied:
            continue
        if rank.stage == 3 and not value.numel and name not in named:
            raise Incomplete(
                f"{rank.first.name}: {name} is an empty placeholder, and no rank holds its values"
            )
        yield rank.own_tensor(name)


def _tied(rank: MpRank, found: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the names of ``shared_params`` that are not stored, tied to the ones that are.

    Where frozen parameters were excluded (Trainer does so with LoRA), names tied to one of them are
    still mentioned, and left out.
    """
    is_subset = rank.first.content.get("frozen_param_shapes") is None
    for name, stored in rank.first.get("shared_params", dict).items():
        is_there = isinstance(stored, str) and stored in found
        if not isinstance(name, str) or not (is_there or (is_subset and isinstance(stored, str))):
            raise Corrupt(
                f"{rank.first.name}: {brief(name)} shares its values with {brief(stored)}, which is"
                " missing"
            )
        if is_there:
            yield replace(found[stored], name=name, tied=stored)
