"""The weights of a DeepSpeed save: what its model-parallel ranks hold, joined.

Source: ``deepspeed/utils/zero_to_fp32.py``, which this follows, and where that drops weights
(frozen ones at stage 1) or aborts (tied ones), the files themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.layouts import zero_pipeline
from ckptsync.layouts.zero_agreement import check_agreement, refuse_offloaded, why_unlike
from ckptsync.layouts.zero_experts import expert_weights
from ckptsync.layouts.zero_files import (
    MODEL_OF_RANK,
    OPTIM,
    ZeroFiles,
    ZeroSetup,
    expert_counts,
    param_shapes,
    read_setup,
    section,
    trained_shapes,
)
from ckptsync.layouts.zero_mp_rank import MpRank, own_tensors, rank_tensors
from ckptsync.layouts.zero_tensor_parallel import join_ranks
from ckptsync.tensors import Tensor


def read_weights(files: ZeroFiles) -> tuple[Tensor, ...]:
    """Return parameters, buffers and tied names, each with all its stored copies.

    Where optimizer files of stages 1 and 2 are not here, the model's own copies are what there is,
    and a remark says so: a model file holds all parameters, and whoever wants masters gets an error
    that names the missing file.
    """
    setup = read_setup(files)
    optim = setup.all_optimizer_files(files) if setup.stage == 3 else []
    files.require([*setup.all_model_files(files), *optim])
    ranks = [_read_rank(files, setup, mp) for mp in range(setup.mp)]
    models = [file for rank in ranks for file in rank.models]
    check_agreement(setup, models, [rank.optim for rank in ranks])
    refuse_offloaded(files, models[0])
    found, remarks = _join(files, ranks)
    if not found:
        raise Unsupported(f"{files.root or '.'}: a DeepSpeed checkpoint without weights")
    reason = why_unlike(models[0])
    if reason:
        found = tuple(replace(tensor, unlike=reason) for tensor in found)
    remarks += [reason, *_remarks(files, setup, ranks)]
    return (replace(found[0], remark="; ".join(filter(None, remarks))), *found[1:])


def _read_rank(files: ZeroFiles, setup: ZeroSetup, mp: int) -> MpRank:
    models = [files.load(name) for name in setup.model_files(files, mp)]
    names = setup.optimizer_files(files, mp)
    absent = next((name for name in names if name not in files.sizes), "")
    if not absent and setup.stage and param_shapes(models[0]) is None:
        # of models with experts, saved by DeepSpeed 0.16; slices do not give the order of elements
        absent = f"param_shapes of {models[0].name}"
    optim = [files.load(name) for name in names if name in files.sizes]
    return MpRank(setup.stage, models, optim, own_tensors(models[0]), absent)


def _join(files: ZeroFiles, ranks: Sequence[MpRank]) -> tuple[tuple[Tensor, ...], list[str]]:
    """Return the tensors of all model-parallel ranks, and remarks on them."""
    first = ranks[0].first
    counts = expert_counts(first)
    is_pipeline = bool(files.layer_files())
    kinds = [
        counts is not None,
        is_pipeline,
        len(ranks) > 1 and not is_pipeline,
        ranks[0].stage == 3 and counts is not None,
    ]
    if sum(kinds) > 1:
        raise Unsupported(
            f"{files.root or '.'}: expert, pipeline and tensor parallel ranks in one checkpoint, or"
            " experts of ZeRO-3, cannot be joined yet"
        )
    if files.has_experts() and counts is None:
        raise Corrupt(
            f"{first.name}: lists no experts, but there are files of experts",
            hint="they are of different saves",
        )
    if is_pipeline:
        return _join_stages(files, ranks)
    if counts is not None:
        own = {**ranks[0].own, **expert_weights(files, counts)}
        return rank_tensors(replace(ranks[0], own=own)), []
    if len(ranks) > 1:
        return join_ranks([rank_tensors(rank) for rank in ranks], first), []
    return rank_tensors(ranks[0]), []


def _join_stages(files: ZeroFiles, ranks: Sequence[MpRank]) -> tuple[tuple[Tensor, ...], list[str]]:
    """Return all stages' tensors; those of a tied module are in several, and are written once."""
    if any(rank.own for rank in ranks):
        raise Corrupt(
            f"{files.root or '.'}: a model file with weights beside files of layers",
            hint="the files are of different saves",
        )
    own = zero_pipeline.layer_weights(files, [rank.first for rank in ranks])
    found: dict[str, Tensor] = {}
    for rank in reversed(ranks):  # the first stage's copies win
        held = replace(rank, own={name: own[name] for name in trained_shapes(rank.first)})
        found |= {tensor.name: tensor for tensor in rank_tensors(held)}
    rest = replace(ranks[0], own=own)
    tensors = [found.pop(name) if name in found else rest.own_tensor(name) for name in own]
    names = "the names are those of DeepSpeed's PipelineModule: numbers of layers, and tied_modules"
    return (*tensors, *found.values()), [names, zero_pipeline.missing_layers(files)]


def _remarks(files: ZeroFiles, setup: ZeroSetup, ranks: Sequence[MpRank]) -> list[str]:
    """Return remarks on masters that are not read, and on what is left out."""
    first, found = ranks[0].first, []
    absent = [rank.absent for rank in ranks if rank.absent]
    if absent:
        found.append(
            f"{absent[0]} is missing, and others may be too: the merge uses the model's own"
            " weights, not the optimizer's fp32 masters"
        )
    optimizer = section(first.content, "optimizer")
    if setup.stage == 0 and ("fp32_groups_flat" in optimizer or "fp32_groups" in optimizer):
        # DeepSpeed's fp16 optimizers without ZeRO keep them flat, in an order that no file gives
        found.append(
            "the optimizer's fp32 masters have no names: the merge uses the model's own weights"
        )
    if setup.stage > 1 and first.content.get("frozen_param_shapes", {}) is None:
        # ``save_checkpoint(exclude_frozen_parameters=True)`` leaves None where stages 2 and 3 list
        # them (``engine.py``, 0.19.8)
        found.append(
            "the save left out frozen parameters, if there were any; the merge cannot write them"
        )
    there = {**files.by_rank(OPTIM), **(files.by_rank(MODEL_OF_RANK) if setup.stage == 3 else {})}
    extra = sorted(name for (_, rank), name in there.items() if rank >= setup.world)
    if extra:
        found.append(
            f"{extra[0]} is of a rank that this save of {setup.world} ranks did not have, and is"
            " left out"
        )
    return found
