"""DeepSpeed's universal checkpoints: ``zero/<parameter>/fp32.pt``, one merged master each, beside copies of the model files.

``ds_to_universal`` also writes an ``fp32.pt`` for every other name of the module: the model's own copy, cast to float32, integers
too.  Those say less than the model file itself, and are left out.  Source: ``deepspeed/checkpoint/ds_to_universal.py``, 0.19.8.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats import torch_pickle, torch_save
from ckptsync.formats.pickles import Build, Name, brief, made
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts.names import join
from ckptsync.layouts.zero_files import (
    MODEL,
    MODEL_OF_RANK,
    Once,
    Setup,
    StateFile,
    buffers,
    check_agreement,
    configuration,
    load,
    of_rank,
    parallel,
    section,
)
from ckptsync.layouts.zero_rank import Rank, expert_counts, groups_of, own_of, tensors_of
from ckptsync.layouts.zero_tensor_parallel import replica
from ckptsync.model import Copy, Extent, Files, Shape, Tensor

NAME = "universal"
_FILE = "fp32.pt"
_MIXED_UP = "ds_to_universal mixes up the masters of a training with round_robin_gradients"
_ALLOWED: Mapping[Name, Build] = {
    **torch_pickle.ALLOWED,
    Name("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"): made,
}


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return the directories with ``zero/<parameter>/fp32.pt`` in them."""
    parts = (name.rsplit("/", 3) for name in names if name.endswith(f"/{_FILE}"))
    return tuple(sorted({p[0] if p[3:] else "" for p in parts if p[-3:-2] == ["zero"] and len(p) > 2}))


def holds_weights(root: str) -> bool:
    """Return True: every one does."""
    return root is not None


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return the model files that it was made from, and the file of every parameter that they name."""
    _, names = _setup(files, root)
    model = load(files, names[0])
    trained = [name for shapes in groups_of(model) or () for name in shapes]
    return dict.fromkeys([*names, *(_path(root, name) for name in trained)])


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return parameters with their merged masters, and from the model files what else there is."""
    files = Once(files)
    what, names = _setup(files, root)
    models = [load(files, name) for name in names]
    check_agreement(what, models, [])
    _check_is_all_there(root, models)
    if what.mp > 1 or models[0].content.get("module") is None:
        return _merged(files, root, models)
    trained = {name: shape for shapes in groups_of(models[0]) or () for name, shape in shapes.items()}
    rank = Rank(files, what.stage, models, [], own_of(models[0]))
    if _is_mixed_up(models[0]):
        absent = join(root, "zero, converted without round_robin_gradients")
        found = tensors_of(replace(rank, absent=absent), trained, {})
        return (replace(found[0], remark=f"{_MIXED_UP}: the weights are the model's own, not the fp32 masters"), *found[1:])
    return tensors_of(rank, trained, {name: _master(files, root, name, shape) for name, shape in trained.items()})


def _is_mixed_up(model: StateFile) -> bool:
    """Return whether the conversion mixed up masters, because parameters were dealt out to several ranks.

    ``ds_to_universal`` cuts by ``param_slice_mappings``, and with round-robin gradients masters lie elsewhere.
    """
    zero = section(configuration(model), "zero_optimization")
    return zero.get("round_robin_gradients") is True and zero.get("stage") in {1, 2} and model.content.get("dp_world_size") != 1


def _path(root: str, name: str) -> str:
    return join(root, f"zero/{name}/{_FILE}")


def _setup(files: Files, root: str) -> tuple[Setup, list[str]]:
    """Return what the model files say, and their names; of stage 3 there is one a rank."""
    plain, ranked = of_rank(files.sizes(), root, MODEL), of_rank(files.sizes(), root, MODEL_OF_RANK)
    there = plain or ranked
    if not there:
        name = join(root, "mp_rank_00_model_states.pt")
        raise Incomplete(f"{name}: not there, nor any rank's: ds_to_universal copies it last", hint="was the conversion finished?")
    model = load(files, there[min(there)])
    world = model.content.get("dp_world_size")
    if type(world) is not int or not 0 < world < 1 << 20:
        raise Corrupt(f"{model.name}: no dp_world_size")
    what = Setup(1 if plain else 3, world, "", parallel(model))
    wanted = [name for mp in range(what.mp) for name in what.models(files.sizes(), root, mp)]
    missing = next((name for name in wanted if name not in files.sizes()), None)
    if missing:
        raise Incomplete(f"{missing}: not there", hint="was the conversion finished, and copied whole?")
    return what, wanted


