"""DeepSpeed's universal checkpoints: one merged master for each parameter.

The masters are whole already, in ``zero/<parameter>/fp32.pt``; buffers and tied names are in the
copies of the model files beside them. ``ds_to_universal`` also writes an ``fp32.pt`` for every
other name of the module: the model's own copy, cast to float32, integers too. Those lose what the
model file has, and are left out.

Source: ``deepspeed/checkpoint/ds_to_universal.py``, 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ckptsync.errors import Corrupt, Incomplete, Unsupported, name_in_errors
from ckptsync.formats import torch_pickle, torch_save
from ckptsync.formats.pickles import Build, Name, brief, made
from ckptsync.formats.torch_pickle import plain_tensor
from ckptsync.layouts.file_names import join
from ckptsync.layouts.zero import MpRank, own_tensors, tensors_of
from ckptsync.layouts.zero_files import (
    UNIVERSAL,
    StateFile,
    ZeroFiles,
    buffer_names,
    check_agreement,
    configuration,
    expert_counts,
    section,
    trained_dtype,
    trained_shapes,
    universal_roots,
)
from ckptsync.layouts.zero_tensor_parallel import equal_buffer
from ckptsync.tensors import Copy, Extent, Files, Shape, Tensor

_MIXED_UP = "ds_to_universal mixes up the masters of a training with round_robin_gradients"
_MERGE_SOURCE = "merge the checkpoint that it was made from"
_ALLOWED: Mapping[Name, Build] = torch_pickle.Names(
    {
        **torch_pickle.ALLOWED,
        Name("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"): made,
    }
)

roots = universal_roots


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Load the model files; return them and each trained parameter's file, without their sizes.

    Raise Incomplete if a model file is missing, Corrupt or Unsupported for its content.
    """
    zero = ZeroFiles(files, root)
    models = zero.all_model_files()
    zero.require(models)
    trained = [name for model in models for name in trained_shapes(zero.load(model))]
    return dict.fromkeys([*models, *(_master_file(root, name) for name in trained)])


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return parameters with their merged masters, and buffers and tied names of the model files.

    If the conversion mixed up the masters, a model of one rank has its own copies alone, and a
    remark. Raise Incomplete for a missing file, Corrupt if files disagree, Unsupported for experts,
    or as `_joined`.
    """
    zero = ZeroFiles(files, root)
    setup, names = zero.setup, zero.all_model_files()
    zero.require(names)
    models = [zero.load(name) for name in names]
    check_agreement(setup, models, [])
    _check_complete(zero.root, models)
    if setup.mp > 1 or models[0].content.get("module") is None:
        return _joined(zero, models)
    rank = MpRank(setup.stage, models, [], own_tensors(models[0]))
    trained = trained_shapes(models[0])
    if not _are_mixed_up(models[0]):
        masters = {n: _master(zero, n, shape) for n, shape in trained.items()}
        return tensors_of(rank, trained, masters)
    absent = join(zero.root, "zero, converted without round_robin_gradients")
    first, *later_tensors = tensors_of(replace(rank, absent=absent), trained, {})
    remark = f"{_MIXED_UP}: the weights are the model's own, not the fp32 masters"
    return replace(first, remark=remark), *later_tensors


def _are_mixed_up(model: StateFile) -> bool:
    """Return whether the conversion mixed up masters.

    It does if parameters were dealt out to several ranks: ``ds_to_universal`` cuts by
    ``param_slice_mappings``, and with round-robin gradients the masters lie elsewhere.
    """
    zero = section(configuration(model), "zero_optimization")
    return (
        zero.get("round_robin_gradients") is True
        and zero.get("stage") in {1, 2}
        and model.content.get("dp_world_size") != 1
    )


def _check_complete(root: str, models: Sequence[StateFile]) -> None:
    """Raise Unsupported for experts; Incomplete if a file names buffers and has no ``module``.

    Then it is a pipeline's, and no file holds the buffers. Experts are those of the first file.
    """
    if expert_counts(models[0]):
        raise Unsupported(
            f"{root or '.'}: a universal checkpoint of a model with experts, which ds_to_universal"
            " leaves out",
            hint=_MERGE_SOURCE,
        )
    if models[0].content.get("module") is None:
        lost = [name for model in models for name in model.get("buffer_names", list)]
        if lost:
            raise Incomplete(
                f"{root or '.'}: {len(lost)} buffers of a pipeline, such as {brief(lost[0])}, are"
                " in no file",
                hint=f"ds_to_universal leaves the layers' files behind: {_MERGE_SOURCE}",
            )


def _joined(zero: ZeroFiles, models: Sequence[StateFile]) -> tuple[Tensor, ...]:
    """Return all ranks' and stages' tensors: parameters with masters alone, buffers, tied names.

    A name that is tied to an untrained tensor is left out. Raise Unsupported if masters are mixed
    up, or as `_buffers`; Incomplete or Corrupt as `_master`.
    """
    if _are_mixed_up(models[0]):
        raise Unsupported(f"{zero.root or '.'}: {_MIXED_UP}", hint=_MERGE_SOURCE)
    dtype = trained_dtype(models[0])
    tied = {k: v for model in models for k, v in model.get("shared_params", dict).items()}
    by_name: dict[str, Tensor] = {}
    for name in (name for model in models for name in trained_shapes(model)):
        if name not in by_name:
            copy = _master(zero, name, None)
            by_name[name] = Tensor(name, dtype, copy.grid, (copy,))
    buffers = _buffers(zero.root, models, {*by_name, *tied})
    names = {k: v for k, v in tied.items() if isinstance(v, str) and v in by_name}
    return (
        *by_name.values(),
        *buffers,
        *(replace(by_name[stored], name=name, tied=stored) for name, stored in names.items()),
    )


def _buffers(root: str, models: Sequence[StateFile], parameters: set[str]) -> list[Tensor]:
    """Return rank 0's tensors that are not among ``parameters``: the buffers.

    Raise Unsupported for any other tensor, or for a buffer that a rank lacks or has differently.
    """
    ranks = [MpRank(1, [model], [], own_tensors(model)) for model in models]
    names_of_buffers = buffer_names(models[0])
    unjoinable = sorted(
        name
        for rank in ranks
        for name in rank.own
        if name not in parameters
        and (name not in names_of_buffers or any(name not in r.own for r in ranks))
    )
    if unjoinable:
        raise Unsupported(
            f"{root or '.'}: {unjoinable[0]} is not trained, and ds_to_universal does not join it"
            " over tensor-parallel ranks",
            hint=_MERGE_SOURCE,
        )
    names = [name for name in ranks[0].own if name not in parameters]
    return [equal_buffer([rank.own_tensor(name) for rank in ranks]) for name in names]


def _master(zero: ZeroFiles, name: str, shape: Shape | None) -> Copy:
    """Return one merged master: the tensor in its file, or under ``param`` of a dictionary there.

    Its grid is the stored shape; ``shape``: of the parameter, None to accept any. Raise Incomplete
    if the file is missing, Corrupt if it holds another tensor, or a vocabulary that was padded,
    where ``shape`` is given.
    """
    path = _master_file(zero.root, name)
    if path not in zero.sizes:
        raise Incomplete(
            f"{path}: not found",
            hint="run ds_to_universal again, to its end, and copy all of its files",
        )
    extent = Extent(path, 0, zero.sizes[path])
    value, archive = torch_save.load(zero.files, extent, _ALLOWED)
    is_cut = isinstance(value, dict) and value.get("vocab_tensor") is True
    with name_in_errors(path):
        tensor = plain_tensor(value.get("param") if isinstance(value, dict) else value)
    if tensor is None:
        raise Corrupt(f"{path}: no tensor in it")
    if shape is not None and (tensor.shape not in (shape, (prod(shape),)) or is_cut):
        raise Corrupt(f"{path}: a tensor of shape {tensor.shape}, {shape} expected")
    part = (torch_save.part(zero.files, archive, tensor),) if tensor.numel else ()
    return Copy(tensor.dtype, tensor.shape, part)


def _master_file(root: str, parameter: str) -> str:
    """Return the name of a parameter's master file."""
    return join(root, f"zero/{parameter}/{UNIVERSAL}")
