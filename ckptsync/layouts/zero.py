"""DeepSpeed ZeRO-1, 2 and 3: fp32 masters cut over the ranks, and what the model file holds beside them.

Stages 1 and 2 flatten each parameter group and cut it into one partition a rank; stage 3 cuts every parameter into ``ceil(numel / W)``
elements a rank, padded, in flat groups.  Source: ``deepspeed/utils/zero_to_fp32.py``, which this follows, and where that drops weights
(frozen ones at stage 1) or aborts (tied ones), the files themselves.  Experts, pipelines and tensor-parallel ranks: the modules
``zero_experts``, ``zero_pipeline`` and ``zero_tensor_parallel``; checkpoints in the universal format: ``universal``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import universal, zero_agreement, zero_experts, zero_pipeline, zero_tensor_parallel, zero_trained
from ckptsync.layouts.names import inside
from ckptsync.layouts.zero_files import MODEL_OF_RANK, OPTIM, Once, Setup, is_ours, load, of_rank, section, setup
from ckptsync.layouts.zero_rank import Rank, groups_of, own_of, tensors_of
from ckptsync.model import Files, Tensor, read_whole

NAME = "zero"


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Directories (DeepSpeed calls them tags) that hold ZeRO files, and not a universal checkpoint with copies of some."""
    others = set(universal.roots(names))
    return tuple(sorted({name.rpartition("/")[0] for name in names if is_ours(name.rpartition("/")[2])} - others))


def holds_weights(root: str) -> bool:
    """Always."""
    return root is not None


def demands(files: Files, root: str) -> dict[str, int | None]:
    """The files of every rank, and of every expert and layer; only the ranks themselves know their sizes.

    Raises Incomplete if nothing here says how many ranks there are.
    """
    files = Once(files)
    what = setup(files, root)
    wanted = [n for mp in range(what.mp) for n in (*what.models(files.sizes(), root, mp), *what.optim(root, mp))]
    if zero_experts.is_there(files, root) and wanted[0] in files.sizes():
        experts = zero_experts.counts(load(files, wanted[0]))
        wanted += zero_experts.names(root, experts) if experts is not None else []
    if zero_pipeline.is_there(files, root):
        stages = [load(files, name) for name in wanted if name in files.sizes() and name.endswith("model_states.pt")]
        told = [key for stage in stages for key in zero_pipeline.told(stage, [])]
        wanted += [*zero_pipeline.names(files, root), *zero_pipeline.wanted(root, told)]
    return dict.fromkeys(wanted)


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Parameters, buffers and tied names, each with all its stored copies.

    Where optimizer files of stages 1 and 2 are not here, the model's own copies are what there is, and it is said: a model file
    holds all parameters, and whoever asks for masters is told which file is missing.
    """
    files = Once(files)
    what = setup(files, root)
    _check_here(files, root, what)
    ranks = [_rank(files, root, what, mp) for mp in range(what.mp)]
    models = [file for rank in ranks for file in rank.models]
    zero_agreement.check(what, models, [rank.optim for rank in ranks])
    zero_agreement.refuse_what_is_elsewhere(files.sizes(), root, models)
    found, remarks = _joined(files, root, ranks)
    if not found:
        raise Unsupported(f"{root or '.'}: a DeepSpeed checkpoint without weights")
    unlike = zero_agreement.unlike(models[0])
    if unlike:
        found = tuple(replace(tensor, unlike=unlike) for tensor in found)
    told = "; ".join(
        filter(
            None,
            [
                *remarks,
                unlike,
                _absent(ranks),
                _nameless(ranks[0]),
                zero_trained.unordered(ranks[0]),
                _excluded(ranks[0]),
                _stale(files, root, what),
            ],
        )
    )
    return (replace(found[0], remark=told), *found[1:])


def world(files: Files, root: str) -> int:
    """How many data-parallel ranks wrote it."""
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


def _joined(files: Files, root: str, ranks: Sequence[Rank]) -> tuple[tuple[Tensor, ...], list[str]]:
    """The tensors of all model-parallel ranks, and what is to be said of them."""
    first = ranks[0].first
    experts = zero_experts.counts(first)
    is_pipeline = zero_pipeline.is_there(files, root)
    if (experts is not None) + is_pipeline + (len(ranks) > 1 and not is_pipeline) + (
        ranks[0].stage == 3 and experts is not None
    ) > 1:
        raise Unsupported(
            f"{root or '.'}: expert, pipeline and tensor parallel ranks in one checkpoint, or experts of ZeRO-3, cannot be joined yet"
        )
    if zero_experts.is_there(files, root) and experts is None:
        raise Corrupt(f"{first.name}: tells of no experts, and there are files of experts", hint="they are of different saves")
    if is_pipeline:
        return _pipeline(files, root, ranks)
    if experts is not None:
        own = {**ranks[0].own, **zero_experts.weights(files, root, experts)}
        return _plain(replace(ranks[0], own=own)), []
    if len(ranks) > 1:
        return zero_tensor_parallel.joined([_plain(rank) for rank in ranks], first), []
    return _plain(ranks[0]), []


def _plain(rank: Rank) -> tuple[Tensor, ...]:
    """One model-parallel rank's tensors; of experts, all ranks'."""
    groups = zero_trained.groups(rank)
    masters = zero_trained.masters(rank, groups)
    told = replace(rank, absent="param_shapes of the trained parameters") if zero_trained.unordered(rank) else rank
    return tensors_of(told, zero_trained.shapes(rank, groups), masters)


def _pipeline(files: Files, root: str, ranks: Sequence[Rank]) -> tuple[tuple[Tensor, ...], list[str]]:
    """All stages' tensors; those of a tied module are in several, and are written once."""
    if any(rank.own for rank in ranks):
        raise Corrupt(f"{root or '.'}: a model file with weights beside files of layers", hint="the files are of different saves")
    absent = next((rank.absent for rank in ranks if rank.absent and groups_of(rank.first) is None), "")
    if absent:
        raise Incomplete(f"{absent}: not there; it names parameters of its stage, which nothing else does")
    told = {name: shape for rank in ranks for name, shape in zero_pipeline.told(rank.first, rank.optim).items()}
    buffers = [name for rank in ranks for name in rank.first.get("buffer_names", list) if isinstance(name, str)]
    own = zero_pipeline.weights(files, root, told, buffers, [rank.first for rank in ranks])
    found: dict[str, Tensor] = {}
    for rank in ranks:
        held = replace(rank, own={name: own[name] for name in zero_pipeline.told(rank.first, rank.optim)})
        found = {**{t.name: t for t in _plain(held)}, **found}
    rest = replace(ranks[0], own={name: value for name, value in own.items() if name not in found})
    everything = (*found.values(), *tensors_of(rest, {}, {}))
    order = {name: n for n, name in enumerate(own)}
    return tuple(sorted(everything, key=lambda t: order[t.name])), [zero_pipeline.REMARK, zero_pipeline.gaps(files, root)]