def _check_is_all_there(root: str, models: Sequence[StateFile]) -> None:
    if expert_counts(models[0]):
        raise Unsupported(
            f"{root or '.'}: a universal checkpoint of a model with experts, which ds_to_universal leaves out",
            hint="merge the checkpoint that it was made from",
        )
    if models[0].content.get("module") is None:
        lost = [name for model in models for name in model.get("buffer_names", list)]
        if lost:
            raise Incomplete(
                f"{root or '.'}: {len(lost)} buffers of a pipeline, such as {brief(lost[0])}, are in no file",
                hint="ds_to_universal leaves the layers' files behind: merge the checkpoint that it was made from",
            )


def _merged(files: Files, root: str, models: Sequence[StateFile]) -> tuple[Tensor, ...]:
    """Return the tensors of tensor-parallel ranks and pipeline stages: only the masters are whole; of what else there is, nothing may be lost."""
    if _is_mixed_up(models[0]):
        raise Unsupported(f"{root or '.'}: {_MIXED_UP}", hint="merge the checkpoint that it was made from")
    own_dtype = _own_dtype(models[0])
    trained: dict[str, Shape] = {}
    for model in models:
        for shapes in groups_of(model) or ():
            trained |= shapes
    others = _others(files, root, models, {*trained, *_tied_names(models)})
    found = {name: Tensor(name, own_dtype, c.grid, (c,)) for name in trained for c in [_master(files, root, name, None)]}
    tied = {k: v for model in models for k, v in model.get("shared_params", dict).items() if isinstance(v, str) and v in found}
    return (*found.values(), *others, *(replace(found[stored], name=name, tied=stored) for name, stored in tied.items()))


def _others(files: Files, root: str, models: Sequence[StateFile], known: set[str]) -> list[Tensor]:
    """Return buffers, which all tensor-parallel ranks have alike."""
    owns = [own_of(model) for model in models]
    named = buffers(models[0])
    odd = sorted(
        name for own in owns for name in own if name not in known and (name not in named or not all(name in o for o in owns))
    )
    if odd:
        raise Unsupported(
            f"{root or '.'}: {odd[0]} is not trained, and ds_to_universal does not join it over tensor-parallel ranks",
            hint="merge the checkpoint that it was made from",
        )
    ranks = [Rank(files, 1, [model], [], own) for model, own in zip(models, owns, strict=True)]
    names = [name for name in owns[0] if name not in known]
    return [replica([_plain(rank, name) for rank in ranks]) for name in names]


def _plain(rank: Rank, name: str) -> Tensor:
    _, value = rank.own[name]
    return Tensor(name, value.dtype, value.shape, rank.own_copies(name, value.shape))


def _tied_names(models: Sequence[StateFile]) -> set[str]:
    return {name for model in models for name in model.get("shared_params", dict)}


def _own_dtype(model: StateFile) -> str:
    """Return what the model trains in, by DeepSpeed's configuration."""
    config = configuration(model)
    if (section(config, "bf16") or section(config, "bfloat16")).get("enabled") is True:
        return "BF16"
    return "F16" if section(config, "fp16").get("enabled") is True else "F32"


def _master(files: Files, root: str, name: str, shape: Shape | None) -> Copy:
    """Return one merged master: a tensor, flat at stage 3, or a dictionary with one.  ``shape`` is what it must be, where it is known."""
    path = _path(root, name)
    if path not in files.sizes():
        raise Incomplete(f"{path}: not there", hint="was the conversion finished, and copied whole?")
    value, archive = torch_save.load(files, Extent(path, 0, files.sizes()[path]), _ALLOWED)
    is_cut = isinstance(value, dict) and value.get("vocab_tensor") is True
    held: Any = value.get("param") if isinstance(value, dict) else value
    if not isinstance(held, Stored):
        raise Corrupt(f"{path}: no tensor in it")
    if shape is not None and (held.shape not in (shape, (prod(shape),)) or is_cut):
        raise Corrupt(f"{path}: a tensor of shape {held.shape}, {shape} expected")
    return Copy(held.dtype, held.shape, (torch_save.part(files, archive, held),) if held.numel else ())
