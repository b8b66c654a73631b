"""DeepSpeed ZeRO-1, 2 and 3: fp32 masters cut over the ranks, and what the model file holds beside them.

Source: ``deepspeed/utils/zero_to_fp32.py``, which this follows, and where that drops weights (frozen ones at stage 1) or aborts
(tied ones), the files themselves. In reading order: `zero_files` (names, content, agreement), `zero_masters` (where elements lie),
`zero_rank` (the tensors of one rank, experts included), `zero_pipeline`, `zero_tensor_parallel`. Checkpoints in the universal
format: `universal`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import universal, zero_pipeline, zero_tensor_parallel
from ckptsync.layouts.names import inside
from ckptsync.layouts.zero_files import (
    MODEL_OF_RANK,
    OPTIM,
    Once,
    Setup,
    check_agreement,
    is_ours,
    load,
    of_rank,
    refuse_what_is_elsewhere,
    section,
    setup,
    unlike,
)
from ckptsync.layouts.zero_rank import (
    Rank,
    expert_counts,
    expert_names,
    expert_weights,
    groups_of,
    has_experts,
    own_of,
    rank_tensors,
    tensors_of,
    unordered,
)
from ckptsync.model import Files, Tensor, read_whole

NAME = "zero"


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return the directories (DeepSpeed calls them tags) that hold ZeRO files, and not a universal checkpoint with copies of some."""
    others = set(universal.roots(names))
    return tuple(sorted({name.rpartition("/")[0] for name in names if is_ours(name.rpartition("/")[2])} - others))


def holds_weights(root: str) -> bool:
    """Return True: every one does."""
    return root is not None


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return the files of every rank, and of every expert and layer; only the ranks themselves know their sizes.

    Raises Incomplete if nothing here says how many ranks there are.
    """
    files = Once(files)
    what = setup(files, root)
    wanted = [n for mp in range(what.mp) for n in (*what.models(files.sizes(), root, mp), *what.optim(root, mp))]
    if has_experts(files, root) and wanted[0] in files.sizes():
        counts = expert_counts(load(files, wanted[0]))
        wanted += expert_names(root, counts) if counts is not None else []
    if zero_pipeline.is_there(files, root):
        stages = [load(files, name) for name in wanted if name in files.sizes() and name.endswith("model_states.pt")]
        parameters = [name for stage in stages for name in zero_pipeline.parameters(stage, [])]
        wanted += [*zero_pipeline.names(files, root), *zero_pipeline.wanted(root, parameters)]
    return dict.fromkeys(wanted)


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return parameters, buffers and tied names, each with all its stored copies.

    Where optimizer files of stages 1 and 2 are not here, the model's own copies are what there is, and a remark says so: a model
    file holds all parameters, and whoever wants masters gets an error that names the missing file.
    """
    files = Once(files)
    what = setup(files, root)
    _check_here(files, root, what)
    ranks = [_rank(files, root, what, mp) for mp in range(what.mp)]
    models = [file for rank in ranks for file in rank.models]
    check_agreement(what, models, [rank.optim for rank in ranks])
    refuse_what_is_elsewhere(files.sizes(), root, models)
    found, remarks = _join(files, root, ranks)
    if not found:
        raise Unsupported(f"{root or '.'}: a DeepSpeed checkpoint without weights")
    reason = unlike(models[0])
    if reason:
        found = tuple(replace(tensor, unlike=reason) for tensor in found)
    remarks += [reason, *_remarks(files, root, what, ranks)]
    return (replace(found[0], remark="; ".join(filter(None, remarks))), *found[1:])


def world(files: Files, root: str) -> int:
    """Return how many data-parallel ranks wrote it."""
    return setup(files, root).world


def _check_here(files: Files, root: str, what: Setup) -> None:
    """Raise Incomplete for model files that are missing, and at stage 3 for optimizer files, before any is read."""
    wanted = [n for mp in range(what.mp) for n in what.models(files.sizes(), root, mp)]
    wanted += [n for mp in range(what.mp) for n in (what.optim(root, mp) if what.stage == 3 else ())]
    missing = [name for name in wanted if name not in files.sizes()]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise Incomplete(
            f"{missing[0]}{more}: not there, of {len(wanted)} files that the checkpoint needs",
            hint="each node writes its own ranks' files: add the directory of the node that ran this rank",
        )


def _rank(files: Files, root: str, what: Setup, mp: int) -> Rank:
    models = [load(files, name) for name in what.models(files.sizes(), root, mp)]
    absent = next((name for name in what.optim(root, mp) if name not in files.sizes()), "")
    optim = [load(files, name) for name in what.optim(root, mp) if name in files.sizes()]
    return Rank(files, what.stage, models, optim, own_of(models[0]), absent)