def _absent(ranks: Sequence[Rank]) -> str:
    missing = [rank.absent for rank in ranks if rank.absent]
    if not missing:
        return ""
    return f"{missing[0]} is not here, nor may others be: the weights are the model's own, not the optimizer's fp32 masters"


def _nameless(rank: Rank) -> str:
    """Masters of DeepSpeed's fp16 optimizers without ZeRO: flat, in an order that no file tells."""
    optimizer = section(rank.first.content, "optimizer")
    has_masters = rank.stage == 0 and ("fp32_groups_flat" in optimizer or "fp32_groups" in optimizer)
    return "the optimizer's fp32 masters have no names, and are not read: the weights are the model's own" if has_masters else ""


def _excluded(rank: Rank) -> str:
    """``save_checkpoint(exclude_frozen_parameters=True)`` leaves None where stages 2 and 3 list what is frozen (``engine.py``, 0.19.8)."""
    is_left_out = rank.stage > 1 and rank.first.content.get("frozen_param_shapes", {}) is None
    return "frozen parameters, if there were any, were left out when this was saved, and are not written" if is_left_out else ""


def _stale(files: Files, root: str, what: Setup) -> str:
    """Files of ranks that this save did not have: a larger one left them behind."""
    there = {**of_rank(files.sizes(), root, OPTIM), **(of_rank(files.sizes(), root, MODEL_OF_RANK) if what.stage == 3 else {})}
    extra = sorted(name for (_, rank), name in there.items() if rank >= what.world)
    return f"{extra[0]} is of a rank that this save of {what.world} ranks did not have, and is left out" if extra else ""


def preferred(files: Files, found: tuple[str, ...]) -> str | None:
    """The tag that ``latest`` names, if it is among ``found``; the only one; else ``None``."""
    if len(found) == 1:
        return found[0]
    for root in found:
        parent, _, tag = root.rpartition("/")
        pointer = inside(files.sizes(), parent).get("latest")
        if pointer and read_whole(files, pointer, 4096).decode("utf-8", "replace").strip() == tag:
            return root
    return None