def _join(files: Files, root: str, ranks: Sequence[Rank]) -> tuple[tuple[Tensor, ...], list[str]]:
    """Return the tensors of all model-parallel ranks, and remarks on them."""
    first = ranks[0].first
    counts = expert_counts(first)
    is_pipeline = zero_pipeline.is_there(files, root)
    kinds = [counts is not None, is_pipeline, len(ranks) > 1 and not is_pipeline, ranks[0].stage == 3 and counts is not None]
    if sum(kinds) > 1:
        raise Unsupported(
            f"{root or '.'}: expert, pipeline and tensor parallel ranks in one checkpoint, or experts of ZeRO-3, cannot be joined yet"
        )
    if has_experts(files, root) and counts is None:
        raise Corrupt(f"{first.name}: tells of no experts, and there are files of experts", hint="they are of different saves")
    if is_pipeline:
        return _join_pipeline(files, root, ranks)
    if counts is not None:
        own = {**ranks[0].own, **expert_weights(files, root, counts)}
        return rank_tensors(replace(ranks[0], own=own)), []
    if len(ranks) > 1:
        return zero_tensor_parallel.joined([rank_tensors(rank) for rank in ranks], first), []
    return rank_tensors(ranks[0]), []


def _join_pipeline(files: Files, root: str, ranks: Sequence[Rank]) -> tuple[tuple[Tensor, ...], list[str]]:
    """Return all stages' tensors; those of a tied module are in several, and are written once."""
    if any(rank.own for rank in ranks):
        raise Corrupt(f"{root or '.'}: a model file with weights beside files of layers", hint="the files are of different saves")
    absent = next((rank.absent for rank in ranks if rank.absent and groups_of(rank.first) is None), "")
    if absent:
        raise Incomplete(f"{absent}: not there; it names parameters of its stage, which nothing else does")
    stages = [zero_pipeline.parameters(rank.first, rank.optim) for rank in ranks]
    parameters = {name: shape for stage in stages for name, shape in stage.items()}
    own = zero_pipeline.weights(files, root, parameters, [rank.first for rank in ranks])
    found: dict[str, Tensor] = {}
    for rank, stage in zip(ranks, stages, strict=True):
        held = replace(rank, own={name: own[name] for name in stage})
        found = {**{t.name: t for t in rank_tensors(held)}, **found}
    rest = replace(ranks[0], own={name: value for name, value in own.items() if name not in found})
    everything = (*found.values(), *tensors_of(rest, {}, {}))
    order = {name: n for n, name in enumerate(own)}
    return tuple(sorted(everything, key=lambda t: order[t.name])), [zero_pipeline.REMARK, zero_pipeline.gaps(files, root)]


def _remarks(files: Files, root: str, what: Setup, ranks: Sequence[Rank]) -> list[str]:
    """Return what whoever merges it should know: which masters are not read, and what is left out."""
    first, found = ranks[0], [unordered(ranks[0])]
    absent = [rank.absent for rank in ranks if rank.absent]
    if absent:
        found.append(
            f"{absent[0]} is not here, nor may others be: the weights are the model's own, not the optimizer's fp32 masters"
        )
    optimizer = section(first.first.content, "optimizer")
    if first.stage == 0 and ("fp32_groups_flat" in optimizer or "fp32_groups" in optimizer):
        # DeepSpeed's fp16 optimizers without ZeRO keep them flat, in an order that no file gives
        found.append("the optimizer's fp32 masters have no names, and are not read: the weights are the model's own")
    if first.stage > 1 and first.first.content.get("frozen_param_shapes", {}) is None:
        # ``save_checkpoint(exclude_frozen_parameters=True)`` leaves None where stages 2 and 3 list them (``engine.py``, 0.19.8)
        found.append("frozen parameters, if there were any, were left out when this was saved, and are not written")
    there = {**of_rank(files.sizes(), root, OPTIM), **(of_rank(files.sizes(), root, MODEL_OF_RANK) if what.stage == 3 else {})}
    extra = sorted(name for (_, rank), name in there.items() if rank >= what.world)
    if extra:
        found.append(f"{extra[0]} is of a rank that this save of {what.world} ranks did not have, and is left out")
    return found


def preferred(files: Files, found: tuple[str, ...]) -> str | None:
    """Return the tag that ``latest`` names, if it is among ``found``; the only one; else None."""
    if len(found) == 1:
        return found[0]
    for root in found:
        parent, _, tag = root.rpartition("/")
        pointer = inside(files.sizes(), parent).get("latest")
        if pointer and read_whole(files, pointer, 4096).decode("utf-8", "replace").strip() == tag:
            return root
    return None
